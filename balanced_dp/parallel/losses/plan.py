"""Decide with which weights the losses of the replicas are joined.

``graph`` reads how the loss of chunk i depends on its means and sums. If it is linear in them,

    loss_i = constant + sum_k e_ik S_ik,

with the sum S_ik of chunk i, of which a mean over k_i entries is one k_i-th. The sums of the batch
are those of all chunks, added up. So weights w_i that make e_ik w_i the same for all chunks give
the loss of the batch:

    loss = sum_i w_i loss_i / sum_i w_i        (or sum_i loss_i, if w_i = 1)

They are looked for among 1, the chunk sizes, the entries of a mean, the targets that a cross
entropy counts, and what arguments count, such as ``mask.sum()``. Chunks of one size tell less:
there a mean is averaged, and a sum adds up if nothing that may be a count divides it.

A counted cross entropy has a known value, so it may have its own weights v_i. Its part of the loss
is then exchanged: sum_i (v_i - w_i) e_ik S_ik is added, with both weights divided by their sums.

The first call of a loss waits for these numbers. Each later one compares them on the device, and
reads the result of an earlier call, which has arrived by then.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...devices import has_streams
from .cross_entropy import Counted
from .graph import UNLIKE, Part, UnclearError, depends_on
from .sums import column

Tensors = Sequence[Tensor]
"""One for each replica."""

Weighting = tuple[Any, ...]
"""Names the weights of replicas: ``SUM``, 1 each; ``SAMPLES``, their chunk sizes;
``("counted", i)``, the counts of cross entropy i of each; ``("argument", path, how)``, what an
argument counts; ``("entries", k)``, the entries of the mean that part k is; or ``("divisor", k)``,
by what the sum that part k is was divided. The last two need a graph."""

SUM: Weighting = ("sum",)
SAMPLES: Weighting = ("samples",)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last call with gradients has shown of a loss.

    Attributes:
        structure: its operators; what follows holds for one structure.
        base: the weights of the loss.
        later: its weights without gradients; or None, if they are not known there.
        exchanged: of cross entropies with weights of their own, the part, the position, these
            weights, and the derivative of the loss.
        spread: by how much coefficients differed in the call, relatively: a number on its way to
            the CPU, and the event of its arrival, or None if there is nothing to wait for.
        arguments: the names of the arguments.
        doubt: why the weights need not be right; or "".
        reason: why it is not known how the loss is joined; or "".
    """

    structure: Any = None
    base: Weighting = SAMPLES
    later: Weighting | None = SAMPLES
    exchanged: Sequence[tuple[int, int, Weighting, Tensor]] = ()
    spread: tuple[Tensor | float, Any] = (0.0, None)
    arguments: Any = None
    doubt: str = ""
    reason: str = ""


COUNTED = Seen(reason="it was a cross entropy before")


class CallWeights(Protocol):
    """What a ``Loss`` asks of the call."""

    @property
    def argument_names(self) -> Any:
        """The names of the arguments."""

    def weights(self, by: Weighting) -> Sequence[Any]:
        """Return the weight of each replica, where no graph is needed for it."""

    def counters(self) -> Sequence[Weighting]:
        """Return what may be counted in the arguments."""

    def numbers(self) -> Sequence[float]:
        """Return the numbers among the arguments, such as that of items in the batch."""


