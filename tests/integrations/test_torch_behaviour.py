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

import copy
import gc
import io
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
from torch.utils._pytree import tree_flatten

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


# data_parallel_module, data_parallel_module_kwargs_only


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE, torch.float16])
def test_the_output_is_the_modules_on_the_first_device(
    kind: str, dtype: torch.dtype, by_name: bool
) -> None:
    layer, x = linear(dtype=dtype), batch(dtype=dtype)
    model = nn.DataParallel(layer)
    output = model(input=x) if by_name else model(x)
    assert (output.get_device(), output.dtype) == (0, dtype)
    tolerance = 2e-3 if dtype == torch.float16 else 1e-6
    assert_close(output, layer(x), rtol=tolerance, atol=tolerance)


# data_parallel, data_parallel_small_back, data_parallel_device_args


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_function_has_the_modules_output_and_gradients(
    kind: str, order: tuple[int, ...]
) -> None:
    layer, x = linear(order[0]), batch("cuda:1")
    here = x.cuda(order[0])
    expected = gradients(layer, layer(here).sum())
    with torch.cuda.device(order[0]):
        output = nn.parallel.data_parallel(layer, x, order)
    assert output.get_device() == order[0]
    assert_close(output, layer(here))
    assert_close(gradients(layer, output.sum()), expected)


def test_all_devices_run_by_default_and_in_another_order(kind: str) -> None:
    for order in (None, [0, 1], [1, 0]):
        seen = []
        layer = linear((order or [0])[0])
        layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].device))
        nn.parallel.data_parallel(layer, batch("cuda:1"), order)
        nn.DataParallel(layer, order)(batch())
        assert sorted(seen, key=str) == [CUDA0, CUDA0, CUDA1, CUDA1]


@pytest.mark.parametrize("ids", [(0, 1), (CUDA0, CUDA1), ["cuda:0", "cuda:1"], range(2)], ids=str)
def test_devices_may_be_named_in_any_way(kind: str, ids: Any) -> None:
    layer, x = linear(), batch().requires_grad_()
    output = nn.parallel.data_parallel(layer, x, ids, output_device=CUDA1)
    assert output.device == CUDA1
    assert_close(output.to(CUDA0), layer(x))
    model = nn.DataParallel(layer, ids, output_device=ids[1])
    assert (model.device_ids, model.output_device) == ([0, 1], 1)


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU:FutureWarning")  # by torch's gather
def test_an_output_device_of_minus_1_is_the_cpu(kind: str) -> None:
    layer, x = linear(), batch()
    output = nn.DataParallel(layer, output_device=-1)(x)
    assert output.device == torch.device("cpu")
    assert_close(output, layer(x).cpu())


# data_parallel_multiple_input


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU:FutureWarning")  # by torch's gather
@pytest.mark.parametrize("ids", [(0, 1), (1, 0), (0,), None], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_several_inputs_of_the_cpu_get_their_gradients(
    kind: str, ids: Any, with_bias: bool
) -> None:
    def forward(self: Any, x: Tensor, y: Tensor, scale: float, bias: Any = None) -> Tensor:
        product = scale * x * y
        return product if bias is None else product + scale * bias

    net = Lambda(forward)
    x, y, bias = torch.randn(3, 5, 5, dtype=DOUBLE).unbind()
    x, y = x.requires_grad_(), y.requires_grad_()
    named = {"bias": bias} if with_bias else {}
    expected = net(x, y, 0.5, **named)
    of_inputs = torch.autograd.grad(expected.sum(), (x, y))
    for output in (
        nn.DataParallel(net, ids)(x, y, 0.5, **named),
        nn.parallel.data_parallel(net, (x, y, 0.5), ids, module_kwargs=named),
    ):
        assert output.get_device() == (ids or (0,))[0]
        assert_close(output.cpu(), expected)
        assert_close(torch.autograd.grad(output.sum(), (x, y)), of_inputs)


# data_parallel_model_device


def both_forms(module: nn.Module, x: Tensor, ids: Any) -> Iterator[Callable[[], Tensor]]:
    yield lambda: nn.DataParallel(module, ids)(x)
    yield lambda: nn.parallel.data_parallel(module, x, ids)


ELSEWHERE = {
    "on the CPU": (["cpu"], None),
    "on the other": ([1], None),
    "on the first that comes second": ([0], [1, 0]),
    "one part on the CPU": (["cpu", 0], [0, 1]),
    "spread over both": ([0, 1], None),
    "spread over both, reversed": ([0, 1], [1, 0]),
}


@pytest.mark.parametrize(("places", "ids"), ELSEWHERE.values(), ids=ELSEWHERE)
def test_a_module_that_is_not_on_the_first_device_is_refused(
    kind: str, places: list[Any], ids: Any
) -> None:
    net = nn.Sequential(*(nn.Linear(2, 2).to(place) for place in places))
    before = [p.device for p in net.parameters()]
    first = (ids or [0])[0]
    for call in both_forms(net, torch.ones(4, 2), ids):
        with pytest.raises(RuntimeError, match=f"parameters and buffers on device cuda:{first}"):
            call()
    assert [p.device for p in net.parameters()] == before


@pytest.mark.parametrize(("place", "ids"), [(0, None), (0, [0, 1]), (1, [1, 0])])
def test_a_module_on_the_first_device_runs(kind: str, place: int, ids: Any) -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).cuda(place)
    for call in both_forms(net, torch.ones(4, 2), ids):
        assert_close(call(), net(torch.ones(4, 2, device=place)))


