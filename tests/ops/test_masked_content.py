import itertools
import math
import warnings
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gblr.ops.masked_content import masked_content, masked_content_from
from gblr.ops.step import step_spectrum, step_table
from tests.helpers import (
    SIGMAS,
    all_whole,
    assert_close,
    compiled,
    fft_mask,
    peak_temporary_bytes,
    raises_value_error,
    random_real,
    random_whole,
)

f64, CPU = torch.float64, torch.device("cpu")
KINDS = {"whole": random_whole, "real": random_real}
each_kind = pytest.mark.parametrize("kind", KINDS)


def inputs(kind, generator, *, blocks=6, block_rank=None, length=12, dtype=f64, structure_dtype=f64):
    """(content, width, location), all of them with gradients."""
    shape = (blocks, length) if block_rank is None else (blocks, block_rank, length)
    content = torch.randn(shape, dtype=f64, generator=generator).to(dtype)
    width, location = (t.to(structure_dtype) for t in KINDS[kind](length, blocks, generator))
    return tuple(t.requires_grad_() for t in (content, width, location))


def operator_inputs(kind, dtype, generator, **sizes):
    """(content, width, location, table) without gradients, the structure in float32 at least."""
    structure_dtype = f64 if dtype == f64 else torch.float32
    tensors = inputs(kind, generator, length=9, dtype=dtype, structure_dtype=structure_dtype, **sizes)
    build = step_table if kind == "whole" else step_spectrum
    return (*(t.detach() for t in tensors), build(9, 2.0, structure_dtype, CPU))


def expected(content, width, location, sigma):
    mask = fft_mask(width, location, sigma, content.shape[-1])
    return content * (mask if content.dim() == width.dim() + 1 else mask.unsqueeze(-2))


def assert_agrees_with_fft_form(tensors, sigma, whole, generator):
    """Output and all three gradients."""
    out = masked_content(*tensors, sigma, whole=whole)
    upstream = torch.randn(out.shape, dtype=f64, generator=generator).to(out.dtype)
    precise = [t.detach().double().requires_grad_() for t in tensors]
    reference = expected(*precise, sigma)
    assert_close(out, reference)
    gradients = torch.autograd.grad(out, tensors, upstream)
    references = torch.autograd.grad(reference, precise, upstream.double())
    for tensor, gradient, precise_gradient in zip(tensors, gradients, references, strict=True):
        assert gradient.dtype == tensor.dtype and gradient.shape == tensor.shape
        assert_close(gradient, precise_gradient)


# values and gradients


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("length", [1, 2, 7, 8])
@pytest.mark.parametrize("whole", [True, False, None])
def test_it_agrees_with_the_fft_form_for_every_whole_width_and_location(length, whole, sigma, generator):
    width, location = all_whole(length)
    content = torch.randn(len(width), length, dtype=f64, generator=generator)
    tensors = [t.requires_grad_() for t in (content, width, location)]
    assert_agrees_with_fft_form(tensors, sigma, whole, generator)


@each_kind
@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("length", [97, 768])
@pytest.mark.parametrize("block_rank", [None, 1, 3])
def test_it_agrees_with_the_fft_form_on_long_axes(length, block_rank, sigma, kind, generator):
    content, width, location = inputs(kind, generator, length=length, block_rank=block_rank, blocks=9)
    content = (content.detach() / length).requires_grad_()  # gradients are sums over the axis
    assert_agrees_with_fft_form((content, width, location), sigma, kind == "whole", generator)


