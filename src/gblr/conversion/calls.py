"""What a model is called with, what its layers are given, and which positions of that are padding."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gblr.layers.conv import ConvGeometry


def batch_call(model: nn.Module, batch: Any) -> Any:
    """The model's output on a tensor, a tuple of arguments, or a mapping of named ones."""
    if isinstance(batch, Tensor):
        return model(batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        try:
            return model(*batch)
        except TypeError as error:
            if "positional argument" not in str(error):
                raise
            raise TypeError(
                f"{error}. A batch is what the model is called with: leave labels out, e.g. (x for x, _ in loader)."
            ) from error
    raise ValueError(
        "`calibration` must yield tensors, tuples of arguments or dicts of named arguments; "
        f"got {type(batch).__name__}."
    )


# model types with layers that are given (positions, samples, features)
_POSITIONS_FIRST = frozenset({"fsmt", "led", "longformer", "xlnet"})
_CROSS_ATTENTION = re.compile(r"cross|enc\w*(attn|attention)", re.IGNORECASE)
_CROSS_INPUTS = {"k": "encoder", "v": "encoder", "q": "decoder", "o": "decoder"}  # by the first letter of the layer


def padding_of(batch: Any, layer: str | None = None, model: nn.Module | None = None) -> Tensor | None:
    """(samples, positions) bool, True where a token is real. None if the batch has no such mask, or if it is not clear
    that it belongs to what `layer` of `model` is given: no mask is better than a wrong one.

    With a decoder beside the encoder the "attention_mask" is the encoder's; the decoder has a "decoder_attention_mask"
    or none. A `layer` that is not known may belong to either, and then lengths have to tell them apart.
    """
    if not isinstance(batch, Mapping):
        return None
    mask, config = _mask(batch, "attention_mask"), getattr(model, "config", None)
    given = [x for key in ("decoder_input_ids", "decoder_inputs_embeds") if isinstance(x := batch.get(key), Tensor)]
    if layer is not None and (given or getattr(config, "is_encoder_decoder", False)):
        masks = {"encoder": mask, "decoder": _mask(batch, "decoder_attention_mask")}
        mask = masks.get(_states_given_to(layer) or "unclear")
    elif mask is not None and any(x.shape[:2] == mask.shape for x in given):
        return None
    square = mask is not None and mask.shape[0] == mask.shape[1]
    return None if square and getattr(config, "model_type", None) in _POSITIONS_FIRST else mask


def _mask(batch: Mapping[str, Any], name: str) -> Tensor | None:
    mask = batch.get(name)
    return mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None


def _states_given_to(layer: str) -> str | None:
    """Those of the encoder or the decoder; None where the layer's name does not say."""
    parts = layer.split(".")
    side = next((part for part in parts if part in ("encoder", "decoder")), None)
    if side == "decoder" and any(map(_CROSS_ATTENTION.search, parts)):
        return _CROSS_INPUTS.get(parts[-1][:1])
    return side


def input_vectors(x: Tensor, geometry: ConvGeometry | None, padding: Tensor | None) -> Float[Tensor, "positions in"]:
    """What the matrix of a layer is applied to, in float32 at least, without padded positions."""
    x = x.detach()
    vectors = real_vectors(x, padding) if geometry is None else geometry.unfold(x)[0].flatten(0, -2)
    return vectors.to(torch.promote_types(vectors.dtype, torch.float32))


def real_vectors(x: Tensor, padding: Tensor | None) -> Float[Tensor, "positions features"]:
    """All vectors of `x` that are not padded, whether samples stay apart, or positions come first (XLNet), or both are
    one axis (OPT).
    """
    if padding is not None:
        real = padding.to(x.device)
        if x.dim() == 2 and len(x) == real.numel():
            x = x[real.flatten()]
        elif x.shape[:-1] in (real.shape, real.T.shape):
            x = x[real if x.shape[:-1] == real.shape else real.T]
    return x.reshape(-1, x.shape[-1])
