from __future__ import annotations

from collections import OrderedDict, UserDict

import pytest
import torch
from torch import nn

from balanced_dp import BalancedCriterion, BalancedDataParallel, BalanceWarning, GatherError
from balanced_dp.parallel.gather import gather

from ..modules import Lambda
from .containers import Frozen, Pair

CPU = torch.device("cpu")


def test_tensors_are_joined_along_dim():
    first, second = torch.zeros(2, 1), torch.ones(2, 3)
    assert gather([first, second], CPU, dim=1).tolist() == [[0, 1, 1, 1]] * 2
    assert gather([first, second], CPU, dim=-1).tolist() == [[0, 1, 1, 1]] * 2


@pytest.mark.parametrize(
    "container",
    [
        lambda x: x,
        lambda x: [x, 1],
        lambda x: (x, "a", None, 2.5, True),
        lambda x: {"a": x, 2: [x]},
        lambda x: OrderedDict(b=x, a=1),
        lambda x: UserDict({"a": x}),
        lambda x: Pair(x, x),
        lambda x: Frozen(x, [x]),
        lambda x: None,
        lambda x: float("nan"),
        lambda x: torch.float32,
        lambda x: [],
    ],
)
def test_outputs_of_any_structure_are_joined(container):
    joined = gather([container(torch.arange(2)), container(torch.arange(2, 5))], CPU)
    assert repr(joined) == repr(container(torch.arange(5)))


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        (
            [{"n": 3}, {"n": 4}],
            "output n cannot be joined: the replicas returned different values (3, 4); "
            "return tensors, or what is equal on every replica",
        ),
        ([[1, 2], [1]], "output (the whole) cannot be joined: the replicas returned different"),
        ([{"a": 1}, {"b": 1}], "the replicas returned different items (['a'], ['b'])"),
        (
            [{1: 1, "1": 2}, {1: 1, "1": 2}],
            "has keys that are the same as text, among [1, '1']; rename them",
        ),
        ([None, torch.zeros(2)], "the replicas returned different types (None, (2,))"),
        ([torch.zeros(2), torch.tensor(0.0)], "shapes that cannot be joined along dim 0 ((2,), ()"),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "along dim 0 ((2, 3), (2, 4))"),
        ([object(), object()], "different values"),
        ([torch.zeros(2).numpy(), torch.ones(2).numpy()], "different values"),
    ],
)
def test_outputs_that_differ_are_named(outputs, message):
    with pytest.raises(GatherError) as caught:
        gather(outputs, CPU)
    assert message in str(caught.value)


SCALARS = [torch.tensor(1.0), torch.tensor(4.0)]


@pytest.mark.parametrize(
    ("scalar_outputs", "chunk_sizes", "expected"),
    [
        ("mean", None, 2.5),
        ("mean", [3, 1], 1.75),
        ("sum", [3, 1], 5.0),
        ("stack", [3, 1], [1.0, 4.0]),
    ],
)
def test_scalars(scalar_outputs, chunk_sizes, expected):
    joined = gather(SCALARS, CPU, scalar_outputs=scalar_outputs, chunk_sizes=chunk_sizes)
    assert joined.tolist() == expected


def test_integers_that_differ_add_up_and_are_warned_of():
    """The number of right answers was made a mean, and a bool a fraction."""
    with pytest.warns(BalanceWarning, match="a whole number that differs .* is added up"):
        assert gather([torch.tensor(1), torch.tensor(2)], CPU, chunk_sizes=[1, 1]) == 3
    with pytest.raises(GatherError, match="different values"):
        gather([torch.tensor(True), torch.tensor(False)], CPU, chunk_sizes=[1, 1])
    assert gather([torch.tensor(2), torch.tensor(2)], CPU).item() == 2
    total = gather([torch.tensor(1), torch.tensor(2)], CPU, scalar_outputs="sum")
    assert (total.item(), total.dtype) == (3, torch.long)


