"""The loss computed on each device: its value and its gradients are those of the whole batch."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from balanced_dp import (
    ArgumentError,
    ArgumentTypeError,
    BalancedCriterion,
    BalancedDataParallel,
    ScatterError,
)

from ..devices import kinds_of_splits, open_devices
from ..modules import Lambda
from ..notes import notes_of

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10, "check_device": False}
BATCH, WIDTH, CLASSES = 32, 6, 5
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0], dtype=torch.double)


def linear(*shape: int) -> nn.Module:
    """A module of float64 with one output of ``shape`` a sample."""
    size = int(torch.tensor(shape).prod())
    return nn.Sequential(nn.Linear(WIDTH, size), nn.Unflatten(1, shape)).double()


def classes(*shape: int, ignored: int | None = None) -> Tensor:
    """Targets of which some are ignored: in any split into (1, 13, 13, 5) all of the first."""
    targets = torch.randint(0, CLASSES, (BATCH, *shape))
    if ignored is not None:
        targets[0] = ignored
        targets[5:12] = ignored
        targets[20:].view(12, -1)[:, :1] = ignored
    return targets


def numbers(*shape: int) -> Tensor:
    return torch.rand(BATCH, *shape, dtype=torch.double)


def of_time(self: Any, x: Tensor) -> Tensor:
    """Log-probabilities for CTC are (T, N, C): the batch is their second dimension."""
    return self.inner(x).transpose(0, 1).log_softmax(-1)


def masked_mean(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((output - target).square() * mask[:, None]).sum() / mask.sum()


def several(output: Any, target: Any, *, extra: Tensor) -> dict[str, Any]:
    return {
        "first": functional.mse_loss(output["a"], target["a"]),
        "second": [functional.l1_loss(output["b"][0], extra), output["a"].square()],
    }


class Shifted(nn.CrossEntropyLoss):
    """As of a causal language model: what torch's loss sees is not what the subclass gets."""

    def forward(self, input: Tensor, target: Any) -> Tensor:
        labels = target["labels"][:, 1:]
        return super().forward(input[:, :-1].flatten(0, 1), labels.flatten())


