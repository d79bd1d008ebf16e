"""Test that 0-dim outputs have the value and the gradients of the whole batch.

If they may differ, a warning must say so.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import threading
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from balanced_dp import ArgumentError, BalancedCriterion, BalancedDataParallel, BalanceWarning

from ..devices import kinds_of_splits
from ..modules import Lambda
from ..versions import since_torch
from . import loss_cases
from .loss_cases import (
    EXACT,
    IGNORED,
    INDEX,
    REAL,
    TOKENS,
    UNCLEAR,
    UNSEEN,
    WHOLE,
    Net,
    X,
    Y,
    given_to,
    rows,
)

TOLERANCE = {"rtol": 1e-10, "atol": 1e-12, "equal_nan": True}
FOUR = ("cpu",) * 4


def results(model: Any, module: nn.Module, has_gradients: bool, x: Tensor, **given: Any) -> Any:
    """Call a model, and return its outputs and the gradients of all parameters, on the CPU."""
    module.zero_grad()
    with torch.set_grad_enabled(has_gradients):
        outputs = pytree.tree_leaves(model(x, **given))
    found = [output.detach().cpu() for output in outputs]
    if has_gradients:
        sum(o * (i + 1) for i, o in enumerate(outputs) if o.requires_grad).backward()
        found += [None if p.grad is None else p.grad.cpu() for p in module.parameters()]
    return found


def make(loss: Any, gpu0_bsz: int | None = 1, devices: Any = FOUR, **options: Any) -> Any:
    """Return a ``BalancedDataParallel`` with a loss, and a copy of its module on the CPU."""
    torch.manual_seed(0)
    bare = Net(loss).double()
    module = copy.deepcopy(bare).to(devices[0])
    return BalancedDataParallel(gpu0_bsz, module, devices, **options), bare


def step(model: Any, bare: Any, has_gradients: bool, given: Any) -> tuple[bool, list[str]]:
    """Call a model and its bare module with the same arguments, and compare the results.

    Return whether outputs and gradients are equal, and the warnings of the model.
    """
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


# How losses join depends on the split and not on the kind of devices. Distinct ones show what stays
# on another device, also where the first runs nothing.
@pytest.mark.parametrize(("kind", "gpu0_bsz"), kinds_of_splits([0, 1, 3]), indirect=["kind"])
@pytest.mark.parametrize("name", EXACT)
def test_losses_in_the_module_are_those_of_the_whole_batch(name, gpu0_bsz, devices):
    """In training, and in evaluation after it unless a warning says that a count is not known."""
    loss = EXACT[name]
    model, bare = make(loss, gpu0_bsz, devices[:4])
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
        assert text.endswith("model.check(batch) shows the difference")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("perplexity", "it uses Exp, not only means over samples"),
        (
            "hits",
            "it has no autograd graph. It is averaged, weighted by chunk size. Return its terms",
        ),
        ("sum by a mean", "it uses Div, not only means over samples"),
        ("selected", "it may sum or average only some samples, or entries other than samples"),
        ("sum and mean", "it adds means to sums over samples"),
        ("normalized weights", "it has a sum of products with a factor or divisor that may"),
    ],
)
def test_a_warning_gives_its_reason(name, reason):
    model, _ = make(UNCLEAR[name])
    with pytest.warns(BalanceWarning, match=reason):
        model(**given_to(UNCLEAR[name]))


def test_an_evaluation_before_training_hides_no_warning():
    """Its warning, which says nothing of the loss, was the only one."""
    model, bare = make(UNCLEAR["perplexity"])
    for has_gradients, reason in ((False, "no call with gradients"), (True, "it uses Exp")):
        _, [text] = step(model, bare, has_gradients, given_to(UNCLEAR["perplexity"]))
        assert reason in text


@pytest.mark.parametrize("name", UNSEEN)
def test_check_shows_what_no_graph_shows(name):
    model, bare = make(UNSEEN[name])
    assert not step(model, bare, True, given_to(UNSEEN[name]))[0]
    assert model.check(**given_to(UNSEEN[name])).differences


def test_check_leaves_everything_as_it_was():
    """Both runs of the whole batch wrote to an argument, and differed."""

    def draw() -> float:
        return float(torch.rand(())) + np.random.rand() + random.random()

    x, model = X.clone(), make(lambda n, x, o: n.head(x.sub_(2)) + 0 * draw())[0]
    drawn = []
    for checks in (False, True):
        for set_seed in (torch.manual_seed, np.random.seed, random.seed):
            set_seed(0)
        with torch.no_grad():
            result = model.check(x) if checks else None
        drawn.append(draw())
    assert drawn[0] == drawn[1] and (result.num_compared, result.differences) == (3, ())
    torch.testing.assert_close(x, X)


@pytest.mark.parametrize("dtype", [torch.half, torch.bfloat16])
def test_check_tells_of_differences_in_half_precision(dtype):
    """Any were taken for rounding, and a warning of the split for their cause."""
    model, _ = make(UNCLEAR["perplexity"], 3)
    [found, *_] = model.to(dtype).check(X[:4].to(dtype) * 3, y=Y[:4]).differences
    assert found.cause.startswith("it uses Exp, not only means over samples. It is averaged")


def test_check_compares_outputs_of_all_kinds():
    """Those without a gradient or entries, 0 and NaN equal themselves; what is drawn does not."""

    def outputs(n: Net, x: Tensor, o: Tensor, noise: float) -> Any:
        alone = {"nan": o.detach().log(), "none": o[:, :0], "int": o.argmax(1), "text": ""}
        alone |= {"whole": o} if noise and len(x) == len(X) else {}
        return {"rows": o + noise * torch.rand_like(o), "zero": 0 * o, **alone}

    x, (model, _) = X.clone().requires_grad_(), make(outputs, gather=False)
    result = model.check(x, noise=0.0)
    assert (result.num_compared, result.differences, x.grad) == (5, (), None)
    found = model.check(X, noise=1.0).differences
    assert found[0][0] == "output whole" and "depend on other samples" in found[0].cause
    assert found[-1][0] == "output rows" and "random, in evaluation mode too" in found[-1].cause


@since_torch("2.6")
def test_jagged_tensors_in_forward():
    def loss(n: Net, x: Tensor, o: Tensor) -> Any:
        jagged = torch.nested.as_nested_tensor([*o.split(1)], layout=torch.jagged)
        return jagged.values().square().mean(), jagged.sum()

    model, bare = make(loss)
    with pytest.warns(BalanceWarning, match="it uses (a jagged tensor|SumBackward)"):
        torch.testing.assert_close(model(X)[0], bare(X)[0])


@pytest.mark.parametrize("num_devices", [0, 1])
def test_check_without_a_split(num_devices, no_accelerator):
    model = BalancedDataParallel(1, nn.Linear(6, 2).double(), ["cpu"] if num_devices else None)
    result = model.check(X)
    assert (result.chunk_sizes, result.num_compared, result.differences) == ((), 3, ())
    assert "not split; give device_ids=[" in str(result)


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("name", [*EXACT, *UNCLEAR])
def test_chunks_of_one_size(name, size):
    """Exact, or warned of, but for what docs/loss.md names."""
    loss = EXACT.get(name) or UNCLEAR[name]
    model, bare = make(loss, None)
    is_exact, told = step(model, bare, True, given_to(loss, size))
    if name in EXACT:
        # 2 may be no count, and in a - 0.5 * b, it is 0.5. What is stacked may be no samples.
        few = size == 8 and name.endswith(("sum by length", ", by length"))
        few |= name == "samples in a stack"
        has_number = name in ("variational", "minus half a sum", "sum by a number")
        assert bool(told) == (few or has_number)
        assert is_exact or has_number
    assert is_exact or told or any(kind in name for kind in SILENT)


SILENT = ("times length", "less one", "branch", "as many weights")


CROSS_ENTROPIES = {
    "nll": lambda o, y, weight, _: functional.nll_loss(o.log_softmax(1), y, weight),
    "function": lambda o, y, weight, smoothing: functional.cross_entropy(
        o, y, weight, label_smoothing=smoothing
    ),
}


@pytest.mark.filterwarnings("ignore:.*cross entropy targets are row numbers")
@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@given(
    st.lists(st.sampled_from([-100, 0, 1, 2]), min_size=1, max_size=12),
    st.sampled_from(sorted(CROSS_ENTROPIES)),
    st.integers(1, 5),
    st.integers(0, 6),
    st.sampled_from([None, torch.tensor([0.0, 0.5, 2.0], dtype=torch.double)]),
    st.sampled_from([0.0, 0.3]),
    st.booleans(),
)
@example([-100] * 4, "function", 4, 1, None, 0.0, False)
@example([0, 1, 2, 0, 1, 2], "function", 2, 3, None, 0.0, False)
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


# What the caller says of weights.


class Labelled(nn.Module):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        if labels is None:
            return x
        is_counted, losses = labels != -100, rows(x)
        loss = (losses * is_counted).sum() / is_counted.sum()  # 0 / 0 in a chunk of IGNORED
        smoothed = functional.cross_entropy(x, labels, label_smoothing=0.1)
        return {"loss": loss, "smoothed": smoothed, "mean": losses.mean(), "logits": x}


@pytest.mark.parametrize(
    "loss_weight",
    [
        lambda x, labels: (labels != -100).sum(),
        lambda labels: np.int64((labels != -100).sum().item()),
    ],
)
def test_loss_weight_gets_the_arguments_that_it_names(loss_weight):
    model = BalancedDataParallel(1, Labelled(), ["cpu"] * 4, loss_weight=loss_weight)
    x = X.clone().requires_grad_()
    expected = Labelled()(x, IGNORED)
    for found in (model(x, IGNORED), model(x=x, labels=IGNORED)):
        for name in ("loss", "smoothed"):
            torch.testing.assert_close(found[name], expected[name])
            pair = (torch.autograd.grad(o[name], x, retain_graph=True) for o in (found, expected))
            torch.testing.assert_close(*pair)
    torch.testing.assert_close(model(X), X)  # no loss, nothing to weigh


def test_a_dictionary_of_weights_leaves_other_outputs_as_they_are():
    model = BalancedDataParallel(
        1, Labelled(), ["cpu"] * 4, loss_weight=lambda labels: {"loss": (labels != -100).sum()}
    )
    x = X.clone().requires_grad_()
    torch.testing.assert_close(model(x, IGNORED), Labelled()(x, IGNORED))


@pytest.mark.parametrize("size", [12, 13])
@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (EXACT["masked"], {"loss_weight": lambda mask: mask.sum()}),
        (UNCLEAR["sum by a count"], {"loss_weight": lambda holes: holes.sum()}),
        (UNCLEAR["selected"], {"loss_weight": lambda holes: holes.sum()}),
        (UNCLEAR["scaled entries"], {"scalar_outputs": "sum"}),
    ],
)
def test_what_is_not_known_can_be_said(loss, options, size):
    """In evaluation, too. A chunk in which nothing counts is ignored, though its loss is 0 / 0."""
    model, bare = make(loss, 1, **options)
    for has_gradients in (True, False):
        assert step(model, bare, has_gradients, given_to(loss, size)) == (True, [])


@pytest.mark.parametrize(
    ("loss_weight", "message"),
    [
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


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_scripted_cross_entropy_is_warned_of(has_gradients):
    """It does not look up the functions that count."""
    with warnings.catch_warnings():  # that it is deprecated, in a class for each version
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(_cross_entropy)
    model, _ = make(lambda n, x, o, y: scripted(o, y))
    with pytest.warns(BalanceWarning, match="not only means|no call with gradients"):
        results(model, model.module, has_gradients, X, y=IGNORED)


def _cross_entropy(o: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(o, y)


# The rows of a table of programs that an earlier way to join losses broke.


@pytest.mark.parametrize("gpu0_bsz", [0, 1, None])
@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.filterwarnings("ignore::balanced_dp.BalanceWarning")
def test_forward_runs_once_on_each_active_device(gpu0_bsz, has_gradients):
    sizes: list[int] = []

    def loss(n: Net, x: Tensor, o: Tensor) -> Tensor:
        sizes.append(len(x))
        return o.square().mean() ** 2 + o.norm()

    model, _ = make(loss, gpu0_bsz)
    for size in (12, 13, 12):
        sizes.clear()
        results(model, model.module, has_gradients, X[:size])
        assert sorted(sizes) == sorted(filter(None, model.chunk_sizes))


@pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"), reason="an older torch"
)
def test_a_masked_mean_in_a_checkpoint_is_not_computed_again():
    """Each number that was read from the graph ran it once more."""
    calls: list[int] = []

    def masked(o: Tensor, mask: Tensor) -> Tensor:
        calls.append(len(o))
        return loss_cases.masked_mean(rows(o), mask)

    model, _ = make(lambda n, x, o, mask: checkpoint(masked, o, mask, use_reentrant=False))
    with pytest.warns(BalanceWarning, match="it uses Div"):
        model(**given_to(EXACT["masked"]))
    assert sorted(calls) == sorted(model.chunk_sizes)


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
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
        torch.jit.script(_cross_entropy)
        torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
        assert pickle.loads(pickle.dumps(torch.sum)) is torch.sum
        assert type(o.mean()) is Tensor and type(functional.cross_entropy(o, y)) is Tensor
        return functional.cross_entropy(o, y)

    model, bare = make(loss)
    assert step(model, bare, True, {"x": X, "y": Y})[0]
    assert {"cross_entropy_loss", "nll_loss_nd"} in in_forward
    with pytest.raises(KeyboardInterrupt):
        make(mock.Mock(side_effect=KeyboardInterrupt))[0](X)
    for owner, members in before.items():
        assert {n: v for n, v in vars(owner).items() if members.get(n) is not v} == {}
    with mock.patch("torch._C._nn.cross_entropy_loss") as replaced:
        make(lambda n, x, o: o)[0](X)
        assert torch._C._nn.cross_entropy_loss is replaced


@pytest.mark.slow
def test_a_loss_in_a_compiled_module_is_warned_of():
    """Autograd sees one custom function of the parameters, and neither samples nor reductions."""
    torch._dynamo.reset()
    module = Net(lambda n, x, o, y: functional.cross_entropy(o, y)).double()
    model = BalancedDataParallel(1, torch.compile(module, backend="aot_eager"), FOUR)
    with pytest.warns(BalanceWarning, match="it uses CompiledFunction"):
        model(X, y=IGNORED)


class Right:
    """An object that is not a tensor, to be the right operand of an operator on a tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return args[0].square()


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, o: torch.compile(lambda x, s: x / s * s, backend="aot_eager")(
            o, o.abs().max().detach()
        ).mean(),
        lambda n, x, o: (o @ Right()).mean(),
        lambda n, x, o: checkpoint(n.again[0], o, use_reentrant=True).square().mean(),
    ],
)
def test_programs_that_traces_changed(loss):
    """A compiled function, an operand with a protocol of its own, a module at two paths."""
    torch._dynamo.reset()
    model, bare = make(loss)
    for net in (bare, model.module):
        net.again = nn.ModuleList([nn.Linear(5, 5).double()])
        net.again.append(net.again[0])
    model.module.load_state_dict(bare.state_dict())
    given = {"x": X}
    assert all(step(model, bare, True, given)[0] for _ in range(2))


