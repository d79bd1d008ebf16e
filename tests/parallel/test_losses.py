"""0-dim outputs have the value and the gradients of the whole batch, or a warning says so."""

from __future__ import annotations

import copy
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

from balanced_dp import ArgumentError, BalancedCriterion, BalancedDataParallel, BalanceWarning
from balanced_dp.parallel.losses.facts import Facts
from balanced_dp.parallel.losses.reductions import noticing
from balanced_dp.parallel.losses.trace import Trace, traced, tracing

from ..devices import kinds_of_splits
from ..modules import Lambda
from ..versions import since_torch
from .loss_cases import (
    BATCH,
    EXACT,
    HOLES,
    IGNORED,
    MASK,
    PART,
    REAL,
    UNCLEAR,
    Case,
    Net,
    X,
    Y,
    rows,
)

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
NUMBERS_OF_SAMPLES = {"mean times length", "count plus the number of samples"}
"""Losses that use a number that may be a constant, if all chunks have one size."""


def results(model: Any, module: nn.Module, given: Any, has_gradients: bool) -> list[Any]:
    """The outputs, and the gradients of each parameter, on the CPU."""
    module.zero_grad()
    with torch.set_grad_enabled(has_gradients):
        outputs = pytree.tree_leaves(model(X[: given.get("x", BATCH)], **rest(given)))
    found = [output.detach().cpu() for output in outputs]
    if has_gradients:
        sum(o * (i + 1) for i, o in enumerate(outputs) if o.requires_grad).backward()
        found += [None if p.grad is None else p.grad.cpu() for p in module.parameters()]
    return found


def rest(given: Any) -> Any:
    return {name: value for name, value in given.items() if name != "x"}


def first(given: Any, count: int) -> Any:
    """What is given for the first samples of the batch."""
    return {"x": count} | {
        name: value[:count] if isinstance(value, Tensor) and value.dim() else value
        for name, value in given.items()
    }


