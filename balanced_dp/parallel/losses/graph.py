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

import contextlib
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ...free_threading import looking_at_nodes
from ..copies import Broadcast
from .cross_entropy import REDUCTIONS, Counted

Edges = Sequence[tuple[Any, int]]
"""For each replica, a node and the number of one of its outputs."""

_KEEPS = re.compile(r"Clone|ToCopy|Alias|(Unsafe)?View|\w*Reshape\w*|(Un)?[sS]queeze|Stack|Cat|Sum")
"""Operators whose inputs are added up, or that keep the entries of a tensor."""

_GOES_ALONG = re.compile(r"(Log)?Softmax|Log[cC]umsumexp|Cum(sum|prod|max|min)|Sort|Flip|Roll")
"""Operators that compute entries along a dimension from each other, and keep its size."""

_OF_WEIGHTS = re.compile(
    rf"{_KEEPS.pattern}|Add|Sub|Rsub|Mul|Div|Neg|Abs|Pow|Sqrt|Exp|Log\w*|Reciprocal|Clamp\w*|Sigmoid"
    r"|Tanh|Relu|Hardtanh|Softplus|Softmax|Mean|Std|Var|A?(Max|max|Min|min)|Norm|Linalg\w+|MseLoss"
    r"|\w*[dD]ist\w*|Mm|Bmm|Mv|Dot|T|Transpose|Permute|Select|Slice|Diagonal|Trace|Tril|Triu"
)
"""Operators of penalties and learned factors. No tensor of samples is hidden in them."""

_SCALES = re.compile(rf"{_KEEPS.pattern}|Neg|Mul|Div")
"""Operators that may multiply all entries of a tensor by a number."""

_SELECTS = re.compile(r"Select|Slice|Unbind|\w*Split\w*|Index\w*|MaskedSelect")
"""Operators with which code loops over samples, or selects some of them."""

_MAX_BEHIND = 16
"""How many operators to look at behind one that reduces entries."""


