"""Make the loss of the whole batch out of those of its chunks."""

from __future__ import annotations

import contextlib
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from . import containers
from .arguments import named_arguments
from .counted_losses import CountedLoss, counting
from .errors import ArgumentError, BalanceWarning
from .loss_calls import Call, Calls, noting
from .loss_graph import LossGraph, Term, UnclearError, Value, are_proportional

Arguments = tuple[Sequence[Any], Mapping[str, Any]]
"""Positional and keyword arguments of a call."""


class Looks:
    """What a model remembers of the outputs that it has seen."""

    def __init__(self) -> None:
        self.notes_calls = {True: True, False: True}
        """With and without gradients: whether the next call needs more than autograd tells."""
        self.sums: set[str] = set()
        """Outputs without a graph that are sums."""
        self.axes: dict[str, int] = {}
        """Outputs whose shapes have shown along which dimension their samples are."""
        self.counts: dict[str, set[tuple[int, int]]] = {}
        """Of each output, where its graph divides by a number that counts entries."""
        self.agreeing: set[tuple[str, ...]] = set()
        """Graphs with several denominators that are known to be the same."""
        self.warned: set[str] = set()

    def warn(self, name: str, function: Callable[..., Any], reason: str) -> None:
        """Warn, once for each output, that its value is not that of the whole batch."""
        if name in self.warned:
            return
        self.warned.add(name)
        warnings.warn(
            f"output {name or '(the whole)'} of {_described(function)} is averaged by samples, and "
            f"that need not be its value for the whole batch: {reason}. Compute it outside, from "
            "gathered outputs, or only what is linear inside; give loss_weight if it is a mean "
            "over something else, or scalar_outputs='mean' if this is right",
            BalanceWarning,
            stacklevel=2,
        )


