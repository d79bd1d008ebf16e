"""0-dim outputs have the value and the gradients of the whole batch, or a warning says so."""

from __future__ import annotations

import copy
import math
import pickle
import threading
import warnings
from typing import Any

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
from balanced_dp.parallel.losses.reductions import noticing
from balanced_dp.parallel.losses.trace import Trace, traced, tracing

from ..at_once import at_once
from ..devices import kinds_of_splits
from ..modules import Lambda
from ..versions import since_torch
from .loss_cases import (
    BATCH,
    CLASSES,
    EXACT,
    HOLES,
    IGNORED,
    MASK,
    REAL,
    UNCLEAR,
    Net,
    X,
    Y,
    given_to,
    rows,
)

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12, "equal_nan": True}


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


def make(loss: Any, gpu0_bsz: int = 1, devices: Any = ("cpu",) * 4, **options: Any) -> Any:
    """A model with a loss, and its module on one device."""
    torch.manual_seed(0)
    bare = Net(loss).double()
    module = copy.deepcopy(bare).to(devices[0])
    return BalancedDataParallel(gpu0_bsz, module, devices[:4], **options), bare


def compare(model: Any, bare: Net, given: Any, has_gradients: bool = True, **tolerance: Any):
    found = results(model, model.module, has_gradients, **given)
    expected = results(bare, bare, has_gradients, **given)
    torch.testing.assert_close(found, expected, **(tolerance or TOLERANCE))


def check(loss: Any, gpu0_bsz: int = 1, devices: Any = ("cpu",) * 4, size: int = BATCH) -> None:
    """Steps with and without gradients in turn, since what one shows serves the next.

    Tensors are compared in the first, second and fourth of each kind, and not in the third and
    fifth. When they are does not depend on the devices, so distinct ones, which are slower, take
    three of each kind.
    """
    num_steps = 5 if len(set(devices)) == 1 else 3
    model, bare = make(loss, gpu0_bsz, devices)
    given = given_to(loss, size)
    expected = {flag: results(bare, bare, flag, **given) for flag in (True, False)}
    for has_gradients in (True, False) * num_steps:
        found = results(model, model.module, has_gradients, **given)
        torch.testing.assert_close(found, expected[has_gradients], **TOLERANCE)


# How losses join depends on the split and not on the kind of devices. Distinct ones show what stays
# on another device, also where the first runs nothing.
@pytest.mark.parametrize(("kind", "gpu0_bsz"), kinds_of_splits([0, 1, 3]), indirect=["kind"])
@pytest.mark.parametrize("name", EXACT)
def test_losses_in_the_module_are_those_of_the_whole_batch(name, gpu0_bsz, devices):
    check(EXACT[name], gpu0_bsz, devices)


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("size", [4, 8, 12])
@pytest.mark.parametrize("name", EXACT)
def test_chunks_of_one_size(name, size):
    """Shapes do not tell then what is over the batch."""
    check(EXACT[name], None, size=size)


@pytest.mark.parametrize(
    ("name", "gpu0_bsz"),
    # All chunks take one branch with 0.
    [
        (name, n)
        for name in UNCLEAR
        for n in (0, 1, 3)
        if n or name not in ("branch", "other arguments")
    ],
)
def test_what_is_not_exact_is_warned_of_once(name, gpu0_bsz):
    loss, reason = UNCLEAR[name]
    model, _ = make(loss, gpu0_bsz)
    with pytest.warns(BalanceWarning, match=f"the whole batch: .*{reason}.*loss_weight") as warned:
        losses = [results(model, model.module, True, **given_to(loss))[0] for _ in range(5)]
    # Also where tensors are not compared.
    torch.testing.assert_close(losses, losses[:1] * 5, equal_nan=True)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert "<lambda>" in str(warned[0].message) or "Net.forward" in str(warned[0].message)


