"""Files for other programs: texts of any number and length, images of any number."""

import onnxruntime
import torch
from torch import nn

from gblr.workflows.exporting import _onnx_shapes, _write_onnx, _write_torch, two_samples
from tests.models.tiny_models import sentences, write_encoder
from tests.shape_hook import shapes_unchecked


class OneLength(nn.Module):
    """Takes 7 tokens and no other number of them."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(50, 8), nn.Parameter(torch.randn(7, 8))

    def forward(self, tokens):
        return self.embed(tokens) + self.places


def test_texts_may_have_another_length_and_number_in_the_file(gblr, tmp_path):
    write_encoder(tmp_path / "dense")
    (tmp_path / "texts.txt").write_text("\n".join(sentences(40)))
    options = ("--max-train", 16, "--max-eval", 4, "--calibration", 4, "--threads", 1, "--out", "run")
    assert gblr("compress", "dense", "--data", "texts.txt", *options).code == 0
    ended = gblr("export", "run")
    assert ended.code == 0, ended.err
    for words in ("input input_ids: batch x length", "input attention_mask: batch x", "operators", "differ from torch"):
        assert words in ended.out
    ended = gblr("export", "run", "--format", "torch")
    assert ended.code == 0 and "input input_ids: batch x length" in ended.out
    session = onnxruntime.InferenceSession(tmp_path / "run" / "model.onnx")
    program = torch.export.load(tmp_path / "run" / "model.pt2").module()
    for shape in ((1, 5), (3, 21)):
        inputs = {one.name: torch.ones(shape, dtype=torch.long) for one in session.get_inputs()}
        found = torch.tensor(session.run(None, {name: value.numpy() for name, value in inputs.items()})[0])
        assert found.shape[:2] == shape and torch.allclose(found, program(**inputs)[0], atol=1e-5)


def test_a_model_of_one_length_keeps_it_and_the_shapes_tell(tmp_path):
    model, tokens = OneLength().eval(), torch.zeros(1, 7, dtype=torch.long)
    with shapes_unchecked():
        _, note = _write_onnx(model, two_samples(tokens), tmp_path / "model.onnx")
        assert "length is that of the example" in note
        assert _onnx_shapes(tmp_path / "model.onnx") == {"tokens": ["batch", 7]}
        assert _write_torch(model, two_samples(tokens), tmp_path / "model.pt2") == {"tokens": ["batch", 7]}