class ChunkLosses:
    """The 0-dim outputs of one call on several replicas, and how they join.

    Args:
        looks: what earlier calls have shown.
        function: what computes them.
        chunk_sizes: how many samples each replica has.
        dim: their dimension.
        arguments: of each replica.
        loss_weight: tells what each replica's losses weigh; by default their graphs do.
    """

    def __init__(
        self,
        looks: Looks,
        function: Callable[..., Any],
        chunk_sizes: Sequence[int],
        dim: int = 0,
        arguments: Sequence[Arguments] = (),
        loss_weight: Callable[..., Any] | str | None = None,
    ) -> None:
        self.looks = looks
        self._function = function
        self.chunk_sizes = chunk_sizes
        self._dim = dim
        self._arguments = arguments
        self._loss_weight = loss_weight
        self._whole_batch = list(_scalars(arguments))
        self._adds_up = any(kwargs.get("num_items_in_batch") is not None for _, kwargs in arguments)
        self._weights: list[Any] | None = None
        self._counted: list[CountedLoss] = []
        self._calls: Calls = {}

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Count and note what the replicas compute in this context."""
        if len(self.chunk_sizes) < 2:
            yield
            return
        is_recorded = torch.is_grad_enabled()
        notes_calls = self.looks.notes_calls[is_recorded] and self._loss_weight is None
        with counting() as self._counted, noting(notes_calls) as self._calls:
            yield
        self.looks.notes_calls[is_recorded] = False  # unless join finds that it is needed

    def settle(self, outputs: Sequence[Any]) -> None:
        """Ask ``loss_weight``, if there is a loss in the outputs, and let go of the arguments."""
        if self._loss_weight is not None and any(map(is_loss, tensors_in(outputs[0]))):
            self._weights = loss_weights(self._loss_weight, self._function, self._arguments)
        self._arguments = ()

    def join(
        self,
        outputs: Sequence[torch.Tensor],
        name: str,
        device: torch.device,
        looks: bool = True,
    ) -> torch.Tensor:
        """Return the value that the whole batch has, on ``device``. Differentiable.

        Args:
            outputs: of each replica, 0-dim floating.
            name: of the output.
            device: where the result goes.
            looks: whether to find out what they are means over; if not, it is the samples.
        """
        if self._weights is not None:
            weights = [w.get(name) if isinstance(w, Mapping) else w for w in self._weights]
            if all(weight is not None for weight in weights):
                return weighted_mean(outputs, weights, device)
        if not looks:
            return weighted_mean(outputs, self.chunk_sizes, device)
        try:
            return self._joined(outputs, name, device)
        except UnclearError as error:
            self.looks.warn(name, self._function, str(error))
            return weighted_mean(outputs, self.chunk_sizes, device)

    def _joined(
        self, outputs: Sequence[torch.Tensor], name: str, device: torch.device
    ) -> torch.Tensor:
        counted = {_node_of(item): item for item in self._counted}
        nodes = [self._node(output, counted) for output in outputs]
        is_recorded = outputs[0].grad_fn is not None
        if not is_recorded and not all(node in counted for node in nodes):
            self.looks.notes_calls[False] = True
            if None in nodes:
                is_sum = name in self.looks.sums
                return weighted_mean(outputs, None if is_sum else self.chunk_sizes, device)
        graph = LossGraph(
            self.chunk_sizes,
            self._dim,
            counted,
            self._calls,
            self._whole_batch,
            self._adds_up,
            self.looks.counts.setdefault(name, set()),
        )
        terms = graph.terms(nodes)
        if any(term.counts and not term.losses for term in terms):
            self.looks.notes_calls[is_recorded] = True
        own = [term for term in terms if not term.losses and not term.is_constant]
        known = [term for term in terms if term.losses]
        base = (own or known or [Term(self.chunk_sizes)])[0]
        self._check(own, (name, *graph.names))
        if base.weights is None and any(term.is_constant for term in terms):
            raise UnclearError("it adds what is the same on every replica to a sum over samples")
        if base.weights is None and not is_recorded:
            self.looks.sums.add(name)
        shares = _shares(base, device, len(outputs))
        joined = _weighted_sum(outputs, shares, device)
        for term in known:
            if term is not base:
                joined = joined + _correction(term, shares, device)
        return joined

    def _node(self, output: torch.Tensor, counted: Mapping[Any, CountedLoss]) -> Any:
        """Return the node that has computed an output, None where nothing is known of it."""
        if output.grad_fn is not None:
            return output.grad_fn
        if id(output) in self._calls:
            return self._calls[id(output)]
        return next((node for node, item in counted.items() if item.loss is output), None)

    def _check(self, terms: Sequence[Term], graph: tuple[str, ...]) -> None:
        """Raise UnclearError where terms do not share what they are a mean over."""
        for term in terms[1:]:
            one, other = terms[0].weights, term.weights
            if one is None and other is None:
                continue
            if one is None or other is None:
                raise UnclearError("it adds a mean and a sum over samples")
            if are_proportional(one, other) or graph in self.looks.agreeing:
                continue
            one, other = ([float(weight) for weight in weights] for weights in (one, other))
            if not are_proportional(one, other):
                raise UnclearError("it adds means over unlike numbers of entries")
            if not are_proportional(one, self.chunk_sizes):  # nor is that by chance
                self.looks.agreeing.add(graph)


def _node_of(counted: CountedLoss) -> Any:
    is_of_autograd = counted.node is not None and not isinstance(counted.node, Call)
    if not is_of_autograd and counted.loss.grad_fn is not None:
        # A function of autograd that computed it without a graph has a node by now.
        counted.node, counted.value = counted.loss.grad_fn, counted.loss
    elif counted.node is None:
        counted.node = Call("counted", counted.loss.shape)
    return counted.node


def weighted_mean(
    outputs: Sequence[torch.Tensor], weights: Sequence[Value] | None, device: torch.device
) -> torch.Tensor:
    """Return the mean of 0-dim outputs on ``device``, or their sum where there are no weights.

    A weight of 0 leaves out a NaN. If all numbers are 0, they count as equal.
    """
    shares = _shares(Term(weights), device, len(outputs))
    return _weighted_sum(outputs, shares, device)


def _shares(term: Term, device: torch.device, count: int) -> Sequence[Value]:
    """Return what each replica's value is multiplied by to add up to that of the whole batch."""
    weights = term.weights
    if weights is None:
        return [1.0] * count
    if not any(isinstance(weight, torch.Tensor) for weight in weights):
        numbers = [float(weight) for weight in weights]
        total = sum(numbers)
        return [number / total for number in numbers] if total else [1 / count] * count
    tensors = _on(device, weights)
    total = sum(tensors)
    if term.counts is not None:
        counts, finish = term.counts
        total = finish(sum(_on(device, counts)))
    return [weight / total for weight in tensors]


def _on(device: torch.device, weights: Iterable[Any]) -> list[Any]:
    # In float64, where a count of tokens is exact.
    return [torch.as_tensor(weight).detach().to(device, torch.double) for weight in weights]


