"""Tiny random models of transformers with a tokenizer of a few words, written as Hugging Face writes them."""

import random
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

WORDS = ("the a cat dog bird sees chases likes big small red old house tree and or not very here there").split()
_BERT = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
_BERT |= {"vocab_size": 32, "max_position_embeddings": 40, "initializer_range": 0.3}
_VIT = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
_VIT |= {"image_size": 8, "patch_size": 4}


def sentence(rng: random.Random, length: int = 8) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(length))


def sentences(num: int, seed: int = 0) -> list[str]:
    """Of 3 to 12 words."""
    rng = random.Random(seed)
    return [sentence(rng, rng.randint(3, 12)) for _ in range(num)]


def tokenizer(marks: bool) -> Any:
    """Words to numbers; with `marks`, [CLS] and [SEP] around a text."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[END]"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if marks:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
        )
    names = {"pad_token": "[PAD]"} if marks else {"eos_token": "[END]"}
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", **names)


def write(folder: Path, model: Any, tokenizer: Any | None = None) -> str:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return str(folder)


def write_encoder(folder: Path, with_tokenizer: bool = True) -> str:
    torch.manual_seed(0)
    return write(folder, BertModel(BertConfig(**_BERT)), tokenizer(marks=True) if with_tokenizer else None)


def write_text_classifier(folder: Path, num_labels: int = 2) -> str:
    torch.manual_seed(0)
    return write(
        folder, BertForSequenceClassification(BertConfig(**_BERT, num_labels=num_labels)), tokenizer(marks=True)
    )


def write_language_model(folder: Path, with_tokenizer: bool = True) -> str:
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=32)
    return write(folder, GPT2LMHeadModel(config), tokenizer(marks=False) if with_tokenizer else None)


def write_image_classifier(folder: Path, num_labels: int = 3, **config: Any) -> str:
    torch.manual_seed(0)
    return write(folder, ViTForImageClassification(ViTConfig(**_VIT, num_labels=num_labels, **config)))


def write_image_encoder(folder: Path) -> str:
    torch.manual_seed(0)
    return write(folder, ViTModel(ViTConfig(**_VIT)))
