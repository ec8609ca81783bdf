"""`gblr reproduce`."""

import runpy
import sys
from typing import Annotated

import typer

from gblr.cli import show
from gblr.cli.app import Debug, app, example

RECIPES = {
    "cifar10-learning": ("gblr.experiments.cifar10_learning", "structure learned from scratch on CIFAR-10"),
    "cifar10-vit": ("gblr.experiments.cifar10_vit", "vision transformers from scratch, every method (Fig. 5)"),
    "cifar10-mixer": ("gblr.experiments.cifar10_mixer", "MLP-Mixer from scratch, every method (Fig. 5)"),
    "cifar10-finetune": ("gblr.experiments.cifar10_finetune", "a trained ViT, converted and tuned (Fig. 4)"),
    "cifar10-resnet": ("gblr.experiments.cifar10_resnet", "pretrained ResNets, converted and tuned (Table 5)"),
    "cifar10-analysis": ("gblr.experiments.cifar10_analysis", "learned costs, masks, generalization (Tables 2, 3)"),
    "cifar100-vit": ("gblr.experiments.cifar100_vit", "a vision transformer on CIFAR-100 (Fig. 5)"),
    "cifar100-mixer": ("gblr.experiments.cifar100_mixer", "MLP-Mixer on CIFAR-100 (Fig. 5)"),
    "imagenet-vit-scratch": ("gblr.experiments.imagenet_vit_scratch", "ViT-Base on ImageNet (Tables 2 to 4)"),
    "imagenet-vit-finetune": ("gblr.experiments.imagenet_vit_finetune", "ViT-Base, fine-tuned on ImageNet (Fig. 4)"),
    "imagenet-resnet18": ("gblr.experiments.imagenet_resnet18", "ResNet-18 on ImageNet (Table 5)"),
    "smollm2-wikitext": ("gblr.experiments.smollm2_wikitext", "a trained language model, tuned or not (Table 1)"),
    "gpt2-imdb": ("gblr.experiments.gpt2_imdb", "a GPT-2 on film reviews, from scratch and from dense"),
    "minilm-stsb": ("gblr.experiments.minilm_stsb", "a sentence encoder, with and without training"),
    "gpt2-wikitext103": ("gblr.experiments.gpt2_wikitext103", "GPT-2 in the paper's own setting (Table 1)"),
}


@app.command(
    epilog=example("gblr reproduce cifar10-learning --smoke"),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which experiment; without it, all are listed.")] = None,
    debug: Debug = False,
) -> None:
    """Run an experiment of the documentation again; what follows the name goes to it (--smoke, --data DIR, ...)."""
    if name is None:
        for recipe, (_, what) in RECIPES.items():
            show.out.print(f"{recipe}: {what}")
        return
    if name not in RECIPES:
        raise typer.BadParameter(f"unknown experiment {name!r}: there are {', '.join(RECIPES)}.")
    sys.argv = [f"gblr reproduce {name}", *context.args]
    runpy.run_module(RECIPES[name][0], run_name="__main__")