def make(case: Case, devices: Any, gpu0_bsz: int, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    bare = Net(case.loss).double()
    model = BalancedDataParallel(
        gpu0_bsz, copy.deepcopy(bare).to(devices[0]), devices[:4], **options
    )
    return model, bare


def check(case: Case, devices: Any, gpu0_bsz: int, size: int = BATCH) -> None:
    """Steps with and without gradients in turn, since what one shows serves the next.

    Tensors are compared in the first, second and fourth of each kind.
    """
    model, bare = make(case, devices, gpu0_bsz)
    given = first(case.given, size)
    expected = {flag: results(bare, bare, given, flag) for flag in (True, False)}
    for has_gradients in (True, False) * 5:
        found = results(model, model.module, given, has_gradients)
        torch.testing.assert_close(found, expected[has_gradients], **TOLERANCE)


# How losses join depends on the split and not on the kind of devices. Distinct ones show what stays
# on another device, also where the first runs nothing.
@pytest.mark.parametrize(("kind", "gpu0_bsz"), kinds_of_splits([0, 1, 3]), indirect=["kind"])
@pytest.mark.parametrize("name", EXACT)
def test_losses_in_the_module_are_those_of_the_whole_batch(name, gpu0_bsz, devices):
    check(EXACT[name], devices, gpu0_bsz)


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("name", sorted(EXACT.keys() - NUMBERS_OF_SAMPLES))
def test_chunks_of_one_size(name):
    """Shapes do not tell then what is over the batch."""
    check(EXACT[name], ["cpu"] * 4, 3, size=12)


def test_a_number_that_may_be_the_size_of_a_chunk_is_warned_of_unless_that_was_seen():
    case = EXACT["mean times length"]
    model, bare = make(case, ["cpu"] * 4, 0)
    given = first(case.given, 12)
    with pytest.warns(BalanceWarning, match="with 4, which is also the number of samples"):
        results(model, model.module, given, True)
    model, bare = make(case, ["cpu"] * 4, 0)
    results(model, model.module, case.given, True)  # 13 samples
    found, expected = results(model, model.module, given, True), results(bare, bare, given, True)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize(
    ("name", "gpu0_bsz"),
    # All chunks take one branch with 0.
    [(name, n) for name in UNCLEAR for n in (0, 1, 3) if (name, n) != ("branch", 0)],
)
def test_what_is_not_exact_is_warned_of_once(name, gpu0_bsz):
    case, reason = UNCLEAR[name]
    model, _ = make(case, ["cpu"] * 4, gpu0_bsz)
    with pytest.warns(BalanceWarning, match=f"the whole batch: .*{reason}.*loss_weight") as warned:
        losses = [results(model, model.module, case.given, True)[0] for _ in range(5)]
    torch.testing.assert_close(
        losses, losses[:1] * 5, equal_nan=True
    )  # where tensors are compared and elsewhere
    assert len(warned) == 1 and warned[0].filename == __file__
    assert "<lambda>" in str(warned[0].message) or "Net.forward" in str(warned[0].message)


def test_training_and_evaluation_may_divide_by_different_things():
    """A count of the whole batch is given in training only."""

    def loss(net: Net, x: Tensor, o: Tensor, m: Tensor, count: Tensor | None = None) -> Tensor:
        return (rows(o) * m).sum() / (m.sum() if count is None else count).clamp(min=1)

    given = {"m": MASK}
    model, bare = make(Case(loss, given), ["cpu"] * 4, 1)
    for has_gradients in (True, False, True, False):
        named = given | ({"count": MASK.sum()} if has_gradients else {})
        found, expected = (
            results(m, m0, named, has_gradients) for m, m0 in ((model, model.module), (bare, bare))
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_evaluation_may_compute_one_loss_and_then_another():
    def loss(net: Net, x: Tensor, o: Tensor, y: Tensor, m: Tensor, kind: str) -> Tensor:
        if kind == "masked":
            return (rows(o) * m).sum() / m.sum()
        return functional.cross_entropy(o, y) if kind == "classes" else rows(o).sum()

    given = {"y": IGNORED, "m": MASK}
    model, bare = make(Case(loss, given), ["cpu"] * 4, 1)
    for kind in ("classes", "masked", "classes", "sum", "classes", "masked"):
        named = given | {"kind": kind}
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found, expected = (
                results(model, model.module, named, False),
                results(bare, bare, named, False),
            )
        if not told:
            torch.testing.assert_close(found, expected, **TOLERANCE)


def test_what_begins_to_differ_later_is_warned_of_later():
    """At the latest when there have been twice as many calls."""

    def loss(net: Net, x: Tensor, o: Tensor, r: Tensor, step: int) -> Tensor:
        factor = rows(o).detach().std() * (step > 2)
        return functional.mse_loss(o, r) - factor * o.mean()

    given = {"r": REAL}
    model, _ = make(Case(loss, given), ["cpu"] * 4, 3)
    for step in (1, 2):
        results(model, model.module, given | {"step": step}, True)
    with pytest.warns(BalanceWarning, match="it has a part that is no mean or sum"):
        for step in (3, 4):
            results(model, model.module, given | {"step": step}, True)


def test_a_number_without_a_gradient_that_was_a_sum_may_become_a_mean():
    def loss(net: Net, x: Tensor, o: Tensor, r: Tensor, step: int) -> tuple[Tensor, Tensor]:
        losses = (o.detach() - r).square()
        return o.mean(), losses.sum() if step < 2 else losses.mean()

    given = {"r": REAL}
    model, bare = make(Case(loss, given), ["cpu"] * 4, 1)
    for step in range(8):
        named = given | {"step": step}
        found, expected = (m(X, **named) for m in (model, bare))
        if step not in (2,):  # looked at again in the fourth call
            torch.testing.assert_close(found, expected, **TOLERANCE)


@since_torch("2.6")
def test_weights_of_a_loss_function_are_its_denominator():
    case = Case(lambda n, x, o, r, w: functional.mse_loss(o, r, weight=w), {"r": REAL, "w": PART})
    check(case, ["cpu"] * 4, 1)


@pytest.mark.parametrize("added", [0, 1e-8])
def test_a_loss_may_take_turns_with_another(added):
    def loss(n, x, o, m, is_masked):
        count = (m.sum() + added).clamp(min=1)
        return (rows(o) * m).sum() / count if is_masked else o.square().mean()

    model, bare = make(Case(loss), ["cpu"] * 4, 1)
    for call in range(12):
        given = {"m": HOLES, "is_masked": call % 2 == 0}
        found, expected = (
            results(model, model.module, given, True),
            results(bare, bare, given, True),
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_count_may_be_added_up_in_a_long_loop():
    def loss(n, x, o, m):
        count = torch.zeros(()).to(o)
        for _ in range(1200):
            count = count + m.sum()
        return (rows(o) * m).sum() / count

    check(Case(loss, {"m": HOLES}), ["cpu"] * 4, 1)


def test_what_one_loss_has_shown_is_not_told_of_another_one():
    """The same functions, of samples in one call and of weights in the next."""

    def loss(net: Net, x: Tensor, o: Tensor, step: int) -> Tensor:
        return 0.5 * (net.head.weight if step % 2 else o).square().sum()

    model, bare = make(Case(loss), ["cpu"] * 4, 1)
    for step in range(4):
        found, expected = (
            results(m, m0, {"step": step}, True) for m, m0 in ((model, model.module), (bare, bare))
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_number_that_unlike_chunks_had_in_common_is_no_count_of_equal_ones():
    model, bare = make(Case(lambda n, x, o: o.square().sum() / 4), ["cpu"] * 4, 0)
    for size in (13, 12):
        found, expected = (
            results(m, m0, {"x": size}, True) for m, m0 in ((model, model.module), (bare, bare))
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_as_many_classes_as_samples_are_warned_of_unless_they_were_classes():
    """In a contrastive loss the classes are the samples of the chunk."""

    def contrastive(net: Net, x: Tensor, o: Tensor) -> Tensor:
        return functional.cross_entropy(o @ o.T, torch.arange(len(x)))

    model, _ = make(Case(contrastive), ["cpu"] * 4, 0)
    with pytest.warns(BalanceWarning, match="as many classes as each chunk has samples, 4"):
        results(model, model.module, {"x": 12}, True)
    model, _ = make(Case(lambda n, x, o, y: functional.cross_entropy(o, y)), ["cpu"] * 4, 0)
    x, y = X.repeat(2, 1), Y.repeat(2)
    for size in (16, 15):  # 5 samples in the chunks of the second batch, and 5 classes
        assert model(x[:size], y=y[:size]).isfinite()


def test_ctc_is_a_mean_over_samples_whatever_their_lengths():
    lengths = torch.tensor([1, 2, 2, 2, 1, 3, 3, 2, 1, 4, 4, 3, 1])

    def loss(net: Net, x: Tensor, o: Tensor, lengths: Tensor) -> Tensor:
        outputs = net.tokens(x)[:, : int(lengths.max())].log_softmax(-1).transpose(0, 1)
        ones = torch.ones(len(x), dtype=torch.long)
        return functional.ctc_loss(outputs, ones[:, None], lengths, ones)

    check(Case(loss, {"lengths": lengths}), ["cpu"] * 4, 1)


@pytest.mark.parametrize("is_outer", [True, False])
def test_autocast_of_a_part_of_forward_is_kept(is_outer):
    def loss(net: Net, x: Tensor, o: Tensor, r: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_outer):
            mean = (o.float() - r).square().mean().float()
            return mean * 3 + (mean.view(1, 1) @ mean.view(1, 1)).squeeze()

    model, bare = make(Case(loss), ["cpu"] * 4, 1)
    model, bare = model.float(), bare.float()
    with torch.autocast("cpu", torch.bfloat16, enabled=is_outer):
        found, expected = (m(X.float(), r=REAL.float()) for m in (model, bare))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-2 if not is_outer else 1e-5, atol=0)


def test_given_tensors_are_not_read():
    """A number was compared with them, which waits for their device."""

    class Unread(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            raise AssertionError(f"{function} was called")

    facts = Facts((4, 4), [torch.tensor(3.0).as_subclass(Unread), 6], {}, compares_again=False)
    assert facts.number([6, 6], "div", [8, 8], ("place",)) == 6


def test_replicas_may_name_other_arguments():
    def loss(net: Net, x: Tensor, o: Tensor) -> Tensor:
        return rows(o).mean().clamp(**({"min": 0} if len(x) < 4 else {"max": 9}))

    model, _ = make(Case(loss), ["cpu"] * 4, 1)
    with pytest.warns(BalanceWarning, match="in different ways"):
        assert model(X).isfinite()


def test_a_weighted_loss_may_use_its_parts_many_times():
    """Each use was followed, so 40 doublings took for ever."""

    def loss(net: Net, x: Tensor, o: Tensor) -> Tensor:
        doubled = rows(o).mean()
        for _ in range(40):
            doubled = doubled + doubled
        return doubled

    options = {"loss_weight": lambda x: torch.tensor(len(x))}
    model, bare = make(Case(loss), ["cpu"] * 4, 1, **options)
    torch.testing.assert_close(model(X), bare(X), **TOLERANCE)


def test_lists_of_losses_may_be_written_to_at_once():
    def loss(net: Net, x: Tensor, o: Tensor) -> Tensor:
        losses = [o.square().mean(), o.abs().mean()]
        torch._foreach_mul_(losses, 0.5)
        return losses[0] + losses[1]

    model, _ = make(Case(loss), ["cpu"] * 4, 1)
    with torch.no_grad(), pytest.warns(BalanceWarning, match="no mean or sum|in place"):
        model(X)


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize("has_gradients", [True, False])
def test_losses_are_added_up_in_a_long_loop(has_gradients, gpu0_bsz):
    """Of all steps of a sequence, for example: without recursion, and not as long as its square."""

    def loss(n, x, o, y):
        steps, vector = [], torch.zeros(o.shape[1]).to(o)
        total = torch.zeros(()).to(o)
        for step in range(1100):
            total = total + o.mean() / 7
            vector = vector + o.mean(0)
            if step % 50 == 0:
                steps.append(functional.cross_entropy(o, y.where(y != step % 7, -100)) * step)
        return total + vector.sum() + sum(steps) / len(steps)

    for batch_size in (BATCH, 12):
        case = Case(loss, {"y": IGNORED[:batch_size], "x": batch_size})
        model, bare = make(case, ["cpu"] * 4, gpu0_bsz)
        found = results(model, model.module, case.given, has_gradients)
        expected = results(bare, bare, case.given, has_gradients)
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_outputs_of_one_storage_are_told_apart():
    def losses(n, x, o):
        both = torch.stack([o.square().mean(), o.abs().mean()])
        a, b = both.unbind()
        return {"loss": a + b, "a": a.detach(), "b": b.detach()}

    model, bare = make(Case(losses), ["cpu"] * 4, 1)
    found, expected = model(X), bare(X)
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("has_gradients", [True, False])
def test_many_means_over_the_batch_are_not_traced_and_warned_of(has_gradients):
    check(Case(lambda n, x, o: n.tokens(x).mean(0).square().mean()), ["cpu"] * 4, 1)
    case = Case(lambda n, x, o: n.tokens(x).repeat(1, 1, 4000).mean(0).square().mean())
    model, _ = make(case, ["cpu"] * 4, 1)
    with pytest.warns(BalanceWarning, match="no entry for each sample"):
        results(model, model.module, case.given, has_gradients)


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

    model, _ = make(Case(widened), ["cpu"] * 4, 1)
    with pytest.warns(
        BalanceWarning, match="over each chunk is combined|in different ways|written to in place"
    ):
        results(model, model.module, {"m": MASK}, has_gradients)


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
        # A gradient of a sum over samples is one of each sample.
        lambda n, x, o: functional.dropout(o, 0.0).square().mean(),
        # The largest length decides on a shape.
        lambda n, x, o: o[:, : (o > -9).sum(1).max()].square().mean(),
        lambda n, x, o: n.head.weight[[0, 1]].sum() + o.mean(),
    ],
)
def test_nothing_else_is_taken_for_a_mean_over_a_chunk(loss, has_gradients):
    for gpu0_bsz, size in ((1, 13), (0, 13), (3, 12), (1, 4)):
        model, bare = make(Case(loss), ["cpu"] * 4, gpu0_bsz)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            results(model, model.module, {"x": size}, True)
            found = [results(model, model.module, {"x": size}, has_gradients) for _ in range(5)]
        expected = results(bare, bare, {"x": size}, has_gradients)
        texts = [str(w.message) for w in told if "balances nothing" not in str(w.message)]
        # Chunks have as many samples as there are outputs, or a single one.
        if not (texts and size < 13 and "along another dimension" in texts[0]):
            assert not texts
            torch.testing.assert_close(found, [expected] * 5, **TOLERANCE)


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (
            lambda n, x, o, r: (o - r).square().sum() / (2 * len(x)),
            "which is the size of the batch",
        ),
        (
            lambda n, x, o, r: functional.mse_loss(o[1:], r[1:]) * ((len(x) - 1) / len(x)),
            "such as 0, that differs between the replicas and is no count",
        ),
    ],
)
def test_numbers_that_two_equal_chunks_do_not_tell_apart_are_warned_of(loss, reason):
    """In the second case the chunks are unlike, but for the number of samples that is selected."""
    devices, size = (["cpu"] * 2, 8) if "size" in reason else (["cpu"] * 4, 13)
    case = Case(loss, {"r": REAL})
    model, _ = make(case, devices, 4 if "size" in reason else 1)
    with pytest.warns(BalanceWarning, match=reason):
        results(model, model.module, first(case.given, size), True)


def test_a_chunk_may_have_as_many_samples_as_there_are_features():
    case = Case(lambda n, x, o, r: (o - r).square().sum(), {"r": REAL})
    torch.manual_seed(0)
    bare = Net(case.loss).double()
    size = 2 * X.shape[1]
    assert size <= BATCH
    model, bare = make(case, ["cpu"] * 2, size)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "gpu0_bsz")
        found = results(model, model.module, first(case.given, size), True)
    expected = results(bare, bare, first(case.given, size), True)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_a_count_of_1_that_may_be_a_floor_is_warned_of():
    mask = (torch.arange(BATCH) % 3 > 0).double()  # none in the first chunk
    case = Case(lambda n, x, o, m: (rows(o) * m).sum() / max(int(m.sum()), 1), {"m": mask})
    model, _ = make(case, ["cpu"] * 4, 1)
    with pytest.warns(BalanceWarning, match="such as 1, that differ between the replicas"):
        results(model, model.module, case.given, True)


