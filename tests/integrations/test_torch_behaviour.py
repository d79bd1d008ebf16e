"""What PyTorch's tests of DataParallel ask for, of torch's class and of ours in its place.

It runs on two emulated devices that are named "cuda". So torch's class shows that these behave as
CUDA devices do, and ours that a script does not notice that it was replaced. Each section has a
comment with the tests that it stands for, in torch's ``test/distributed/test_data_parallel.py``
(without their ``test_``), and at the end those of ``torch.cuda.comm``.

Ours differs on purpose (the README's "What stays the same, what is better") in three of them: an
unused parameter gets no gradient (function_deletion), 0-dim outputs are one value (gather), and
parameters of the first replica are those of the module (parameter_list_dict_replica).
"""

from __future__ import annotations

import gc
import io
import itertools
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck
from torch.cuda import comm
from torch.nn.parallel import gather, parallel_apply, replicate, scatter
from torch.testing import assert_close
from torch.utils._pytree import tree_flatten, tree_map

from balanced_dp import GatherError, emulate_devices
from balanced_dp.integrations.replacements import replaced_data_parallel
from balanced_dp.tuning.loop import Loop

from ..modules import Lambda
from ..notes import notes_of
from ..tuning.measured import option
from ..versions import has_torch

CUDA0, CUDA1 = torch.device("cuda:0"), torch.device("cuda:1")
DOUBLE = torch.float64


@pytest.fixture
def cuda() -> Iterator[list[torch.device]]:
    with emulate_devices(2, as_cuda=True) as devices:
        yield list(devices)


@pytest.fixture(params=["torch", "ours", "ours, uneven"])
def kind(request: pytest.FixtureRequest, cuda: list[torch.device]) -> Iterator[str]:
    """Whose nn.DataParallel it is; the last one gives the first device one sample."""
    if request.param == "torch":
        yield request.param
        return
    loop = Loop(1 if "uneven" in request.param else None, cuda)
    loop.options[()] = option((1,), (1,))  # else the first iterations are even
    with replaced_data_parallel(loop):
        yield request.param


def linear(device: Any = "cuda", dtype: torch.dtype = DOUBLE) -> nn.Linear:
    return nn.Linear(10, 5).to(device, dtype)


def batch(device: Any = "cuda", dtype: torch.dtype = DOUBLE, size: int = 24) -> Tensor:
    return torch.randn(size, 10, device=device, dtype=dtype)


def gradients(module: nn.Module, loss: Tensor) -> list[Any]:
    module.zero_grad()
    loss.backward()
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


# data_parallel, data_parallel_small_back, data_parallel_device_args, data_parallel_module,
# data_parallel_module_kwargs_only, data_parallel_multiple_input, data_parallel_module_zero_inputs,
# data_parallel_rnn, data_parallel_sparse, data_parallel_complex, strided_grad_layout, those with an
# empty list, dict or tuple, parameter_list_dict_replica


def several(self: Any, x: Tensor, y: Tensor, scale: float, bias: Any = None) -> Tensor:
    product = scale * x * y
    return product if bias is None else product + scale * bias


def flattened(self: Any, x: Tensor) -> Tensor:
    self.rnn.flatten_parameters()
    return self.rnn(x)[0]


def lstm(device: Any) -> nn.Module:
    rnn = nn.LSTM(10, 4, batch_first=True, bidirectional=True)
    return Lambda(lambda self, x: flattened(self, x[:, None]), rnn=rnn).to(device, DOUBLE)


