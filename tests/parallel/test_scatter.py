from __future__ import annotations

from collections import UserDict

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from balanced_dp import (
    BalancedDataParallel,
    BalanceWarning,
    GatherError,
    ScatterError,
    emulate_devices,
)
from balanced_dp.parallel.scatter import Inputs

from ..modules import Lambda
from .containers import Frozen, Pair
from .test_gather import gather

CPU = torch.device("cpu")


def scatter(inputs, devices, chunk_sizes, **options):
    """Scatter keyword arguments and return their values for each device."""
    inputs = Inputs(lambda **_: None, (), dict(inputs), **options)
    return [list(kwargs.values()) for _, kwargs in inputs.scatter(devices, chunk_sizes)]


def find_batch_size(inputs, **options):
    return Inputs(lambda **_: None, (), dict(inputs), **options).batch_size()


def cut(value, *chunk_sizes, **options):
    """Scatter one argument called ``x`` and return its value for each device."""
    devices = [CPU] * len(chunk_sizes)
    return [values[0] for values in scatter([("x", value)], devices, chunk_sizes, **options)]


# Which batch size.


@pytest.mark.parametrize(
    ("inputs", "batch_size"),
    [
        ([("a", torch.zeros(5, 2)), ("b", torch.zeros(7))], 5),
        ([("a", None), ("b", [1, {"c": (torch.tensor(1.0), torch.zeros(5))}])], 5),
        ([("a", Frozen("text", Pair(3, torch.zeros(5))))], 5),
        ([("mask", torch.zeros(9)), ("a", torch.zeros(5))], 5),
        ([("a", 1), ("b", [torch.tensor(1.0)])], None),
    ],
)
def test_the_batch_size_is_that_of_the_first_tensor_to_be_cut(inputs, batch_size):
    assert find_batch_size(inputs, broadcast={"mask"}) == batch_size


def test_a_first_tensor_without_the_batch_dimension_is_an_error():
    with pytest.raises(ScatterError, match=r"input x of shape \(5,\) has no dimension 1 to split"):
        find_batch_size([("x", torch.zeros(5))], dim=1)


# Tensors and containers.


def test_tensors_are_cut_by_the_chunk_sizes_along_dim():
    x = torch.arange(12).view(2, 6)
    assert [chunk.tolist() for chunk in cut(x, 1, 2, 3, dim=1)] == [
        [[0], [6]],
        [[1, 2], [7, 8]],
        [[3, 4, 5], [9, 10, 11]],
    ]


@pytest.mark.parametrize("path", ["x", "x.batch", "x.batch.mask"])
def test_broadcast_takes_a_path_or_one_above_it(path):
    value = {"batch": {"mask": torch.arange(3)}}
    assert repr(cut(value, 2, 3, broadcast={path})) == repr([value] * 2)
    for other in ("mask", "batch", "x.mask", "x.bat", "x.batch.mask.more"):
        with pytest.raises(ScatterError):
            cut(value, 2, 3, broadcast={other})


def test_a_tensor_of_another_size_is_named_with_the_remedy():
    """One fork caught everything around scatter, printed "error" and called quit(). We blamed the
    tensor that was right.
    """
    with pytest.raises(ScatterError) as caught:
        cut([torch.zeros(5), {"mask": torch.zeros(3, 4)}], 2, 3)
    assert str(caught.value) == (
        "input x.1.mask of shape (3, 4) has size 3 along dim 0, but the batch has 5 samples by "
        "its first tensor, x.0; if x.1.mask is not one entry a sample, broadcast=('x.1.mask',) "
        "copies it whole to each device, and if x.0 is not, broadcast=('x.0',) does"
    )


class Graph:
    """Keeps its tensors as those of PyTorch Geometric do."""

    def __init__(self, x):
        self._store = UserDict(x=x)


X = torch.arange(24.0).view(8, 3)
IMAGES = [torch.full((3, 4, 4 + i % 2), float(i)) for i in range(8)]
TARGETS = [{"boxes": torch.full((i + 1, 4), float(i))} for i in range(8)]
SEQUENCES = [torch.full((7, 2), float(i)) for i in range(8)]
GRU = nn.GRU(3, 3, batch_first=True)


def sums(_, *lists):
    return sum(torch.stack([nested_sum(item) for item in values]) for values in lists)


def nested_sum(item):
    return item["boxes"].sum() if isinstance(item, dict) else torch.as_tensor(item).sum()


