"""Input checks at the public border. Shapes are always checked; values only where reading them is free of side
effects.
"""

import math

import torch
from torch import Tensor
from torch.autograd import forward_ad

_tracing_state = torch._C._get_tracing_state
_num_modes = torch._C._len_torch_dispatch_stack
# torch has no public name for "is this inside vmap or grad"; this one has been stable since 2.0.
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_innermost_transform = torch._C._functorch.peek_interpreter_stack


def can_read_values(*tensors: Tensor) -> bool:
    """True in plain eager code; False under `torch.compile`, `torch.func` transforms, graph capture, fake or meta
    tensors.
    """
    if torch.compiler.is_compiling():
        return False
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return False
    return not any(t.is_meta or _is_wrapped(t) or isinstance(t, torch._subclasses.FakeTensor) for t in tensors)


def is_transformed(*tensors: Tensor) -> bool:
    """Whether a `torch.func` transform (grad, vmap, jvp) maps over one of them or differentiates by it, or one of them
    has a tangent (forward-mode differentiation).
    """
    if torch.compiler.is_compiling():
        return False
    if any(map(_is_wrapped, tensors)):
        return True
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


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


def check_structure(width: Tensor | float, location: Tensor | float, length: int) -> tuple[Tensor, Tensor]:
    """Broadcasts `width` and `location` against each other; raises ValueError for whatever no mask can be made of.
    Plain numbers become tensors, where the other one is if that is a tensor.
    """
    check_length(length)
    device = next((value.device for value in (width, location) if isinstance(value, Tensor)), None)
    w, l = _as_tensor("width", width, device), _as_tensor("location", location, device)
    # Compared here, as under `torch.compile` an error of `broadcast_tensors` cannot be caught.
    if any(i != j and 1 not in (i, j) for i, j in zip(w.shape[::-1], l.shape[::-1], strict=False)):
        raise ValueError(f"`width` and `location` must have the same shape; got {tuple(w.shape)} and {tuple(l.shape)}.")
    w, l = torch.broadcast_tensors(w, l)
    if w.numel() and can_read_values(w, l):
        _check_width_values(w, length)
        if not bool(l.isfinite().all()):
            raise ValueError("`location` must be finite; it holds NaN or infinity.")
    return w, l


def _as_tensor(name: str, value: Tensor | float, device: torch.device | None) -> Tensor:
    found = value if isinstance(value, Tensor) else torch.tensor(value, device=device)
    if found.is_complex() or found.dtype == torch.bool:
        raise ValueError(f"`{name}` must have a real or integer dtype; got {found.dtype}.")
    return found


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