@pytest.mark.parametrize("gpu0_bsz", [0, 1, 3])
def test_losses_of_single_samples_in_a_loop(gpu0_bsz):
    """The graphs differ in size, which is warned of; their mean is one over samples."""

    def loop(net: Net, x: Tensor, o: Tensor, r: Tensor) -> Tensor:
        return sum(functional.mse_loss(a, b) for a, b in zip(o, r, strict=True)) / len(o)

    case = Case(loop, {"r": REAL})
    model, bare = make(case, ["cpu"] * 4, gpu0_bsz)
    for has_gradients in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BalanceWarning)
            found = results(model, model.module, case.given, has_gradients)
        torch.testing.assert_close(
            found, results(bare, bare, case.given, has_gradients), **TOLERANCE
        )


def test_the_warning_is_silenced_by_saying_how_losses_join():
    case = EXACT["rmse"]
    for options in ({"scalar_outputs": "mean"}, {"loss_weight": lambda x, r: len(x)}):
        model, _ = make(case, ["cpu"] * 4, 1, **options)
        loss = model(X, **case.given)
        parts = X.split(model.chunk_sizes), case.given["r"].split(model.chunk_sizes)
        losses = [model.module(x, r=r) * len(x) for x, r in zip(*parts, strict=True)]
        torch.testing.assert_close(loss, sum(losses) / BATCH)