def make_cases() -> dict[str, tuple[Any, ...]]:
    """Criteria, each with a module, targets, named targets and options."""
    torch.manual_seed(0)
    ce, bce, logits = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, linear(CLASSES)
    log = nn.Sequential(linear(CLASSES, 3), nn.LogSoftmax(1))
    ignored, mask = classes(ignored=-100), (torch.arange(BATCH) % 3 == 1).double()
    lengths = torch.full((BATCH,), 9), torch.arange(BATCH) % 4 + 1
    weight, options = {"weight": WEIGHTS}, {"weight": WEIGHTS, "label_smoothing": 0.2}
    ctc = Lambda(of_time, inner=linear(9, CLASSES)), torch.randint(1, CLASSES, (BATCH, 4)), *lengths
    both = Lambda(
        lambda self, x: {"a": self.first(x), "b": (self.second(x),)},
        first=linear(4),
        second=linear(2),
    )
    reducing: dict[str, tuple[Any, ...]] = {
        "ce ignored": (ce, logits, ignored),
        "ce weight": (partial(ce, **weight), logits, classes(ignored=3)),  # by a weight of 0
        "ce all options": (
            *(partial(ce, ignore_index=3, **options), linear(CLASSES, 3, 2)),
            classes(3, 2, ignored=3),
        ),
        "ce probabilities": (partial(ce, **options), log[0], numbers(CLASSES, 3).softmax(1)),
        "nll": (partial(nn.NLLLoss, **weight), log, classes(3, ignored=-100)),
        "bce": (bce, logits, numbers(CLASSES)),
        "bce weights": (partial(bce, pos_weight=WEIGHTS, **weight), logits, numbers(CLASSES)),
        "mse": (nn.MSELoss, linear(4), numbers(4)),
        "kl_div": (nn.KLDivLoss, log, numbers(CLASSES, 3).softmax(1)),
        "multi_margin": (partial(nn.MultiMarginLoss, **weight), logits, classes()),
        "ctc": (nn.CTCLoss, *ctc),
        "ctc zero_infinity": (partial(nn.CTCLoss, zero_infinity=True), *ctc),
    }
    found: dict[str, tuple[Any, ...]] = {
        f"{name} {reduction}": (make(reduction=reduction), module, targets)
        for name, (make, module, *targets) in reducing.items()
        for reduction in ("mean", "sum", "none")
    }
    batchmean = nn.KLDivLoss(reduction="batchmean", log_target=True)
    function = partial(functional.cross_entropy, ignore_index=3, label_smoothing=0.1, **weight)
    head = Lambda(lambda self, x, y: functional.mse_loss(self.head(x), y), head=linear(4))
    weighs = {"loss_weight": lambda output, target, mask: mask.sum()}
    if hasattr(nn, "LinearCrossEntropyLoss"):
        criterion = nn.LinearCrossEntropyLoss(WIDTH, CLASSES, dtype=torch.double, **weight)
        found["linear_cross_entropy"] = (criterion, linear(WIDTH), [ignored])
    return found | {
        "kl_div batchmean": (batchmean, log, [numbers(CLASSES, 3).log_softmax(1)]),
        "partial": (function, logits, [classes(ignored=3)]),
        "loss_weight": (masked_mean, linear(4), [numbers(4), mask], {}, weighs),
        "several": (several, both, [{"a": numbers(4)}], {"extra": numbers(2)}),
        "keyword": (ce(), logits, [], {"target": ignored}),
        "subclass": (Shifted(), linear(7, CLASSES), [{"labels": classes(7, ignored=-100)}]),
        "with parameters": (head, linear(WIDTH), [numbers(4)]),
    }


CASES = make_cases()

SPLITS: dict[tuple[int, ...], Any] = {
    (0, 11, 11, 10): {"gpu0_bsz": 0},
    (1, 13, 13, 5): {"gpu0_bsz": None, "device_weights": [1, 13, 13, 5]},
    (8, 8, 8, 8): {"gpu0_bsz": 8},
}


@pytest.fixture
def x() -> Tensor:
    return torch.randn(BATCH, WIDTH, dtype=torch.double)


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("kind", "split"), kinds_of_splits(list(SPLITS)), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_whole_batch(name, split, kind, x):
    criterion, module, targets, kwargs, options = (*CASES[name], {}, {})[:5]

    def results(model: Any, criterion: Any) -> list[Any]:
        """The loss and the gradients of everything, on the CPU."""
        inputs = x.clone().requires_grad_()
        loss = tree_leaves(criterion(model(inputs), *targets, **kwargs))
        sum((part * (1 + i)).sum() for i, part in enumerate(loss)).backward()
        parts = [m for m in (model, criterion) if isinstance(m, nn.Module)]
        found = [*loss, inputs.grad, *(p.grad for part in parts for p in part.parameters())]
        return [tensor.detach().cpu() for tensor in found]

    expected = results(*map(copy.deepcopy, (module, criterion)))
    with open_devices(kind, 4) as devices:
        model = BalancedDataParallel(
            module=copy.deepcopy(module).to(devices[0]),
            **{"device_ids": devices, "gather": False, **SPLITS[split]},
        )
        ours = BalancedCriterion(copy.deepcopy(criterion), **options).to(devices[0])
        found = results(model, ours)
        torch.testing.assert_close(found, expected, **TOLERANCE)
        assert model.chunk_sizes == split
        assert not any(t.isnan().any() for t in found)
        del model, ours


def make_model(devices: Any, gpu0_bsz: int = 1, **options: Any) -> Any:
    return BalancedDataParallel(
        gpu0_bsz, linear(CLASSES).to(devices[0]), devices[:4], gather=False, **options
    )


# Outputs that stay where they are.


