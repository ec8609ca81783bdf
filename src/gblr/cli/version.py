"""`gblr --version`: what is installed, and what it can use here."""

from typing import Annotated

import typer

from gblr.cli import show
from gblr.cli.app import app


def _print_version(wanted: bool) -> None:
    if not wanted:
        return
    import torch

    from gblr.ops.backend import triton_state
    from gblr.workflows.describe import environment
    from gblr.workflows.wording import counted

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = environment(device)
    show.out.print(f"gblr {found['gblr']}, torch {found['torch']}, Python {found['python']}")
    gpu = found["device"] if device.type == "cuda" else "none (torch finds no CUDA device)"
    show.out.print(f"CPU:         {found['cpu']}, {counted(found['threads'], 'thread')}")
    show.out.print(f"CPU kernels: {found['kernels']}\nGPU:         {gpu}")
    show.out.print(f"GPU kernels: {triton_state()}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Versions, devices, kernels.")
    ] = False,
) -> None:
    """Make neural networks cheaper by learning where each weight matrix needs its parameters."""
