"""Test that outputs of any structure are joined to those of the whole batch.

If outputs cannot be joined, the error must say what to change.
"""

from __future__ import annotations

import collections
import warnings
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_flatten

from balanced_dp import BalancedDataParallel, BalanceWarning, GatherError
from balanced_dp.parallel.gather import Gather
from balanced_dp.parallel.losses.join import Call, OutputHistory

from ..modules import Lambda

CPU = torch.device("cpu")
SHARED = {"hits": torch.zeros(())}


def gather(outputs, device=CPU, dim=0, scalar_outputs="auto", chunk_sizes=()):
    call = Call(OutputHistory(), gather, [CPU], tuple(chunk_sizes), dim, scalar_outputs)
    return Gather(device, call).join(outputs)


def split(forward, gpu0_bsz=1, num_devices=4, **options):
    return BalancedDataParallel(gpu0_bsz, Lambda(forward), ["cpu"] * num_devices, **options)


# What is joined, and how.


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([{"n": 3}, {"n": 4}], r"output n cannot be joined: .* \(3, 4\); return tensors, or"),
        ([[1, 2], [1]], r"output \(the whole\) .* the replicas returned different structures"),
        ([{"a": 1}, {"b": 1}], r"returned different structures \(\{'a': 1\}, \{'b': 1\}\)"),
        ([None, torch.zeros(2)], r"returned different structures \(None, \(2,\)\)"),
        ([torch.zeros(2), torch.tensor(0.0)], r"has shapes \[\(2,\), \(\)\]"),
        ([torch.zeros(2, 3), torch.zeros(3, 4)], r"has shapes \[\(2, 3\), \(3, 4\)\]"),
        ([object(), object()], "different values"),
        ([np.zeros(2), np.ones(2)], "different values"),
        ([(torch.zeros(2), SHARED)] * 2, "output 1 is a single dict that all"),
    ],
)
def test_outputs_that_differ_are_named(outputs, message):
    """A shared container held what the last replica had written."""
    with pytest.raises(GatherError, match=message):
        gather(outputs)
    gather(outputs[:1])  # that of a single replica


@pytest.mark.parametrize(
    ("scalar_outputs", "chunk_sizes", "numbers", "expected"),
    [
        ("mean", [], (1.0, 4.0), 2.5),
        ("mean", [3, 1], (1.0, 4.0), 1.75),
        ("sum", [3, 1], (1.0, 4.0), 5.0),
        ("sum", [3, 1], (1, 2), 3),
        ("stack", [3, 1], (1.0, 4.0), [1.0, 4.0]),
        ("auto", [3, 1], (0, 0), 0),
        ("auto", [3, 1], (2, 2), 2),
        ("auto", [3, 1], (1, 2), 3),
        ("auto", [3, 1], (True, True), True),
        ("auto", [3, 1], (False, True), True),
    ],
)
def test_scalars(scalar_outputs, chunk_sizes, numbers, expected):
    """The number of right answers was made a mean, and silently that of one device where equal."""
    is_told = scalar_outputs == "auto" and numbers not in ((0, 0), (True, True))
    message = "an integer or bool, which is added up if"
    with pytest.warns(BalanceWarning, match=message) if is_told else nullcontext():
        joined = gather([*map(torch.tensor, numbers)], CPU, 0, scalar_outputs, chunk_sizes)
    assert (joined.tolist(), type(joined.tolist())) == (expected, type(expected))


@pytest.mark.parametrize(
    ("shapes", "sizes", "dim", "expected"),
    [
        ([(6, 2, 1), (6, 2, 4)], (1, 4), 1, (6, 2, 5)),
        ([(3, 1), (3, 4)], (1, 4), -1, (3, 5)),
        ([(4, 4), (4, 4)], (4, 4), -1, (4, 8)),
        ([(), (4,)], (1, 4), 0, (5,)),
        ([(2,), (2, 4)], (1, 4), 1, (2, 5)),  # squeeze() of a chunk of one sample
        ([(0, 3), (0, 3)], (1, 4), 0, (0, 3)),
    ],
)
def test_the_dimension_of_the_samples(shapes, sizes, dim, expected):
    parts = [torch.zeros(shape) for shape in shapes]
    assert gather(parts, dim=dim, chunk_sizes=sizes).shape == expected


def test_a_single_tensor_stays_as_it_is():
    """Stacked, a list of numbers became one of vectors, and an empty batch divided by zero."""
    model = split(lambda _, x: (list(x), x, x.sum()), scalar_outputs="stack")
    entries, rows, number = model(torch.arange(5.0))
    assert entries == rows.tolist() == [0, 1, 2, 3, 4] and number.tolist() == [0, 3, 3, 4]
    for batch_size in (1, 0):
        entries, rows, number = model(torch.ones(batch_size))
        assert (len(entries), rows.shape, number.shape) == (batch_size, (batch_size,), (1,))


