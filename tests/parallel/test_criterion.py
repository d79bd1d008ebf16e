"""The loss computed on each device: its value and its gradients are those of the whole batch."""

from __future__ import annotations

import copy
import gc
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from balanced_dp import (
    ArgumentError,
    ArgumentTypeError,
    BalancedCriterion,
    BalancedDataParallel,
    PerDevice,
    ScatterError,
)

from ..devices import kinds_of_splits, open_devices
from ..modules import Lambda
from ..notes import notes_of

TOLERANCE = {"rtol": 1e-10, "atol": 1e-10, "equal_nan": True}
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


@dataclass
class Case:
    criterion: Any
    module: nn.Module
    targets: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def loss(self, model: Any, criterion: Any, x: Tensor) -> Any:
        return criterion(model(x), *self.targets, **self.kwargs)


def ctc(**options: Any) -> Case:
    # Log-probabilities are (T, N, C): the batch is their second dimension.
    module = Lambda(
        lambda self, x: self.inner(x).transpose(0, 1).log_softmax(-1), inner=linear(9, CLASSES)
    )
    lengths = torch.full((BATCH,), 9), torch.arange(BATCH) % 4 + 1
    return Case(nn.CTCLoss(**options), module, (torch.randint(1, CLASSES, (BATCH, 4)), *lengths))


def log_softmax(module: nn.Module) -> nn.Module:
    return nn.Sequential(module, nn.LogSoftmax(1))


def masked_mean(output: Tensor, target: Tensor, mask: Tensor) -> Tensor:
    return ((output - target).square() * mask[:, None]).sum() / mask.sum()


class Shifted(nn.CrossEntropyLoss):
    """As of a causal language model: what torch's loss sees is not what the subclass gets."""

    def forward(self, input: Tensor, target: Any) -> Tensor:
        labels = target["labels"][:, 1:]
        return super().forward(input[:, :-1].flatten(0, 1), labels.flatten())


def make_cases() -> dict[str, Case]:
    torch.manual_seed(0)
    ce, bce, logits = nn.CrossEntropyLoss, nn.BCEWithLogitsLoss, linear(CLASSES)
    weight, all_options = {"weight": WEIGHTS}, {"weight": WEIGHTS, "label_smoothing": 0.2}
    reducing = {
        "ce ignored": (ce, {}, logits, classes(ignored=-100)),
        "ce weight": (ce, weight, logits, classes(ignored=3)),  # by a weight of 0
        "ce all options": (
            *(ce, all_options | {"ignore_index": 3}),
            *(linear(CLASSES, 3, 2), classes(3, 2, ignored=3)),
        ),
        "ce probabilities": (ce, all_options, linear(CLASSES, 3), numbers(CLASSES, 3).softmax(1)),
        "nll": (nn.NLLLoss, weight, log_softmax(linear(CLASSES, 3)), classes(3, ignored=-100)),
        "bce_with_logits": (bce, {}, logits, numbers(CLASSES)),
        "bce_with_logits weights": (
            *(bce, weight | {"pos_weight": WEIGHTS}, logits),
            numbers(CLASSES).round(),
        ),
        "mse": (nn.MSELoss, {}, linear(4), numbers(4)),
        "kl_div": (nn.KLDivLoss, {}, log_softmax(logits), numbers(CLASSES).softmax(1)),
        "multi_margin": (nn.MultiMarginLoss, weight, logits, classes()),
    }
    found = {
        "kl_div batchmean": Case(
            nn.KLDivLoss(reduction="batchmean", log_target=True),
            log_softmax(linear(CLASSES, 3)),
            (numbers(CLASSES, 3).log_softmax(1),),
        ),
        "partial": Case(
            partial(functional.cross_entropy, weight=WEIGHTS, ignore_index=3, label_smoothing=0.1),
            linear(CLASSES),
            (classes(ignored=3),),
        ),
        "loss_weight": Case(
            masked_mean,
            linear(4),
            (numbers(4), (torch.arange(BATCH) % 3 == 1).double()),
            options={"loss_weight": lambda output, target, mask: mask.sum()},
        ),
        "several": Case(
            lambda output, target, *, extra: {
                "first": functional.mse_loss(output["a"], target["a"]),
                "second": [functional.l1_loss(output["b"][0], extra), output["a"].square()],
            },
            Lambda(
                lambda self, x: {"a": self.first(x), "b": (self.second(x),)},
                first=linear(4),
                second=linear(2),
            ),
            ({"a": numbers(4)},),
            {"extra": numbers(2)},
        ),
        "keyword": Case(ce(), linear(CLASSES), (), {"target": classes(ignored=-100)}),
        "subclass": Case(Shifted(), linear(7, CLASSES), ({"labels": classes(7, ignored=-100)},)),
        "with parameters": Case(
            Lambda(
                lambda self, output, target: functional.mse_loss(self.head(output), target),
                head=linear(4),
            ),
            linear(WIDTH),
            (numbers(4),),
        ),
    }
    for reduction in ("mean", "sum", "none"):
        for name, (make, options, module, target) in reducing.items():
            criterion = make(reduction=reduction, **options)
            found[f"{name} {reduction}"] = Case(criterion, module, (target,))
        found[f"ctc {reduction}"] = ctc(reduction=reduction)
        found[f"ctc zero_infinity {reduction}"] = ctc(reduction=reduction, zero_infinity=True)
    if hasattr(nn, "LinearCrossEntropyLoss"):
        criterion = nn.LinearCrossEntropyLoss(WIDTH, CLASSES, dtype=torch.double, weight=WEIGHTS)
        found["linear_cross_entropy"] = Case(criterion, linear(WIDTH), (classes(ignored=-100),))
    return found


