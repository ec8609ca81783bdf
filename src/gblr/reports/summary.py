"""The head of a page: what was run, cards with the outcome, and a table that compares runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from gblr.reports.markup import Html, join, tag
from gblr.reports.numbers import NONE, count, duration, factor, metric_change, metric_value, percent, size
from gblr.reports.record import Record, Result
from gblr.reports.runs import Run, speedups
from gblr.reports.tables import Cell, Column, table


@dataclass(frozen=True)
class Entry:
    """One run's line of a card: the number, and what it is compared with."""

    value: str
    notes: Sequence[str]


def header(runs: Sequence[Run]) -> Html:
    several = len(runs) > 1
    kicker = f"Comparison of {len(runs)} runs" if several else "Run report"
    title = "Runs side by side" if several else runs[0].record.title
    machines = [" \u00b7 ".join(_machine(run.record)) for run in runs]
    # one machine for all runs is named once, at the end
    shown = machines if len(set(machines)) > 1 else [""] * (len(runs) - 1) + machines[-1:]
    boxes = [_run_box(run, machine, several) for run, machine in zip(runs, shown, strict=True)]
    return tag("header", tag("p", kicker, class_="kicker"), tag("h1", title), *boxes, class_="hero")


def _run_box(run: Run, machine: str, several: bool) -> Html:
    record = run.record
    name = tag("h2", run.name, class_="run-title") if several else None
    facts = " \u00b7 ".join(_facts(record))
    return tag(
        "div",
        name,
        tag("p", facts, class_="facts") if facts else None,
        command_box(record.command) if record.command else None,
        tag("p", machine, class_="facts small") if machine else None,
        class_="run-box",
    )


def command_box(command: str) -> Html:
    code = tag("code", command, tabindex="0")
    copy = tag("button", "Copy", type="button", class_="copy", data_copy=command, aria_label="Copy the command")
    return tag("div", tag("span", "$", class_="prompt", aria_hidden="true"), code, copy, class_="command")


def _facts(record: Record) -> list[str]:
    model = record.model.get("architecture") or record.model.get("source", "")
    data = record.data.get("what") or record.data.get("source", "")
    compressed = record.cost is not None and record.method != "dense"
    asked = f"{record.method} at {percent(record.cost, 0)} of the cost" if compressed else record.method
    took = f"took {duration(record.seconds)}" if record.seconds is not None else ""
    return [text for text in (model, data, asked, shown_time(record.created), took) if text]


def _machine(record: Record) -> list[str]:
    names = {"gblr": "gblr {}", "torch": "torch {}", "python": "Python {}", "platform": "{}", "cpu": "{}"}
    names |= {"device": "device {}", "kernels": "kernels: {}", "threads": "threads: {}"}
    found = [shown.format(record.environment[key]) for key, shown in names.items() if key in record.environment]
    return list(dict.fromkeys(found))


def shown_time(created: str) -> str:
    """
    >>> shown_time("2025-11-15T15:05:12+00:00")
    '15 November 2025, 15:05 UTC'
    """
    try:
        moment = datetime.fromisoformat(created)
    except ValueError:
        return created
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname() or ''}".rstrip()


def cards(runs: Sequence[Run]) -> Html:
    kinds = [
        (_metric_title(runs), _metric_entry),
        ("Cost of converted layers", _cost_entry),
        ("Parameters", _params_entry),
        ("File size", _size_entry),
        ("Measured speed-up", _speed_entry),
    ]
    made = [_card(title, [(run, entry(run.record)) for run in runs]) for title, entry in kinds]
    return tag("div", *made, class_="cards")


def _card(title: str, entries: Sequence[tuple[Run, Entry | None]]) -> Html | None:
    found = [(run, entry) for run, entry in entries if entry is not None]
    if not found:
        return None
    heading = tag("h3", title)
    if len(entries) == 1:
        entry = found[0][1]
        notes = (tag("p", note, class_="note") for note in entry.notes)
        return tag("article", heading, tag("p", entry.value, class_="value"), *notes, class_="card")
    rows = [tag("li", run.name, tag("b", entry.value), _notes(entry)) for run, entry in found]
    return tag("article", heading, tag("ul", *rows, class_="plain"), class_="card several")


def _notes(entry: Entry) -> Html:
    return tag("small", " \u00b7 ".join(entry.notes))