@each_kind
@pytest.mark.parametrize("sigma", [1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision_contents_keep_a_float32_structure(dtype, sigma, kind, generator):
    tensors = inputs(kind, generator, block_rank=2, length=32, dtype=dtype, structure_dtype=torch.float32)
    out = masked_content(*tensors, sigma)
    assert out.dtype == dtype
    upstream = torch.randn(out.shape, dtype=f64, generator=generator).to(dtype)
    precise = [t.detach().double().requires_grad_() for t in tensors]
    assert_close(out, expected(*precise, sigma))
    actual = torch.autograd.grad(out, tensors, upstream)
    reference = torch.autograd.grad(expected(*precise, sigma), precise, upstream.double())
    assert [t.dtype for t in actual] == [dtype, torch.float32, torch.float32]
    for a, r in zip(actual, reference, strict=True):
        assert_close(a, r)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("length", [1, 7, 8])
@pytest.mark.parametrize("block_rank", [None, 2])
def test_it_passes_gradcheck_at_widths_zero_and_full_and_between(length, block_rank, sigma, generator):
    content, width, location = inputs("real", generator, length=length, block_rank=block_rank, blocks=3)
    assert width[0] == 0 and width[1] == length
    assert torch.autograd.gradcheck(lambda *t: masked_content(*t, sigma, whole=False), (content, width, location))


@pytest.mark.parametrize("sigma", SIGMAS)
def test_the_table_and_the_fft_give_the_same_gradients_at_widths_zero_and_full(sigma, generator):
    content, width, location = inputs("whole", generator, length=9)
    upstream = torch.randn(content.shape, dtype=f64, generator=generator)
    by_table, by_fft = (
        torch.autograd.grad(masked_content(content, width, location, sigma, whole=whole), (width, location), upstream)
        for whole in (True, False)
    )
    for a, b in zip(by_table, by_fft, strict=True):
        assert_close(a, b)


@given(
    batch=st.lists(st.integers(0, 3), max_size=2),
    block_rank=st.one_of(st.none(), st.integers(1, 3)),
    length=st.integers(1, 9),
    turns=st.integers(-2, 2),
    whole=st.booleans(),
)
def test_any_batch_shape_and_any_turn_of_the_location_will_do(batch, block_rank, length, turns, whole):
    generator = torch.Generator().manual_seed(2)
    width, location = torch.rand(2, *batch, dtype=f64, generator=generator) * length
    if whole:
        width, location = width.round(), location.round()
    rank = [] if block_rank is None else [block_rank]
    content = torch.randn(*batch, *rank, length, dtype=f64, generator=generator)
    tensors = [t.requires_grad_() for t in (content, width, (location + turns * length).detach())]
    out = masked_content(*tensors, 2.0, whole=whole)
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert out.shape == content.shape and [g.shape for g in gradients] == [t.shape for t in tensors]
    if out.numel():
        assert_close(out, expected(content, width, location, 2.0))


@each_kind
@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=3))[:-1])
def test_only_the_gradients_asked_for_are_given(needed, kind, generator):
    tensors = inputs(kind, generator)
    everything = torch.autograd.grad(masked_content(*tensors, 2.0).pow(2).sum(), tensors)
    for t, need in zip(tensors, needed, strict=True):
        t.requires_grad_(need)
    masked_content(*tensors, 2.0).pow(2).sum().backward()
    for t, need, gradient in zip(tensors, needed, everything, strict=True):
        assert (t.grad is not None) == need
        if need:
            assert_close(t.grad, gradient)


@each_kind
def test_strided_contents_and_gradients_are_read_correctly(kind, generator):
    content, width, location = inputs(kind, generator, blocks=6, length=12)
    strided = content.detach().T.contiguous().T.requires_grad_()
    upstream = torch.randn(12, 6, dtype=f64, generator=generator).T
    assert not strided.is_contiguous() and not upstream.is_contiguous()
    plain, odd = (
        torch.autograd.grad(masked_content(c, width, location, 2.0), (c, width, location), g)
        for c, g in ((content, upstream.contiguous()), (strided, upstream))
    )
    for p, o in zip(plain, odd, strict=True):
        assert_close(o, p)


def test_values_decide_between_table_and_fft_when_nothing_is_promised():
    content, location = torch.ones(1, 8, dtype=f64), torch.tensor([2.5], dtype=f64)
    width = torch.tensor([3.0], dtype=f64)
    assert_close(masked_content(content, width, location, 2.0), fft_mask(width, location, 2.0, 8))


def test_whole_widths_that_are_dead_or_full_without_smoothing_are_exact():
    content = torch.arange(1.0, 9.0).expand(2, 8)
    out = masked_content(content, torch.tensor([0.0, 8.0]), torch.tensor([3.0, 3.0]), math.inf)
    assert torch.equal(out, torch.stack([torch.zeros(8), content[1]]))


