import pytest
import torch

from gblr.workflows.measuring import measuring, note_on


@pytest.mark.parametrize(
    ("known", "told"),
    [
        ({"avx2": True, "avx512_bf16": False}, True),
        ({"avx512_bf16": True}, False),
        ({"amx_bf16": True}, False),
        ({}, False),
    ],
)
def test_where_bfloat16_gains_nothing_that_is_told(known, told, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: known, raising=False)
    assert ("no instructions for bfloat16" in note_on("bfloat16", "cpu")) is told
    assert note_on("float32", "cpu") == note_on("bfloat16", "cuda") == ""


def test_products_of_the_model_are_in_that_precision():
    x = torch.ones(2, 2)
    for precision, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with measuring(precision, "cpu"):
            assert (x @ x).dtype == dtype
