"""griffe extension: fences the examples of docstrings, which Markdown would take for nested quotations."""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)


def fence(docstring: str) -> str:
    return EXAMPLE.sub(lambda match: f"```pycon\n{match[0]}\n```", docstring)


class DoctestFences(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fence(obj.docstring.value)
