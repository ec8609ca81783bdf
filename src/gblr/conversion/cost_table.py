"""The tables that a `Cost` prints."""

import io
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from gblr.conversion.cost import Cost

WIDTH = 120


def tables(cost: "Cost") -> Group:
    """Every layer, every type, then the totals: converted layers and whole model."""
    return Group(*_layers(cost), *_types(cost), *_totals(cost))


def render(renderable: Group) -> str:
    """As plain text, without colour."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def short(number: float) -> str:
    """Three digits and a unit.

    >>> short(589824), short(12), short(2.5)
    ('590 K', '12', '2.5')
    """
    for unit in ("", " K", " M", " G", " T"):
        if abs(number) < 999.5:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.0f} P"


def _table(left: tuple[str, ...], right: tuple[str, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _heading(text: str) -> Text:
    """Above the table, not its title, which would be folded at the width of the table."""
    return Text(text, style="bold")


def _layers(cost: "Cost") -> tuple[Text, Table]:
    title = f"Layers: multiplications per sample (batch of {cost.batch_size} measured), parameters"
    if not cost.measured:
        title = "Layers: multiplications of one product (no example inputs: positions count 1), parameters"
    columns = ("posi-\ntions", "dense\nmults", "mults\nnow", "rela-\ntive", "dense\nparams", "params\nnow")
    table = _table(("layer", "type", "form"), columns)
    for layer in cost.layers:
        numbers = (short(n) for n in (layer.positions, layer.dense_mults, layer.num_mults))
        params = (short(n) for n in (layer.dense_params, layer.num_params))
        relative = f"{layer.relative_cost:.3f}" if layer.converted else "dense"
        table.add_row(layer.name or "(model)", layer.type, layer.form, *numbers, relative, *params)
    return _heading(title), table


def _types(cost: "Cost") -> tuple[Text, Table]:
    columns = ("layers", "min", "max", "mean", "dense", "relative (by positions)")
    table = _table(("type",), columns)
    for group in cost.by_type().values():
        products = (group.min_product, group.max_product, group.mean_product, group.dense_product)
        row = (group.type, str(group.num_layers), *(short(n) for n in products))
        table.add_row(*row, f"{group.relative_cost:.3f}")
    return _heading("Types: multiplications of one product"), table


def _totals(cost: "Cost") -> tuple[Text, Table]:
    unit = "per sample" if cost.measured else "one product per layer, attention not counted: no example inputs"
    columns = ("dense mults", "mults now", "relative", "dense params", "params now")
    table = _table(("of",), columns)

    def add(name: str, dense: int, now: int, params: tuple[int, int] | None) -> None:
        relative = f"{now / dense:.3f}" if dense else ""
        table.add_row(name, short(dense), short(now), relative, *(short(n) for n in params or ()))

    converted = cost.converted
    if converted:
        sizes = (cost.converted_dense_params, cost.converted_params)
        add(f"converted layers ({len(converted)})", cost.converted_dense_mults, cost.converted_mults, sizes)
    dense = sum(layer.num_mults for layer in cost.layers if not layer.converted)
    add(f"dense layers ({len(cost.layers) - len(converted)})", dense, dense, None)
    if cost.measured:
        add("attention products", cost.attention_mults, cost.attention_mults, None)
        if cost.other_mults:
            add("products outside layers", cost.other_mults, cost.other_mults, None)
    add("whole model", cost.dense_mults, cost.num_mults, (cost.dense_params, cost.num_params))
    return _heading(f"Totals: multiplications {unit}"), table