def _metric_title(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(run.record.metric.name for run in runs)
    return capital(" / ".join(names))


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _metric_entry(record: Record) -> Entry | None:
    main, dense = record.main, record.dense
    if main is None or main.value is None:
        return None
    if dense is None or dense.value is None:
        return Entry(metric_value(main.value, record.metric), [])
    change = metric_change(main.value, dense.value, record.metric)
    against = f"dense {metric_value(dense.value, record.metric)}"
    return Entry(metric_value(main.value, record.metric), [change, against])


def _cost_entry(record: Record) -> Entry | None:
    main = record.main
    if main is None or main.relative_cost is None:
        return None
    notes = ["of the multiplications of dense"] if record.cost is None else [f"asked for {percent(record.cost)}"]
    if main.dense:
        notes = ["nothing is converted"]
    elif main.model_relative_cost is not None:
        notes.append(f"{percent(main.model_relative_cost)} of the whole model")
    return Entry(percent(main.relative_cost), notes)


def _params_entry(record: Record) -> Entry | None:
    main = record.main
    if main is None or main.num_params is None:
        return None
    dense = record.dense.num_params if record.dense else None if main.dense else main.dense_params
    return Entry(count(main.num_params), _smaller(dense, main.num_params, "fewer", count))


def _size_entry(record: Record) -> Entry | None:
    main, dense = record.main, record.dense
    if main is None or main.file_bytes is None:
        return None
    return Entry(size(main.file_bytes), _smaller(dense.file_bytes if dense else None, main.file_bytes, "smaller", size))


def _smaller(dense: int | None, ours: int, word: str, shown: object) -> list[str]:
    if not dense or not ours or not callable(shown):
        return []
    return [f"{factor(dense / ours)} {word}", f"dense {shown(dense)}"]


def _speed_entry(record: Record) -> Entry | None:
    ratios = speedups(record)
    if not ratios:
        return None
    low, high = (factor(bound(ratios.values())) for bound in (min, max))
    notes = [_speed_note(record, batch, ratio) for batch, ratio in ratios.items()]
    slower = ["slower than dense here"] if max(ratios.values()) < 1 else []
    return Entry(low if low == high else f"{low[:-1]}\u2013{high}", slower + notes)


def _speed_note(record: Record, batch: int, ratio: float) -> str:
    assert record.main is not None
    return f"batch {timed_batch(record, batch)}: {duration(record.main.seconds_per_batch[batch])} ({factor(ratio)})"


def timed_batch(record: Record, batch: int) -> str:
    """
    >>> timed_batch(Record("of texts", timed_lengths={8: 40}), 8), timed_batch(Record("of images"), 8)
    ('8 \u00d7 40 tokens', '8')
    """
    length = record.timed_lengths.get(batch)
    return str(batch) if length is None else f"{batch} \u00d7 {length} tokens"


def _timed_batches(runs: Sequence[Run], batch: int) -> str:
    """With the length of the texts, if it is the same in all runs that timed this size."""
    timed = [run.record for run in runs if any(batch in result.seconds_per_batch for result in run.record.results)]
    names = {timed_batch(record, batch) for record in timed}
    return names.pop() if len(names) == 1 else str(batch)


def run_table(runs: Sequence[Run]) -> Html:
    """One row a run."""
    columns = [Column("Run", False), Column("Method", False), Column("Cost asked")]
    columns += [Column("Cost reached"), Column(_metric_title(runs)), Column("Against dense")]
    columns += [Column("Parameters"), Column("File"), Column("Speed-up"), Column("Took")]
    return table(columns, [_run_row(run) for run in runs], "Runs side by side", sortable=True)


def _run_row(run: Run) -> list[Cell]:
    record, main = run.record, run.record.main or Result("")
    speed = max(speedups(record).values(), default=None)
    dense = record.dense.value if record.dense else None
    against = main.value - dense if main.value is not None and dense is not None else None
    change = NONE if dense is None or main.value is None else metric_change(main.value, dense, record.metric)
    return [
        Cell(run.name),
        Cell(record.method or NONE),
        Cell(percent(record.cost), record.cost),
        Cell(percent(main.relative_cost), main.relative_cost),
        Cell(metric_value(main.value, record.metric), main.value, strong=True),
        Cell(change, against),
        Cell(count(main.num_params), main.num_params),
        Cell(size(main.file_bytes), main.file_bytes),
        Cell(factor(speed), speed),
        Cell(duration(record.seconds), record.seconds),
    ]


def result_table(runs: Sequence[Run]) -> Html:
    """Every measured model: this run's, dense, baselines."""
    several = len(runs) > 1
    batches = sorted({batch for run in runs for result in run.record.results for batch in result.seconds_per_batch})
    columns = [Column("Run", False)] if several else []
    columns += [Column("Model", False), Column(_metric_title(runs)), Column("Cost of layers"), Column("Whole model")]
    columns += [Column("Parameters"), Column("File")]
    columns += [Column(f"Time, batch {_timed_batches(runs, batch)}") for batch in batches]
    rows = [_result_row(run, result, batches, several) for run in runs for result in run.record.results]
    return table(columns, rows, "Measured models", sortable=True)


def _result_row(run: Run, result: Result, batches: Sequence[int], several: bool) -> list[Cell]:
    times = [result.seconds_per_batch.get(batch) for batch in batches]
    return [
        *([Cell(run.name)] if several else []),
        Cell(result.name, strong=result.main),
        Cell(metric_value(result.value, run.record.metric), result.value, strong=result.main),
        Cell(percent(result.relative_cost), result.relative_cost),
        Cell(percent(result.model_relative_cost), result.model_relative_cost),
        Cell(count(result.num_params), result.num_params),
        Cell(size(result.file_bytes), result.file_bytes),
        *(Cell(duration(time), time) for time in times),
    ]


def reproduce(runs: Sequence[Run]) -> Html:
    return join(*(_reproduce_one(run, len(runs) > 1) for run in runs))


def _reproduce_one(run: Run, several: bool) -> Html:
    record = run.record
    groups = {"Environment": record.environment, "Model": record.model, "Data": record.data}
    lists = [_facts_list(title, facts) for title, facts in groups.items() if facts]
    return tag(
        "div",
        tag("h3", run.name) if several else None,
        command_box(record.command) if record.command else None,
        tag("div", *lists, class_="fact-lists"),
        class_="reproduce",
    )


def _facts_list(title: str, facts: object) -> Html:
    assert hasattr(facts, "items")
    rows = [join(tag("dt", key), tag("dd", str(value))) for key, value in facts.items()]
    return tag("div", tag("h4", title), tag("dl", *rows))
