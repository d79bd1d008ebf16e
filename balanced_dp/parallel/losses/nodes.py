"""Read the operator, shape and saved operands of the nodes of a graph."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from typing import Any

import torch

from .terms import Value

Edge = tuple[Any, int]
"""A node, and the index of one of its outputs, as in ``next_functions``."""

VIEWS = {
    *("Alias", "Clone", "ToCopy", "View", "ViewAs", "UnsafeView", "ReshapeAlias", "Squeeze"),
    *("Unsqueeze", "Expand", "Permute", "Transpose", "T", "Select", "Slice", "Unbind"),
}
"""Operators that do not change values, by their names without the suffix ``Backward0``."""

SELECTIONS = {"Gather", "Index", "IndexSelect", "MaskedSelect", "Take"}
"""Operators that select entries."""

LOOKUPS = {*SELECTIONS, "Embedding", "EmbeddingBag"}
"""Operators with indices, which are not nodes of the graph."""

_NEGATED = {("Sub", 1), ("Rsub", 0), ("Neg", 0)}
"""Operators and the positions of operands that they subtract."""

MATRIX_PRODUCTS = {"Addmm", "Baddbmm", "Bmm", "Mm", "Mv"}
DOT_PRODUCTS = {"Dot", "dot", "matmul"}
LEAVES = {"AccumulateGrad", "Broadcast"}
"""The nodes of parameters, and of their copies on other devices."""


def operator_of(edge: Edge) -> str:
    """Return the name of the operator that computed a tensor; ``data`` if there is no node."""
    return "data" if edge[0] is None else _without_suffix(edge[0].name())


@functools.cache
def _without_suffix(name: str) -> str:
    return re.sub(r"Backward(s|\d*)$", "", name.rpartition("::")[2])


def shape_of(edge: Edge) -> Any:
    """Return the shape of a tensor."""
    return edge[0]._input_metadata[edge[1]].shape


def dims_of(dims: Iterable[int], num_dims: int) -> tuple[int, ...]:
    """Return saved dimensions, counted from the first."""
    # Autograd saves a negative dimension as an unsigned number.
    signed = (dim - 2**64 if dim >= 2**63 else dim for dim in dims)
    return tuple(dim % max(1, num_dims) for dim in signed)


def factor_of(node: Any, position: int) -> float:
    """Return the factor of an operand of ``torch.add``, ``sub``, ``rsub`` or ``neg``."""
    operator = operator_of((node, 0))
    is_scaled = position == 1 or operator == "Rsub"
    factor = float(getattr(node, "_saved_alpha", 1)) if is_scaled else 1.0
    return -factor if (operator, position) in _NEGATED else factor


def value_of(saved: Any) -> Value:
    """Return a saved operand; as a number, if it was one."""
    if not isinstance(saved, torch.Tensor):
        return float(saved)
    if saved.device.type == "cpu" and not saved.dim() and _is_number(saved):
        return float(saved.item())
    return saved


def _is_number(tensor: torch.Tensor) -> bool:
    """Return whether an operator made a 0-dim tensor on the CPU from a Python number."""
    if tensor.dtype not in (torch.double, torch.long, torch.bool, torch.cdouble):
        return False
    # Type promotion lets a number yield to any tensor of its category, but not a 0-dim tensor.
    other = torch.half if tensor.is_floating_point() else torch.int8
    return torch.result_type(tensor, torch.empty((), dtype=other)) != tensor.dtype
