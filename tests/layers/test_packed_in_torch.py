"""Hardened layers inside what torch does with models: compile, export, copies, processes, threads, transforms."""

import copy
import io
import multiprocessing
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.helpers import compiled
from tests.layers.packed_layers import (
    assert_near,
    assert_up_to_date,
    each_form,
    needs_kernels,
    packed_conv,
    packed_linear,
    packed_mlp,
    plain,
)
from tests.shape_hook import shapes_unchecked

# torch.compile


# the two ways through a compiled layer: its own kernel, or products of torch's
compiled_forms = pytest.mark.parametrize("form", [pytest.param("packed", marks=needs_kernels), "dense"])


@compiled_forms
def test_compiled_inference_is_one_graph_for_any_batch(form, generator):
    model, counter = packed_mlp(form), CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(model, fullgraph=True, backend=counter)
    with shapes_unchecked(), torch.no_grad():
        for batch in (5, 7, 2, 64, 3, 100):
            x = torch.randn(batch, 20, generator=generator)
            assert_near(run(x), model(x))
    assert counter.frame_count <= 2  # one for the first batch, one for all others


@needs_kernels
def test_a_compiled_convolution_is_one_graph(generator):
    layer, x = packed_conv(), torch.randn(5, 3, 6, 6, generator=generator)
    run = compiled(layer)
    with torch.no_grad():
        assert_near(run(x), layer(x))
    assert_near(run(x), layer(x))


@compiled_forms
def test_compiled_training_reaches_the_contents(form, generator):
    model, x = packed_mlp(form).train(), torch.randn(5, 20, generator=generator).requires_grad_()
    leaves = [x, *model.parameters()]
    actual, expected = (torch.autograd.grad(f(x).square().sum(), leaves) for f in (compiled(model), model))
    for a, e in zip(actual, expected, strict=True):
        assert bool(e.any())
        assert_near(a, e)


@compiled_forms
def test_a_compiled_model_follows_its_training(form, generator):
    """Outputs are those of now in both modes, and going back and forth between them compiles nothing anew."""
    layer, x = packed_linear(form), torch.randn(5, 20, generator=generator)
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    run = torch.compile(layer, fullgraph=True, backend=counter)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
    counts = []
    with shapes_unchecked():
        for _ in range(4):
            run.train()
            run(x).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                assert_near(run(x), plain(layer, x))
                run.eval()
                assert_near(run(x), plain(layer, x))
            counts.append(counter.frame_count)
    assert counts[0] == counts[-1]


# torch.export


def exported(model: nn.Module, x: torch.Tensor, **options) -> bytes:
    with shapes_unchecked(), torch.no_grad():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},), **options)
    file = io.BytesIO()
    torch.export.save(program, file)
    return file.getvalue()


@pytest.mark.parametrize("strict", [False, True])
@compiled_forms
def test_an_exported_model_survives_saving(form, strict, generator):
    model, x = packed_mlp(form), torch.randn(5, 20, generator=generator)
    program = torch.export.load(io.BytesIO(exported(model, x, strict=strict)))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("gblr.block_matmul.default") == (2 if form == "packed" else 0)
    assert "gblr.pack_blocks.default" not in targets  # contents were packed before
    for batch in (5, 9, 1):
        x = torch.randn(batch, 20, generator=generator)
        assert_near(program.module()(x), model(x).detach())


# copies and processes


@each_form
def test_copies_by_deepcopy_and_pickle_are_independent(form, generator):
    layer, x = packed_linear(form), torch.randn(5, 20, generator=generator)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    with torch.no_grad():
        before = layer(x)
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
            assert twin.form == form and torch.equal(twin(x), before)
            twin.u.mul_(2)
            assert_up_to_date(twin, x)
            assert torch.equal(layer(x), before)


def in_child(layer: nn.Module, x: torch.Tensor, program: bytes | None, answers) -> None:
    """What a child process gives: by the layer that it inherited or was sent, and by an exported one.

    Torch's own large operations would wait for ever in a forked child; the layer must not.
    """
    torch.set_num_threads(2)
    with torch.no_grad():
        results = [layer(x)]
        if program is not None:
            results.append(torch.export.load(io.BytesIO(program)).module()(x))
    answers.put([result.numpy() for result in results])


@needs_kernels
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_layers_work_in_other_processes(method, generator):
    """A forked child must not wait for the threads that its parent had; a spawned one is sent everything."""
    layer = packed_linear("packed", 400, 300, num_blocks=120)  # at five tokens large enough for two threads
    x = torch.randn(5, 300, generator=generator)
    program = exported(layer, x) if method == "spawn" else None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        with torch.no_grad():
            expected = layer(x)
    finally:
        torch.set_num_threads(threads)
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=in_child, args=(layer, x, program, answers))
    child.start()
    try:
        results = answers.get(timeout=30)
    finally:
        child.kill()
        child.join()
    assert len(results) == (2 if method == "spawn" else 1)
    for result in results:
        assert_near(torch.from_numpy(result), expected, 1e-6)