targets = st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=1, max_size=12)
class_weights = st.sampled_from([None, torch.tensor([0.0, 0.5, 2.0], dtype=torch.double)])


class Subclass(nn.CrossEntropyLoss):
    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return super().forward(input * 2, target)


def as_nll(logits: Tensor, y: Tensor, weight: Any, label_smoothing: float) -> Tensor:
    return functional.nll_loss(logits.log_softmax(1), y, weight)


def as_function(logits: Tensor, y: Tensor, weight: Any, label_smoothing: float) -> Tensor:
    return functional.cross_entropy(logits, y, weight, label_smoothing=label_smoothing)


def as_module(logits: Tensor, y: Tensor, weight: Any, label_smoothing: float) -> Tensor:
    return nn.CrossEntropyLoss(weight, label_smoothing=label_smoothing)(logits, y)


def as_subclass(logits: Tensor, y: Tensor, weight: Any, label_smoothing: float) -> Tensor:
    return Subclass(weight, label_smoothing=label_smoothing)(logits, y)


def as_masked_mean(logits: Tensor, y: Tensor, weight: Any, label_smoothing: float) -> Tensor:
    mask = y >= 0
    return ((logits[:, 0] - 1) ** 2 * mask).sum() / mask.sum()


class OfLogits(nn.Module):
    def __init__(self, loss: Any, options: Any) -> None:
        super().__init__()
        self.loss, self.options = loss, options

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        return self.loss(logits, y, *self.options)


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:.*as many classes as each chunk")
@given(
    targets,
    st.sampled_from([as_nll, as_function, as_module, as_subclass, as_masked_mean]),
    st.integers(1, 5),
    st.integers(0, 6),
    class_weights,
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
)
def test_any_targets_may_be_ignored_in_any_split(
    y, loss, num_devices, gpu0_bsz, weight, label_smoothing, is_criterion
):
    y = torch.tensor(y)
    logits = torch.randn(len(y), 3, dtype=torch.double, requires_grad=True)
    bare = OfLogits(loss, (weight, label_smoothing))
    devices = ["cpu"] * num_devices
    if is_criterion:
        criterion = BalancedCriterion(bare)
        model = BalancedDataParallel(gpu0_bsz, nn.Identity(), devices, gather=False)
        found = criterion(model(logits), y)
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
    case = EXACT[name]
    torch.manual_seed(0)
    net = Net(case.loss).double()
    model = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 4, gather=False)

    def compute(x: Tensor, **given: Any) -> Any:
        return net(x, **given)

    criterion = BalancedCriterion(net)
    for has_gradients in (True, False):
        expected = results(net, net, case.given, has_gradients)
        found = results(
            lambda x, **given: criterion(model(x), **given), net, case.given, has_gradients
        )
        torch.testing.assert_close(found, expected, **TOLERANCE)


