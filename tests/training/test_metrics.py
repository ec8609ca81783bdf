import math

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from gblr.training.metrics import to_tensorboard
from tests.training.models import learner_of, mlp, train


def test_metrics_can_be_read_back_from_a_tensorboard_file(tmp_path):
    model, found = mlp(), []
    with SummaryWriter(tmp_path) as writer:
        write = to_tensorboard(writer)
        learner = learner_of(model, callback=lambda metrics: (found.append(metrics), write(metrics)), every=2)
        train(learner, model)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {f"gblr/{name}" for name in found[0]} - {"gblr/step"}
    for name in found[0].keys() - {"step"}:
        scalars = events.Scalars(f"gblr/{name}")
        assert [event.step for event in scalars] == [2, 4, 6, 8]
        assert [event.value for event in scalars] == pytest.approx([metrics[name] for metrics in found], rel=1e-6)
    assert events.Scalars("gblr/sigma")[-1].value == math.inf
