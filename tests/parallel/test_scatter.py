"""Test that inputs of any structure are split and moved to the devices.

If an input cannot be split, the error must say what to change.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections import OrderedDict, UserDict, defaultdict, deque
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence

from balanced_dp import BalancedDataParallel, BalanceWarning, GatherError, ScatterError
from balanced_dp.parallel.scatter import Inputs

from ..devices import KINDS, open_devices
from ..modules import Lambda
from .containers import AttributeDict, Frozen, MirroredDict, Named, Pair, Partly, Slotted, Titled

CPU = torch.device("cpu")


def scatter(inputs, devices, chunk_sizes, **options):
    """Scatter keyword arguments, and return a list for each device with the arguments' values."""
    inputs = Inputs(lambda **_: None, (), dict(inputs), **options)
    return [list(kwargs.values()) for _, kwargs in inputs.scatter(devices, chunk_sizes)]


def cut(value, *chunk_sizes, **options):
    """Scatter one argument called ``x``, and return a list with its value for each device."""
    devices = [CPU] * len(chunk_sizes)
    return [values[0] for values in scatter([("x", value)], devices, chunk_sizes, **options)]


OF_TENSORS = [
    *(lambda x: x, lambda x: x.conj(), lambda x: x.conj().imag, lambda x: x.real.mT.clone().mT),
    lambda x: x.real > 0,
]


@given(
    *(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 3), st.booleans()),
    *(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.sampled_from(OF_TENSORS)),
    st.sampled_from(KINDS),
)
def test_tensors_of_any_kind_travel(rest, place, is_negative, sizes, make, where):
    """On CUDA some were an error, and the gradient of an input on the CPU came with a warning."""
    shape = [*rest[:place], sum(sizes), *rest[place:]]
    values = torch.randn(shape, dtype=torch.cdouble, requires_grad=True)
    dim = min(place, len(rest)) - is_negative * len(shape)
    with open_devices(where, len(sizes)) as devices:
        found = [chunk for [chunk] in scatter([("x", make(values))], devices, sizes, dim=dim)]
        assert [chunk.device for chunk in found] == devices
        expected = make(values).split(sizes, dim)
        torch.testing.assert_close([c.cpu() for c in found], [*expected])
        if found[0].requires_grad:
            losses = [chunks[0].abs().square().sum() for chunks in (found, expected)]
            gradients = [torch.autograd.grad(loss, values)[0] for loss in losses]
            torch.testing.assert_close(*gradients)
            del losses
        del found


@pytest.mark.parametrize("path", ["x", "x.batch", "x.batch.mask"])
def test_broadcast_takes_a_path_or_one_above_it(path):
    value = {"batch": {"mask": torch.arange(3)}}
    assert repr(cut(value, 2, 3, broadcast={path})) == repr([value] * 2)
    for other in ("mask", "batch", "x.mask", "x.bat", "x.batch.mask.more"):
        with pytest.raises(ScatterError):
            cut(value, 2, 3, broadcast={other})


BY_FIRST = (
    r"argument x.1.mask of shape \(3, 4\) has size 3 along dim 0, but the batch has 5 samples .the "
    r"size of its first tensor, x.0\); broadcast=\('x.1.mask',\) copies it whole to each device; "
)
NOT_SPLIT = "argument x is sparse or nested, and cannot be split"
NESTED = torch.nested.nested_tensor([torch.ones(2)] * 5, layout=torch.jagged)
PACKED = pack_sequence([torch.arange(3.0), torch.arange(2.0)])


@pytest.mark.parametrize(
    ("value", "dim", "message"),
    [
        ([torch.zeros(5), {"mask": torch.zeros(3, 4)}], 0, BY_FIRST),
        ({"mask": torch.zeros(5)}, 1, r"argument x.mask of shape .* has no dimension 1 to split"),
        ([PACKED], 0, "x.0 is a PackedSequence, which has no batch dimension; pass a padded"),
        (torch.eye(5).to_sparse(), 0, NOT_SPLIT),
        (NESTED, 0, NOT_SPLIT),
    ],
)
def test_what_cannot_be_split_is_named(value, dim, message):
    """One fork caught everything around scatter, printed "error" and called quit(). We blamed the
    tensor that was right. Some were errors of operators of torch's that nobody had called.
    """
    with pytest.raises(ScatterError, match=message):
        cut(value, 2, 3, dim=dim)


