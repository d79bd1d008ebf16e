"""Find the terms of a loss in its graph.

The graphs of all replicas are walked side by side, from the loss towards the samples. The walk
follows linear operators: additions lead to several terms, reductions and scales are collected on
the way. It ends at a counted cross entropy, or at a tensor that still has entries for samples. The
last reduction and the scales determine whether the term is a mean or a sum, and over how many
entries. If an operator is not linear, the term is taken for a mean over samples, and the reason is
kept for a warning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...torch_versions import has_unpack_hook
from .calls import BATCHMEAN
from .counted import MEAN, SUM, CountedLoss
from .denominators import UnclearError
from .nodes import (
    DOT_PRODUCTS,
    LEAVES,
    VIEWS,
    Edge,
    dims_of,
    factor_of,
    operator_of,
    shape_of,
    value_of,
)
from .samples import Samples
from .scales import Scaling
from .terms import Denominator, Scale, Term, Value, are_equal


@dataclass(frozen=True, slots=True)
class _Reduction:
    """A mean or sum over some dimensions.

    Attributes:
        is_mean: whether it is a mean.
        sizes: the shape of its input on each replica.
        dims: the dimensions.
    """

    is_mean: bool
    sizes: Sequence[torch.Size]
    dims: tuple[int, ...]

    def num_entries(self) -> list[float]:
        """Return how many entries are reduced to one, on each replica."""
        return [float(math.prod(size[dim] for dim in self.dims)) for size in self.sizes]


_Route = tuple[Sequence[Edge], tuple[Scale, ...], tuple[_Reduction, ...]]
"""The edge on each replica that a walk has reached, and the operators from there to the loss."""


@dataclass(slots=True, eq=False)
class LossGraph:
    """The graphs of one loss on all replicas, walked side by side.

    Attributes:
        nodes: the node or call of the loss on each replica; None if there is none.
        counted: the counted cross entropies, by their nodes.
        samples: finds the entries of samples.
        scaling: finds the scales that count entries.
        names: the names of the operators that were met, in order.
        reasons: why terms are not exact.
        adds_constant: whether something without a graph is added, such as a number.
    """

    nodes: Sequence[Any]
    counted: Mapping[Any, CountedLoss]
    samples: Samples
    scaling: Scaling
    names: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    adds_constant: bool = False

    def terms(self) -> list[Term]:
        """Return the terms that add up to the loss.

        A term that is not known to be a mean or a sum over samples is taken for a mean, and the
        reason is added to ``reasons``.
        """
        routes: list[_Route] = [([(node, 0) for node in self.nodes], (), ())]
        terms = []
        while routes:
            try:
                term = self._follow(routes.pop(), routes)
            except UnclearError as error:
                self.reasons.append(str(error))
                term = Term(self.samples.chunk_sizes)
            if term is not None:
                terms.append(term)
        return terms

    def _follow(self, route: _Route, routes: list[_Route]) -> Term | None:
        """Return the term at the end of a route, or add to ``routes`` those that lead on."""
        edges, scales, reductions = route
        counted = [self.counted.get(node) for node, _ in edges]
        found = [item for item in counted if item is not None]
        if len(found) == len(edges):
            return self._counted_term(found, scales, reductions)
        operator = operator_of(edges[0])
        self.names.append(operator)
        if operator in LEAVES:
            return Term(is_constant=True)
        if any(operator_of(edge) != operator for edge in edges):
            raise UnclearError(
                "the replicas computed it in different ways, by "
                + " and ".join(sorted({operator_of(edge) for edge in edges}))
            )
        if self.samples.are_in(edges):
            return self._sample_term(edges, scales, reductions)
        if not self._lead_on(operator, route, routes):
            if self.samples.are_behind(edges):
                if self.samples.are_selected_in(edges):
                    return self._sample_term(edges, scales, reductions)
                return self._reduced_by_loss(operator, edges, scales)
            if isinstance(edges[0][0], torch.autograd.function.BackwardCFunction):
                raise UnclearError(f"it is computed by {operator}, whose inputs are not known")
            return Term(is_constant=True)
        return None

    def _lead_on(self, operator: str, route: _Route, routes: list[_Route]) -> bool:
        """Add the routes through an operator to ``routes``, and return whether it is linear."""
        edges, scales, reductions = route
        nodes = [node for node, _ in edges]
        inputs = list(zip(*(node.next_functions for node in nodes), strict=True))
        if operator in VIEWS or operator in ("Stack", "Cat"):
            routes.extend(
                (edges, scales, reductions) for edges in inputs if edges[0][0] is not None
            )
        elif operator in ("Add", "Sub", "Rsub", "Neg"):
            self.adds_constant |= any(edges[0][0] is None for edges in inputs)
            for position, edges in enumerate(inputs):
                if edges[0][0] is not None:
                    factors = [factor_of(node, position) for node in nodes]
                    own = () if set(factors) == {1.0} else (Scale(factors),)
                    routes.append((edges, (*scales, *own), reductions))
        elif operator in ("Sum", "Mean"):
            sizes = [node._saved_self_sym_sizes for node in nodes]
            dims = getattr(nodes[0], "_saved_dim", None) or range(len(sizes[0]))
            reduction = _Reduction(operator == "Mean", sizes, dims_of(dims, len(sizes[0])))
            routes.append((inputs[0], scales, (*reductions, reduction)))
        elif operator in ("Mul", "Div"):
            position, other = self._factor(operator, inputs)
            name = "self" if other == 0 else "other"
            if has_unpack_hook(nodes[0], name):
                raise UnclearError(
                    "it is multiplied or divided by a tensor inside a checkpoint, or under "
                    "saved_tensors_hooks"
                )
            values = [value_of(getattr(node, f"_saved_{name}")) for node in nodes]
            is_constant = len(inputs) == 2 and inputs[other][0][0] is not None
            scale = Scale(values, operator == "Div", nodes, is_constant)
            routes.append((inputs[position], (*scales, scale), reductions))
        else:
            return False
        return True

    def _factor(self, operator: str, inputs: Sequence[Sequence[Edge]]) -> tuple[int, int]:
        """Return the positions of the operand of a product to follow, and of the factor."""
        follows = [
            edges[0][0] is not None and (len(inputs) == 1 or self.samples.are_behind(edges))
            for edges in inputs
        ]
        if len(inputs) == 2 and follows[1] and (follows[0] or operator == "Div"):
            raise UnclearError(
                "it is the product of two means or sums"
                if operator == "Mul"
                else "it is divided by a tensor that requires a gradient"
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
        """Return the term of a counted cross entropy."""
        self.names.append("counted")
        means = [reduction for reduction in reductions if reduction.is_mean]
        scales = [*scales, *(Scale(mean.num_entries(), divides=True) for mean in means)]
        if not are_equal([item.num_classes for item in counted]):
            raise UnclearError("the classes of its cross entropy are the samples of each chunk")
        sizes = [float(item.size) for item in counted]
        divisors = [item.divisor for item in counted]
        counts = [item.count for item in counted]
        term = self._scaled_term(None if divisors[0] is None else divisors, sizes, scales)
        if any(one is not other for one, other in zip(divisors, counts, strict=True)):
            term.denominator = Denominator(counts)
        if any(isinstance(v, torch.Tensor) and v.dim() for scale in scales for v in scale.values):
            raise UnclearError("it weighs several cross entropies by a vector")
        term.losses = [item.value for item in counted]
        return term

    def _sample_term(
        self, edges: Sequence[Edge], scales: Sequence[Scale], reductions: Sequence[_Reduction]
    ) -> Term:
        """Return the term of a tensor with an entry for each sample, or for some of them."""
        if not reductions:
            raise UnclearError("it is an entry of a single sample")
        sizes = reductions[-1].num_entries()
        return self._scaled_term(sizes if reductions[-1].is_mean else None, sizes, scales)

    def _reduced_by_loss(
        self, operator: str, edges: Sequence[Edge], scales: Sequence[Scale]
    ) -> Term:
        """Return the term of a loss function of torch, which has reduced the entries itself."""
        nodes = [node for node, _ in edges]
        inputs = zip(*(node.next_functions for node in nodes), strict=True)
        held = [i for i in inputs if i[0][0] is not None and self.samples.are_selected_in(i)]
        reduction = getattr(nodes[0], "_saved_reduction", SUM * (operator in DOT_PRODUCTS))
        if not held:
            raise UnclearError(f"it is not linear in means or sums over samples, but a {operator}")
        if reduction not in (MEAN, SUM, BATCHMEAN):
            raise UnclearError(f"its samples are joined by {operator}")
        sizes: Sequence[Value] = [float(math.prod(shape_of(edge))) for edge in held[0]]
        if reduction == BATCHMEAN:
            scales = [*scales, Scale([float(shape_of(edge)[0]) for edge in held[0]], divides=True)]
        if reduction != MEAN:
            return self._scaled_term(None, sizes, scales)
        if hasattr(nodes[0], "_saved_total_weight"):
            sizes = [node._saved_total_weight for node in nodes]
        return self._scaled_term(sizes, sizes, scales)

    def _scaled_term(
        self, weights: Sequence[Value] | None, sizes: Sequence[Value], scales: Sequence[Scale]
    ) -> Term:
        # The names identify the scales; without any, it would take long to copy them for each term.
        return self.scaling.term(weights, sizes, scales, tuple(self.names) if scales else ())