CASES = make_cases()

SPLITS: dict[tuple[int, ...], Any] = {
    (0, 11, 11, 10): {"gpu0_bsz": 0},
    (1, 13, 13, 5): {"gpu0_bsz": None, "device_weights": [1, 13, 13, 5]},
    (8, 8, 8, 8): {"gpu0_bsz": 8},
}


def leaves(loss: Any) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(loss) if isinstance(t, Tensor)]


def results(modules: list[nn.Module], run: Any, x: Tensor) -> list[Any]:
    """The loss and the gradients of everything, on the CPU."""
    for module in modules:
        module.zero_grad()
    x = x.clone().requires_grad_()
    loss = leaves(run(x))
    sum((part * (1 + i)).sum() for i, part in enumerate(loss)).backward()
    found = [part.detach() for part in loss]
    found += [x.grad, *(p.grad for module in modules for p in module.parameters())]
    return [None if t is None else t.cpu() for t in found]


def expected_of(case: Case, x: Tensor) -> list[Any]:
    modules = [m for m in (case.module, case.criterion) if isinstance(m, nn.Module)]
    return results(modules, lambda x: case.loss(case.module, case.criterion, x), x)


@pytest.fixture
def x() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(BATCH, WIDTH, dtype=torch.double)


def balanced(case: Case, x: Tensor, devices: Any, split: tuple[int, ...]) -> list[Any]:
    module, criterion = copy.deepcopy(case.module), copy.deepcopy(case.criterion)
    model = BalancedDataParallel(
        module=module.to(devices[0]), device_ids=devices, gather=False, **SPLITS[split]
    )
    criterion = BalancedCriterion(criterion, **case.options).to(devices[0])
    found = results([model, criterion], lambda x: case.loss(model, criterion, x), x)
    assert model.chunk_sizes == split
    return found


