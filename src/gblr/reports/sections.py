"""The sections of a page. A section that has nothing to show is None and is left out."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gblr.reports import summary
from gblr.reports.markup import Html, tag
from gblr.reports.numbers import NONE, count, duration, factor, percent
from gblr.reports.record import Layer, TypeCost
from gblr.reports.runs import Run, type_costs
from gblr.reports.tables import Cell, Column, table

FORMS = ("packed", "factors", "dense")


@dataclass(frozen=True)
class Section:
    id: str
    short: str
    title: str
    lead: str
    body: Html

    def html(self) -> Html:
        head = tag("header", tag("h2", self.title), tag("p", self.lead, class_="lead"))
        return tag("section", head, self.body, id=self.id)


def sections(runs: Sequence[Run]) -> list[Section]:
    makers = (_summary, _runs, _tradeoff, _learning, _layers, _masks, _spectra, _planner, _reproduce)
    return [section for maker in makers if (section := maker(runs)) is not None]


def _chart(id: str, label: str, *controls: Html) -> Html:
    return tag("figure", *controls, tag("div", class_="chart", id=id, data_label=label), class_="panel")


def _summary(runs: Sequence[Run]) -> Section | None:
    if not any(run.record.results for run in runs):
        return None
    lead = "What the compressed model does, against the dense model it came from."
    if not any(run.record.dense for run in runs):
        lead = "What the model does."
    return Section("summary", "Summary", "Summary", lead, summary.cards(runs))


def _runs(runs: Sequence[Run]) -> Section | None:
    if len(runs) < 2:
        return None
    lead = (
        "The same measures for each run. Click a heading to sort; speed-up is the best over the batch sizes measured."
    )
    return Section("runs", "Runs", "Runs", lead, summary.run_table(runs))


def _tradeoff(runs: Sequence[Run]) -> Section | None:
    if not any(run.record.results for run in runs):
        return None
    metric = runs[0].record.metric
    title = f"{summary.capital(metric.name)} against cost"
    lead = "Cost is the number of multiplications in the converted layers, relative to dense."
    plotted = any(r.value is not None and r.relative_cost is not None for run in runs for r in run.record.results)
    chart = _chart("tradeoff-chart", f"Scatter plot: {title}") if plotted else None
    return Section("tradeoff", "Trade-off", title, lead, tag("div", chart, summary.result_table(runs), class_="stack"))


def _learning(runs: Sequence[Run]) -> Section | None:
    if not any(run.record.history.step or run.record.history.value for run in runs):
        return None
    lead = "Point at a curve, or focus it and use the arrow keys, to read all of them at the same step."
    if any(run.record.history.budget for run in runs):
        learned = (
            "Training moves the blocks and cuts their widths until the cost meets the budget; sigma sharpens the masks."
        )
        lead = f"{learned} {lead}"
    return Section("learning", "Learning", "Learning curves", lead, tag("div", id="curves", class_="curves"))


def _layers(runs: Sequence[Run]) -> Section | None:
    if not any(type_costs(run.record) for run in runs):
        return None
    lead = "Every layer gets the cost it needs: multiplications relative to the same layer when dense."
    lead += "" if len(runs) > 1 else " Lines are the means of a type."
    costs = any(layer.relative_cost is not None for run in runs for layer in run.record.layers)
    chart = _chart("layer-chart", "Bar chart: relative cost of each layer, by type") if costs else None
    body = tag("div", chart, tag("h3", "By layer type"), _type_table(runs), _layer_table(runs), class_="stack")
    return Section("layers", "Layers", "Cost by layer", lead, body)


def _type_table(runs: Sequence[Run]) -> Html:
    several = len(runs) > 1
    found = [(run, cost) for run in runs for cost in type_costs(run.record)]
    found = sorted(found, key=lambda pair: _type_order(found).index(pair[1].type))
    top = max((cost.max or 0.0 for _, cost in found), default=0.0) or 1.0
    columns = [Column("Type", False), *([Column("Run", False)] if several else [])]
    columns += [Column("Least"), Column("Mean"), Column("Most"), Column(f"0 to {percent(top, 0)}", False)]
    columns += [Column("Layers"), Column("Dense")]
    first = {cost.type: run for run, cost in reversed(found)}
    rows = [_type_row(run, cost, top, several, first[cost.type] is not run) for run, cost in found]
    return table(columns, rows, "Cost by layer type: least, mean and most over layers")


def _type_order(found: Sequence[tuple[Run, TypeCost]]) -> list[str]:
    return list(dict.fromkeys(cost.type for _, cost in found))


def _type_row(run: Run, cost: TypeCost, top: float, several: bool, again: bool) -> list[Cell]:
    layers = [layer for layer in run.record.layers if layer.type == cost.type and layer.num_mults is not None]
    mults = [layer.num_mults or 0 for layer in layers]
    dense = {layer.dense_mults for layer in layers}
    each = dense.pop() if len(dense) == 1 else None
    few, mean, many = (min(mults), sum(mults) / len(mults), max(mults)) if mults else (None, None, None)
    return [
        Cell(cost.type, again=again),
        *([Cell(run.name)] if several else []),
        *(_cost_cell(share, n) for share, n in ((cost.min, few), (cost.mean, mean), (cost.max, many))),
        Cell(_range(run, cost, top)),
        Cell(str(cost.layers)),
        Cell(count(each)),
    ]


def _cost_cell(share: float | None, mults: float | None) -> Cell:
    return Cell(percent(share), share, note=count(mults) if mults is not None else "")


def _range(run: Run, cost: TypeCost, top: float) -> Html | str:
    """A line from least to most with a dot at the mean."""
    if cost.min is None or cost.mean is None or cost.max is None:
        return NONE
    least, mean, most = (f"{2 + 96 * value / top:.1f}%" for value in (cost.min, cost.mean, cost.max))
    track = tag("line", x1="2%", x2="98%", y1="8", y2="8", class_="track")
    line = tag("line", x1=least, x2=most, y1="8", y2="8", class_="span")
    dot = tag("circle", cx=mean, cy="8", r="4.5")
    return tag("svg", track, line, dot, class_=f"range run{run.index % 6}", height="16", aria_hidden="true")


def _layer_table(runs: Sequence[Run]) -> Html | None:
    several = len(runs) > 1
    rows = [_layer_row(run, layer, several) for run in runs for layer in run.record.layers]
    if not rows:
        return None
    columns = [Column("Layer", False), *([Column("Run", False)] if several else []), Column("Type", False)]
    columns += [Column("Shape"), Column("Blocks"), Column("Live"), Column("Rank"), Column("Multiplications")]
    columns += [Column("Cost"), Column("Error of fit")]
    shown = table(columns, rows, "All layers", sortable=True)
    return tag("details", tag("summary", f"All {len(rows)} layers as a table"), shown)


def _layer_row(run: Run, layer: Layer, several: bool) -> list[Cell]:
    return [
        Cell(tag("code", layer.name)),
        *([Cell(run.name)] if several else []),
        Cell(layer.type),
        Cell(shape_text(layer), layer.shape[0] * layer.shape[1]),
        Cell(_or_dash(layer.num_blocks), layer.num_blocks),
        Cell(_or_dash(layer.live_blocks), layer.live_blocks),
        Cell(_or_dash(layer.rank), layer.rank),
        Cell(count(layer.num_mults), layer.num_mults),
        Cell(percent(layer.relative_cost), layer.relative_cost),
        Cell(NONE if layer.error is None else f"{layer.error:.3f}", layer.error),
    ]


def shape_text(layer: Layer) -> str:
    return f"{layer.shape[0]} \u00d7 {layer.shape[1]}"


def _or_dash(number: int | None) -> str:
    return NONE if number is None else str(number)


def _masks(runs: Sequence[Run]) -> Section | None:
    if not any(layer.blocks for run in runs for layer in run.record.layers):
        return None
    lead = (
        "Each picture is a weight matrix, outputs downwards and inputs across. Colour counts the blocks that overlap; "
        "blank entries cost nothing. Blocks may wrap around an edge. Open a picture to step through its blocks."
    )
    body = tag("div", tag("div", id="mask-controls", class_="controls"), tag("div", id="mask-grid", class_="masks"))
    return Section("masks", "Masks", "Where the blocks are", lead, body)


def _spectra(runs: Sequence[Run]) -> Section | None:
    if not any(layer.singular for run in runs for layer in run.record.layers):
        return None
    lead = (
        "How much of each direction survives. The structured weight may keep more directions than low rank of its cost."
    )
    controls = tag("div", id="spectrum-controls", class_="controls")
    chart = tag("figure", id="spectrum-chart", class_="panel")
    return Section("spectra", "Singular values", "Singular values", lead, tag("div", controls, chart))


def _planner(runs: Sequence[Run]) -> Section | None:
    found = [(run, layer) for run in runs for layer in run.record.layers if layer.form]
    if not found:
        return None
    lead = (
        "A layer can multiply by its blocks (packed), by two thin matrices (factors) or as one dense matrix. "
        "The three were timed on this machine and the fastest was kept."
    )
    notes = [tag("p", *_plan_note(run, len(runs) > 1), class_="plan-note") for run in runs]
    return Section(
        "planner", "Planner", "How each layer runs", lead, tag("div", *notes, _plan_table(found, len(runs) > 1))
    )


def _plan_note(run: Run, several: bool) -> list[str]:
    """How often each form was chosen, and what that takes in all."""
    layers = [layer for layer in run.record.layers if layer.form]
    chosen = Counter(layer.form or "" for layer in layers)
    parts = ", ".join(f"{form} for {number}" for form, number in chosen.most_common())
    text = f"Of {len(layers)} layers: {parts}."
    timed = [layer for layer in layers if layer.form in layer.form_seconds and "dense" in layer.form_seconds]
    if timed:
        ours = sum(layer.form_seconds[layer.form or ""] for layer in timed)
        dense = sum(layer.form_seconds["dense"] for layer in timed)
        text += f" They take {duration(ours)} together"
        text += f"; all dense would take {duration(dense)}." if ours < dense else "."
    return [run.name, " ", text] if several else [text]


def _plan_table(found: Sequence[tuple[Run, Layer]], several: bool) -> Html:
    timed = {form for _, layer in found for form in layer.form_seconds}
    forms = [*(form for form in FORMS if form in timed), *sorted(timed - set(FORMS))]
    columns = [Column("Layer", False), *([Column("Run", False)] if several else []), Column("Shape"), Column("Cost")]
    columns += [Column("Chosen", False), *(Column(summary.capital(form)) for form in forms), Column("Against dense")]
    rows = [_plan_row(run, layer, forms, several) for run, layer in found]
    shown = table(columns, rows, "Form of each layer and times of all forms", sortable=True)
    short = len(rows) <= 12
    return tag("details", tag("summary", f"Times of all {len(rows)} layers"), shown, open=short)


def _plan_row(run: Run, layer: Layer, forms: Sequence[str], several: bool) -> list[Cell]:
    times = layer.form_seconds
    ours, dense = times.get(layer.form or ""), times.get("dense")
    gain = dense / ours if dense and ours else None
    return [
        Cell(tag("code", layer.name)),
        *([Cell(run.name)] if several else []),
        Cell(shape_text(layer), layer.shape[0] * layer.shape[1]),
        Cell(percent(layer.relative_cost), layer.relative_cost),
        Cell(layer.form or NONE),
        *(Cell(duration(times.get(form)), times.get(form), strong=form == layer.form) for form in forms),
        Cell(factor(gain), gain),
    ]


def _reproduce(runs: Sequence[Run]) -> Section | None:
    if not any(run.record.command or run.record.environment for run in runs):
        return None
    lead = "The command and the versions that gave these numbers. Times are of the machine named below."
    return Section("reproduce", "Reproduce", "How to reproduce", lead, summary.reproduce(runs))