def test_counts_of_hits_add_up_and_shares_of_hits_are_averaged():
    def hits(net: Net, x: Tensor, o: Tensor, y: Tensor) -> Any:
        is_right = (o.argmax(1) == y).double()
        return functional.cross_entropy(o, y), is_right.sum(), is_right.mean()

    check(Case(hits, {"y": Y}), ["cpu"] * 4, 1)
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
    def loss(net: Net, x: Tensor, o: Tensor, r: Tensor) -> Any:
        return {
            "mean": torch.mean(dim=0, input=rows(o)),
            "sum": torch.sum(input=rows(o)),
            "stack": torch.stack(tensors=[rows(o).mean(), rows(r).mean()]).mean(dim=0),
            "kl": functional.kl_div(
                target=r.softmax(1), reduction="batchmean", input=o.log_softmax(1)
            ),
            "selected": torch.masked_select(input=o, mask=o > 0).mean(),
            "clamped": torch.div(other=torch.clamp(min=1, input=(o > 0).sum()), input=o.sum()),
        }

    check(Case(loss, {"r": REAL}), ["cpu"] * 4, 1)


@pytest.mark.parametrize(("dim", "reduced"), [(0, 0), (0, -2), (1, 1), (1, -1)])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_sums_over_the_batch_dimension_however_it_is_counted(has_gradients, dim, reduced):
    x = (REAL if dim == 0 else REAL.T).clone().requires_grad_(has_gradients)
    module = Lambda(lambda self, x: x.sum(reduced).mean())
    model = BalancedDataParallel(1, module, ["cpu"] * 4, dim=dim)
    torch.testing.assert_close(model(x), module(x), **TOLERANCE)


