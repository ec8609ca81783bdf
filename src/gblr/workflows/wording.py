"""Words for lines that people read."""


def counted(num: float, what: str) -> str:
    """
    >>> counted(1, "layer"), counted(18, "layer"), counted(0.5, "epoch")
    ('1 layer', '18 layers', '0.5 epochs')
    """
    return f"{num:g} {what}" + ("" if num == 1 else "s")
