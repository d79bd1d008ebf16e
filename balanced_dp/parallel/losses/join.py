"""Make the loss of the whole batch out of those of its chunks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch

from ...errors import warn
from .. import nested
from ..call_inputs import Arguments, described
from .calls import Call, Calls, noting
from .counted import CountedLoss, counting
from .graph import LossGraph
from .terms import Term, are_proportional, correction, shares_of, weighted_mean, weighted_sum
from .weight import weight_of_chunk


class Looks:
    """What a model remembers of the outputs that it has seen.

    Args:
        may_note: whether calls may be noted. Those of compiled modules may not: Dynamo would
            compile the notes.
    """

    def __init__(self, may_note: bool = True) -> None:
        self.may_note = may_note
        self.notes_calls = {True: True, False: True}
        """With and without gradients: whether the next call needs more than autograd tells."""
        self.sums: set[str] = set()
        """Outputs without a graph that are sums."""
        self.axes: dict[str, int] = {}
        """Outputs whose shapes have shown along which dimension their samples are."""
        self.places: dict[str, dict[tuple[int, int], bool]] = {}
        """Of each output, where its graph divides, and whether by what counts entries."""
        self.agreeing: set[tuple[str, ...]] = set()
        """Graphs with several denominators that are known to be the same."""
        self.seen: set[tuple[str, ...]] = set()
        """Graphs of which it was checked that what they multiply by is the same everywhere."""
        self.warned: set[str] = set()

    def warn(self, name: str, function: Callable[..., Any], reason: str) -> None:
        """Warn, once for each output, that its value is not that of the whole batch."""
        if name in self.warned:
            return
        self.warned.add(name)
        warn(
            f"output {name or '(the whole)'} of {described(function)} need not have the value of "
            f"the whole batch: {reason}. Compute it outside, from "
            "gathered outputs, or only what is linear inside; give loss_weight if it is a mean "
            "over something else, or scalar_outputs='mean' if this is right"
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
        is_auto: whether their graphs are asked; if not, losses weigh as many samples as they had.
    """

    def __init__(
        self,
        looks: Looks,
        function: Callable[..., Any],
        chunk_sizes: Sequence[int],
        dim: int = 0,
        arguments: Sequence[Arguments] = (),
        loss_weight: Callable[..., Any] | str | None = None,
        is_auto: bool = True,
    ) -> None:
        self.looks = looks
        self._function = function
        self.chunk_sizes = chunk_sizes
        self._dim = dim
        self._arguments = arguments
        self._loss_weight = loss_weight
        self._is_auto = is_auto
        has_scalars = any(True for _ in _scalars(arguments[:1]))
        self._whole_batch = list(_scalars(arguments)) if has_scalars else []
        self._adds_up = any(kwargs.get("num_items_in_batch") is not None for _, kwargs in arguments)
        self._weights: list[Any] | None = None
        self._results: dict[tuple[int, ...], torch.Tensor] = {}
        self._counted: list[CountedLoss] = []
        self._calls: Calls = {}

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Count and note what the replicas compute in this context."""
        if len(self.chunk_sizes) < 2 or not self._is_auto:
            yield
            return
        is_recorded = torch.is_grad_enabled()
        notes_calls = self.looks.notes_calls[is_recorded] and self._loss_weight is None
        with (
            counting() as self._counted,
            noting(notes_calls and self.looks.may_note) as self._calls,
        ):
            yield
        self.looks.notes_calls[is_recorded] = False  # unless join finds that it is needed

    def settle(self, outputs: Sequence[Any]) -> None:
        """Ask ``loss_weight``, if there is a loss in the outputs, and let go of the arguments."""
        if self._loss_weight is not None and any(map(is_loss, nested.tensors(outputs[0]))):
            self._weights = [
                weight_of_chunk(self._loss_weight, self._function, args, kwargs)
                for args, kwargs in self._arguments
            ]
        self._arguments = ()

    def join(
        self, outputs: Sequence[torch.Tensor], name: str, device: torch.device
    ) -> torch.Tensor:
        """Return the value that the whole batch has, on ``device``. Differentiable.

        Outputs are 0-dim floating, one of each replica, and have the same name on all of them.
        """
        if self._weights is not None:
            weights: list[Any]
            weights = [w.get(name) if isinstance(w, Mapping) else w for w in self._weights]
            if not any(weight is None for weight in weights):
                counted, nodes = self._nodes(outputs)
                if None not in nodes:
                    self._graph(name, counted).terms(nodes)  # keeps 0 / 0 off the gradients
                return weighted_mean(outputs, weights, device)
        if not self._is_auto:
            return weighted_mean(outputs, self.chunk_sizes, device)
        return self._joined(outputs, name, device)

    def _joined(
        self, outputs: Sequence[torch.Tensor], name: str, device: torch.device
    ) -> torch.Tensor:
        is_recorded = outputs[0].grad_fn is not None
        alias = tuple(map(_storage, outputs))
        if not is_recorded and alias in self._results:  # it was detached from another output
            return self._results[alias].detach()
        counted, nodes = self._nodes(outputs)
        if not is_recorded and not all(node in counted for node in nodes):
            self.looks.notes_calls[False] = True
            if None in nodes:
                is_sum = name in self.looks.sums
                return weighted_mean(outputs, None if is_sum else self.chunk_sizes, device)
        graph = self._graph(name, counted)
        terms = graph.terms(nodes)
        own = [term for term in terms if not term.losses and not term.is_constant]
        known = [term for term in terms if term.losses]
        seen = (name, *graph.names)
        reasons = [*graph.reasons, *self._disagreement(own, seen)]
        if seen not in self.looks.seen:
            self.looks.seen.add(seen)
            if not self._calls:  # a look that was not close enough
                self.looks.notes_calls[torch.is_grad_enabled()] = True
            if not all(map(_are_equal, graph.multipliers)):
                reasons.append("it is multiplied by a tensor that differs between the replicas")
        base = (own or known or [Term(self.chunk_sizes)])[0]
        if base.weights is None and any(term.is_constant for term in terms):
            if own:
                reasons.append("it adds what is the same on every replica to a sum over samples")
            base = Term(self.chunk_sizes)
        if reasons:
            base = Term(self.chunk_sizes)
        for text in [*reasons, *graph.doubts][:1]:
            self.looks.warn(name, self._function, text)
        if any(term.counts for term in own):
            self.looks.notes_calls[is_recorded] = True
        if not is_recorded and torch.is_grad_enabled():
            self._remember(name, base)
        shares = shares_of(base, device, len(outputs))
        joined = weighted_sum(outputs, shares, device, may_be_nan=base not in known)
        for term in known:
            if term is not base:
                joined = joined + correction(term, shares, device)
        self._results[alias] = joined
        return joined

    def _graph(self, name: str, counted: Mapping[Any, CountedLoss]) -> LossGraph:
        return LossGraph(
            self.chunk_sizes,
            self._dim,
            counted,
            self._calls,
            self._whole_batch,
            self._adds_up,
            self.looks.places.setdefault(name, {}),
        )

    def _nodes(self, outputs: Sequence[torch.Tensor]) -> tuple[dict[Any, CountedLoss], list[Any]]:
        """Return counted losses by their nodes, and the node of each output, None if unknown."""
        counted = {node: item for item in self._counted for node in _nodes_of(item)}
        aliases = {_storage(item.loss): node for node, item in reversed(counted.items())}
        return counted, [
            output.grad_fn or self._calls.get(id(output)) or aliases.get(_storage(output))
            for output in outputs
        ]

    def _remember(self, name: str, term: Term) -> None:
        """Keep what notes have shown of an output that autograd tells nothing of."""
        if term.weights is None:
            self.looks.sums.add(name)
        elif not term.losses and not are_proportional(term.weights, self.chunk_sizes):
            self.looks.warn(
                name,
                self._function,
                "it is a mean over what counts, and has no graph to read that from; return it "
                "without detach()",
            )

    def _disagreement(self, terms: Sequence[Term], graph: tuple[str, ...]) -> Iterator[str]:
        """Yield why terms do not share what they are a mean over."""
        for term in terms[1:]:
            one, other = terms[0].weights, term.weights
            if one is None and other is None:
                continue
            if one is None or other is None:
                yield "it adds a mean and a sum over samples"
                continue
            if are_proportional(one, other) or graph in self.looks.agreeing:
                continue
            one, other = ([float(weight) for weight in weights] for weights in (one, other))
            if not are_proportional(one, other):
                yield "it adds means over unlike numbers of entries"
            elif not are_proportional(one, self.chunk_sizes):  # nor is that by chance
                self.looks.agreeing.add(graph)


def _nodes_of(counted: CountedLoss) -> Iterator[Any]:
    if counted.node is None and counted.loss.grad_fn is not None:
        # A function of autograd that computed it without a graph has a node by now.
        counted.value, counted.node = counted.loss, counted.loss.grad_fn
    elif counted.node is None and counted.call is None:
        counted.node = Call("counted", counted.loss.shape)
    return (node for node in (counted.node, counted.call) if node is not None)


def _are_equal(tensors: Sequence[torch.Tensor]) -> bool:
    first, *others = (tensor.detach().cpu() for tensor in tensors)
    return all(other.shape == first.shape and other.allclose(first) for other in others)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def is_loss(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a number that has a mean, as losses are."""
    return not tensor.dim() and (tensor.is_floating_point() or tensor.is_complex())


def _scalars(value: Any) -> Iterator[Any]:
    """Yield the numbers and 0-dim tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        if not value.dim():
            yield value
    elif isinstance(value, Real):
        yield value
    elif not isinstance(value, str):
        for _, child in nested.items(value) or ():
            yield from _scalars(child)