def test_a_loss_without_a_gradient_to_which_one_with_a_gradient_is_added():
    """It has the node of the addition, which once was taken for that of the cross entropy."""

    def loss(net: Net, x: Tensor, o: Tensor, y: Tensor, r: Tensor) -> Tensor:
        with torch.no_grad():
            found = functional.cross_entropy(o, y)
        found += functional.mse_loss(o, r)
        return found

    given = {"y": IGNORED, "r": REAL}
    model, bare = make(Case(loss, given), ["cpu"] * 4, 1)
    found, expected = results(model, model.module, given, True), results(bare, bare, given, True)
    torch.testing.assert_close(found[1:], expected[1:], **TOLERANCE)  # the gradients


# What the caller says of weights.


def labelled(x: Tensor, labels: Tensor | None = None) -> Any:
    if labels is None:
        return x
    is_counted = labels != -100
    losses = rows(x)
    return {
        "loss": (losses * is_counted).sum().div(float(is_counted.sum()) or 1.0),
        "mean": losses.mean(),
        "logits": x,
    }


class Labelled(nn.Module):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        return labelled(x, labels)


@pytest.mark.parametrize(
    "loss_weight",
    [
        "labels",
        lambda x, labels: (labels != -100).sum(),
        lambda labels: (labels != -100).sum().item(),
        lambda labels, **others: (labels != -100).sum() * len(others),
        lambda a, b: (b != -100).sum(),
        lambda *args: (args[1] != -100).sum(),
        lambda labels: {"loss": (labels != -100).sum()},
    ],
)
def test_loss_weight_gets_the_arguments_that_it_names(loss_weight):
    model = BalancedDataParallel(1, Labelled(), ["cpu"] * 4, loss_weight=loss_weight)
    torch.testing.assert_close(model(X, IGNORED)["loss"], labelled(X, IGNORED)["loss"])
    torch.testing.assert_close(model(X), X)  # no loss, nothing to weigh