class UnclearError(Exception):
    """It is not known how a loss depends on its samples; the message says why."""


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a loss: a mean or a sum over samples, times a number.

    Attributes:
        factors: the number that multiplies the term on each replica.
        numbers: the numbers by which operators multiply it on the first replica, means left out.
        scales: tensors of each replica, from parameters or arguments, that also multiply it.
        divisors: a tensor of each replica, with one entry and no graph, that also divides it.
        multipliers: such a tensor that also multiplies it.
        kind: ``"mean"``, ``"sum"``, or ``"weights"`` if it is computed from parameters alone.
        counts: how many entries it reduces on each replica; empty for a cross entropy.
        nodes: its node on each replica; empty for a cross entropy.
        own: its cross entropy on each replica; empty if it is another term.
    """

    factors: Sequence[float]
    numbers: Sequence[float] = ()
    scales: Sequence[Sequence[Tensor]] = ()
    divisors: Sequence[Tensor] = ()
    multipliers: Sequence[Tensor] = ()
    kind: str = "weights"
    counts: Sequence[int] = ()
    nodes: Sequence[Any] = ()
    own: Sequence[Counted] = ()


def terms_of(
    losses: Sequence[Tensor], sizes: Sequence[int], dim: int, counted: Mapping[Any, Counted]
) -> list[Term]:
    """Return the terms of which a loss is the sum, without numbers that have no graph.

    Args:
        losses: the loss of each replica.
        sizes: their chunk sizes.
        dim: the batch dimension.
        counted: cross entropies by their nodes.

    Raises:
        UnclearError: a loss is not such a sum.
    """
    if any(loss.grad_fn is None for loss in losses):
        raise UnclearError("it has no graph")
    found, has_number = list[Term](), False
    start: Edges = [(loss.grad_fn, loss.output_nr) for loss in losses]
    stack = [(start, Term([1.0] * len(losses)))]
    with looking_at_nodes:
        while stack:
            edges, term = stack.pop()
            nodes = [node for node, _ in edges]
            if not any(term.factors):
                continue  # multiplied by 0, as parameters that must have a gradient
            if not any(nodes):
                has_number = True  # most often the 0 that a loop starts from
            elif all(map(is_parameter, nodes)):
                found.append(term)
            elif len({node and (node.name(), len(node.next_functions)) for node in nodes}) > 1:
                raise UnclearError("the replicas computed it differently, as by a branch or loop")
            elif all(node in counted for node in nodes):
                own = [counted[node] for node in nodes]
                found.append(replace(term, kind=own[0].kind, own=own))
            elif not (counts := _counts(edges, sizes, dim)) and (inputs := _inputs(nodes, term)):
                stack += inputs
            elif _is_of_weights(edges):
                found.append(term)
            elif counts:
                kind = _kind_of(nodes[0])
                if kind == "sum" and len({*sizes}) == 1 and _is_of_weights(edges, or_like=True):
                    raise UnclearError("its entries may be weights rather than samples")
                if kind == "mean" and not (follow(counts, sizes) or _is_of_selected(nodes[0])):
                    raise UnclearError("the number of its entries does not follow that of samples")
                term = replace(term, kind=kind, counts=counts, nodes=nodes)
                found.append(_divided(term, sizes) or term)
            else:
                raise UnclearError(f"it uses {operator_name(nodes[0])}, not only means and sums")
    if has_number and all(term.kind == "weights" for term in found):
        raise UnclearError("no mean or sum over samples was found in it")
    return found


def _divided(term: Term, sizes: Sequence[int]) -> Term | None:
    """Return a sum of x / d as sum(x) / d, or None if nothing divides its entries.

    So is a mean, if d is a number. In chunks of one size, a number divides them only if it is that
    of the samples or entries.

    Raises:
        UnclearError: in chunks of one sample, a row divides the entries.
    """
    name = operator_name(term.nodes[0])
    if name not in ("Sum", "Mean"):
        return None
    inner, nodes = term, term.nodes
    while True:
        children = [next(child for child, _ in node.next_functions if child) for node in nodes]
        are_alike = len({(child.name(), len(child.next_functions)) for child in children}) == 1
        is_scale = are_alike and _SCALES.fullmatch(operator_name(children[0]))
        inputs = _inputs(children, inner) if is_scale else []
        if len(inputs) != 1 or inputs[0][1].multipliers or inputs[0][1].scales != term.scales:
            break
        if name == "Mean" and inputs[0][1].divisors is not term.divisors:
            break
        nodes, inner = children, inputs[0][1]
    if max(sizes) == 1 and any(divisor.dim() for divisor in inner.divisors):
        raise UnclearError("one sample does not show whether its number divides it")
    known = (sizes[0], term.counts[0])
    are_counts = any(are_equal([1, abs(x) * n]) for x in inner.numbers for n in known)
    is_divided = len({*sizes}) > 1 or inner.divisors or are_counts
    return replace(inner, nodes=nodes) if is_divided else None


def _counts(edges: Edges, sizes: Sequence[int], dim: int) -> list[int]:
    """Return how many entries an operator reduces on each replica; empty if no samples."""
    nodes, size = [node for node, _ in edges], sizes[0]
    node = nodes[0]
    inputs = _inputs_with_graph(nodes) if _kind_of(node) else []
    if not inputs:
        return []
    outer, inner = [shape_of(*edge) for edge in edges], [shape_of(*edge) for edge in inputs[0]]
    if len({*map(tuple, inner)}) > 1:
        is_reducing = len({*map(tuple, outer)}) == 1
        is_reducing = is_reducing and not _is_of_reduced(nodes, sizes, dim, "Mean")
    elif is_reducing := len({*sizes}) == 1 and _reduces(node, size, dim):
        is_reducing = not _is_of_reduced(nodes, sizes, dim, "Mean", "Sum")
    elif _kind_of(node) == "mean" and math.prod(outer[0]) == 1:
        is_reducing = _is_of_selected(node)  # as many on each device
    sizes_of = zip(map(math.prod, inner), map(math.prod, outer), strict=True)
    return [num // (of_output or 1) for num, of_output in sizes_of] if is_reducing else []


def _reduces(node: Any, size: int, dim: int) -> bool:
    """Return whether an operator reduces the samples, in chunks of one size.

    They are along ``dim`` if its length is a multiple of the chunk size, as that of all tokens is,
    and otherwise along a dimension of the chunk size.

    Raises:
        UnclearError: they may as well be along another dimension.
    """
    child, number = next(edge for edge in node.next_functions if edge[0])
    shape = shape_of(child, number)
    dims = [d % len(shape) for d in dims_of(node) if shape] or range(len(shape))
    stacked = dims_of(child) if operator_name(child) == "Stack" else ()
    if dim in stacked:  # several heads or steps, before the samples of each
        return size in [shape[d] for d in dims if d not in stacked]
    reduced = [shape[d] for d in dims]
    kept = [n for d, n in enumerate(shape) if d not in dims]
    length, is_along = [*shape[dim:][:1], 0][0], dim % max(len(shape), 1) in dims
    others = shape if dim >= len(shape) else kept if is_along else reduced
    if length != size and length % size == 0 and size in others:
        raise UnclearError("chunks of one size do not show which dimension holds the samples")
    return is_along if length and length % size == 0 else size in reduced


def _behind(node: Any, by_rows: bool = False) -> Iterator[Any]:
    """Yield the nodes that compute what an operator reduces, entry by entry or row by row."""
    found = [edge for edge in node.next_functions if edge[0]]
    size = shape_of(*found[0])
    for child, number in found:
        shape = shape_of(child, number)
        are_rows = shape[:1] == size[:1] if by_rows else math.prod(shape) == math.prod(size)
        if len(found) < _MAX_BEHIND and are_rows:
            yield child
            found += [edge for edge in child.next_functions if edge[0]]


def _is_of_selected(node: Any) -> bool:
    """Return whether the entries that an operator reduces are of rows that were selected."""
    names = {operator_name(child) for child in _behind(node, by_rows=True)}
    return bool(names & {"Index", "IndexSelect", "MaskedSelect", "PackPaddedSequence"})


def _is_of_reduced(nodes: Sequence[Any], sizes: Sequence[int], dim: int, *kinds: str) -> bool:
    """Return whether entries are those of reduced samples, or several losses, and no samples."""
    is_even = len({*sizes}) == 1
    for own in zip(*map(_behind, nodes), strict=False):
        name, inputs = operator_name(own[0]), _inputs_with_graph(own)
        if name in kinds and is_even and _reduces(own[0], sizes[0], dim):
            return True
        if name in kinds and not is_even and inputs:
            before, after = _axes(inputs[0], sizes), _axes([(node, 0) for node in own], sizes)
            if before and not after:
                return True
        are_numbers = [math.prod(shape_of(*edges[0])) == 1 for edges in inputs]
        if is_even and name in ("Stack", "Cat", "CopySlices") and any(are_numbers):
            return True
    return False


def _inputs_with_graph(nodes: Sequence[Any]) -> list[Edges]:
    inputs = zip(*(node.next_functions for node in nodes), strict=False)
    return [own for own in inputs if all(child for child, _ in own)]


def _is_of_weights(edges: Edges, or_like: bool = False) -> bool:
    """Return whether a value is computed from parameters and numbers alone, as a penalty is.

    So is one that the replicas share. Only operators count that never use samples; with
    ``or_like``, also tensors without a graph that have the shape of weights.
    """
    stack, seen = [edges], set[Any]()
    while stack:
        edges = stack.pop()
        nodes = [node for node, _ in edges]
        is_shared = all(edge == edges[0] for edge in edges)  # and no chunk of a tensor
        if nodes[0] in seen or is_shared or all(map(is_parameter, nodes)):
            continue
        seen.add(nodes[0])
        name = operator_name(nodes[0])
        # Numbers may be of samples, which have no graph themselves.
        numbers = [_multipliers(n, name) if name in ("Mul", "Div") else () for n in nodes]
        inputs = list(zip(*(node.next_functions for node in nodes), strict=False))
        have_none = [[child is None for child, _ in node.next_functions] for node in nodes]
        alike = {
            (node.name(), *shape_of(*edge), *own, *nones)
            for node, edge, own, nones in zip(nodes, edges, numbers, have_none, strict=True)
        }
        shape, shapes = shape_of(*edges[0]), [shape_of(*own[0]) for own in inputs if own[0][0]]
        # What is added to a number is taken for a number, as in log(1 + s ** 2).
        is_sum = name in ("Add", "Sub", "Rsub") and not shape
        is_like = or_like and name in ("Add", "Sub", "Rsub", "Mul", "Div") and shape in shapes
        may_have_none = numbers[0] or is_sum or is_like
        is_known = _OF_WEIGHTS.fullmatch(name) and len(alike) == 1
        if not is_known or (any(have_none[0]) and not may_have_none):
            return False
        stack += inputs
    return True


def _kind_of(node: Any) -> str:
    """Return ``"mean"`` or ``"sum"`` for a reduction over all samples alike, "" for others."""
    if hasattr(node, "_saved_ignore_index"):
        return ""  # a cross entropy that was not counted is over an unknown number of targets
    kind = {"Mean": 1, "Sum": 2}.get(operator_name(node), getattr(node, "_saved_reduction", 0))
    return REDUCTIONS.get(kind, "")


def _inputs(nodes: Sequence[Any], term: Term) -> list[tuple[Edges, Term]]:
    """Return the inputs of an operator, and the terms that they are; empty if it is not known."""
    name = operator_name(nodes[0])
    inputs: list[Edges] = list(zip(*(node.next_functions for node in nodes), strict=True))
    # For each input, the number of each replica.
    if numbers := list(zip(*(_multipliers(node, name) for node in nodes), strict=False)):
        # The node of a number less a tensor has no input for the number.
        inputs += [[(None, 0)] * len(nodes)] * (len(numbers) - len(inputs))
        if name in ("Mul", "Div"):
            term = replace(term, numbers=[*term.numbers, numbers[0][0]])
        factors = [[*map(operator.mul, term.factors, own)] for own in numbers]
        return [(i, replace(term, factors=own)) for i, own in zip(inputs, factors, strict=False)]
    places = {"Mul": ((1, "other"), (0, "self")), "Div": ((1, "other"),)}
    for scale, saved in places.get(name, ()):
        own: list[Any] = [_saved(node, saved) for node in nodes]
        rest, is_divided = inputs[1 - scale], name == "Div"
        if not all(isinstance(one, Tensor) and one.numel() == 1 for one in own):
            continue
        if all(map(_is_data, own)) and not term.divisors and not term.multipliers:
            if is_divided:
                return [(rest, replace(term, divisors=own))]
            return [(rest, replace(term, multipliers=own))]
        if all(child for child, _ in inputs[scale]) and _is_of_weights(inputs[scale]):
            own = [(1 / one if is_divided else one).reshape(()) for one in own]
            return [(rest, replace(term, scales=[*term.scales, own]))]
    return []


def _multipliers(node: Any, name: str) -> Sequence[float]:
    """Return the number by which an operator multiplies each input; empty if it does not."""
    shape = shape_of(node)
    if name in ("Add", "Sub", "Rsub"):
        if any(c and math.prod(shape_of(c, n)) != math.prod(shape) for c, n in node.next_functions):
            return ()  # a number is added to each entry
        alpha = getattr(node, "_saved_alpha", 1)
        return {"Add": (1, alpha), "Sub": (1, -alpha), "Rsub": (-alpha, 1)}[name]
    if name == "Mean":
        return [math.prod(shape) / (math.prod(shape_of(*node.next_functions[0])) or 1)]
    if name == "Neg" or _KEEPS.fullmatch(name):
        return [-1 if name == "Neg" else 1] * len(node.next_functions)
    if name in ("Mul", "Div") and _is_number(other := _saved(node, "other")):
        return [float(other) if name == "Mul" else 1 / (float(other) or math.nan)]
    return ()


def masks_behind(nodes: Sequence[Any], dim: int) -> list[Tensor]:
    """Return the tensor that multiplied or selected the entries of a sum on each replica.

    Of cross entropies without a reduction it is the mask of the targets that are not ignored. It is
    empty if there is none on some of them.
    """
    masks = list[Tensor]()
    for node in nodes:
        behind, number = next(edge for edge in node.next_functions if edge[0])
        while operator_name(behind) in ("View", "Sum"):
            behind, number = behind.next_functions[0]
        saved = [_saved(behind, name) for name in ("other", "self", "condition")]
        if hasattr(behind, "_saved_ignore_index"):
            saved = [_saved(behind, "target") != _signed(behind._saved_ignore_index)]
        shape = tuple(shape_of(behind, number))
        saved = [one for one in saved if _is_data(one) and one.dim() == len(shape)]
        fitting = [one for one in saved if one.shape[: dim + 1] == shape[: dim + 1]]
        if not fitting:
            return []
        masks.append(fitting[0])
    return masks


def _saved(node: Any, name: str) -> Any:
    """Return a tensor or number that autograd saved.

    It is None if a checkpoint would compute it anew, or if it was freed or modified in place.
    """
    with contextlib.suppress(RuntimeError):
        is_hooked = getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None)
        return None if is_hooked else getattr(node, f"_saved_{name}", None)
    return None


def _is_data(saved: object) -> TypeGuard[Tensor]:
    """Return whether autograd saved a tensor of real numbers that has no graph."""
    return isinstance(saved, Tensor) and not (saved.requires_grad or saved.is_complex())


def _is_number(saved: object) -> bool:
    """Return whether autograd saved one of Python's numbers, maybe as a tensor.

    Such a tensor has no say in the type of a result, and never the smallest type itself.
    """
    if not isinstance(saved, Tensor) or saved.dim():
        return isinstance(saved, Real)
    dtype = torch.half if saved.is_floating_point() else torch.int8
    return torch.result_type(saved, torch.ones((), dtype=dtype)) == dtype != saved.dtype


def are_equal(numbers: Sequence[float], rel_tol: float = 1e-9) -> bool:
    """Return whether numbers differ by no more than rounding."""
    return all(math.isclose(number, numbers[0], rel_tol=rel_tol) for number in numbers)


def follow(counts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether numbers of entries follow the chunk sizes."""
    return are_equal([count / size for count, size in zip(counts, sizes, strict=True)])