def masked_or_mean(added: float) -> Any:
    def loss(n: Net, x: Tensor, o: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return o.square().mean()
        return (rows(o) * mask).sum() / (mask.sum() + added).clamp(min=1)

    return loss


@pytest.mark.parametrize(
    ("loss", "gpu0_bsz", "calls"),
    [
        pytest.param(  # a count of the whole batch is given in training only
            lambda n, x, o, mask, count=None: (
                (rows(o) * mask).sum() / (mask.sum() if count is None else count).clamp(min=1)
            ),
            1,
            [({"mask": MASK, "count": MASK.sum()}, True), ({"mask": MASK}, False)] * 2,
            id="other things in training and evaluation",
        ),
        *(
            pytest.param(
                masked_or_mean(added), 1, [({"mask": HOLES}, True), ({}, True)] * 6, id="turns"
            )
            for added in (0, 1e-8)
        ),
        pytest.param(  # the same functions, of samples in one call and of weights in the next
            lambda n, x, o, step: 0.5 * (n.head.weight if step % 2 else o).square().sum(),
            1,
            [({"step": step}, True) for step in range(4)],
            id="samples or weights",
        ),
        pytest.param(
            lambda n, x, o: o.square().sum() / 4,
            0,
            [({}, True), ({"x": X[:12]}, True)],
            id="a number that unlike chunks had in common is no count of equal ones",
        ),
        pytest.param(
            lambda n, x, o, length: n.tokens(x)[:, :length].square().sum() / 3,
            0,
            [({"x": X[:12], "length": length}, True) for length in (2, 3, 2, 4)],
            id="longer sequences",
        ),
        pytest.param(
            lambda n, x, o, args, named: o.square().sum().clamp(*args, **named),
            0,
            [
                ({"x": X[:12], "args": args, "named": named}, True)
                for args, named in (([1], {}), ([], {"min": 1}))
            ],
            id="a number by its name",
        ),
    ],
)
def test_calls_may_differ(loss, gpu0_bsz, calls):
    """What one loss has shown is not told of another one."""
    model, bare = make(loss, gpu0_bsz)
    for others, has_gradients in calls:
        compare(model, bare, {"x": X, **others}, has_gradients)


@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, o, y, epoch: 0.5 * o.square().sum(),
        lambda n, x, o, y, epoch: functional.cross_entropy(o[:, :2], y % 2),
        lambda n, x, o, y, epoch: o.square().sum() / len(x),
    ],
)
def test_chunks_of_two_samples(loss):
    """One half is a factor, two classes are no samples, and the epoch is not what divides."""
    model, bare = make(loss, None)
    compare(model, bare, {"x": X[:8], "y": Y[:8], "epoch": 2})


def test_evaluation_may_compute_one_loss_and_then_another():
    def loss(net: Net, x: Tensor, o: Tensor, ignored: Tensor, mask: Tensor, kind: str) -> Tensor:
        if kind == "masked":
            return (rows(o) * mask).sum() / mask.sum()
        return functional.cross_entropy(o, ignored) if kind == "classes" else rows(o).sum()

    model, bare = make(loss)
    for kind in ("classes", "masked", "classes", "sum", "classes", "masked"):
        compare(model, bare, given_to(loss) | {"kind": kind}, False)


def test_what_begins_to_differ_later_is_warned_of_later():
    """At the latest when there have been twice as many calls."""

    def loss(net: Net, x: Tensor, o: Tensor, real: Tensor, step: int) -> Tensor:
        factor = rows(o).detach().norm() * (step > 2)
        return functional.mse_loss(o, real) - factor * o.mean()

    model, _ = make(loss, 3)
    for step in (1, 2):
        results(model, model.module, True, **given_to(loss), step=step)
    with pytest.warns(BalanceWarning, match="it has a part that is no mean or sum"):
        for step in (3, 4):
            results(model, model.module, True, **given_to(loss), step=step)


def test_a_number_without_a_gradient_that_was_a_sum_may_become_a_mean():
    def loss(net: Net, x: Tensor, o: Tensor, real: Tensor, step: int) -> tuple[Tensor, Tensor]:
        losses = (o.detach() - real).square()
        return o.mean(), losses.sum() if step < 2 else losses.mean()

    model, bare = make(loss)
    for step in (0, 1, 3, 4, 5, 6, 7):
        compare(model, bare, given_to(loss) | {"step": step})


def contrastive(net: Net, x: Tensor, o: Tensor) -> Tensor:
    return functional.cross_entropy(o @ o.T, torch.arange(len(x)))


def contrastive_of_two_views(net: Net, x: Tensor, o: Tensor) -> Tensor:
    """Each view is compared with all others but itself, and the first of them is the other view."""
    similar = torch.cat([o, o * 2]) @ torch.cat([o, o * 2]).T
    others = similar[~torch.eye(len(similar)).bool()].view(len(similar), -1)
    return functional.cross_entropy(others, torch.zeros(len(others)).long())


@pytest.mark.parametrize("loss", [contrastive, contrastive_of_two_views])
def test_classes_that_are_the_samples_of_each_chunk_are_warned_of(loss):
    model, _ = make(loss, 0)
    with pytest.warns(BalanceWarning, match="the classes of its cross entropy are the samples"):
        model(X[:12])


@pytest.mark.parametrize("name", ["cross entropy", "statistics"])
def test_there_may_be_as_many_classes_as_samples(name):
    model, bare = make(EXACT[name], None, ["cpu"] * 2)
    for _ in range(3):
        compare(model, bare, given_to(EXACT[name], 2 * CLASSES))


