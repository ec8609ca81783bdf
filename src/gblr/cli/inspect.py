"""`gblr inspect`."""

from gblr.cli import show
from gblr.cli.app import AsJson, Debug, Folder, app, example


@app.command(epilog=example("gblr inspect runs/try"))
def inspect(folder: Folder, as_json: AsJson = False, debug: Debug = False) -> None:
    """Show the layers of a converted model: shape, blocks, rank, cost, widths; then totals by layer type."""
    from gblr.workflows.inspection import inspect_folder, layer_table, type_table

    found = inspect_folder(folder)
    if as_json:
        show.as_json(found)
        return
    if not found["layers"]:
        show.out.print(f"{found['folder']}: {found['architecture']} is dense, no layer is converted", markup=False)
        return
    show.out.print(layer_table(found))
    show.out.print(type_table(found))
