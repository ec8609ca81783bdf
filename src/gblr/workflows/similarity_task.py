"""Similarity of sentences, as in the STS benchmark."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from gblr.data.splits import draw_some
from gblr.data.tokens import TextSet
from gblr.workflows.outputs_task import DenseOutputs, distillation_defaults, embed_all
from gblr.workflows.task import Request, Task
from gblr.workflows.text_tasks import some_of, text_set


def similarity_task(
    train: list[str], pairs: tuple[list[str], list[str]], scores: list[float], request: Request
) -> Task:
    """Spearman's correlation of cosines of sentence embeddings with scores given by people. Training makes the model
    like the dense one on the training sentences; it sees no scores, so that they measure what was kept.
    """
    loaded, seed = request.loaded, request.seed
    index = draw_some(len(scores), request.max_eval, seed)
    first, second = (text_set([side[i] for i in index], loaded) for side in pairs)
    wanted = torch.tensor([scores[i] for i in index], dtype=torch.float64)
    sentences = text_set(some_of(train, request.max_train, seed), loaded)
    return Task(
        name="sentence similarity", source=request.source,
        what=f"{len(sentences)} training sentences and {len(index)} test pairs",
        metric="Spearman correlation", unit="", higher_is_better=True,
        samples=sentences, train_data=sentences,
        score=lambda model: _correlation(model, first, second, wanted, loaded.pooling),
        loss=DenseOutputs(loaded.model), train_defaults=distillation_defaults(len(sentences)),
        batch_size=64, seed=seed, device=loaded.device,
    )  # fmt: skip


def _correlation(model: nn.Module, first: TextSet, second: TextSet, wanted: Tensor, pooling: str) -> float:
    a, b = (functional.normalize(embed_all(model, side, pooling), dim=1) for side in (first, second))
    return spearman((a * b).sum(1), wanted)


def spearman(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float:
    """Pearson's correlation of the ranks, equal values sharing their mean rank.

    >>> spearman(torch.tensor([0.1, 0.2, 0.4]), torch.tensor([1.0, 3.0, 5.0]))
    1.0
    """
    return float(torch.corrcoef(torch.stack([_ranks(a), _ranks(b)]))[0, 1])


def _ranks(x: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    _, inverse, counts = torch.unique(x, sorted=True, return_inverse=True, return_counts=True)
    return (counts.cumsum(0) - (counts - 1) / 2)[inverse].double()