def graphs(_, values):
    return torch.stack([value._store["x"].sum() for value in values])


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize(
    ("forward", "args", "message", "options", "right"),
    [
        (sums, (IMAGES, TARGETS), r"split=\('args.0', 'args.1'\)", None, None),
        (sums, (IMAGES,), r"args.0 is a list of 8 items.* split=\('args.0',\)", None, None),
        (sums, (SEQUENCES,), r"args.0 is a list of 8 items.* split=\('args.0',\)", None, None),
        (sums, (X, SEQUENCES), r"split=\('args.1',\) splits it", {"split": "args.1"}, None),
        (sums, ([1, 2, 3, 4],), r"one device; if .* split=\('args.0',\)", None, None),
        (sums, (np.arange(5),), r"one device; if .* split=\('args.0',\)", None, None),
        (sums, (iter([1, 2, 3]),), "one device; make it a list", None, ([1, 2, 3],)),
        (
            lambda _, x, h: GRU(x, h if h.dim() == 3 and len(h) == 1 else h.transpose(0, 1))[0],
            (X[:, None], torch.ones(1, 8, 3)),
            "input args.1 of .* its samples are along another dimension, so transpose it",
            {},
            (X[:, None], torch.ones(8, 1, 3)),
        ),
        (graphs, (Graph(X),), r"args.0 is a Graph whose tensors \(x\)", None, ([Graph(X)] * 8,)),
    ],
)
def test_what_an_error_or_warning_advises_works(forward, args, message, options, right):
    """Images were split into channels and sequences into steps; strings ran on one device."""
    with pytest.raises((ScatterError, BalanceWarning), match=message):
        BalancedDataParallel(1, Lambda(forward), ["cpu"] * 3)(*args)
    args = right or args
    options = {"split": [f"args.{i}" for i in range(len(args))]} if options is None else options
    model = BalancedDataParallel(1, Lambda(forward), ["cpu"] * 3, **options)
    torch.testing.assert_close(model(*args), model.module(*args))
    assert len(model.chunk_sizes) == 3


def test_a_packed_sequence_is_refused():
    packed = pack_sequence([torch.arange(3.0), torch.arange(2.0)])
    with pytest.raises(ScatterError, match=r"x\.0 is a PackedSequence"):
        cut([packed], 2, 3)
    with pytest.raises(GatherError, match="1 is a PackedSequence"):
        gather([(None, packed), (None, packed)], CPU)


def test_a_batch_on_the_cpu_does_not_pass_through_device_0(emulated):
    with_context = emulated[:3]
    scatter([("x", torch.zeros(9, 4))], with_context, [1, 4, 4])
    copied = torch.get_device_module(emulated[0])
    assert copied.max_memory_allocated(emulated[0]) == 512  # 16 bytes: its own chunk only


# Sequences with an entry for each sample.


def test_sequences_are_cut_where_that_is_asked_for():
    inputs = [
        ("x", torch.zeros(3, 2)),
        ("texts", ["a", "b", "c"]),
        ("given", {"boxes": (torch.zeros(1), torch.ones(2), torch.ones(3))}),
        ("array", np.arange(3)),
    ]
    first, second = scatter(inputs, [CPU, CPU], [1, 2], split=("texts", "given.boxes", "array"))
    assert (first[1], second[1]) == (["a"], ["b", "c"])
    assert [len(box) for box in second[2]["boxes"]] == [2, 3]
    assert (first[3].tolist(), second[3].tolist()) == ([0], [1, 2])
    assert find_batch_size([("texts", ["a", "b"]), ("x", torch.zeros(5))], split=["texts"]) == 5
    assert find_batch_size([("texts", ["a", "b"])], split=["texts"]) == 2
    with pytest.raises(ScatterError, match="texts is in split, but it is a list of length 3"):
        scatter([("x", torch.zeros(4)), *inputs[1:2]], [CPU, CPU], [2, 2], split=("texts",))


@pytest.mark.parametrize("value", [["a", "b", "c"], (1, 2, 3), [[1], [2], [3]], np.arange(3)])
def test_a_sequence_as_long_as_the_batch_is_warned_of_once(value):
    warned: set[str] = set()
    inputs = [("x", torch.zeros(3, 2)), ("texts", value)]
    with pytest.warns(
        BalanceWarning, match=r"texts is .* as long as the batch, 3.*split=\('texts',\)"
    ):
        scatter(inputs, [CPU, CPU], [1, 2], warned=warned)
    scatter(inputs, [CPU, CPU], [1, 2], warned=warned)
    scatter(inputs, [CPU, CPU], [1, 2], broadcast=("texts",))
    scatter([("x", torch.zeros(4, 2)), ("texts", value)], [CPU, CPU], [1, 3])