@pytest.mark.parametrize("size", [4, 8, 12])
def test_an_argument_that_equals_the_number_of_samples(size):
    """It was taken for what divides a sum, which was added up."""
    model, bare = make(lambda n, x, o, flag, k: rows(o).sum() / len(x), None)
    is_exact, told = step(model, bare, True, {"x": X[:size], "flag": True, "k": size // 4})
    assert is_exact and bool(told) is (size < 12)


@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, o: rows(o).mean() + n.scale / len(x),
        lambda n, x, o: rows(o).mean() + n.scale * (len(x) + 1),
        lambda n, x, o, mask, items: (rows(o) * mask / mask.sum()).sum() / items,
    ],
)
def test_a_number_that_differs_between_devices(loss):
    """It was taken for the same on all devices, which share a parameter or an argument."""
    model, bare = make(loss)
    is_exact, told = step(model, bare, True, given_to(loss))
    assert not is_exact and told


def test_an_argument_in_a_container_may_be_left_out():
    """Evaluation looked for it, or was silently that of training."""

    def loss(n: Net, x: Tensor, o: Tensor, given: dict[str, Tensor]) -> Tensor:
        found = functional.cross_entropy(o, given["y"]) + loss_cases.summed(o, given["y"])
        return found / given["items"] if "items" in given else found / len(x)

    model, bare = make(loss)
    given = {"y": TOKENS[:, 0], "items": torch.tensor(7)}
    assert step(model, bare, True, {"x": X, "given": given}) == (True, [])
    del given["items"]
    assert "the same arguments" in step(model, bare, False, {"x": X, "given": given})[1][0]


