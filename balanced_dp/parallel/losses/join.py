"""Join the 0-dim outputs of the replicas into the outputs of the batch.

A loss is a sum of terms c r_i: means and sums r_i over the samples of chunk i, times a number c
(see ``graph``). A sum over the batch is the sum of those over the chunks. A mean is their mean
weighted by their counts: entries, the targets that a cross entropy counts, or the sum of a mask. So
with weights w_i,

    loss = sum_i w_i loss_i / sum_i w_i        or, of sums, loss = sum_i loss_i,

if these are right for each term. A cross entropy has a known value, so beside other terms it may
have weights of its own: it is subtracted, joined by itself and added again. If the others are
unclear, they alone are averaged by samples, with one warning.

Without gradients an output is joined as in the last call with gradients, or averaged.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...devices import is_symbolic
from ...errors import warn
from .. import nested
from .cross_entropy import Counted, counts_of, ignore_if_empty, memory_of
from .graph import Term, UnclearError, are_equal, how_samples_mix, masks_of, terms_of
from .weights import ScalarOutputs, Tensors, Weights, joined, weight_of_chunk

_REMEDY = (
    "Return its parts to combine them outside, or rows (with squeeze(-1), not squeeze()), or give "
    "loss_weight or scalar_outputs"
)


_NO_COUNTS = frozenset({1, -1, -0.5})
"""Factors of a sum that are no counts: a sign, and -1/2 as in the divergence of normals."""


Plan = tuple[Weights, Sequence[tuple[Term, Weights]], str]
"""The weights of an output but for some cross entropies, these with their own weights, and why the
rest is averaged by samples, or "" if it is known."""


@dataclass(slots=True, eq=False)
class OutputHistory:
    """The findings of earlier calls of a model about its outputs.

    Attributes:
        plans: by function and path of an output, how it was joined in the last call with gradients:
            whether it adds up but for some means that are cross entropies, the positions and
            numbers of these, and the form of the call. None if only the graph tells.
        are_arguments: by the place of a term in an output, whether the tensor that multiplies or
            divides it was an argument, and not its count.
        seen: functions and cross entropies, which are looked at once, outputs that were joined as
            numbers, and what was warned of: paths of inputs, and outputs as a warning calls them.
    """

    plans: dict[Any, Any] = field(default_factory=dict)
    are_arguments: dict[Any, bool] = field(default_factory=dict)
    seen: set[Any] = field(default_factory=set)

    def __reduce__(self) -> tuple[type[OutputHistory], tuple[()]]:
        return OutputHistory, ()  # a copy of the model has its own


@dataclass(eq=False)
class Call:
    """One call of a function on all devices: its split, and how its 0-dim outputs are joined.

    Attributes:
        history: the findings of earlier calls of the model.
        function: the function that each replica computes.
        devices: the device of each replica.
        chunk_sizes: how many samples each replica has; empty if the batch was not split.
        dim: the batch dimension.
        scalar_outputs: how they are joined, as in ``BalancedDataParallel``. With ``"auto"``, the
            graph is followed to the means and sums of losses.
        loss_weight: the weight of each replica's losses; if None, the graph determines it.
        arguments: the arguments of each replica.
        counted: the cross entropies of each replica; empty if none are counted.
    """

    history: OutputHistory
    function: Callable[..., Any]
    devices: Sequence[torch.device]
    chunk_sizes: tuple[int, ...]
    dim: int
    scalar_outputs: ScalarOutputs = "auto"
    loss_weight: Callable[..., Any] | str | None = None
    arguments: Sequence[nested.Arguments] = ()
    counted: Sequence[list[Counted]] = ()
    _sums: dict[Any, tuple[Tensor, Tensor]] = field(init=False, default_factory=dict)
    """Masks and their sums, by the place of a mask in memory."""

    def join(self, outputs: Tensors, name: str, device: torch.device) -> Tensor:
        """Return the value of the whole batch on ``device``. Differentiable.

        The weights are those of ``loss_weight``, the counts of a cross entropy, or what the graph
        tells. Otherwise the outputs are averaged by samples, with a warning if the graph was asked.

        Args:
            outputs: a 0-dim floating tensor of each replica.
            name: the dotted path of the output.
            device: the device of the result.
        """
        sizes, key = self.chunk_sizes or (1,) * len(outputs), (self._code, name)
        self.history.seen.add(key)
        given = [w.get(name) if isinstance(w, Mapping) else w for w in self._given_weights]
        if given and all(weight is not None for weight in given):
            with contextlib.suppress(UnclearError):
                for term in terms_of(outputs, sizes, self.dim, {}, self._path_of):
                    ignore_if_empty(term.nodes, given)
            return joined(outputs, given, device)
        if not self.counted or is_symbolic(outputs[0].device):
            return joined(outputs, sizes, device)
        for own in zip(*self.counted, strict=False):  # if it is a cross entropy itself
            if all(one.is_(output) for one, output in zip(own, outputs, strict=True)):
                self._check_counted(name, [own])
                return joined(outputs, counts_of(own) if own[0].kind == "mean" else None, device)
        try:
            weights, apart, reason = self._plan(outputs, key)
        except UnclearError as error:
            weights, apart, reason = sizes, [], str(error)
        if reason:
            how = "It is averaged over samples" + ", except its cross entropies" * bool(apart)
            self.warn(name, reason, f"{how}. {_REMEDY}")
        self._check_counted(name, [term.own for term, _ in apart])
        parts = []
        for term, own_weights in apart:
            factors = [factor.multipliers() for factor in term.factors]
            numbers = zip(outputs, term.own, term.number, *factors, strict=True)
            values = [math.prod(own, start=one.value).to(o.dtype) for o, one, *own in numbers]
            outputs = [output - value for output, value in zip(outputs, values, strict=True)]
            parts.append(joined(values, own_weights, device))
        # If nothing counts, a mean may still be 0 / 1.
        return sum(parts, joined(outputs, weights, device, if_empty=1))

    def is_number(self, tensor: Tensor, name: str) -> bool:
        """Return whether an output of the first replica is a number, and not a row of one sample.

        A tensor with one entry for several samples counts as a number, then and later.
        """
        is_of_several = max(self.chunk_sizes, default=0) > 1
        has_been = (self._code, name) in self.history.seen
        return not tensor.dim() or (tensor.numel() == 1 and (is_of_several or has_been))

    def _plan(self, outputs: Tensors, key: Any) -> Plan:
        """Return how an output is joined.

        Raises:
            UnclearError: nothing is known of it.
        """
        sizes, plans = self.chunk_sizes, self.history.plans
        if torch.is_grad_enabled():
            plans[key] = None  # unless it is known below
            nodes = {one.node: one for found in self.counted for one in found}
            terms = terms_of(outputs, sizes, self.dim, nodes, self._path_of)
            weights, apart, reason = self._weights_of(terms, key)
            # Other factors, and numbers that divide sums, are most often others in the next call.
            is_kept = not any(term.factors or term.kind == "sum" for term, _ in apart)
            # Sets compare hashes, so tensors among the weights are not read.
            if is_kept and weights in {_shares(sizes), None}:
                kept = [(self.counted[0].index(term.own[0]), term.number[0]) for term, _ in apart]
                plans[key] = weights is None, kept, self._form
            return weights, apart, reason
        if key not in plans:
            return self._weights_of([self._term_by_value(outputs)], key)
        adds_up, kept, form = plans[key] or (False, [], None)
        if form != self._form:
            raise UnclearError("without gradients its counts, factors or arguments may differ")
        apart = []
        for i, number in kept:
            own = [counted[i] for counted in self.counted]
            apart.append((Term([number] * len(own), own=own), tuple(counts_of(own))))
        return (None if adds_up else sizes), apart, ""

    def _term_by_value(self, outputs: Tensors) -> Term:
        """Return the multiple of a cross entropy that an output is. This waits for the device.

        The loss of transformers is one, divided by ``num_items_in_batch``, and a Trainer may
        evaluate before it trains.
        """
        for own in zip(*self.counted, strict=False):
            pairs = [(float(o), float(one.value)) for o, one in zip(outputs, own, strict=True)]
            # Both are 0 on a replica whose targets are all ignored.
            factors = [output / (value or math.nan) for output, value in pairs if output or value]
            counts = [float(one.count) for one, pair in zip(own, pairs, strict=True) if any(pair)]
            are_counts = are_equal([*factors, *counts], 1e-6)
            if any(factors) and are_equal(factors, 1e-6) and not are_counts:
                return Term([factors[0]] * len(own), factors[:1], kind=own[0].kind, own=own)
        raise UnclearError("no call with gradients has shown how it is computed")

    def _weights_of(self, terms: Sequence[Term], key: Any) -> Plan:
        """Return how a sum of terms is joined."""
        found, reasons = list[tuple[Term, Weights]](), list[str]()
        has_penalty = any(term.kind == "weights" for term in terms)
        for i, term in enumerate(terms):
            try:
                weights = self._weights_of_term(term, (key, len(terms), i, self._form))
                found += [] if term.kind == "weights" else [(term, weights)]
            except UnclearError as error:
                reasons.append(str(error))
        apart = [own for own in found if own[0].own and own[0].kind == "mean" and own[1]]
        together = {weights for term, weights in found if (term, weights) not in apart}
        if reasons or len(together) > 1 or (has_penalty and None in together):
            apart = [own for own in found if own[0].own]
            together = {weights for term, weights in found if not term.own}
        if len(together) > 1:
            reasons.append("its means and sums have different weights")
        if None in together and has_penalty:
            reasons.append("a term independent of samples is added to a sum")
        if reasons or not together:
            return _shares(self.chunk_sizes), apart, "".join(reasons[:1])
        return together.pop(), apart, ""

    def _weights_of_term(self, term: Term, place: Any) -> Weights:
        """Return the weights of a term: its counts if it is a mean, None if it is a sum.

        A sum divided by its count is a mean, and a mean times its count is a sum. A count is that
        of samples, of entries, of a mask or of a cross entropy. Other factors are the same on all
        replicas: numbers, arguments of the call, or computed from parameters.

        Raises:
            UnclearError: a factor is something else.
        """
        if term.unclear:
            raise UnclearError(term.unclear)
        sizes, is_sum, number = self.chunk_sizes, term.kind == "sum", term.number
        entries, own = term.counts or sizes, counts_of(term.own)
        learned = [one for one in term.factors if one.tensors[0].requires_grad]
        unknown = [one for one in term.factors if not one.path and one not in learned]
        may_hide = learned or any(one.tensors[0].dim() for one in unknown)
        if is_sum and max(sizes) == 1 and may_hide:
            raise UnclearError("one sample does not show whether its number divides it")
        self._check_weights(term, place)
        for n in (sizes, entries) if is_sum and not unknown else ():
            if self._is_divided(term, n):
                return _shares(n)
        constant = None if is_sum else tuple(own) or _shares(entries)
        # In chunks of one size, a number or a learned factor may be the count, too.
        is_known = not learned and (term.factors or _NO_COUNTS.issuperset(term.numbers))
        may_count = is_sum and are_equal(sizes) and not (is_known or self._path_of(term.inverses()))
        if not unknown and are_equal(number) and not may_count:
            return constant
        factors: Sequence[Any] = unknown[0].tensors if unknown else term.inverses()
        is_one = len(unknown) == 1 and are_equal(number) and unknown[0].divides == is_sum
        if term.kind == "weights" or not (is_one or (is_sum and not unknown)):
            raise UnclearError("the replicas may multiply a term by different numbers")
        masks = masks_of(term, self.dim) if is_sum else []
        counts = [self._sum(mask) for mask in masks] or own or term.counts
        if self._is_argument(factors, counts, term, place):
            return constant
        if not is_sum:
            return None
        ignore_if_empty(term.nodes, counts)
        return _shares(term.counts) if counts is term.counts else tuple(counts)

    def _is_divided(self, term: Term, counts: Sequence[int]) -> bool:
        """Return whether a sum is divided by these counts, and maybe multiplied by a number.

        Raises:
            UnclearError: in chunks of one size, a number may be the count.
        """
        if not are_equal(term.number):
            products = [abs(x * n) for x, n in zip(term.number, counts, strict=True) if n]
            return bool(products) and are_equal(products)
        if not are_equal(counts):
            return False
        numbers, count = [abs(x) for x in term.numbers if x != -0.5], counts[0]
        found = [x for x in numbers if are_equal([x, count]) or are_equal([x * count, 1])]
        if len(found) > 1 or any(x >= 0.5 for x in found):  # 1 / 2 is most often no mean
            raise UnclearError("one of its factors may be the number of samples")
        return bool(found)

    def _is_argument(self, factors: Any, counts: Any, term: Term, place: Any) -> bool:
        """Return True for factors that equal an argument of the call, and False for counts.

        An argument is recognized by its value, as in ``n.clamp(min=1)``. This waits for the devices
        until a call has shown which of both they are.

        Raises:
            UnclearError: they are neither.
        """
        known = self.history.are_arguments
        if place in known:
            return known[place]
        pairs = [(float(x), float(n)) for x, n in zip(factors, counts, strict=True)]
        # Those that differ may be multiplied, as by a number of classes. A count may have a small
        # number added; of 0, it may have been replaced by 1.
        x, most = max(pairs, key=operator.itemgetter(1))
        by = most / (x or math.nan) if len({n for _, n in pairs if n}) > 1 and x > most else 1
        are_counts = all(
            math.isclose(by * x, n, rel_tol=1e-6, abs_tol=2e-4) or (by * x <= 1 and not n)
            for x, n in pairs
        )
        is_argument = not are_counts and bool(self._path_of([x for x, _ in pairs]))
        if not (are_counts or is_argument) or (term.kind == "mean" and len({*pairs}) == 1):
            raise UnclearError("one of its factors is neither an argument nor its count")
        # A count of all entries may be another number in the next call.
        targets = term.counts or [one.num_targets for one in term.own]
        if is_argument or any(0 < n != num for (_, n), num in zip(pairs, targets, strict=True)):
            known[place] = is_argument
        return is_argument

    def _check_weights(self, term: Term, place: Any) -> None:
        """Check once that the weights of entries are not normalized by each device.

        Masks of zeros and ones are no weights.

        Raises:
            UnclearError: their sum is 1, or in a mean their mean.
        """
        if (place, "weights") in self.history.seen or max(self.chunk_sizes) == 1:
            return
        masks = masks_of(term, self.dim)
        num = [mask.numel() if term.kind == "mean" else 1 for mask in masks]
        sums = [float(self._sum(mask)) / (n or 1) for mask, n in zip(masks, num, strict=True)]
        if are_equal([1, *sums], 1e-5) and not all(bool((mask == 1).any()) for mask in masks):
            raise UnclearError("its entries have weights that each device normalizes")
        self.history.seen.add((place, "weights"))

    def _sum(self, mask: Tensor) -> Tensor:
        """Return the sum of a mask, the same tensor for each term that it masks."""
        key = memory_of(mask), mask.shape
        # With the mask, since another one may get the address of one that is freed.
        return self._sums.setdefault(key, (mask, mask.sum()))[1]

    def _path_of(self, divisors: Sequence[Any]) -> str:
        """Return which argument divisors or factors are, as ``num_items_in_batch`` is, or ""."""
        for own in zip(*map(nested.leaves, self.arguments), strict=False):
            path: str = own[0][0]
            if all(map(_is_same, divisors, (leaf for _, leaf in own))):
                return path
        return ""

    @property
    def _form(self) -> Any:
        """Which arguments the call has, and how many cross entropies."""
        args, kwargs = self.arguments[0]
        given = [*enumerate(args), *kwargs.items()]
        names = frozenset(name for name, value in given if value is not None)
        return names, frozenset(map(len, self.counted))

    def _check_counted(self, name: str, found: Sequence[Sequence[Counted]]) -> None:
        """Warn if cross entropies are not over samples one by one. This waits in the first call."""
        key = self._code, name, len(found)
        if key in self.history.seen:
            return
        self.history.seen.add(key)
        for own in found:
            weights = [one.weight.tolist() for one in own if one.weight is not None]
            if any(weight != weights[0] for weight in weights):
                self.warn(name, "the weights of its classes differ between the devices")
            targets = [one.target for one in own]
            if all(t is not None and sorted(t.tolist()) == [*range(len(t))] for t in targets):
                self.warn(name, "its targets are the rows of a chunk, as if samples were compared")

    @functools.cached_property
    def _given_weights(self) -> list[Any]:
        """What ``loss_weight`` returns for each replica; empty without it."""
        if self.loss_weight is None:
            return []
        return [weight_of_chunk(self.loss_weight, self.function, *own) for own in self.arguments]

    def warn(self, path: str | None, reason: str, remedy: str = _REMEDY) -> None:
        """Warn once that one output, or all of them, may differ from those of the whole batch.

        A warning without gradients, whose reason may be another, does not prevent one with them.
        """
        what = "the result" if path is None else f"output {path or '(the whole)'}"
        what = f"{what} of {nested.described(self.function)}"
        key = what if torch.is_grad_enabled() else f"{what} without gradients"
        if not self.history.seen & {what, key}:
            self.history.seen.add(key)
            warn(
                f"{what} may differ from its value for the whole batch: {reason}. {remedy}; "
                "model.check(batch) shows by how much"
            )

    def with_joined_losses(self, outputs: Sequence[Any], device: torch.device) -> Sequence[Any]:
        """Return the replicas' outputs with the value of the whole batch for each 0-dim output.

        It is computed on ``device``, and copied to each replica's device.
        """
        if self.scalar_outputs != "auto" or len(outputs) < 2:
            return outputs
        leaves = [[(n, v) for n, v in nested.leaves(o) if has_means(v)] for o in outputs]
        losses = [{n: v for n, v in own if self.is_number(v, n)} for own in leaves]
        values = {
            name: self.join([own[name].reshape(()) for own in losses], name, device).view_as(value)
            for name, value in losses[0].items()
            if all(name in own for own in losses)
        }
        return [
            nested.replaced(output, {n: v.to(own[n].device, copy=True) for n, v in values.items()})
            for output, own in zip(outputs, losses, strict=True)
        ]

    def look_for_mixing(self, outputs: Sequence[Any]) -> None:
        """Warn if the graph shows that samples of a chunk are computed from each other.

        It is searched once, in the first call with gradients and chunks of different size.
        """
        sizes, seen = self.chunk_sizes, self.history.seen
        if not torch.is_grad_enabled() or self._code in seen or len(set(sizes)) < 2:
            return
        leaves = zip(*map(nested.tensors, outputs), strict=False)
        found = [own for own in leaves if all(one.grad_fn for one in own)]
        if found:
            seen.add(self._code)
        # Two replicas show it first, in half the time; the others confirm it.
        ends = [sizes.index(min(sizes)), sizes.index(max(sizes))]
        how = how_samples_mix([[own[i] for i in ends] for own in found], [sizes[i] for i in ends])
        how = how and how_samples_mix(found, sizes)
        if how and not is_symbolic(found[0][0].device):
            reason = f"{how}, so each device uses only its own chunk"
            self.warn(None, reason, "Compute it outside, from gathered outputs")

    @property
    def _code(self) -> Any:
        """A key of the function: its code, which is the same if the function is defined again."""
        function = inspect.unwrap(self.function)
        return getattr(function, "__code__", id(function))


def has_means(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of a type that has means, as losses are."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _shares(counts: Sequence[int]) -> Weights:
    """Return the weights of a mean over so many entries, the same if all have another width."""
    divisor = math.gcd(*counts) or 1
    return tuple(count // divisor for count in counts)


def _is_same(divisor: Any, argument: Any) -> bool:
    """Return whether a number is an argument; two tensors are not read, as that would wait."""
    if isinstance(divisor, Tensor):
        is_one = isinstance(argument, Tensor) and argument.numel() == 1
        return is_one and memory_of(divisor) == memory_of(argument)
    is_number = isinstance(argument, Real) or (isinstance(argument, Tensor) and not argument.dim())
    return is_number and math.isclose(abs(divisor), float(argument), rel_tol=1e-6)
