r"""Read from autograd which means and sums over samples a loss is made of.

A loss is followed from its node to the ones where the samples disappear, its *reductions*, and on
to what computes their entries:

    loss  <-  add  <-  div by 2  <-  mean  <-  mul by 3  <-  pow
                  \
                   neg  <-  sum  <-  exp

On the way, terms may only be added up and multiplied by numbers. Those of Python are read on the
host, so no call waits for a device, and nobody's code runs again. The graphs of the replicas are
followed side by side: they differ only in the number of samples.

Beyond the reductions, ``how_samples_mix`` looks for operators that compute samples of a chunk from
each other.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import starmap
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

PathOf = Callable[[Sequence[Tensor]], str]
"""A function that returns which argument of a call tensors of the replicas are, or ""."""

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

_SELECTS = re.compile(r"Select|Slice|Unbind|\w*Split\w*|Index\w*|MaskedSelect")
"""Operators with which code loops over samples, or selects some of them."""

_MAX_BEHIND = 16
"""Roughly how many operators to look at behind one that reduces entries."""


class UnclearError(Exception):
    """It is not known how a loss depends on its samples; the message says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A tensor with one entry that multiplies or divides a term.

    Attributes:
        tensors: that of each replica.
        divides: whether it divides the term.
        path: the dotted path of the argument that it is; empty if it is none. One with a graph is
            learned: computed from parameters alone.
    """

    tensors: Sequence[Tensor]
    divides: bool
    path: str = ""

    def multipliers(self) -> list[Tensor]:
        """Return the 0-dim tensor that multiplies the term on each replica."""
        return [(1 / t.double() if self.divides else t).reshape(()) for t in self.tensors]


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """A part of a loss: a mean or a sum over samples, times numbers and other factors.

    Attributes:
        number: the product of Python's numbers that multiply it, on each replica.
        numbers: these on the first replica, means left out.
        factors: what else multiplies or divides it.
        kind: ``"mean"``, ``"sum"``, or ``"weights"`` if it is computed from parameters alone.
        counts: how many entries it reduces on each replica; empty for a cross entropy.
        nodes: the last operator that was followed on each replica, its reduction or one behind it;
            empty for a cross entropy.
        ends: the inputs of these, which compute its entries.
        depth: how many inputs the operators have that were followed behind its reduction.
        own: its cross entropy on each replica; empty if it is another term.
        unclear: why it is not known how the term depends on its samples; empty if it is.
    """

    number: Sequence[float]
    numbers: Sequence[float] = ()
    factors: Sequence[Factor] = ()
    kind: str = ""
    counts: Sequence[int] = ()
    nodes: Sequence[Any] = ()
    ends: Edges = ()
    depth: int = 0
    own: Sequence[Counted] = ()
    unclear: str = ""

    def inverses(self) -> list[float]:
        """Return the inverse of ``number`` on each replica: its divisor, if it was divided."""
        return [1 / (number or math.nan) for number in self.number]


def terms_of(
    losses: Sequence[Tensor],
    sizes: Sequence[int],
    dim: int,
    counted: Mapping[Any, Counted],
    path_of: PathOf,
) -> list[Term]:
    """Return the terms of which a loss is the sum, without numbers that have no graph.

    Args:
        losses: the loss of each replica.
        sizes: their chunk sizes.
        dim: the batch dimension.
        counted: cross entropies by their nodes.
        path_of: returns the dotted path of the argument of the call that tensors are, or "".

    Raises:
        UnclearError: it has no graph, or no term depends on samples.
    """
    if any(loss.grad_fn is None for loss in losses):
        raise UnclearError("it has no graph")
    found, has_number = list[Term](), False
    start: Edges = [(loss.grad_fn, loss.output_nr) for loss in losses]
    stack = [(start, Term([1.0] * len(losses)))]
    with looking_at_nodes:
        for edges, term in stack:
            try:
                nodes = [node for node, _ in edges]
                if not any(term.number):
                    continue  # multiplied by 0, as parameters that must have a gradient
                if not any(nodes):
                    has_number = True  # most often the 0 that a loop starts from
                elif term.kind:  # an entry may be a sum, too: (a / 2 + b).sum() has two terms
                    inputs = []
                    if term.depth < _MAX_BEHIND and all(nodes) and _are_alike(nodes):
                        depth = term.depth + len(_inputs_with_graph(nodes))
                        inputs = _inputs(nodes, replace(term, nodes=nodes, depth=depth), path_of)
                    stack += inputs
                    found += [] if inputs else [replace(term, ends=edges)]
                elif all(map(is_parameter, nodes)):
                    found.append(replace(term, kind="weights"))
                elif not _are_alike(nodes):
                    raise UnclearError("the replicas computed it differently, as by a branch")
                elif all(node in counted for node in nodes):
                    own = [counted[node] for node in nodes]
                    found.append(replace(term, kind=own[0].kind, own=own))
                elif not (counts := _counts(edges, sizes, dim)) and (
                    inputs := _inputs(nodes, term, path_of)
                ):
                    stack += inputs
                elif _is_of_weights(edges):
                    found.append(replace(term, kind="weights"))
                elif counts:
                    kind, entries = _kind_of(nodes[0]), _inputs_with_graph(nodes)[0]
                    if kind == "sum" and len({*sizes}) == 1 and _is_of_weights(edges, or_data=True):
                        raise UnclearError("its entries may be weights rather than samples")
                    if kind == "mean" and not (follow(counts, sizes) or _is_of_selected(nodes[:1])):
                        raise UnclearError("its number of entries does not follow that of samples")
                    depth = 0 if operator_name(nodes[0]) in ("Mean", "Sum") else _MAX_BEHIND
                    term = replace(term, kind=kind, counts=counts, nodes=nodes, depth=depth)
                    stack.append((entries, term))
                else:
                    name = operator_name(nodes[0])
                    raise UnclearError(f"it uses {name}, not only means and sums")
            except UnclearError as error:  # of this term; others may be known
                found.append(replace(term, unclear=str(error)))
    if has_number and all(term.kind == "weights" for term in found):
        raise UnclearError("no mean or sum over samples was found in it")
    return found


def _are_alike(nodes: Sequence[Any]) -> bool:
    return len({node and (node.name(), len(node.next_functions)) for node in nodes}) == 1


def _counts(edges: Edges, sizes: Sequence[int], dim: int) -> list[int]:
    """Return how many entries an operator reduces on each replica; empty if no samples."""
    nodes = [node for node, _ in edges]
    inputs = _inputs_with_graph(nodes) if _kind_of(nodes[0]) else []
    if not inputs:
        return []
    outer, inner = list(starmap(shape_of, edges)), list(starmap(shape_of, inputs[0]))
    is_reducing = len({*map(tuple, inner)}) > 1 or _reduces(nodes, inner, sizes, dim)
    if not is_reducing and len({*sizes}) > 1:  # as many may be selected on each device
        is_reducing = _kind_of(nodes[0]) == "mean" and _is_of_selected(nodes[:1])
    is_reducing = is_reducing and len({*map(tuple, outer)}) == 1
    if not is_reducing or _is_of_reduced(nodes, sizes, dim):
        return []
    sizes_of = zip(map(math.prod, inner), map(math.prod, outer), strict=True)
    return [num // (of_output or 1) for num, of_output in sizes_of]


def _reduces(
    nodes: Sequence[Any], shapes: Sequence[Sequence[int]], sizes: Sequence[int], dim: int
) -> bool:
    """Return whether an operator reduces the samples of inputs with these shapes.

    In chunks of one size, they are along ``dim`` if its length is that size. Otherwise they are
    along another dimension of that length, or along ``dim`` if its length is a multiple, as for all
    tokens.

    Raises:
        UnclearError: they may be along several.
    """
    shape, size = shapes[0], sizes[0]
    if len({*sizes}) > 1:
        return bool(_axes(shapes, sizes)) and not _axes(map(shape_of, nodes), sizes)
    dims = [d % len(shape) for d in dims_of(nodes[0]) if shape] or range(len(shape))
    axes = [d for d, n in enumerate(shape) if n == size or (d == dim and n and n % size == 0)]
    axes = [dim] if [*shape[dim:][:1]] == [size] else axes
    are_reduced = {axis in dims for axis in axes}
    if len(are_reduced) > 1:
        raise UnclearError("chunks of one size do not show which dimension holds the samples")
    return are_reduced == {True}


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


def _is_of_selected(nodes: Sequence[Any], sizes: Sequence[int] = ()) -> bool:
    """Return whether an operator computes from rows that were selected; with sizes, of samples."""
    for own in zip(*(_behind(node, by_rows=True) for node in nodes), strict=False):
        if operator_name(own[0]) in ("Index", "IndexSelect", "MaskedSelect", "PackPaddedSequence"):
            inputs = _inputs_with_graph(own)
            if not sizes or any(_axes(starmap(shape_of, edges), sizes) for edges in inputs):
                return True
    return False


def _is_of_reduced(nodes: Sequence[Any], sizes: Sequence[int], dim: int) -> bool:
    """Return whether entries are those of reduced samples, or several losses, and no samples."""
    for own in zip(*map(_behind, nodes), strict=False):
        name, inputs = operator_name(own[0]), _inputs_with_graph(own)
        shapes = [list(starmap(shape_of, edges)) for edges in inputs]
        if name in ("Mean", "Sum") and inputs and _reduces(own, shapes[0], sizes, dim):
            return True
        are_numbers = any(math.prod(shape) == 1 for shape, *_ in shapes)
        if are_numbers and len({*sizes}) == 1 and name in ("Stack", "Cat", "CopySlices"):
            return True
    return False


def _inputs_with_graph(nodes: Sequence[Any]) -> list[Edges]:
    inputs = zip(*(node.next_functions for node in nodes), strict=False)
    return [own for own in inputs if (None, 0) not in own]


def _is_of_weights(edges: Edges, or_data: bool = False) -> bool:
    """Return whether a value is computed from parameters and numbers alone, as a penalty is.

    So is one that the replicas share. Only operators count that never use samples; with
    ``or_data``, tensors without a graph may be among their inputs.
    """
    stack, seen = [edges], set[Any]()
    for edges in stack:
        nodes = [node for node, _ in edges]
        is_shared = all(edge == edges[0] for edge in edges)  # and no chunk of a tensor
        if nodes[0] in seen or is_shared or all(map(is_parameter, nodes)):
            continue
        seen.add(nodes[0])
        name, inputs = operator_name(nodes[0]), [node.next_functions for node in nodes]
        numbers = [_multipliers(n, name) if name in ("Mul", "Div") else () for n in nodes]
        have_none = [[child is None for child, _ in own] for own in inputs]
        shapes = list(starmap(shape_of, edges))
        names = [node.name() for node in nodes]
        forms = list(zip(names, shapes, numbers, have_none, strict=True))
        is_known = _OF_WEIGHTS.fullmatch(name) and forms.count(forms[0]) == len(forms)
        # What is added to a number is taken for a number, as in log(1 + s ** 2).
        is_sum = name in ("Add", "Sub", "Rsub") and not shapes[0]
        if not is_known or (any(have_none[0]) and not (numbers[0] or is_sum or or_data)):
            return False
        stack += zip(*inputs, strict=True)
    return True


def _kind_of(node: Any) -> str:
    """Return ``"mean"`` or ``"sum"`` for a reduction over all samples alike, "" for others."""
    if hasattr(node, "_saved_ignore_index"):
        return ""  # a cross entropy that was not counted is over an unknown number of targets
    kind = {"Mean": 1, "Sum": 2}.get(operator_name(node), getattr(node, "_saved_reduction", 0))
    return REDUCTIONS.get(kind, "")


def _inputs(nodes: Sequence[Any], term: Term, path_of: PathOf) -> list[tuple[Edges, Term]]:
    """Return the inputs of an operator, and the terms that they are; empty if it is not known."""
    name = operator_name(nodes[0])
    inputs: list[Edges] = list(zip(*(node.next_functions for node in nodes), strict=True))
    # For each input, the number of each replica.
    if numbers := list(zip(*(_multipliers(node, name) for node in nodes), strict=False)):
        # The node of a number less a tensor has no input for the number.
        inputs += [[(None, 0)] * len(nodes)] * (len(numbers) - len(inputs))
        if name in ("Mul", "Div"):
            term = replace(term, numbers=[*term.numbers, numbers[0][0]])
        products = [[*map(operator.mul, term.number, own)] for own in numbers]
        return [(i, replace(term, number=own)) for i, own in zip(inputs, products, strict=False)]
    places = {"Mul": ((1, "other"), (0, "self")), "Div": ((1, "other"),)}
    for scale, saved in places.get(name, ()):
        own: list[Any] = [_saved(node, saved) for node in nodes]
        if not all(isinstance(one, Tensor) and one.numel() == 1 for one in own):
            continue
        is_data, divides = all(map(_is_data, own)), name == "Div"
        path = path_of(own) if is_data else ""
        is_learned = all(child for child, _ in inputs[scale]) and _is_of_weights(inputs[scale])
        # In a mean, a buffer may scale the entries, as in (x / temperature).mean().
        is_count = not term.kind or (divides and term.kind == "sum")
        if path or is_learned or (is_data and is_count):
            factor = Factor(own, divides, path)
            return [(inputs[1 - scale], replace(term, factors=[*term.factors, factor]))]
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
        inner = shape_of(*node.next_functions[0])
        return [1 / (math.prod(inner[d] for d in dims_of(node) or range(len(inner))) or 1)]
    if name == "Neg" or _KEEPS.fullmatch(name):
        return [-1 if name == "Neg" else 1] * len(node.next_functions)
    if name in ("Mul", "Div") and _is_number(other := _saved(node, "other")):
        return [float(other) if name == "Mul" else 1 / (float(other) or math.nan)]
    return ()


def masks_of(term: Term, dim: int) -> list[Tensor]:
    """Return the tensor that multiplied or selected the entries of a term on each replica.

    Of cross entropies without a reduction it is the mask of the targets that are not ignored. It is
    empty if there is none on some of them.
    """
    masks = list[Tensor]()
    for node, number in term.ends:
        saved = [_saved(node, name) for name in ("other", "self", "condition")]
        if node and operator_name(node) == "MaskedFill":
            saved = [~mask for mask in [_saved(node, "mask")] if mask is not None]
        if hasattr(node, "_saved_ignore_index"):
            saved = [_saved(node, "target") != _signed(node._saved_ignore_index)]
        shape = tuple(shape_of(node, number)) if node else ()
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
    return [n * sizes[0] for n in counts] == [size * counts[0] for size in sizes]


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
        outputs: for each output with a graph, its value on each replica, or on some.
        sizes: the numbers of samples of these, not all the same.
    """
    num_pairs = {*zip(*((n * n, n * (n - 1), n * (n - 1) // 2) for n in sizes), strict=True)}
    seen = set[Any]()
    stack: list[tuple[Edges, bool]] = [
        ([(one.grad_fn, one.output_nr) for one in own], True) for own in outputs
    ]
    with looking_at_nodes, contextlib.suppress(UnclearError):
        for edges, is_loss in stack:
            nodes = [node for node, _ in edges]
            node = nodes[0]
            # Nodes that replicas share, as of parameters on one device, hold no samples.
            if node in seen or node is nodes[-1] or len(set(map(type, nodes))) > 1:
                continue
            seen.add(node)
            shapes = list(starmap(shape_of, edges))
            # Up to its reductions, which are joined, a loss has the same shapes on all.
            is_alike = shapes.count(shapes[0]) == len(shapes)
            is_loss = is_loss and is_alike
            known = _inputs_with_graph(nodes)
            stack += [(own, is_loss) for own in known]
            if is_loss or isinstance(node, BackwardCFunction) or node.name() == "CopySlices":
                continue
            name = operator_name(node)
            differing = [own for own in zip(*shapes, strict=False) if len({*own}) > 1]
            are_pairs = len(differing) > 1 and len(_axes(shapes, sizes)) > 1
            are_pairs |= not num_pairs.isdisjoint(differing)
            are_pairs |= len({*differing}) < len(differing) and _is_of_selected(nodes, sizes)
            if are_pairs and not _SELECTS.fullmatch(name):
                return f"{name} computes a number for each pair of samples"
            along = dims_of(node) if _GOES_ALONG.fullmatch(name) else ()
            along = (-2,) if name.startswith("ScaledDotProduct") else along
            inputs = [list(starmap(shape_of, own)) for own in known if is_alike or along]
            axes = {axis for own in inputs for axis in _axes(own, sizes)}
            is_ragged = any(shape[:1] != own[0][:1] for own in inputs for shape in own)
            axes |= {0} if is_ragged and not axes and _is_of_selected(nodes, sizes) else set()
            if is_alike and axes and not _SELECTS.fullmatch(name):
                return f"{name} reduces the samples of each chunk"
            if axes & {dim % len(shapes[0]) for dim in along}:
                return f"{name} goes along the samples of each chunk"
    return ""


def _axes(shapes: Iterable[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """Return the dimensions whose lengths follow the numbers of samples of the replicas."""
    lengths = enumerate(zip(*shapes, strict=False))
    return [axis for axis, own in lengths if own[0] and follow(own, sizes)]
