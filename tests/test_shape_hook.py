"""Shapes are enforced in tests: what is annotated is checked, at every call and against each other."""

import dataclasses
from typing import Self

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, Int, TypeCheckError
from torch import Tensor

import gblr
from tests.shape_hook import checked, jaxtyped, shapes_unchecked

SHAPE_ERRORS = (BeartypeCallHintViolation, TypeCheckError)
hooked = jaxtyped(typechecker=checked)


@hooked
def product(a: Float[Tensor, "m k"], b: Float[Tensor, "k n"], wrong: int = 0) -> Float[Tensor, "m n"]:
    return torch.zeros(a.shape[0] + wrong, b.shape[1])


@hooked
def ones(length: int, wrong: int = 0) -> Float[Tensor, " {length}"]:
    return torch.ones(length + wrong)


class Alone:
    @hooked
    def itself(self, a: Int[Tensor, " k"], b: Int[Tensor, " k"]) -> Self:
        return self


@hooked
@dataclasses.dataclass
class Pair:
    a: Float[Tensor, " k"]
    b: Float[Tensor, " k"]


def zeros(*shape):
    return torch.zeros(shape)


def test_what_fits_passes():
    assert product(zeros(2, 3), zeros(3, 4)).shape == (2, 4)
    assert product(zeros(5, 1), b=zeros(1, 1)).shape == (5, 1)  # names of axes mean something else at every call
    assert len(ones(3)) == 3 and len(Pair(zeros(3), zeros(3)).b) == 3
    assert Alone().itself(torch.arange(2), torch.arange(2))


@pytest.mark.parametrize(
    "call",
    [
        lambda: product(zeros(3), zeros(3, 4)),
        lambda: product(zeros(2, 3), zeros(2, 4)),
        lambda: product(zeros(2, 3).long(), zeros(3, 4)),
        lambda: product(zeros(2, 3), zeros(3, 4), wrong=1.5),
        lambda: product(zeros(2, 3), zeros(3, 4), wrong=1),  # by its result alone
        lambda: ones(3, wrong=1),
        lambda: Pair(zeros(3), zeros(4)),
        lambda: gblr.boxcar_mask(zeros(3), zeros(4), 8),
        lambda: gblr.Structure(zeros(3), zeros(3), zeros(3), zeros(4)),
    ],
)
def test_what_does_not_fit_is_refused(call):
    with pytest.raises(SHAPE_ERRORS):
        call()


def test_arguments_are_checked_where_the_hint_of_the_result_cannot_be():
    with pytest.raises(SHAPE_ERRORS):
        Alone().itself(torch.arange(2), torch.arange(3))


def test_wrong_arguments_are_shown_with_the_sizes_of_their_axes():
    with pytest.raises(TypeCheckError, match=r"(?s)parameter 'b'.*k=3"):
        product(zeros(2, 3), zeros(2, 4))


def test_checks_can_be_switched_off():
    with shapes_unchecked():
        assert product(zeros(2, 3), zeros(9, 4)).shape == (2, 4)
    with pytest.raises(SHAPE_ERRORS):
        product(zeros(2, 3), zeros(9, 4))


def test_kernels_are_left_as_triton_wrote_them(generator):
    pytest.importorskip("triton")
    from gblr.ops.elements import reference
    from gblr.ops.elements import triton as kernels

    width, location = torch.rand(2, 2, 9, generator=generator)
    assert torch.equal(kernels.forward(width, location, 8, 6, 1), reference.forward(width, location, 8, 6, 1))
