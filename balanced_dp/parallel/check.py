"""Compare the results of a split batch with those of the whole batch on one device."""

from __future__ import annotations

import contextlib
import copy
import math
import random
import sys
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import BalanceWarning
from . import nested


class Difference(NamedTuple):
    """An output or gradient that differs between the split batch and the whole batch."""

    what: str
    """The name of the output or gradient that differs."""
    relative: float
    """The size of the difference, relative to the result of the whole batch.

    This is ``abs(split - whole).max() / abs(whole).max()``, where a divisor of 0 is replaced by 1.
    The value is infinite if the output or gradient of the split batch is missing or has another
    shape.
    """
    cause: str
    """The likely cause of the difference, and a remedy if one is known."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of ``BalancedDataParallel.check``; ``print`` shows it as a table.

    Attributes:
        chunk_sizes: how many samples of the split batch each device got.
        num_compared: how many outputs and gradients were compared.
        differences: the outputs and gradients that differ by more than rounding errors, sorted from
            the largest relative difference to the smallest.
    """

    chunk_sizes: tuple[int, ...]
    num_compared: int
    differences: tuple[Difference, ...]

    def __str__(self) -> str:
        what = f"{self.num_compared} outputs and gradients, chunks of {self.chunk_sizes}"
        if not self.num_compared:
            return f"{what}: forward returned no floating-point tensor to compare"
        if sum(map(bool, self.chunk_sizes)) < 2:
            return f"{what}: not split; give device_ids=['cpu', 'cpu'], or a larger batch"
        if not self.differences:
            return f"{what}: all equal the whole batch's"
        lines = [f"{what}: {len(self.differences)} differ from the whole batch's, relatively by"]
        for cause in dict.fromkeys(one.cause for one in self.differences):
            lines += [f"{size:9.2e}  {n}" for n, size, why in self.differences if why == cause]
            lines.append(f"Likely cause: {cause}.".replace(". ", ".\n"))
        return "\n".join(lines)


def compare(parallel: Any, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> CheckResult:
    """Compare a module's outputs and gradients for a split batch with those for the whole batch.

    A copy of the module, in evaluation mode, runs on the split batch and on the whole batch.

    Args:
        parallel: the ``BalancedDataParallel`` that holds the module.
        inputs: the positional arguments of the module, for the whole batch.
        kwargs: the keyword arguments of the module, for the whole batch.
    """
    others = [device for device in parallel.devices if device.type != "cpu"]
    with (
        parallel.on_one_device(),
        torch.random.fork_rng(others, device_type=parallel.devices[0].type),
        contextlib.ExitStack() as stack,
        torch.enable_grad(),
        warnings.catch_warnings(record=True) as told,
    ):
        stack.callback(random.setstate, random.getstate())
        if numpy := sys.modules.get("numpy"):
            stack.callback(numpy.random.set_state, numpy.random.get_state())
        warnings.simplefilter("always", BalanceWarning)
        twin = copy.deepcopy(parallel).eval()
        twin.gpu0_bsz = parallel.gpu0_bsz  # not "auto", which might try other splits
        twin.gathers_outputs = True
        batches = (twin.scatter(*_copied(inputs, kwargs), twin.devices[:1]) for _ in range(2))
        whole, again = (_results(twin.module, twin.module(*args, **kw)) for [args], [kw] in batches)
        inputs, kwargs = _copied(inputs, kwargs)
        split = _results(twin.module, twin(*inputs, **kwargs))
    texts = [str(one.message).partition("the whole batch: ")[2] for one in told]
    reasons = [text.rpartition("; model.check")[0] for text in texts if text]
    cause = ". And: ".join(reasons) or "the results of samples depend on other samples of the chunk"
    found = []
    for name, value in whole.items():
        size = _relative(split.get(name), value)
        if size > min(0.05, 1e3 * torch.finfo(value.dtype).eps):
            why = "random, in evaluation mode too" if _relative(again.get(name), value) else cause
            found.append(Difference(name, size, why))
    found.sort(key=lambda one: -one.relative)
    return CheckResult(twin.chunk_sizes or (), len(whole), tuple(found))


def _copied(*values: Any) -> Any:
    """Return ``values`` with each tensor replaced by a copy.

    A copy is not connected to the autograd graph of the original.
    """
    tensors = (pair for pair in nested.leaves(values) if isinstance(pair[1], Tensor))
    copies = {path: t.detach().requires_grad_(t.requires_grad).clone() for path, t in tensors}
    return nested.replaced(values, copies)


def _results(module: nn.Module, outputs: Any) -> dict[str, Tensor]:
    """Return a dictionary of the floating-point outputs and the gradients of the parameters.

    The gradients are those of one number: a weighted sum of all entries of the floating-point
    outputs that require gradients. The weights rise from 1 to 2 along the entries of each output.
    """
    found = {
        f"output {path or '(the whole)'}": leaf
        for path, leaf in nested.leaves(outputs)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }
    if roots := [output for output in found.values() if output.requires_grad]:
        module.zero_grad()
        weights = [torch.linspace(1, 2, root.numel()).to(root).view_as(root) for root in roots]
        torch.autograd.backward(roots, weights)  # reentrant checkpoints refuse autograd.grad
        named = module.named_parameters()
        found |= {f"gradient of {n}": p.grad for n, p in named if p.grad is not None}
    return {name: value.detach() for name, value in found.items() if value.numel()}


def _relative(found: Tensor | None, expected: Tensor) -> float:
    """Return the largest difference between ``found`` and ``expected``, relative to ``expected``.

    This is ``abs(found - expected).max() / abs(expected).max()``, where a divisor of 0 is replaced
    by 1. The result is infinite if the tensors differ in shape, or if ``found`` is None. Entries
    that are NaN in both tensors count as equal.
    """
    if found is None or found.shape != expected.shape:
        return math.inf
    one, other = found.cpu().double(), expected.cpu().double()
    is_same = torch.isclose(one, other, 0, 0, equal_nan=True)
    difference = (one - other).abs().nan_to_num(math.inf).masked_fill(is_same, 0)
    return float(difference.max()) / (float(other.abs().nan_to_num().max()) or 1.0)
