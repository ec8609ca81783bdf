"""The stored table of shapes: it is sound, and the nearest product in it decides."""

import pytest
import torch

from gblr.ops.block_matmul import shapes
from gblr.ops.block_matmul.shapes import FewShape, Product, Shape

KINDS = {"columns", "columns, transposed", "rows", "rows, gathered"}
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def on_an_h200(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    shapes._nearest.cache_clear()
    yield
    shapes._nearest.cache_clear()


def test_every_row_is_a_shape_that_its_tokens_can_have():
    rows = shapes._table()["NVIDIA H200"]
    assert {row["kind"] for row in rows} == KINDS
    for row in rows:
        few = len(row["shape"]) == len(FewShape._fields)
        shape = (FewShape if few else Shape)(*row["shape"])
        assert row["tokens"] <= shapes.FEW_TOKENS if few else row["tokens"] > 1
        assert few or shape.tokens in (16, 32, 64, 128, 256)


def test_a_product_that_was_measured_gets_its_own_shape():
    for row in shapes._table()["NVIDIA H200"]:
        assert shapes._nearest(Product(row["kind"], row["tokens"], row["tiles"]), GPU) == row["shape"]


def test_other_gpus_take_what_fits_everywhere(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another")
    assert shapes._nearest(Product("rows", 4096, 32), GPU) is None
    assert not shapes.choose_shape(Product("rows", 4096, 32), torch.zeros(1, dtype=torch.bfloat16)).descriptors
