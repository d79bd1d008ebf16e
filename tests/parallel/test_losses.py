"""0-dim outputs have the value and the gradients of the whole batch, or a warning says so."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from balanced_dp import (
    ArgumentError,
    BalancedCriterion,
    BalancedDataParallel,
    BalanceWarning,
    GatherError,
)

from ..at_once import at_once
from ..devices import kinds_of_splits
from ..modules import Lambda
from ..versions import since_torch
from .loss_cases import (
    BATCH,
    EXACT,
    IGNORED,
    REAL,
    TRAPS,
    UNCLEAR,
    UNSEEN,
    Net,
    X,
    Y,
    given_to,
    rows,
)

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12, "equal_nan": True}
FOUR = ("cpu",) * 4


def results(model: Any, module: nn.Module, has_gradients: bool, x: Tensor, **given: Any) -> Any:
    """The outputs, and the gradients of each parameter, on the CPU."""
    module.zero_grad()
    with torch.set_grad_enabled(has_gradients):
        outputs = pytree.tree_leaves(model(x, **given))
    found = [output.detach().cpu() for output in outputs]
    if has_gradients:
        sum(o * (i + 1) for i, o in enumerate(outputs) if o.requires_grad).backward()
        found += [None if p.grad is None else p.grad.cpu() for p in module.parameters()]
    return found


def make(loss: Any, gpu0_bsz: int | None = 1, devices: Any = FOUR, **options: Any) -> Any:
    """A model with a loss, and its module on one device."""
    torch.manual_seed(0)
    bare = Net(loss).double()
    module = copy.deepcopy(bare).to(devices[0])
    return BalancedDataParallel(gpu0_bsz, module, devices[:4], **options), bare


def step(model: Any, bare: Any, has_gradients: bool, given: Any) -> tuple[bool, list[str]]:
    """Whether a call gives what the whole batch gives, and what was warned of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = results(model, model.module, has_gradients, **given)
    expected = results(bare, bare, has_gradients, **given)
    try:
        torch.testing.assert_close(found, expected, **TOLERANCE)
    except AssertionError:
        return False, [str(one.message) for one in told]
    texts = [str(one.message) for one in told]
    return True, [text for text in texts if "has no effect" not in text]


def compare(model: Any, bare: Net, given: Any, has_gradients: bool = True, **tolerance: Any):
    found = results(model, model.module, has_gradients, **given)
    expected = results(bare, bare, has_gradients, **given)
    torch.testing.assert_close(found, expected, **(tolerance or TOLERANCE))


# How losses join depends on the split and not on the kind of devices. Distinct ones show what stays
# on another device, also where the first runs nothing.
@pytest.mark.parametrize(("kind", "gpu0_bsz"), kinds_of_splits([0, 1, 3]), indirect=["kind"])
@pytest.mark.parametrize("name", EXACT)
def test_losses_in_the_module_are_those_of_the_whole_batch(name, gpu0_bsz, devices):
    """In training, and in evaluation after it unless a warning says that a count is not known."""
    loss = EXACT[name]
    model, bare = make(loss, gpu0_bsz, devices)
    for has_gradients in (True, False, True, True):
        is_exact, told = step(model, bare, has_gradients, given_to(loss))
        assert is_exact or (not has_gradients and told), told
        assert not has_gradients or not told


@pytest.mark.parametrize("gpu0_bsz", [0, 1, 3])
@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_not_known_is_warned_of_once(name, gpu0_bsz):
    loss = UNCLEAR[name]
    model, bare = make(loss, gpu0_bsz)
    is_exact, told = step(model, bare, True, given_to(loss))
    assert is_exact or told
    assert not any(step(model, bare, True, given_to(loss))[1] for _ in range(3))
    for text in told:
        assert "may differ from its value for the whole batch" in text
        assert text.endswith("model.check(batch) shows by how much")


@pytest.mark.parametrize(("gpu0_bsz", "size"), [(0, 13), (1, 13), (3, 13), (None, 12)])
@pytest.mark.parametrize("name", TRAPS)
def test_traps_are_exact_or_warned_of(name, gpu0_bsz, size):
    model, bare = make(TRAPS[name], gpu0_bsz)
    is_exact, told = step(model, bare, True, given_to(TRAPS[name], size))
    assert is_exact or told


