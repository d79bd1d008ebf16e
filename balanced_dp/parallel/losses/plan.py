"""Decide with which weights the losses of the replicas are joined.

``graph`` reads how the loss of chunk i depends on its means and sums. If it is linear in them,

    loss_i = constant + sum_k e_ik S_ik,

with the sum S_ik of chunk i, of which a mean over k_i entries is one k_i-th. The sums of the batch
are those of all chunks, added up. So weights w_i that make e_ik w_i the same for all chunks give
the loss of the batch:

    loss = sum_i w_i loss_i / sum_i w_i        (or sum_i loss_i, if w_i = 1)

They are looked for among 1, the chunk sizes, the entries of a mean, the targets that a cross
entropy counts, and what arguments count, such as ``mask.sum()``. If the coefficients e_ik of a sum
are the same for all chunks, as in an even split, all weights that are the same fit, too: there,
1 / e_ik must be the weight itself, or a number among the arguments if the sum is to add up.

A counted cross entropy has a known value, so it may have its own weights v_i. Its part of the loss
is then exchanged: sum_i (v_i - w_i) e_ik S_ik is added, with both weights divided by their sums.

The first call of a loss waits for these numbers. Each later one compares them on the device, and
reads the result of an earlier call, which has arrived by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...devices import has_streams
from .. import nested
from ..nested import Arguments, named_arguments
from .cross_entropy import Counted
from .graph import UNLIKE, Part, UnclearError, depends_on
from .sums import column, total, weighted_mean

Tensors = Sequence[Tensor]
"""One for each replica."""

Weighting = tuple[Any, ...]
"""Names the weights of replicas: ``SUM``, 1 each; ``SAMPLES``, their chunk sizes;
``("counted", i)``, the counts of cross entropy i of each; ``("argument", path, how)``, what an
argument counts; ``("entries", k)``, the entries of the mean that part k is, which need a graph."""

SUM: Weighting = ("sum",)
SAMPLES: Weighting = ("samples",)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a loss is joined, as the last call with gradients has shown.

    Attributes:
        structure: its operators; what follows holds for one structure.
        base: the weights of the loss.
        exchanged: of cross entropies with weights of their own, the part, the position, these
            weights, and the derivative of the loss.
        has_entries_of_samples: whether means are over as many entries of each sample.
        spread: by how much coefficients differed in the call, relatively: a number on its way to
            the CPU, and the event of its arrival, or None if there is nothing to wait for.
        arguments: the names of the arguments.
        doubt: why the weights need not be right; or "".
        reason: why it is not known how the loss is joined; or "".
    """

    structure: Any = None
    base: Weighting = SAMPLES
    exchanged: Sequence[tuple[int, int, Weighting, Tensor]] = ()
    has_entries_of_samples: bool = True
    spread: tuple[Any, Any] = (0.0, None)
    arguments: Any = None
    doubt: str = ""
    reason: str = ""

    def has_arrived(self) -> bool:
        """Return whether the spread can be read without waiting for the device."""
        return self.spread[1] is None or bool(self.spread[1].query())

    def without_gradients(self, arguments: Any) -> Rule:
        """Return how the loss is joined in a call without gradients.

        Raises:
            UnclearError: it is not known.
        """
        if self.reason:
            raise UnclearError(self.reason)
        if self.base == SUM and self.arguments != arguments:
            raise UnclearError("without gradients, and with other arguments, it may be a mean")
        if self.base[0] == "entries" and self.has_entries_of_samples:
            return replace(self, base=SAMPLES)
        return self