class Noisy(nn.Module):
    """Draws random numbers, updates a buffer, and runs a backward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.layers[0](x).square().sum().backward()
        y = self.layers(x)
        return 2 * y.square().mean() + y.abs().mean()


@pytest.mark.parametrize("kind", ["cpu", "emulated", "stand-in"])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_trial_changes_nothing(devices, has_gradients):
    torch.manual_seed(0)
    noisy = Noisy().to(devices[0])
    found = []
    for scalar_outputs in ("mean", "auto"):  # the first needs no trial
        module = copy.deepcopy(noisy)
        model = BalancedDataParallel(0, module, devices[:3], scalar_outputs=scalar_outputs)
        torch.manual_seed(0)
        with torch.set_grad_enabled(has_gradients):
            loss = model(X[:12].float())
        if has_gradients:
            loss.backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        found.append([loss.detach(), gradients, module.state_dict(), torch.get_rng_state()])
    torch.testing.assert_close(*found)


class Annealed(nn.Module):
    """Its loss depends on a buffer and a parameter that it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.register_buffer("step", torch.zeros(()))
        self.mean = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.step.add_(1)
            self.mean.add_(1)
        y = self.layer(x)
        return y.square().sum() / len(x) * (0.5 + 0.1 * self.step) + float(self.step) * y.mean()


@pytest.mark.filterwarnings("ignore:Annealed writes mean:balanced_dp.BalanceWarning")
@pytest.mark.parametrize("kind", ["emulated", "stand-in"])
@pytest.mark.parametrize("gpu0_bsz", [0, 1])
def test_what_forward_writes_is_no_count(devices, gpu0_bsz):
    bare = Annealed().double()
    module = copy.deepcopy(bare).to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:3])
    for _ in range(3):
        loss, expected = model(X[:12]), bare(X[:12])
        torch.testing.assert_close(loss.cpu(), expected, **TOLERANCE)
        loss.backward()
        expected.backward()
    assert module.step.item() == bare.step.item()
    torch.testing.assert_close(module.layer.weight.grad.cpu(), bare.layer.weight.grad, **TOLERANCE)


def test_a_model_can_be_pickled_after_a_call():
    criterion = BalancedCriterion(nn.CrossEntropyLoss())
    model = BalancedDataParallel(1, nn.Linear(6, 5).double(), ["cpu"] * 2, gather=False)
    criterion(model(X), Y)
    model(X).map(lambda o: o.mean())
    loaded = pickle.loads(pickle.dumps((model, criterion)))
    torch.testing.assert_close(loaded[1](loaded[0](X), Y), criterion(model(X), Y))


def test_threads_may_make_the_first_call_at_once():
    model, bare = make(lambda n, x, o: o.square().sum() / 4, 0)
    expected = bare(X[:12])
    found = at_once(lambda _: model(X[:12]), 4)
    torch.testing.assert_close(found, [expected] * 4, **TOLERANCE)


def test_trials_are_a_few_calls_at_first():
    def loss(net: Net, x: Tensor, o: Tensor, power: int) -> Tensor:
        sizes.append(len(x))
        return o.square().mean() ** power if power > 1 else o.square().mean()

    sizes: list[int] = []
    model, _ = make(loss, 0)
    # The value is checked once, and each other way to compute it shows what it depends on.
    for power, trials in ((1, [2, 2, 2, 2, 4, 4]), (1, []), (2, [4, 2]), (2, [])):
        sizes.clear()
        model(X[:12], power=power)
        assert sizes == [4, 4, 4, *trials]
        assert len(model._replicator._pool._waiting) == 3  # nothing refers to them


def test_a_mean_that_is_asked_for_takes_no_trial():
    sizes: list[int] = []

    def loss(net: Net, x: Tensor, o: Tensor) -> Any:
        sizes.append(len(x))
        return o.square().mean() ** 2, len(x), o.expand(3, -1, -1)

    model, _ = make(loss, 0, scalar_outputs="mean")
    model(X[:12])
    assert sizes == [4, 4, 4]


@pytest.mark.parametrize("as_criterion", [True, False])
def test_without_a_trial_losses_are_averaged_and_warned_of(as_criterion):
    def loss(o: Tensor) -> Tensor:
        if len(o) < 4:
            raise ValueError("too few samples")
        return o.square().sum() / len(o)

    if as_criterion:
        model = BalancedDataParallel(None, nn.Identity(), ["cpu"] * 2, gather=False)
        criterion = BalancedCriterion(loss)
    else:
        model = BalancedDataParallel(None, Lambda(lambda _, x: loss(x)), ["cpu"] * 2)
        criterion = nn.Identity()
    with pytest.warns(BalanceWarning, match="forward could not be tried with another number"):
        torch.testing.assert_close(criterion(model(X[:8])), loss(X[:8]))


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, o: (rows(o) / len(o)).sum(),
        lambda n, x, o: (o / o.numel()).sum(),
        lambda n, x, o: (o @ o.T).logsumexp(1).mean(),  # each sample and those of its chunk
        lambda n, x, o: functional.normalize(o, dim=0).abs().sum(),
        lambda n, x, o: n.tokens(x).mean(1).sum() / 4 + rows(o).aminmax().max,
    ],
)
def test_a_value_that_is_wrong_for_a_few_samples_is_warned_of(loss, gpu0_bsz):
    model, _ = make(loss, gpu0_bsz)
    with pytest.warns(BalanceWarning, match="for 4 samples it is|no mean or sum"):
        found = model(X)
    torch.testing.assert_close(model(X), found)  # averaged


