"""Join the 0-dim outputs of the replicas into those of the batch.

A loss is a sum of terms c r_i: means and sums r_i over the samples of chunk i, times a number c
(see ``graph``). A sum over the batch is the sum of those over the chunks. A mean is their mean
weighted by their counts: entries, or the targets that a cross entropy counts. So with weights w_i,

    loss = sum_i w_i loss_i / sum_i w_i        or, of sums, loss = sum_i loss_i,

if these are right for each term. A cross entropy has a known value, so beside other terms it may
have weights of its own: it is subtracted, joined by itself and added again.

Without gradients an output is joined as in the last call with gradients. What is not known is
averaged by samples, with one warning.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ...devices import is_symbolic
from ...errors import warn
from ...torch_versions import run_at_once
from .. import nested
from ..nested import Arguments, described, named_arguments
from .cross_entropy import Counted, counting
from .graph import Term, UnclearError, of_counted, terms_of
from .loss_weight import weight_of_chunk
from .mixing import how_samples_mix

Tensors = Sequence[Tensor]
"""One for each replica."""

Weighting = tuple[Any, ...]
"""``SUM``; ``SAMPLES``, by chunk sizes; ``("entries", *counts)``; ``("counted", i)``, by the
targets of the i-th cross entropy; ``("argument", path, how)``, by what an argument counts."""

_COUNTED = (torch.float32, torch.float64, torch.bool, torch.int32, torch.int64, torch.uint8)
"""The types of arguments that are counted."""

SUM: Weighting = ("sum",)
SAMPLES: Weighting = ("samples",)

_REMEDY = (
    "Return its parts as outputs of their own and combine them outside, compute it outside from "
    "gathered outputs, or give loss_weight or scalar_outputs"
)


@dataclass(slots=True, eq=False)
class OutputHistory:
    """What earlier calls of a model have shown about its outputs.

    Attributes:
        rules: how losses are joined, by the function and the path of the output.
        divided: by what terms of losses are divided, as far as it is known.
        looked_at: functions whose graph was searched for samples that mix, and outputs whose
            cross entropies were asked whether they compare samples.
        warned: the outputs, as a warning calls them, and names of inputs that were warned of.
    """

    rules: dict[Any, Rule] = field(default_factory=dict)
    divided: dict[Any, Sequence[Weighting]] = field(default_factory=dict)
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
    """How a loss is joined.

    Attributes:
        rest: the weights of the loss, without the cross entropies in ``own``.
        own: of cross entropies with weights of their own, the position, the weights, the factor,
            and the scales of replicas, see ``Term``.
        arguments: the names of those that the call must have had, as a sum may be divided by one;
            None if that does not matter.
        num_counted: how many cross entropies a replica has computed.
        is_ambiguous: whether several arguments have counted the same so far.
        reason: why it is not known how the loss is joined; or "".
    """

    rest: Weighting = SAMPLES
    own: Sequence[tuple[int, Weighting, float, Sequence[Tensor]]] = ()
    arguments: Any = None
    num_counted: int = 0
    is_ambiguous: bool = False
    reason: str = ""

    def detached(self) -> Rule:
        """Return the same without graphs, for any number of replicas."""
        own = [
            (i, by, f, [scale.detach() for scale in scales[:1]]) for i, by, f, scales in self.own
        ]
        return replace(self, own=own)


def weighting_of(term: Term, sizes: Sequence[int]) -> Weighting:
    """Return with which weights a term of the replicas is joined to that of the batch.

    Raises:
        UnclearError: it is not known.
    """
    is_even, factors = len(set(sizes)) == 1, term.factors
    if term.position is not None:
        own, known = ("counted", term.position), [(SAMPLES, sizes)]
    else:
        is_of_samples = _are_equal([n / m for n, m in zip(term.counts, sizes, strict=True)])
        own = SAMPLES if is_of_samples else ("entries", *term.counts)
        known = [(SAMPLES, sizes), (own, term.counts)]
    if term.kind == "mean" and _are_equal(factors):
        return own
    if term.kind == "sum":
        # It may be divided by the number of samples or entries. In an even split only its value
        # tells that from a number that is the same for all chunks.
        fits = _are_ones if is_even else _are_equal
        pairs = [(by, [f * n for f, n in zip(factors, c, strict=True) if n]) for by, c in known]
        means = [by for by, products in pairs if term.is_scaled and fits(products)]
        adds = _are_equal(factors) and not (is_even and (term.is_scaled or not _are_ones(factors)))
        if bool(means) != adds:
            return means[0] if means else SUM
    raise UnclearError("it is not clear whether its sums add up or are means")


def _is_constant(term: Term, sizes: Sequence[int]) -> bool:
    """Return whether a term is the same for all chunks, and not divided by their size."""
    products = [factor * size for factor, size in zip(term.factors, sizes, strict=True)]
    return _are_equal(term.factors) and not (term.is_scaled and _are_ones(products))


def adds_up(by: Weighting) -> bool:
    """Return whether terms are added up: sums, undivided or divided by an argument itself."""
    return by == SUM or by[-1] == "number"


def _are_equal(numbers: Sequence[float]) -> bool:
    return all(math.isclose(number, numbers[0], rel_tol=1e-9) for number in numbers)


def _are_counts(divisors: Sequence[float], counts: Sequence[float]) -> bool:
    """Return whether divisors are counts. A count of 0 may have been replaced by 1."""
    pairs = [(n or d * (d in (0, 1)), d) for d, n in zip(divisors, counts, strict=True)]
    return any(counts) and all(math.isclose(d, n, rel_tol=1e-6) for n, d in pairs)


def _are_ones(numbers: Sequence[float]) -> bool:
    return _are_equal([*map(abs, numbers), 1.0])


@dataclass(slots=True, eq=False)
class ChunkLosses:
    """The 0-dim outputs of the replicas in one call.

    Attributes:
        history: what earlier calls have shown.
        function: the function that each replica computes.
        chunk_sizes: how many samples each replica has; None if the batch was not split.
        dim: the batch dimension.
        loss_weight: the weight of each replica's losses; if None, it is found out.
        is_auto: whether it is found out how losses were computed; if not, they are weighted by
            chunk size.
        arguments: those of each replica.
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
        weights = self._given_weights(name)
        if weights and torch.is_grad_enabled():
            with contextlib.suppress(UnclearError):
                for term in terms_of(outputs, sizes, self.dim, {}):
                    ignore_if_empty(term.nodes, weights)
        if weights or not self.counted or is_symbolic(outputs[0].device):
            return weighted_mean(outputs, weights or sizes, device)
        try:
            rule = self._rule(outputs, name)
            rest, parts = outputs, []
            for position, by, factor, scales in rule.own:
                values = [one.value * factor for one in self._counted(position)]
                for i, scale in zip(range(len(values)), itertools.cycle(scales), strict=False):
                    values[i] = values[i] * scale.to(values[i].device)
                rest = [value - part for value, part in zip(rest, values, strict=True)]
                parts.append(self._by(by, values, device))
            return sum(parts, self._by(rule.rest, rest, device))
        except UnclearError as error:
            self.history.warn(self.described(name), str(error))
            return weighted_mean(outputs, sizes, device)

    def _rule(self, outputs: Tensors, name: str) -> Rule:
        """Return how an output is joined.

        Raises:
            UnclearError: it is not known.
        """
        pairs = zip(self.counted, outputs, strict=True)
        own = [one for found, output in pairs for one in found if one.is_(output)]
        if len(own) == len(outputs) and len({one.position for one in own}) == 1:
            self._check_counted(own, name)
            return Rule(SUM if own[0].kind == "sum" else ("counted", own[0].position))
        key, rules = (self._code, name), self.history.rules
        if torch.is_grad_enabled():
            try:
                rule = self._rule_by_graph(outputs, key)
            except UnclearError as error:
                rules[key] = Rule(reason=str(error))
                raise
            rules[key] = rule.detached()
            return rule
        rule = rules.get(key) or self._rule_by_value(outputs, key)
        if rule.reason:
            raise UnclearError(rule.reason)
        if rule.num_counted not in (0, len(self.counted[0])):
            raise UnclearError("without gradients it computes other cross entropies")
        if rule.is_ambiguous:
            raise UnclearError("several arguments have counted the same so far")
        if rule.rest[0] == "entries":
            raise UnclearError("without gradients it is not known over how many entries it is")
        if rule.arguments not in (None, self._argument_names):
            raise UnclearError("without gradients, and with other arguments, it may be a mean")
        return rule

    def _rule_by_value(self, outputs: Tensors, key: Any) -> Rule:
        """Return how a multiple of a cross entropy is joined. This waits for the device."""
        for position in range(min(map(len, self.counted))):
            own = self._counted(position)
            pairs = zip(outputs, own, strict=True)
            factors = [float(output) / (float(one.value) or math.nan) for output, one in pairs]
            if factors[0] and all(math.isclose(f, factors[0], rel_tol=1e-6) for f in factors):
                term = of_counted(own, Term(factors[:1] * len(own), is_scaled=True))
                return Rule(self._weighting((key, position), term))
        raise UnclearError("no call with gradients has shown how it is computed")

    def _rule_by_graph(self, outputs: Tensors, key: Any) -> Rule:
        nodes = {one.node: one for found in self.counted for one in found if one.node}
        sizes = self.chunk_sizes or ()
        terms = terms_of(outputs, sizes, self.dim, nodes)
        kinds = tuple((term.kind, term.position) for term in terms)
        known = [(t, self._weighting((key, kinds, i), t)) for i, t in enumerate(terms) if t.kind]
        if not known:
            raise UnclearError("no mean or sum over samples was found in it")
        free = {by for term, by in known if term.position is None or by[0] == "argument"}
        base = free.pop() if free else known[0][1] if len(terms) == 1 else SAMPLES
        if free or any(by != base and not _are_equal(term.factors) for term, by in known):
            raise UnclearError("its means and sums have different weights")
        others = [term for term in terms if not term.kind]
        if others and (base == SUM or base[0] == "argument"):
            raise UnclearError("what does not depend on samples is added to a sum")
        if any(term.divisors or not _is_constant(term, sizes) for term in others):
            raise UnclearError("what does not depend on samples is divided by what does")
        for term, by in known:
            if by[0] == "argument" and not adds_up(by):
                ignore_if_empty(term.nodes, self._weights_by(by))
            if term.position is not None:
                self._check_counted(self._counted(term.position), key[1])
        own = [
            (term.position, by, term.factors[0], term.scales)
            for term, by in known
            if by != base and term.position is not None
        ]
        is_scaled = any(by == SUM and term.is_scaled for term, by in known)
        is_ambiguous = any(
            len(self.history.divided.get((key, kinds, i), ())) > 1 for i in range(len(terms))
        )
        names = self._argument_names if is_scaled else None
        return Rule(base, own, names, len(self.counted[0]), is_ambiguous)

    @property
    def _argument_names(self) -> Any:
        """The number of positional arguments, and the names of others that are not None."""
        args, kwargs = self.arguments[0] if self.arguments else ((), {})
        return len(args), frozenset(name for name, value in kwargs.items() if value is not None)

    def _weighting(self, key: Any, term: Term) -> Weighting:
        """Return the weights of a term, which may be divided by what an argument counts.

        Calls wait for the device until a single argument fits.

        Raises:
            UnclearError: they are not known.
        """
        if not term.divisors:
            try:
                return weighting_of(term, self.chunk_sizes or ())
            except UnclearError:
                if term.kind != "sum" or not term.is_scaled or term.scales:
                    raise
        known = self.history.divided.get(key)
        if known is None or len(known) > 1:
            numbers = [1 / (factor or math.nan) for factor in term.factors]
            divisors = [float(divisor) for divisor in term.divisors] or numbers
            counts = [self._counts_in(i) for i in range(len(self.arguments))] or [{}]
            known = self.history.divided[key] = [
                by
                for by in known or counts[0]
                if _are_counts(divisors, [float(own.get(by, math.nan)) for own in counts])
            ]
        if not known or term.kind != "sum" or (term.divisors and not _are_equal(term.factors)):
            raise UnclearError("it is divided by something else than what an argument counts")
        return known[0]

    def _counts_in(self, replica: int) -> dict[Weighting, Any]:
        """Return what the arguments of a replica count.

        That is the sum of a tensor with a row for each sample, or the number of its entries other
        than 0 or -100 if they are integers. A 0-dim tensor is itself a number.
        """
        found, size = dict[Weighting, Any](), (self.chunk_sizes or ())[replica]
        for name, value in named_arguments(self.function, *self.arguments[replica]):
            for path, leaf in nested.leaves(value, name):
                if isinstance(leaf, Tensor) and (leaf.requires_grad or leaf.dtype not in _COUNTED):
                    continue
                if isinstance(leaf, float | int) or (isinstance(leaf, Tensor) and not leaf.dim()):
                    found["argument", path, "number"] = leaf
                elif isinstance(leaf, Tensor) and leaf.shape[self.dim : self.dim + 1] == (size,):
                    found["argument", path, "sum"] = leaf.sum()
                    if not leaf.is_floating_point():
                        for n in (0, -100):
                            found["argument", path, f"other than {n}"] = (leaf != n).sum()
        return found

    def _weights_by(self, weighting: Weighting) -> Sequence[Any]:
        """Return the weight of each replica.

        Raises:
            UnclearError: the call lacks what is counted.
        """
        if weighting == SAMPLES:
            return self.chunk_sizes or ()
        if weighting[0] == "entries":
            return weighting[1:]
        if weighting[0] == "counted":
            return [one.count for one in self._counted(weighting[1])]
        found = [self._counts_in(i).get(weighting) for i in range(len(self.arguments))]
        if None in found:
            raise UnclearError(f"it was divided by argument {weighting[1]}, which is missing")
        return found

    def _by(self, weighting: Weighting, tensors: Tensors, device: torch.device) -> Tensor:
        """Return the sum or the weighted mean of tensors of the replicas."""
        weights = () if weighting == SUM else self._weights_by(weighting)
        if adds_up(weighting):
            return total(tensors, device)
        # Where an argument counts nothing, the sum is divided by 1, and still added.
        ignores_empty = weighting[0] != "argument"
        return weighted_mean(tensors, weights, device, ignores_empty=ignores_empty)

    def _counted(self, position: int) -> list[Counted]:
        """Return the cross entropy of each replica at a position."""
        if any(len(own) <= position for own in self.counted):
            raise UnclearError("it is computed in another way than before")
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
        """Return what messages call an output."""
        return f"output {name or '(the whole)'} of {described(self.function)}"

    def in_place(self, outputs: Sequence[Any], device: torch.device) -> Sequence[Any]:
        """Return the replicas' outputs with the value of the whole batch for each 0-dim output.

        It is computed on ``device``, and copied to that of each replica.
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
            what = f"what {described(self.function)} returns"
            remedy = "Compute it outside, from gathered outputs"
            history.warn(what, f"{how}, so each device uses only its own chunk", remedy)

    @property
    def _code(self) -> Any:
        """What tells functions apart: their code, which a function made anew has as well."""
        return getattr(self.function, "__code__", id(self.function))


def is_loss(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a 0-dim tensor of a type that has means, as losses are."""
    return (
        isinstance(value, Tensor)
        and not value.dim()
        and (value.is_floating_point() or value.is_complex())
    )


