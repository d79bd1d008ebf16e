r"""Find the terms that add up to a loss, by following the autograd graph of the loss.

The graph is followed from the node of the loss to its *reductions*: means over samples, sums over
samples, and cross entropies.

    loss  <-  add  <-  div by 2  <-  mean over samples
                  \
                   neg  <-  cross entropy

Between the loss and its reductions, terms may be reshaped, added, subtracted, and multiplied or
divided by Python numbers. They may also be divided by a tensor, if this tensor is an argument of
the function that computes the loss. Some terms are computed from parameters alone, such as
``s.exp()``. Such a term may multiply a mean or a sum over samples, but not a cross entropy. It may
be added to a mean over samples or to a cross entropy, but not to a sum over samples. Any other
operation between the loss and its reductions makes the loss unclear (see ``Composition``). No value
is read from a device, and no user code is run again. The graphs of the replicas are followed side
by side, because they usually differ only in the number of samples. ``masked_mean_of`` recognizes
one more kind of loss: ``(entries * mask).sum() / divisor``.

Each replica gets a part of the batch, a chunk. In the part of the graph between the reductions and
the inputs, ``how_samples_mix`` looks for operators whose result for one sample depends on other
samples of the same chunk.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import starmap
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...free_threading import looking_at_nodes
from .cross_entropy import REDUCTIONS, memory_of

Edges = Sequence[tuple[Any, int]]
"""For each replica, a tensor in the autograd graph, as a pair of a node and an index.

The node belongs to the operator that computed the tensor. The index tells which output of this
operator the tensor is.
"""

_KEEPS = {"Clone", "ToCopy", "Alias", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"}
"""Operators that copy or reshape a tensor, and so do not change the numbers in it."""

_MOVES = _KEEPS | {"T", "Transpose", "Expand", "CopySlices", "Select", "Slice", "Unbind", "Split"}
_MOVES |= {"SplitWithSizes", "UnsafeSplit", "Index", "IndexPut", "IndexSelect", "MaskedSelect"}
"""Operators that only move, copy, repeat or select entries, for example to loop over samples."""

_RUNS_ALONG = re.compile(
    r"(Log|Safe)?Softmax|Log[cC]umsumexp|Cum(sum|prod|max|min)|Sort|Flip|Roll|ScaledDotProduct\w*"
)
"""Operators that compute each entry from other entries along a dimension. They keep the shape."""

_COMPUTES = re.compile(r"Add|Sub|Neg|Mul|Pow|Exp|Log|Abs|Sum|\w*Norm|Select")
"""Operators that have an edge in the autograd graph for each tensor that their result depends on.