@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, o: (o @ o.T).topk(3).values.mean(),
        lambda n, x, o: (o @ o.T).logsumexp(1).mean() * (1.0 if len(o) > 2 else math.nan),
    ],
)
def test_a_value_that_two_samples_do_not_have_is_checked_for_four_and_eight(loss):
    model, _ = make(loss, 3)
    with pytest.warns(BalanceWarning, match="for 8 samples it is"):
        model(X)


@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, o: functional.dropout(o, 0.5, n.training).square().mean() ** 2,
        lambda n, x, o: (o + torch.randn_like(o)).square().mean() ** 2,
        lambda n, x, o: nn.BatchNorm1d(CLASSES).to(o).train(n.training)(o).square().mean(),
        lambda n, x, o: rows(o).mean() ** 2 if n.training else (o, None),
        lambda n, x, o: rows(o).mean() ** 2 if n.training else o,
        lambda n, x, o: rows(o).mean() ** 2 if n.training else o.mean(0),
        lambda n, x, o: rows(o).mean() ** 2 * (1 if len(o) > 2 else 1 / 0),
    ],
    ids=[
        "dropout",
        "random",
        "batch norm",
        "in training only",
        "rows",
        "vector",
        "fails for a few",
    ],
)
def test_a_value_for_a_few_samples_may_tell_nothing(loss):
    model, _ = make(loss, 3)
    for _ in range(3):
        model(X)


@pytest.mark.parametrize(
    "count", [len, Tensor.numel, lambda o: torch.tensor(len(o)), lambda o: np.int64(len(o))]
)
def test_a_count_of_chunks_of_one_size_is_an_error(count):
    """In each call; if chunks differ in size, so do their counts."""
    model, _ = make(lambda n, x, o: (o.mean(), count(o)), 0)
    for size in (12, 12, 13):
        reason = "for half of them" if size == 12 else "differ"
        with pytest.raises(GatherError, match=f"^output 1 .*{reason}"):
            model(X[:size])


@pytest.mark.parametrize("number", [0.5, True, "a", torch.tensor(3), CLASSES])
def test_a_number_that_does_not_depend_on_samples_is_returned(number):
    model, _ = make(lambda n, x, o: (o.mean(), o.shape[1] if number == CLASSES else number), 0)
    assert model(X[:12])[1] == number


@pytest.mark.parametrize("size", [4, 8, 12])
@pytest.mark.parametrize(
    ("output", "has_rows"),
    [
        (lambda n, x, o: o.expand(3, -1, -1), True),  # as the states of an RNN with three layers
        (lambda n, x, o: o.expand(4, -1, -1).transpose(0, 2), True),
        (lambda n, x, o: o.repeat_interleave(3, 0), True),
        (lambda n, x, o: n.tokens(x).sum(0).flatten()[:24], False),
        (lambda n, x, o: o @ o.T, False),
        (lambda n, x, o: n.ones[:, None] * n.ones, False),
    ],
)
def test_a_trial_shows_the_dimension_of_the_samples(output, has_rows, size):
    """Where chunks of one size do not: other dimensions have that size, or a multiple of it."""
    model, bare = make(output, None)
    for _ in range(2):
        if has_rows:
            torch.testing.assert_close(model(X[:size]), bare(X[:size]), **TOLERANCE)
        else:
            with pytest.raises(GatherError, match="has no row for each"):
                model(X[:size])