@pytest.mark.filterwarnings("ignore:gpu0_bsz", "ignore:reduction. 'mean' divides")
@pytest.mark.parametrize(("kind", "split"), kinds_of_splits(list(SPLITS)), ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_the_whole_batch(name, split, kind, x):
    expected = expected_of(CASES[name], x)
    with open_devices(kind, 4) as devices:
        found = balanced(CASES[name], x, devices, split)
        torch.testing.assert_close(found, expected, **TOLERANCE)
        assert not any(t.isnan().any() for t in found if t is not None)


def make_model(devices: Any, gpu0_bsz: int = 1, **options: Any) -> Any:
    torch.manual_seed(0)
    module = linear(CLASSES).to(devices[0])
    return BalancedDataParallel(gpu0_bsz, module, devices[:4], gather=False, **options)


# Outputs that stay where they are.


def test_outputs_stay_on_their_devices(devices, x):
    model = make_model(devices)
    outputs = model(x)
    assert isinstance(outputs, PerDevice)
    assert outputs.chunk_sizes == model.chunk_sizes == (1, 11, 10, 10)
    assert outputs.devices == tuple(devices[:4])
    assert [output.device for output in outputs] == list(devices[:4])
    assert [len(output) for output in outputs] == [1, 11, 10, 10]
    assert len(outputs) == 4
    assert outputs[-1] is outputs[1:][-1]
    torch.testing.assert_close(outputs.gather(), model.module(x.to(devices[0])), **TOLERANCE)
    assert outputs.gather().device == devices[0]
    del outputs


@pytest.mark.parametrize("output_device", [None, "cpu"])
def test_only_replicas_that_ran_have_an_output(devices, output_device, x):
    outputs = make_model(devices, gpu0_bsz=0, output_device=output_device)(x[:2])
    assert outputs.devices == tuple(devices[1:3])
    assert outputs.chunk_sizes == (1, 1)
    assert repr(outputs) == f"PerDevice(devices=({devices[1]}, {devices[2]}), chunk_sizes=(1, 1))"
    loss = BalancedCriterion(nn.CrossEntropyLoss())(outputs, torch.tensor([1, 2]))
    assert loss.device == outputs.gather().device == torch.device(output_device or devices[0])
    loss.backward()
    del outputs, loss


@pytest.mark.parametrize("where", ["one device", "no device"])
def test_the_same_lines_serve_a_single_device(where, x, no_accelerator):
    targets = classes(ignored=-100)
    model = make_model(["cpu"])
    if where == "no device":
        model = BalancedDataParallel(1, model.module, gather=False)
    outputs = model(x)
    assert outputs.chunk_sizes == (BATCH,)
    assert outputs.devices == (torch.device("cpu"),)
    criterion = nn.CrossEntropyLoss()
    expected = criterion(model.module(x), targets)
    torch.testing.assert_close(BalancedCriterion(criterion)(outputs, targets), expected)
    torch.testing.assert_close(BalancedCriterion(criterion)(model.module(x), targets), expected)


def test_nothing_to_cut_is_one_call(devices):
    module = Lambda(lambda self, scale: self.inner.weight * scale, inner=nn.Linear(3, 2))
    model = BalancedDataParallel(1, module.to(devices[0]), devices, gather=False)
    outputs = model(2.0)
    assert (len(outputs), outputs.chunk_sizes) == (1, None)
    loss = BalancedCriterion(nn.MSELoss())(outputs, torch.zeros(2, 3))
    expected = (4 * module.inner.weight.square()).mean()
    torch.testing.assert_close(loss, expected)
    del outputs, loss, expected


def test_metrics_are_gathered_and_logits_are_not(devices, x):
    model = make_model(devices)
    logits = model.module(x.to(devices[0])).detach()
    targets = classes()
    outputs = model(x)
    predicted = outputs.map(lambda logits: logits.argmax(-1))
    assert predicted.cpu().equal(logits.argmax(-1).cpu())

    def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
        return (logits.argmax(-1) == targets).double().mean()

    expected = accuracy(logits.cpu(), targets)
    torch.testing.assert_close(
        outputs.map(accuracy, targets, scalar_outputs="mean").cpu(), expected
    )
    num_right = outputs.map(
        lambda logits, targets: (logits.argmax(-1) == targets).sum(), targets, scalar_outputs="sum"
    )
    assert num_right.item() == round(expected.item() * BATCH)
    both = outputs.map(lambda logits: {"min": logits.amin(1), "max": logits.amax(1)})
    assert both["max"].shape == (BATCH,)
    with pytest.raises(ScatterError, match=r"input targets of shape \(3,\) has size 3"):
        outputs.map(accuracy, targets[:3])
    with pytest.raises(ZeroDivisionError) as raised:
        outputs.map(lambda logits: 1 // (len(logits) - 1))
    assert f"in replica 0 on {devices[0]}, with 1 of the batch's 32" in notes_of(raised.value)[0]
    del outputs, predicted, num_right, both, logits, raised


# What else a criterion meets.


def test_targets_that_do_not_fit_are_named(devices, x):
    outputs = make_model(devices)(x)
    with pytest.raises(ScatterError, match=r"target of shape .* but the batch has 32 samples"):
        BalancedCriterion(nn.CrossEntropyLoss())(outputs, classes()[:30])
    del outputs


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"criterion": 3}, ArgumentTypeError, "must be a module or a function, got 3"),
        ({"criterion": nn.MSELoss(), "broadcast": "traget"}, ArgumentError, "MSELoss.forward"),
        ({"criterion": nn.MSELoss(), "loss_weight": 3}, ArgumentTypeError, "must be a function"),
    ],
)
def test_arguments_that_cannot_be_used_are_named_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        BalancedCriterion(**arguments)


def test_modules_and_their_methods_are_the_same(x):
    criterion = nn.CrossEntropyLoss(ignore_index=0)
    assert BalancedCriterion(criterion.forward).criterion is criterion


