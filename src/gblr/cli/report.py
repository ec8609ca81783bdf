"""`gblr report`."""

from pathlib import Path
from typing import Annotated

import typer

from gblr.cli import show
from gblr.cli.app import AsJson, Debug, app, example


@app.command(epilog=example("gblr report runs/try"))
def report(
    folders: Annotated[list[Path], typer.Argument(help="Folders of runs; several are shown side by side.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; report.html in the first folder if not given.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write one page about one or several runs: results, curves, masks, costs. It needs no network."""
    from gblr.reports.page import write_page
    from gblr.reports.record import load_record

    page = write_page([load_record(folder) for folder in folders], out or folders[0] / "report.html")
    show.as_json({"page": str(page), "bytes": page.stat().st_size}) if as_json else show.out.print(f"page: {page}")