@pytest.mark.parametrize("make", [dict, list, collections.UserDict, collections.deque])
def test_what_replicas_share_and_write_is_refused(make):
    """The rows of the last replica came back for each of them."""
    shared = make()
    fill = getattr(shared, "append", lambda rows: shared.update(rows=rows))
    model = split(lambda _, x: (shared.clear(), fill(x), shared)[2])
    with pytest.raises(GatherError, match="that all replicas write to"):
        model(torch.ones(8, 2))


@pytest.mark.parametrize("k", [3, 6])
def test_an_output_may_have_fewer_dimensions_than_dim(k):
    """Its last one took the place of the batch's."""
    model = split(lambda _, x: x.sum((0, 1, 3)) * torch.ones(k, 1), None, dim=2)
    x = torch.randn(5, 2, 12, 4)
    # With 3, another dimension has the chunk size.
    with pytest.raises(GatherError) if k == 3 else nullcontext():
        torch.testing.assert_close(model(x), model.module(x))


# Any rank, any place of the batch, any number of rows, any split.


def rows_of(x, k, is_sorted):
    """Return ``k`` rows for each sample of ``x``.

    If ``is_sorted``, the ``k`` rows of a sample follow each other. Otherwise, the first rows of all
    samples come first, then the second rows of all samples, and so on.
    """
    return torch.stack([x * (i + 1) for i in range(k)], 1 if is_sorted else 0).flatten(0, 1)


KINDS = {
    "tensor": lambda y: y,
    "dictionary": lambda y: {"a": y, "b": {"c": y + 1, "d": None}},
    "list": list,
    "tuple": lambda y: y.unbind(0),
    "nested": lambda y: [{"score": row.sum(), "row": row, "name": "a"} for row in y],
    "numbers": lambda y: [row.sum() for row in y],
    "squeezed": lambda y: y.squeeze(),
}


@given(
    kind=st.sampled_from([*KINDS]),
    rest=st.lists(st.integers(1, 5), max_size=3),
    places=st.lists(st.integers(0, 3), min_size=1, max_size=2),
    k=st.integers(1, 3),
    is_sorted=st.booleans(),
    batch_size=st.integers(1, 17),
    gpu0_bsz=st.none() | st.integers(0, 5),
    num_devices=st.integers(1, 5),
)
@example("squeezed", [], [0], 1, False, 2, None, 2)  # x was taken for a weight that all share
@pytest.mark.filterwarnings("ignore:gpu0_bsz")
def test_outputs_are_exact_or_it_is_said(
    kind, rest, places, k, is_sorted, batch_size, gpu0_bsz, num_devices
):
    """In each call anew: nothing is remembered of the layout of another one."""
    if kind not in ("tensor", "dictionary"):
        places, k = [0], k if kind == "squeezed" else 1

    def forward(_, x, place):
        return KINDS[kind](rows_of(x, k, is_sorted).movedim(0, min(place, len(rest))))

    x = torch.randn(batch_size, *rest, dtype=torch.double, requires_grad=True)
    model = split(forward, gpu0_bsz, num_devices)
    sizes = {size for size in model.split(batch_size) if size}
    # What docs/faq.md says of chunks of one size: another dimension that has it.
    assume(len(sizes) > 1 or not {*rest} & {*sizes, *(size * k for size in sizes)})
    assume(kind != "numbers" or sizes != {1})  # a list with a loss is as long as a sample
    for place in places:
        expected = tree_flatten(model.module(x, place))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", BalanceWarning)
            try:
                found = tree_flatten(model(x, place))
            except GatherError:
                return
        if any("may differ" in str(one.message) for one in told):
            return
        assert found[1] == expected[1]
        for one, other in zip(found[0], expected[0], strict=True):
            assert one.allclose(other) if torch.is_tensor(one) else one == other


@pytest.mark.parametrize(("batch_size", "num_boxes"), [(12, 7), (4, 1)])
def test_detections_are_joined_by_image_or_warned_of(batch_size, num_boxes):
    """A number beside the boxes, or one box in each image, meant items of all samples."""

    def detect(_, x):
        return [{"score": row.sum(), "boxes": torch.ones(num_boxes, 4)} for row in x]

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", BalanceWarning)
        found = split(detect, None, 4)(torch.ones(batch_size, 2))
    assert len(found) == batch_size or "as long as each chunk" in str(told[0].message)


def test_equal_lists_are_warned_of():
    """They may be constants, or texts of samples that are all empty."""
    with pytest.warns(BalanceWarning, match="as each chunk, 4, but is joined item by item"):
        assert split(lambda _, x: [""] * len(x), None, 2)(torch.ones(8)) == [""] * 4


