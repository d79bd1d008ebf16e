"""Join the 0-dim outputs of the replicas into the outputs of the batch.

A loss is a sum of terms c r_i: means and sums r_i over the samples of chunk i, times a number c
(see ``graph``). A sum over the batch is the sum of those over the chunks. A mean is their mean
weighted by their counts: entries, the targets that a cross entropy counts, or the sum of a mask. So
with weights w_i,

    loss = sum_i w_i loss_i / sum_i w_i        or, of sums, loss = sum_i loss_i,

if these are right for each term. A cross entropy has a known value, so beside other terms it may
have weights of its own: it is subtracted, joined by itself and added again.

Without gradients an output is joined as in the last call with gradients. Other outputs are
averaged by samples, with one warning.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ...devices import is_symbolic
from ...errors import warn
from .. import nested
from ..nested import Arguments, described
from .cross_entropy import Counted, counting
from .graph import (
    Term,
    UnclearError,
    are_equal,
    are_ones,
    masks_behind,
    of_counted,
    storage_of,
    terms_of,
)
from .loss_weight import weight_of_chunk
from .mixing import how_samples_mix
from .weights import Tensors, ignore_if_empty, total, weighted_mean


class Weights(NamedTuple):
    """The weights of the replicas in a mean. Two with the same ``by`` are equal.

    Attributes:
        by: a key of the quantity that weights the mean.
        values: the weight of each replica: numbers, or 0-dim tensors.
        if_empty: the weight of each replica if all values are 0.
        kept: tensors that must live as long as ``by`` is compared.
    """

    by: tuple[Any, ...]
    values: Sequence[Any] = ()
    if_empty: float = math.nan
    kept: Any = None


SAMPLES = ("samples",)
"""``Weights.by`` of a mean over all samples, weighted by the chunk sizes."""

ARGUMENT = -1
"""Instead of the index of a count: a sum is divided by an argument of the call."""

SUM = Weights(("sum",))
"""Terms of sums have no weights: they add up."""

_REMEDY = (
    "Return its parts as outputs of their own and combine them outside, compute it outside from "
    "gathered outputs, or give loss_weight or scalar_outputs"
)
Plan = tuple[Weights, list[tuple[Term, Weights]]]
"""The weights of a loss, and the cross entropies in it that have weights of their own."""


@dataclass(slots=True, eq=False)
class OutputHistory:
    """The findings of earlier calls of a model about its outputs.

    Attributes:
        rules: how losses are joined, by the function and the path of the output; or the reason
            why that is not known.
        divided: which of its counts a sum is divided by, or ``ARGUMENT``, or None.
        looked_at: functions whose graph was searched for samples that mix, and outputs whose
            cross entropies were asked whether they compare samples.
        warned: the outputs, as a warning calls them, and names of inputs that were warned of.
    """

    rules: dict[Any, Rule | str] = field(default_factory=dict)
    divided: dict[Any, int | None] = field(default_factory=dict)
    looked_at: set[Any] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)

    def __reduce__(self) -> tuple[type[OutputHistory], tuple[()]]:
        return OutputHistory, ()  # a copy of the model has its own

    def warn(self, what: str, reason: str, remedy: str = _REMEDY) -> None:
        """Warn, once for each output, that it may differ from its value for the whole batch."""
        if what not in self.warned:
            self.warned.add(what)
            warn(
                f"{what} may differ from its value for the whole batch: {reason}. {remedy}; "
                "model.check(batch) shows by how much"
            )


@dataclass(frozen=True, slots=True)
class Rule:
    """How a loss was joined in the last call with gradients.

    Attributes:
        base: ``Weights.by`` of the loss without ``own``.
        own: the position, the factor and ``Weights.by`` of each cross entropy that has weights of
            its own.
        form: the ``ChunkLosses.form`` of the call; the rule holds for calls with the same.
    """

    base: tuple[Any, ...]
    own: Sequence[tuple[int, float, tuple[Any, ...]]]
    form: Any


@dataclass(slots=True, eq=False)
class ChunkLosses:
    """The 0-dim outputs of the replicas in one call.

    Attributes:
        history: the findings of earlier calls.
        function: the function that each replica computes.
        chunk_sizes: how many samples each replica has; None if the batch was not split.
        dim: the batch dimension.
        loss_weight: the weight of each replica's losses; if None, the graph determines it.
        is_auto: whether the graph is followed to the means and sums of losses. If not, losses are
            weighted by chunk size.
        arguments: the arguments of each replica.
    """

    history: OutputHistory
    function: Callable[..., Any]
    chunk_sizes: Sequence[int] | None
    dim: int
    loss_weight: Callable[..., Any] | str | None = None
    is_auto: bool = True
    arguments: Sequence[Arguments] = ()
    counted: Sequence[list[Counted]] = ()
    _weights: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager in which the replicas run, and cross entropies are counted."""
        sizes = self.chunk_sizes or ()
        self.counted = [[] for _ in sizes] if len(sizes) > 1 and self.is_auto else ()
        with counting(self.counted):
            yield

    def join(self, outputs: Tensors, name: str, device: torch.device) -> Tensor:
        """Return the value of the whole batch on ``device``. Differentiable.

        Args:
            outputs: a 0-dim floating tensor of each replica.
            name: the dotted path of the output.
            device: the device of the result.
        """
        sizes = self.chunk_sizes or [1] * len(outputs)
        given = self._given_weights(name)
        if given and torch.is_grad_enabled():
            with contextlib.suppress(UnclearError):
                for term in terms_of(outputs, sizes, self.dim, {}):
                    ignore_if_empty(term.nodes, given)
        if given or not self.counted or is_symbolic(outputs[0].device):
            return weighted_mean(outputs, given or sizes, device)
        try:
            base, own = self._plan(outputs, name)
        except UnclearError as error:
            self.history.warn(self.described(name), str(error))
            return weighted_mean(outputs, sizes, device)
        parts = []
        for term, weights in own:
            values = term.values()
            outputs = [output - value for output, value in zip(outputs, values, strict=True)]
            parts.append(_joined(values, weights, device))
        return sum(parts, _joined(outputs, base, device))

    def _plan(self, outputs: Tensors, name: str) -> Plan:
        """Return how an output is joined.

        Raises:
            UnclearError: it is not known.
        """
        pairs = zip(self.counted, outputs, strict=True)
        own = [one for found, output in pairs for one in found if one.is_(output)]
        if len(own) == len(outputs) and len({one.position for one in own}) == 1:
            self._check_counted(own, name)
            return self._weights_by(("counted", own[0].position)), []
        key = self._code, name
        if not torch.is_grad_enabled():
            rule = self.history.rules.get(key)
            return self._plan_by_rule(rule) if rule else self._plan_by_value(outputs, key)
        try:
            return self._plan_by_graph(outputs, key)
        except UnclearError as error:
            self.history.rules[key] = str(error)
            raise

    def _plan_by_value(self, outputs: Tensors, key: Any) -> Plan:
        """Return how a multiple of a cross entropy is joined. This waits for the device.

        The loss of transformers is one, divided by ``num_items_in_batch``, and a Trainer may
        evaluate before it trains.
        """
        for position in range(min(map(len, self.counted))):
            own = self._counted(position)
            pairs = zip(outputs, own, strict=True)
            factors = [float(output) / (float(one.value) or math.nan) for output, one in pairs]
            if factors[0] and all(math.isclose(f, factors[0], rel_tol=1e-6) for f in factors):
                term = Term(factors[:1] * len(own), is_scaled=True)
                return self._weights_of((key, position), of_counted(own, term)), []
        raise UnclearError(
            "no call with gradients has shown how it is computed (of a row, use squeeze(-1))"
        )

    def _plan_by_rule(self, rule: Rule | str) -> Plan:
        """Return how an output is joined as in the last call with gradients."""
        if isinstance(rule, str):
            raise UnclearError(rule)
        if rule.form != self.form:
            raise UnclearError("without gradients it has other arguments, or other cross entropies")
        start = [1.0] * len(self.counted)
        own = [
            (of_counted(self._counted(i), Term(start).times(factor)), self._weights_by(by))
            for i, factor, by in rule.own
        ]
        return self._weights_by(rule.base), own

    def _plan_by_graph(self, outputs: Tensors, key: Any) -> Plan:
        nodes = {one.node: one for found in self.counted for one in found if one.node}
        sizes = self.chunk_sizes or ()
        terms = terms_of(outputs, sizes, self.dim, nodes)
        known = [
            (term, self._weights_of((key, len(terms), i), term))
            for i, term in enumerate(terms)
            if term.kind
        ]
        if not known:
            raise UnclearError("no mean or sum over samples was found in it")
        free = {weights.by: weights for term, weights in known if not term.own or term.divisors}
        base = self._weights_by(SAMPLES) if len(terms) > 1 else known[0][1]
        base = free.popitem()[1] if free else base
        own = [(term, weights) for term, weights in known if weights.by != base.by]
        if free or not all(are_equal(term.factors) for term, _ in own):
            raise UnclearError("its means and sums have different weights")
        for term in terms:
            if not term.kind and base == SUM:
                raise UnclearError("a term independent of samples is added to a sum")
            if not term.kind and (term.divisors or not _is_constant(term, sizes)):
                raise UnclearError("a term independent of samples is divided by a dependent one")
        for term, weights in known:
            if weights.by[0] == "divided":
                ignore_if_empty(term.nodes, weights.values)
            if term.own:
                self._check_counted(term.own, key[1])
        has_scales = any(term.scales for term, _ in own)
        self.history.rules[key] = Rule(
            ("scaled",) if has_scales else base.by,
            [(term.own[0].position, term.factors[0], weights.by) for term, weights in own],
            self.form,
        )
        return base, own

    @property
    def form(self) -> Any:
        """Which arguments the call has, and how many cross entropies."""
        args, kwargs = self.arguments[0] if self.arguments else ((), {})
        given = frozenset(name for name, value in kwargs.items() if value is not None)
        return len(args), given, len(self.counted[0])

    def _weights_by(self, by: tuple[Any, ...]) -> Weights:
        """Return weights in this call.

        Raises:
            UnclearError: only the graph tells them.
        """
        if by == SAMPLES:
            return Weights(by, self.chunk_sizes or ())
        if by[0] == "counted":
            own = self._counted(by[1])
            return SUM if own[0].kind == "sum" else Weights(by, [one.count for one in own])
        if by != SUM.by:
            raise UnclearError("without gradients its counts or factors are not known")
        return SUM

    def _weights_of(self, place: Any, term: Term) -> Weights:
        """Return the weights that join a term of the replicas to the term of the batch.

        Raises:
            UnclearError: it is not known.
        """
        sizes, factors = self.chunk_sizes or (), term.factors
        known = [self._weights_by(SAMPLES)]
        if not term.own:
            known.append(Weights(("entries", *term.counts), term.counts))
        if term.kind == "mean" and are_equal(factors) and not term.divisors:
            if term.own:
                return self._weights_by(("counted", term.own[0].position))
            return known[not self._are_of_samples(term.counts)]
        place = place, self.form
        if term.kind == "sum" and not term.divisors and self.history.divided.get(place) is None:
            # It may be divided by the number of samples or entries. In an even split only its value
            # tells that from a number that is the same for all chunks.
            is_even = len(set(sizes)) == 1
            fits = are_ones if is_even else are_equal
            pairs = [
                (w, [f * n for f, n in zip(factors, w.values, strict=True) if n]) for w in known
            ]
            means = [weights for weights, numbers in pairs if term.is_scaled and fits(numbers)]
            is_plain = are_ones(factors) and not term.is_scaled
            if bool(means) != (is_plain if is_even else are_equal(factors)):
                return means[0] if means else SUM
        if term.kind == "sum" and term.is_scaled and not term.scales:
            return self._weights_of_divided(place, term)
        raise UnclearError("it is not clear whether its sums add up or are means")

    def _weights_of_divided(self, place: Any, term: Term) -> Weights:
        """Return the weights of a sum that is divided by its count, or by an argument.

        A mean is weighted by the divisor of its sum, which is the sum of a mask or the number of
        entries. The first call waits to read divisors, to tell means from sums.

        Raises:
            UnclearError: it is divided by something else.
        """
        divisors: Sequence[Any] = term.divisors or [abs(1 / (f or math.nan)) for f in term.factors]
        masks = masks_behind(term.nodes, self.chunk_sizes or (), self.dim)
        counts: list[Sequence[Any]] = [[mask.sum() for mask in own] for own in masks]
        counts.append([one.count for one in term.own] or term.counts)
        divided = self.history.divided
        if place not in divided and (not term.divisors or are_equal(term.factors)):
            numbers = [float(divisor) for divisor in divisors]
            fits = [i for i, own in enumerate(counts) if _are_counts(numbers, own)]
            if fits == [len(masks)] and self._are_of_samples(counts[-1]):
                return self._weights_by(SAMPLES)  # so far: what is left out may be 0 in the sum
            if numbers[0] != 1:
                fits += [ARGUMENT for own in self._number_arguments() if _are_counts(numbers, own)]
            if fits or not {0, 1} & {*numbers}:  # or what is clamped may be a count
                divided[place] = fits[0] if fits else None
        i = divided.get(place)
        if i == ARGUMENT:
            return SUM
        if i is None:
            raise UnclearError("it is divided by something other than its count")
        what = [*map(storage_of, masks[i])] if i < len(masks) else place
        found = counts[i] if i < len(counts) else divisors
        values = [d * (n != 0) for d, n in zip(divisors, found, strict=True)]  # 1 if clamped
        return Weights(("divided", str(what)), values, if_empty=1, kept=masks)

    def _are_of_samples(self, counts: Sequence[Any]) -> bool:
        """Return whether replicas count the same for each sample; no if that would wait."""
        pairs = zip(counts, self.chunk_sizes or (), strict=True)
        return not isinstance(counts[0], Tensor) and are_equal([n / m for n, m in pairs])

    def _number_arguments(self) -> Iterator[Sequence[Any]]:
        """Return each argument of the replicas that is a number."""
        numbers = [
            [leaf for _, leaf in nested.leaves([*args, *kwargs.values()]) if _is_number(leaf)]
            for args, kwargs in self.arguments
        ]
        return zip(*numbers, strict=False)

    def _counted(self, position: int) -> list[Counted]:
        """Return the cross entropy of each replica at a position."""
        if any(len(own) <= position for own in self.counted):
            raise UnclearError("it is not computed in the same way as before")
        return [own[position] for own in self.counted]

    def _check_counted(self, own: Sequence[Counted], name: str) -> None:
        """Warn if a cross entropy is not over samples one by one. The first call waits for that."""
        key = "counted", self._code, name, own[0].position
        if key in self.history.looked_at:
            return
        self.history.looked_at.add(key)
        weights = [one.weight.cpu() for one in own if one.weight is not None]
        if any(not torch.equal(weight, weights[0]) for weight in weights):
            reason = "the weights of its classes differ between the devices"
        elif all(one.compares_samples is not None and one.compares_samples for one in own):
            reason = "its targets are the rows of the chunk, as if samples were compared"
        else:
            return
        self.history.warn(self.described(name), reason)

    def _given_weights(self, name: str) -> list[Any]:
        """Return the weight of each replica's output by ``loss_weight``, if it gives one."""
        if self.loss_weight is None:
            return []
        self._weights = self._weights or [
            weight_of_chunk(self.loss_weight, self.function, *own) for own in self.arguments
        ]
        weights = [w.get(name) if isinstance(w, Mapping) else w for w in self._weights]
        return [] if any(weight is None for weight in weights) else weights

    def described(self, name: str) -> str:
        """Return the name of an output in messages."""
        return f"output {name or '(the whole)'} of {described(self.function)}"

    def in_place(self, outputs: Sequence[Any], device: torch.device) -> Sequence[Any]:
        """Return the replicas' outputs with the value of the whole batch for each 0-dim output.

        It is computed on ``device``, and copied to each replica's device.
        """
        if not self.is_auto or len(outputs) < 2:
            return outputs
        losses = [{n: v for n, v in nested.leaves(output) if is_loss(v)} for output in outputs]
        joined = {
            name: self.join([own[name] for own in losses], name, device)
            for name in losses[0]
            if all(name in own for own in losses)
        }
        return [
            nested.replaced(output, {n: v.to(own[n].device, copy=True) for n, v in joined.items()})
            for output, own in zip(outputs, losses, strict=True)
        ]

    def look_for_mixing(self, outputs: Sequence[Any]) -> None:
        """Warn if the graph shows that samples of a chunk are computed from each other.

        It is searched once, in the first call with gradients and chunks of different size.
        """
        sizes, history = self.chunk_sizes or (), self.history
        is_first = torch.is_grad_enabled() and self._code not in history.looked_at
        if not is_first or len(set(sizes)) < 2:
            return
        ends = [sizes.index(end(sizes)) for end in (min, max)]
        leaves = [nested.tensors(outputs[i]) for i in ends]
        pairs = [p for p in zip(*leaves, strict=False) if all(one.grad_fn for one in p)]
        if not pairs:
            return
        history.looked_at.add(self._code)
        how = how_samples_mix(pairs, [sizes[i] for i in ends])
        if how and not is_symbolic(pairs[0][0].device):
            what = f"the result of {described(self.function)}"
            remedy = "Compute it outside, from gathered outputs"
            history.warn(what, f"{how}, so each device uses only its own chunk", remedy)

    @property
    def _code(self) -> Any:
        """A key of the function: its code, which is the same if the function is defined again."""
        return getattr(self.function, "__code__", id(self.function))