def test_trials_of_a_function_that_is_mapped_are_those_of_its_first_call():
    sizes: list[int] = []

    def first(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x.square().sum() / len(x)

    model = BalancedDataParallel(None, nn.Identity(), ["cpu"] * 2, gather=False)
    for trials in ([4, 2, 2, 2, 2, 2, 4, 4], []):  # the other sizes, and the check
        sizes.clear()
        torch.testing.assert_close(model(X[:8]).map(first), X[:8].square().sum() / 8)
        assert sizes == [4, 4, *trials]


@pytest.mark.parametrize("size", [2, 4, 6])
def test_a_trial_of_a_criterion_has_samples_of_two_devices_if_one_has_few(size):
    def loss(o: Tensor, y: Tensor) -> Tensor:
        return o[range(len(y)), y].square().sum() / 2 / len(o)

    model = BalancedDataParallel(None, nn.Identity(), ["cpu"] * 2, gather=False)
    found = BalancedCriterion(loss)(model(X[:size]), Y[:size])
    torch.testing.assert_close(found, loss(X[:size], Y[:size]))


def test_outputs_that_an_override_of_gather_has_converted_are_not_tried():
    class Converts(BalancedDataParallel):
        def gather(self, outputs: Any, *others: Any) -> Any:
            return super().gather([output.float() for output in outputs], *others)

    module = Lambda(lambda m, x: m.a.weight.sum(), a=nn.Linear(4, 2)).double()
    assert Converts(1, module, ["cpu"] * 2)(X) == module(X).float()


LOOPS = {
    "rows": lambda n, x, o, holes: (
        sum(
            (row.square() * hole).sum() / hole.sum().clamp(min=1)
            for row, hole in zip(o, holes[:, None], strict=True)
        )
        / len(x)
    ),
    "indices": lambda n, x, o: torch.stack(
        [o[i].norm() + o[i].mean().exp() for i in range(len(o))]
    ).mean(),
    "entries of each": lambda n, x, o, part: torch.stack(
        [o[i][part[i] > 0.4].square().mean().sqrt() for i in range(len(o))]
    ).mean(),
    "slices": lambda n, x, o: sum(o[i : i + 1].std().exp() for i in range(len(o))) / len(o),
    "pieces": lambda n, x, o: sum(row.square().mean().sqrt() for row in o.split(1)) / len(o),
}
"""Detection models compute a loss for each image."""


@pytest.mark.parametrize("loss", LOOPS.values(), ids=LOOPS)
@pytest.mark.parametrize(("gpu0_bsz", "size"), [(None, 8), (0, 6), (0, 9)])
def test_losses_of_samples_in_a_loop_are_averaged_and_warned_of(loss, gpu0_bsz, size):
    """Not joined with each other: those of the first sample of each chunk, for example."""
    model, bare = make(loss, gpu0_bsz)
    given = given_to(loss, size)
    with pytest.warns(BalanceWarning, match="in different ways, .* or a loop"):
        compare(model, bare, given)
    for has_gradients in (True, False, True, True):
        compare(model, bare, given, has_gradients)


def test_a_loop_is_averaged_in_calls_without_gradients_too():
    """Once a call with gradients has shown it, whatever was supposed before."""
    loss = LOOPS["entries of each"]
    model, bare = make(loss, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BalanceWarning)
        for has_gradients in (False, False, True, True):
            results(model, bare, has_gradients, **given_to(loss, 9))
        for has_gradients in (False, False, True):
            compare(model, bare, given_to(loss, 9), has_gradients)


@pytest.mark.parametrize("chosen", ["index", "gather", "one hot"])
def test_parameters_that_are_zero_and_chosen_by_each_sample(chosen):
    """Their sums are equal in all chunks, which are of one size, as long as they are zero."""

    def loss(net: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
        zeros = (net.ones - 1)[:CLASSES]
        if chosen == "index":
            scores = zeros[y]
        elif chosen == "gather":
            scores = zeros.expand(len(y), -1).gather(1, y[:, None])
        else:
            scores = functional.one_hot(y, CLASSES).double() * zeros
        return o.square().sum() - scores.sum()

    model, bare = make(loss, 0)
    for step in range(6):
        compare(model, bare, given_to(loss, 12))
        with torch.no_grad():
            for net in (model.module, bare):
                net.ones.add_(torch.arange(12) * (step > 2))


def test_ctc_is_a_mean_over_samples_whatever_their_lengths():
    lengths = torch.tensor([1, 2, 2, 2, 1, 3, 3, 2, 1, 4, 4, 3, 1])

    def loss(net: Net, x: Tensor, o: Tensor, lengths: Tensor) -> Tensor:
        outputs = net.tokens(x)[:, : int(lengths.max())].log_softmax(-1).transpose(0, 1)
        ones = torch.ones(len(x), dtype=torch.long)
        return functional.ctc_loss(outputs, ones[:, None], lengths, ones)

    model, bare = make(loss)
    for has_gradients in (True, False):
        compare(model, bare, {"x": X, "lengths": lengths}, has_gradients)


@pytest.mark.parametrize("is_outer", [True, False])
def test_autocast_of_a_part_of_forward_is_kept(is_outer):
    def loss(net: Net, x: Tensor, o: Tensor, real: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_outer):
            mean = (o.float() - real).square().mean().float()
            return mean * 3 + (mean.view(1, 1) @ mean.view(1, 1)).squeeze()

    model, bare = (net.float() for net in make(loss))
    with torch.autocast("cpu", torch.bfloat16, enabled=is_outer):
        found, expected = (net(X.float(), real=REAL.float()) for net in (model, bare))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-2 if not is_outer else 1e-5, atol=0)


def test_a_weighted_loss_may_use_its_parts_many_times():
    """Each use was followed, so 40 doublings took for ever."""

    def loss(net: Net, x: Tensor, o: Tensor) -> Tensor:
        doubled = rows(o).mean()
        for _ in range(40):
            doubled = doubled + doubled
        return doubled

    model, bare = make(loss, loss_weight=lambda x: torch.tensor(len(x)))
    torch.testing.assert_close(model(X), bare(X), **TOLERANCE)


def test_lists_of_losses_may_be_written_to_at_once():
    def loss(net: Net, x: Tensor, o: Tensor) -> Tensor:
        losses = [o.square().mean(), o.abs().mean()]
        torch._foreach_mul_(losses, 0.5)
        return losses[0] + losses[1]

    model, _ = make(loss)
    with torch.no_grad(), pytest.warns(BalanceWarning, match="no mean or sum|in place"):
        model(X)


@pytest.mark.parametrize(("has_gradients", "gpu0_bsz", "size"), [(True, 0, 12), (False, 1, BATCH)])
def test_losses_are_added_up_in_a_long_loop(has_gradients, gpu0_bsz, size):
    """Of all steps of a sequence, for example: without recursion, and not as long as its square."""

    def loss(net: Net, x: Tensor, o: Tensor, ignored: Tensor, mask: Tensor) -> Tensor:
        steps, vector = [], torch.zeros(o.shape[1]).to(o)
        total = count = torch.zeros(()).to(o)
        for step in range(1100):
            total, count, vector = total + o.mean() / 7, count + mask.sum(), vector + o.mean(0)
            if step % 50 == 0:
                targets = ignored.where(ignored != step % 7, -100)
                steps.append(functional.cross_entropy(o, targets) * step)
        masked = (rows(o) * mask).sum() / count
        return total + masked + vector.sum() + sum(steps) / len(steps)

    model, bare = make(loss, gpu0_bsz)
    compare(model, bare, given_to(loss, size), has_gradients, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("has_gradients", [True, False])
def test_many_means_over_the_batch_are_not_traced_and_warned_of(has_gradients):
    check(lambda n, x, o: n.tokens(x).mean(0).square().mean())
    model, _ = make(lambda n, x, o: n.tokens(x).repeat(1, 1, 4000).mean(0).square().mean())
    with pytest.warns(BalanceWarning, match="over each chunk is combined with samples"):
        results(model, model.module, has_gradients, X)


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("num_columns", [1, 4000])
@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, o, m: (rows(o)[:, None] * (m / m.sum())[:, None]).sum(),
        lambda n, x, o, m: (o - o.mean(0)).square().mean(),
        lambda n, x, o, m: (o * o.mean()).mean(),
        lambda n, x, o, m: (lambda c: c / (c.norm(dim=0) + 1))(o - o.mean(0)).abs().mean(),
        lambda n, x, o, m: functional.relu(o - o.mean(0), inplace=True).mean(),
        lambda n, x, o, m: rows(o)[rows(o) > rows(o).mean()].mean(),
    ],
)
def test_samples_that_are_combined_with_a_mean_over_their_chunk_are_warned_of(
    loss, num_columns, has_gradients
):
    """Small ones are traced; of larger ones it is known that a mean was combined with them."""

    def widened(n, x, o, m):
        return loss(n, x, o.repeat(1, num_columns), m)

    model, _ = make(widened)
    with pytest.warns(
        BalanceWarning, match="over each chunk is combined|in different ways|written to in place"
    ):
        results(model, model.module, has_gradients, X, m=MASK)


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize(
    "loss",
    [
        # Parameters that are normalized are no samples.
        lambda n, x, o: (x @ (n.head.weight / n.head.weight.abs().sum()).T).square().mean(),
        lambda n, x, o: (o / n.head.weight.square().mean()).square().mean(),
        # Neither are samples of which several outputs are averaged.
        lambda n, x, o: torch.stack([o, 2 * o, o**2]).mean(0).square().mean(),
        lambda n, x, o: n.tokens(x).transpose(0, 1).sum(0).abs().mean(),
        lambda n, x, o: functional.dropout(o, 0.0).square().mean(),
        # The largest length decides on a shape.
        lambda n, x, o: o[:, : (o > -9).sum(1).max()].square().mean(),
        lambda n, x, o: n.head.weight[[0, 1]].sum() + o.mean(),
    ],
)
def test_nothing_else_is_taken_for_a_mean_over_a_chunk(loss, has_gradients):
    for gpu0_bsz, size in ((1, 13), (0, 13), (3, 12), (1, 4)):
        model, bare = make(loss, gpu0_bsz)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results(model, model.module, True, X[:size])
            found = [results(model, model.module, has_gradients, X[:size]) for _ in range(5)]
        assert not [w for w in told if "balances nothing" not in str(w.message)]
        expected = results(bare, bare, has_gradients, X[:size])
        torch.testing.assert_close(found, [expected] * 5, **TOLERANCE)


