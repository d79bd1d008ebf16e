"""Find out where in the graph of a loss there are still entries for each sample.

The graphs of all replicas are compared: a tensor whose shape differs between replicas has entries
for samples, since chunks differ in size. If all chunks have the same size, all shapes are equal, so
the operators that computed the tensor are searched for reductions over the batch dimension.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .nodes import (
    LEAVES,
    LOOKUPS,
    MATRIX_PRODUCTS,
    SELECTIONS,
    Edge,
    dims_of,
    operator_of,
    shape_of,
)
from .terms import are_equal

_MAX_SEARCHED = 64
"""The number of nodes after which a tensor is taken to depend on data."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The entries of samples in the graphs of one loss.

    Methods take the same edge of the graph on each replica.

    Attributes:
        chunk_sizes: how many samples each replica had.
        dim: the batch dimension.
        counted: the nodes of counted cross entropies, which have reduced samples.

    ``_reduced`` are nodes that are known to have been reduced over the batch dimension.
    """

    chunk_sizes: Sequence[int]
    dim: int
    counted: Collection[Any]
    _reduced: set[Any] = field(default_factory=set, init=False)

    def are_in(self, edges: Sequence[Edge]) -> bool:
        """Return whether a tensor has entries for samples that nothing has joined yet."""
        shapes = [shape_of(edge) for edge in edges]
        if not are_equal(self.chunk_sizes):
            return any(shape != shapes[0] for shape in shapes)
        return bool(shapes[0]) and not self._is_reduced(edges[0]) and self._has_data(edges[0])

    def are_selected_in(self, edges: Sequence[Edge]) -> bool:
        """Return whether a tensor has entries for samples, or for some that were selected."""
        is_selection = operator_of(edges[0]) in SELECTIONS
        return self.are_in(edges) or (is_selection and self.are_behind(edges))

    def are_behind(self, edges: Sequence[Edge]) -> bool:
        """Return whether a tensor was computed from entries of samples."""
        routes, seen = [tuple(edges)], set()
        while routes:
            edges = routes.pop()
            node = edges[0][0]
            if any(edge[0] is None for edge in edges):
                if any(edge[0] is not None for edge in edges):
                    return True  # the replicas have computed it in different ways
                continue
            if node in seen or any(operator_of(edge) in LEAVES for edge in edges):
                continue
            seen.add(node)
            if any(edge[0] in self.counted for edge in edges) or self.are_in(edges):
                return True
            inputs = [edge[0].next_functions for edge in edges]
            if any(len(item) != len(inputs[0]) for item in inputs):
                return True
            routes += list(zip(*inputs, strict=True))
        return False

    def _is_reduced(self, edge: Edge) -> bool:
        """Return whether a tensor with dimensions was reduced over the batch dimension."""
        edges, visited = [edge], set()
        while edges:
            edge = edges.pop()
            node, operator = edge[0], operator_of(edge)
            if not shape_of(edge) or node in visited or node in self._reduced:
                continue
            visited.add(node)
            if operator in ("Sum", "Mean"):
                size = node._saved_self_sym_sizes
                dims = dims_of(getattr(node, "_saved_dim", None) or range(len(size)), len(size))
                dim = self.dim % len(size)
                if dim in dims and size[dim] % self.chunk_sizes[0] == 0:
                    continue
            followed = [edge for edge in node.next_functions if edge[0] is not None]
            if len(followed) > 1 and operator in ("Add", "Sub", "Mul", "Div"):
                followed = [edge for edge in followed if self._has_data(edge)]
            elif len(followed) != 1 and operator not in ("Stack", "Cat"):
                return False
            if not followed:
                return False
            edges += followed
        self._reduced.update(visited)
        return True

    def _has_data(self, edge: Edge) -> bool:
        """Return whether a tensor was computed from anything but parameters, or may have been."""
        edges, seen = [edge], set()
        while edges:
            edge = edges.pop()
            node, operator = edge[0], operator_of(edge)
            if operator in LEAVES or node in seen:
                leaf = getattr(node, "variable", None)
                if leaf is not None and not isinstance(leaf, nn.Parameter):
                    return True  # an input that requires a gradient
                continue
            seen.add(node)
            shape = shape_of(edge)
            inputs = [item for item in node.next_functions if item[0] is not None]
            if operator == "data":
                return bool(shape[self.dim % len(shape)] % self.chunk_sizes[0] == 0)
            is_partial = len(inputs) < len(node.next_functions)
            if not inputs or operator in LOOKUPS or len(seen) > _MAX_SEARCHED:
                return True
            is_product = operator in MATRIX_PRODUCTS
            if is_partial and (is_product or all(shape_of(item) != shape for item in inputs)):
                return True
            edges += inputs
        return False
