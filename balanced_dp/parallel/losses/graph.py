r"""Read from autograd how the loss of each replica depends on means and sums over its samples.

The graphs of the replicas are walked side by side, from the loss towards the samples. They are
alike but for the dimension of the samples. Where it disappears, a *reduction* ends the walk:

    loss  <-  add  <-  div  <-  sum  <-  mul  <- ...     without samples up to the sum and the mean;
                  \                                       behind them (n_i, C), where chunk i has
                   mul  <-  mean  <- ...                  n_i samples

There are few operators between a loss and its reductions, and their inputs are small. Each is asked
for its derivative, so that the derivative of the loss with respect to each reduction is known. One
that was itself computed from a reduction says that the loss is not linear in it.

Nodes are called and not run by the engine, so nobody's hooks are. Where a custom function is on the
way, or tensors that a checkpoint would compute again, the walk ends with an UnclearError.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...free_threading import looking_at_nodes
from ..parameter_copies import Broadcast
from .cross_entropy import Counted

Nodes = tuple[Any, ...]
"""The same node of the graph of each replica."""

UNLIKE = "the replicas computed it in different ways, as by a branch or a loop over samples"


class UnclearError(Exception):
    """It is not known how a loss depends on its samples; the message says why."""


@dataclass(slots=True, eq=False)
class Part:
    """A reduction, an operator between the loss and its reductions, or what leads to none.

    Attributes:
        nodes: its node on each replica.
        kind: ``"mean"`` or ``"sum"`` of a reduction, or "".
        counts: over how many entries a reduction is on each replica: numbers, or 0-dim tensors.
        counted: the cross entropies, if it is one that was counted.
        has_rows: whether a reduction is over a tensor with a row for each sample.
        adds_number: whether an operator adds a number, or a tensor without a graph.
        edges: of an operator, the positions, output numbers and nodes of its inputs.
        inputs: the same of those that lead to reductions, with parts in place of nodes.
        gradients: on each replica, the derivatives of the loss with respect to its outputs.
        others: on the first replica, those with respect to inputs that lead to no reduction.
    """

    nodes: Nodes
    kind: str = ""
    counts: Sequence[Any] = ()
    counted: Sequence[Counted] = ()
    has_rows: bool = False
    adds_number: bool = False
    edges: list[tuple[int, int, Nodes]] = field(default_factory=list)
    inputs: list[tuple[int, int, Part]] = field(default_factory=list)
    gradients: list[list[Any]] = field(default_factory=list)
    others: list[Tensor] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the operator."""
        return operator_name(self.nodes[0])

    def gradient(self, replica: int) -> Tensor:
        """Return the derivatives of a replica's loss as a vector."""
        known = [one.reshape(-1) for one in self.gradients[replica] if one is not None]
        return torch.cat(known)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The chunk size of each replica in a call, and the batch dimension."""

    sizes: Sequence[int]
    dim: int

    def vary(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Return whether tensors of these shapes hold samples, or a number for each of them.

        With chunks of one size, it is supposed of tensors whose batch dimension is a multiple.
        """
        shape, size = shapes[0], self.sizes[0]
        if len(set(self.sizes)) > 1 or any(other != shape for other in shapes):
            return any(other != shape for other in shapes)
        return -len(shape) <= self.dim < len(shape) and shape[self.dim] % size == 0


def parts_of(
    losses: Sequence[Tensor], chunks: Chunks, counted: Mapping[Any, Counted]
) -> list[Part]:
    """Return the operators and reductions of a loss, each after those that use it.

    Args:
        losses: the loss of each replica.
        chunks: their chunks.
        counted: cross entropies by their nodes.

    Raises:
        UnclearError: the replicas differ, or an operator cannot be asked for its derivative.
    """
    with looking_at_nodes:
        parts = _walk(tuple(loss.grad_fn for loss in losses), chunks, counted)
        for loss in losses if parts else ():
            ones = torch.ones_like(loss.detach())
            parts[0].gradients.append([None] * loss.output_nr + [ones])
        for part in parts:
            if not part.kind:
                _differentiate(part)
    return parts


