"""Which modules of a model are converted: filters `where(module, name) -> bool`."""

import difflib
import fnmatch
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

Filter = Callable[[nn.Module, str], bool]

# Last parts of names that models give to their output layer. Heads are small, and sensitive. Others are known by where
# they stand: heads.py.
_HEADS = frozenset(
    {
        "lm_head",
        "head",
        "head_dist",
        "classifier",
        "classification_head",
        "score",
        "qa_outputs",
        "embed_out",
        "cls_classifier",
        "distillation_classifier",
        "class_labels_classifier",
        "dense_prediction",
        "seq_relationship",
    }
)


@dataclass(frozen=True)
class NameFilter:
    """Modules of some kind whose names match `include` (all, if empty) and not `exclude`.

    A pattern is a shell pattern on the full name ("encoder.layer.*.output.dense"), or a part of it between dots
    ("query" matches "layer.0.query", "attention.self" matches "0.attention.self.query"). One that begins with "^" is
    met at the beginning of a name alone: "^conv1" is the stem of a ResNet, and not "layer1.0.conv1".
    """

    is_kind: Callable[[nn.Module], bool]
    kind: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    def __call__(self, module: nn.Module, name: str) -> bool:
        if not self.is_kind(module) or any(matches(name, pattern) for pattern in self.exclude):
            return False
        if self.include:
            return any(matches(name, pattern) for pattern in self.include)
        return name.split(".")[-1] not in _HEADS

    def unmatched(self, names: Iterable[str]) -> list[str]:
        """A line for every pattern that matches no module, with the nearest names."""
        names = list(names)
        lines = []
        for kind, patterns in (("include", self.include), ("exclude", self.exclude)):
            for pattern in patterns:
                if not any(matches(name, pattern) for name in names):
                    lines.append(f"`{kind}` pattern {pattern!r} matches no module{near_matches(pattern, names)}")
        return lines


def linear_layers(include: Iterable[str] = (), exclude: Iterable[str] = ()) -> NameFilter:
    """Every `nn.Linear` and transformers' `Conv1D`, except output heads (name one in `include` to have it).

    `include` (all, if empty) and `exclude` are patterns: of the whole name (`"*.o_proj"`), or parts of it between dots
    (`"query"`, `"attention.self"`); with `"^"` in front they are met at its beginning alone.

    >>> where = linear_layers(exclude=("lm_head", "*.o_proj"))
    >>> where(torch.nn.Linear(2, 2), "layers.0.q_proj"), where(torch.nn.Linear(2, 2), "layers.0.o_proj")
    (True, False)
    """
    return NameFilter(is_linear, "linear", _patterns("include", include), _patterns("exclude", exclude))


def conv_layers(include: Iterable[str] = (), exclude: Iterable[str] = ()) -> NameFilter:
    """Every `nn.Conv2d`; patterns as for `linear_layers`.

    For both kinds: `lambda m, n: linear_layers()(m, n) or conv_layers()(m, n)`.

    >>> where = conv_layers(exclude=("^conv1",))
    >>> where(nn.Conv2d(3, 8, 3), "conv1"), where(nn.Conv2d(8, 8, 3), "layer1.0.conv1")
    (False, True)
    """
    return NameFilter(is_conv, "convolution", _patterns("include", include), _patterns("exclude", exclude))


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """transformers' Conv1D, a linear layer that stores its weight as in x out; known by its shape, without the
    import.
    """
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_conv(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d)


def is_linear_or_conv(module: nn.Module) -> bool:
    return is_linear(module) or is_conv(module)


def matches(name: str, pattern: str) -> bool:
    if pattern.startswith("^"):
        return fnmatch.fnmatchcase(name, pattern[1:]) or f"{name}.".startswith(f"{pattern[1:]}.")
    return fnmatch.fnmatchcase(name, pattern) or f".{pattern}." in f".{name}."


def near_matches(pattern: str, names: Iterable[str]) -> str:
    """' (did you mean ...?)' with names, or parts of names, that look like the pattern."""
    names, pattern = list(names), pattern.removeprefix("^")
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    close = difflib.get_close_matches(pattern, [*sorted(parts), *names], n=4, cutoff=0.5)
    return f" (near matches: {', '.join(close)})" if close else f" (names look like {', '.join(names[:3])})"


def _patterns(argument: str, patterns: Iterable[str]) -> tuple[str, ...]:
    if isinstance(patterns, str):
        raise ValueError(f"`{argument}` must be a sequence of patterns; did you mean ({patterns!r},)?")
    return tuple(patterns)
