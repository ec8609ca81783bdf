"""How much each output of a layer matters to what the model says: the mean square of its gradients.

An error e_i in output i of a layer changes the model's predictions by e_i times a gradient g_i, in first order. So the
damage of a compressed weight is about sum_i E[g_i^2] E[e_i^2]: rows weighted by their gradients, in one unit for all
layers. No labels are needed: for logits they are drawn from the model's own predictions (the Fisher information), for
hidden states the gradients are those of their sum with random signs (how far the outputs move).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gblr.conversion.calls import batch_call, padding_of, real_vectors
from gblr.conversion.measure import undisturbed
from gblr.conversion.outputs import output_kind, output_tensor
from gblr.conversion.sources import Source
from gblr.progress import progress

_AT_ONCE = 1 << 20  # scores: what a cache of a CPU holds; a fifth of the time that 2,048 rows of 49,152 took at once
_FLOOR = 0.1  # of the mean: no row is given up, as gradients of a sample are noisy


def collect_sensitivity(
    model: nn.Module, sources: Sequence[Source], batches: Sequence[Any], seed: int = 0
) -> dict[str, Float[Tensor, " out"]]:
    """Mean squares of the gradients of every source's outputs, over positions that are not padded.

    Takes a forward and a backward pass of the whole model for each batch, in evaluation mode; parameters get no
    gradients. Layers that do not reach the output have zeros.
    """
    generator = torch.Generator().manual_seed(seed)
    sums = {source.name: torch.zeros(len(source.weight), dtype=torch.float64, device="cpu") for source in sources}
    counts = dict.fromkeys(sums, 0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with ExitStack() as stack:
        for parameter in trained:
            stack.callback(parameter.requires_grad_, True)
            parameter.requires_grad_(False)
        stack.enter_context(undisturbed(model))
        stack.enter_context(torch.enable_grad())
        tick = stack.enter_context(progress("measuring sensitivity", len(batches)))
        for batch in batches:

            def add(source: Source, grad: Tensor, batch: Any = batch) -> None:
                if source.geometry is None:
                    rows = real_vectors(grad, padding_of(batch, source.name, model))
                else:
                    rows = grad.movedim(-3, -1).flatten(0, -2)
                rows = rows.to(torch.promote_types(rows.dtype, torch.float32))  # sums of one batch need no more
                sums[source.name] += rows.square().sum(0).double().cpu()
                counts[source.name] += len(rows)

            with _watched(sources, add):
                # what a model with a decoder returns is the decoder's
                loss = probe(batch_call(model, batch), padding_of(batch, "decoder", model), generator)
                if not loss.requires_grad:
                    raise ValueError(
                        "`sensitivity` needs gradients, and none reach the model's output from the layers to convert: "
                        "its forward turns them off, or the batches skip these layers. Convert without `sensitivity`."
                    )
                loss.backward()  # still watched: what is checkpointed runs once more
            tick()
    for name, total in sums.items():
        if not bool(total.isfinite().all()):
            raise ValueError(
                f"the gradients of {name!r} are NaN or infinite for some of the `calibration` batches. Those of "
                "float16 overflow easily: convert the model in float32 or bfloat16, or without `sensitivity`."
            )
    return {name: total / max(1, counts[name]) for name, total in sums.items()}


def row_factors(sensitivity: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
    """What rows are multiplied by before a fit: the root of their sensitivity over its mean, never far below 1."""
    mean = sensitivity.mean()
    return (sensitivity / torch.where(mean > 0, mean, 1.0) + _FLOOR).sqrt()


def probe(output: Any, real: Tensor | None, generator: torch.Generator) -> Tensor:
    """A number whose gradients have the expected squares that are sought; `real` positions of the output count."""
    kind = output_kind(output)
    values = output_tensor(output, kind)
    if real is not None and values.shape[: real.dim()] == real.shape:
        values = values[real.to(values.device)]
    if kind == "hidden" or values.dim() < 2:  # one score for each position is no choice among classes
        signs = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8, device="cpu").to(values.device)
        return (values.float() * (2 * signs - 1)).sum()
    scores = values.float().flatten(0, -2)
    return nn.functional.cross_entropy(scores, _drawn(scores.detach(), generator), reduction="sum")


def _drawn(scores: Float[Tensor, "rows classes"], generator: torch.Generator) -> Int[Tensor, " rows"]:
    """A class for each row, as probable as its score says; by one number for each row, of a generator on the CPU: the
    same on every device. Few rows at a time, since scores of a large vocabulary take gigabytes.
    """
    uniform = torch.rand(len(scores), 1, generator=generator, device="cpu").to(scores.device)
    size = max(1, _AT_ONCE // scores.shape[-1])
    parts = zip(scores.split(size), uniform.split(size), strict=True)
    found = [torch.searchsorted(rows.softmax(-1).cumsum(-1), numbers) for rows, numbers in parts]
    return torch.cat(found)[:, 0].clamp(max=scores.shape[-1] - 1)


@contextmanager
def _watched(sources: Sequence[Source], add: Callable[[Source, Tensor], None]) -> Iterator[None]:
    """Hands on the gradients of the layers' outputs, of every call, as they come: none is kept. The outputs go on as
    copies, which may be changed in place.
    """
    with ExitStack() as stack:
        for source in sources:

            def hook(module: nn.Module, args: Any, output: Tensor, source: Source = source) -> Tensor:
                watched = output if output.requires_grad else output.detach().requires_grad_()
                watched.register_hook(lambda grad: add(source, grad))
                return watched.clone()

            stack.callback(source.module.register_forward_hook(hook).remove)
        yield