@pytest.mark.parametrize(
    ("gpu0_bsz", "where", "sizes"), [(1, None, (1, 11, 10, 10)), (0, "cpu", (0, 1, 1, 0))]
)
def test_outputs_stay_on_their_devices(devices, gpu0_bsz, where, sizes, x):
    x, targets = x[: sum(sizes)].to(devices[0]), classes()[: sum(sizes)].to(devices[0])
    model = make_model(devices, gpu0_bsz, output_device=where)
    outputs, expected = model(x), model.module(x)
    active = [(device, size) for device, size in zip(devices, sizes, strict=False) if size]
    assert [*zip(outputs.devices, outputs.chunk_sizes, strict=True)] == active
    assert [(output.device, len(output)) for output in outputs] == active
    assert len(outputs) == len(active)
    assert outputs[-1] is outputs[1:][-1]
    assert f"({active[0][0]}, {active[1][0]}" in repr(outputs)
    criterion = nn.CrossEntropyLoss()
    pairs = [outputs.gather(), expected], [BalancedCriterion(criterion)(outputs, targets)]
    pairs[1].append(criterion(expected, targets))
    for pair in pairs:
        torch.testing.assert_close(*pair, **TOLERANCE)
        assert pair[0].device == torch.device(where or devices[0])
    pairs[1][0].backward()
    del outputs, pairs, pair, expected


@pytest.mark.parametrize("device_ids", [["cpu"], None])
def test_the_same_lines_serve_a_single_device(device_ids, x, no_accelerator):
    model = BalancedDataParallel(1, linear(CLASSES), device_ids, gather=False)
    outputs, expected, targets = model(x), model.module(x), classes(ignored=-100)
    assert (outputs.chunk_sizes, outputs.devices) == ((BATCH,), (torch.device("cpu"),))
    criterion = nn.CrossEntropyLoss()
    for each in (outputs, expected):
        loss = BalancedCriterion(criterion)(each, targets)
        torch.testing.assert_close(loss, criterion(expected, targets))


def test_nothing_to_cut_is_one_call(devices):
    module = Lambda(lambda self, scale: self.inner.weight * scale, inner=nn.Linear(3, 2))
    model = BalancedDataParallel(1, module.to(devices[0]), devices, gather=False)
    outputs = model(2.0)
    assert (len(outputs), outputs.chunk_sizes) == (1, None)
    loss = BalancedCriterion(nn.MSELoss())(outputs, torch.zeros(2, 3))
    torch.testing.assert_close(loss, (4 * module.inner.weight.square()).mean())
    del outputs, loss


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(-1) == targets).double().mean()


def test_metrics_are_gathered_and_logits_are_not(devices, x):
    model, targets = make_model(devices), classes()
    logits, outputs = model.module(x.to(devices[0])).detach().cpu(), model(x)
    maps: list[tuple[Any, ...]] = [
        (lambda logits: logits.argmax(-1), "auto"),
        (lambda logits: {"min": logits.amin(1), "max": logits.amax(1)}, "auto"),
        (accuracy, "mean", targets),
        (lambda logits, targets: (logits.argmax(-1) == targets).sum(), "sum", targets),
    ]
    for function, how, *args in maps:
        found = outputs.map(function, *args, scalar_outputs=how)
        torch.testing.assert_close(found, function(logits, *args), **TOLERANCE)
    with pytest.raises(ScatterError, match=r"input targets of shape \(3,\) has size 3"):
        outputs.map(accuracy, targets[:3])
    with pytest.raises(ScatterError, match=r"target of shape .* but the batch has 32 samples"):
        BalancedCriterion(nn.CrossEntropyLoss())(outputs, targets[:30])
    with pytest.raises(ZeroDivisionError) as raised:
        outputs.map(lambda logits: 1 // (len(logits) - 1))
    assert f"in replica 0 on {devices[0]}, with 1 of the batch's 32" in notes_of(raised.value)[0]
    del outputs, found, raised


# What else a criterion meets.


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"criterion": 3}, ArgumentTypeError, "must be a module or a function, got 3"),
        ({"criterion": nn.MSELoss(), "broadcast": "traget"}, ArgumentError, "MSELoss.forward"),
        ({"criterion": nn.MSELoss(), "loss_weight": 3}, ArgumentTypeError, "must be a function"),
        ({"criterion": partial(masked_mean, mask=WEIGHTS), "split": "x"}, ArgumentError, "'x'"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        BalancedCriterion(**arguments)


def test_modules_and_their_methods_are_the_same():
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    assert BalancedCriterion(criterion.forward).criterion is criterion


REMEDY = "it holds one output for each device; compute the loss with BalancedCriterion"


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda outputs: outputs.logits, AttributeError, "has no attribute 'logits'"),
        (lambda outputs: outputs["logits"], TypeError, "has no item 'logits'"),
        (
            *(lambda outputs: functional.cross_entropy(outputs, classes()), TypeError),
            "cross_entropy takes tensors, .* PerDevice",
        ),
    ],
)
def test_what_outputs_of_several_devices_are_not(use, error, message, x):
    with pytest.raises(error, match=f"{message}: {REMEDY}"):
        use(make_model(["cpu"] * 2)(x))


