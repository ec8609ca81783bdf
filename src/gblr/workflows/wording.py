"""Words for lines that people read."""


def counted(num: float, what: str) -> str:
    """
    >>> counted(1, "layer"), counted(18, "layer"), counted(0.5, "epoch")
    ('1 layer', '18 layers', '0.5 epochs')
    """
    return f"{num:g} {what}" + ("" if num == 1 else "s")


def milliseconds(seconds: float | None) -> str:
    """
    >>> milliseconds(0.0000934), milliseconds(0.0278), milliseconds(1.994), milliseconds(None)
    ('0.0934', '27.8', '1,994', '')
    """
    if seconds is None:
        return ""
    return f"{seconds * 1e3:.3g}" if seconds < 0.9995 else f"{seconds * 1e3:,.0f}"