def test_a_chunk_may_have_as_many_samples_as_there_are_features():
    model, bare = make(EXACT["sum"], None, ["cpu"] * 2)
    compare(model, bare, given_to(EXACT["sum"], 2 * X.shape[1]))


def test_a_count_of_1_that_may_be_a_floor_is_warned_of():
    """The first chunk has no sample that counts."""
    model, _ = make(lambda n, x, o, m: (rows(o) * m).sum() / max(int(m.sum()), 1))
    with pytest.warns(BalanceWarning, match="such as 1, that differ between the replicas"):
        model(X, m=MASK)


@pytest.mark.parametrize("gpu0_bsz", [0, 1, 3])
def test_losses_of_single_samples_in_a_loop(gpu0_bsz):
    """The graphs differ in size, which is warned of; their mean is one over samples."""

    def loop(net: Net, x: Tensor, o: Tensor, real: Tensor) -> Tensor:
        return sum(functional.mse_loss(a, b) for a, b in zip(o, real, strict=True)) / len(o)

    model, bare = make(loop, gpu0_bsz)
    for has_gradients in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BalanceWarning)
            compare(model, bare, given_to(loop), has_gradients)


def test_the_warning_is_silenced_by_saying_how_losses_join():
    loss = EXACT["rmse"]
    for options in ({"scalar_outputs": "mean"}, {"loss_weight": lambda x, real: len(x)}):
        model, _ = make(loss, **options)
        found = model(**given_to(loss))
        parts = X.split(model.chunk_sizes), REAL.split(model.chunk_sizes)
        losses = [model.module(x, real=real) * len(x) for x, real in zip(*parts, strict=True)]
        torch.testing.assert_close(found, sum(losses) / BATCH)


