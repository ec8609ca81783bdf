"""What a layer over packed blocks multiplies with: tensors derived from its contents, kept until those change.

They are plain attributes, neither parameters nor buffers: checkpoints and optimizers have no use for them.
"""

from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.matrices import forms
from gblr.matrices.base import StructuredMatrix
from gblr.matrices.forms import Form
from gblr.matrices.packed import PackedGBLR
from gblr.ops.block_matmul.cpu import BoundMatmul
from gblr.ops.checks import can_read_values, is_plain_eager

_TENSORS = ("_derived_0", "_derived_1")  # single attributes: torch.export finds no tensors in tuples
_NAMES = (*_TENSORS, "_sizes", "_bound")
_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "mtia", "xla")
_AUTOCAST = frozenset(d for d in _DEVICES if torch.amp.is_autocast_available(d))  # asked here: it breaks graphs in 2.11


class AskedWeight:
    """A dense weight that was asked for: which contents it was of and, where it is asked for again, itself."""

    def __init__(self, contents: Sequence[Tensor]):
        self._stamps = [forms.Stamp(tensor, tensor) for tensor in contents]
        self._weight: Tensor | None = None
        self._version = 0

    def fits(self, contents: Sequence[Tensor]) -> bool:
        return len(contents) == len(self._stamps) and all(
            stamp.fits(tensor, tensor) for stamp, tensor in zip(self._stamps, contents, strict=True)
        )

    def weight(self, matrix: StructuredMatrix) -> Float[Tensor, "out in"]:
        if self._weight is None or self._weight._version != self._version:  # who asked before may have written to it
            with torch.inference_mode(False), torch.no_grad():
                self._weight = matrix.to_dense()
            self._version = self._weight._version
        return self._weight