class Graph:
    """Keeps its tensors in an inner object, as a graph of PyTorch Geometric does."""

    def __init__(self, x):
        self._store = UserDict(x=x)


X = torch.arange(24.0).view(8, 3)
IMAGES = [torch.full((3, 4, 4 + i % 2), float(i)) for i in range(8)]
TARGETS = [{"boxes": torch.full((i + 1, 4), float(i))} for i in range(8)]
SEQUENCES = [torch.full((7, 2), float(i)) for i in range(8)]
GRU = nn.GRU(3, 3, batch_first=True)
SIZE = "split is for lists of samples, and for tensors with several rows per sample"
PAIRS = torch.arange(16.0)
TRANSPOSE = "argument args.1 of .* if its samples are along another dimension, transpose it"
ONE_DEVICE = r"one device; if .* split=\('args.0',\)"
EIGHT = r"args.0 is a list of 8 items.* split=\('args.0',\)"


def sums(_, *lists):
    def number(item):
        item = item._store["x"] if isinstance(item, Graph) else item
        return torch.as_tensor(item["boxes"] if isinstance(item, dict) else item).sum()

    return sum(torch.stack([number(item) for item in values]) for values in lists)


def rows_of(_, x, y):
    return y.view(len(x), -1)


def gru(_, x, h):
    return GRU(x, h if h.dim() == 3 and len(h) == 1 else h.transpose(0, 1))[0]


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize(
    ("forward", "args", "message", "options", "right"),
    [
        (sums, (IMAGES, TARGETS), SIZE, None, None),
        (sums, (IMAGES,), EIGHT, None, None),
        (sums, (SEQUENCES,), EIGHT, None, None),
        (sums, (X, SEQUENCES), SIZE, {"split": "args.1"}, None),
        (sums, ([1, 2, 3, 4],), ONE_DEVICE, None, None),
        (sums, (np.arange(5),), ONE_DEVICE, None, None),
        (gru, (X[:, None], torch.ones(1, 8, 3)), TRANSPOSE, {}, (X[:, None], torch.ones(8, 1, 3))),
        (rows_of, (X, PAIRS), SIZE, {"split": "args.1"}, None),
        (lambda m, y, x: rows_of(m, x, y), (PAIRS, X), SIZE, {"split": "args.0"}, None),
        (sums, (Graph(X),), r"args.0 is a Graph whose tensors \(x\)", None, ([Graph(X)] * 8,)),
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


# Sequences with an entry for each sample.


def test_sequences_are_cut_where_that_is_asked_for():
    boxes = torch.zeros(1), torch.ones(2), torch.ones(3)
    value = {"x": torch.zeros(3, 2), "on": [{"boxes": boxes}]}
    _, second = cut(value, 1, 2, split=("x.on.0.boxes",))
    assert [len(box) for box in second["on"][0]["boxes"]] == [2, 3]
    assert cut([torch.zeros(4), None], 2, 2, split=("x.1",))[1][1] is None
    assert cut([torch.zeros(3), [*"abcdef"]], 1, 2, split=("x.1",))[1][1] == [*"cdef"]
    for wrong, fact in ((["a", "b", "c"], "has 3 entries"), (5, "int is no list"), ("abcd", "str")):
        with pytest.raises(ScatterError, match=f"x.1 is named in split, but {fact}"):
            cut([torch.zeros(4), wrong], 2, 2, split=("x.1",))
    with pytest.raises(ScatterError, match=r"argument input .*generator is no list"):
        BalancedDataParallel(1, nn.Identity(), ["cpu"] * 2, split="input")(x for x in "ab")


NORMAL = torch.distributions.Normal(torch.zeros(3), torch.ones(3))
LONG = r"x is .* as long as the batch, 3.*split=\('x',\)"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2, 3), LONG),
        ([["a"], ["b"], ["c"]], LONG),
        (np.arange(3), LONG),
        (NORMAL, r"x is a Normal.*\(loc, scale\).*\('x',\)"),  # only containers are split
        ([NORMAL] * 3, LONG),  # there was a warning for each entry
        (nn.Linear(2, 2), None),
        (scatter, None),
    ],
)
def test_what_goes_whole_is_warned_of_once(value, message):
    warned: set[str] = set()
    inputs = [("first", torch.zeros(3, 2)), ("x", value)]
    with pytest.warns(BalanceWarning, match=message) if message else nullcontext():
        chunks = scatter(inputs, [CPU, CPU], [1, 2], warned=warned)
    assert len(chunks) == 2
    scatter(inputs, [CPU, CPU], [1, 2], warned=warned)
    scatter(inputs, [CPU, CPU], [1, 2], broadcast=("x",))
    if "Normal" not in str(value):  # whose tensors do not move, whatever the batch size
        scatter([("first", torch.zeros(4, 2)), ("x", value)], [CPU, CPU], [1, 3])