@pytest.mark.parametrize("gpu0_bsz", [1, None])
@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("ignored", True),
        ("ignored", False),
        ("scaled", True),
        ("in place", True),
        ("summed", False),
    ],
)
def test_cross_entropies_in_inference_mode(name, first, gpu0_bsz):
    """As Lightning evaluates: they were averaged by samples."""
    losses = {**EXACT, "summed": lambda n, x, o, ignored: loss_cases.summed(o, ignored)}
    model, bare = make(losses[name], gpu0_bsz)
    given = given_to(losses[name], 12)
    for has_gradients in (first, False):
        with torch.inference_mode(not has_gradients):
            assert step(model, bare, has_gradients, given) == (True, [])


def test_a_term_that_comes_later():
    """Recorded steps of eight calls were repeated, without it."""

    def loss(n: Net, x: Tensor, o: Tensor, step: int) -> Tensor:
        aux = loss_cases.Halved.apply(o).square().sum() if step >= 2 else torch.zeros(()).to(o)
        return functional.mse_loss(o, 2 * o) + aux

    model, bare = make(loss)
    found = [step(model, bare, True, {"x": X, "step": i}) for i in range(3)]
    assert found[:2] == [(True, [])] * 2 and found[2][1]


def test_a_factor_that_changes_is_seen_at_once():
    def loss(n: Net, x: Tensor, o: Tensor, factor: int) -> Tensor:
        return o.mean() * (factor if len(x) > 1 else 1)

    model, bare = make(loss)
    told = [step(model, bare, True, {"x": X, "factor": factor})[1] for factor in (1, 2, 2)]
    assert [len(texts) for texts in told] == [0, 1, 0]


