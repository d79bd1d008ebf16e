r"""Read from autograd which means and sums over samples a loss is made of.

A loss is followed from its node to the ones where the samples disappear, its *reductions*:

    loss  <-  add  <-  div by 2  <-  mean  <- ...      numbers up to the mean and the sum,
                  \                                     (n_i, C) behind them, for n_i samples
                   neg  <-  sum  <- ...

On the way they may only be added up and multiplied by Python's numbers. These are read on the host,
so no call waits for a device, and nobody's code runs again. The graphs of the replicas are followed
side by side, as they are alike but for the number of samples.

Beyond the reductions, ``how_samples_mix`` looks for operators that compute samples of a chunk from
each other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...free_threading import looking_at_nodes
from ..copies import Broadcast
from .cross_entropy import Counted

Edges = Sequence[tuple[Any, int]]
"""For each replica, a node and the number of one of its outputs."""

_KEEPS = re.compile(r"Clone|ToCopy|Alias|(Unsafe)?View|\w*Reshape\w*|(Un)?[sS]queeze|Stack|Cat|Sum")
"""Operators whose inputs are added up, or that keep the entries of a tensor."""

Pair = tuple[Sequence[int], Sequence[int]]
"""The shapes of a tensor on two replicas, or their numbers of samples."""

_GOES_ALONG = re.compile(r"(Log)?Softmax|Log[cC]umsumexp|Cum(sum|prod|max|min)|Sort|Flip|Roll")
"""Operators that compute entries along a dimension from each other, and keep its size."""

_SELECTS = re.compile(r"Select|Slice|Unbind|\w*Split\w*|Index\w*|MaskedSelect")
"""Operators with which code loops over samples, or selects some of them."""

UNLIKE = "the replicas computed it in different ways, such as by a branch or loop"


class UnclearError(Exception):
    """It is not known how a loss depends on its samples; the message says why."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a loss: a mean or a sum over samples, times a number.

    Attributes:
        factors: the number that multiplies the term on each replica.
        is_scaled: whether a number or a tensor multiplies or divides it.
        scales: a 0-dim tensor of each replica, computed from parameters, that also multiplies it.
        divisors: a 0-dim tensor of each replica, without a graph, that also divides it.
        kind: ``"mean"``, ``"sum"``, or "" if it does not depend on samples.
        counts: how many entries it reduces on each replica: numbers, or 0-dim tensors.
        nodes: its node on each replica.
        own: its cross entropy on each replica; empty if it is another term.
    """

    factors: Sequence[float]
    is_scaled: bool = False
    scales: Sequence[Tensor] = ()
    divisors: Sequence[Tensor] = ()
    kind: str = ""
    counts: Sequence[Any] = ()
    nodes: Sequence[Any] = ()
    own: Sequence[Counted] = ()

    def times(self, numbers: Sequence[float]) -> Term:
        """Return the term multiplied by a number on each replica."""
        return replace(self, factors=[a * b for a, b in zip(self.factors, numbers, strict=True)])


def terms_of(
    losses: Sequence[Tensor], sizes: Sequence[int], dim: int, counted: Mapping[Any, Counted]
) -> list[Term]:
    """Return the terms of which a loss is the sum.

    Args:
        losses: the loss of each replica.
        sizes: their chunk sizes.
        dim: the batch dimension.
        counted: cross entropies by their nodes.

    Raises:
        UnclearError: a loss is not such a sum.
    """
    if any(loss.grad_fn is None for loss in losses):
        raise UnclearError("it has no graph (for an accuracy, return a row for each sample)")
    found = []
    start: Edges = [(loss.grad_fn, loss.output_nr) for loss in losses]
    stack = [(start, Term([1.0] * len(losses)))]
    with looking_at_nodes:
        while stack:
            edges, term = stack.pop()
            nodes = [node for node, _ in edges]
            if None in nodes or _are_of_no_sample(nodes):
                found.append(term)
            elif len({operator_name(node) for node in nodes}) > 1:
                raise UnclearError(UNLIKE)
            elif all(node in counted for node in nodes):
                own = [counted[node] for node in nodes]
                if len({one.position for one in own}) > 1:
                    raise UnclearError(UNLIKE)
                counts = [one.count for one in own]
                found.append(replace(term, kind=own[0].kind, counts=counts, own=own))
            elif counts := _counts(edges, sizes, dim):
                found.append(replace(term, kind=_kind_of(nodes[0]), counts=counts, nodes=nodes))
            else:
                try:
                    stack += _inputs(nodes, term, sizes, dim)
                except UnclearError:
                    if not _is_of_weights(edges, sizes, dim):
                        raise
                    found.append(term)
    return found


def _counts(edges: Edges, sizes: Sequence[int], dim: int) -> list[int]:
    """Return over how many entries each replica reduces its samples; empty if it does not."""
    inputs = [[edge for edge in node.next_functions if edge[0]] for node, _ in edges]
    if not all(inputs):
        return []
    outer, inner = [shape_of(*edge) for edge in edges], [shape_of(*own[0]) for own in inputs]
    is_even = len(set(sizes)) == 1
    reducer = _reducer(edges[0][0], sizes[0], dim) if is_even else None
    has_samples = [_have_samples(shapes, sizes, dim) for shapes in (inner, outer)]
    if _is_stack(inputs[0][0][0]) or (reducer is None and has_samples != [True, False]):
        return []
    if reducer not in (None, edges[0][0]):
        return []
    if dim and is_even and sizes[0] in outer[0]:
        raise UnclearError("chunks of one size do not show which dimension holds the samples")
    return [math.prod(a) // (math.prod(b) or 1) for a, b in zip(inner, outer, strict=True)]


def _reducer(node: Any, size: int, dim: int) -> Any:
    """Return the operator that has reduced a dimension of the chunk size, as ``mean(0)`` does.

    It is looked for before a node, beyond operators that keep the shape. Where there is one, a size
    that is left may be a multiple of the chunk size by chance.
    """
    first = node
    while node is not None and node.next_functions and node.next_functions[0][0]:
        inner = shape_of(*node.next_functions[0])
        dims = [d % len(inner) for d in dims_of(node) if inner]
        if dims and operator_name(node) in ("Mean", "Sum"):
            if size in inner[dim:][:1]:
                return node if dim % len(inner) in dims else None
            if size in [inner[d] for d in dims]:
                return node
        elif node is not first and inner != shape_of(node):
            return None
        node, _ = node.next_functions[0]
    return None


def _is_stack(node: Any) -> bool:
    """Return whether a tensor holds numbers, such as several losses."""
    is_joined = operator_name(node) in ("Stack", "Cat")
    return is_joined and all(
        not c or math.prod(shape_of(c, n)) == 1 for c, n in node.next_functions
    )


def _have_samples(shapes: Sequence[Sequence[int]], sizes: Sequence[int], dim: int) -> bool:
    """Return whether tensors of these shapes hold samples, or a number for each of them.

    With chunks of one size, it is supposed of tensors whose batch dimension is a multiple.
    """
    shape = shapes[0]
    if len(set(sizes)) > 1 or any(other != shape for other in shapes):
        return any(other != shape for other in shapes)
    return -len(shape) <= dim < len(shape) and shape[dim] % sizes[0] == 0


def _is_of_weights(edges: Edges, sizes: Sequence[int], dim: int) -> bool:
    """Return whether a value is computed from parameters and numbers alone, as a penalty is."""
    stack, seen = [edges], set[Any]()
    while stack:
        edges = stack.pop()
        nodes = [node for node, _ in edges]
        if nodes[0] in seen or _are_of_no_sample(nodes):
            continue
        seen.add(nodes[0])
        inputs = list(zip(*(node.next_functions for node in nodes), strict=False))
        # Samples have no graph themselves, and a custom function hides what it uses.
        has_others = any(child is None for edges in inputs for child, _ in edges)
        is_scaled = operator_name(nodes[0]) in ("Mul", "Div") and _is_number(nodes[0]._saved_other)
        hides_samples = any(isinstance(node, BackwardCFunction) for node in nodes)
        if hides_samples or (has_others and not is_scaled):
            return False
        if _have_samples([shape_of(*edge) for edge in edges], sizes, dim):
            return False
        stack += [edges for edges in inputs if edges[0][0]]
    return True


def _is_scale(edges: Edges, sizes: Sequence[int], dim: int) -> bool:
    """Return whether a value is a number that is computed from parameters."""
    is_number = edges[0][0] is not None and not shape_of(*edges[0])
    return is_number and _is_of_weights(edges, sizes, dim)


def _are_of_no_sample(nodes: Sequence[Any]) -> bool:
    """Return whether nodes are parameters, or one that the replicas share."""
    return nodes.count(nodes[0]) == len(nodes) or all(map(is_parameter, nodes))


def _kind_of(node: Any) -> str:
    """Return ``"mean"`` or ``"sum"`` for the node of a reduction over all samples alike."""
    name = operator_name(node)
    kind = ("", "mean", "sum")[getattr(node, "_saved_reduction", 0)]
    if name in ("Mean", "Sum"):
        kind = name.lower()
    # A cross entropy that was not counted is over an unknown number of targets.
    if not kind or hasattr(node, "_saved_ignore_index"):
        raise UnclearError(
            f"it uses {name}, which is neither a mean nor a sum over samples"
            + " (of a row, use squeeze(-1))" * (name == "Squeeze")
        )
    return kind


def _inputs(
    nodes: Sequence[Any], term: Term, sizes: Sequence[int], dim: int
) -> list[tuple[Edges, Term]]:
    """Return the inputs of an operator, and the terms that they are."""
    name = operator_name(nodes[0])
    if len({len(node.next_functions) for node in nodes}) > 1:
        raise UnclearError(UNLIKE)
    inputs: list[Edges] = list(zip(*(node.next_functions for node in nodes), strict=True))
    if name in ("Add", "Sub", "Rsub"):
        num_entries = math.prod(shape_of(nodes[0]))
        if any(c and math.prod(shape_of(c, i)) != num_entries for c, i in nodes[0].next_functions):
            raise UnclearError(f"it uses {name} of tensors that differ in size")
        alpha = getattr(nodes[0], "_saved_alpha", 1) * (1 if name == "Add" else -1)
        scaled = term.times([alpha] * len(nodes))
        return list(zip(inputs, (scaled, term) if name == "Rsub" else (term, scaled), strict=False))
    if name in ("Mul", "Div"):
        term = replace(term, is_scaled=True)
        others = [node._saved_other for node in nodes]
        if name == "Div" and not term.divisors and all(map(_is_divisor, others)):
            return [(inputs[0], replace(term, divisors=others))]
    if name == "Mul" and len(inputs) == 2:
        for value, scale, saved in ((0, 1, "_saved_other"), (1, 0, "_saved_self")):
            if not term.scales and _is_scale(inputs[scale], sizes, dim):
                scales = [getattr(node, saved) for node in nodes]
                return [(inputs[value], replace(term, scales=scales))]
    term = term.times([_number_of(node) for node in nodes])
    return [(edges, term) for edges in inputs if edges[0][0]]


def _number_of(node: Any) -> float:
    """Return the number by which an operator multiplies its inputs."""
    name = operator_name(node)
    if name in ("Mul", "Div"):
        if not _is_number(node._saved_other):
            raise UnclearError(f"it uses {name}, but not by a number")
        number = float(node._saved_other)
        return number if name == "Mul" else 1 / (number or math.nan)
    if name == "Mean":
        return math.prod(shape_of(node)) / (math.prod(shape_of(*node.next_functions[0])) or 1)
    if name != "Neg" and not _KEEPS.fullmatch(name):
        raise UnclearError(f"it uses {name} on means or sums")
    return -1.0 if name == "Neg" else 1.0


def masks_behind(nodes: Sequence[Any], sizes: Sequence[int], dim: int) -> list[Tensor]:
    """Return the tensor of samples that multiplies or selects the entries of a sum, if any."""
    masks = []
    for node in nodes:
        behind, _ = node.next_functions[0]
        saved = [getattr(behind, f"_saved_{name}", None) for name in ("other", "self", "condition")]
        masks += [one for one in saved if isinstance(one, Tensor) and not one.requires_grad][:1]
    shapes = [mask.shape for mask in masks]
    return masks if len(masks) == len(sizes) and _have_samples(shapes, sizes, dim) else []


def _is_divisor(saved: object) -> bool:
    """Return whether autograd saved a number of a device, which has no graph."""
    is_one = isinstance(saved, Tensor) and saved.numel() == 1 and not saved.requires_grad
    return is_one and not _is_number(saved)


def _is_number(saved: object) -> bool:
    """Return whether autograd saved one of Python's numbers, which has no say in the type."""
    if not isinstance(saved, Tensor):
        return saved is not None
    dtype = torch.half if saved.is_floating_point() else torch.int8
    return torch.result_type(saved, torch.ones((), dtype=dtype)) == dtype