# What a chunk keeps alive.


@pytest.mark.parametrize("where", ["cpu", "lazy:0"])
def test_a_chunk_does_not_keep_the_batch(where, emulated):
    """Nor does a batch on the CPU pass through the first device."""
    batch = torch.randn(32, 1000, device=where)
    [[first], _] = scatter([("x", batch)], emulated[:2], [2, 30])
    torch.testing.assert_close(first.cpu(), batch[:2].cpu())
    del batch
    assert torch.lazy.memory_allocated(emulated[0]) == 8192  # 2 x 1000 x 4 bytes, in blocks of 512
    if where == "cpu":
        assert torch.lazy.max_memory_allocated(emulated[0]) == 8192


@pytest.mark.parametrize("scale", [torch.ones(()), torch.ones(2)])
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("begin", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)])
def test_inputs_may_be_written_in_place(devices, begin, requires_grad, scale):
    """Chunks that stay on one device were views, and replicas there shared whole tensors: what one
    wrote, others found changed, too.
    """
    module = Lambda(lambda m, x, scale: m.layer(begin(x)) * scale.mul_(2), layer=nn.Linear(4, 2))
    module, found = module.to(devices[0]), []
    for run in (module, BalancedDataParallel(2, module, devices[:3], broadcast="args.1")):
        x = torch.linspace(-2, 2, 32, device=devices[0]).reshape(8, 4).requires_grad_(requires_grad)
        output = run(x * 1.0, scale.to(devices[0], copy=True))
        output.pow(2).sum().backward()
        gradients = [t.grad.cpu() for t in (x, *module.parameters()) if t.requires_grad]
        found.append([output.detach().cpu(), *gradients])
        module.zero_grad()
    torch.testing.assert_close(*found)


# Containers are taken apart and rebuilt with other values.


LEAVES = [None, 3, "text", True, 2.5, torch.float32, torch.Size([3, 4]), float("nan"), np.eye(2)]
CONTAINERS = [
    *(lambda a, b: [a, b], lambda a, b: (a, b), lambda a, b: {"a": a, 2: [b]}),
    *(lambda a, b: OrderedDict(b=a, a=b), lambda a, b: defaultdict(list, {"a": a, "b": b})),
    *(lambda a, b: UserDict(a=a, b=b), lambda a, b: AttributeDict(a=a, b=b)),
    *(Pair, Frozen, lambda a, b: [Slotted(a), Partly(b), [], {}]),
    *(lambda a, b: deque([a, b], maxlen=3), lambda a, b: Named([a, b], "x")),
    *(lambda a, b: Titled("y", a=a, b=b), lambda a, b: MirroredDict(a=a, b=b)),
]
structures = st.recursive(
    st.just(lambda x: x) | st.sampled_from(LEAVES).map(lambda leaf: lambda x: leaf),
    lambda inner: st.builds(
        lambda make, a, b: lambda x: make(a(x), b(x)), st.sampled_from(CONTAINERS), inner, inner
    ),
    max_leaves=8,
)
"""Random functions that put a batch into nested containers."""