def test_ctc_takes_rows_and_lengths_as_numbers(devices, x):
    _, module, (targets, *lengths) = CASES["ctc mean"]
    expected = functional.ctc_loss(module(x), targets, *lengths, reduction="sum")
    model = BalancedDataParallel(1, copy.deepcopy(module).to(devices[0]), devices, gather=False)
    row = torch.cat([t[:n] for t, n in zip(targets, lengths[1], strict=True)])
    names = ("input_lengths", "target_lengths")
    named = {n: tuple(v.tolist()) for n, v in zip(names, lengths, strict=True)}
    loss = BalancedCriterion(functional.ctc_loss)(model(x), row, **named, reduction="sum")
    torch.testing.assert_close(loss, expected, **TOLERANCE)
    del loss


@pytest.mark.parametrize("gpu0_bsz", [1, None])
def test_losses_of_the_module_on_each_device(gpu0_bsz, devices, x):
    """Gathered, or part of a loss that goes on with them."""

    def forward(self: Any, x: Tensor) -> dict[str, Any]:
        output = self.inner(x)
        others = [output.square().sum() / len(x), output.logsumexp(1).mean() * 2]
        return {"output": output, "others": others}

    def loss(outputs: dict[str, Any], targets: Tensor) -> Tensor:
        first, second = outputs["others"]
        return functional.cross_entropy(outputs["output"], targets) * first + second.sqrt()

    module = Lambda(forward, inner=linear(CLASSES)).to(devices[0])
    x, targets = x.to(devices[0]), classes().to(devices[0])
    expected = module(x)
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4], gather=False)
    outputs = model(x)
    for each in (*outputs, outputs.gather()):
        torch.testing.assert_close(each["others"], expected["others"], **TOLERANCE)
    for _ in range(2):
        compared = [BalancedCriterion(loss)(model(x), targets), loss(module(x), targets)]
        gradients = [torch.autograd.grad(value, [*module.parameters()]) for value in compared]
        torch.testing.assert_close(compared, compared[::-1], **TOLERANCE)
        torch.testing.assert_close(*gradients, **TOLERANCE)
    del outputs, each, compared, gradients, expected


@pytest.mark.parametrize("size", [1, 2])
def test_options_name_parameters_of_a_partial(size):
    def loss(output: Tensor, scale: float, mask: Tensor) -> Tensor:
        return (output * mask).mean() * scale

    x = torch.arange(12.0).view(6, 2).requires_grad_()
    outputs = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 2, gather=False)(x)
    criterion = BalancedCriterion(partial(loss, scale=2.0), broadcast="mask")
    assert criterion(outputs, mask=torch.ones(size)).item() == 2 * x.mean().item()