@each_kind
def test_the_shared_table_is_never_written_to(kind, generator):
    tensors = inputs(kind, generator, block_rank=2)
    build = step_table if kind == "whole" else step_spectrum
    table = build(12, 2.0, f64, CPU)
    before = table.clone()
    masked_content(*tensors, 2.0).pow(2).sum().backward()
    assert build(12, 2.0, f64, CPU) is table and torch.equal(table, before)


@each_kind
def test_differentiating_twice_is_an_error_and_not_a_wrong_number(kind, generator):
    content, width, location = inputs(kind, generator)
    with pytest.raises(RuntimeError):
        out = masked_content(content, width, location, 2.0, whole=kind == "whole")
        (first,) = torch.autograd.grad(out.pow(2).sum(), width, create_graph=True)
        torch.autograd.grad(first.sum(), width)


# memory


@each_kind
@pytest.mark.parametrize("block_rank", [None, 3])
def test_it_is_one_node_that_saves_its_three_inputs_alone(kind, block_rank, generator):
    tensors = inputs(kind, generator, block_rank=block_rank)
    masked_content(*tensors, 2.0)  # the table is in the cache now
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = masked_content(*tensors, 2.0)
    assert [t.data_ptr() for t in saved] == [t.data_ptr() for t in tensors]
    parents = [node for node, _ in out.grad_fn.next_functions if node is not None]
    assert {type(node).__name__ for node in parents} == {"AccumulateGrad"}


@each_kind
def test_between_forward_and_backward_nothing_but_the_output_is_alive(kind, generator):
    tensors = inputs(kind, generator, blocks=64, length=256, dtype=torch.float32, structure_dtype=torch.float32)
    masked_content(*tensors, 2.0)
    kept = []
    _, left = peak_temporary_bytes(lambda: kept.append(masked_content(*tensors, 2.0)) or kept)
    assert left <= kept[0].nbytes + 64


@each_kind
def test_the_output_dies_with_its_last_reference(kind, generator):
    out = masked_content(*inputs(kind, generator), 2.0)
    watcher = weakref.ref(out)
    del out
    assert watcher() is None


# Whole parameters are the training path. Real ones go through complex spectra, in quarters of the blocks.
@pytest.mark.parametrize(("kind", "masks_allowed"), [("whole", 1.02), ("real", 1.02)])
@pytest.mark.parametrize("dtype", [torch.float32, f64])
@pytest.mark.parametrize("block_rank", [None, 4])
def test_no_two_mask_sized_temporaries_are_alive_at_a_time(kind, masks_allowed, dtype, block_rank, generator):
    blocks, length = 128, 512
    tensors = inputs(
        kind, generator, blocks=blocks, block_rank=block_rank, length=length, dtype=dtype, structure_dtype=dtype
    )
    mask_bytes = blocks * length * dtype.itemsize
    kept = []

    def forward():
        return kept.append(masked_content(*tensors, 2.0, whole=kind == "whole")) or kept

    forward()
    upstream = torch.ones_like(kept[0])
    forward_bytes, _ = peak_temporary_bytes(forward)
    backward_bytes, _ = peak_temporary_bytes(lambda: torch.autograd.grad(kept[-1], tensors, upstream))
    assert forward_bytes <= masks_allowed * mask_bytes
    assert backward_bytes <= masks_allowed * mask_bytes


def test_the_memory_meter_sees_a_mask_that_is_built_and_dropped():
    """Guards the tests above: a plain `mask * content` must not pass them."""
    content, mask = torch.ones(64, 256), torch.ones(64, 256)
    peak, left = peak_temporary_bytes(lambda: (mask * 1 * 1) * content)
    assert peak >= content.nbytes and left >= content.nbytes - 64


# compile, vmap, opcheck


@each_kind
def test_it_compiles_to_one_graph_with_its_gradients(kind, generator):
    tensors = inputs(kind, generator, block_rank=2)
    run = compiled(lambda *t: masked_content(*t, 2.0, whole=kind == "whole"))
    upstream = torch.randn(tensors[0].shape, dtype=f64, generator=generator)
    assert_close(run(*tensors), expected(*tensors, 2.0))
    actual = torch.autograd.grad(run(*tensors), tensors, upstream)
    for a, r in zip(actual, torch.autograd.grad(expected(*tensors, 2.0), tensors, upstream), strict=True):
        assert_close(a, r)