def are_equal(numbers: Sequence[float]) -> bool:
    """Return whether numbers differ by no more than rounding."""
    return all(math.isclose(number, numbers[0], rel_tol=1e-9) for number in numbers)


def shape_of(node: Any, number: int = 0) -> Sequence[int]:
    """Return the shape of an output of the operator of a node."""
    shape: Sequence[int] = node._input_metadata[number].shape
    return shape


def operator_name(node: Any) -> str:
    """Return the name of an operator from its autograd node."""
    return re.sub(r"Backward(s|\d*)$", "", node.name().rpartition("::")[2])


def dims_of(node: Any) -> Sequence[int]:
    """Return the dimensions along which an operator goes; negative ones count from the end."""
    dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    dims = dims if isinstance(dims, tuple) else (dims,)
    # torch reports negative ones as unsigned numbers.
    return [dim - 2**64 * (dim >= 2**63) for dim in dims if dim is not None]


def is_parameter(node: Any) -> bool:
    """Return whether a node stands for a parameter, or its copies on a device."""
    return node.name().endswith("AccumulateGrad") or isinstance(node, Broadcast._backward_cls)


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
    along = {axis for pair in inputs for axis in _axes(pair, sizes)}
    if _GOES_ALONG.fullmatch(name) and along.intersection(d % len(one) for d in dims_of(node)):
        return "goes along the samples of each chunk"
    return ""


def _axes(shapes: Pair, sizes: Sequence[int]) -> list[int]:
    """Return the dimensions whose sizes follow the numbers of samples."""
    (one, other), (n, m) = shapes, sizes
    if one == other or len(one) != len(other):
        return []
    return [d for d, (a, b) in enumerate(zip(one, other, strict=True)) if a != b and a * m == b * n]