@pytest.mark.parametrize(("gpu0_bsz", "size"), [(1, 13), (None, 12)])
def test_a_metric_in_evaluation_is_told_from_the_loss(gpu0_bsz, size):
    def loss(n: Net, x: Tensor, o: Tensor, ignored: Tensor, real: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            functional.cross_entropy(o / 2, ignored.clamp(min=0))
        return functional.cross_entropy(o, ignored) + functional.mse_loss(o, real)

    model, bare = make(loss, gpu0_bsz)
    assert step(model, bare, True, given_to(loss, size)) == (True, [])
    is_exact, told = step(model, bare, False, given_to(loss, size))
    assert is_exact or told


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("perplexity", "it uses Exp on means or sums"),
        ("dice", "it uses Div, but not by a number"),
        ("hits", r"it has no graph \(for an accuracy, return a row for each sample\)"),
        ("dot product", "it uses Dot"),
        ("sum by a mean", "it is divided by something other than its count"),
        ("sum and mean", "its means and sums have different weights"),
        ("sum and penalty", "a term independent of samples is added to a sum"),
        ("mean times length", "the replicas multiply a term by different numbers"),
        ("branch", "the replicas computed it in different ways, such as by a branch"),
        ("balanced cross entropy", "the weights of its classes differ between the devices"),
    ],
)
def test_a_warning_gives_its_reason(name, reason):
    model, _ = make(UNCLEAR[name])
    with pytest.warns(BalanceWarning, match=reason):
        model(**given_to(UNCLEAR[name]))


@pytest.mark.parametrize("name", UNSEEN)
def test_check_shows_what_no_graph_shows(name):
    model, bare = make(UNSEEN[name])
    assert not step(model, bare, True, given_to(UNSEEN[name]))[0]
    assert model.check(**given_to(UNSEEN[name])).differences


@pytest.mark.parametrize("num_devices", [0, 1])
def test_check_without_a_split(num_devices, no_accelerator):
    model = BalancedDataParallel(1, nn.Linear(6, 2).double(), ["cpu"] if num_devices else None)
    result = model.check(X)
    assert (result.chunk_sizes, result.num_compared, result.differences) == ((), 3, ())
    assert "the batch is not split, so nothing can differ" in str(result)


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("name", [*EXACT, *UNCLEAR])
def test_chunks_of_one_size(name, size):
    """Exact, or warned of, but for what docs/loss.md names."""
    loss = EXACT.get(name) or UNCLEAR[name]
    model, bare = make(loss, None)
    is_exact, told = step(model, bare, True, given_to(loss, size))
    assert is_exact or told or name in SILENT_IN_EVEN_SPLITS


SILENT_IN_EVEN_SPLITS = (
    *("mean times length", "branch", "balanced cross entropy"),
    *("similarities of pairs", "similarities by their number"),
)


class Subclass(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input * 2, target)