def test_a_compiled_function_follows_a_table_that_is_rewritten_in_place(generator):
    content, width, location = inputs("whole", generator)
    table = step_table(12, 2.0, f64, CPU).clone()
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    run = compiled(masked_content_from, backend=counting)
    for sigma in (2.0, 5.0, math.inf):
        table.copy_(step_table(12, sigma, f64, CPU))
        assert_close(run(table, content, width, location), expected(content, width, location, sigma))
    assert len(graphs) == 1


@each_kind
@pytest.mark.parametrize("block_rank", [None, 2])
@pytest.mark.parametrize("in_dims", [(0, 0, 0), (1, None, None), (None, 0, 0), (0, None, 0), (0, 1, 1)])
def test_vmap_agrees_with_a_loop(in_dims, block_rank, kind, generator):
    size, blocks = 3, 4
    content, width, location = inputs(kind, generator, blocks=size * blocks, block_rank=block_rank)
    tensors = [t.detach().unflatten(0, (size, blocks)) for t in (content, width, location)]
    single = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(tensors, in_dims, strict=True)]
    loop = [
        masked_content(*(t[0] if dim is None else t[i] for t, dim in zip(tensors, in_dims, strict=True)), 2.0)
        for i in range(size)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch would warn of a loop over the samples
        mapped = torch.func.vmap(lambda *t: masked_content(*t, 2.0, whole=kind == "whole"), in_dims)(*single)
    assert_close(mapped, torch.stack(loop))


def test_a_compiled_step_may_be_mapped(generator):
    tensors = [t.detach().unflatten(0, (2, 3)) for t in inputs("whole", generator, block_rank=2)]
    mapped = torch.func.vmap(lambda *t: masked_content(*t, 2.0, whole=True))
    assert_close(compiled(mapped)(*tensors), expected(*tensors, 2.0))


@each_kind
def test_a_table_may_be_mapped_as_in_an_ensemble_of_layers(kind, generator):
    content, width, location = (t.detach() for t in inputs(kind, generator))
    build, sigmas = step_table if kind == "whole" else step_spectrum, (1.0, 5.0, math.inf)
    tables = torch.stack([build(12, sigma, f64, CPU) for sigma in sigmas])
    mapped = torch.func.vmap(masked_content_from, (0, None, None, None))(tables, content, width, location)
    assert_close(mapped, torch.stack([expected(content, width, location, sigma) for sigma in sigmas]))


def test_the_operator_itself_is_not_mapped_over_its_table_and_says_so(generator):
    tensors = operator_inputs("whole", f64, generator)
    with pytest.raises(NotImplementedError, match="loop over sigma"):
        torch.func.vmap(torch.ops.gblr.masked_content, (None, None, None, 0))(*tensors[:3], tensors[3][None])


@each_kind
@pytest.mark.parametrize("length", [1, 7, 8])
@pytest.mark.parametrize("sigma", [1.0, math.inf])
@pytest.mark.parametrize("block_rank", [None, 2])
def test_torch_func_differentiates_by_every_tensor_and_more_than_once(length, sigma, block_rank, kind, generator):
    tensors = inputs(kind, generator, blocks=4, length=length, block_rank=block_rank)

    def gradients(*tensors):
        loss = lambda *t: masked_content(*t, sigma, whole=kind == "whole").pow(2).sum()  # noqa: E731
        return torch.func.grad(loss, argnums=(0, 1, 2))(*tensors)

    wanted = torch.autograd.grad(expected(*tensors, sigma).pow(2).sum(), tensors)
    for found, precise in zip(gradients(*tensors), wanted, strict=True):
        torch.testing.assert_close(found, precise, rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(gradients, tensors, fast_mode=True)


def test_gradients_flow_back_through_vmap(generator):
    tensors = inputs("whole", generator)
    mapped = torch.func.vmap(lambda *t: masked_content(*t, 2.0, whole=True))(*tensors)
    actual = torch.autograd.grad(mapped.pow(2).sum(), tensors)
    reference = torch.autograd.grad(expected(*tensors, 2.0).pow(2).sum(), tensors)
    for a, r in zip(actual, reference, strict=True):
        assert_close(a, r)


# float64 is for plain torch, the other dtypes for compiled kernels where parameters are whole
each_dtype = pytest.mark.parametrize("dtype", [f64, torch.float32, torch.bfloat16])


@each_kind
@each_dtype
@pytest.mark.parametrize(("blocks", "block_rank"), [(5, None), (5, 3), (1, 1)])
def test_the_registered_operator_passes_opcheck(blocks, block_rank, kind, dtype, generator):
    *tensors, table = operator_inputs(kind, dtype, generator, blocks=max(blocks, 2), block_rank=block_rank)
    tensors = [t[:blocks].requires_grad_() for t in tensors]
    torch.library.opcheck(torch.ops.gblr.masked_content, (*tensors, table), rtol=1e-2, atol=1e-2)


@each_kind
@each_dtype
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_the_registered_backward_agrees_with_its_schema_and_its_fake(needs, kind, dtype, generator):
    content, *rest = operator_inputs(kind, dtype, generator)
    args = (torch.ones_like(content), content, *rest, *needs)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.gblr.masked_content_backward, args, test_utils=checks)


# wrong input


@pytest.mark.parametrize("whole", [True, False])
def test_shapes_that_do_not_fit_are_refused(whole):
    one = torch.ones(5)
    with raises_value_error("`content`", "`width`", (4, 8), (5,)):
        masked_content(torch.ones(4, 8), one, one, 2.0, whole=whole)
    with raises_value_error("`content`", "`width`", (2, 5, 3, 8), (5,)):
        masked_content(torch.ones(2, 5, 3, 8), one, one, 2.0, whole=whole)
    with raises_value_error("`width`", "`location`", (5,), (4,)):
        masked_content(torch.ones(5, 8), one, torch.ones(4), 2.0, whole=whole)
    with raises_value_error("`content`", "1", (5, 0)):
        masked_content(torch.ones(5, 0), one, one, 2.0, whole=whole)
    with raises_value_error("`content`", "1", ()):
        masked_content(torch.tensor(1.0), torch.tensor(1.0), torch.tensor(1.0), 2.0, whole=whole)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan])