@pytest.mark.parametrize("gpu0_bsz", [1, 3])
@pytest.mark.parametrize("name", [name for name in EXACT if WHOLE.keys() & given_to(EXACT[name])])
def test_a_first_batch_in_which_everything_counts(name, gpu0_bsz):
    """Its counts are the chunk sizes, by which later ones were weighted."""
    model, bare = make(EXACT[name], gpu0_bsz)
    given = given_to(EXACT[name])
    whole = {key: WHOLE.get(key, value) for key, value in given.items()}
    for each in (whole, given, whole, given, whole):
        assert step(model, bare, True, each) == (True, [])
    is_exact, told = step(model, bare, False, given)
    assert is_exact or told


def test_one_sample_does_not_show_what_divides_a_sum():
    """One times a sum was averaged without a word."""
    given = {"x": X[:4], "factor": 1.0}
    for loss in (
        lambda n, x, o, factor: factor * o.square().sum(),
        lambda n, x, o, factor: n.scale.exp() * rows(o).sum(),
        lambda n, x, o, factor: (rows(o) / x.square().sum(-1)).sum() * factor,
        lambda n, x, o, factor: n.scale.exp() * functional.mse_loss(o, 2 * o, reduction="sum"),
    ):
        model, bare = make(loss, None)
        assert step(model, bare, True, given)[1]