@dataclass(frozen=True, slots=True)
class Counts:
    """What is counted in a call.

    Attributes:
        sizes: the chunk size of each replica.
        function: the function that each replica computes.
        arguments: those of each replica.
        counted: the cross entropies of each replica.
    """

    sizes: Sequence[int]
    function: Callable[..., Any]
    arguments: Sequence[Arguments]
    counted: Sequence[Sequence[Counted]]

    def weights(self, by: Weighting) -> Sequence[Any]:
        """Return the weight of each replica.

        Raises:
            UnclearError: it is not known without a graph, or is not counted in this call.
        """
        if by in (SUM, SAMPLES):
            return self.sizes
        if by[0] == "counted":
            return [one.count for one in self.at(by[1])]
        found = [self._in_arguments(own, by).get(by) for own in self.arguments]
        if None in found:
            raise UnclearError("without gradients it is not known over how many entries it is")
        return found

    def at(self, position: int) -> list[Counted]:
        """Return the cross entropy of each replica at a position."""
        if any(len(own) <= position for own in self.counted):
            raise UnclearError(UNLIKE)
        return [own[position] for own in self.counted]

    def rule_of(self, outputs: Tensors) -> Rule:
        """Return how an output without a graph is joined that is a multiple of a cross entropy.

        For example a sum divided by the number of items in the batch. This waits for the device.

        Raises:
            UnclearError: it is none.
        """
        tolerance = 8 * torch.finfo(outputs[0].dtype).eps
        for i, own in enumerate(zip(*self.counted, strict=False)):
            pairs = zip(outputs, own, strict=True)
            factor, *others = [float(output) / (float(one.value) or 1.0) for output, one in pairs]
            is_multiple = all(math.isclose(factor, other, rel_tol=tolerance) for other in others)
            if is_multiple and own[0].kind == "mean":
                return Rule(base=("counted", i))
            # Divided by more than what counts on all devices, or by as much.
            if is_multiple and factor * sum(float(one.count) for one in own) < 1 + tolerance:
                return Rule(base=SUM, arguments=self.argument_names)
        raise UnclearError("no call with gradients has shown yet how it is computed")

    def of_arguments(self) -> list[Weighting]:
        """Return the weightings by what arguments count."""
        return list(self._in_arguments(self.arguments[0])) if self.arguments else []

    def _in_arguments(
        self, arguments: Arguments, only: Weighting | None = None
    ) -> dict[Weighting, Any]:
        """Return what is counted in the arguments of a replica, or only one of these.

        That is the sum of a tensor, or the number of its entries other than 0 or -100 if they are
        integers.
        """
        return {
            by: leaf.sum() if how == "sum" else (leaf != int(how)).sum()
            for name, value in named_arguments(self.function, *arguments)
            for path, leaf in nested.leaves(value, name)
            if isinstance(leaf, Tensor) and leaf.dim() and leaf.numel() and not leaf.requires_grad
            for how in ("sum", "0", "-100")[: 1 if leaf.is_floating_point() else 3]
            for by in [("argument", path, how)]
            if only in (None, by)
        }

    def numbers(self) -> list[float]:
        """Return the numbers above 1 among the arguments, such as that of items in the batch."""
        args, kwargs = self.arguments[0] if self.arguments else ((), {})
        leaves = [leaf for _, leaf in nested.leaves([*args, *kwargs.values()])]
        found = [
            leaf.item() if isinstance(leaf, Tensor) and leaf.numel() == 1 else leaf
            for leaf in leaves
        ]
        numbers = [float(number) for number in found if isinstance(number, Real)]
        return [number for number in numbers if number > 1]

    @property
    def argument_names(self) -> Any:
        """The number of positional arguments, and the names of others that are not None."""
        args, kwargs = self.arguments[0] if self.arguments else ((), {})
        return len(args), frozenset(name for name, value in kwargs.items() if value is not None)


COUNTED = Rule(reason="it was a cross entropy before")


