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
from ..copies import Broadcast
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
        adds_number: whether an operator adds a number, or a tensor without a graph.
        has_rows: whether a reduction is over a tensor with a row for each sample.
        inputs: of an operator, the positions, output numbers and parts of its inputs.
        gradients: on each replica, the derivatives of the loss with respect to its outputs.
        others: on the first replica, those with respect to inputs that lead to no reduction.
    """

    nodes: Nodes
    kind: str = ""
    counts: Sequence[Any] = ()
    counted: Sequence[Counted] = ()
    adds_number: bool = False
    has_rows: bool = False
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


def parts_of(
    losses: Sequence[Tensor], sizes: Sequence[int], dim: int, counted: Mapping[Any, Counted]
) -> list[Part]:
    """Return the operators and reductions of a loss, each after those that use it.

    Args:
        losses: the loss of each replica.
        sizes: their chunk sizes.
        dim: the batch dimension.
        counted: cross entropies by their nodes.

    Raises:
        UnclearError: the replicas differ, or an operator cannot be asked for its derivative.
    """
    with looking_at_nodes:
        parts = _walk(tuple(loss.grad_fn for loss in losses), sizes, dim, counted)
        for loss in losses if parts else ():
            ones = torch.ones_like(loss.detach())
            parts[0].gradients.append([None] * loss.output_nr + [ones])
        for part in parts:
            if not part.kind:
                _differentiate(part)
    return parts


def _walk(
    root: Nodes, sizes: Sequence[int], dim: int, counted: Mapping[Any, Counted]
) -> list[Part]:
    """Return the parts that lead to reductions, from the loss on."""
    found: dict[Any, tuple[Part, list[tuple[int, int, Nodes]]]] = {}
    done: dict[Any, Part] = {}
    stack = [root]
    while stack:
        nodes = stack[-1]
        if nodes[0] not in found:
            found[nodes[0]] = own = _part(nodes, sizes, dim, counted)
            stack += [inputs for _, _, inputs in own[1]]
            continue
        stack.pop()
        part, edges = found[nodes[0]]
        if part.nodes != nodes:
            raise UnclearError(UNLIKE)
        if nodes[0] not in done:
            done[nodes[0]] = part
            children = [(i, number, found[inputs[0]][0]) for i, number, inputs in edges]
            part.inputs = [child for child in children if child[2].kind or child[2].inputs]
    return [part for part in reversed(done.values()) if part.kind or part.inputs]


def _part(
    nodes: Nodes, sizes: Sequence[int], dim: int, counted: Mapping[Any, Counted]
) -> tuple[Part, list[tuple[int, int, Nodes]]]:
    """Return a part, and the positions, output numbers and nodes of an operator's inputs."""
    first = nodes[0]
    if all(node in counted for node in nodes):
        own = [counted[node] for node in nodes]
        return Part(nodes, own[0].kind, [one.count for one in own], own), []
    if all(node is first for node in nodes) or any(is_parameter(node) for node in nodes):
        return Part(nodes), []
    edges = [node.next_functions for node in nodes]
    forms = {
        (node.name(), *(None if c is None else "" if is_parameter(c) else n for c, n in own))
        for node, own in zip(nodes, edges, strict=True)
    }
    if len(forms) > 1:
        raise UnclearError(UNLIKE)
    part, outer, inputs = Part(nodes), [shape_of(node) for node in nodes], []
    for position, group in enumerate(zip(*edges, strict=True)):
        if group[0][0] is None:
            part.adds_number |= part.name in ("Add", "Sub", "Rsub")
            continue
        inputs.append((position, group[0][1], tuple(node for node, _ in group)))
        inner = [shape_of(*edge) for edge in group]
        if _have_samples(inner, sizes, dim) and not _have_samples(outer, sizes, dim):
            if _is_stack(group[0][0]):
                continue
            counts = [math.prod(a) // math.prod(b) for a, b in zip(inner, outer, strict=True)]
            has_rows = -len(inner[0]) <= dim < len(inner[0]) and inner[0][dim] == sizes[0]
            return Part(nodes, _kind_of(first), counts, has_rows=has_rows), []
    return part, inputs


def _have_samples(shapes: Sequence[Sequence[int]], sizes: Sequence[int], dim: int) -> bool:
    """Return whether tensors of these shapes hold samples, or a number for each of them.

    With chunks of one size, it is supposed of tensors whose batch dimension is a multiple.
    """
    shape = shapes[0]
    if len(set(sizes)) > 1 or any(other != shape for other in shapes):
        return any(other != shape for other in shapes)
    return -len(shape) <= dim < len(shape) and shape[dim] % sizes[0] == 0


def _is_stack(node: Any) -> bool:
    """Return whether a tensor holds numbers, such as several losses."""
    is_joined = operator_name(node) in ("Stack", "Cat")
    return is_joined and all(c and math.prod(shape_of(c, n)) == 1 for c, n in node.next_functions)


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
    if is_custom(part.nodes[0]):
        raise UnclearError(f"it uses the custom function {part.name}")
    used = {position for position, _, _ in part.inputs}
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
            part.others = [g for i, g in enumerate(found) if g is not None and i not in used]


def depends_on(gradient: Tensor, parts: Iterable[Part]) -> bool:
    """Return whether a derivative on the first replica was computed from one of the parts."""
    within = {part.nodes[0] for part in parts}
    stack, seen = list[Any]([gradient.grad_fn]), set[Any]([None])
    with looking_at_nodes:
        while stack:
            node = stack.pop()
            if node in within:
                return True
            if node not in seen:
                seen.add(node)
                stack += [child for child, _ in node.next_functions]
    return False


def shape_of(node: Any, number: int = 0) -> Sequence[int]:
    """Return the shape of an output of the operator of a node."""
    shape: Sequence[int] = node._input_metadata[number].shape
    return shape


def is_parameter(node: Any) -> bool:
    """Return whether a node stands for a parameter, or its copies on a device."""
    return node.name().endswith("AccumulateGrad") or isinstance(node, Broadcast._backward_cls)


def is_custom(node: Any) -> bool:
    """Return whether a node runs somebody's code, or stands for a write into a view."""
    return isinstance(node, BackwardCFunction) or node.name() == "CopySlices"


def operator_name(node: Any) -> str:
    """Return the name of an operator from its autograd node."""
    return re.sub(r"Backward(s|\d*)$", "", node.name().rpartition("::")[2])


def _saved(node: Any) -> list[Any]:
    """Return the tensors that a node has saved, packed."""
    cls: Any = type(node)
    found = [getattr(node, name) for name in _saved_names(cls)]
    return [one for own in found for one in (own if isinstance(own, tuple | list) else [own])]


@functools.cache
def _saved_names(cls: Any) -> Sequence[str]:
    return [name for name in dir(cls) if name.startswith("_raw_saved_")]