def test_what_is_unclear_in_an_even_split_is_clear_in_another():
    model, bare = make(lambda n, x, o: o.square().sum() * 0.5, 4)
    found = [step(model, bare, True, {"x": X[:size]}) for size in (12, 13)]
    assert found[0][1] and found[1][0]


@pytest.mark.parametrize("decorate", [lambda f: f, lambda f: functools.wraps(f)(lambda o: f(o))])
def test_functions_are_told_apart(decorate):
    model = BalancedDataParallel(1, nn.Identity(), FOUR, gather=False)
    outputs = model(REAL.clone().requires_grad_())
    torch.testing.assert_close(outputs.map(decorate(torch.mean)), REAL.mean())
    with torch.no_grad(), pytest.warns(BalanceWarning, match="no call with gradients"):
        outputs.map(decorate(torch.sum))


def test_a_metric_whose_graph_is_freed():
    """Reading what it had saved ended the call."""
    model, bare = make(lambda n, x, o: torch.autograd.grad(m := (o * x[:, :1]).mean(), o) and m)
    torch.testing.assert_close(model(X), bare(X))


def test_a_learned_factor_in_half_precision():
    """It was taken for one of Python's numbers, and read."""
    model, _ = make(lambda n, x, o, y: functional.cross_entropy(o, y) * n.scale.half())
    with pytest.warns(BalanceWarning, match="it uses Mul"):
        model(X, y=IGNORED)


