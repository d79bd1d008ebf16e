"""Test ``BalancedCriterion``, which computes the loss on each device.

The value and the gradients must be those of the whole batch.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
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


def linear(*shape):
    """Return a float64 module whose output has ``shape`` for each sample."""
    size = int(torch.tensor(shape).prod())
    return nn.Sequential(nn.Linear(WIDTH, size), nn.Unflatten(1, shape)).double()


def classes(*shape, ignored=None):
    """Return random classes as targets, of which some are replaced by ``ignored``.

    If the batch is split into chunks of 1, 13, 13 and 5 samples, all targets of the first chunk are
    replaced.
    """
    targets = torch.randint(0, CLASSES, (BATCH, *shape))
    if ignored is not None:
        targets[0] = ignored
        targets[5:12] = ignored
        targets[20:].view(12, -1)[:, :1] = ignored
    return targets


def numbers(*shape):
    return torch.rand(BATCH, *shape, dtype=torch.double)


def masked_mean(output, target, mask):
    return ((output - target).square() * mask[:, None]).sum() / mask.sum()


def several(output, target, *, extra):
    return {
        "first": functional.mse_loss(output["a"], target["a"]),
        "second": [functional.l1_loss(output["b"][0], extra), output["a"].square()],
    }


def with_losses(self, x):
    output = self.inner(x)
    losses = [output.square().sum() / len(x), output.logsumexp(1).mean() * 2]
    return {"output": output, "losses": losses}


def goes_on(outputs, target):
    """A criterion that adds losses which the module has computed."""
    first, second = outputs["losses"]
    return functional.cross_entropy(outputs["output"], target) + 2 * first - second


class Shifted(nn.CrossEntropyLoss):
    """The loss of a causal language model, whose targets are shifted by one token.

    So torch's class gets other tensors than this subclass.
    """

    def forward(self, input, target):
        return super().forward(input[:, :-1].flatten(0, 1), target["labels"][:, 1:].flatten())


class TimeFirst(nn.CTCLoss):
    """The CTC loss of log-probabilities of shape (N, T, C), where torch's class needs (T, N, C)."""

    def forward(self, log_probs, *given):
        return super().forward(log_probs.transpose(0, 1), *given)


def make_cases():
    """Return criteria, each with a module, targets, named targets and options.

    test_losses.py has more losses.
    """
    torch.manual_seed(0)
    ce, bce, logits = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, linear(CLASSES)
    ignored, mask = classes(ignored=-100), (torch.arange(BATCH) % 3 == 1).double()
    lengths = torch.full((BATCH,), 9), torch.arange(BATCH) % 4 + 1
    weight, options = {"weight": WEIGHTS}, {"weight": WEIGHTS, "label_smoothing": 0.2}
    of_time = Lambda(lambda m, x: m.a(x).log_softmax(-1), a=linear(9, CLASSES))
    words, image = torch.randint(1, CLASSES, (BATCH, 4)), linear(CLASSES, 3, 2)
    reducing = {
        "ce weight": (partial(ce, **weight), logits, classes(ignored=3)),  # by a weight of 0
        "ce options": (partial(ce, ignore_index=3, **options), image, classes(3, 2, ignored=3)),
        "ce probabilities": (partial(ce, **options), image, numbers(CLASSES, 3, 2).softmax(1)),
        "bce weights": (partial(bce, pos_weight=WEIGHTS, **weight), logits, numbers(CLASSES)),
        "ctc": (TimeFirst, of_time, words, *lengths),
    }
    found = {
        f"{name} {reduction}": (make(reduction=reduction), module, targets)
        for name, (make, module, *targets) in reducing.items()
        for reduction in ("mean", "sum", "none")
    }
    function = partial(functional.cross_entropy, ignore_index=3, label_smoothing=0.1, **weight)
    head = Lambda(lambda self, x, y: functional.mse_loss(self.head(x), y), head=linear(4))
    both = Lambda(lambda m, x: {"a": m.a(x), "b": (m.b(x),)}, a=linear(4), b=linear(2))
    weighs = {"loss_weight": lambda output, target, mask: mask.sum()}
    scaled = partial(lambda y, scale, mask: (y * mask).mean() * scale, scale=2.0)
    if hasattr(nn, "LinearCrossEntropyLoss"):
        criterion = nn.LinearCrossEntropyLoss(WIDTH, CLASSES, dtype=torch.double, **weight)
        found["linear_cross_entropy"] = (criterion, linear(WIDTH), [ignored])
    return found | {
        "partial": (function, logits, [classes(ignored=3)]),
        "module in a partial": (partial(ce(**weight)), logits, [ignored]),
        "loss_weight": (masked_mean, linear(4), [numbers(4), mask], {}, weighs),
        "several": (several, both, [{"a": numbers(4)}], {"extra": numbers(2)}),
        "keyword": (ce(), logits, [], {"target": ignored}),
        "subclass": (Shifted(), linear(7, CLASSES), [{"labels": classes(7, ignored=-100)}]),
        "losses": (goes_on, Lambda(with_losses, inner=linear(CLASSES)), [classes()]),
        "with parameters": (head, linear(WIDTH), [numbers(4)]),
        "whole": (scaled, linear(2), [], {"mask": torch.ones(2)}, {"broadcast": "mask"}),
        "whole, of one": (scaled, linear(2), [], {"mask": torch.ones(1)}, {"broadcast": "mask"}),
    }


CASES = make_cases()

