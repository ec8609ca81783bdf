"""Operators whose gradients have no gradients of their own say so: torch would take them for zero."""

from typing import Any, NoReturn


def refuse_second(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(
        "second derivatives by the parameters of a Gaudi layer are not there. Take both by `torch.func`, which can, or "
        "harden the layer (`gblr.harden_`), for contents; gradients of gradients by a model's inputs work anyway."
    )
