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
from math import isclose
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...devices import is_symbolic
from ...errors import warn
from .. import nested
from ..nested import Arguments, described
from .cross_entropy import Counted, counting
from .graph import Term, UnclearError, are_equal, how_samples_mix, masks_behind, terms_of
from .weights import ScalarOutputs, Tensors, ignore_if_empty, total, weight_of_chunk, weighted_mean

Weights = Sequence[Any] | None
"""The weight of each replica in a mean, a number or a 0-dim tensor; None for sums, which add up."""

Own = Sequence[tuple[int, float, Sequence[Tensor]]]
"""Positions of cross entropies, the number that multiplies each, and ``Term.scales``."""

SAMPLES, SUM = "samples", "sum"
"""The bases of rules: a mean weighted by chunk size, and a sum."""

_REMEDY = (
    "Return its parts as outputs of their own and combine them outside, compute it outside from "
    "gathered outputs, or give loss_weight or scalar_outputs"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How a loss is joined: its cross entropies by their counts, the rest as the base says.

    Attributes:
        base: ``SAMPLES``, ``SUM``, or a key of weights that only the graph of a call tells.
        own: the cross entropies that are means.
    """

    base: Any
    own: Own = ()


@dataclass(slots=True, eq=False)
class OutputHistory:
    """The findings of earlier calls of a model about its outputs.

    Attributes:
        rules: how losses were joined in the last call with gradients, by the function and the path
            of the output, and the form of that call; or the reason why that is not known.
        divided: whether a sum in an output is divided by its count.
        looked_at: functions whose graph was searched for samples that mix, and outputs whose
            cross entropies were asked whether they compare samples.
        warned: the outputs, as a warning calls them, and names of inputs that were warned of.
    """

    rules: dict[Any, tuple[Rule | str, Any]] = field(default_factory=dict)
    divided: dict[Any, bool] = field(default_factory=dict)
    looked_at: set[Any] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)

    def __reduce__(self) -> tuple[type[OutputHistory], tuple[()]]:
        return OutputHistory, ()  # a copy of the model has its own

    def warn(self, what: str, reason: str, remedy: str) -> None:
        """Warn, once for each output, that it may differ from its value for the whole batch."""
        if what not in self.warned:
            self.warned.add(what)
            warn(
                f"{what} may differ from its value for the whole batch: {reason}. {remedy}; "
                "model.check(batch) shows by how much"
            )


@dataclass(slots=True, eq=False)
class Call:
    """One call of a function on all devices: its split, and how its 0-dim outputs are joined.

    Attributes:
        history: the findings of earlier calls of the model.
        function: the function that each replica computes.
        devices: the device of each replica.
        chunk_sizes: how many samples each replica has; None if the batch was not split.
        dim: the batch dimension.
        scalar_outputs: how they are joined, as in ``BalancedDataParallel``. With ``"auto"``, the
            graph is followed to the means and sums of losses.
        loss_weight: the weight of each replica's losses; if None, the graph determines it.
        arguments: the arguments of each replica.
        owner: the model whose call it is, or None.
    """

    history: OutputHistory
    function: Callable[..., Any]
    devices: Sequence[torch.device]
    chunk_sizes: Sequence[int] | None
    dim: int
    scalar_outputs: ScalarOutputs = "auto"
    loss_weight: Callable[..., Any] | str | None = None
    arguments: Sequence[Arguments] = ()
    owner: Any = None
    counted: Sequence[list[Counted]] = ()
    _weights: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager in which the call is running, and cross entropies are counted."""
        sizes, is_auto = self.chunk_sizes or (), self.scalar_outputs == "auto"
        self.counted = [[] for _ in sizes] if len(sizes) > 1 and is_auto else ()
        with counting(self):
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
        pairs = zip(self.counted, outputs, strict=True)
        same = [one for counted, output in pairs for one in counted if one.is_(output)]
        if len(same) == len(outputs) and len({one.position for one in same}) == 1:
            self._check_counted(same[0].position, name)
            counts = [one.count for one in same]
            return _joined(outputs, counts if same[0].kind == "mean" else None, device)
        try:
            weights, own = self._plan(outputs, name)
            found = [self._counted(position) for position, *_ in own]
        except UnclearError as error:
            self.warn(name, str(error))
            return weighted_mean(outputs, sizes, device)
        parts = []
        for counted, (_, factor, scales) in zip(found, own, strict=True):
            values = [one.value * factor for one in counted]
            if scales:
                values = [value * scale for value, scale in zip(values, scales, strict=True)]
            outputs = [output - value for output, value in zip(outputs, values, strict=True)]
            parts.append(weighted_mean(values, [one.count for one in counted], device))
        # If nothing counts, a mean may still be 0 / 1.
        return sum(parts, _joined(outputs, weights, device, if_empty=1))

    def _plan(self, outputs: Tensors, name: str) -> tuple[Weights, Own]:
        """Return the weights of an output, None if it adds up, and its cross entropies.

        Raises:
            UnclearError: it is not known.
        """
        key = self._code, name
        if torch.is_grad_enabled():
            try:
                found, weights = self._rule_by_graph(outputs, key)
            except UnclearError as error:
                self.history.rules[key] = str(error), None
                raise
            self.history.rules[key] = found, self.form
            for position, *_ in found.own:
                self._check_counted(position, name)
            return weights, found.own
        rule, form = self.history.rules.get(key) or (self._rule_by_value(outputs, key), self.form)
        if isinstance(rule, str):
            raise UnclearError(rule)
        if form != self.form:
            raise UnclearError("without gradients it has other arguments, or other cross entropies")
        if rule.base not in (SAMPLES, SUM):
            raise UnclearError("without gradients its counts or factors are not known")
        return (self.chunk_sizes if rule.base == SAMPLES else None), rule.own

    def _rule_by_value(self, outputs: Tensors, key: Any) -> Rule:
        """Return how a multiple of a cross entropy is joined. This waits for the device.

        The loss of transformers is one, divided by ``num_items_in_batch``, and a Trainer may
        evaluate before it trains.
        """
        for position in range(min(map(len, self.counted))):
            own = self._counted(position)
            pairs = zip(outputs, own, strict=True)
            factors = [float(output) / (float(one.value) or math.nan) for output, one in pairs]
            if factors[0] and all(isclose(f, factors[0], rel_tol=1e-6) for f in factors):
                if own[0].kind == "mean":
                    return Rule(SAMPLES, [(position, factors[0], ())])
                counts = [one.count for one in own]
                same = factors[:1] * len(own)
                term = Term(same, is_scaled=True, kind="sum", counts=counts, own=own)
                return Rule(self._base_of_sum(term, (key, position))[0])
        raise UnclearError(
            "no call with gradients has shown how it is computed (of a row, use squeeze(-1))"
        )

    def _rule_by_graph(self, outputs: Tensors, key: Any) -> tuple[Rule, Weights]:
        """Return how an output is joined, and the weights of its base in this call.

        Raises:
            UnclearError: it is not known.
        """
        nodes = {one.node: one for found in self.counted for one in found if one.node}
        sizes = self.chunk_sizes or ()
        terms = terms_of(outputs, sizes, self.dim, nodes)
        own, bases = [], dict[Any, Weights]()
        for i, term in enumerate(terms):
            if not any(term.factors):
                continue  # as of parameters that must have a gradient
            if term.kind == "sum":
                bases.update([self._base_of_sum(term, (key, len(terms), i))])
            elif (
                term.divisors
                or not are_equal(term.factors)
                or (not term.kind and self._are_means(term, sizes))
            ):
                raise UnclearError("the replicas multiply a term by different numbers")
            elif term.own:
                own.append((term.own[0].position, term.factors[0], term.scales))
            elif term.kind:
                bases.update([self._base_of_mean(term.counts)])
        if len(bases) > 1:
            raise UnclearError("its means and sums have different weights")
        if not (bases or own):
            raise UnclearError("no mean or sum over samples was found in it")
        if SUM in bases and not all(term.kind for term in terms):
            raise UnclearError("a term independent of samples is added to a sum")
        base, weights = bases.popitem() if bases else (SAMPLES, sizes)
        is_scaled = any(scales for _, _, scales in own)
        return Rule("scaled" if is_scaled else base, own), weights

    def _base_of_mean(self, counts: Sequence[int]) -> tuple[Any, Weights]:
        """Return the base and the weights of a mean over so many entries."""
        sizes = self.chunk_sizes or ()
        if are_equal([count / size for count, size in zip(counts, sizes, strict=True)]):
            return SAMPLES, sizes
        return ("entries", *counts), counts

    def _base_of_sum(self, term: Term, place: Any) -> tuple[Any, Weights]:
        """Return the base and the weights of a sum, which is a mean if its count divides it.

        Raises:
            UnclearError: it is divided by something else.
        """
        sizes, factors = self.chunk_sizes or (), term.factors
        is_even = len(set(sizes)) == 1
        if not term.is_scaled:
            return SUM, None
        if not term.divisors:
            for numbers in [sizes] if term.own else [sizes, term.counts]:
                if self._are_means(term, numbers):
                    return self._base_of_mean(numbers)
            if are_equal(factors) and not is_even:
                return SUM, None
        divisors: Sequence[Any] = term.divisors or [1 / (factor or math.nan) for factor in factors]
        if are_equal(factors) and self._is_argument(divisors):
            return SUM, None
        masks = masks_behind(term.nodes, sizes, self.dim)
        counts: Sequence[Any] = [mask.sum() for mask in masks] or term.counts
        place, divided = (place, self.form), self.history.divided
        if place not in divided:  # the first call waits for the devices
            pairs = [(float(d), float(n)) for d, n in zip(divisors, counts, strict=True)]
            # A count of 0 may have been replaced by 1, or by a number close to 0.
            fits = all(isclose(d, n, rel_tol=1e-6) or (d <= 1 and not n) for d, n in pairs)
            if fits and not masks and not term.own:
                return self._base_of_mean(counts)
            if not fits or any(n for _, n in pairs):
                divided[place] = fits
        if not divided.get(place, True):
            raise UnclearError("it is divided by something other than its count")
        ignore_if_empty(term.nodes, counts)
        return ("counts", place), counts

    def _are_means(self, term: Term, counts: Sequence[int]) -> bool:
        """Return whether numbers divide a term by these counts."""
        products = [f * n for f, n in zip(term.factors, counts, strict=True) if n]
        # In chunks of one size, other constants have the same effect.
        is_even = len(set(self.chunk_sizes or ())) == 1
        return term.is_scaled and are_equal([1, *map(abs, products)] if is_even else products)

    def _is_argument(self, divisors: Sequence[Any]) -> bool:
        """Return whether divisors are an argument of the call, as ``num_items_in_batch`` is."""
        leaves = [nested.leaves([*args, *kwargs.values()]) for args, kwargs in self.arguments]
        return any(
            all(_is_same(divisor, leaf) for divisor, (_, leaf) in zip(divisors, own, strict=True))
            for own in zip(*leaves, strict=False)
        )

    @property
    def form(self) -> Any:
        """Which arguments the call has, and how many cross entropies."""
        args, kwargs = self.arguments[0] if self.arguments else ((), {})
        given = frozenset(name for name, value in kwargs.items() if value is not None)
        return len(args), given, len(self.counted[0])

    def _counted(self, position: int) -> list[Counted]:
        """Return the cross entropy of each replica at a position."""
        if any(len(own) <= position for own in self.counted):
            raise UnclearError("it is not computed in the same way as before")
        return [own[position] for own in self.counted]

    def _check_counted(self, position: int, name: str) -> None:
        """Warn if a cross entropy is not over samples one by one. The first call waits for that."""
        key = "counted", self._code, name, position
        if key in self.history.looked_at:
            return
        self.history.looked_at.add(key)
        own, reason = self._counted(position), ""
        weights = [one.weight.tolist() for one in own if one.weight is not None]
        if any(weight != weights[0] for weight in weights):
            reason = "the weights of its classes differ between the devices"
        if all(one.compares_samples() for one in own):
            reason = "its targets are the rows of the chunk, as if samples were compared"
        if reason:
            self.warn(name, reason)

    def _given_weights(self, name: str) -> list[Any]:
        """Return the weight of each replica's output by ``loss_weight``, if it gives one."""
        if self.loss_weight is None:
            return []
        self._weights = self._weights or [
            weight_of_chunk(self.loss_weight, self.function, *own) for own in self.arguments
        ]
        weights = [w.get(name) if isinstance(w, Mapping) else w for w in self._weights]
        return [] if any(weight is None for weight in weights) else weights

    def warn(self, path: str, reason: str, remedy: str = _REMEDY) -> None:
        """Warn once that an output may differ from its value for the whole batch."""
        what = f"output {path or '(the whole)'} of {described(self.function)}"
        self.history.warn(what, reason, remedy)

    def in_place(self, outputs: Sequence[Any], device: torch.device) -> Sequence[Any]:
        """Return the replicas' outputs with the value of the whole batch for each 0-dim output.

        It is computed on ``device``, and copied to each replica's device.
        """
        if self.scalar_outputs != "auto" or len(outputs) < 2:
            return outputs
        most = max(self.chunk_sizes or [0])
        losses = [{n: v for n, v in nested.leaves(o) if is_loss(v, most)} for o in outputs]
        joined = {
            name: self.join([own[name].reshape(()) for own in losses], name, device).view_as(value)
            for name, value in losses[0].items()
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


def is_loss(value: object, num_samples: int = 0) -> TypeGuard[Tensor]:
    """Return whether a value is one number of a type that has means, as losses are.

    A tensor with one entry in one dimension or more counts only for several samples.
    """
    return (
        isinstance(value, Tensor)
        and value.numel() == 1
        and (not value.dim() or num_samples > 1)
        and (value.is_floating_point() or value.is_complex())
    )


def _is_same(divisor: Any, argument: Any) -> bool:
    """Return whether a divisor is an argument; two tensors are not read, as that would wait."""
    if isinstance(argument, Tensor) and isinstance(divisor, Tensor):
        return bool(divisor.untyped_storage()._cdata == argument.untyped_storage()._cdata)
    is_number = isinstance(argument, Real) and not isinstance(argument, bool)
    if isinstance(divisor, Tensor) or not (is_number or _is_single(argument)):
        return False
    return isclose(abs(divisor), float(argument), rel_tol=1e-6)


def _is_single(argument: Any) -> bool:
    return isinstance(argument, Tensor) and not argument.dim() and not argument.requires_grad


def _joined(
    tensors: Tensors, weights: Weights, device: torch.device, if_empty: float = math.nan
) -> Tensor:
    if weights is None:
        return total(tensors, device)
    return weighted_mean(tensors, weights, device, if_empty)