class PreparedModule(nn.Module):
    """A module with cropped contents `u` and `v` that multiplies by one of three forms (`gblr.matrices.forms`).

    In training mode, where contents change with every step, the form's tensors are computed in each forward pass.
    Otherwise they are kept, and made anew after casts, moves and loading, where contents were changed in place, after a
    backward pass, and at the switch to evaluation; the last is when a compiled model notices changes. Those that torch
    does not note (`p.data.copy_(...)`, FSDP's while it gathers) call for `prepare`.
    """

    u: Tensor
    v: Tensor
    _template: Any
    planned: Form | None = None  # what is wanted; None: what is expected to be the fastest
    form: Form | None = None  # what is at work; None: no tensors are kept, the matrix multiplies by itself
    _stamp: forms.Stamp | None = None
    _asked: AskedWeight | None = None
    _in_training = True  # at the last call of `train`; a model that torch.compile wraps sets `training` before it

    @property
    def is_packed(self) -> bool:
        return isinstance(self._template, PackedGBLR)

    def prepare(self) -> None:
        """Derives the tensors of the form that is planned, or of the one that is expected to be the fastest."""
        form, stamp = None, None
        self._asked = None
        kept: dict[str, Any] = {}
        if self._can_derive():
            matrix: PackedGBLR = self.matrix  # type: ignore[assignment]
            form = self.planned if self.planned in forms.possible_forms(matrix) else self.expected_form(matrix)
            # what inference mode makes could not be used for training afterwards
            with torch.inference_mode(False), torch.no_grad():
                stamp = forms.Stamp(matrix.u, matrix.v)
                derived = forms.derive(form, matrix)
            tensors = tuple(tensor.detach() for tensor in derived.tensors)
            kept = dict(zip(_TENSORS, tensors, strict=False)) | {"_sizes": derived.sizes}
            if form == "packed" and matrix.shape[1] and matrix.u.is_cpu:
                kept["_bound"] = BoundMatmul(tensors[0], tensors[1], matrix.shape[1], matrix.shape[0])
            elif form == "dense":
                kept["_bound"] = forms.BoundLinear(tensors[0])
        # The stamp comes last: a thread that finds it fresh finds what belongs to it.
        self.__dict__.update(kept)
        for name in _NAMES:
            if name not in kept:
                self.__dict__.pop(name, None)
        self.form, self._stamp = form, stamp

    def _can_derive(self) -> bool:
        if not (
            self.is_packed and is_plain_eager() and can_read_values(self.u, self.v) and type(self.u.data) is Tensor
        ):
            return False
        return forms.is_filled(self.matrix)  # type: ignore[arg-type]

    def is_fresh(self) -> bool:
        """Whether the derived tensors are those of the contents as they are now."""
        parameters = self._parameters  # `self.u` would take five times as long
        return self._stamp is not None and self._stamp.fits(parameters.get("u"), parameters.get("v"))

    def quick(self, x: Float[Tensor, "*b in"]) -> Float[Tensor, "*b out"] | None:
        """W x + bias without detours, where nobody but the caller looks: no gradients, no compiling, no mode, no
        autocast. None elsewhere. Saves about 10 us a call, as long as a small layer's product takes.
        """
        if torch.is_grad_enabled() or not is_plain_eager() or torch.is_autocast_enabled("cpu"):
            return None
        own = self.__dict__  # past nn.Module's search for names, which takes as long as all the rest
        bound, stamp, parameters = own.get("_bound"), self._stamp, own["_parameters"]
        if bound is None or type(x) is not Tensor or x.dtype != bound.dtype or not x.is_cpu or not x.dim():
            return None
        bias = parameters.get("bias")
        if x.shape[-1] != bound.in_features or not (bias is None or bound.takes(bias)):
            return None
        if stamp is None or not stamp.fits(parameters.get("u"), parameters.get("v")):
            return None
        return bound(x, bias)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """W x + bias by the form, or None where the matrix itself has to do it."""
        compiling = torch.compiler.is_compiling()
        if not self.is_packed or not (compiling or is_plain_eager()):
            return None
        trained = self._is_trained(compiling)
        renewed = trained and (compiling or self.training)
        if not compiling and not (self._is_alike() if renewed else self.is_fresh()):
            self.prepare()
        form, dtype = self.form, autocast_dtype(x)
        if form is None or (dtype is not None and not forms.knows(form, dtype, x.device)):
            return None
        if trained and form == "packed" and not self.u.is_cpu:
            form = forms.plain_form(self.matrix)  # type: ignore[arg-type] # GPU kernels are for inference
        tensors, sizes = self._linked(form, renewed) if trained else self._kept()
        if trained and not compiling:
            self._forget_at_backward(tensors)
        if dtype is not None:
            x, tensors = x.to(dtype), tuple(t.to(dtype) if t.is_floating_point() else t for t in tensors)
        if bias is not None and bias.dtype != x.dtype:
            bias = bias.to(x.dtype)
        return self.by_form(form, forms.Derived(tensors, sizes), x, bias)

    def by_form(self, form: Form, derived: forms.Derived, x: Tensor, bias: Tensor | None) -> Tensor:
        """W x + bias with what the form derived."""
        return forms.multiply(form, derived, x, bias)

    def expected_form(self, matrix: PackedGBLR) -> Form:
        return forms.expected_form(matrix)

    def _is_trained(self, compiling: bool) -> bool:
        """Whether gradients must reach the contents; or may change them, unseen by a compiled graph."""
        watched = torch.is_grad_enabled() or (compiling and self.training)
        return watched and (self.u.requires_grad or self.v.requires_grad)

    def _is_alike(self) -> bool:
        return self._stamp is not None and self._stamp.is_alike(self.u, self.v)

    def _kept(self) -> forms.Derived:
        tensors = tuple(self.__dict__[name] for name in _TENSORS if name in self.__dict__)
        return forms.Derived(tensors, self.__dict__["_sizes"])

    def _linked(self, form: Form, renewed: bool) -> forms.Derived:
        """As `_kept`, with gradients that reach the contents; `renewed` are the values, not the plan of the blocks."""
        if form != "packed":
            return forms.derive(form, self.matrix)  # type: ignore[arg-type]
        (values, plan), sizes = self._kept()
        if renewed:
            return forms.Derived((torch.ops.gblr.pack_blocks(self.u, self.v, plan, values.shape[0]), plan), sizes)
        return forms.Derived((_Linked.apply(self.u, self.v, values, plan), plan), sizes)

    def _forget_at_backward(self, tensors: tuple[Tensor, ...]) -> None:
        """Gradients announce changes, and fused optimizers make them without a trace."""
        forms.watch_optimizers()

        def forget(_: Tensor) -> None:
            if self._stamp is not None:
                self._stamp.expire()

        next(t for t in tensors if t.requires_grad).register_hook(forget)

    def train(self, mode: bool = True) -> Self:
        ended = (self._in_training or self.training) and not mode  # `training` may have been set without a call of this
        super().train(mode)
        self._in_training, self._asked = mode, None
        if ended and self.is_packed and (self.u.requires_grad or self.v.requires_grad):
            self.prepare()
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._cast_contents(fn, recurse)
        self.prepare()
        return self

    def _cast_contents(self, fn: Any, recurse: bool) -> None:
        super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.prepare()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in (*_NAMES, "_stamp", "_asked")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.prepare()


class _Linked(torch.autograd.Function):
    """The kept values, with gradients that reach the contents they were derived from."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, v: Tensor, values: Tensor, plan: Tensor) -> Tensor:
        ctx.save_for_backward(plan)
        ctx.sizes = u.shape[0], v.shape[0]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (plan,) = ctx.saved_tensors
        return *torch.ops.gblr.crop_blocks(grad, plan, *ctx.sizes), None, None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype of an autocast region, where `x` is in one; float64 stays, as in torch's own layers."""
    device = x.device.type
    if device not in _AUTOCAST or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)