def _walk(root: Nodes, chunks: Chunks, counted: Mapping[Any, Counted]) -> list[Part]:
    found: dict[Any, Part] = {}
    done: dict[Any, Part] = {}
    stack = [root]
    while stack:
        nodes = stack[-1]
        part = found.get(nodes[0])
        if part is None:
            part = found[nodes[0]] = _part(nodes, chunks, counted)
            stack += [inputs for _, _, inputs in part.edges]
            continue
        stack.pop()
        if part.nodes != nodes:
            raise UnclearError(UNLIKE)
        if nodes[0] in done:
            continue
        done[nodes[0]] = part
        for position, number, inputs in part.edges:
            child = found[inputs[0]]
            if child.kind or child.inputs:
                part.inputs.append((position, number, child))
    return [part for part in reversed(done.values()) if part.kind or part.inputs]


def _part(nodes: Nodes, chunks: Chunks, counted: Mapping[Any, Counted]) -> Part:
    first = nodes[0]
    if all(node in counted for node in nodes):
        own = [counted[node] for node in nodes]
        return Part(nodes, own[0].kind, [one.count for one in own], own)
    if all(node is first for node in nodes) or any(_is_parameter(node) for node in nodes):
        return Part(nodes)
    edges = [node.next_functions for node in nodes]
    forms = {
        (node.name(), *(None if c is None else "" if _is_parameter(c) else n for c, n in own))
        for node, own in zip(nodes, edges, strict=True)
    }
    if len(forms) > 1:
        raise UnclearError(UNLIKE)
    shapes, part = [_shape(node) for node in nodes], Part(nodes)
    for position, group in enumerate(zip(*edges, strict=True)):
        inputs, number = tuple(node for node, _ in group), group[0][1]
        if inputs[0] is None:
            part.adds_number |= part.name in ("Add", "Sub", "Rsub")
            continue
        part.edges.append((position, number, inputs))
        inner = [_shape(*edge) for edge in group]
        if chunks.vary(inner) and not chunks.vary(shapes) and not _is_stack(inputs[0]):
            counts = [math.prod(a) // math.prod(b) for a, b in zip(inner, shapes, strict=True)]
            dim, shape = chunks.dim, inner[0]
            has_rows = -len(shape) <= dim < len(shape) and shape[dim] == chunks.sizes[0]
            return Part(nodes, _kind_of(first), counts, has_rows=has_rows)
    return part


def _is_stack(node: Any) -> bool:
    """Return whether a tensor holds numbers, such as several losses."""
    is_joined = operator_name(node) in ("Stack", "Cat")
    return is_joined and all(c and math.prod(_shape(c, n)) == 1 for c, n in node.next_functions)


def _kind_of(node: Any) -> str:
    """Return ``"mean"`` or ``"sum"`` for the node of a reduction over all samples alike."""
    name = operator_name(node)
    kind = ("", "mean", "sum")[getattr(node, "_saved_reduction", 0)]
    if name in ("Mean", "Sum"):
        kind = name.lower()
    # A cross entropy that was not counted is over an unknown number of targets.
    if not kind or hasattr(node, "_saved_ignore_index"):
        raise UnclearError(f"it uses {name}, which is neither a mean nor a sum over samples")
    return kind


def _differentiate(part: Part) -> None:
    """Add the derivative of the loss by way of this operator to those of its inputs."""
    if _is_custom(part.nodes[0]):
        raise UnclearError(f"it uses the custom function {part.name}")
    for replica, node in enumerate(part.nodes):
        gradients = part.gradients[replica]
        missing = [None] * (len(node._input_metadata) - len(gradients))
        if any(getattr(saved, "unpack_hook", None) for saved in _saved(node)):
            raise UnclearError("a checkpoint would compute it again")
        try:
            found = node(*gradients, *missing)
        except RuntimeError as error:  # a tensor that it needs was written to, for example
            raise UnclearError(str(error).partition("\n")[0]) from None
        found = list(found) if isinstance(found, tuple) else [found]
        for position, number, child in part.inputs:
            if not child.gradients:
                child.gradients = [[None] * len(one._input_metadata) for one in child.nodes]
            known, new = child.gradients[replica], found[position]
            known[number] = new if known[number] is None else known[number] + new
        if replica == 0:
            used = {position for position, _, _ in part.inputs}
            part.others = [g for i, g in enumerate(found) if g is not None and i not in used]


def depends_on(gradient: Tensor, parts: Iterable[Part]) -> bool:
    """Return whether a derivative on the first replica was computed from one of the parts."""
    within = {part.nodes[0] for part in parts}
    stack, seen = [gradient.grad_fn], set[Any]([None])
    with looking_at_nodes:
        while stack:
            node = stack.pop()
            if node in within:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                stack += [child for child, _ in node.next_functions]
    return False


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
            if node in seen or _is_parameter(node) or node.name() != other.name():
                continue
            seen.add(node)
            is_loss = is_loss and shapes[0] == shapes[1]
            inputs = []
            for a, b in zip(node.next_functions, other.next_functions, strict=False):
                if a[0] is not None and b[0] is not None:
                    inputs.append((_shape(*a), _shape(*b)))
                    stack.append(((a[0], b[0]), inputs[-1], is_loss))
            how = "" if _is_custom(node) else _mixes(node, shapes, inputs, sizes, is_loss)
            if how:
                return f"{operator_name(node)} {how}"
    return ""


def _mixes(
    node: Any,
    shapes: tuple[Sequence[int], Sequence[int]],
    inputs: Sequence[tuple[Sequence[int], Sequence[int]]],
    sizes: Sequence[int],
    is_loss: bool,
) -> str:
    """Return how an operator computes samples from each other, by its shapes on two replicas."""
    (one, other), (n, m) = shapes, sizes
    along = {axis for pair in inputs for axis in _axes(*pair, sizes)}
    lengths = [pair for pair in zip(one, other, strict=False) if pair[0] != pair[1]]
    if (
        len(_axes(one, other, sizes)) > 1
        or any(pair in ((n * n, m * m), (n * (n - 1), m * (m - 1))) for pair in lengths)
        or (along and operator_name(node) == "Pdist")
    ):
        return "computes a number for each pair of samples"
    if along and one == other and not is_loss and not _SELECTS.fullmatch(operator_name(node)):
        return "reduces the samples of each chunk"
    if along and _GOES_ALONG.fullmatch(operator_name(node)):
        dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", ()))
        for dim in dims if isinstance(dims, tuple) else (dims,):
            # torch reports negative ones as unsigned numbers.
            if (dim - 2**64 * (dim >= 2**63)) % len(one) in along:
                return "goes along the samples of each chunk"
    return ""


def _axes(one: Sequence[int], other: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the dimensions whose sizes follow the numbers of samples."""
    if one == other or len(one) != len(other):
        return []
    n, m = sizes
    return [d for d, (a, b) in enumerate(zip(one, other, strict=True)) if a != b and a * m == b * n]


def _shape(node: Any, number: int = 0) -> Sequence[int]:
    shape: Sequence[int] = node._input_metadata[number].shape
    return shape


def _is_parameter(node: Any) -> bool:
    """Return whether a node stands for a parameter, or its copies on a device."""
    return node.name().endswith("AccumulateGrad") or isinstance(node, Broadcast._backward_cls)


def _is_custom(node: Any) -> bool:
    return isinstance(node, BackwardCFunction) or node.name() == "CopySlices"


def _saved(node: Any) -> list[Any]:
    """Return the tensors that a node has saved, packed."""
    cls: Any = type(node)
    found = [getattr(node, name) for name in _saved_names(cls)]
    return [one for own in found for one in (own if isinstance(own, tuple | list) else [own])]


@functools.cache
def _saved_names(cls: Any) -> Sequence[str]:
    return [name for name in dir(cls) if name.startswith("_raw_saved_")]


def operator_name(node: Any) -> str:
    """Return the name of an operator from its autograd node."""
    return re.sub(r"Backward(s|\d*)$", "", node.name().rpartition("::")[2])