def is_loss(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a 0-dim tensor of a type that has means, as losses are."""
    return (
        isinstance(value, Tensor)
        and not value.dim()
        and (value.is_floating_point() or value.is_complex())
    )


def _is_constant(term: Term, sizes: Sequence[int]) -> bool:
    """Return whether a term is the same for all chunks, and not divided by their size."""
    products = [factor * size for factor, size in zip(term.factors, sizes, strict=True)]
    return are_equal(term.factors) and not (term.is_scaled and are_ones(products))


def _is_number(argument: object) -> bool:
    return (isinstance(argument, Real) and not isinstance(argument, bool)) or (
        isinstance(argument, Tensor) and not argument.dim() and not argument.requires_grad
    )


def _are_counts(divisors: Sequence[Any], counts: Sequence[Any]) -> bool:
    """Return whether divisors are counts. A count of 0 may have been replaced by 1."""
    pairs = [
        (float(divisor), float(count)) for divisor, count in zip(divisors, counts, strict=True)
    ]
    return any(count for _, count in pairs) and all(
        math.isclose(divisor, count or divisor * (divisor in (0, 1)), rel_tol=1e-6)
        for divisor, count in pairs
    )


def _joined(tensors: Tensors, weights: Weights, device: torch.device) -> Tensor:
    if weights == SUM:
        return total(tensors, device)
    return weighted_mean(tensors, weights.values, device, weights.if_empty)
