"""`gblr reproduce`."""

import runpy
import sys
from typing import Annotated

import typer

from gblr.cli import show
from gblr.cli.app import Debug, app, example

RECIPES = {
    "cifar10-learning": ("gblr.experiments.cifar10_learning", "structure learned from scratch on CIFAR-10"),
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
