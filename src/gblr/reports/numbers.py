"""Numbers as a reader wants them: three digits, a unit, a thin space between."""

import math

from gblr.reports.record import Metric

THIN = "\u202f"  # a narrow space that does not break
MINUS = "\u2212"
NONE = "\u2013"
_STEPS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def digits(value: float, count: int = 3) -> str:
    """`count` significant digits, never an exponent between 1e-4 and 1e6.

    >>> digits(0.012345), digits(98.76), digits(1234.5)
    ('0.0123', '98.8', '1234')
    """
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else NONE
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.{count - 1}e}".replace("-", MINUS)
    places = max(0, count - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{places}f}".replace("-", MINUS)


def percent(fraction: float | None, places: int = 1) -> str:
    """
    >>> percent(0.2).replace(THIN, " "), percent(0.00321).replace(THIN, " ")
    ('20.0 %', '0.32 %')
    """
    if fraction is None:
        return NONE
    return f"{fraction * 100:.{places if abs(fraction) >= 0.01 or fraction == 0 else places + 1}f}{THIN}%"


def count(number: float | None) -> str:
    """
    >>> count(85_798_656).replace(THIN, " "), count(768)
    ('85.8 M', '768')
    """
    if number is None:
        return NONE
    scale, suffix = next((step for step in _STEPS if abs(number) >= step[0]), (1.0, ""))
    return f"{digits(number / scale)}{THIN}{suffix}" if suffix else f"{number:.0f}"


def size(num_bytes: float | None) -> str:
    """
    >>> size(1_310_000).replace(THIN, " ")
    '1.31 MB'
    """
    if num_bytes is None:
        return NONE
    shown = count(num_bytes)
    return f"{shown}B" if shown[-1].isalpha() else f"{shown}{THIN}B"


def duration(seconds: float | None) -> str:
    """
    >>> [duration(s).replace(THIN, " ") for s in (12e-6, 0.00123, 2.5, 134, 3790)]
    ['12.0 \u00b5s', '1.23 ms', '2.50 s', '2 min 14 s', '1 h 3 min']
    """
    if seconds is None:
        return NONE
    if seconds < 60:
        scale, unit = next((step for step in ((1.0, "s"), (1e-3, "ms")) if seconds >= step[0]), (1e-6, "\u00b5s"))
        return f"{digits(seconds / scale)}{THIN}{unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}{THIN}min {rest}{THIN}s"
    return f"{minutes // 60}{THIN}h {minutes % 60}{THIN}min"


def factor(ratio: float | None) -> str:
    """
    >>> factor(2.437)
    '2.4\u00d7'
    """
    return NONE if ratio is None else f"{digits(ratio, 2)}\u00d7"


def metric_value(value: float | None, metric: Metric) -> str:
    if value is None:
        return NONE
    shown = f"{value:.2f}" if metric.unit == "%" else digits(value, 4)
    return f"{shown}{THIN}{metric.unit}".rstrip(THIN)


def metric_change(value: float, dense: float, metric: Metric) -> str:
    """Against dense, with its sign, and whether that is better; percentages differ by points.

    >>> metric_change(97.5, 98.0, Metric("accuracy", "%")).replace(THIN, " ")
    '\u22120.50 points'
    """
    change = value - dense
    shown = f"{abs(change):.2f}" if metric.unit == "%" else digits(abs(change), 3)
    if shown in ("0", "0.00"):
        return "same as dense"
    unit = "points" if metric.unit == "%" else metric.unit
    return f"{'+' if change > 0 else MINUS}{shown}{THIN}{unit}".rstrip(THIN)