def shape_of(node: Any, number: int = 0) -> Sequence[int]:
    """Return the shape of an output of the operator of a node.

    Raises:
        UnclearError: it is a jagged tensor, whose length is no number.
    """
    metadata = node._input_metadata[number]
    if metadata.is_nested_tensor:
        raise UnclearError("it uses a jagged tensor")
    shape: Sequence[int] = metadata.shape
    return shape


def operator_name(node: Any) -> str:
    """Return the name of an operator from its autograd node."""
    name: str = node.name().rpartition("::")[2]
    # One of a custom function stays whole, as it may be that of an operator.
    return name if isinstance(node, BackwardCFunction) else re.sub(r"Backward(s|\d*)$", "", name)


def dims_of(node: Any) -> Sequence[int]:
    """Return the dimensions along which an operator goes; negative ones count from the end."""
    dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    dims = dims if isinstance(dims, tuple) else (dims,)
    return [_signed(dim) for dim in dims if dim is not None]


def _signed(number: int) -> int:
    """Return a number that autograd saved; torch reports some negative ones as unsigned."""
    return number - 2**64 * (number >= 2**63)


def is_parameter(node: Any) -> bool:
    """Return whether a node stands for a parameter, or its copies on a device."""
    is_copy, leaf = isinstance(node, Broadcast._backward_cls), getattr(node, "variable", None)
    # Inputs may be leaves, too, but no chunk is a number, as a loss is to which others are added.
    return is_copy or isinstance(leaf, nn.Parameter) or (leaf is not None and not leaf.dim())