def test_a_sigma_that_is_not_positive_is_refused(sigma):
    with raises_value_error("`sigma`", "0", sigma):
        masked_content(torch.ones(1, 8), torch.ones(1), torch.ones(1), sigma)


def test_values_are_trusted():
    """Layers keep widths in range themselves; looking at them would wait for the device at every step."""
    out = masked_content(torch.ones(2, 8), torch.tensor([8.5, math.nan]), torch.zeros(2), 2.0, whole=False)
    assert out[0].isfinite().all() and out[1].isnan().all()


@pytest.mark.parametrize("whole", [True, False])
def test_with_a_promise_about_whole_parameters_no_value_is_read(whole):
    tensors = torch.empty(3, 8, device="meta"), torch.empty(3, device="meta"), torch.empty(3, device="meta")
    assert masked_content(*tensors, 2.0, whole=whole).shape == (3, 8)


def test_shapes_are_checked_under_vmap_and_compile_too():
    content, width = torch.ones(2, 4, 8), torch.ones(2, 5)
    with raises_value_error("`content`", (4, 8), (5,)):
        torch.func.vmap(lambda c, w: masked_content(c, w, w, 2.0, whole=True))(content, width)
    torch._dynamo.reset()
    run = torch.compile(lambda c, w: masked_content(c, w, w, 2.0, whole=True), backend="eager")
    with raises_value_error("`content`", (4, 8), (5,)):
        run(content[0], width[0])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("sigma", [1.0, 20.0, math.inf])
def test_moving_a_full_block_has_no_gradient_at_all(sigma, whole, generator):
    length = 97
    content, upstream = (torch.randn(4, 3, length, generator=generator) for _ in range(2))
    width = torch.tensor([97.0, 97.0, 50.0, 97.0], requires_grad=True)
    location = torch.tensor([0.0, 31.0, 31.0, 96.0], requires_grad=True)
    masked_content(content, width, location, sigma, whole=whole).backward(upstream)
    assert location.grad[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]  # rounding noise would become steps of Adam's
    assert location.grad[2] != 0 and (width.grad != 0).all()
