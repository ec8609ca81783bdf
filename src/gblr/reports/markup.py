"""HTML from Python where text is escaped by default: only what `tag` made goes through as it is."""

from html import escape


class Html(str):
    """Markup; any other text is escaped before it enters a page."""


def tag(name: str, *children: str | None, **attributes: str | bool | None) -> Html:
    """An element. `class_` is class, `data_x` is data-x; None and False leave an attribute or a child out.

    >>> tag("a", "x < y", class_="note", href='"#"')
    '<a class="note" href="&quot;#&quot;">x &lt; y</a>'
    """
    inner = join(*children)
    shown = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    return Html(f"<{name}{shown}>{inner}" + ("" if name in _VOID else f"</{name}>"))


def join(*children: str | None) -> Html:
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children if child is not None))


_VOID = {"input", "br", "meta"}


def _attribute(key: str, value: str | bool | None) -> str:
    name = key.removesuffix("_").replace("_", "-")
    if isinstance(value, bool):
        return f" {name}" if value else ""
    return f' {name}="{escape(str(value))}"'
