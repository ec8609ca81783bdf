"""Counting while a model runs: how often each layer is applied, and the products that no layer owns (attention)."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from gblr.layers.modes import modes_of, restore_modes


@dataclass(frozen=True)
class Measurement:
    """Sums over one batch of `batch_size` samples."""

    batch_size: int
    positions: Mapping[str, int]  # vectors that a layer was applied to
    attention_mults: int  # products of activations with activations
    other_mults: int  # with weights or buffers outside the counted layers: nn.MultiheadAttention's in_proj, nn.LSTM


def measure(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_size: int | None = None,
) -> Measurement:
    """Runs `model` once, in evaluation mode and without gradients, and leaves it as it was."""
    batch_size = batch_size or first_axis((args, kwargs))
    counter = ProductCounter(model)
    positions: Counter[str] = Counter()

    def enter(*_: Any) -> None:
        counter.depth += 1

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            counter.depth -= 1
            product = next(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor))  # a router has two
            positions[name] += product.numel() // max(1, num_outputs(module))

        return hook

    def leave_recurrent(module: nn.Module, inputs: Any, kwargs: Any, output: Any) -> None:
        counter.depth -= 1
        counter.mults["other"] += recurrent_mults(module, inputs[0] if inputs else kwargs["input"])

    with ExitStack() as stack:
        for name, module in layers.items():
            for handle in (module.register_forward_pre_hook(enter), module.register_forward_hook(leave(name))):
                stack.callback(handle.remove)
        for module in model.modules():
            if isinstance(module, nn.RNNBase):
                stack.callback(module.register_forward_pre_hook(enter).remove)
                stack.callback(module.register_forward_hook(leave_recurrent, with_kwargs=True).remove)
        # In inference mode products would arrive as `matmul` or attention as a whole, which have no formula.
        stack.enter_context(torch.inference_mode(False))  # before the next, as it turns gradients on
        stack.enter_context(undisturbed(model))
        args, kwargs = tree_map_only(Tensor, _plain_tensor, (tuple(args), dict(kwargs)))
        stack.enter_context(counter)
        with _told_to_unpack(args, kwargs):
            model(*args, **kwargs)
    return Measurement(batch_size, positions, counter.mults["attention"], counter.mults["other"])


@contextmanager
def _told_to_unpack(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Batches are given whole to all other functions; a model says of one that is no tensor what nobody can read."""
    try:
        yield
    except Exception as error:
        if not kwargs and len(args) == 1 and isinstance(args[0], (Mapping, tuple, list)):
            stars = "**" if isinstance(args[0], Mapping) else "*"
            kind = type(args[0]).__name__
            error.add_note(
                f"`cost` calls the model with just these arguments, and got a single {kind}. If its entries are the "
                f"arguments of the model, unpack them: gblr.cost(model, {stars}batch)."
            )
        raise


def _plain_tensor(tensor: Tensor) -> Tensor:
    """One that may be changed in place outside of inference mode, in which it may have been made."""
    return tensor.clone() if tensor.is_inference() else tensor


def num_outputs(module: nn.Module) -> int:
    """Numbers that one application of the layer's matrix gives: the output channels of a convolution."""
    for name in ("out_features", "out_channels", "nf"):  # `nf` is that of transformers' Conv1D
        if hasattr(module, name):
            return int(getattr(module, name))
    raise TypeError(f"{type(module).__name__} has no output size.")


def recurrent_mults(module: nn.Module, x: Tensor | PackedSequence) -> int:
    """Of an nn.LSTM, GRU or RNN, which run as one operation on most devices: every vector meets every weight once."""
    vectors = x.data if isinstance(x, PackedSequence) else x
    weights = sum(p.numel() for name, p in module.named_parameters() if name.startswith("weight"))
    return weights * vectors.shape[:-1].numel()


def first_axis(inputs: Any) -> int:
    for leaf in tree_leaves(_plain(inputs)):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) > 0:
            return len(leaf)
    raise ValueError("no tensor with samples along its first axis among the example inputs; pass `batch_size`.")


def _plain(inputs: Any) -> Any:
    """Mappings such as a tokenizer's BatchEncoding as dicts, which `tree_leaves` knows."""
    if isinstance(inputs, Mapping):
        return {key: _plain(value) for key, value in inputs.items()}
    return [_plain(value) for value in inputs] if isinstance(inputs, (list, tuple)) else inputs


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; training modes, random numbers and torch's fast paths are put back after."""
    modes = modes_of(model)
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)  # it would bypass the modules, and with them their hooks
        with torch.no_grad(), torch.random.fork_rng(devices):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        restore_modes(modes)


class ProductCounter(TorchDispatchMode):
    """Multiplications of every matrix product that runs while `depth` is 0, i.e. outside the counted layers.

    Attention counts in full, both products, whether or not a causal mask makes half of it superfluous.
    """

    supports_higher_order_operators = True

    def __init__(self, model: nn.Module):
        super().__init__()
        self.depth = 0
        self.mults: Counter[str] = Counter()
        self._weights = {_storage(t) for t in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = getattr(func, "overloadpacket", func).__name__
        if self.depth == 0 and name in FORMULAS:
            self.mults[self._kind(name, args)] += FORMULAS[name](output, *args)
        return output

    def _kind(self, name: str, args: Any) -> str:
        with_weight = any(isinstance(a, Tensor) and _storage(a) in self._weights for a in args)
        return "other" if name in _WEIGHT_PRODUCTS or with_weight else "attention"


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # unlike data_ptr, also distinct on the meta device


def _product(output: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return output.numel() * a.shape[-1]


def _added_product(output: Tensor, added: Tensor, a: Tensor, b: Tensor, *_: Any) -> int:
    return _product(output, a, b)


def _convolution(
    output: Tensor, x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool, *_: Any
) -> int:
    applied_to = x if transposed else output  # each of its numbers meets every number of w[0] once
    return applied_to.numel() * w[0].numel()


def _attention(output: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> int:
    """Q K^T and A V: queries * keys * (their size + size of the values)."""
    return q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])


_SDPA = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "flex_attention",
)
FORMULAS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mm", "mv", "bmm", "_grouped_mm"), _product),
    **dict.fromkeys(("addmm", "addmv", "baddbmm"), _added_product),
    "convolution": _convolution,
    **dict.fromkeys(_SDPA, _attention),
}
_WEIGHT_PRODUCTS = {"mm", "mv", "addmm", "addmv", "convolution", "_grouped_mm"}
