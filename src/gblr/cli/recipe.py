"""The options of `gblr train` from a file."""

import difflib
import json
import tomllib
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import typer

_WORDS = {str: "a text", float: "a number", int: "a whole number", bool: "true or false"}


def read_recipe(file: Path) -> dict[str, Any]:
    """The options in a TOML or JSON file, by their Python names; what is wrong with it is told with the name."""
    from gblr.workflows.settings import Settings

    hints = {name: hint for name, hint in get_type_hints(Settings).items() if name != "from_scratch"}
    options = _read(file)
    for name, value in options.items():
        if name not in hints:
            near = difflib.get_close_matches(name, hints, 1)
            more = f"did you mean `{near[0]}`?" if near else f"it may have {', '.join(hints)}."
            raise typer.BadParameter(f"{file} has `{name}`, which is no option of a recipe; {more}")
        if not _fits(value, hints[name]):
            got = json.dumps(value, default=str)
            raise typer.BadParameter(f"`{name}` in {file} must be {_kind(hints[name])}; got {got}.")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise typer.BadParameter(f"there is no recipe {file}.")
    kind = "TOML" if file.suffix == ".toml" else "JSON"
    try:
        options = (tomllib if kind == "TOML" else json).loads(file.read_text())
    except ValueError as error:  # of both, and of a file that is no text
        hint = "" if kind == "TOML" or file.suffix == ".json" else " (TOML in files that end in .toml)"
        raise typer.BadParameter(f"{file} is no {kind}{hint}: {error}.") from error
    if not isinstance(options, dict):
        raise typer.BadParameter(f'{file} must have names and values, such as {{"epochs": 3}}.')
    return options


def _fits(value: Any, hint: Any) -> bool:
    if get_origin(hint) is tuple:
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    kinds = get_args(hint) or (hint,)
    return type(value) in kinds or (type(value) is int and float in kinds)


def _kind(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return 'a list of texts, such as ["fc1"]'
    return " or ".join(_WORDS[kind] for kind in get_args(hint) or (hint,) if kind is not NoneType)