class Loss:
    """A loss of all replicas in one call.

    Attributes:
        parts: its operators and reductions.
        structure: what must be the same in two calls for a decision to hold for both.
        tolerance: by how much equal coefficients may differ.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        outputs: Tensors,
        sizes: Sequence[int],
        device: torch.device,
        call: CallWeights,
    ) -> None:
        self.parts, self.outputs, self.sizes, self.device = parts, outputs, sizes, device
        self.call = call
        self.are_equal = len(set(self.sizes)) == 1
        self.tolerance = max(8 * torch.finfo(outputs[0].dtype).eps, 1e-6)  # as of count + 1e-8
        counted = [[one.position for one in part.counted] for part in self.parts]
        operators = [(part.name, part.kind, len(part.inputs)) for part in self.parts]
        self.structure = operators, counted, self.are_equal, len(self.sizes)
        self.known = {k: own[0] for k, own in enumerate(counted) if own}
        self.free = [k for k, part in enumerate(self.parts) if part.kind and not part.counted]
        if any(len(set(own)) > 1 for own in counted):
            raise UnclearError(UNLIKE)

    def values(self, k: int) -> list[Tensor]:
        """Return what a cross entropy adds to the loss of each replica."""
        part = self.parts[k]
        return [own[0] * one.value for own, one in zip(part.gradients, part.counted, strict=True)]

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
        if by[0] == "entries":
            return self.parts[by[1]].counts
        if by[0] == "divisor":
            return [1 / own[0] for own in self.coefficients(by[1])]
        return self.call.weights(by)

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

    def fits(self, parts: Sequence[int], by: Weighting) -> bool:
        """Return whether these weights are right. This waits for the device."""
        return float(self.spread(parts, by)) <= self.tolerance

    def decided(self) -> Seen:
        """Decide how the loss is joined. This waits for the device."""
        if not self.free and not self.known:
            if self.outputs[0].grad_fn is None or not self.fits((), SUM):
                raise UnclearError(
                    "it has no graph that leads to a mean or a sum over samples (of an accuracy, "
                    "return a row for each sample)"
                )
            return Seen(self.structure)
        reductions = [*self.free, *self.known]
        for part in self.parts:
            if part.kind and depends_on(part.gradient(0), self.parts):
                raise UnclearError(f"it is not linear in a {part.kind} over samples")
        if not all(any(float(c.abs().max()) for c in self.coefficients(k)) for k in reductions):
            raise UnclearError("a mean or a sum does not count, as by a branch")
        for k in self.known:
            check_class_weights(self.parts[k].counted)
        later = self.weighting(self.free or [*self.known][:1])
        others = [gradient for part in self.parts for gradient in part.others]
        if later == SUM and not all(depends_on(gradient, self.parts) for gradient in others):
            raise UnclearError("what does not depend on samples is added to a sum")
        # What was the same in this call may differ in the next one, as where nothing is ignored.
        base = later
        if self.free and later != SUM and (later == SAMPLES or self.fits(self.free, SAMPLES)):
            is_mean = self.parts[self.free[0]].kind == "mean"
            base = ("entries" if is_mean else "divisor", self.free[0])
        doubt = ""
        if later[0] == "divisor":
            doubt = "a sum is divided by whole numbers, which are taken for counts that add up"
        elif base == SUM and any(part.adds_number for part in self.parts):
            doubt = "what is added to a sum, if it is not 0, is added once on each device"
        found = [(k, i, self.weighting([k])) for k, i in self.known.items()]
        own = [(*one, self.parts[one[0]].gradient(0)[0]) for one in found if one[2] != base]
        return Seen(self.structure, base, later, own, doubt=doubt)

    def weighting(self, parts: Sequence[int]) -> Weighting:
        """Return the weights that are right for some reductions.

        Raises:
            UnclearError: none are known to be.
        """
        first, call = parts[0], self.call
        sums = [k for k in parts if self.parts[k].kind == "sum"]
        are_sums = len(sums) == len(parts)
        of_arguments = call.counters() if sums else ()
        own: Weighting = ("entries", first)
        tried = [*([SUM] if are_sums else []), *of_arguments, SAMPLES, own]
        if first in self.known:
            own = ("counted", self.known[first])
            tried = [*([SUM] if are_sums else [own]), *of_arguments, own, SAMPLES]
        fitting = [by for by in tried if self.fits(parts, by)]
        if fitting:
            if sums and (fitting[0] == SUM or (self.are_equal and SAMPLES in fitting)):
                ways = {self.of_equal_sum(k, len(fitting) > 1) for k in sums}
                if len(ways) > 1 or (ways == {SUM} and not are_sums):
                    raise UnclearError("sums and means are added up")
                return ways.pop()
            return fitting[0]
        by = ("divisor", first)
        if are_sums and self.fits(parts, by) and all(map(self.is_whole, self.weights(by))):
            return by
        raise UnclearError("its means and sums have other coefficients on each replica")

    def of_equal_sum(self, k: int, fits_counts: bool) -> Weighting:
        """Return how a sum is joined that has the same coefficient on all replicas.

        Args:
            k: its part.
            fits_counts: whether something that is counted is also the same on all replicas.

        Raises:
            UnclearError: it may be divided by such a count.
        """
        part, size = self.parts[k], self.sizes[0]
        counts = [float(count) for count in part.counts]
        coefficient = float(self.coefficients(k)[0].abs().max())
        divisor = 1 / coefficient if coefficient else math.inf
        is_divided = any(other.name == "Div" for other in self.parts)
        given = [*self.call.numbers(), *([sum(counts)] if part.counted else [])]
        if any(math.isclose(divisor, number, rel_tol=1e-5) for number in given):
            return SUM
        if not self.are_equal:
            is_count = 1 <= divisor <= max(counts) and self.is_whole(divisor) and not part.counted
            if not is_divided or not (is_count or fits_counts):
                return SUM
        elif is_divided:
            if size > 1 and any(math.isclose(divisor, n, rel_tol=1e-5) for n in (size, *counts)):
                return SAMPLES
        elif (
            divisor == 1 and (part.counted or part.has_rows) and (size > 1 or len(self.parts) == 1)
        ):
            return SUM
        raise UnclearError("it may be divided by a count that is the same on all replicas")

    def is_whole(self, number: Any) -> bool:
        """Return whether a number is a count, as far as the precision tells."""
        value = float(number)
        return abs(value - round(value)) <= max(self.tolerance * value, 1e-6)

    def with_numbers(self, seen: Seen) -> Seen:
        """Return a decision with the numbers of this call, for later ones."""
        own = {k: by for k, _, by, _ in seen.exchanged}
        groups = [([k], own.get(k, seen.base)) for k in self.known]
        later = seen.later
        if self.free and seen.base[0] == "entries":
            counts = self.parts[self.free[0]].counts
            shares = {
                count * self.sizes[0] == counts[0] * n
                for count, n in zip(counts, self.sizes, strict=True)
            }
            later = later if shares == {True} else None
            groups += [(self.free, seen.base)]
        elif self.free or not self.known:
            groups += [(self.free, later or SAMPLES if self.free else SUM)]
        spreads = [self.spread(*group) for group in groups]
        factors = [
            (k, i, by, self.parts[k].gradient(0)[0].detach()) for k, i, by, _ in seen.exchanged
        ]
        spread = seen.spread
        if spreads and has_arrived(spread):  # or it is still on its way
            spread = torch.stack(spreads).amax(), None
            if has_streams(self.device):
                stream = torch.get_device_module(self.device).current_stream(self.device)
                spread = spread[0].to("cpu", non_blocking=True), stream.record_event()
        return replace(
            seen, later=later, exchanged=factors, spread=spread, arguments=self.call.argument_names
        )


def has_arrived(spread: tuple[Any, Any]) -> bool:
    """Return whether a number that is on its way to the CPU can be read without waiting."""
    return spread[1] is None or bool(spread[1].query())


def check_class_weights(counted: Sequence[Counted]) -> None:
    """Check that cross entropies of all replicas have the same weights of classes.

    Raises:
        UnclearError: they differ, as if they were computed from the chunk.
    """
    weights = [one.weight.cpu() for one in counted if one.weight is not None]
    if any(not torch.equal(weight, weights[0]) for weight in weights):
        raise UnclearError("the weights of its classes differ between the replicas")