SPLITS = {
    (0, 11, 11, 10): {"gpu0_bsz": 0},
    (1, 13, 13, 5): {"gpu0_bsz": None, "device_weights": [1, 13, 13, 5]},
    (8, 8, 8, 8): {"gpu0_bsz": 8},
    (BATCH,): {"gpu0_bsz": 1, "device_ids": ["cpu"]},
}


@pytest.fixture
def x():
    return torch.randn(BATCH, WIDTH, dtype=torch.double)


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("kind", "split"), kinds_of_splits(list(SPLITS)), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_whole_batch(name, split, kind, x):
    criterion, module, targets, kwargs, options = (*CASES[name], {}, {})[:5]

    def results(model, criterion):
        """Return the loss and the gradients of the inputs and of all parameters, on the CPU."""
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
        assert (model.chunk_sizes or (BATCH,)) == split
        assert not any(t.isnan().any() for t in found)
        del model, ours


def make_model(devices, gpu0_bsz=1, **options):
    module = linear(CLASSES).to(devices[0])
    return BalancedDataParallel(gpu0_bsz, module, devices[:4], gather=False, **options)


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
    assert outputs[-1] is outputs[1:][-1]
    assert f"({active[0][0]}, {active[1][0]}" in repr(outputs)
    criterion = nn.CrossEntropyLoss()
    loss = BalancedCriterion(criterion)(outputs, targets)
    assert {outputs.gather().device, loss.device} == {torch.device(where or devices[0])}
    torch.testing.assert_close(outputs.gather(), expected, **TOLERANCE)
    torch.testing.assert_close(loss, criterion(expected, targets), **TOLERANCE)
    torch.testing.assert_close(BalancedCriterion(criterion)(expected, targets), loss, **TOLERANCE)
    loss.backward()
    del outputs, loss, expected


def test_nothing_to_cut_is_one_call(devices):
    module = Lambda(lambda self, scale: self.inner.weight * scale, inner=nn.Linear(3, 2))
    model = BalancedDataParallel(1, module.to(devices[0]), devices, gather=False)
    outputs = model(2.0)
    assert (len(outputs), outputs.chunk_sizes) == (1, None)
    loss = BalancedCriterion(nn.MSELoss())(outputs, torch.zeros(2, 3))
    torch.testing.assert_close(loss, (4 * module.inner.weight.square()).mean())
    del outputs, loss


def accuracy(logits, targets):
    return (logits.argmax(-1) == targets).double().mean()


def test_metrics_are_gathered_and_logits_are_not(devices, x):
    model, targets = make_model(devices), classes()
    logits, outputs = model.module(x.to(devices[0])).detach().cpu(), model(x)
    maps = [
        (lambda logits: logits.argmax(-1), "auto"),
        (lambda logits: {"min": logits.amin(1), "max": logits.amax(1)}, "auto"),
        (accuracy, "mean", targets),
        (lambda logits, targets: (logits.argmax(-1) == targets).sum(), "sum", targets),
    ]
    for function, how, *args in maps:
        found = outputs.map(function, *args, scalar_outputs=how)
        torch.testing.assert_close(found, function(logits, *args), **TOLERANCE)
    with pytest.raises(ZeroDivisionError) as raised:
        outputs.map(lambda logits: 1 // (len(logits) - 1))
    assert f"in replica 0 on {devices[0]}, with 1 of the batch's 32" in notes_of(raised.value)[0]
    del outputs, found, raised


@pytest.mark.parametrize("gpu0_bsz", [1, None])
def test_losses_of_the_module_on_each_device(gpu0_bsz, devices, x):
    """They are those of the whole batch, also before they are gathered."""
    module = Lambda(with_losses, inner=linear(CLASSES)).to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4], gather=False)
    outputs, expected = model(x), module(x.to(devices[0]))
    for each in (*outputs, outputs.gather()):
        torch.testing.assert_close(each["losses"], expected["losses"], **TOLERANCE)
    del outputs, each, expected


# What cannot be used is named.

REMEDY = ": it holds one output for each device; use each in the function given to"
ON_TENSORS = "cross_entropy takes tensors, .* PerDevice"
MSE, CE = nn.MSELoss(), nn.CrossEntropyLoss()
MSE.function = masked_mean  # an attribute of this name was taken for forward


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda _: BalancedCriterion(3), ArgumentTypeError, "a module or a function, got 3"),
        (lambda _: BalancedCriterion(nn.L1Loss), ArgumentTypeError, r"; pass L1Loss\(\)"),
        (lambda _: BalancedCriterion(MSE, broadcast="traget"), ArgumentError, "MSELoss.forward"),
        (lambda _: BalancedCriterion(MSE, loss_weight=3), ArgumentTypeError, "must be a function"),
        (lambda _: BalancedCriterion(partial(masked_mean), split="x"), ArgumentError, "'x'"),
        (lambda outputs: outputs.logits, AttributeError, f"has no attribute 'logits'{REMEDY}"),
        (lambda outputs: outputs["logits"], TypeError, f"has no item 'logits'{REMEDY}"),
        (lambda outputs: CE(outputs, classes()), TypeError, ON_TENSORS + REMEDY),
        (
            *(lambda outputs: outputs.map(accuracy, classes()[:3]), ScatterError),
            r"argument targets of shape \(3,\) has size 3",
        ),
        (
            *(lambda outputs: BalancedCriterion(CE)(outputs, classes()[:30]), ScatterError),
            "target of shape .* but the batch has 32 samples",
        ),
    ],
)
def test_uses_that_are_errors(use, error, message, x):
    with pytest.raises(error, match=message):
        use(make_model(["cpu"] * 4)(x))