# threads


@each_form
def test_many_threads_may_call_one_layer(form, generator):
    layer = packed_linear(form, 100, 80, num_blocks=30)
    inputs = [torch.randn(tokens, 80, generator=generator) for tokens in (1, 2, 5, 9, 40) * 12]

    @torch.no_grad()
    def run(x):
        return layer(x)

    expected = [run(x) for x in inputs]
    with ThreadPoolExecutor(8) as pool:
        for found, wanted in zip(pool.map(run, inputs), expected, strict=True):
            assert_near(found, wanted, 0 if form == "packed" else 1e-6)


@each_form
def test_threads_that_meet_at_a_changed_layer_all_see_the_change(form, generator):
    layer, x = packed_linear(form, 100, 80, num_blocks=30), torch.randn(3, 80, generator=generator)
    ready = threading.Barrier(6)

    @torch.no_grad()
    def run(_):
        ready.wait(timeout=60)
        return layer(x)

    with ThreadPoolExecutor(6) as pool:
        for _ in range(15):
            with torch.no_grad():
                layer.u.mul_(1.1)
                expected = plain(layer, x)
            for y in pool.map(run, range(6)):
                assert_near(y, expected)


# modes and transforms


@each_form
def test_inference_mode_gives_the_same_bits(form, generator):
    layer, x = packed_linear(form), torch.randn(5, 20, generator=generator)
    with torch.no_grad():
        expected = layer(x)
    with torch.inference_mode():
        y = layer(x)
    assert y.is_inference() and torch.equal(y, expected)


@each_form
def test_vmap_and_grad_of_torch_func(form, generator):
    layer, x = packed_linear(form), torch.randn(4, 3, 20, generator=generator)
    assert_near(torch.func.vmap(layer)(x), plain(layer, x))
    states = [{name: factor * p.detach() for name, p in layer.named_parameters()} for factor in (1.0, 2.0, 3.0)]
    stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}

    def call(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))

    ensemble = torch.func.vmap(call, in_dims=(0, None))(stacked, x)
    for y, factor in zip(ensemble, (1.0, 2.0, 3.0), strict=True):
        assert_near(y, nn.functional.linear(x, factor**2 * layer.weight, factor * layer.bias))
    found = torch.func.grad(lambda p: call(p, x).square().sum())(states[0])
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert_near(found[name], parameter.grad)
    per_sample = torch.func.vmap(torch.func.grad(lambda p, x: call(p, x).square().sum()), in_dims=(None, 0))
    assert_near(per_sample(states[0], x)["u"].sum(0), layer.u.grad)
    with torch.no_grad():
        assert layer.form == form
        assert_near(layer(x), plain(layer, x))


@each_form
def test_forward_derivatives_are_not_lost(form, generator):
    layer = packed_linear(form).requires_grad_(False)
    x, direction = torch.randn(2, 5, 20, generator=generator)
    expected = nn.functional.linear(direction, layer.weight)
    _, by_func = torch.func.jvp(layer, (x,), (direction,))
    for grad in (True, False):
        with torch.set_grad_enabled(grad), forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, direction))).tangent
        for found in (by_func, tangent):
            assert_near(found, expected)


@each_form
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_a_traced_layer_computes(form, generator):
    layer, x = packed_linear(form).requires_grad_(False), torch.randn(2, 5, 20, generator=generator)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            with shapes_unchecked():  # sizes are tensors while tracing
                traced = torch.jit.trace(layer, (x[0],), check_trace=False)
            assert_near(traced(x[1]), plain(layer, x[1]))


@each_form
def test_fake_tensors_have_the_right_shapes(form):
    layer = packed_linear(form)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = layer(mode.from_tensor(torch.ones(5, 20)))
    assert y.shape == (5, 24)
    with torch.no_grad():
        assert layer.form == form
    assert_up_to_date(layer, torch.ones(2, 20))


@each_form
def test_gradient_checkpointing_changes_nothing(form, generator):
    layer, x = packed_linear(form), torch.randn(5, 20, generator=generator).requires_grad_()
    plain_ones = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    saved = checkpoint(layer, x, use_reentrant=False).square().sum()
    for a, b in zip(plain_ones, torch.autograd.grad(saved, [x, *layer.parameters()]), strict=True):
        assert_near(a, b, 1e-6)
