"""Compare gradients and outputs with those of one device, in float64."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import BalanceWarning
from ..parallel.criterion import BalancedCriterion
from ..parallel.data_parallel import BalancedDataParallel
from ..split import even_share
from ..tuning.models import Block
from .check import Check, failed

TOLERANCE = 1e-10
"""The largest relative difference in float64, as in the tests."""

_VOCABULARY, _LENGTH = 31, 12

Differences = Iterator[tuple[str, float]]
"""Cases of a check, and by how much each of them differs."""


class _Model(nn.Module):
    """Apply a causal transformer, and return logits, or with targets their loss."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.layers = nn.Sequential(*(Block(width, 2, causal=True, dropout=0.0) for _ in range(2)))
        self.head = nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits at each position, or the mean loss of the targets that count."""
        logits: Tensor = self.head(self.layers(self.tokens(tokens)))
        return logits if targets is None else _loss(logits, targets)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GradientChecks:
    """A small transformer on one device and its copy on several, and what should agree.

    Args:
        devices: the device of each replica; one may repeat.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self.devices = list(devices)
        torch.manual_seed(0)
        self.alone = _Model().double().to(devices[0])
        batch_size = 3 * len(devices) + 1
        self.values = range(even_share(batch_size, len(devices)) + 1)
        self.middle = len(self.values) // 2
        self.tokens = torch.randint(_VOCABULARY, (batch_size, _LENGTH))
        self.targets = torch.randint(_VOCABULARY, (batch_size, _LENGTH))
        lengths = torch.arange(batch_size) * 5 % (_LENGTH + 1)  # of the first sample, nothing
        self.padded = self.targets.masked_fill(torch.arange(_LENGTH) >= lengths[:, None], -100)

    def run(self) -> Iterator[Check]:
        """Yield one check after the other."""
        values = f"gpu0_bsz from 0 to {self.values[-1]}"
        checks: list[tuple[str, str, Callable[[], Differences]]] = [
            ("every split", values, self.gathered),
            ("padding, loss on each device", values, self.loss_on_each_device),
            ("padding, loss in forward", values, self.loss_in_forward),
            ("gradient accumulation", "with accumulate(), without", self.accumulation),
            ("smaller last batch", f"{len(self.tokens) - 1} to 1 samples", self.last_batches),
            ("parameters on all devices", "spread=True", self.spread),
            ("evaluation after .data writes", "outputs", self.evaluation),
        ]
        for what, note, check in checks:
            try:
                yield outcome_of(what, note, check())
            except Exception as error:
                yield failed("gradients", what, error)

    def gathered(self) -> Differences:
        """Compare each split, with the loss of gathered outputs."""
        for gpu0_bsz in self.values:
            with self._split(gpu0_bsz) as model:
                yield f"gpu0_bsz={gpu0_bsz}", self._difference(model, self.targets)

    def loss_on_each_device(self) -> Differences:
        """Compare each split of a padded batch, with the loss where the logits are."""
        criterion = BalancedCriterion(_loss)
        for gpu0_bsz in self.values:
            with self._split(gpu0_bsz, gather=False) as model:
                self._start(model)
                criterion(model(self.tokens), self.padded).backward()
                yield f"gpu0_bsz={gpu0_bsz}", self._against_one_device(self.padded)

    def loss_in_forward(self) -> Differences:
        """Compare each split of a padded batch, with a module that returns its loss."""
        for gpu0_bsz in self.values:
            with self._split(gpu0_bsz) as model:
                self._start(model)
                model(self.tokens, self.padded).backward()
                yield f"gpu0_bsz={gpu0_bsz}", self._against_one_device(self.padded)

    def accumulation(self) -> Differences:
        """Compare the gradients that two calls add up, with and without ``accumulate()``."""
        half = len(self.tokens) // 2
        micro_batches = [slice(half), slice(half, None)]
        with self._split(self.middle) as model:
            self._start(model)
            for part in micro_batches:
                self._backward(model, self.padded, part)
            yield "plain", self._against_one_device(self.padded, micro_batches)
            self._start(model)
            with model.accumulate():
                for part in micro_batches:
                    self._backward(model, self.padded, part)
            yield "in accumulate()", self._against_one_device(self.padded, micro_batches)

    def last_batches(self) -> Differences:
        """Compare batches of all sizes below the full one, in descending order."""
        with self._split(self.middle) as model:
            for size in range(len(self.tokens) - 1, 0, -1):
                yield f"{size} samples", self._difference(model, self.targets, slice(size))

    def spread(self) -> Differences:
        """Compare gradients that are on the devices of their parameters."""
        with self._split(self.middle, spread=True) as model:
            yield "spread=True", self._difference(model, self.padded)

    def evaluation(self) -> Differences:
        """Compare outputs after writes that autograd and version counters do not see."""
        tokens = self.tokens.to(self.devices[0])
        with self._split(self.middle) as model, torch.no_grad():
            for module in (model, self.alone):
                module.eval()
            for number in range(3):
                yield f"write {number}", relative_difference([model(tokens)], [self.alone(tokens)])
                for module in (self.copy, self.alone):
                    for parameter in module.parameters():
                        parameter.data.mul_(1.5)

    @contextmanager
    def _split(
        self, gpu0_bsz: int, *, gather: bool = True, spread: bool = False
    ) -> Iterator[BalancedDataParallel[_Model]]:
        """Yield a new copy of the model, split over the devices."""
        self.copy = copy.deepcopy(self.alone)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BalanceWarning)  # the even split is compared, too
            model = BalancedDataParallel(
                gpu0_bsz, self.copy, self.devices, gather=gather, spread=spread
            )
            try:
                yield model
            finally:
                model.close()

    def _start(self, model: nn.Module) -> None:
        model.zero_grad()
        self.alone.zero_grad()

    def _backward(self, model: nn.Module, targets: Tensor, part: slice) -> None:
        tokens, targets = (t[part].to(self.devices[0]) for t in (self.tokens, targets))
        _loss(model(tokens), targets).backward()

    def _difference(self, model: nn.Module, targets: Tensor, part: slice = slice(None)) -> float:
        self._start(model)
        self._backward(model, targets, part)
        return self._against_one_device(targets, [part])

    def _against_one_device(
        self, targets: Tensor, parts: Sequence[slice] = (slice(None),)
    ) -> float:
        """Compute the gradients on one device, and return by how much the others differ."""
        for part in parts:
            self._backward(self.alone, targets, part)
        found, expected = (
            [parameter.grad for parameter in module.parameters()]
            for module in (self.copy, self.alone)
        )
        return relative_difference(found, expected)


def relative_difference(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> float:
    """Return the largest difference over the largest expected entry; NaN if there is one."""
    pairs = list(zip(found, expected, strict=True))
    if any((f is None) != (e is None) for f, e in pairs):
        return float("inf")
    known = [(f.cpu(), e.cpu()) for f, e in pairs if f is not None and e is not None]
    largest = torch.cat([e.flatten() for _, e in known]).abs().max()
    return float(torch.cat([(f - e).flatten() for f, e in known]).abs().max() / largest)


def outcome_of(what: str, note: str, differences: Differences) -> Check:
    """Return the check of all cases: its value is the worst one, its note names the wrong ones."""
    by_case = dict(differences)
    worst = float(torch.tensor(list(by_case.values()), dtype=torch.float64).max())  # keeps NaN
    wrong = [case for case, difference in by_case.items() if not difference <= TOLERANCE]
    if wrong:
        return Check("gradients", what, "not ok", worst, f"wrong: {', '.join(wrong)}")
    return Check("gradients", what, "ok", worst, note)