``Select`` is ``tensor[i]`` with a number i. ``Index``, which is ``tensor[ids]``, is missing, since
``ids`` has no edge and may come from the samples.
"""

_PARAMETERS = {"AccumulateGrad", "ReceiveBackward", "BroadcastBackward"}
"""The nodes of parameters and of their copies. Other leaf tensors have ``AccumulateGrad``, too."""


class UnclearError(Exception):
    """The autograd graph does not show how a loss depends on its samples. The message says why."""


@dataclass(slots=True)
class Composition:
    """The terms that add up to a loss: cross entropies, and means or sums over samples.

    Attributes:
        parts: a tuple for each cross entropy in the loss: its index among all cross entropies that
            a replica has computed, the number by which it is multiplied, and the dotted paths of
            the tensors by which it is divided. A dotted path leads to an argument of the function
            that computes the loss, starting at the pair ``(args, kwargs)``. For example,
            ``1.batch.mask`` leads to ``kwargs["batch"]["mask"]``. A summed cross entropy that is
            divided by the number of samples is not in this list: it counts as a mean over samples.
        kinds: the kinds of the terms that are not in ``parts``: ``"mean"`` for means over samples,
            ``"sum"`` for sums over samples. Terms of an unknown kind count as means.
        unclear: the reason why the loss cannot be joined from its terms, such as ``"it adds means
            to sums over samples"``; "" if it can.
    """

    parts: list[tuple[int, float, tuple[str, ...]]] = field(default_factory=list)
    kinds: set[str] = field(default_factory=set)
    unclear: str = ""


def composition_of(
    losses: Sequence[Tensor],
    sizes: Sequence[int],
    counted: Mapping[Any, tuple[int, str]],
    arguments: Mapping[Any, str],
) -> Composition:
    """Return the terms that add up to a loss.

    Terms without an autograd graph, and terms that are multiplied by 0, are left out.

    Args:
        losses: the loss that each replica has computed.
        sizes: the number of samples of each replica.
        counted: a dict with one entry for each cross entropy that every replica has computed. The
            key is a tuple of its autograd nodes, one for each replica. The value is its index among
            the cross entropies, and its kind (``"mean"`` or ``"sum"``).
        arguments: a dict with one entry for each argument of the call that is a tensor of one
            element on every replica. The key is a tuple that has, for each replica, the place of
            its tensor in memory (see ``memory_of``). The value is the dotted path of the argument
            (see ``Composition``).
    """
    if any(loss.grad_fn is None for loss in losses):
        return Composition(unclear="it has no autograd graph")
    found = Composition()
    start: Edges = [(loss.grad_fn, loss.output_nr) for loss in losses]
    stack: list[tuple[Edges, Sequence[float], tuple[str, ...]]] = [(start, [1.0] * len(losses), ())]
    with looking_at_nodes:
        for edges, factors, paths in stack:
            nodes = [node for node, _ in edges]
            if not any(factors) or not any(nodes):
                continue  # the term has no graph, or is multiplied by 0, as in 0 * unused.sum()
            # The path "" stands for a factor that is computed from parameters. The value of the
            # factor is unknown, so a cross entropy with this factor cannot be joined by its count.
            place, reduction = counted.get(tuple(nodes) if "" not in paths else (), (0, ""))
            try:
                if are_equal(factors) and not any(paths) and edges.count(edges[0]) == len(edges):
                    found.kinds.add("mean")  # all share the node, for example that of a joined loss
                elif name := reduction or _reduction_of(nodes, sizes):
                    kind = _kind_of(name, factors, sizes, any(paths))
                    # A sum over targets, divided by the number of samples, is a mean over samples.
                    if kind == reduction:
                        found.parts.append((place, factors[0], paths))
                    else:
                        found.kinds.add(kind)
                elif scaled := _scaled(nodes, arguments):
                    stack.append((scaled[0], factors, (*paths, scaled[1])))
                else:
                    inputs = zip(*(node.next_functions for node in nodes), strict=True)
                    for own, *by in zip(inputs, *map(_multipliers, nodes), strict=False):
                        stack.append((own, [*map(operator.mul, factors, by)], paths))
            except UnclearError as error:
                found.kinds.add("mean")  # the term is averaged
                # Averaging is exact if the term is the same on all replicas. In even splits, a
                # factor that depends on the chunk size, such as 1 / len(x), is the same on all
                # replicas, too. So the only factors allowed in even splits are 1 and -1.
                is_constant = are_equal(factors) and (len({*sizes}) > 1 or _is_one(factors))
                if any(paths) or not is_constant or not _is_of_parameters(nodes):
                    found.unclear = found.unclear or str(error)
    found.unclear = found.unclear or "it adds means to sums over samples" * (len(found.kinds) > 1)
    return found


def masked_mean_of(loss: Tensor) -> list[Any]:
    """Return the parts of a masked mean: the autograd node of its division, its divisor, its mask.

    A masked mean is a loss computed as ``(entries * mask).sum() / divisor``. If ``loss`` is
    computed in another way, return an empty list.
    """
    node, nodes = loss.grad_fn, list[Any]()
    with looking_at_nodes, contextlib.suppress(UnclearError):
        for name in ("Div", "Sum", "Mul"):
            while node and _operator_name(node) in _KEEPS:
                node = node.next_functions[0][0]
            if not node or _operator_name(node) != name:
                return []
            nodes.append(node)
            rank, node = len(_shape_of(node)), node.next_functions[0][0]
        saved = [_saved(node, own) for node in nodes for own in ("other", "self")]
    constants = [one for one in saved if isinstance(one, Tensor) and not one.requires_grad]
    factors = [_operator_name(own) for own, _ in nodes[-1].next_functions if own]
    is_mask = len(constants) == 2 and constants[1].dim() == rank > 0 and "Mul" not in factors
    return [nodes[0], *constants] if is_mask else []


def _reduction_of(nodes: Sequence[Any], sizes: Sequence[int]) -> str:
    """Return which reduction over samples an operator is, or "" if it is no mean or sum.

    The result is ``"mean"``, ``"sum"``, ``"sum of products"`` as in ``(x * w).sum()``, or
    ``"sum of quotients"`` as in ``(x / n).sum()``. For a cross entropy, the result is "", because a
    cross entropy reduces targets instead of samples, and their number is unknown here.

    Args:
        nodes: the autograd node of the operator on each replica.
        sizes: the number of samples of each replica.

    Raises:
        UnclearError: it is not clear that the operator reduces samples, or the replicas have used
            different operators.
    """
    if len({node and (node.name(), len(node.next_functions)) for node in nodes}) > 1:
        raise UnclearError("the replicas computed it in different ways")
    code = {"Mean": 1, "Sum": 2}.get(_operator_name(nodes[0]), _saved(nodes[0], "reduction"))
    inputs = _inputs_with_graph(nodes)
    # A cross entropy that was not counted has an unknown number of targets.
    if code not in REDUCTIONS or not inputs or hasattr(nodes[0], "_saved_ignore_index"):
        return ""
    shapes, size = list(starmap(_shape_of, inputs[0])), max(sizes)
    entries = inputs[0][sizes.index(size)][0]
    name, is_even = _operator_name(entries), len({*sizes}) == 1
    behind = [_shape_of(*edge) for edge in entries.next_functions if edge[0]]
    repeats = name == "Expand" or (name in ("Stack", "Cat") and is_even)
    are_samples = _follow([*map(math.prod, shapes)], sizes)
    are_samples &= not (repeats and 1 in map(math.prod, behind))
    if is_even:
        # Chunks of equal size do not show which dimension grows with the number of samples. So the
        # length of one dimension must be the chunk size. In a mean, such as that over all tokens,
        # the length may also be a multiple of the chunk size.
        are_samples &= any((n % size if code == 1 else n - size) == 0 for n in shapes[0])
        reduced = _dims_of(entries) if name in ("Mean", "Sum") else ()
        are_samples &= all(behind[0][dim] != size for dim in reduced)
    if not are_samples:
        raise UnclearError("it may sum or average only some samples, or entries other than samples")
    return "mean" if code == 1 else _kind_of_sum(entries)


def _kind_of_sum(entries: Any) -> str:
    """Return what kind of entries a sum adds up: products, quotients, or others.

    The result is ``"sum of products"``, ``"sum of quotients"``, or else ``"sum"``.
    Before the sum, the products or quotients may be reshaped, and added to each other or to other
    terms. For example, the kind of ``(a * b + c).view(-1).sum()`` is ``"sum of products"``.

    Args:
        entries: the autograd node of the operator that computed the entries.
    """
    found = [entries]
    for node in found:
        name = _operator_name(node)
        if name in ("Mul", "Div"):
            return "sum of products" if name == "Mul" else "sum of quotients"
        if name in ("Add", "Sub", "Rsub", "Neg", "Sum") or name in _KEEPS:
            found += [own for own, _ in node.next_functions if own and own not in found]
    return "sum"


def _kind_of(name: str, factors: Sequence[float], sizes: Sequence[int], is_divided: bool) -> str:
    """Return ``"mean"`` or ``"sum"``: what the product of a reduction and a factor amounts to.

    For example, a sum over samples that is divided by the number of samples is a ``"mean"``.

    Args:
        name: the reduction, such as ``"mean"`` or ``"sum of products"``.
        factors: the number by which each replica multiplies the reduction.
        sizes: the number of samples of each replica.
        is_divided: whether the reduction is also divided by an argument of the call.

    Raises:
        UnclearError: the reduction may be multiplied or divided by a number that depends on the
            chunk.
    """
    is_even, is_constant = len({*sizes}) == 1, are_equal(factors)
    products = [factor * n for factor, n in zip(factors, sizes, strict=True)]
    is_mean = are_equal(products) and (not is_even or (sizes[0] > 2 and _is_one(products)))
    if (name == "mean" and is_constant) or (name != "mean" and is_mean):
        return "mean"
    adds_up = name == "sum" or (name == "sum of products" and is_divided)
    # If all chunks have the same size, a factor other than 1 and -1 may depend on this size.
    is_known = not is_even or (_is_one(factors) and (sizes[0] > 1 or is_divided))
    if adds_up and is_constant and is_known:
        return "sum"
    raise UnclearError(f"it has a {name} with a factor or divisor that may depend on the chunk")


def _multipliers(node: Any) -> Sequence[float]:
    """Return the numbers by which an operator multiplies its inputs, one number for each input.

    Raises:
        UnclearError: the operator does more than add up its inputs or multiply them by numbers.
    """
    name, alpha = _operator_name(node), getattr(node, "_saved_alpha", 1)
    signs = {"Add": (1, alpha), "Sub": (1, -alpha), "Rsub": (-alpha, 1), "Neg": (-1,)}
    if name in ("Mul", "Div") and _is_number(other := _saved(node, "other")):
        return [float(other) if name == "Mul" else 1 / (float(other) or math.nan)]
    if name not in signs and name not in _KEEPS:
        raise UnclearError(f"it uses {name}, not only means over samples")
    return signs.get(name, (1,))


def _scaled(nodes: Sequence[Any], arguments: Mapping[Any, str]) -> tuple[Edges, str] | None:
    """Return the input that an operator divides by an argument, or multiplies by parameters.

    The result is a pair: the input, and the dotted path of the argument. If the operator multiplies
    the input by a term that is computed from parameters alone, the path is "". If the operator
    neither divides nor multiplies in this way, return None.

    Args:
        nodes: the autograd node of the operator on each replica.
        arguments: the paths of arguments, as in ``composition_of``.
    """
    name, inputs = _operator_name(nodes[0]), _inputs_with_graph(nodes)
    divisors = [_saved(node, "other") for node in nodes if name == "Div"]
    places = tuple(memory_of(one) for one in divisors if isinstance(one, Tensor))
    if places in arguments:
        return inputs[0], arguments[places]
    others = [own for own in inputs if name != "Mul" or not _is_of_parameters([n for n, _ in own])]
    return (others[0], "") if len(others) == 1 < len(inputs) else None


def _is_of_parameters(nodes: Sequence[Any]) -> bool:
    """Return whether replicas computed a tensor from parameters alone, by the same known operators.

    If so, the tensor is the same on all replicas. The result is False if an operator has an input
    that may be computed from the samples: an input without an autograd graph, or a leaf tensor that
    differs between the replicas.

    Args:
        nodes: for each replica, the autograd node of the operator that computed its tensor.
    """
    found, seen = [tuple(nodes)], set[Any]()
    for own in found:
        numbers = [(_saved(node, "exponent"), _saved(node, "index")) for node in own]
        steps = {(_operator_name(n), getattr(n, "variable", numbers[i])) for i, n in enumerate(own)}
        names = {name for name, _ in steps}
        if names <= _PARAMETERS and len(steps) == len(names):
            continue
        if len(steps) > 1 or not _COMPUTES.fullmatch(names.pop()):
            return False
        inputs = {*zip(*([n for n, _ in node.next_functions] for node in own), strict=True)} - seen
        seen |= inputs
        found += inputs
    return True


def _inputs_with_graph(nodes: Sequence[Any]) -> list[Edges]:
    inputs = zip(*(node.next_functions for node in nodes), strict=False)
    return [own for own in inputs if (None, 0) not in own]


def _saved(node: Any, name: str) -> Any:
    """Return the tensor or number that an autograd node has saved under ``name``.

    Return None if nothing was saved, or if the value was freed or modified in place. Also return
    None if a hook, such as that of activation checkpointing, would have to compute the value.
    """
    with contextlib.suppress(RuntimeError):
        is_hooked = getattr(getattr(node, f"_raw_saved_{name}", None), "unpack_hook", None)
        return None if is_hooked else getattr(node, f"_saved_{name}", None)
    return None


def _is_number(saved: object) -> bool:
    """Return whether a value saved by autograd was a Python int or float in the user's code.

    Autograd may save an int or float as a 0-dim tensor of dtype int64 or float64. A 0-dim tensor of
    the user's code may look the same, but ``torch.result_type`` shows the difference:

    - With a 0-dim half tensor, a saved float gives half. The user's float64 tensor gives float64.
    - With a 0-dim int8 tensor, a saved int gives int8. The user's int64 tensor gives int64.

    If the saved tensor is half or int8, it comes from the user's code, because autograd saves no
    Python number with these dtypes.
    """
    if not isinstance(saved, Tensor) or saved.dim():
        return isinstance(saved, Real)
    dtype = torch.half if saved.is_floating_point() else torch.int8
    return torch.result_type(saved, torch.ones((), dtype=dtype)) == dtype != saved.dtype


def are_equal(numbers: Sequence[float], rel_tol: float = 1e-9) -> bool:
    """Return whether all numbers are equal, up to a relative error of ``rel_tol`` for rounding."""
    return all(math.isclose(number, numbers[0], rel_tol=rel_tol) for number in numbers)


def _is_one(numbers: Sequence[float]) -> bool:
    return are_equal([1, *map(abs, numbers)])


def _follow(counts: Sequence[int], sizes: Sequence[int]) -> bool:
    """Return whether ``counts``, one for each replica, are in proportion to the chunk sizes."""
    return len({*map(operator.truediv, counts, sizes)}) == 1


def _shape_of(node: Any, number: int = 0) -> tuple[int, ...]:
    """Return the shape of output ``number`` of the operator that belongs to an autograd node.

    Raises:
        UnclearError: the output is a jagged tensor, whose length is not a number.
    """
    metadata = node._input_metadata[number]
    if metadata.is_nested_tensor:
        raise UnclearError("it uses a jagged tensor")
    return tuple(metadata.shape)


def _operator_name(node: Any) -> str:
    """Return the name of an operator from its autograd node."""
    name = type(node).__name__
    # A custom autograd.Function named Mul has a node named MulBackward. This name is not shortened,
    # because Mul would look like torch's operator.
    return name if isinstance(node, BackwardCFunction) else name.partition("Backward")[0]


def _dims_of(node: Any) -> Sequence[int]:
    """Return the dimensions along which an operator works; negative ones count from the end."""
    dims = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    dims = dims if isinstance(dims, tuple) else (dims,)
    # torch reports some negative dimensions as unsigned integers.
    return [dim - 2**64 * (dim >= 2**63) for dim in dims if dim is not None]


def how_samples_mix(own: Sequence[Tensor], others: Sequence[Tensor], sizes: tuple[int, int]) -> str:
    """Return a sentence on how samples of the same chunk affect each other, or "".

    A chunk is the part of the batch that a replica has. The sentence, such as ``"Softmax runs along
    the samples of each chunk"``, names an operator that combines samples. If the shapes in the
    autograd graphs show no such operator, return "".

    Args:
        own: the outputs of a replica that have an autograd graph.
        others: the same outputs of another replica, in the same order.
        sizes: the chunk sizes of the two replicas, which must differ.
    """
    seen = set[Any]()
    stack: list[tuple[Any, int, Any, int, bool]] = [
        (one.grad_fn, one.output_nr, other.grad_fn, other.output_nr, True)
        for one, other in zip(own, others, strict=True)
    ]
    with looking_at_nodes, contextlib.suppress(UnclearError):
        for node, i, other, j, is_loss in stack:
            # Nodes that replicas share, such as those of parameters, do not belong to samples.
            if node in seen or node is other or type(node) is not type(other):
                continue
            seen.add(node)
            name = _operator_name(node)
            # Reading shapes takes most of the time, so shapes that tell nothing new are not read.
            shapes = () if name in _MOVES else (_shape_of(node, i), _shape_of(other, j))
            # From a loss back to its reductions, shapes are the same on both replicas. Operators in
            # this part are skipped, since the losses are joined.
            is_alike = shapes[:1] == shapes[1:]
            is_loss = is_loss and is_alike
            pairs = zip(node.next_functions, other.next_functions, strict=False)
            stack += [(*one, *its_own, is_loss) for one, its_own in pairs]
            if is_loss or not shapes or isinstance(node, BackwardCFunction):
                continue
            axes, are_pairs = _axes(shapes, sizes)
            if are_pairs:
                return f"{name} computes a number for each pair of samples"
            inputs = _inputs_with_graph((node, other)) if is_alike else ()
            if any(_axes(tuple(starmap(_shape_of, edges)), sizes)[0] for edges in inputs):
                return f"{name} reduces the samples of each chunk"
            # Attention runs along dimension -2, and has no argument for the dimension.
            along = (_dims_of(node) or (-2,)) if axes and _RUNS_ALONG.fullmatch(name) else ()
            if axes & {dim % len(shapes[0]) for dim in along}:
                return f"{name} runs along the samples of each chunk"
    return ""


@functools.lru_cache  # the layers of a model often repeat the same shapes
def _axes(shapes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]) -> tuple[set[int], bool]:
    """Return which dimensions have lengths in proportion to the chunk sizes.

    The second item of the result says whether the tensors have an entry for each pair of samples.
    This is assumed if two dimensions have such lengths, or if one length is the number of pairs.

    Args:
        shapes: the shape of a tensor on each replica.
        sizes: the chunk sizes of the replicas.
    """
    lengths = [*zip(*shapes, strict=False)]
    axes = {i for i, own in enumerate(lengths) if len({*own}) > 1 and _follow(own, sizes)}
    num_pairs = zip(*((n * n, n * (n - 1), n * (n - 1) // 2) for n in sizes), strict=True)
    return axes, len(axes) > 1 or not {*num_pairs}.isdisjoint(lengths)