def moved(tensors: Tensors, device: torch.device) -> list[Tensor]:
    """Return the tensors on ``device``."""
    there = [tensor.to(device) for tensor in tensors]
    for before, after in zip(tensors, there, strict=True):
        if after is not before and after.grad_fn is not None:
            run_at_once(after.grad_fn)  # or other replicas would wait for the first
    return there


def ignore_if_empty(nodes: Sequence[Any], weights: Sequence[Any]) -> None:
    """Replace the gradients of sums that are 0 / 0, on replicas whose weight is 0, by 0."""
    for node, weight in zip(nodes, weights, strict=False):
        if isinstance(weight, Tensor):
            node.register_prehook(functools.partial(_zero_where, weight == 0))


def _zero_where(is_empty: Tensor, gradients: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        g if g is None else g.masked_fill(is_empty.to(g.device) & ~g.isfinite(), 0)
        for g in gradients
    )


def total(tensors: Tensors, device: torch.device) -> Tensor:
    """Return the sum of tensors of one shape, on ``device``."""
    return functools.reduce(torch.add, moved(tensors, device))


def weighted_mean(
    tensors: Tensors, weights: Sequence[Any], device: torch.device, *, ignores_empty: bool = True
) -> Tensor:
    """Return the weighted mean of 0-dim tensors on ``device``.

    Args:
        tensors: a mean over each chunk.
        weights: for each, a number or a 0-dim tensor, which is not read: that would wait for its
            device.
        device: the device of the result.
        ignores_empty: whether those with the weight 0 are always ignored. If not, they are added as
            they are unless they are 0 / 0, since a count of 0 was replaced by 1 in their divisor.
    """
    means = torch.stack(moved(tensors, device))
    shares = torch.stack([_to_tensor(weight, device) for weight in weights]).double()
    total, is_empty = shares.sum(), shares == 0
    if not ignores_empty:
        means = means.masked_fill(is_empty & (total != 0) & means.isnan(), 0)
        total = total.where(total != 0, 1)
    means = means.masked_fill(is_empty, 0) if ignores_empty else means
    dtype = torch.promote_types(means.dtype, torch.float32)  # where no sum of counts overflows
    shares = shares.masked_fill(is_empty, 1).to(dtype) / total.to(dtype)
    return torch.dot(means.to(dtype), shares).to(means.dtype)


def _to_tensor(weight: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(weight, Tensor):
        return weight.to(device)
    return torch.full((), weight, device=device)  # other ways copy from the host, and wait
