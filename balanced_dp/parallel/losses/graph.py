r"""Read from autograd which means and sums over samples a loss is made of.

A loss is followed from its node to the ones where the samples disappear, its *reductions*:

    loss  <-  add  <-  div by 2  <-  mean  <- ...      numbers up to the mean and the sum,
                  \                                     (n_i, C) behind them, for n_i samples
                   neg  <-  sum  <- ...

On the way they may only be added up and multiplied by Python's numbers. These are read on the host,
so no call waits for a device, and nobody's code runs again. The graphs of the replicas are followed
side by side, as they are alike but for the number of samples.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
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

_KEEPS = re.compile(r"Clone|ToCopy|Alias|(Unsafe)?View|\w*Reshape\w*|(Un)?[sS]queeze")
"""Operators that keep the entries of a tensor."""


_MASKS = re.compile(rf"Mul|Div|Neg|Sum|Where|MaskedFill|{_KEEPS.pattern}")
"""Operators that multiply or select entries, and operators that may follow them before a sum."""

UNLIKE = "the replicas computed it in different ways, such as by a branch or loop"


class UnclearError(Exception):
    """It is not known how a loss depends on its samples; the message says why."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a loss: a mean or a sum over samples, times a number.

    Attributes:
        factors: the number that multiplies the term on each replica.
        is_scaled: whether a number or a tensor multiplies or divides it.
        scales: a tensor of each replica that also multiplies it, computed from parameters.
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

    def times(self, *numbers: float) -> Term:
        """Return the term multiplied by a number, or by one for each replica."""
        every = numbers * (len(self.factors) // len(numbers))
        return replace(self, factors=[a * b for a, b in zip(self.factors, every, strict=True)])

    def values(self) -> list[Tensor]:
        """Return the values of cross entropies, times their factors."""
        scales: Sequence[Any] = self.scales or [1] * len(self.own)
        parts = zip(self.own, self.factors, scales, strict=True)
        return [own.value * factor * scale for own, factor, scale in parts]


def terms_of(
    losses: Sequence[Tensor],
    sizes: Sequence[int],
    dim: int,
    counted: Mapping[Any, Counted],
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
            if len({_form(node) for node in nodes}) > 1:
                raise UnclearError(UNLIKE)
            if None in nodes or _are_one(nodes):
                found.append(term)
            elif all(node in counted for node in nodes):
                found.append(of_counted([counted[node] for node in nodes], term))
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


def _form(node: Any) -> str | None:
    """Return the form of a node, to compare the replicas."""
    return node and ("weight" if is_parameter(node) else operator_name(node))


def of_counted(own: Sequence[Counted], term: Term) -> Term:
    """Return a term that is a cross entropy of each replica.

    Raises:
        UnclearError: it is not the same one on each.
    """
    if len({one.position for one in own}) > 1:
        raise UnclearError(UNLIKE)
    return replace(term, kind=own[0].kind, own=own)


def _counts(edges: Edges, sizes: Sequence[int], dim: int) -> list[int]:
    """Return over how many entries each replica reduces its samples; empty if it does not."""
    inputs = [[edge for edge in node.next_functions if edge[0]] for node, _ in edges]
    if not all(inputs):
        return []
    outer, inner = [shape_of(*edge) for edge in edges], [shape_of(*own[0]) for own in inputs]
    if (
        _is_stack(inputs[0][0][0])
        or _have_samples(outer, sizes, dim)
        or not _have_samples(inner, sizes, dim)
    ):
        return []
    return [math.prod(a) // (math.prod(b) or 1) for a, b in zip(inner, outer, strict=True)]


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
        if nodes[0] in seen or _are_one(nodes) or any(map(is_parameter, nodes)):
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


def _are_one(nodes: Sequence[Any]) -> bool:
    """Return whether the replicas share a node, such as a loss that was joined before."""
    return nodes.count(nodes[0]) == len(nodes)


def _kind_of(node: Any) -> str:
    """Return ``"mean"`` or ``"sum"`` for the node of a reduction over all samples alike."""
    name = operator_name(node)
    kind = ("", "mean", "sum")[getattr(node, "_saved_reduction", 0)]
    if name in ("Mean", "Sum"):
        kind = name.lower()
    if name == "Squeeze":
        raise UnclearError(
            "squeeze() removes the batch dimension of a chunk of one sample, use squeeze(-1)"
        )
    # A cross entropy that was not counted is over an unknown number of targets.
    if not kind or hasattr(node, "_saved_ignore_index"):
        raise UnclearError(f"it uses {name}, which is neither a mean nor a sum over samples")
    return kind


def _inputs(
    nodes: Sequence[Any], term: Term, sizes: Sequence[int], dim: int
) -> list[tuple[Edges, Term]]:
    """Return the inputs of an operator, and the terms that they are."""
    name = operator_name(nodes[0])
    if len({len(node.next_functions) for node in nodes}) > 1:
        raise UnclearError(UNLIKE)
    inputs: list[Edges] = list(zip(*(node.next_functions for node in nodes), strict=True))
    if name in ("Stack", "Cat", "Sum") or _KEEPS.fullmatch(name):
        return [(edges, term) for edges in inputs]
    if name == "Neg":
        return [(inputs[0], term.times(-1))]
    if name == "Mean":
        share = math.prod(shape_of(nodes[0])) / (math.prod(shape_of(*inputs[0][0])) or 1)
        return [(inputs[0], term.times(share))]
    if name not in ("Add", "Sub", "Rsub", "Mul", "Div"):
        raise UnclearError(f"it uses {name} on means or sums")
    num_entries = math.prod(shape_of(nodes[0]))
    if any(c and math.prod(shape_of(c, i)) != num_entries for c, i in nodes[0].next_functions):
        raise UnclearError(f"it uses {name} of tensors that differ in size")
    if name in ("Add", "Sub", "Rsub"):
        scaled = term.times(getattr(nodes[0], "_saved_alpha", 1) * (1 if name == "Add" else -1))
        terms = (scaled, term) if name == "Rsub" else (term, scaled)
        return list(zip(inputs, terms, strict=False))
    if name == "Mul" and all(edges[0][0] for edges in inputs) and num_entries == 1:
        for value, scale, saved in ((0, 1, "_saved_other"), (1, 0, "_saved_self")):
            if _is_of_weights(inputs[scale], sizes, dim) and not term.scales:
                scales = [getattr(node, saved).reshape(()) for node in nodes]
                return [(inputs[value], replace(term, is_scaled=True, scales=scales))]
    if [bool(edges[0][0]) for edges in inputs] == [True, False]:
        others = [node._saved_other for node in nodes]
        if all(map(_is_number, others)):
            numbers = [float(other) for other in others]
            inverse = [1 / (number or math.nan) for number in numbers]
            scaled = term.times(*(numbers if name == "Mul" else inverse))
            return [(inputs[0], replace(scaled, is_scaled=True))]
        if name == "Div" and not term.divisors and all(other.numel() == 1 for other in others):
            return [(inputs[0], replace(term, is_scaled=True, divisors=others))]
    raise UnclearError(f"it uses {name}, but not by a number")


def _is_number(saved: object) -> bool:
    """Return whether autograd saved one of Python's numbers, which has no say in the type."""
    if not isinstance(saved, Tensor):
        return saved is not None
    dtype = torch.half if saved.is_floating_point() else torch.int8
    return torch.result_type(saved, torch.ones((), dtype=dtype)) == dtype


def masks_behind(nodes: Sequence[Any], sizes: Sequence[int], dim: int) -> list[list[Tensor]]:
    """Return tensors of samples that multiply or select the entries of a sum on each replica."""
    found = list(zip(*map(_masks_behind, nodes), strict=False))
    return [[*own] for own in found if _have_samples([m.shape for m in own], sizes, dim)]


def _masks_behind(node: Any) -> list[Tensor]:
    masks = []
    while inputs := [child for child, _ in node.next_functions if child is not None]:
        node = inputs[0]
        if len(inputs) > 1 or not _MASKS.fullmatch(operator_name(node)):
            break
        saved = [getattr(node, f"_saved_{name}", None) for name in ("self", "other", "condition")]
        masks += [one for one in saved if isinstance(one, Tensor) and not one.requires_grad]
        if hasattr(node, "_saved_mask"):
            masks.append(~node._saved_mask)
    return masks


def storage_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the storage and shape of a tensor, to find tensors of the same entries."""
    storage = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return *storage, tuple(tensor.shape), tensor.stride()


def are_equal(numbers: Sequence[float]) -> bool:
    """Return whether numbers differ by no more than rounding."""
    return all(math.isclose(number, numbers[0], rel_tol=1e-9) for number in numbers)


def are_ones(numbers: Sequence[float]) -> bool:
    """Return whether numbers are 1 or -1, all but for rounding."""
    return are_equal([*map(abs, numbers), 1.0])


def shape_of(node: Any, number: int = 0) -> Sequence[int]:
    """Return the shape of an output of the operator of a node."""
    shape: Sequence[int] = node._input_metadata[number].shape
    return shape


def operator_name(node: Any) -> str:
    """Return the name of an operator from its autograd node."""
    return re.sub(r"Backward(s|\d*)$", "", node.name().rpartition("::")[2])


def is_parameter(node: Any) -> bool:
    """Return whether a node stands for a parameter, or its copies on a device."""
    return node.name().endswith("AccumulateGrad") or isinstance(node, Broadcast._backward_cls)
