"""`gblr export`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from gblr.cli import show
from gblr.cli.app import AsJson, Debug, Folder, app, example


@app.command(epilog=example("gblr export runs/try --format onnx --out runs/try/model.onnx"))
def export(
    folder: Folder,
    format: Annotated[
        str, typer.Option(help="onnx (plain operators) or torch (torch.export, needs gblr to run).")
    ] = "onnx",
    out: Annotated[Path | None, typer.Option(help="File; model.onnx or model.pt2 in the folder if not given.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write a compressed model to a file that other programs run."""
    from gblr.workflows.exporting import FORMATS, export_folder

    if format not in FORMATS:
        raise typer.BadParameter(f"--format must be one of {', '.join(FORMATS)}; got {format!r}.")
    found: dict[str, Any] = export_folder(folder, format, out)
    if as_json:
        show.as_json(found)
        return
    operators = f", {found['operators']} operators" if "operators" in found else ""
    show.out.print(f"{found['file']}: {show.size(found['bytes'])}{operators}", markup=False, soft_wrap=True)
    for name, shape in found["inputs"].items():
        show.out.print(f"input {name}: {' x '.join(map(str, shape))}", markup=False)
    if found.get("note"):
        show.out.print(f"note: {found['note']}", markup=False, soft_wrap=True)
    if found.get("difference") is not None:
        show.out.print(f"outputs differ from torch's by {found['difference']:.1e} of the largest")