def of_weights(keys: Any, members: Any) -> Callable[[Any], nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        first, second = (self.members[key] for key in keys)
        assert first.device == second.device == x.device
        assert first.requires_grad
        return x * first + second

    def make(device: Any) -> nn.Module:
        values = [nn.Parameter(torch.randn(10, dtype=DOUBLE)) for _ in keys]
        return Lambda(forward, members=members(values)).to(device)

    return make


def convolution(device: Any) -> nn.Module:
    module = nn.Sequential(nn.Linear(10, 36), nn.Unflatten(1, (4, 3, 3)), nn.Conv2d(4, 4, 2))
    return module.to(device, DOUBLE, memory_format=torch.channels_last)


def simple(forward: Callable[..., Any]) -> Callable[[Any], nn.Module]:
    return lambda device: Lambda(forward)


def complex_weight(device: Any) -> nn.Module:
    weight = nn.Parameter(torch.randn(10, dtype=torch.complex128))
    return Lambda(lambda self, x: (x * self.weight).abs(), weight=weight).to(device)


def device_of(name: Any) -> torch.device:
    return torch.device("cpu" if name == -1 else f"cuda:{name}" if isinstance(name, int) else name)


def both_forms(module: nn.Module, ids: Any, options: Any = None) -> list[Callable[..., Tensor]]:
    """Returns torch's class and its function."""
    options, function = options or {}, nn.parallel.data_parallel
    return [
        lambda *args, **named: nn.DataParallel(module, ids, **options)(*args, **named),
        lambda *args, **named: function(module, args, ids, module_kwargs=named, **options),
    ]


CUBE = torch.randn(3, 5, 5, dtype=DOUBLE)
X = torch.randn(24, 10, dtype=DOUBLE)
IDS = [(0, 1), (CUDA0, CUDA1), ["cuda:0", "cuda:1"], range(2)]
CASES: dict[str, tuple[Any, ...]] = {
    "plain": (linear, [X]),
    "float32": (lambda device: linear(device, torch.float32), [X.float()]),
    "float16": (lambda device: linear(device, torch.float16), [X.half()]),
    "by name": (linear, [], {"input": X}),
    "several": (simple(several), [*CUBE[:2], 0.5]),
    "several, one named": (simple(several), [*CUBE[:2], 0.5], {"bias": CUBE[2]}),
    "no inputs": (simple(lambda self: torch.eye(2, 3, device="cuda")), []),
    "lstm": (lstm, [X]),
    "sparse": (lambda d: nn.Embedding(10, 5, sparse=True).to(d, DOUBLE), [X.long().abs()]),
    "complex": (complex_weight, [X.to(torch.complex128)]),
    "channels last": (convolution, [X]),
    "list": (of_weights((0, 1), nn.ParameterList), [X]),
    "dict": (of_weights("01", lambda v: nn.ParameterDict(dict(zip("01", v, strict=True)))), [X]),
}


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU:FutureWarning")  # by torch's gather
@pytest.mark.parametrize(
    ("name", "ids", "options"),
    [
        *((name, None, {}) for name in CASES),
        *(("plain", ids, {"output_device": ids[1]}) for ids in IDS),
        *((name, (1, 0), {}) for name in ("plain", "several", "lstm")),
        *((name, [0], {}) for name in ("plain", "several", "no inputs")),
        ("plain", None, {"output_device": -1}),
    ],
)
def test_outputs_and_gradients_are_the_modules(
    kind: str, name: str, ids: Any, options: dict[str, Any]
) -> None:
    make, args, named = (*CASES[name], {})[:3]
    if name == "complex" and kind == "torch" and not has_torch("2.13"):
        pytest.skip(
            "before 2.13, torch expects pairs of reals from CUDA's broadcast of complex tensors"
        )
    first, where = device_of((ids or [0])[0]), options.get("output_device")
    module = make(first)
    tolerance = 2e-2 if name == "float16" else 1e-6

    def results(call: Callable[..., Tensor], device: Any, output_device: torch.device) -> list[Any]:
        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.to(device, copy=True).requires_grad_(value.is_floating_point())

        inputs, keywords = tree_map(leaf, (args, named))
        output = call(*inputs, **keywords)
        assert output.device == output_device
        found = [output, *(gradients(module, output.sum()) if output.requires_grad else [])]
        found += [getattr(value, "grad", None) for value in inputs]
        return [None if tensor is None else tensor.to_dense().cpu() for tensor in found]

    expected = results(module, first, first)
    for device, call in itertools.product(["cpu", "cuda:1"], both_forms(module, ids, options)):
        found = results(call, device, first if where is None else device_of(where))
        assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for parameter in module.parameters():
        assert parameter.grad.is_sparse == (name == "sparse")
        assert parameter.grad.is_sparse or parameter.grad.stride() == parameter.stride()


def test_all_devices_run_in_the_order_of_their_names(kind: str) -> None:
    for ids in (None, *IDS, [1, 0]):
        seen: list[torch.device] = []
        layer = linear((ids or [0])[0] if ids == [1, 0] else 0)
        layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].device))
        nn.parallel.data_parallel(layer, batch("cuda:1"), ids)
        model = nn.DataParallel(layer, ids)
        model(batch())
        assert sorted(seen, key=str) == [CUDA0, CUDA0, CUDA1, CUDA1]
        assert model.device_ids == ([1, 0] if ids == [1, 0] else [0, 1])