def test_losses_keep_their_dtype():
    model, bare = make(lambda n, x, o: (torch.complex(rows(o), rows(o)) * (x[:, 0] + 1j)).mean())
    torch.testing.assert_close(model(X), bare(X))
    model, _ = make(lambda n, x, o, y: (functional.cross_entropy(o, y) + rows(o).mean()).half())
    assert model(X, y=Y).dtype == torch.half


@pytest.mark.parametrize("has_metric", [True, False])
@pytest.mark.parametrize(("gpu0_bsz", "size"), [(None, 12), (1, 13)])
def test_evaluation_with_other_arguments_or_a_metric(gpu0_bsz, size, has_metric):
    """Trained with the number of items of the batch, and evaluated by that of samples."""

    def loss(n: Net, x: Tensor, o: Tensor, y: Tensor, num_items: int | None = None) -> Tensor:
        if has_metric and not torch.is_grad_enabled():
            functional.cross_entropy(o / 2, y)
        losses = functional.cross_entropy(o, y, reduction="sum")
        return (losses * 1) / (len(x) if num_items is None else num_items)

    model, bare = make(loss, gpu0_bsz)
    num_items = torch.tensor(40)
    given = {"x": X[:size], "y": Y[:size], "num_items": num_items}
    assert step(model, bare, True, given) == (True, [])
    given["num_items"] = num_items if has_metric else None
    is_exact, told = step(model, bare, False, given)
    assert is_exact or "no call with gradients and the same arguments" in told[0]


@pytest.mark.parametrize(("number", "k"), [(lambda items: items / 10, 1), (torch.tensor, 0.5)])
def test_a_cross_entropy_is_exact_beside_what_is_unclear(number, k):
    """As in Mixtral. Whatever is averaged, the number that divides it is that of the call."""
    penalty = loss_cases.PENALTIES["orthogonality"]
    model, bare = make(lambda n, x, o, y, items: k * loss_cases.summed(o, y) / items + penalty(n))
    for items in (7, 5):
        assert step(model, bare, True, {"x": X, "y": IGNORED, "items": number(items)})[0]