def test_a_loss_may_be_averaged_by_a_model_inside_the_model():
    """The replicas of the inner one took the traces of the outer one, which are fewer."""

    def loss(net: Net, x: Tensor, o: Tensor) -> Tensor:
        inner = BalancedDataParallel(None, nn.Flatten(), ["cpu"] * 3, scalar_outputs="mean")
        return inner(o).square().mean()

    model, bare = make(loss, 1, ["cpu"] * 2)
    compare(model, bare, {"x": X})


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
    "masked mean": lambda o, y, *_: ((o[:, 0] - 1) ** 2 * (y >= 0)).sum() / (y >= 0).sum(),
}


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:.*classes, which may be the samples")
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
    for has_gradients in (True, False):
        expected = results(net, net, has_gradients, **arguments)
        found = results(
            lambda x, **others: criterion(model(x), **others), net, has_gradients, **arguments
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_map_is_checked_as_other_calls_are():
    outputs = BalancedDataParallel(0, nn.Identity(), ["cpu"] * 4, gather=False)(REAL[:12])
    with pytest.warns(BalanceWarning, match="for 4 samples it is"):
        outputs.map(lambda o: (o @ o.T).logsumexp(1).mean())
    with pytest.raises(GatherError, match="is the same number on every replica"):
        outputs.map(len)
    assert outputs.map(lambda o: o.shape[1]) == CLASSES


def test_map_adds_up_counts():
    outputs = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 4, gather=False)(REAL)
    is_right = outputs.map(lambda o, y: (o.argmax(1) == y).float().sum(), Y)
    assert is_right == (REAL.argmax(1) == Y).sum()


def test_map_knows_the_numbers_that_it_was_given():
    outputs = BalancedDataParallel(0, nn.Identity(), ["cpu"] * 4, gather=False)(REAL[:12])
    found = outputs.map(lambda output, num_items: output.sum() / num_items, 8)  # twice a chunk
    torch.testing.assert_close(found, REAL[:12].sum() / 8)


def test_map_warns_once_for_all_batches():
    model = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 3, gather=False)
    with pytest.warns(BalanceWarning, match="the whole batch: it has a part") as warned:
        for _ in range(3):
            model(REAL).map(lambda output: output.norm())
    assert len(warned) == 1


def test_only_what_a_replica_computes_is_traced():
    """Not what other threads compute; and torch's functions are afterwards as they were."""
    traces = [Trace(0), Trace(0)]
    losses: list[Tensor] = []

    def compute(y: Tensor) -> None:
        losses.append(functional.cross_entropy(REAL, y))

    def replica() -> None:
        compute(Y)
        thread = threading.Thread(target=compute, args=(Y,))
        thread.start()
        thread.join()

    before = [torch._C._nn.cross_entropy_loss, torch.sum]
    with noticing(), tracing(traces):
        compute(Y)
        traced(0, replica)
        traced(1, compute, IGNORED)
        assert [type(loss) is Tensor for loss in losses] == [True, False, True, False]
    counts = [[trace.step_of(loss) for loss in losses] for trace in traces]
    found = [[int(s.reduction.count) if s else None for s in steps] for steps in counts]
    assert found == [[None, BATCH, None, None], [None, None, None, int((IGNORED >= 0).sum())]]
    assert all(type(loss) is Tensor for loss in losses)
    assert before == [torch._C._nn.cross_entropy_loss, torch.sum]
    assert type(REAL.sum()) is Tensor


