"""A vision transformer of transformers, from a config alone, for 32 x 32 images; no weights are downloaded.

    gblr train python:examples.models.vit_from_config:vit --data cifar10:DIR --epochs 3 --out runs/vit-dense
    gblr compress runs/vit-dense --data cifar10:DIR --cost 0.3 --train 2 --out runs/vit-small

The same pattern serves any model that you can build: a function without arguments that returns it.
"""

from transformers import ViTConfig, ViTForImageClassification


def vit() -> ViTForImageClassification:
    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=192, num_hidden_layers=6, num_attention_heads=3, intermediate_size=768,
        num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config)