class Loss:
    """A loss of all replicas in one call with gradients.

    Attributes:
        structure: what must be the same in two calls for a rule to hold for both.
        tolerance: by how much equal coefficients may differ.
    """

    def __init__(
        self, parts: Sequence[Part], outputs: Tensors, counts: Counts, device: torch.device
    ) -> None:
        self.parts, self.outputs, self.counts, self.device = parts, outputs, counts, device
        self.tolerance = max(8 * torch.finfo(outputs[0].dtype).eps, 1e-6)  # as of count + 1e-8
        found = [{one.position for one in part.counted} for part in parts]
        if any(len(positions) > 1 for positions in found):
            raise UnclearError(UNLIKE)
        self.known = {k: positions.pop() for k, positions in enumerate(found) if positions}
        self.free = [k for k, part in enumerate(parts) if part.kind and k not in self.known]
        self.is_even = len(set(counts.sizes)) == 1
        operators = [(part.name, part.kind, len(part.inputs)) for part in parts]
        self.structure = operators, self.known, self.is_even, len(outputs)

    def rule(self) -> Rule:
        """Return how the loss is joined. This waits for the device.

        Raises:
            UnclearError: it is not known.
        """
        reductions = [*self.free, *self.known]
        if not reductions:
            if self.outputs[0].grad_fn is None or not self.fits((), SUM):
                raise UnclearError(
                    "it has no graph that leads to a mean or a sum over samples (of an accuracy, "
                    "return a row for each sample)"
                )
            return Rule(self.structure)
        for part in self.parts:
            if part.kind and depends_on(part.gradient(0), self.parts):
                raise UnclearError(f"it is not linear in a {part.kind} over samples")
        if not all(any(float(c.abs().max()) for c in self.coefficients(k)) for k in reductions):
            raise UnclearError("a mean or a sum does not count, as by a branch")
        doubts = [doubt_of(self.parts[k].counted, self.counts.sizes) for k in self.known]
        base = self.weighting(self.free or [*self.known][:1])
        others = [gradient for part in self.parts for gradient in part.others]
        if base == SUM and not all(depends_on(gradient, self.parts) for gradient in others):
            raise UnclearError("what does not depend on samples is added to a sum")
        own = [(k, i, self.weighting([k])) for k, i in self.known.items()]
        exchanged = [(*one, self.parts[one[0]].gradient(0)[0]) for one in own if one[2] != base]
        if base == SUM and any(part.adds_number for part in self.parts):
            doubts.append("a number that is added to a sum, if not 0, is added once on each device")
        return Rule(self.structure, base, exchanged, doubt=max(doubts, default=""))

    def weighting(self, parts: Sequence[int]) -> Weighting:
        """Return the weights that are right for some reductions.

        Raises:
            UnclearError: none are known to be.
        """
        first, sums = parts[0], [k for k in parts if self.parts[k].kind == "sum"]
        own = ("counted", self.known[first]) if first in self.known else ("entries", first)
        of_arguments = self.counts.of_arguments() if sums else []
        tried = [*([] if sums else [own]), *of_arguments, SAMPLES, own]
        if len(sums) == len(parts):
            tried.insert(0, SUM)
        fitting = [by for by in tried if self.fits(parts, by)]
        if sums and (self.is_even or len(fitting) > 1) and self.fits(sums, SUM):
            fitting = [by for by in fitting if all(self.is_exactly(k, by) for k in sums)]
        if not fitting:
            raise UnclearError("its means and sums have other coefficients on each replica")
        return fitting[0]

    def is_exactly(self, k: int, by: Weighting) -> bool:
        """Return whether a sum is divided by a weight itself, or by nothing that is counted."""
        part, divisor = self.parts[k], float(1 / self.coefficients(k)[0].abs().max())
        if by != SUM:
            return all(math.isclose(divisor, weight, rel_tol=1e-5) for weight in self.weights(by))
        numbers = [1.0]
        if any(other.name == "Div" for other in self.parts):
            of_batch = [sum(map(float, part.counts))] if part.counted else []
            numbers = [*self.counts.numbers(), *of_batch]
        return any(math.isclose(divisor, number, rel_tol=1e-5) for number in numbers)

    def fits(self, parts: Sequence[int], by: Weighting) -> bool:
        """Return whether these weights are right. This waits for the device."""
        return float(self.spread(parts, by)) <= self.tolerance

    def spread(self, parts: Sequence[int], by: Weighting) -> Tensor:
        """Return by how much the coefficients, times the weights, differ between the replicas."""
        weights = column([1] * len(self.outputs) if by == SUM else self.weights(by), self.device)
        found = []
        # Without reductions it is the loss itself that must be the same.
        values = [[output.detach().reshape(1) for output in self.outputs]]
        for own in map(self.coefficients, parts) if parts else values:
            rows = torch.stack([one.to(self.device) for one in own])
            if rows.is_complex():
                rows = torch.view_as_real(rows).flatten(1)
            # Nothing counts where a weight is 0: it was divided by 0, next to it, or by 1 instead.
            is_out = (weights == 0)[:, None] & ~(rows.abs() < 1e5)
            is_out |= ~rows.isfinite().any(0)  # or on no device at all
            rows = rows * weights.where(weights != 0, 1)[:, None]
            high = rows.masked_fill(is_out, -math.inf).amax(0)
            low = rows.masked_fill(is_out, math.inf).amin(0)
            scale = torch.maximum(high.abs(), low.abs()).amax().clamp(min=1e-30)
            found.append((high - low).masked_fill(is_out.all(0), 0).amax() / scale)
        return torch.stack(found).amax()

    def coefficients(self, k: int) -> list[Tensor]:
        """Return the derivative of each replica's loss with respect to the sum in a part."""
        part = self.parts[k]
        divisors = part.counts if part.kind == "mean" else [1] * len(part.nodes)
        if len(self.parts) == 1:  # the loss itself: nothing has to come from another device
            ones = torch.ones(1, dtype=torch.double, device=self.device)
            return [ones / divisor for divisor in divisors]
        return [part.gradient(i).detach() / divisor for i, divisor in enumerate(divisors)]

    def weights(self, by: Weighting) -> Sequence[Any]:
        """Return the weight of each replica."""
        return self.parts[by[1]].counts if by[0] == "entries" else self.counts.weights(by)

    def values(self, k: int) -> list[Tensor]:
        """Return what a cross entropy adds to the loss of each replica."""
        part = self.parts[k]
        return [own[0] * one.value for own, one in zip(part.gradients, part.counted, strict=True)]

    def with_numbers(self, rule: Rule) -> Rule:
        """Return a rule with the numbers of this call, for later ones."""
        own = {k: by for k, _, by, _ in rule.exchanged}
        groups = [([k], own.get(k, rule.base)) for k in self.known]
        if self.free or not self.known:
            groups.append((self.free, rule.base if self.free else SUM))
        spread, is_proportional = rule.spread, True
        if rule.base[0] == "entries":
            shares = zip(self.weights(rule.base), self.counts.sizes, strict=True)
            is_proportional = len({count / size for count, size in shares}) == 1
        if rule.has_arrived():  # or it is still on its way
            spread = torch.stack([self.spread(*group) for group in groups]).amax(), None
            if has_streams(self.device):
                stream = torch.get_device_module(self.device).current_stream(self.device)
                spread = spread[0].to("cpu", non_blocking=True), stream.record_event()
        factors = [
            (k, i, by, self.parts[k].gradient(0)[0].detach()) for k, i, by, _ in rule.exchanged
        ]
        return replace(
            rule,
            exchanged=factors,
            has_entries_of_samples=is_proportional,
            spread=spread,
            arguments=self.counts.argument_names,
        )