def test_functions_are_traced_however_their_arguments_are_given():
    def loss(net: Net, x: Tensor, o: Tensor, real: Tensor) -> Any:
        return {
            "mean": torch.mean(dim=0, input=rows(o)),
            "sum": torch.sum(input=rows(o)),
            "stack": torch.stack(tensors=[rows(o).mean(), rows(real).mean()]).mean(dim=0),
            "kl": functional.kl_div(
                target=real.softmax(1), reduction="batchmean", input=o.log_softmax(1)
            ),
            "selected": torch.masked_select(input=o, mask=o > 0).mean(),
            "clamped": torch.div(other=torch.clamp(min=1, input=(o > 0).sum()), input=o.sum()),
        }

    check(loss)


@pytest.mark.parametrize(("dim", "reduced"), [(0, 0), (0, -2), (1, 1), (1, -1)])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_sums_over_the_batch_dimension_however_it_is_counted(has_gradients, dim, reduced):
    x = (REAL if dim == 0 else REAL.T).clone().requires_grad_(has_gradients)
    module = Lambda(lambda self, x: x.sum(reduced).mean())
    model = BalancedDataParallel(1, module, ["cpu"] * 4, dim=dim)
    torch.testing.assert_close(model(x), module(x), **TOLERANCE)


def test_a_loss_without_a_gradient_to_which_one_with_a_gradient_is_added():
    """It has the node of the addition, which once was taken for that of the cross entropy."""

    def loss(net: Net, x: Tensor, o: Tensor, ignored: Tensor, real: Tensor) -> Tensor:
        with torch.no_grad():
            found = functional.cross_entropy(o, ignored)
        found += functional.mse_loss(o, real)
        return found

    model, bare = make(loss)
    compare(model, bare, given_to(loss))


# What the caller says of weights.


class Labelled(nn.Module):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return x
        is_counted, losses = labels != -100, rows(x)
        loss = (losses * is_counted).sum().div(float(is_counted.sum()) or 1.0)
        return {"loss": loss, "mean": losses.mean(), "logits": x}


@pytest.mark.parametrize(
    ("loss_weight", "takes_keywords"),
    [
        ("labels", True),
        (lambda x, labels: (labels != -100).sum(), True),
        (lambda labels: (labels != -100).sum().item(), True),
        (lambda labels, **others: (labels != -100).sum() * len(others), True),
        (lambda a, b: (b != -100).sum(), False),
        (lambda *args: (args[1] != -100).sum(), False),
    ],
)
def test_loss_weight_gets_the_arguments_that_it_names(loss_weight, takes_keywords):
    model = BalancedDataParallel(1, Labelled(), ["cpu"] * 4, loss_weight=loss_weight)
    expected = Labelled()(X, IGNORED)
    torch.testing.assert_close(model(X, IGNORED)["loss"], expected["loss"])
    if takes_keywords:
        torch.testing.assert_close(model(x=X, labels=IGNORED)["loss"], expected["loss"])
    torch.testing.assert_close(model(X), X)  # no loss, nothing to weigh


def test_a_dictionary_of_weights_leaves_other_outputs_as_they_are():
    model = BalancedDataParallel(
        1, Labelled(), ["cpu"] * 4, loss_weight=lambda labels: {"loss": (labels != -100).sum()}
    )
    torch.testing.assert_close(model(X, IGNORED), Labelled()(X, IGNORED))


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


def test_a_loss_weight_may_be_a_number_of_numpy():
    model = BalancedDataParallel(
        2, Lambda(lambda _, x: x.mean()), ["cpu", "cpu"], loss_weight=lambda x: np.int64(len(x))
    )
    assert model(torch.arange(8.0)) == 3.5


# Dynamo reads it of whatever it compiles for.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("has_gradients", [True, False])
@since_torch("2.6")
def test_a_function_that_is_compiled_whole_runs_in_forward(has_gradients):
    """A TorchFunctionMode, which once was active in some calls, could not be compiled."""

    @torch.compile(backend="eager", fullgraph=True)
    def mean(inner: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return (x @ inner.weight).square().mean()

    class Compiles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mean(self.inner, x)

    module, x = Compiles().double(), torch.randn(8, 4, dtype=torch.double)
    expected = (x @ module.inner.weight).square().mean()
    model = BalancedDataParallel(2, module, ["cpu", "cpu"])
    with torch.set_grad_enabled(has_gradients):
        for _ in range(3):
            torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)


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
    with pytest.warns(BalanceWarning, match="no mean or sum over samples"):
        results(model, model.module, has_gradients, X, y=IGNORED)


def _cross_entropy(o: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(o, y)


@pytest.mark.skipif(not hasattr(functional, "linear_cross_entropy"), reason="needs torch 2.13")
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_cross_entropy_that_nobody_counts_is_warned_of(has_gradients):
    """With options, this one does not call F.cross_entropy."""
    weight = torch.randn(5, X.size(1), dtype=X.dtype)
    options = nn.LinearCrossEntropyOptions()

    def loss(net: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
        return functional.linear_cross_entropy(x + 0 * o.sum(), weight, y, options=options)

    model, _ = make(loss)
    with pytest.warns(BalanceWarning, match="may differ from its value for the whole batch"):
        results(model, model.module, has_gradients, X, y=IGNORED)