def test_an_argument_that_is_none_may_be_left_out():
    model = BalancedDataParallel(1, Lambda(lambda _, x, y=None: x.square().mean()), FOUR)
    model(REAL.clone().requires_grad_(), None)
    with torch.no_grad():
        torch.testing.assert_close(model(REAL), REAL.square().mean())


def test_evaluation_with_fewer_cross_entropies_in_a_chunk():
    def loss(n: Net, x: Tensor, o: Tensor, y: Tensor) -> Tensor:
        if len(x) < 4 or torch.is_grad_enabled():
            return functional.cross_entropy(o, y) / 2
        return rows(o).mean()

    model, _ = make(loss)
    assert step(model, model.module, True, {"x": X, "y": Y})[0]
    with torch.no_grad(), pytest.warns(BalanceWarning, match="no call with gradients"):
        model(X, y=Y)


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
def test_a_multiple_of_a_sum_may_come_without_gradients_first(gpu0_bsz):
    """Trainer.evaluate() before train(), with the loss of transformers; a chunk had no targets."""
    model, bare = make(
        lambda n, x, o, ignored, items: loss_cases.summed(o, ignored) / items, gpu0_bsz
    )
    given = {"x": X, "ignored": IGNORED, "items": torch.tensor(8)}
    assert step(model, bare, False, given) == (True, [])


@pytest.mark.parametrize(
    "loss",
    [
        lambda n, x, o, y, real: functional.cross_entropy(o, y) + functional.mse_loss(o, real),
        lambda n, x, o, y, real: loss_cases.summed(o, y) / (len(y) * 4),
        lambda n, x, o, y, real: -loss_cases.summed(o, y) / len(y),
    ],
)
@pytest.mark.parametrize(("gpu0_bsz", "size"), [(1, 13), (None, 12)])
def test_values_alone_may_not_tell_what_a_loss_is(loss, gpu0_bsz, size):
    """Where all but one chunk had no targets, or a number divided a sum in chunks of one size."""
    model, bare = make(loss, gpu0_bsz)
    given = {"x": X[:size], "y": Y[:size].where(INDEX[:size] > 9, -100), "real": REAL[:size]}
    is_exact, told = step(model, bare, False, given)
    assert is_exact or told


def test_a_divisor_of_one_entry_beside_another_term():
    """It made the terms vectors, which were not joined."""
    given = {"x": X, "y": Y, "real": REAL, "items": torch.tensor([7.0]).double()}
    model, bare = make(
        lambda n, x, o, y, real, items: (
            loss_cases.summed(o, y) / items + functional.mse_loss(o, real)
        ),
        broadcast=("items",),
    )
    for has_gradients in (True, False):
        assert step(model, bare, has_gradients, given) == (True, [])


@pytest.mark.filterwarnings("ignore::balanced_dp.BalanceWarning")
def test_values_that_are_read_in_a_loop_keep_no_graph(emulated):
    def loss(m: Any, x: Tensor) -> Tensor:
        for _ in range(20):
            m.inner(x).square().mean().item()
        return m.inner(x).square().mean()

    inner = nn.Sequential(nn.Linear(6, 2048), nn.Tanh(), nn.Linear(2048, 4))
    module = Lambda(loss, inner=inner).to(emulated[0])
    model = BalancedDataParallel(4, module, emulated[:2])
    peaks = []
    for _ in range(3):
        torch.lazy.reset_peak_memory_stats(emulated[0])
        model(X.float()).backward()
        peaks.append(torch.lazy.max_memory_allocated(emulated[0]))
        model.zero_grad()
    activations = 3 * 4 * 4 * 2048  # of three layers with as many entries
    assert peaks[0] < 8 * activations + 4 * 4 * 2048 * 12
    assert peaks[0] <= 1.02 * peaks[2]  # nothing is computed once more in the first step