def _weighted_sum(
    outputs: Sequence[torch.Tensor], shares: Sequence[Value], device: torch.device
) -> torch.Tensor:
    parts = []
    for output, share in zip(outputs, shares, strict=True):
        moved = output.to(device)
        if isinstance(share, torch.Tensor):
            # 0 / 0 where nothing counts
            moved = torch.where((share == 0) & moved.isnan(), 0, moved)
            parts.append(moved * share.to(moved.dtype))
        elif share:
            parts.append(moved * share if share != 1 else moved)
    return _total(parts)


def _correction(term: Term, shares: Sequence[Value], device: torch.device) -> torch.Tensor:
    """Return what a counted term lacks where it is weighted by the shares of others."""
    own = _shares(term, device, len(shares))
    parts = []
    for loss, factor, right, used in zip(term.losses or (), term.factors, own, shares, strict=True):
        if factor is None:
            raise UnclearError("it weighs several cross entropies by a vector")
        loss = loss.to(device)
        if isinstance(factor, torch.Tensor):
            factor = factor.to(device)
        parts.append(loss * (right - used).to(loss.dtype) * factor)
    return _total(parts)


def _total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    total, *others = parts
    for part in others:
        total = total + part
    return total


def is_loss(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has a single value and no dimension, as losses do."""
    return not tensor.dim() and (tensor.is_floating_point() or tensor.is_complex())


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        yield value
    else:
        for _, child in containers.items(value) or ():
            yield from tensors_in(child)


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the numbers and 0-dim tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        if not value.dim():
            yield value
    elif isinstance(value, Real):
        yield value
    elif not isinstance(value, str):
        for _, child in containers.items(value) or ():
            yield from _scalars(child)


def _described(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = getattr(function, "__qualname__", type(function).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


# Weights that the caller gives.


def loss_weights(
    loss_weight: Callable[..., Any] | str,
    function: Callable[..., Any],
    arguments: Iterable[Arguments],
) -> list[Any]:
    """Return what ``loss_weight`` says of each chunk: numbers, tensors or dictionaries of them.

    Args:
        loss_weight: a function, which gets the arguments that it names, or the name of one.
        function: whose arguments they are.
        arguments: of each chunk.

    Raises:
        ArgumentError: the call lacks an argument, or the result is no number of at least 0.
    """
    return [_weight(loss_weight, function, args, kwargs) for args, kwargs in arguments]


def _weight(
    loss_weight: Callable[..., Any] | str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    named = dict(named_arguments(function, args, kwargs))
    if isinstance(loss_weight, str):
        if not isinstance(named.get(loss_weight), torch.Tensor):
            raise ArgumentError(
                f"loss_weight is {loss_weight!r}, but the arguments of the call are "
                f"{', '.join(named) or 'none'}; name a tensor among them"
            )
        return (named[loss_weight] != -100).sum()
    weight = _call_with_named(loss_weight, named, args, kwargs)
    if isinstance(weight, Mapping):
        return {name: _checked(value) for name, value in weight.items()}
    return _checked(weight)


def _call_with_named(
    loss_weight: Callable[..., Any],
    named: Mapping[str, Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what ``loss_weight`` says of the arguments that it names, or takes in their order."""
    parameters = inspect.signature(loss_weight).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    if inspect.Parameter.VAR_POSITIONAL in kinds or inspect.Parameter.VAR_KEYWORD in kinds:
        return loss_weight(*args, **kwargs)
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
    if all(name in named for name in required):
        return loss_weight(**{p.name: named[p.name] for p in parameters if p.name in named})
    by_order = [name for name in required if name not in kwargs]
    if len(by_order) > len(args):
        missing = [name for name in required if name not in named]
        raise ArgumentError(
            f"loss_weight ({_described(loss_weight)}) takes {', '.join(required)}, but the call "
            f"has no {', '.join(missing)}: its arguments are {', '.join(named) or 'none'}; give "
            f"{missing[-1]} a default"
        )
    return loss_weight(*args[: len(by_order)], **{n: kwargs[n] for n in required if n in kwargs})


def _checked(weight: Any) -> Value:
    """Return a weight, which is not read where that would wait for a device."""
    if isinstance(weight, torch.Tensor) and weight.numel() == 1:
        return weight.detach().reshape(())
    if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        raise ArgumentError(
            f"loss_weight must return a number of at least 0, a tensor with one, or a dictionary "
            f"of such by the names of outputs, got {weight!r}"
        )
    return float(weight)
