"""The application that commands hang on, and what all of them share."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="gblr",
    help="Make neural networks cheaper by learning where each weight matrix needs its parameters.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for scripts.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]
Folder = Annotated[Path, typer.Argument(help="Folder of a run, or of gblr.save_pretrained.", show_default=False)]


def example(text: str) -> str:
    """Below the help of a command: something that works when pasted."""
    return f"[bold]Example:[/] {text}"