def test_rows_are_joined_along_the_dimension_of_the_samples():
    def joined(*shapes, chunk_sizes=(1, 4), dim=0):
        parts = [torch.zeros(shape) for shape in shapes]
        return tuple(gather(parts, CPU, dim, chunk_sizes=chunk_sizes).shape)

    assert joined((1, 3), (4, 3)) == (5, 3)
    assert joined((2, 3), (8, 3)) == (10, 3)  # two tokens a sample
    assert joined((3, 3), (2, 3)) == (5, 3)  # of each sample another number of rows
    assert joined((2, 1, 3), (2, 4, 3)) == (2, 5, 3)  # states of an RNN
    assert joined((6, 2, 1), (6, 2, 4), dim=1) == (6, 2, 5)
    assert joined((4, 3), (4, 3), chunk_sizes=(4, 4)) == (8, 3)
    assert joined((2, 4, 3), (2, 4, 3), chunk_sizes=(4, 4)) == (2, 8, 3)


@pytest.mark.parametrize("shape", [(3,), (1, 5), (5, 4)])
def test_what_is_no_row_for_each_sample_is_an_error(shape):
    parts = [torch.zeros(shape)] * 2
    with pytest.raises(GatherError, match=r"output logits has shape .* on every replica, though "):
        gather([{"logits": part} for part in parts], CPU, chunk_sizes=[1, 4])
    if shape != (5, 4):  # along its other dimension
        with pytest.raises(GatherError, match="it has no row for each of them"):
            gather(parts, CPU, chunk_sizes=[4, 4])


@pytest.mark.parametrize(
    "kind",
    [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr, lambda t: torch.nested.nested_tensor([t])],
)
@pytest.mark.filterwarnings("ignore:.*(CSR|nested tensors)")  # are in beta and prototypes
def test_sparse_and_nested_outputs_are_refused(kind):
    with pytest.raises(GatherError, match="output a is a sparse or nested tensor"):
        gather([{"a": kind(torch.ones(2, 3))} for _ in range(2)], CPU)


def test_a_container_that_all_replicas_return_is_an_error():
    """It held what the last replica had written, and was returned as that of the batch."""
    shared = {"hits": torch.zeros(())}
    with pytest.raises(GatherError, match="output 1 is the same dict on every replica"):
        gather([(torch.zeros(2), shared), (torch.zeros(2), shared)], CPU)
    assert gather([shared], CPU) == shared  # that of a single replica


def test_gathering_needs_no_second_copy_of_the_chunks(emulated):
    outputs = [torch.zeros(256, device=device) for device in emulated[:4]]
    memory = torch.get_device_module(emulated[0])
    before = memory.memory_allocated(emulated[0])
    joined = gather(outputs, emulated[0])
    assert memory.max_memory_allocated(emulated[0]) == before + joined.nbytes


def test_gather_promotes_types_as_cat_does():
    assert gather([torch.zeros(1), torch.zeros(1, dtype=torch.double)], CPU).dtype == torch.double


@pytest.mark.parametrize(
    ("shape", "memory_format"),
    [
        ((6, 3, 4, 5), torch.channels_last),
        ((6, 3, 2, 4, 5), torch.channels_last_3d),
        ((6, 3, 4, 5), torch.contiguous_format),
        ((6, 3), torch.contiguous_format),
    ],
)
def test_channels_that_are_last_stay_so(shape, memory_format):
    """They were put first, and the next convolution had to copy them."""
    x = torch.randn(shape).contiguous(memory_format=memory_format)
    joined = gather(x.split([1, 5]), torch.device("cpu"))
    assert joined.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(joined, x)


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.mean(0),
        lambda x: x.mean(0, keepdim=True),
        lambda x: x.topk(1, dim=0).values,
        lambda x: x.new_ones(3),
    ],
)
def test_what_has_no_row_for_each_sample_is_no_output(reduce):
    """It was joined to three times the size."""
    model = BalancedDataParallel(1, Lambda(lambda m, x: reduce(x)), ["cpu"] * 3)
    with pytest.raises(GatherError, match="it has no row for each of them"):
        model(torch.randn(7, 3))
    outputs = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 3, gather=False)(torch.randn(7, 3))
    with pytest.raises(GatherError, match="it has no row for each of them"):
        BalancedCriterion(reduce)(outputs)