def test_what_an_output_of_several_devices_is_not(x):
    outputs = make_model(["cpu"] * 2)(x)
    remedy = "it holds one output for each device; compute the loss with BalancedCriterion"
    with pytest.raises(AttributeError, match=f"has no attribute 'logits': {remedy}"):
        _ = outputs.logits
    with pytest.raises(TypeError, match=f"has no item 'logits': {remedy}"):
        _ = outputs["logits"]
    with pytest.raises(TypeError, match=f"cross_entropy takes tensors, .* PerDevice: {remedy}"):
        nn.CrossEntropyLoss()(outputs, classes())


def test_ctc_takes_its_targets_in_a_row_and_its_lengths_as_numbers(devices, x):
    case = CASES["ctc mean"]
    targets, *lengths = case.targets
    expected = functional.ctc_loss(case.module(x), *case.targets, reduction="sum")
    module = copy.deepcopy(case.module).to(devices[0])
    model = BalancedDataParallel(1, module, devices, gather=False)
    row = torch.cat([t[:n] for t, n in zip(targets, lengths[1], strict=True)])
    names = ("input_lengths", "target_lengths")
    as_numbers = {n: tuple(v.tolist()) for n, v in zip(names, lengths, strict=True)}
    for arguments, named in (((row,), as_numbers), (case.targets, {})):
        criterion = BalancedCriterion(functional.ctc_loss)
        loss = criterion(model(x), *arguments, **named, reduction="sum")
        torch.testing.assert_close(loss.cpu(), expected, **TOLERANCE)
        del loss


@pytest.mark.parametrize("gpu0_bsz", [1, None])
def test_losses_of_the_module_are_those_of_the_batch_on_each_device(gpu0_bsz, devices, x):
    """Gathered, or part of a loss that goes on with them."""

    def forward(self: Any, x: Tensor) -> dict[str, Any]:
        output = self.inner(x)
        others = [output.square().sum() / len(x), output.logsumexp(1).mean() * 2]
        return {"output": output, "others": others}

    def loss(outputs: dict[str, Any], targets: Tensor) -> Tensor:
        first, second = outputs["others"]
        return functional.cross_entropy(outputs["output"], targets) * first + second.sqrt()

    module, targets = Lambda(forward, inner=linear(CLASSES)).to(devices[0]), classes()
    x, targets = x.to(devices[0]), targets.to(devices[0])
    expected = module(x)["others"]
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4], gather=False)
    outputs = model(x)
    for output, device in zip(outputs, outputs.devices, strict=True):
        for found, value in zip(output["others"], expected, strict=True):
            torch.testing.assert_close(found, value.to(device), **TOLERANCE)
    torch.testing.assert_close(outputs.gather()["others"], expected, **TOLERANCE)
    for _ in range(2):
        found = BalancedCriterion(loss)(model(x), targets)
        compared = [found, loss(module(x), targets)]
        torch.testing.assert_close(*compared, **TOLERANCE)
        parameters = list(module.parameters())
        gradients = [torch.autograd.grad(value, parameters) for value in compared]
        torch.testing.assert_close(*gradients, **TOLERANCE)
    del outputs, output, found, compared, gradients, expected, value


def test_a_step_leaves_nothing_behind(devices, x):
    gc.collect()
    gc.disable()
    try:
        model = make_model(devices)
        outputs = model(x)
        loss = BalancedCriterion(nn.CrossEntropyLoss())(outputs, classes())
        loss.backward()
        references = [weakref.ref(output) for output in outputs]
        del outputs, loss
        assert [reference() for reference in references] == [None] * 4
    finally:
        gc.enable()


def test_options_name_the_parameters_of_a_function_that_is_a_partial():
    def loss(output: Tensor, scale: float, mask: Tensor) -> Tensor:
        return (output * mask).mean() * scale

    x = torch.arange(12.0).view(6, 2).requires_grad_()
    outputs = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 2, gather=False)(x)
    of_columns = BalancedCriterion(partial(loss, scale=2.0), broadcast="mask")
    assert of_columns(outputs, mask=torch.ones(2)).item() == 2 * x.mean().item()
    assert of_columns(outputs, mask=torch.ones(1)).item() == 2 * x.mean().item()
    with pytest.raises(ArgumentError, match="broadcast names 'masks'"):
        BalancedCriterion(partial(loss, scale=2.0), broadcast="masks")
