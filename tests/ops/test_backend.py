import warnings

import pytest

from gblr.ops.backend import triton_module


def test_kernels_that_cannot_be_imported_are_missed_aloud_and_once():
    with pytest.warns(UserWarning, match="No module named 'gblr.ops.no_such_kernels'.*more slowly"):
        assert triton_module("gblr.ops.no_such_kernels") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert triton_module("gblr.ops.no_such_kernels") is None


def test_kernels_that_are_there_are_given():
    assert triton_module("gblr.ops.masked_content.reference").forward