# data_parallel_model_device


ELSEWHERE = {
    "on the CPU": (["cpu"], None),
    "on the other": ([1], None),
    "on the first that comes second": ([0], [1, 0]),
    "on the other, alone": ([0], [1]),
    "one part on the CPU": (["cpu", 0], [0, 1]),
    "spread over both": ([0, 1], None),
    "spread over both, reversed": ([0, 1], [1, 0]),
}


@pytest.mark.parametrize(("places", "ids"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_module_must_be_on_the_first_device(kind: str, places: list[Any], ids: Any) -> None:
    net = nn.Sequential(*(nn.Linear(2, 2).to(place) for place in places))
    before = [p.device for p in net.parameters()]
    message = f"parameters and buffers on device cuda:{(ids or [0])[0]}"
    for call in both_forms(net, ids)[len(ids or [0, 1]) == 1 :]:
        with pytest.raises(RuntimeError, match=message):
            call(torch.ones(4, 2))
    assert [p.device for p in net.parameters()] == before


def test_the_class_moves_the_module(kind: str) -> None:
    """With one device, and with its wrapper."""
    net, x = nn.Linear(2, 2), torch.ones(4, 2)
    assert nn.DataParallel(net, [1])(x).device == net.weight.device == CUDA1
    model = nn.DataParallel(nn.Linear(2, 2), [1, 0]).to("cuda:1")
    assert_close(model(x), model.module(x.cuda(1)))


# data_parallel_nested_output, data_parallel_nested_input, those with an empty list, dict or tuple,
# scatter_namedtuple, gather_namedtuple

Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    "nest",
    [
        lambda x: {"data": x, "empty": []},
        lambda x: {"data": x, "empty": {}},
        lambda x: {"data": x, "empty": ()},
        lambda x: ({"x": x}, (x.sin(), x)),
        lambda x: [x, (x.sin(), [x + 1]), OrderedDict(a=x.cos(), b=[x * 2]), None],
        lambda x: Pair(x + 1, x * 2),
    ],
)
def test_inputs_and_outputs_may_be_nested(kind: str, nest: Callable[[Tensor], Any]) -> None:
    seen = []
    net = Lambda(lambda self, *args, x: seen.append((args, x)) or x)
    given, expected = nest(torch.arange(6.0, device=1)), nest(torch.arange(6.0, device=0))
    output = nn.DataParallel(net)(given, x=given)
    assert_close(output, expected)
    structures = [tree_flatten(each)[1] for each in (output, *seen)]
    assert structures == [tree_flatten(each)[1] for each in (given, *[((given,), given)] * 2)]


# data_parallel_no_grad


def test_replicas_have_the_callers_grad_mode(kind: str) -> None:
    seen: list[bool] = []
    net = Lambda(lambda self, x: seen.append(torch.is_grad_enabled()) or x)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            nn.parallel.data_parallel(net, batch(), (0, 1))
    assert seen == [False, False, True, True]


# data_parallel_lazy_linear


def test_a_lazy_module_is_refused(kind: str) -> None:
    with pytest.raises((RuntimeError, ValueError), match="uninitialized parameter"):
        nn.DataParallel(nn.LazyLinear(10).to(0))(batch())  # here by .to(0), on CUDA by the call


# data_parallel_model_no_refcycles


def test_a_model_leaves_no_reference_cycles(kind: str) -> None:
    gc.collect()
    model = nn.DataParallel(linear())
    model(batch())
    del model
    assert gc.collect() == 0


# data_parallel_buffers_requiring_grad


def test_buffers_that_require_gradients_get_them(kind: str) -> None:
    scale = torch.randn(3, device="cuda", dtype=DOUBLE, requires_grad=True)
    net = Lambda(lambda self, x: x * self.scale + self.shift)
    net.register_buffer("scale", scale)
    net.register_buffer("shift", scale.detach() + 1)
    model, x = nn.DataParallel(net, [0, 1]), torch.randn(4, 3, device="cuda", dtype=DOUBLE)
    assert gradcheck(lambda _: model(x), (net.scale,))


# data_parallel_function_deletion


def test_gradients_of_gradients(kind: str) -> None:
    layer = nn.Linear(4, 1).cuda()
    x = torch.ones(4, 4, requires_grad=True).cuda()
    output = nn.DataParallel(layer)(x)
    [of_x] = torch.autograd.grad(output, x, torch.ones_like(output), create_graph=True)
    of_weight, of_bias = gradients(layer, of_x.mean())
    assert_close(of_weight, torch.full((1, 4), 0.25, device="cuda"))
    if kind == "torch":
        assert_close(of_bias, torch.zeros(1, device="cuda"))
    else:
        assert of_bias is None  # as without the wrapper


# zero_grad


def test_zero_grad_inside_forward_warns(kind: str) -> None:
    with pytest.warns(UserWarning, match=r"zero_grad\(\) from a module created with nn.DataPara"):
        nn.DataParallel(Lambda(lambda self, x: self.zero_grad() or x))(batch())


# autocast


def test_forward_may_be_decorated_with_autocast(kind: str) -> None:
    forward = torch.autocast("cuda")(lambda self, x: self.layer(x))
    model = nn.DataParallel(Lambda(forward, layer=linear(dtype=torch.float32)))
    assert model(batch(dtype=torch.float32)).dtype == torch.float16


# parallel_apply, parallel_apply_autocast, parallel_apply_passes_exception


@pytest.mark.parametrize("autocast", [False, True])
def test_parallel_apply_calls_each_module_where_it_is(kind: str, autocast: bool) -> None:
    layers = [linear(device, torch.float32) for device in (0, 1)]
    inputs = [batch(device, torch.float32) for device in (0, 1)]
    model = nn.DataParallel(layers[0])
    with torch.autocast("cuda", enabled=autocast):
        expected = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
        tuples = [(x,) for x in inputs]
        found = model.parallel_apply(layers, tuples, [{}, {}])
        assert_close(found, expected)
        for arguments in (tuples, inputs):  # the function also takes the only argument as it is
            assert_close(parallel_apply(layers, arguments), expected)
    assert found[1].dtype == (torch.float16 if autocast else torch.float32)


def test_an_exception_in_a_replica_keeps_its_type_and_says_which(kind: str) -> None:
    net = Lambda(lambda self, x: {}["absent"])
    with pytest.raises(KeyError, match="absent") as caught:
        nn.DataParallel(net)(batch())
    where = str(caught.value) if kind == "torch" else "\n".join(notes_of(caught.value))
    assert "in replica 0 on device 0" in where or "in replica 0 on cuda:0" in where
    with pytest.raises(KeyError, match=r"Caught KeyError in replica 0 on device 0\.\nOriginal"):
        parallel_apply((net, net), (batch(), batch()), devices=(0, 0))


# scatter_cpu, scatter_gpu, gather_cpu, gather_gpu, gather_different_len_dicts


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU:FutureWarning")  # by torch's gather
@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:1"])
def test_scatter_is_differentiable(cuda: list[torch.device], device: str) -> None:
    x = torch.randn(4, 4, dtype=DOUBLE, device=device, requires_grad=True)
    assert [chunk.device for chunk in scatter(x, (0, 1))] == [CUDA0, CUDA1]
    assert_close([chunk.cpu() for chunk in scatter(x, (0, 1))], [*x.cpu().chunk(2)])
    assert gradcheck(lambda x: tuple(scatter(x, (0, 1))), (x,))
    assert gradgradcheck(lambda x: tuple(scatter(x, (0, 1))), (x,))


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU:FutureWarning")  # by torch's scatter
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")
@pytest.mark.parametrize("target", ["cpu", 0, 1])
@pytest.mark.parametrize("shape", [(2, 4), ()], ids=["rows", "0-dim"])
def test_gather_is_differentiable(
    cuda: list[torch.device], target: Any, shape: tuple[int, ...]
) -> None:
    inputs = [torch.randn(shape, dtype=DOUBLE, device=d, requires_grad=True) for d in cuda]
    joined = gather(inputs, target)
    assert joined.device == device_of(target)
    assert_close(joined.cpu(), torch.cat([torch.atleast_1d(x.cpu()) for x in inputs]))
    assert gradcheck(lambda *inputs: gather(inputs, target), inputs)
    assert gradgradcheck(lambda *inputs: gather(inputs, target), inputs)


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")
def test_0_dim_outputs(kind: str) -> None:
    x = torch.arange(4.0, dtype=DOUBLE, requires_grad=True)
    output = nn.DataParallel(Lambda(lambda self, x: x.square().sum()))(x)
    expected: Any = [0.0 + 1.0, 4.0 + 9.0] if kind == "torch" else 14.0
    assert output.tolist() == expected


def test_dictionaries_of_different_lengths_cannot_be_gathered(kind: str) -> None:
    net = Lambda(lambda self, x: {"a": x, "b": x} if x.get_device() else {"a": x})
    error = ValueError if kind == "torch" else GatherError
    with pytest.raises(error, match=r"same number of keys|different items"):
        nn.DataParallel(net)(batch())


# replicate, replicate_buffers, save_replica_module


def test_replicas_have_parameters_and_buffers_on_their_devices(kind: str) -> None:
    net, x = nn.Sequential(linear(), nn.BatchNorm1d(5).to("cuda", DOUBLE)).eval(), batch()
    for device, replica in enumerate(nn.DataParallel(net).replicate(net, [0, 1])):
        norm = replica[1]
        tensors = replica[0].weight, norm.bias, norm.running_mean, norm.num_batches_tracked
        assert {tensor.get_device() for tensor in tensors} == {device}
        assert_close(replica(x.cuda(device)).cuda(0), net(x))
    with pytest.raises(RuntimeError, match=r"on device"):
        nn.DataParallel(net).replicate(net.to("cuda:1"), [0, 1])


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_can_be_saved(cuda: list[torch.device], detach: bool) -> None:
    layer, file = linear(), io.BytesIO()
    torch.save(replicate(layer, [0, 1], detach), file)
    file.seek(0)
    for device, replica in enumerate(torch.load(file, weights_only=False)):
        assert replica.weight.get_device() == device
        assert_close(replica.weight.cpu(), layer.weight.cpu())


# Of TestCudaComm in torch's test_cuda_multigpu.py: broadcast_cpu, broadcast_gpu,
# broadcast_coalesced, reduce_add_coalesced, scatter_*, gather*, memory_format_*


def tensors_of_many_types(device: int) -> list[Tensor]:
    sparse = torch.tensor([1.0, 0.0, 2.0], device=device).to_sparse()
    dense = [torch.arange(4.0).to(device, dtype) for dtype in (torch.float32, torch.int64, DOUBLE)]
    return [dense[0], sparse, *dense[1:], torch.empty(0, device=device), dense[0] + 1]


def test_broadcast_and_reduce(cuda: list[torch.device]) -> None:
    pairs = [tensors_of_many_types(0), tensors_of_many_types(1)]
    both = comm.broadcast_coalesced(pairs[0], (0, 1), 20)
    for device, copies, tensors in zip(cuda, both, pairs, strict=True):
        for found, tensor in zip(copies, tensors, strict=True):
            assert (found.device, found.type()) == (device, tensor.type())
            assert found.to_dense().tolist() == tensor.to_dense().tolist()
    for total, one in zip(comm.reduce_add_coalesced(pairs, 0, 20), pairs[0], strict=True):
        assert (total.get_device(), total.type()) == (0, one.type())
        assert total.to_dense().tolist() == (one.to_dense() * 2).tolist()
    assert [x.device for x in comm.broadcast(torch.ones(2), (0, 1))] == cuda


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("dim", "sizes"), [(0, None), (1, [1, 3]), (-1, None)])
def test_comm_scatter_and_gather(
    cuda: list[torch.device], device: str, dim: int, sizes: list[int] | None
) -> None:
    x = torch.randn(4, 4, 2, 2, device=device).to(memory_format=torch.channels_last)
    chunks = comm.scatter(x, (0, 1), sizes, dim)
    assert [chunk.device for chunk in chunks] == cuda
    assert_close(
        [chunk.cpu() for chunk in chunks], list(x.cpu().split(sizes or [x.size(dim) // 2] * 2, dim))
    )
    for target in (*cuda, torch.device("cpu")):
        joined = comm.gather(chunks, dim, target)
        assert joined.device == target
        assert_close(joined.cpu(), x.cpu())
    with torch.cuda.device(1):
        assert comm.gather(chunks, dim).device == CUDA1
    if dim == 0:
        parts = (*chunks, *scatter(x, (0, 1)), comm.gather(chunks))
        assert all(part.is_contiguous(memory_format=torch.channels_last) for part in parts)
    with pytest.raises(RuntimeError):
        comm.scatter(x, (0, 1), [1, 2], dim)