def wrap(forward):
    return BalancedDataParallel(2, Lambda(forward), ["cpu", "cpu"])


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:argument", "ignore:.*as long as each chunk")
@given(
    *(st.sampled_from(KINDS), structures, structures),
    *(st.integers(1, 5), st.integers(1, 9), st.integers(0, 9), st.sampled_from([0, 1])),
)
def test_what_goes_in_comes_out(kind, first, second, num_devices, batch_size, gpu0_bsz, dim):
    x = torch.randn((batch_size, 2) if dim == 0 else (2, batch_size))
    args, kwargs = first(x), {"p": second(x)}
    with open_devices(kind, num_devices) as devices:
        echo = Lambda(lambda m, *args, **kwargs: (args, kwargs)).to(devices[0])
        parallel = BalancedDataParallel(gpu0_bsz, echo, devices, output_device="cpu", dim=dim)
        [found], found_kwargs = parallel(args, **kwargs)
        assert (type(found), repr(found)) == (type(args), repr(args))
        assert repr(found_kwargs) == repr(kwargs)
        del echo, parallel


@pytest.mark.parametrize("device_ids", [None, ["cpu"]])
def test_what_forward_adds_to_an_argument(device_ids, no_accelerator):
    """Without a split, the module is called as if by itself."""
    add = Lambda(lambda m, given: given.setdefault("y", given["x"].sum()))
    given = {"x": torch.ones(3)}
    assert BalancedDataParallel(1, add, device_ids)(given) is given["y"]


@dataclasses.dataclass
class Derived:
    """A dataclass with an attribute that is not one of its fields."""

    logits: torch.Tensor

    def __post_init__(self):
        self.probabilities = self.logits.softmax(-1)


def test_what_a_dataclass_derives_from_fields():
    """It stayed what it was: the whole batch's in the replicas, one replica's in the output."""

    def forward(module, given):
        assert given.logits.shape == given.probabilities.shape
        return Derived(given.logits * 2)

    output = wrap(forward)(Derived(torch.randn(8, 3)))
    torch.testing.assert_close(output.probabilities, output.logits.softmax(-1))


def test_a_cache_of_transformers_is_left_out():
    """use_cache is on by default in generating models, and their caches cannot be joined."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = BalancedDataParallel(2, transformers.GPT2LMHeadModel(config), ["cpu", "cpu"])
    ids = torch.randint(0, 50, (8, 6))
    name = [*inspect.signature(model.module.forward).parameters][1]  # transformers renamed it
    message = f"{name} .* it is None, because .* Call the model with use_cache=False"
    with pytest.warns(BalanceWarning, match=message) as told:
        for _ in range(3):
            output = model(input_ids=ids, labels=ids)
            assert output.get(name) is None and output.loss.isfinite()
    assert len(told) == 1
    with pytest.raises(ScatterError, match=f"{name} is a DynamicCache.*use_cache=False"):
        model(input_ids=ids, **{name: transformers.DynamicCache()})
    assert model(input_ids=ids, labels=ids, use_cache=False).logits.shape == (8, 6, 50)


@pytest.mark.parametrize("make", [types.MappingProxyType, lambda x: {x["x"]}], ids=["proxy", "set"])
def test_containers_that_cannot_be_rebuilt(make):
    """They went whole to each replica."""
    with pytest.raises(ScatterError, match=r"cannot be rebuilt with other tensors; use a dict"):
        wrap(lambda _, x: x)(make({"x": torch.ones(8)}))
    with pytest.raises(GatherError, match="the output is a PackedSequence"):
        wrap(lambda _, x: PACKED)(torch.ones(8))


def test_dictionaries_are_joined_by_name():
    def forward(module, x):
        pairs = [("a", x), ("b", x + 10)]
        return dict(pairs if len(x) == 2 else reversed(pairs))

    assert wrap(forward)(torch.arange(8))["b"].tolist() == list(range(10, 18))
