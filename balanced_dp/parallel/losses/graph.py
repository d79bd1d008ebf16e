"""Read from the autograd graph of a loss what it is a mean or a sum over."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .calls import Call, Calls
from .counted import MEAN, SUM, CountedLoss
from .terms import Scale, Term, Value, are_equal, are_proportional

Edge = tuple[Any, int]
"""A node of the graph, and which of its outputs is meant."""

_VIEWS = {
    *("Alias", "Clone", "ToCopy", "View", "ViewAs", "UnsafeView", "ReshapeAlias", "Squeeze"),
    *("Unsqueeze", "Expand", "Permute", "Transpose", "T", "Select", "Slice", "Unbind"),
}
"""Operators that change no value, without their suffix ``Backward0``."""

_SELECTIONS = {"Gather", "Index", "IndexSelect", "MaskedSelect", "Take"}
_LOOKUPS = {*_SELECTIONS, "Embedding", "EmbeddingBag"}
"""Operators whose indices are no nodes of the graph."""

_DOT_PRODUCTS = {"Dot", "dot", "matmul"}
_LEAVES = {"AccumulateGrad", "Broadcast"}


class UnclearError(Exception):
    """What a loss is a mean over cannot be told; the message says why."""


@dataclass(frozen=True, slots=True)
class _Reduction:
    is_mean: bool
    sizes: Sequence[torch.Size]
    """The shape on each replica before."""
    dims: tuple[int, ...]


_Route = tuple[Sequence[Edge], tuple[Scale, ...], tuple[_Reduction, ...]]
"""Where a walk is, and the operators between there and the loss."""


class LossGraph:
    """The graphs of one loss on all replicas, walked side by side.

    Args:
        chunk_sizes: how many samples each replica had.
        dim: their dimension.
        counted: for the node of each counted loss, that loss.
        calls: those that were noted, by their outputs' identities.
        whole_batch: the numbers and 0-dim tensors that every replica was given: what is divided by
            one of them is divided by the same for all.
        adds_up: whether sums are divided by what is the same for all, unless that is known.
        places: whether divisions of earlier graphs were by counts, or by what is the same for all.
    """

    def __init__(
        self,
        chunk_sizes: Sequence[int],
        dim: int,
        counted: Mapping[Any, CountedLoss],
        calls: Calls,
        whole_batch: Sequence[Any],
        adds_up: bool,
        places: dict[tuple[int, int], bool],
    ) -> None:
        self._chunk_sizes = chunk_sizes
        self._dim = dim
        self._counted = counted
        self._calls = calls
        self._adds_up = adds_up
        self._places = places
        self._is_even = len(set(chunk_sizes)) == 1
        self._whole_tensors = {id(item) for item in whole_batch if isinstance(item, torch.Tensor)}
        # A number that is also the size of a chunk tells nothing.
        numbers = [item for item in whole_batch if isinstance(item, int | float)]
        self._whole_numbers = set(numbers) - {True, *chunk_sizes}
        self.names: list[str] = []
        """The operators that were met, in order: what tells one kind of graph from another."""
        self.multipliers: list[Sequence[torch.Tensor]] = []
        """Tensors that it is multiplied by, which should be the same on every replica."""
        self.reasons: list[str] = []
        """Why the terms are not exact."""
        self.doubts: list[str] = []
        """Why they need not be."""

    def terms(self, nodes: Sequence[Any]) -> list[Term]:
        """Return the parts that add up to the loss whose node on each replica is given.

        What is no mean or sum over samples, or not known to be, is taken for a mean over samples,
        and the reason added to ``reasons``.
        """
        routes: list[_Route] = [([(node, 0) for node in nodes], (), ())]
        terms = []
        while routes:
            try:
                term = self._follow(routes.pop(), routes)
            except UnclearError as error:
                self.reasons.append(str(error))
                term = Term(self._chunk_sizes)
            if term is not None:
                terms.append(term)
        return terms

    def _follow(self, route: _Route, routes: list[_Route]) -> Term | None:
        """Return the term at the end of a route, or add the routes that go on to ``routes``."""
        edges, scales, reductions = route
        counted = [self._counted.get(node) for node, _ in edges]
        found = [item for item in counted if item is not None]
        if len(found) == len(edges):
            return self._counted_term(found, scales, reductions)
        operator = _operator(edges[0])
        self.names.append(operator)
        if operator in _LEAVES:
            return Term(is_constant=True)
        if any(_operator(edge) != operator for edge in edges):
            raise UnclearError(
                "the replicas computed it in different ways, by "
                + " and ".join(sorted({_operator(edge) for edge in edges}))
            )
        if self._holds_samples(edges):
            return self._sample_term(edges, scales, reductions)
        if not self._goes_on(operator, route, routes):
            if self._depends_on_samples(edges):
                if self._has_entries(edges):
                    return self._sample_term(edges, scales, reductions)
                return self._reduced_by_loss(operator, edges, scales)
            if isinstance(edges[0][0], torch.autograd.function.BackwardCFunction):
                raise UnclearError(f"it is computed by {operator}, which does not tell what from")
            return Term(is_constant=True)
        return None

    def _goes_on(self, operator: str, route: _Route, routes: list[_Route]) -> bool:
        """Add the routes through a linear operator, and return whether it is one."""
        edges, scales, reductions = route
        nodes = [node for node, _ in edges]
        inputs = list(zip(*(node.next_functions for node in nodes), strict=True))
        if operator in _VIEWS:
            routes.append((inputs[0], scales, reductions))
        elif operator == "Neg":
            routes.append((inputs[0], (*scales, Scale([-1.0] * len(nodes))), reductions))
        elif operator in ("Add", "Sub", "Rsub"):
            for position, edges in enumerate(inputs):
                if edges[0][0] is not None:
                    sign = -1.0 if operator == ("Sub", "Rsub")[position == 0] else 1.0
                    scale = Scale([sign * _alpha(node, position) for node in nodes])
                    routes.append((edges, (*scales, scale), reductions))
        elif operator in ("Stack", "Cat"):
            routes.extend(
                (edges, scales, reductions) for edges in inputs if edges[0][0] is not None
            )
        elif operator in ("Sum", "Mean"):
            sizes = [node._saved_self_sym_sizes for node in nodes]
            dims = getattr(nodes[0], "_saved_dim", None) or range(len(sizes[0]))
            reduction = _Reduction(operator == "Mean", sizes, _positive(dims, len(sizes[0])))
            routes.append((inputs[0], scales, (*reductions, reduction)))
        elif operator in ("Mul", "Div"):
            position, other = self._factor(operator, inputs)
            saved = "_saved_self" if other == 0 else "_saved_other"
            values = [_value(getattr(node, saved)) for node in nodes]
            is_constant = len(inputs) == 2 and inputs[other][0][0] is not None
            scale = Scale(values, operator == "Div", nodes, is_constant)
            routes.append((inputs[position], (*scales, scale), reductions))
        else:
            return False
        return True

    def _factor(self, operator: str, inputs: Sequence[Sequence[Edge]]) -> tuple[int, int]:
        """Return which operand of a product to follow, and which is the factor."""
        follows = [
            edges[0][0] is not None and (len(inputs) == 1 or self._depends_on_samples(edges))
            for edges in inputs
        ]
        if len(inputs) == 2 and follows[1] and (follows[0] or operator == "Div"):
            raise UnclearError(
                "it is the product of two means or sums"
                if operator == "Mul"
                else "it is divided by what has a gradient of its own"
            )
        if not any(follows):  # a constant, whichever is followed
            follows = [edges[0][0] is not None for edges in inputs]
        position = follows.index(True)
        return position, 1 - position

    def _counted_term(
        self,
        counted: Sequence[CountedLoss],
        scales: Sequence[Scale],
        reductions: Sequence[_Reduction],
    ) -> Term:
        self.names.append("counted")
        lengths = [[_numel(r, size) for size in r.sizes] for r in reductions if r.is_mean]
        scales = [*scales, *(Scale(length, divides=True) for length in lengths)]
        sizes = [float(item.size) for item in counted]
        divisors = [item.divisor for item in counted]
        counts = [item.count for item in counted]
        term = self._scaled(None if divisors[0] is None else divisors, sizes, scales)
        if any(one is not other for one, other in zip(divisors, counts, strict=True)):
            term.counts = counts, torch.clone
        if any(isinstance(v, torch.Tensor) and v.dim() for scale in scales for v in scale.values):
            raise UnclearError("it weighs several cross entropies by a vector")
        term.losses = [item.value for item in counted]
        return term

    def _sample_term(
        self, edges: Sequence[Edge], scales: Sequence[Scale], reductions: Sequence[_Reduction]
    ) -> Term:
        """Return the term of what has an entry for each sample, or for some of them."""
        if not reductions:
            raise UnclearError("it is an entry of a single sample")
        reduction = reductions[-1]
        sizes = [float(_numel(reduction, size)) for size in reduction.sizes]
        return self._scaled(sizes if reduction.is_mean else None, sizes, scales)

    def _reduced_by_loss(
        self, operator: str, edges: Sequence[Edge], scales: Sequence[Scale]
    ) -> Term:
        """Return the term of a loss function of torch, which has reduced what samples gave."""
        nodes = [node for node, _ in edges]
        inputs = zip(*(node.next_functions for node in nodes), strict=True)
        held = [i for i in inputs if i[0][0] is not None and self._has_entries(i)]
        reduction = getattr(nodes[0], "_saved_reduction", SUM * (operator in _DOT_PRODUCTS))
        if not held:
            raise UnclearError(f"it is not linear in means or sums over samples, but a {operator}")
        if reduction not in (MEAN, SUM):
            raise UnclearError(f"its samples are joined by {operator}")
        sizes: Sequence[Value] = [float(math.prod(_shape(edge))) for edge in held[0]]
        if reduction == SUM:
            return self._scaled(None, sizes, scales)
        if hasattr(nodes[0], "_saved_total_weight"):
            sizes = [node._saved_total_weight for node in nodes]
        return self._scaled(sizes, sizes, scales)

    def _scaled(
        self, weights: Sequence[Value] | None, sizes: Sequence[Value], scales: Sequence[Scale]
    ) -> Term:
        counts = None
        for position, scale in enumerate(scales):
            values, place = scale.values, (len(self.names), position)
            if any(isinstance(value, torch.Tensor) for value in values):
                if scale.is_constant or (scale.divides and self._is_whole(values, place)):
                    continue
                if not scale.divides:
                    self.multipliers.append([v for v in values if isinstance(v, torch.Tensor)])
                    continue
                if not all(isinstance(value, torch.Tensor) for value in values):
                    raise UnclearError("it is divided by a tensor in some chunks only")
                if any(value.dim() for value in values):
                    raise UnclearError("it is divided by a tensor with several entries")
                counts = self._counts(values, weights is not None)
                _guard(scale)
                if weights is not None:
                    values = [weight * value for weight, value in zip(weights, values, strict=True)]
                weights = values
            elif weights is None and self._is_count(scale, sizes, place):
                weights = values if scale.divides else [1 / value for value in values]
            elif weights is not None and self._is_chunk_size(scale, weights, place):
                weights = None
            elif not are_equal(values):
                raise UnclearError("it is scaled by a number that differs between the replicas")
        return Term(weights, scales, counts=counts)

    def _is_whole(self, values: Sequence[Value], place: tuple[int, int]) -> bool:
        """Return whether a denominator is the same for all replicas: it was given, or is kept."""
        if all(id(value) in self._whole_tensors for value in values):
            return True
        if self._calls:  # what is not computed from samples is the same everywhere
            calls = [self._calls.get(id(value)) for value in values]
            self._places[place] = None not in calls and self._is_of_samples(calls[0])
        return not self._places.get(place, not self._adds_up)

    def _is_of_samples(self, call: Call | None) -> bool:
        """Return whether a noted 0-dim tensor was computed from anything with dimensions."""
        calls, seen = [call], set()
        while calls:
            call = calls.pop()
            if call is not None and id(call) not in seen:
                seen.add(id(call))
                if call.operator == "data" or (call.operator in _LEAVES and call.shape):
                    return True
                calls += [item for item, _ in call.next_functions]
        return False

    def _counts(self, values: Sequence[Value], is_mean: bool) -> Any:
        """Return what the notes tell of denominators like ``mask.sum().clamp(min=1)``.

        Raises:
            UnclearError: they are not known to add up to the denominator of the whole batch.
        """
        calls = [self._calls.get(id(value)) for value in values]
        known = [call.without_views() for call in calls if call is not None]
        if len(known) < len(calls):
            return None
        if all(call.finish is not None for call in known) and not is_mean:
            return [call.made_of for call in known], known[0].finish
        operator = known[0].operator
        if operator not in (("Mean",) if is_mean else ("Sum", "count_nonzero")):
            raise UnclearError(f"it is divided by a {operator}, which need not add up")
        return None

    def _is_count(self, scale: Scale, sizes: Sequence[Value], place: tuple[int, int]) -> bool:
        """Return whether a sum is divided by how much was added up in each chunk."""
        numbers = [v if scale.divides else 1 / v if v else 0.0 for v in scale.values]
        number, chunk_size = numbers[0], self._chunk_sizes[0]
        if all(size == n for size, n in zip(sizes, numbers, strict=True)):
            self._places[place] = True
        elif not are_equal(numbers):
            if 1 in numbers and not are_proportional(numbers, self._chunk_sizes):
                self.doubts.append(
                    "it is divided by 1 in a chunk, which may stand for a count of 0; divide by "
                    "the tensor mask.sum().clamp(min=1)"
                )
            self._places[place] = True
        elif number in self._whole_numbers:
            return False
        elif not self._is_even:
            self._places.setdefault(place, False)
        elif place not in self._places:
            # Not half of the sum, where chunks have two samples, nor the size of the whole batch.
            is_multiple = number % chunk_size == 0 and number != sum(self._chunk_sizes)
            return number >= 1 and is_multiple and (scale.divides or chunk_size > 2)
        return self._places[place]

    def _is_chunk_size(
        self, scale: Scale, weights: Sequence[Value], place: tuple[int, int]
    ) -> bool:
        """Return whether a mean is multiplied by what it is over."""
        values = scale.values
        if scale.divides:
            return False
        if not are_equal(values):
            self._places[place] = are_proportional(values, weights)
        elif self._is_even and place not in self._places and values[0] == self._chunk_sizes[0] > 1:
            self.doubts.append(
                f"it is multiplied by {values[0]:g}, which is also the number of samples in each "
                "chunk, and is taken for a constant"
            )
        return self._places.get(place, False)

    def _has_entries(self, edges: Sequence[Edge]) -> bool:
        """Return whether a tensor has entries for samples, or for those that were selected."""
        is_selection = _operator(edges[0]) in _SELECTIONS
        return self._holds_samples(edges) or (is_selection and self._depends_on_samples(edges))

    def _holds_samples(self, edges: Sequence[Edge]) -> bool:
        """Return whether a tensor has entries for samples, so that nothing has joined them yet."""
        shapes = [_shape(edge) for edge in edges]
        if not self._is_even:
            return any(shape != shapes[0] for shape in shapes)
        # All shapes are alike, so the operators have to tell.
        return bool(shapes[0]) and not self._is_reduced(edges[0]) and self._has_data(edges[0])

    def _is_reduced(self, edge: Edge) -> bool:
        """Return whether a tensor with dimensions was reduced over the samples, of even chunks."""
        while True:
            node, operator = edge[0], _operator(edge)
            if operator == "Stack":
                return all(n is None or not _shape((n, i)) for n, i in node.next_functions)
            if operator in ("Sum", "Mean"):
                size = node._saved_self_sym_sizes
                dims = _positive(node._saved_dim or range(len(size)), len(size))
                dim = self._dim % len(size)
                if dim in dims and size[dim] % self._chunk_sizes[0] == 0:
                    return True
            followed = [edge for edge in node.next_functions if edge[0] is not None]
            if len(followed) > 1 and operator in ("Add", "Sub", "Mul", "Div"):
                with_data = [edge for edge in followed if self._has_data(edge)]
                return bool(with_data) and all(map(self._is_reduced, with_data))
            if len(followed) != 1:
                return False
            edge = followed[0]

    def _has_data(self, edge: Edge) -> bool:
        """Return whether anything but parameters is in a tensor, as far as can be told."""
        edges, seen = [edge], set()
        while edges:
            edge = edges.pop()
            node, operator = edge[0], _operator(edge)
            if operator in _LEAVES or node in seen:
                leaf = getattr(node, "variable", None)
                if leaf is not None and not isinstance(leaf, nn.Parameter):
                    return True  # an input that requires a gradient
                continue
            seen.add(node)
            shape = _shape(edge)
            inputs = [item for item in node.next_functions if item[0] is not None]
            if operator == "data":
                return bool(shape[self._dim % len(shape)] % self._chunk_sizes[0] == 0)
            hidden = len(inputs) < len(node.next_functions)
            if not inputs or operator in _LOOKUPS or len(seen) > 64:
                return True
            if hidden and all(_shape(item) != shape for item in inputs):
                return True
            edges += inputs
        return False

    def _depends_on_samples(self, edges: Sequence[Edge]) -> bool:
        """Return whether samples are anywhere behind these edges."""
        routes, seen = [tuple(edges)], set()
        while routes:
            edges = routes.pop()
            node = edges[0][0]
            if any(edge[0] is None for edge in edges):
                if any(edge[0] is not None for edge in edges):
                    return True  # the replicas have computed it in different ways
                continue
            if node in seen or any(_operator(edge) in _LEAVES for edge in edges):
                continue
            seen.add(node)
            if any(edge[0] in self._counted for edge in edges) or self._holds_samples(edges):
                return True
            inputs = [edge[0].next_functions for edge in edges]
            if any(len(item) != len(inputs[0]) for item in inputs):
                return True
            routes += list(zip(*inputs, strict=True))
        return False


def _operator(edge: Edge) -> str:
    return "data" if edge[0] is None else _operator_named(edge[0].name())


@functools.cache
def _operator_named(name: str) -> str:
    return re.sub(r"Backward(s|\d*)$", "", name.rpartition("::")[2])


def _shape(edge: Edge) -> Any:
    return edge[0]._input_metadata[edge[1]].shape


def _positive(dims: Iterable[int], num_dims: int) -> tuple[int, ...]:
    # Autograd keeps a negative dimension as an unsigned number.
    signed = (dim - 2**64 if dim >= 2**63 else dim for dim in dims)
    return tuple(dim % max(1, num_dims) for dim in signed)


def _numel(reduction: _Reduction, size: torch.Size) -> int:
    return math.prod(size[dim] for dim in reduction.dims)


def _alpha(node: Any, position: int) -> float:
    """Return what ``torch.add`` and its kind multiply an operand by."""
    is_scaled = position == 1 or _operator((node, 0)) == "Rsub"
    return float(getattr(node, "_saved_alpha", 1)) if is_scaled else 1.0


def _value(saved: Any) -> Value:
    """Return a saved operand; a number of Python is one again."""
    if not isinstance(saved, torch.Tensor):
        return float(saved)
    if saved.device.type == "cpu" and not saved.dim() and is_number(saved):
        return float(saved.item())
    return saved


def is_number(tensor: torch.Tensor) -> bool:
    """Return whether a 0-dim tensor on the CPU was made of a number by an operator."""
    # A number gives way to any tensor of its kind, a 0-dim tensor to none of less precision.
    other = torch.half if tensor.is_floating_point() else torch.int8
    return torch.result_type(tensor, torch.empty((), dtype=other)) != tensor.dtype


def _guard(scale: Scale) -> None:
    """Let no 0 / 0 of a chunk in which nothing counts into the gradients."""
    for node, count in zip(scale.nodes, scale.values, strict=True):
        if hasattr(node, "register_hook"):
            node.register_hook(functools.partial(_without_nan, count))


def _without_nan(count: Any, grad_inputs: Any, grad_outputs: Any) -> Any:
    first, *rest = grad_inputs
    return (None if first is None else first.masked_fill(count == 0, 0), *rest)