def test_an_object_that_hides_tensors_is_warned_of_once():
    """Only containers are split: each replica would see the tensors of the whole batch."""
    normal = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
    inputs = [("x", torch.zeros(3, 2)), ("noise", normal)]
    warned: set[str] = set()
    with pytest.warns(BalanceWarning, match=r"noise is a Normal.*\(loc, scale\).*\('noise',\)"):
        chunks = scatter(inputs, [CPU, CPU], [1, 2], warned=warned)
    assert chunks[0][1] is chunks[1][1] is normal
    scatter(inputs, [CPU, CPU], [1, 2], warned=warned)
    scatter(inputs, [CPU, CPU], [1, 2], broadcast=("noise",))
    with pytest.warns(BalanceWarning, match="noise is a Normal"):
        scatter(inputs[1:], [CPU], None)
    scatter([*inputs[:1], ("module", torch.nn.Linear(2, 2)), ("f", scatter)], [CPU, CPU], [1, 2])


# What a chunk keeps alive.


def test_a_chunk_that_stays_does_not_keep_the_batch_alive(emulated):
    batch = torch.randn(32, 1000, device=emulated[0])
    [[first], _] = scatter([("x", batch)], emulated[:2], [2, 30])
    torch.testing.assert_close(first, batch[:2])
    del batch
    assert torch.lazy.memory_allocated(emulated[0]) == 8192  # 2 x 1000 x 4 bytes, in blocks of 512


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.jagged])
def test_tensors_that_cannot_be_cut(layout):
    """These were errors of torch's, of operators that nobody had called."""
    if layout is torch.jagged:
        batch = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
    else:
        batch = torch.eye(2).to_sparse()
    with pytest.raises(ScatterError, match="x is a sparse or nested tensor, which is not split"):
        scatter([("x", batch)], [CPU, CPU], [1, 1])


COMPLEX = torch.randn(6, 6, dtype=torch.cdouble, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize(
    "tensor",
    [
        COMPLEX,
        COMPLEX.conj(),
        COMPLEX.conj().imag,
        COMPLEX.real.t(),
        COMPLEX.real > 0,
        COMPLEX.real.clone().requires_grad_(),
    ],
    ids=["complex", "conjugated", "negated", "transposed", "bool", "requires grad"],
)
def test_tensors_of_any_kind_travel(tensor, dim, devices):
    """On CUDA some were an error, and the gradient of an input on the CPU came with a warning."""
    chunks = scatter([("x", tensor)], devices[:3], [1, 3, 2], dim=dim)
    joined = gather([chunk for [chunk] in chunks], torch.device("cpu"), dim)
    torch.testing.assert_close(joined.detach(), tensor.detach())
    if tensor.requires_grad:
        (grad,) = torch.autograd.grad(joined.square().sum(), tensor)
        torch.testing.assert_close(grad, 2 * tensor.detach())


def test_what_is_expanded_stays_so(emulated):
    """A copy would take more than what the view keeps."""
    mask = torch.ones(1, 64, 64, device=emulated[0]).expand(32, 64, 64)
    [[first], _] = scatter([("mask", mask)], emulated[:2], [2, 30])
    assert first.stride(0) == 0


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("begin", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)])
def test_a_module_may_begin_in_place(devices, begin, requires_grad):
    """Chunks that stay on one device were views: what one writes, others had changed, too."""
    module = nn.Sequential(begin, nn.Linear(4, 2)).to(devices[0])
    gradients = []
    for run in (module, BalancedDataParallel(2, module, devices[:3])):
        x = torch.linspace(-2, 2, 32, device=devices[0]).reshape(8, 4).requires_grad_(requires_grad)
        run(x * 1.0).pow(2).sum().backward()
        gradients.append([t.grad.cpu() for t in (x, *module.parameters()) if t.requires_grad])
        module.zero_grad()
    torch.testing.assert_close(*gradients)


def test_whole_tensors_may_be_written_in_place(devices):
    """Replicas on one device shared them, so each found what the others had written."""
    module = Lambda(lambda _, x, scale: x * scale.mul_(2))
    model = BalancedDataParallel(2, module, devices[:3], broadcast="args.1")
    for scale in (torch.ones(()), torch.ones(3)):
        output = model(torch.ones(8, 3), scale.to(devices[0]))
        assert output.tolist() == [[2.0] * 3] * 8


def test_a_packed_sequence_needs_no_cutting_on_one_device():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    with emulate_devices(1) as devices:
        model = BalancedDataParallel(1, Lambda(lambda _, p: p.data.sum()), list(devices))
        assert model(packed).item() == 10