def how_samples_mix(outputs: Iterable[Sequence[Tensor]], sizes: Sequence[int]) -> str:
    """Return how samples of a chunk are computed from each other, or "" if nothing shows it.

    Args:
        outputs: for each output with a graph, its value on each replica.
        sizes: the numbers of samples of the replicas, not all the same.
    """
    num_pairs = [*zip(*((n * n, n * (n - 1), n * (n - 1) // 2) for n in sizes), strict=True)]
    seen = set[Any]()
    stack: list[tuple[Edges, bool]] = [
        ([(one.grad_fn, one.output_nr) for one in own], True) for own in outputs
    ]
    with looking_at_nodes, contextlib.suppress(UnclearError):
        while stack:
            edges, is_loss = stack.pop()
            nodes = [node for node, _ in edges]
            node, shapes = nodes[0], [shape_of(*edge) for edge in edges]
            if node in seen or len(set(map(type, nodes))) > 1:
                continue
            seen.add(node)
            # Up to its reductions, which are joined, a loss has the same shapes on all.
            is_alike = shapes.count(shapes[0]) == len(shapes)
            is_loss = is_loss and is_alike
            known = _inputs_with_graph(nodes)
            stack += [(own, is_loss) for own in known]
            if is_loss or isinstance(node, BackwardCFunction) or node.name() == "CopySlices":
                continue
            name = operator_name(node)
            axes = {axis for own in known for axis in _axes(own, sizes)}
            are_pairs = any(lengths in num_pairs for lengths in zip(*shapes, strict=False))
            selects = _SELECTS.fullmatch(name)
            if not (is_alike or selects) and (are_pairs or len(_axes(edges, sizes)) > 1):
                return f"{name} computes a number for each pair of samples"
            if is_alike and axes and not selects:
                return f"{name} reduces the samples of each chunk"
            along = dims_of(node) if _GOES_ALONG.fullmatch(name) else ()
            along = (-2,) if name.startswith("ScaledDotProduct") else along
            if axes & {dim % len(shapes[0]) for dim in along}:
                return f"{name} goes along the samples of each chunk"
    return ""


def _axes(edges: Edges, sizes: Sequence[int]) -> list[int]:
    """Return the dimensions whose sizes follow the numbers of samples of the replicas."""
    lengths = enumerate(zip(*(shape_of(*edge) for edge in edges), strict=False))
    return [axis for axis, own in lengths if own[0] and follow(own, sizes)]