def test_with_one_device_only_the_class_moves_the_module(kind: str) -> None:
    net, x = nn.Linear(2, 2), torch.ones(4, 2)
    with pytest.raises(RuntimeError, match="parameters and buffers on device cuda:1"):
        nn.parallel.data_parallel(net, x, [1])
    assert nn.DataParallel(net, [1])(x).device == net.weight.device == CUDA1


def test_the_wrapper_can_be_moved_with_its_module(kind: str) -> None:
    net, x = nn.Linear(2, 2), torch.ones(4, 2)
    assert_close(nn.DataParallel(net, [1, 0]).to("cuda:1")(x), net(x.cuda(1)))


# data_parallel_module_zero_inputs


@pytest.mark.parametrize("ids", [[0], [0, 1]])
def test_a_call_without_inputs_runs_on_the_first_device(kind: str, ids: list[int]) -> None:
    net = Lambda(lambda self: torch.eye(2, 3, device="cuda"))
    parallel = nn.parallel.data_parallel
    for output in (nn.DataParallel(net, ids)(), parallel(net, None, ids), parallel(net, (), ids)):
        assert output.device == CUDA0
        assert_close(output, torch.eye(2, 3, device="cuda"))


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

    def forward(self: Any, x: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return x

    with torch.no_grad():
        nn.parallel.data_parallel(Lambda(forward), batch(), (0, 1))
    nn.parallel.data_parallel(Lambda(forward), batch(), (0, 1))
    assert seen == [False, False, True, True]


# data_parallel_rnn


def test_an_lstm_that_flattens_its_weights_learns_the_same(kind: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()
        return self.rnn(x)[0]

    rnn = nn.LSTM(3, 4, batch_first=True, bidirectional=True)
    bare = Lambda(forward, rnn=rnn).to(0, DOUBLE)
    model = nn.DataParallel(copy.deepcopy(bare))
    x = torch.ones(4, 4, 3, dtype=DOUBLE, device=0)
    with torch.no_grad():
        assert_close(model(x), bare(x))
    for net in (bare, model):
        optimizer = torch.optim.SGD(net.parameters(), lr=10)
        net(x).square().mean().backward()
        optimizer.step()
    assert_close([*model.parameters()], [*bare.parameters()])


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


# data_parallel_sparse


def test_sparse_gradients_are_added_up(kind: str) -> None:
    layer = nn.Embedding(10, 5, sparse=True).to("cuda:0", DOUBLE)
    tokens = torch.randint(10, (20, 5), device="cuda:1")
    expected = gradients(layer, layer(tokens.cuda(0)).sum())
    output = nn.parallel.data_parallel(layer, tokens)
    assert_close(output, layer(tokens.cuda(0)))
    found = gradients(layer, output.sum())
    assert found[0].is_sparse
    assert found[0].type() == "torch.cuda.sparse.DoubleTensor"
    assert_close(found[0].coalesce().to_dense(), expected[0].to_dense())


# data_parallel_complex


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_complex_parameters_and_inputs_stay_complex(kind: str, device: str) -> None:
    if kind == "torch" and not has_torch("2.13"):
        pytest.skip(
            "torch's own replicas get pairs of numbers from CUDA, as emulated devices do not"
        )
    weight = nn.Parameter(torch.randn(10, device="cuda", dtype=torch.complex128))
    net, x = Lambda(lambda self, x: x * self.weight, weight=weight), batch(device, torch.complex128)
    expected, output = net(x.cuda()), nn.DataParallel(net)(x)
    assert_close(output, expected)
    assert_close(gradients(net, output.abs().sum()), gradients(net, expected.abs().sum()))


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
    def forward(self: Any, x: Tensor) -> Tensor:
        self.zero_grad()
        return x

    with pytest.warns(UserWarning, match=r"zero_grad\(\) from a module created with nn.DataPara"):
        nn.DataParallel(Lambda(forward))(batch())


# autocast


def test_forward_may_be_decorated_with_autocast(kind: str) -> None:
    forward = torch.autocast("cuda")(lambda self, x: self.layer(x))
    model = nn.DataParallel(Lambda(forward, layer=linear(dtype=torch.float32)))
    assert model(batch(dtype=torch.float32)).dtype == torch.float16


# strided_grad_layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_have_the_strides_of_their_parameters(kind: str, dtype: torch.dtype) -> None:
    formats = [torch.contiguous_format, torch.channels_last]
    layers = [
        nn.Conv2d(4, 4, 2).to(memory_format=memory_format, dtype=dtype) for memory_format in formats
    ]
    bare = nn.Sequential(*layers).cuda()
    model = nn.DataParallel(copy.deepcopy(bare))
    x = torch.randn(4, 4, 5, 5, device="cuda", dtype=dtype)
    tolerance = 1e-3 if dtype == torch.float16 else 1e-5
    for _ in range(2):  # gradients are made, then filled again
        for net in (bare, model):
            net.zero_grad(set_to_none=False)
            net(x).float().square().mean().backward()
        for ours, its, memory_format in zip(model.module, bare, formats, strict=True):
            assert ours.weight.grad.is_contiguous(memory_format=memory_format)
            assert_close(ours.weight.grad, its.weight.grad, rtol=tolerance, atol=tolerance)


# parameter_list_dict_replica


@pytest.mark.parametrize("kind_of_list", ["list", "dict"])
def test_lists_and_dictionaries_of_parameters_are_replicated(kind: str, kind_of_list: str) -> None:
    values = [nn.Parameter(torch.randn(10, dtype=DOUBLE)) for _ in range(2)]
    if kind_of_list == "list":
        members: Any = nn.ParameterList(values)
    else:
        members = nn.ParameterDict(dict(zip("01", values, strict=True)))
    seen = []

    def forward(self: Any, x: Tensor) -> Tensor:
        keys: Any = ("0", "1") if kind_of_list == "dict" else (0, 1)
        found = [self.members[key] for key in keys]
        seen.append(
            [
                (p.device, p.requires_grad, torch.equal(p.cpu(), v))
                for p, v in zip(found, plain, strict=True)
            ]
        )
        return x * found[0] + found[1]

    plain = [value.detach().clone() for value in values]
    net = Lambda(forward, members=members).cuda()
    x = batch()
    expected = gradients(net, net(x).sum())
    seen.clear()
    assert_close(gradients(net, nn.DataParallel(net)(x).sum()), expected)
    assert sorted(seen, key=str) == [[(device, True, True)] * 2 for device in (CUDA0, CUDA1)]


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
    def forward(self: Any, x: Tensor) -> Any:
        return {}["absent"]

    with pytest.raises(KeyError, match="absent") as caught:
        nn.DataParallel(Lambda(forward))(batch())
    where = str(caught.value) if kind == "torch" else "\n".join(notes_of(caught.value))
    assert "in replica 0 on device 0" in where or "in replica 0 on cuda:0" in where
    net = Lambda(forward)
    with pytest.raises(KeyError, match=r"Caught KeyError in replica 0 on device 0\.\nOriginal"):
        parallel_apply((net, net), (batch(), batch()), devices=(0, 0))


# scatter_cpu, scatter_gpu, gather_cpu, gather_gpu, gather_different_len_dicts


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU:FutureWarning")  # by torch's gather
@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:1"])
def test_scatter_cuts_and_returns_gradients(cuda: list[torch.device], device: str) -> None:
    x = torch.randn(4, 4, dtype=DOUBLE, device=device, requires_grad=True)
    first, second = scatter(x, (0, 1))
    assert (first.device, second.device) == (CUDA0, CUDA1)
    assert_close(torch.cat([first.cpu(), second.cpu()]), x.cpu())
    second.backward(torch.full_like(second, 2))
    assert x.grad is not None
    assert x.grad.tolist() == [[0.0] * 4] * 2 + [[2.0] * 4] * 2

    def halves(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(scatter(x, (0, 1)))

    assert gradcheck(halves, (x,))
    assert gradgradcheck(halves, (x,))


@pytest.mark.filterwarnings("ignore:Using -1 to represent CPU:FutureWarning")  # by torch's scatter
@pytest.mark.parametrize("target", ["cpu", 0, 1])
@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")
@pytest.mark.parametrize("shape", [(2, 4), ()], ids=["rows", "0-dim"])
def test_gather_joins_and_returns_gradients(
    cuda: list[torch.device], target: Any, shape: tuple[int, ...]
) -> None:
    inputs = tuple(
        torch.randn(shape, dtype=DOUBLE, device=device, requires_grad=True) for device in cuda
    )
    joined = gather(inputs, target)
    assert joined.shape == ((4, 4) if shape else (2,))
    assert joined.device == (torch.device("cpu") if target == "cpu" else cuda[target])
    halves = joined.chunk(2) if shape else joined.unbind()
    assert_close([half.cpu() for half in halves], [x.cpu() for x in inputs])
    weights = torch.randn_like(joined)
    joined.backward(weights)
    rows = weights.chunk(2) if shape else weights.unbind()
    for x, row in zip(inputs, rows, strict=True):
        assert x.grad is not None
        assert_close(x.grad.cpu(), row.cpu())
    assert gradcheck(lambda *inputs: gather(inputs, target), inputs)
    assert gradgradcheck(lambda *inputs: gather(inputs, target), inputs)


@pytest.mark.filterwarnings("ignore:Was asked to gather along dimension 0:UserWarning")
def test_0_dim_outputs(kind: str) -> None:
    x = torch.arange(4.0, dtype=DOUBLE, requires_grad=True)
    output = nn.DataParallel(Lambda(lambda self, x: x.square().sum()))(x)
    expected: Any = [0.0 + 1.0, 4.0 + 9.0] if kind == "torch" else 14.0
    assert output.tolist() == expected


def test_dictionaries_of_different_lengths_cannot_be_gathered(kind: str) -> None:
    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        return {"a": x, "b": x} if x.get_device() else {"a": x}

    error = ValueError if kind == "torch" else GatherError
    with pytest.raises(error, match=r"same number of keys|different items"):
        nn.DataParallel(Lambda(forward))(batch())


# replicate, replicate_buffers, save_replica_module


def test_replicas_have_parameters_and_buffers_on_their_devices(kind: str) -> None:
    net, x = nn.Sequential(linear(), nn.BatchNorm1d(5).to("cuda", DOUBLE)).eval(), batch()
    for device, replica in enumerate(nn.DataParallel(net).replicate(net, [0, 1])):
        norm = replica[1]
        tensors = replica[0].weight, norm.bias, norm.running_mean, norm.num_batches_tracked
        assert {tensor.get_device() for tensor in tensors} == {device}
        assert_close(replica(x.cuda(device)).cuda(0), net(x))


def test_a_module_that_is_not_on_the_first_device_is_not_replicated(kind: str) -> None:
    layer = linear("cuda:1")
    with pytest.raises(RuntimeError, match=r"on device"):
        nn.DataParallel(layer).replicate(layer, [0, 1])


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