CROSS_ENTROPIES = {
    "nll": lambda o, y, weight, _: functional.nll_loss(o.log_softmax(1), y, weight),
    "function": lambda o, y, weight, smoothing: functional.cross_entropy(
        o, y, weight, label_smoothing=smoothing
    ),
    "module": lambda o, y, weight, smoothing: nn.CrossEntropyLoss(
        weight, label_smoothing=smoothing
    )(o, y),
    "subclass": lambda o, y, weight, smoothing: Subclass(weight, label_smoothing=smoothing)(o, y),
}


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:.*as many classes as samples")
@given(
    st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=1, max_size=12),
    st.sampled_from(sorted(CROSS_ENTROPIES)),
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from([None, torch.tensor([0.0, 0.5, 2.0], dtype=torch.double)]),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
)
def test_any_targets_may_be_ignored_in_any_split(
    y, name, num_devices, gpu0_bsz, weight, label_smoothing, is_criterion
):
    if weight is not None and label_smoothing:
        weight = weight + 0.1  # or the smoothed part of a chunk would be divided by 0
    y = torch.tensor(y)
    logits = torch.randn(len(y), 3, dtype=torch.double, requires_grad=True)
    bare = Lambda(lambda _, o, y: CROSS_ENTROPIES[name](o, y, weight, label_smoothing))
    devices = ["cpu"] * num_devices
    if is_criterion:
        model = BalancedDataParallel(gpu0_bsz, nn.Identity(), devices, gather=False)
        found = BalancedCriterion(bare)(model(logits), y)
    else:
        found = BalancedDataParallel(gpu0_bsz, bare, devices)(logits, y)
    expected = bare(logits, y)
    assert found.isfinite() == expected.isfinite()  # it is not where nothing counts
    if expected.isfinite():
        torch.testing.assert_close(found, expected, **TOLERANCE)
        gradients = [torch.autograd.grad(value, logits)[0] for value in (found, expected)]
        torch.testing.assert_close(*gradients, **TOLERANCE)


@pytest.mark.parametrize("name", EXACT)
def test_criteria_are_those_of_the_whole_batch(name):
    """The same losses, but computed from outputs that stay where they are."""
    torch.manual_seed(0)
    net, arguments = Net(EXACT[name]).double(), given_to(EXACT[name])
    model = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 4, gather=False)
    criterion = BalancedCriterion(net)
    expected = results(net, net, True, **arguments)
    found = results(lambda x, **others: criterion(model(x), **others), net, True, **arguments)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_map_joins_numbers_as_it_is_told():
    outputs = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 4, gather=False)(REAL)
    is_right = outputs.map(lambda o, y: (o.argmax(1) == y).sum(), Y, scalar_outputs="sum")
    assert is_right == (REAL.argmax(1) == Y).sum()
    for _ in range(2):
        found = outputs.map(torch.mean, scalar_outputs="mean")
        torch.testing.assert_close(found, REAL.mean())


# What the caller says of weights.


class Labelled(nn.Module):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return x
        is_counted, losses = labels != -100, rows(x)
        loss = (losses * is_counted).sum().div(float(is_counted.sum()) or 1.0)
        return {"loss": loss, "mean": losses.mean(), "logits": x}


@pytest.mark.parametrize(
    "loss_weight",
    [
        "labels",
        lambda x, labels: (labels != -100).sum(),
        lambda labels: np.int64((labels != -100).sum().item()),
        lambda labels, **others: (labels != -100).sum() * len(others),
    ],
)
def test_loss_weight_gets_the_arguments_that_it_names(loss_weight):
    model = BalancedDataParallel(1, Labelled(), ["cpu"] * 4, loss_weight=loss_weight)
    expected = Labelled()(X, IGNORED)
    torch.testing.assert_close(model(X, IGNORED)["loss"], expected["loss"])
    torch.testing.assert_close(model(x=X, labels=IGNORED)["loss"], expected["loss"])
    torch.testing.assert_close(model(X), X)  # no loss, nothing to weigh


def test_a_dictionary_of_weights_leaves_other_outputs_as_they_are():
    model = BalancedDataParallel(
        1, Labelled(), ["cpu"] * 4, loss_weight=lambda labels: {"loss": (labels != -100).sum()}
    )
    x = X.clone().requires_grad_()
    torch.testing.assert_close(model(x, IGNORED), Labelled()(x, IGNORED))


@pytest.mark.parametrize(
    ("loss_weight", "message"),
    [
        ("targets", "loss_weight is 'targets', but the arguments of the call are input"),
        (lambda x, labels: 1, r"loss_weight \(.*<lambda>.*\) takes x, labels, but .* are input;"),
        (lambda input, *, k: 1, "takes input, k, but .* are input;"),
        (lambda input: -1, "loss_weight must return a number of at least 0, .* got -1"),
        (lambda input: input, "loss_weight must return a number of at least 0, .* got tensor"),
    ],
)
def test_errors_of_loss_weight_name_it(loss_weight, message):
    module = nn.Sequential(Lambda(lambda _, x: x.mean()))
    model = BalancedDataParallel(1, module, ["cpu"] * 4, loss_weight=loss_weight)
    with pytest.raises(ArgumentError, match=message):
        model(X)


