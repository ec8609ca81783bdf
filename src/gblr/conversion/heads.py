"""The output layer of a model by where it stands: its name alone does not tell the `fc` of a ResNet from that of a
block.
"""

from typing import Any

from torch import nn

from gblr.conversion.filters import Filter, NameFilter, is_linear, is_linear_or_conv

_OWN_NAMES = frozenset({"fc", "linear", "logits", "out", "output"})  # of a direct child of the model
_PARENTS = frozenset({"head", "heads", "classifier", "classification_head", "fc", "score"})
_IN_PARENT = frozenset({"fc", "linear", "out_proj"})  # or a number, as in a Sequential


def heads_left_dense(model: nn.Module, where: Filter) -> set[str]:
    """Those that the filter leaves out besides its own names; none if it says by patterns what it wants."""
    return output_heads(model) if isinstance(where, NameFilter) and not where.include else set()


def output_heads(model: nn.Module) -> set[str]:
    """What transformers calls output embeddings; and the last linear layer outside of all lists of blocks, if it, or
    what it is in, has a name that models give to their head: `fc`, `classifier.6`, `head.fc`, `classifier.out_proj`.

    >>> output_heads(nn.ModuleDict({"stem": nn.Linear(8, 8), "fc": nn.Linear(8, 2)}))
    {'fc'}
    """
    names = {module: name for name, module in model.named_modules() if is_linear_or_conv(module)}
    if len(names) < 2:
        return set()  # what else would be converted?
    found = {names[head] for head in [_output_embeddings(model)] if head in names}
    last = next(
        (name for module, name in reversed(names.items()) if is_linear(module) and not _in_list(model, name)), ""
    )
    return found | ({last} if _is_called_head(last) else set())


def _output_embeddings(model: Any) -> Any:
    """Some models of transformers have the method and no such layer, and say so by an error."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None


def _in_list(model: nn.Module, name: str) -> bool:
    parts = name.split(".")[:-1]
    return any(isinstance(model.get_submodule(".".join(parts[: i + 1])), nn.ModuleList) for i in range(len(parts)))


def _is_called_head(name: str) -> bool:
    parent, _, own = name.rpartition(".")
    if not parent:
        return own in _OWN_NAMES
    return parent.rpartition(".")[2] in _PARENTS and (own in _IN_PARENT or own.isdigit())
