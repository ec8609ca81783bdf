"""Input checks at the public border. Shapes are always checked; values only where reading them is free of side
effects.
"""

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

_tracing_state = torch._C._get_tracing_state
_num_modes = torch._C._len_torch_dispatch_stack
_innermost_transform = torch._C._functorch.peek_interpreter_stack


def can_read_values(*tensors: Tensor) -> bool:
    """True in plain eager code; False under `torch.compile`, `torch.func` transforms, graph capture, fake or meta
    tensors.
    """
    if torch.compiler.is_compiling():
        return False
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    # torch has no public name for "is this inside vmap or grad"; this one has been stable since 2.0.
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return not any(t.is_meta or is_wrapped(t) or isinstance(t, torch._subclasses.FakeTensor) for t in tensors)


def is_plain_eager() -> bool:
    """Neither `torch.compile`, `torch.jit.trace`, a `torch.func` transform, forward-mode differentiation nor a mode
    (fake tensors, counters) looks at what is called.
    """
    # torch has no public names for most of them; these have been stable since 2.0
    return (
        not torch.compiler.is_compiling()
        and _tracing_state() is None  # of torch.jit.trace
        and not _num_modes()
        and _innermost_transform() is None
        and forward_ad._current_level < 0
    )


def check_length(length: int) -> None:
    if length < 1:
        raise ValueError(f"`length` must be at least 1; got {length}.")


def check_sigma(sigma: float | Tensor) -> float:
    """Returns `sigma` as a float in (0, inf]."""
    value = float(sigma)
    if not value > 0:
        raise ValueError(f"`sigma` must be above 0 (`math.inf` means no smoothing); got {value}.")
    return value


def check_structure(width: Tensor, location: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Broadcasts `width` and `location` against each other; raises ValueError for whatever no mask can be made of."""
    check_length(length)
    for name, value in (("width", width), ("location", location)):
        if value.is_complex() or value.dtype == torch.bool:
            raise ValueError(f"`{name}` must have a real or integer dtype; got {value.dtype}.")
    # Compared here, as under `torch.compile` an error of `broadcast_tensors` cannot be caught.
    if any(w != l and 1 not in (w, l) for w, l in zip(width.shape[::-1], location.shape[::-1], strict=False)):
        raise ValueError(
            f"`width` and `location` must have the same shape; got {tuple(width.shape)} and {tuple(location.shape)}."
        )
    width, location = torch.broadcast_tensors(width, location)
    if width.numel() and can_read_values(width, location):
        _check_width_values(width, length)
        if not bool(location.isfinite().all()):
            raise ValueError("`location` must be finite; it holds NaN or infinity.")
    return width, location


def _check_width_values(width: Tensor, length: int) -> None:
    low, high = (float(bound) for bound in width.detach().aminmax())
    if math.isnan(low) or math.isnan(high):
        raise ValueError(f"`width` must lie in [0, {length}]; it holds NaN.")
    if low < 0 or high > length:
        raise ValueError(f"`width` must lie in [0, {length}], in elements of the axis; got {low:g} to {high:g}.")


def are_whole(*tensors: Tensor) -> bool:
    """Whether all values are known to be whole numbers; False where they cannot be read."""
    if all(not t.is_floating_point() for t in tensors):
        return True
    return can_read_values(*tensors) and all(bool((t == t.round()).all()) for t in tensors)