@pytest.mark.filterwarnings("ignore:.*rows for chunks", "ignore:.*as long as each chunk")
@pytest.mark.parametrize(
    ("item", "num"),
    [
        *((lambda x: [x], 2), (lambda x: x.mean().view(1), 2), (lambda x: {"a": x}, 2)),
        (lambda x: x[:6].view(3, 2, -1).repeat(1, 1, 3), 2),  # states of an RNN with three layers
        (lambda x: x if len(x.T) > 2 else x.mean(), 2),  # a loss and rows
    ],
)
def test_a_tuple_that_holds_outputs(item, num):
    """In chunks of two, each was an entry of a sample: CUT's two lists, losses of one entry, states
    of an RNN, the loss and the flat rows of UER-py's taggers.
    """
    model = split(lambda _, x: tuple(item(x.repeat(4, i + 1)) for i in (0, 1)), None)
    assert len(model(torch.arange(16.0).view(8, 2).requires_grad_())) == num
    assert len(split(lambda _, x: [x.mean(), x], None)(nn.Parameter(torch.ones(8, 2)))[1]) == 8


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("gather", [True, False])
def test_a_loss_may_have_dimensions(shape, gather):
    """Left on the devices, it was averaged by samples, and not joined in a last batch."""
    y = torch.tensor([-100, -100, 1, -100, -100, 0, 2, 1, 2, 0, 1, 2])
    model = split(lambda _, x: functional.cross_entropy(x, y[x[:, 0].long()]).view(shape), None)
    model.gathers_outputs = gather
    rows = torch.cat([torch.arange(12.0)[:, None], torch.rand(12, 2)], 1)
    for x in (rows, rows[:3]):  # one sample for each device
        for one in [model(x)] if gather else [model(x)[1], model(x).gather()]:
            torch.testing.assert_close(one, model.module(x))


# The remedy of each error and warning.


def padded(_, x, **options):
    lengths = x[:, 0].detach().div(7).clamp(1, 5).long()
    rows = x[:, None].expand(-1, 5, -1)
    packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True, **options)[0]


NO_ROWS, ROWS, LIST = "no single dimension", r"\(N, rows, \.\.\.\)", "if not, a tuple"

REMEDIES = [
    (padded, "total_length=", "total_length=", lambda m, x: padded(m, x, total_length=5)),
    # In chunks of one size pairs have the shape of rows.
    (lambda m, x: x @ x.T, "compare afterwards", None, lambda m, x: x),
    (lambda m, x: x.mean(0), NO_ROWS, None, lambda m, x: x.mean()),
    # One row of each replica was an error; LXMERT's losses are.
    (lambda m, x: x.mean(0, keepdim=True)[:, :2], ROWS, ROWS, lambda m, x: x.mean()),
    (lambda m, x: x.amax(1)[:2], ROWS, NO_ROWS, lambda m, x: x.amax(1)),
    # The anchors of SSD, the same on each device, were an error.
    (lambda m, x: x.new_ones(5), None, None, lambda m, x: (x, torch.arange(5.0))),
    (lambda m, x: torch.cat([x, -x]), ROWS, ROWS, lambda m, x: torch.stack([x, -x], 1)),
    (lambda m, x: torch.cat([x, -x]), ROWS, ROWS, lambda m, x: (x, -x)),
    (lambda m, x: x[x > 9], ROWS, ROWS, lambda m, x: (x > 9, x)),
    (lambda m, x: list(x), None, LIST, lambda m, x: torch.stack(list(x))),
    (lambda m, x: [x, x, -x], None, LIST, lambda m, x: (x, x, -x)),
]


@pytest.mark.parametrize("is_even", [False, True])
@pytest.mark.parametrize(("wrong", "if_uneven", "if_even", "right"), REMEDIES)
def test_what_an_error_or_warning_advises_works(wrong, right, if_uneven, if_even, is_even):
    """Statistics were joined to a multiple of their size, and images to rows of channels."""
    x = torch.arange(36, dtype=torch.double).view(12, 3).requires_grad_()
    gpu0_bsz, message = (None, if_even) if is_even else (1, if_uneven)
    raises = pytest.raises((GatherError, BalanceWarning), match=message)
    with raises if message else nullcontext():
        split(wrong, gpu0_bsz)(x)
    model = split(right, gpu0_bsz)
    torch.testing.assert_close(model(x), model.module(x))


# Concatenation.


def test_gathering_needs_no_second_copy(emulated):
    outputs = [torch.zeros(256, device=device) for device in emulated[:4]]
    before = torch.lazy.memory_allocated(emulated[0])
    joined = gather(outputs, emulated[0])
    assert torch.lazy.max_memory_allocated(emulated[0]) == before + joined.nbytes


@pytest.mark.parametrize("shape", [(6, 3, 4, 5), (6, 3, 2, 4, 5), (6, 3)])
def test_channels_that_are_last_stay_so(shape):
    """They were put first, and the next convolution had to copy them."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(len(shape))
    for layout in {torch.contiguous_format, last or torch.contiguous_format}:
        tensor = torch.randn(shape).contiguous(memory_format=layout)
        joined = gather([tensor[:1], tensor[1:].double()])
        assert joined.stride() == tensor.stride()
        assert joined.equal(tensor.double())
