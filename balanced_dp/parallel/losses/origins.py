"""Find out what a tensor was computed from, by its graph."""

from __future__ import annotations

import enum
import functools
import re
from typing import Any

from ...free_threading import looking_at_nodes

_SELECTIONS = {"Gather", "Index", "IndexSelect", "MaskedSelect", "Take"}
_LOOKUPS = {"Embedding", "EmbeddingBag"}
_PRODUCTS = {"Addmm", "Addmv", "Baddbmm", "Bmm", "Convolution", "Linear", "Mm", "Mv"}
"""Operators by the names of their autograd nodes, without the suffix ``Backward0``."""

_MAX_NODES = 64
"""The number of nodes after which a tensor is taken to depend on samples."""


class Origin(enum.Enum):
    """What a tensor was computed from."""

    SELECTED = "samples that were selected"
    SAMPLES = "samples"
    UNKNOWN = "parameters only, as far as its graph shows"


def origin_of(node: Any) -> Origin:
    """Return what the tensor of an autograd node was computed from.

    Samples are not nodes of the graph, but are seen where they meet parameters in a product, and
    where an index selects them.
    """
    nodes, seen = [node], set[Any]()
    with looking_at_nodes:
        while nodes and len(seen) <= _MAX_NODES:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            name = operator_name(node.name())
            parents = [parent for parent, _ in node.next_functions]
            if name in _SELECTIONS:
                return Origin.SELECTED
            if name in _LOOKUPS or (name in _PRODUCTS and None in parents):
                return Origin.SAMPLES
            nodes += parents
    return Origin.UNKNOWN


@functools.cache
def operator_name(name: str) -> str:
    """Return the name of an operator from that of its autograd node."""
    return re.sub(r"Backward(s|\d*)$", "", name.rpartition("::")[2])
