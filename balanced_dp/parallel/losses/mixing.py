"""Find operators that compute samples of a chunk from each other, by the shapes in the graph."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...free_threading import looking_at_nodes
from .graph import is_parameter, operator_name, shape_of

Pair = tuple[Sequence[int], Sequence[int]]
"""The shapes of a tensor on two replicas, or their numbers of samples."""

_GOES_ALONG = re.compile(r"(Log)?Softmax|Log[cC]umsumexp|Cum(sum|prod|max|min)|Sort|Flip|Roll")
"""Operators that compute entries along a dimension from each other, and keep its size."""

_SELECTS = re.compile(r"Select|Slice|Unbind|\w*Split\w*|Index\w*|MaskedSelect")
"""Operators with which code loops over samples, or selects some of them."""


def how_samples_mix(outputs: Iterable[tuple[Tensor, Tensor]], sizes: Sequence[int]) -> str:
    """Return how samples of a chunk are computed from each other, or "" if nothing shows it.

    Args:
        outputs: pairs of outputs with a graph of two replicas.
        sizes: their numbers of samples, which differ.
    """
    seen = set[Any]()
    # Up to its reductions, which are joined, a loss has the same shapes on both.
    stack: list[Any] = [
        ((one.grad_fn, other.grad_fn), (one.shape, other.shape), one.shape == other.shape)
        for one, other in outputs
    ]
    with looking_at_nodes:
        while stack:
            (node, other), shapes, is_loss = stack.pop()
            if node in seen or type(node) is not type(other) or is_parameter(node):
                continue
            seen.add(node)
            is_loss = is_loss and shapes[0] == shapes[1]
            inputs: list[Pair] = []
            for a, b in zip(node.next_functions, other.next_functions, strict=False):
                if a[0] is not None and b[0] is not None:
                    inputs.append((shape_of(*a), shape_of(*b)))
                    stack.append(((a[0], b[0]), inputs[-1], is_loss))
            is_custom = isinstance(node, BackwardCFunction) or node.name() == "CopySlices"
            how = "" if is_custom else _mixes(node, shapes, inputs, sizes, is_loss)
            if how:
                return f"{operator_name(node)} {how}"
    return ""


def _mixes(
    node: Any, shapes: Pair, inputs: Sequence[Pair], sizes: Sequence[int], is_loss: bool
) -> str:
    """Return how an operator computes samples from each other, by its shapes on two replicas."""
    (one, other), (n, m) = shapes, sizes
    name = operator_name(node)
    if one != other:
        pairs = (n * n, m * m), (n * (n - 1), m * (m - 1)), (n * (n - 1) // 2, m * (m - 1) // 2)
        if len(_axes(shapes, sizes)) > 1 or any(p in pairs for p in zip(one, other, strict=False)):
            return "computes a number for each pair of samples"
    elif is_loss:
        return ""
    elif any(_axes(pair, sizes) for pair in inputs) and not _SELECTS.fullmatch(name):
        return "reduces the samples of each chunk"
    dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    if dims is not None and _GOES_ALONG.fullmatch(name):
        along = {axis for pair in inputs for axis in _axes(pair, sizes)}
        for dim in dims if isinstance(dims, tuple) else (dims,):
            # torch reports negative ones as unsigned numbers.
            if (dim - 2**64 * (dim >= 2**63)) % len(one) in along:
                return "goes along the samples of each chunk"
    return ""


def _axes(shapes: Pair, sizes: Sequence[int]) -> list[int]:
    """Return the dimensions whose sizes follow the numbers of samples."""
    (one, other), (n, m) = shapes, sizes
    if one == other or len(one) != len(other):
        return []
    return [d for d, (a, b) in enumerate(zip(one, other, strict=True)) if a != b and a * m == b * n]
