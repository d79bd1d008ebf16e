"""Find out what a tensor was computed from, by its graph."""

from __future__ import annotations

import enum
import functools
import re
from typing import Any

from ...free_threading import looking_at_nodes

_SELECTIONS = {"Gather", "Index", "IndexSelect", "MaskedSelect", "Take"}
_LOOKUPS = {"Embedding", "EmbeddingBag"}
_PARTS = {"Select", "Slice", "Split", "SplitWithSizes", "Unbind"}
_PRODUCTS = {"Addmm", "Addmv", "Baddbmm", "Bmm", "Convolution", "Linear", "Mm", "Mv"}
"""Operators by the names of their autograd nodes, without the suffix ``Backward0``."""

_MAX_NODES = 64
"""The number of nodes that are looked at before the origin is taken to be unknown."""


class Origin(enum.Enum):
    """What a tensor was computed from."""

    ONE = "an entry of the first dimension, which has as many as there are samples"
    SELECTED = "samples that were selected"
    SAMPLES = "samples"
    UNKNOWN = "parameters only, as far as its graph shows"


def origin_of(node: Any, chunk_size: int) -> Origin:
    """Return what the tensor of an autograd node was computed from.

    Samples are not nodes of the graph, but are seen where they meet parameters in a product, and
    where an index selects them, or one of ``chunk_size``.
    """
    nodes, seen, origin = [node], set[Any](), Origin.UNKNOWN
    with looking_at_nodes:
        while nodes and len(seen) <= _MAX_NODES:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            name = operator_name(node.name())
            parents = [parent for parent, _ in node.next_functions]
            if _takes_one(node, name, chunk_size):
                return Origin.ONE
            if name in _SELECTIONS:
                origin = Origin.SELECTED  # and perhaps of one of them
            elif name in _LOOKUPS or (name in _PRODUCTS and None in parents):
                origin = Origin.SAMPLES if origin is Origin.UNKNOWN else origin
                continue
            nodes += parents
    return origin


def _takes_one(node: Any, name: str, size: int) -> bool:
    """Return whether a node takes one of ``size`` entries, or some: ``x[i]``, ``for row in x``."""
    if name not in _PARTS or node._saved_dim != 0:
        return False
    if name == "Unbind":
        return len(node._input_metadata) == size
    is_part = name != "Slice" or node._saved_end - node._saved_start < size
    return bool(is_part and node._saved_self_sym_sizes[0] == size)


@functools.cache
def operator_name(name: str) -> str:
    """Return the name of an operator from that of its autograd node."""
    return re.sub(r"Backward(s|\d*)$", "", name.rpartition("::")[2])