def test_loss_weight_is_not_read_back():
    """A weight that stays on its device: reading it would wait."""

    class Unread(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            assert function not in (Tensor.item, Tensor.__float__, Tensor.__bool__)
            return super().__torch_function__(function, types, args, kwargs)

    model = BalancedDataParallel(
        1,
        Labelled(),
        ["cpu"] * 4,
        loss_weight=lambda labels: (labels != -100).sum().as_subclass(Unread),
    )
    torch.testing.assert_close(
        torch.Tensor(model(X, IGNORED)["loss"]), Labelled()(X, IGNORED)["loss"], check_dtype=False
    )


@pytest.mark.parametrize(
    ("chunks", "gpu0_bsz", "factor"),
    [
        ([5, 11], 5, 1.6),
        ([18, 32, 32, 32], 18, 1.6),
        ([1, 9, 9, 9, 9, 9, 9, 9], 1, 8),
        ([1, 32, 32, 31, 31, 31], 1, 26),
    ],
)
def test_the_mean_of_losses_weighs_every_sample_the_same(devices, chunks, gpu0_bsz, factor):
    """Published recipes call loss.mean() on a vector of one loss a replica. A sample on device 0
    then counts B / (n * c0) times as much as it should: the factor here.
    """
    batch_size = sum(chunks)
    assert batch_size / len(chunks) / chunks[0] == pytest.approx(factor, rel=0.05)
    module = Lambda(lambda m, x: m.a(x).square().mean(), a=nn.Linear(4, 2)).double()
    reference = copy.deepcopy(module)
    parallel = BalancedDataParallel(
        gpu0_bsz, module.to(devices[0]), device_ids=devices[: len(chunks)]
    )
    assert list(parallel.split(batch_size)) == chunks
    x = torch.randn(batch_size, 4, dtype=torch.double)
    loss, expected = parallel(x).mean(), reference(x)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(module.a.weight.grad.cpu(), reference.a.weight.grad)


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_scripted_cross_entropy_is_warned_of(has_gradients):
    """It does not look up the functions that count."""
    with warnings.catch_warnings():  # that it is deprecated, in a class for each version
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(_cross_entropy)
    model, _ = make(lambda n, x, o, y: scripted(o, y))
    with pytest.warns(BalanceWarning, match="neither a mean nor a sum|no call with gradients"):
        results(model, model.module, has_gradients, X, y=IGNORED)


def _cross_entropy(o: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(o, y)


# The rows of a table of programs that an earlier way to join losses broke.


def counted_calls(loss: Callable[..., Any]) -> tuple[list[int], Callable[..., Any]]:
    sizes: list[int] = []

    def counts(n: Net, x: Tensor, o: Tensor, **given: Any) -> Any:
        sizes.append(len(x))
        return loss(n, x, o, **given)

    return sizes, counts


@pytest.mark.parametrize("gpu0_bsz", [0, 1, None])
@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.filterwarnings("ignore::balanced_dp.BalanceWarning")
def test_forward_runs_once_on_each_active_device(gpu0_bsz, has_gradients):
    sizes, loss = counted_calls(lambda n, x, o: o.square().mean() ** 2 + o.norm())
    model, _ = make(loss, gpu0_bsz)
    for size in (12, 13, 12):
        sizes.clear()
        results(model, model.module, has_gradients, X[:size])
        assert sorted(sizes) == sorted(filter(None, model.chunk_sizes))


def test_torch_is_as_it_was_after_a_call_and_in_other_threads():
    """Methods of Tensor were replaced for good, and a mock of a user came back for ever."""
    before = {owner: dict(vars(owner)) for owner in (torch, torch._C._nn, Tensor)}
    in_forward: list[Any] = []

    def loss(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
        changed = {
            name
            for owner, members in before.items()
            for name, value in members.items()
            if vars(owner)[name] is not value
        }
        in_forward.append(changed)
        thread = threading.Thread(target=lambda: in_forward.append(functional.cross_entropy(o, y)))
        thread.start()
        thread.join()
        return functional.cross_entropy(o, y)

    model, bare = make(loss)
    compare(model, bare, {"x": X, "y": Y})
    assert {"cross_entropy_loss", "nll_loss_nd"} in in_forward
    for owner, members in before.items():
        assert {n: v for n, v in vars(owner).items() if members.get(n) is not v} == {}
    with mock.patch("torch._C._nn.cross_entropy_loss") as replaced:
        make(lambda n, x, o: o)[0](X)
        assert torch._C._nn.cross_entropy_loss is replaced


@pytest.mark.filterwarnings("ignore:.*no call with gradients:balanced_dp.BalanceWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:FutureWarning")
def test_tools_that_look_at_torch_work_in_forward():
    def loss(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
        torch.jit.script(_cross_entropy)
        torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        assert pickle.loads(pickle.dumps(torch.sum)) is torch.sum
        assert type(o.mean()) is Tensor and type(functional.cross_entropy(o, y)) is Tensor
        return functional.cross_entropy(o, y)

    model, bare = make(loss)
    compare(model, bare, {"x": X, "y": Y})


# Dynamo reads it of whatever it compiles for.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("has_gradients", [True, False])
@since_torch("2.6")
def test_a_compiled_function_in_forward(has_gradients):
    """Results of reductions were of another class, which was compiled into wrong numbers."""
    compiled = torch.compile(lambda x, s: x / s * s, backend="aot_eager", fullgraph=True)
    model, bare = make(lambda n, x, o: compiled(o, o.detach().abs().max()).square().mean())
    for _ in range(2):
        assert step(model, bare, has_gradients, {"x": X})[0]


def test_a_loss_in_a_compiled_module_is_warned_of():
    """Autograd sees one custom function of the parameters, and neither samples nor reductions."""
    torch._dynamo.reset()
    module = Net(lambda n, x, o, y: functional.cross_entropy(o, y)).double()
    model = BalancedDataParallel(1, torch.compile(module, backend="aot_eager"), FOUR)
    with pytest.warns(BalanceWarning, match="it uses CompiledFunction"):
        model(X, y=IGNORED)


class Teacher(nn.Module):
    """Writes an average of a weight through ``.data``, and returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2).double()
        self.average = nn.Parameter(torch.zeros(2, 6, dtype=torch.double), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.average.data.mul_(0.5).add_(self.layer.weight.data, alpha=0.5)
        return (self.layer(x) - x @ self.average.T).square().mean()


@pytest.mark.parametrize("kind", ["emulated"])
def test_a_weight_that_forward_writes_is_written_once(devices):
    bare, module = Teacher(), Teacher().to(devices[0])
    module.load_state_dict(bare.state_dict())
    model = BalancedDataParallel(1, module, devices[:4])
    torch.testing.assert_close(model(X).cpu(), bare(X), **TOLERANCE)
    torch.testing.assert_close(module.average.cpu(), bare.average, **TOLERANCE)


def test_the_first_step_takes_no_more_memory_than_later_ones(emulated):
    """The device that has the fewest samples computed four of them once more."""
    inner = nn.Sequential(nn.Linear(6, 512), nn.Tanh(), nn.Linear(512, 512))
    module = Lambda(lambda m, x: m.inner(x).square().mean() + m.inner(x).abs().mean(), inner=inner)
    model = BalancedDataParallel(2, module.to(emulated[0]), emulated[:4])
    peaks = []
    for _ in range(3):
        torch.lazy.reset_peak_memory_stats(emulated[0])
        model(X.float()).backward()
        peaks.append(torch.lazy.max_memory_allocated(emulated[0]))
        model.zero_grad()
    assert peaks[0] <= 1.02 * peaks[2]


def test_a_loss_that_changes_its_operators_is_seen_at_once():
    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.square().mean()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return grad * 2 * x / x.numel()

    def loss(n: Net, x: Tensor, o: Tensor, step: int) -> Tensor:
        return o.abs().mean() + (Kernel.apply(o) if step >= 2 else torch.zeros(()).to(o))

    model, bare = make(loss)
    for number in range(4):
        is_exact, told = step(model, bare, True, {"x": X, "step": number})
        assert is_exact and len(told) == (number == 2)


def test_a_factor_that_changes_is_seen_at_once():
    def loss(n: Net, x: Tensor, o: Tensor, factor: int) -> Tensor:
        return o.mean() * (factor if len(x) > 1 else 1)

    model, bare = make(loss)
    told = [step(model, bare, True, {"x": X, "factor": factor})[1] for factor in (1, 2, 2)]
    assert [len(texts) for texts in told] == [0, 1, 0]


def selected(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
    return rows(o)[y >= 0].mean()


def masked(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
    return (rows(o) * (y >= 0)).sum() / (y != -100).sum()


def halved(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(o, y) / 2


def beside_a_mean(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(o, y) + rows(o).mean()


def ignored_rows(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(o, y, reduction="none").sum() / (y != -100).sum()


@pytest.mark.parametrize("gpu0_bsz", [1, 3])
@pytest.mark.parametrize("loss", [selected, masked, halved, beside_a_mean])
def test_a_first_batch_in_which_nothing_is_ignored(loss, gpu0_bsz):
    """Its counts are the chunk sizes, by which later ones were weighted."""
    some, first = Y.clone(), Y.clone()
    some[[3, 4, 7]] = first[0] = -100
    model, bare = make(loss, gpu0_bsz)
    for y in (Y, some, Y, first, first, some):
        is_exact, told = step(model, bare, True, {"x": X, "y": y})
        assert is_exact and not told
    is_exact, told = step(model, bare, False, {"x": X, "y": some})
    assert is_exact or told


def test_a_count_of_all_entries_is_not_taken_for_good():
    model, bare = make(ignored_rows)
    ignored = Y.where(X[:, 0] > 0, -100)
    found = [step(model, bare, True, {"x": X, "y": y}) for y in (Y, Y, ignored)]
    assert found[:2] == [(True, [])] * 2
    assert "it is divided by something other than its count" in found[2][1][0]


@pytest.mark.parametrize(("gpu0_bsz", "size"), [(1, 13), (1, 3), (None, 12)])
def test_a_first_batch_in_which_nothing_counts(gpu0_bsz, size):
    def loss(n: Net, x: Tensor, o: Tensor, m: Tensor, step: float) -> Tensor:
        return o[m > 0].mean(1).sum() / (m > 0).sum().clamp(min=1)

    model, bare = make(loss, gpu0_bsz)
    given = {"x": X[:size], "step": 1.0}
    assert step(model, bare, True, {**given, "m": torch.zeros(size)})[0]
    assert step(model, bare, True, {**given, "m": torch.arange(size) % 2})[0]


def test_what_is_unclear_in_an_even_split_is_clear_in_another():
    model, bare = make(lambda n, x, o: o.square().sum() * 0.25, 4)
    told = [step(model, bare, True, {"x": X[:size]})[1] for size in (12, 13)]
    assert told[0]
    assert step(model, bare, True, {"x": X})[0]


@pytest.mark.parametrize("factor", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [4, 8, 12])
def test_a_cross_entropy_that_is_divided_by_its_count_in_an_even_split(size, factor):
    """Times a small factor it was taken for a sum that is divided by the count of the batch."""

    def loss(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
        return factor * functional.cross_entropy(o, y, reduction="sum") / len(y)

    model, bare = make(loss, None)
    is_exact, told = step(model, bare, True, {"x": X[:size], "y": Y[:size]})
    assert is_exact or told


def test_as_many_classes_as_samples():
    """Only targets that are the rows of the chunk tell of comparisons."""
    for y, warns in ((torch.arange(12) % 3, True), (torch.arange(12) % 2, False)):
        model, bare = make(lambda n, x, o, y: functional.cross_entropy(o[:, :3], y), None)
        is_exact, told = step(model, bare, True, {"x": X[:12], "y": y})
        assert is_exact and bool(told) is warns


def test_a_block_ends_with_the_last_thread_in_it(emulated):
    model, _ = make(lambda n, x, o: o, 1, emulated[:3])

    def train(_: int) -> None:
        with model.accumulate():
            for _ in range(3):
                model(X).sum().backward()

    for _ in range(5):
        model.zero_grad()
        at_once(train, 3)
        assert model.module.head.bias.grad.eq(9 * BATCH).all()


def test_functions_without_code_are_told_apart():
    outputs = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 4, gather=False)(
        REAL.clone().requires_grad_()
    )
    torch.testing.assert_close(outputs.map(torch.mean), REAL.mean())
    with torch.no_grad(), pytest.warns(BalanceWarning, match="no call with gradients"):
        outputs.map(torch.sum)


def test_a_complex_mean():
    model, bare = make(lambda n, x, o: 2 * torch.complex(o, o**2).mean())
    torch.testing.assert_close(model(X), bare(X))


def test_what_an_even_split_has_shown_is_not_told_of_a_chunk_of_another_size():
    """A mean over the batch that came after another layout was joined as if it were a sum."""

    def loss(n: Net, x: Tensor, o: Tensor) -> Tensor:
        steps = n.tokens(x).transpose(0, 1)  # time first
        return steps.square().mean(0).sum() + torch.einsum("nc,n->c", o, x[:, 0]).square().mean()

    model, bare = make(loss, None)
    for size in (12, 13, 13):
        is_exact, told = step(model, bare, True, {"x": X[:size]})
        assert is_exact or told or (size == 13 and model._history.warned)


@pytest.mark.parametrize(("gpu0_bsz", "size"), [(None, 12), (1, 13)])
def test_evaluation_with_other_arguments_does_not_add_up(gpu0_bsz, size):
    """Trained with the number of items of the batch, and evaluated by that of samples."""

    def loss(n: Net, x: Tensor, o: Tensor, y: Tensor, num_items: int | None = None) -> Tensor:
        losses = functional.cross_entropy(o, y, reduction="sum")
        return (losses * 1) / (len(x) if num_items is None else num_items)

    model, bare = make(loss, gpu0_bsz)
    given = {"x": X[:size], "y": Y[:size]}
    num_items = torch.tensor(40) if gpu0_bsz is None else 40
    assert step(model, bare, True, {**given, "num_items": num_items}) == (True, [])
    is_exact, told = step(model, bare, False, given)
    assert is_exact and ("it has other arguments" in told[0])


def test_evaluation_with_fewer_cross_entropies_in_a_chunk():
    def loss(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
        if len(x) < 4 or torch.is_grad_enabled():
            return functional.cross_entropy(o, y) / 2
        return rows(o).mean()

    model, _ = make(loss)
    assert step(model, model.module, True, {"x": X, "y": Y})[0]
    with torch.no_grad(), pytest.warns(BalanceWarning, match="not computed in the same way"):
        model(X, y=Y)


@pytest.mark.parametrize("gpu0_bsz", [1, None])
def test_a_write_in_inference_mode(gpu0_bsz):
    model, bare = make(EXACT["in place"], gpu0_bsz)
    given = given_to(EXACT["in place"], 12)
    assert step(model, bare, True, given) == (True, [])
    with torch.inference_mode():
        compare(model, bare, given, has_gradients=False)


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
def test_a_multiple_of_a_cross_entropy_may_come_without_gradients_first(gpu0_bsz):
    """Trainer.evaluate() before train(), with the loss of transformers."""
    loss = EXACT["sum by a number"]
    model, bare = make(loss, gpu0_bsz)
    assert step(model, bare, False, given_to(loss) | {"ignored": Y}) == (True, [])


@pytest.mark.filterwarnings("ignore::balanced_dp.BalanceWarning")
def test_values_that_are_read_in_a_loop_keep_no_graph(emulated):
    def loss(m: Any, x: Tensor) -> Tensor:
        for _ in range(20):
            m.inner(x).square().mean().item()
        return m.inner(x).square().mean()

    inner = nn.Sequential(nn.Linear(6, 2048), nn.Tanh(), nn.Linear(2048, 4))
    module = Lambda(loss, inner=inner).to(emulated[0])
    model = BalancedDataParallel(4, module, emulated[:2])
    torch.lazy.reset_peak_memory_stats(emulated[0])
    model(X.float()).backward()
    activations = 3 * 4 * 4 * 2048  # of three layers with as many entries
    assert torch.lazy.max_memory_allocated(emulated[0]) < 8 * activations + 4 * 4 * 2048 * 12


class Scaled(Tensor):
    """Its addition is another one."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (Tensor.add, torch.add, Tensor.__add__):
            function = torch.mul
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_of_tensor_keeps_its_operators():
    def loss(n: Net, x: Tensor, o: Tensor) -> Tensor:
        return (o.as_subclass(Scaled) + 2.0).as_subclass(Tensor).square().mean()

    model, bare = make(loss)
    compare(model, bare, {"x": X})


# Outputs of other forms.


@pytest.mark.parametrize("gpu0_bsz", [0, 1, None])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_with_one_entry_is_joined_as_one_without_dimensions(gpu0_bsz, shape):
    model, bare = make(lambda n, x, o, y: functional.cross_entropy(o, y).view(shape), gpu0_bsz)
    given = given_to(lambda n, x, o, y: None, 12)
    assert step(model, bare, True, given) == (True, [])
    assert model(**given).shape == shape


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_row_that_was_squeezed_is_told_from_a_loss(has_gradients):
    """In a batch of one sample a device, the rows of an evaluation are averaged like losses."""
    model, _ = make(lambda n, x, o: n.head(x)[:, :1].squeeze(), None)
    with (
        torch.set_grad_enabled(has_gradients),
        pytest.warns(BalanceWarning, match=r"use squeeze\(-1\)"),
    ):
        model(X[:4])


def test_whole_numbers_that_differ_add_up_and_are_warned_of():
    model, bare = make(lambda n, x, o, y: (o.mean(), (o.argmax(1) == y).sum(), torch.tensor(3)))
    is_exact, told = step(model, bare, True, {"x": X, "y": Y})
    assert is_exact and len(told) == 1 and "and is added up" in told[0]


def test_pairs_of_samples_are_an_error_that_says_so():
    model, _ = make(lambda n, x, o: o @ o.T)
    with pytest.raises(GatherError, match=r"each pair of samples .* gather=False"):
        model(X)


def test_a_value_without_a_graph_is_averaged_and_warned_of():
    model, bare = make(lambda n, x, o, y: (o.argmax(1) == y).double().mean())
    with torch.no_grad(), pytest.warns(BalanceWarning, match="no call with gradients"):
        torch.testing.assert_close(model(X, y=Y), bare(X, y=Y))


def test_threads_may_make_the_first_call_at_once():
    model, bare = make(lambda n, x, o: o.square().sum() * 0.25, 0)
    expected = bare(X)
    found = at_once(lambda _: model(X), 4)
    torch.testing.assert_close(found, [expected] * 4, **TOLERANCE)


def test_a_model_can_be_pickled_after_a_call():
    criterion = BalancedCriterion(nn.CrossEntropyLoss())
    model = BalancedDataParallel(1, nn.Linear(6, 5).double(), ["cpu"] * 2, gather=False)
    criterion(model(X), Y)
    model(X).map(lambda o: o.mean())
    loaded = pickle.loads(pickle.dumps((model, criterion)))
    torch.testing.assert_close(loaded[1](loaded[0](X), Y), criterion(model(X), Y))


@pytest.mark.parametrize("gpu0_bsz", [1, None])
def test_losses_are_added_up_in_a_long_loop(gpu0_bsz):
    """Of all steps of a sequence, for example: without recursion."""

    def loss(n: Net, x: Tensor, o: Tensor) -> Tensor:
        total = torch.zeros(()).to(o)
        for _ in range(1100):
            total = total + o.mean() / 7
        return total

    model, bare = make(loss, gpu0_bsz)
    assert step(model, bare, True, {"x": X[:12]}) == (True, [])
