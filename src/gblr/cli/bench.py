"""`gblr bench`."""

from typing import Annotated

import typer

from gblr.cli import show
from gblr.cli.app import AsJson, Debug, Folder, app, example


@app.command(epilog=example("gblr bench runs/try --batch 1 --batch 16"))
def bench(
    folder: Folder,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch size; may be repeated.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads, if not torch's own number.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Time a compressed model against its dense original on this machine, each layer in its fastest form."""
    from gblr.workflows.benching import bench_folder, bench_table

    found = bench_folder(folder, tuple(batch or (1, 8, 64)), threads)
    show.as_json(found) if as_json else show.out.print(bench_table(found))