# Outputs of other forms.


@pytest.mark.parametrize("gpu0_bsz", [0, 1, None])
@pytest.mark.parametrize("shape", [(1,), (1, 1)])
def test_a_loss_with_one_entry_is_joined_as_one_without_dimensions(gpu0_bsz, shape):
    model, bare = make(lambda n, x, o, y: functional.cross_entropy(o, y).view(shape), gpu0_bsz)
    for size in (12, 3):  # a last batch of one sample for each device
        given = given_to(lambda n, x, o, y: None, size)
        assert step(model, bare, True, given) == (True, [])
        assert model(**given).shape == shape


@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_row_that_was_squeezed_is_told_from_a_loss(has_gradients):
    """In a batch of one sample a device, the rows of an evaluation are averaged like losses."""
    model, _ = make(lambda n, x, o: n.head(x)[:, :1].squeeze(), None)
    with (
        torch.set_grad_enabled(has_gradients),
        pytest.warns(BalanceWarning, match=r"with squeeze\(-1\)"),
    ):
        model(X[:4])


def test_a_model_can_be_pickled_after_a_call():
    criterion = BalancedCriterion(nn.CrossEntropyLoss())
    model = BalancedDataParallel(1, nn.Linear(6, 5).double(), ["cpu"] * 2, gather=False)
    criterion(model(X), Y)
    model(X).map(lambda o: o.mean())
    loaded = pickle.loads(pickle.dumps((model, criterion)))
    torch.testing.assert_close(loaded[1](loaded[0](X), Y), criterion(model(X), Y))


@pytest.mark.slow
@pytest.mark.parametrize("gpu0_bsz", [1, None])
def test_losses_are_added_up_in_a_long_loop(gpu0_bsz):
    """Of all steps of a sequence, for example: without recursion, in a time that grows with it."""

    def loss(n: Net, x: Tensor, o: Tensor) -> Tensor:
        total, state = torch.zeros(()).to(o), o
        for _ in range(1100):
            state = 0.9 * state + o.tanh()
            total = total + state.mean() / 7
        return total

    model, bare = make(loss, gpu0_bsz)
    assert step(model, bare, True, {"x": X[:12]}) == (True, [])


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize(
    "loss",
    [
        lambda h, dim: h.mean(dim).sum(),
        lambda h, dim: h.sum(dim).mean(),
        lambda h, dim: h.transpose(0, 1).mean(1 - dim).sum(),
        lambda h, dim: h[(slice(None),) * (1 - dim) + (-1,)].sum(-1).mean(),
        lambda h, dim: h.sum(2).mean(),
        lambda h, dim: h.mean(2).sum(),
        lambda h, dim: h.mean((1 - dim, 2)).sum() + h.sum(dim).mean((0, 1)),
        lambda h, dim: h.mean(1 - dim).mean(0).sum(),
        lambda h, dim: h[..., 0].mean(dim).sqrt().sum(),
        lambda h, dim: h.flatten(0, 1).sum(1).mean() if dim == 0 else h.mean(),
        lambda h, dim: torch.stack([h[..., 0]] * 8).sum(0).mean(),
        lambda h, dim: torch.stack([h[..., 0]] * 8).mean(dim + 1).sum(),
    ],
)
@pytest.mark.parametrize("features", [8, 16])
def test_sizes_that_are_multiples_by_chance(loss, dim, features):
    """The features that a mean over samples left were taken for samples, and the mean for a sum."""
    weight = nn.Parameter(torch.ones(features, dtype=torch.double))
    module = Lambda(lambda m, x: loss((m.a * x).square(), dim), a=weight)
    x = torch.randn(32, 32, features, dtype=torch.double)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", BalanceWarning)
        found = BalancedDataParallel(None, module, ["cpu"] * 4, dim=dim)(x)
    assert torch.isclose(found, module(x)) or "may differ" in str(told[0].message)
