"""The report page: one HTML file made from run records, which fetches nothing and runs no script but its own."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

from gblr.reports.markup import join, tag
from gblr.reports.payload import payload
from gblr.reports.record import Record, write_whole
from gblr.reports.runs import number_runs
from gblr.reports.sections import Section, sections
from gblr.reports.summary import header

ASSETS = files("gblr.reports") / "assets"
SCRIPTS = ("base", "axes", "lines", "points", "curves", "layers", "masks", "dialog", "page")  # in order of use


def render_page(records: Sequence[Record]) -> str:
    """The page of one run, or of several side by side."""
    if not records:
        raise ValueError("a page needs at least one record; got none")
    runs = number_runs(records)
    found = sections(runs)
    script = _script()
    return Template(_asset("page.html")).substitute(
        title=join(records[0].title if len(records) == 1 else f"{len(records)} runs compared"),
        policy=_policy(script),
        style=_asset("page.css"),
        nav=_nav(found),
        header=header(runs),
        sections=join(*(section.html() for section in found)),
        data=_as_script_text(payload(runs)),
        script=script,
    )


def write_page(records: Sequence[Record], path: str | Path) -> Path:
    """Writes the page, complete or not at all, and returns where it is."""
    path = Path(path)
    write_whole(path, render_page(records))
    return path


def _nav(found: Sequence[Section]) -> str:
    return tag("nav", *(tag("a", section.short, href=f"#{section.id}") for section in found), aria_label="Sections")


def _script() -> str:
    """All scripts as one, in a scope of its own."""
    parts = "\n".join(_asset(f"js/{name}.js") for name in SCRIPTS)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _policy(script: str) -> str:
    """What a browser allows the page: this very script, inline styles, and no connection to anywhere."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:"


def _as_script_text(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")