def test_loss_weight_takes_keywords():
    for loss_weight in ("labels", lambda labels: (labels != -100).sum()):
        model = BalancedDataParallel(1, Labelled(), ["cpu"] * 4, loss_weight=loss_weight)
        found = model(x=X, labels=IGNORED)["loss"]
        torch.testing.assert_close(found, labelled(X, IGNORED)["loss"])


def test_a_dictionary_of_weights_leaves_other_outputs_as_they_are():
    model = BalancedDataParallel(
        1, Labelled(), ["cpu"] * 4, loss_weight=lambda labels: {"loss": (labels != -100).sum()}
    )
    torch.testing.assert_close(model(X, IGNORED), labelled(X, IGNORED))


@pytest.mark.parametrize(
    ("loss_weight", "message"),
    [
        ("targets", "loss_weight is 'targets', but the arguments of the call are input"),
        (lambda x, labels: 1, r"loss_weight \(.*<lambda>.*\) takes x, labels, but .* are input;"),
        (
            lambda input, *, k: 1,
            "missing a required argument: 'k'|takes input, k, but .* are input",
        ),
        (lambda input: -1, "loss_weight must return a number of at least 0, .* got -1"),
        (lambda input: input, "loss_weight must return a number of at least 0, .* got tensor"),
    ],
)
def test_errors_of_loss_weight_name_it(loss_weight, message):
    module = nn.Sequential(nn.Flatten(), nn.Flatten(0))
    module.append(nn.Module())
    module[2].forward = torch.mean
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
        torch.Tensor(model(X, IGNORED)["loss"]), labelled(X, IGNORED)["loss"], check_dtype=False
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
    given = {"y": IGNORED}
    case = Case(lambda net, x, o, y: scripted(o, y), given)
    model, _ = make(case, ["cpu"] * 4, 1)
    with pytest.warns(BalanceWarning, match="no mean or sum over samples"):
        results(model, model.module, given, has_gradients)


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

    given = {"y": IGNORED}
    model, _ = make(Case(loss, given), ["cpu"] * 4, 1)
    with pytest.warns(BalanceWarning, match="may differ from its value for the whole batch"):
        results(model, model.module, given, has_gradients)