def doubt_of(counted: Sequence[Counted], sizes: Sequence[int]) -> str:
    """Return why a cross entropy need not be over samples one by one, or "".

    Raises:
        UnclearError: the replicas have other weights of classes, as if computed from the chunk.
    """
    weights = [one.weight.cpu() for one in counted if one.weight is not None]
    if any(not torch.equal(weight, weights[0]) for weight in weights):
        raise UnclearError("the weights of its classes differ between the replicas")
    compares = [one.compares_samples for one in counted]
    if len(set(sizes)) == 1 and all(one is not None and bool(one) for one in compares):
        return "its targets are the rows of the chunk, as if samples were compared"
    return ""


def joined(
    outputs: Tensors,
    rule: Rule,
    values: Sequence[Tensors],
    weights: Callable[[Weighting], Sequence[Any]],
    device: torch.device,
) -> Tensor:
    """Return the loss of the batch, with the values of cross entropies exchanged."""

    def by(weighting: Weighting, tensors: Tensors) -> Tensor:
        if weighting == SUM:
            return total(tensors, device)
        ignores = weighting[0] != "argument"  # a sum that nothing divides is still added
        return weighted_mean(tensors, weights(weighting), device, ignores_empty=ignores)

    loss = by(rule.base, outputs)
    for (*_, own, _), tensors in zip(rule.exchanged, values, strict=True):
        loss = loss + by(own, tensors) - by(rule.base, tensors)
    return loss
