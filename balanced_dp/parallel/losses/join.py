"""Join the 0-dim outputs of the replicas into those of the batch.

A ``ChunkLosses`` belongs to one call. While the replicas run, it counts cross entropies and notes
calls. Afterwards it walks the graph of each 0-dim output, and adds up the values of the replicas by
the terms that it finds. An ``OutputHistory`` belongs to a model. It remembers what earlier calls
have shown, so that calls are noted only where that is necessary.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from numbers import Real
from typing import Any

import torch

from ...errors import warn
from ...free_threading import looking_at_nodes
from .. import nested
from ..call_inputs import Arguments, described
from .calls import Call, Calls, noting
from .counted import CountedLoss, counting
from .graph import LossGraph
from .samples import Samples
from .scales import Scaling
from .terms import Term, are_close, are_proportional, join_terms, weighted_mean
from .weight import weight_of_chunk

_TINY = 1e-6
"""The largest number that is ignored if it is added to the denominators of chunks."""


@dataclass(slots=True, eq=False)
class OutputHistory:
    """What earlier calls of a model have shown about its outputs.

    Attributes:
        may_note: whether calls may be noted. For compiled modules they may not, since Dynamo would
            compile the notes.
        num_calls: the number of calls with (True) and without gradients (False).
        notes_calls: whether the next call with or without gradients notes calls.
        must_note: whether all calls with or without gradients do.
        ended: whether a call with or without gradients has ended. Until then, those of other
            threads cannot rely on what it shows.
        sums: the names of outputs without a graph that are sums.
        axes: for outputs whose shapes have shown it once, the dimension of the samples.
        places, added: for each output, what is known of places in its graph; see ``Scaling``.
        agreeing: graphs whose terms have different denominators that are proportional.
        seen: graphs whose multipliers were compared between replicas.
        warned: the outputs, as a warning calls them, and names of inputs that were warned of.
    """

    may_note: bool = True
    num_calls: Counter[bool] = field(default_factory=Counter)
    notes_calls: dict[bool, bool] = field(default_factory=dict)
    must_note: set[bool] = field(default_factory=set)
    ended: set[bool] = field(default_factory=set)
    sums: set[str] = field(default_factory=set)
    axes: dict[str, int] = field(default_factory=dict)
    places: dict[str, dict[tuple[Any, ...], bool]] = field(default_factory=dict)
    added: dict[str, dict[tuple[Any, ...], float | str]] = field(default_factory=dict)
    agreeing: set[tuple[str, ...]] = field(default_factory=set)
    seen: set[tuple[str, ...]] = field(default_factory=set)
    warned: set[str] = field(default_factory=set)

    def begin_call(self, has_gradients: bool) -> bool:
        """Count a call, and return whether it notes calls.

        In the first, second, fourth, eighth call and so on, look at losses anew.
        """
        num_calls = self.num_calls[has_gradients] + 1  # other threads may count, too
        self.num_calls[has_gradients] = num_calls
        looks_anew = num_calls.bit_count() == 1
        has_ended = has_gradients in self.ended  # first, as must_note may be set until then
        notes = (
            self.notes_calls.pop(has_gradients, False)
            or looks_anew
            or has_gradients in self.must_note
            or not has_ended
        )
        if looks_anew:
            self.agreeing.clear()
            self.seen.clear()
        return notes

    def warn(self, name: str, function: Callable[..., Any], reason: str) -> None:
        """Warn, once for each output, that it may differ from its value for the whole batch."""
        output = f"output {name or '(the whole)'} of {described(function)}"
        if output in self.warned:
            return
        self.warned.add(output)
        warn(
            f"{output} may differ from its value for the whole batch: {reason}. Compute it "
            "outside, from gathered outputs, or compute only what is linear inside; give "
            "loss_weight if it is a mean over other entries, or scalar_outputs='mean' if a mean "
            "weighted by samples is meant"
        )


@dataclass(slots=True, eq=False)
class ChunkLosses:
    """The 0-dim outputs of the replicas in one call.

    Attributes:
        history: what earlier calls have shown.
        function: the function that each replica computes.
        sizes: how many samples each replica has; a single one if the batch was not split.
        dim: the batch dimension.
        arguments: the arguments of each replica; none once they have been read.
        loss_weight: computes the weight of each replica's losses; if None, it is read from their
            graphs.
        is_auto: whether graphs are walked; if not, losses are weighted by chunk size.
    """

    history: OutputHistory
    function: Callable[..., Any]
    chunk_sizes: InitVar[Sequence[int] | None]
    dim: int
    arguments: Sequence[Arguments]
    loss_weight: Callable[..., Any] | str | None = None
    is_auto: bool = True
    _given: list[Any] = field(default_factory=list, init=False)
    _has_num_items: bool = field(default=False, init=False)
    _weights: list[Any] | None = field(default=None, init=False)
    _results: dict[tuple[tuple[int, int], ...], torch.Tensor] = field(
        default_factory=dict, init=False
    )
    _counted: list[CountedLoss] = field(default_factory=list, init=False)
    _calls: Calls = field(default_factory=dict, init=False)
    sizes: Sequence[int] = field(init=False)

    def __post_init__(self, chunk_sizes: Sequence[int] | None) -> None:
        self.sizes = chunk_sizes or [1]

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager in which the replicas run; counts cross entropies and notes calls."""
        if len(self.sizes) < 2 or not self.is_auto:
            yield
            return
        has_gradients = torch.is_grad_enabled()
        must_note = self.history.begin_call(has_gradients)
        notes = must_note and self.history.may_note and self.loss_weight is None
        try:
            with counting() as self._counted, noting(notes, self.dim) as self._calls:
                yield
        except BaseException:
            if must_note:  # the next call does instead
                self.history.notes_calls[has_gradients] = True
            raise

    def read_arguments(self, outputs: Sequence[Any]) -> None:
        """Read from the arguments what losses in the outputs need, and release them."""
        arguments, self.arguments = self.arguments, ()
        if not any(map(is_loss, nested.tensors(outputs[0]))):
            return
        if self.loss_weight is not None:
            self._weights = [
                weight_of_chunk(self.loss_weight, self.function, args, kwargs)
                for args, kwargs in arguments
            ]
        if any(True for _ in _scalars(arguments[:1])):
            self._given = list(_scalars(arguments))
        self._has_num_items = any(
            kwargs.get("num_items_in_batch") is not None for _, kwargs in arguments
        )

    def end(self) -> None:
        """Let later calls rely on what this one has shown of its losses."""
        self.history.ended.add(torch.is_grad_enabled())

    def join(
        self, outputs: Sequence[torch.Tensor], name: str, device: torch.device
    ) -> torch.Tensor:
        """Return the value of the whole batch on ``device``. Differentiable.

        Args:
            outputs: a 0-dim floating tensor of each replica.
            name: the dotted path of the output.
            device: the device of the result.
        """
        with looking_at_nodes:
            return self._join(outputs, name, device)

    def _join(
        self, outputs: Sequence[torch.Tensor], name: str, device: torch.device
    ) -> torch.Tensor:
        if self._weights is not None:
            weights = [w.get(name) if isinstance(w, Mapping) else w for w in self._weights]
            if not any(weight is None for weight in weights):
                graph = self._graph(outputs, name)
                if None not in graph.nodes:
                    graph.terms()  # replaces NaN gradients by 0
                return weighted_mean(outputs, weights, device)
        if not self.is_auto:
            return weighted_mean(outputs, self.sizes, device)
        has_graph = outputs[0].grad_fn is not None
        alias = tuple(map(_storage, outputs))
        if not has_graph and alias in self._results:  # it was detached from another output
            return self._results[alias].detach()
        graph = self._graph(outputs, name)
        if not has_graph and not all(node in graph.counted for node in graph.nodes):
            self.history.must_note.add(False)
            if None in graph.nodes:
                is_sum = name in self.history.sums
                if not torch.is_grad_enabled():
                    self.history.warn(
                        name, self.function, "how it was computed is not known without gradients"
                    )
                return weighted_mean(outputs, None if is_sum else self.sizes, device)
        terms = graph.terms()
        base = self._base(name, graph, terms)
        if graph.scaling.must_note:  # other calls may compute another loss, so from now on
            self.history.must_note.add(torch.is_grad_enabled())
        if not has_graph and torch.is_grad_enabled():
            self._remember(name, base)
        joined = join_terms(outputs, terms, base, device)
        self._results[alias] = joined
        return joined

    def _base(self, name: str, graph: LossGraph, terms: Sequence[Term]) -> Term:
        """Return the term whose fractions all terms get, and warn if that may not be exact.

        Terms without known values have to agree on the fractions, since ``join_terms`` corrects
        only the others. If they do not agree, the chunk sizes are the weights.
        """
        unknown = [term for term in terms if not term.losses and not term.is_constant]
        known = [term for term in terms if term.losses]
        kind = (name, *graph.names)
        reasons = [*graph.reasons, *self._disagreement(unknown, kind)]
        if kind not in self.history.seen:
            self.history.seen.add(kind)
            if not self._calls:  # the next call of this kind has to be noted
                self.history.notes_calls[torch.is_grad_enabled()] = True
            if not all(map(are_close, graph.scaling.multipliers)):
                reasons.append("it is multiplied by a tensor that differs between the replicas")
        base = (unknown or known or [Term(self.sizes)])[0]
        has_constant = any(term.is_constant for term in terms)
        is_sum_with_constant = base.weights is None and has_constant
        if is_sum_with_constant and unknown:
            reasons.append("it adds a term that is the same on every replica to a sum over samples")
        if base.denominator is not None and (has_constant or graph.adds_constant):
            if base.denominator.added > _TINY:
                reasons.append(
                    "it adds a term that is the same on every replica to a sum that is divided by "
                    f"a count plus {base.denominator.added:g}"
                )
            elif not base.denominator.may_be_empty:
                base.denominator = None  # the fractions have to add up to 1
        for text in [*reasons, *graph.scaling.doubts][:1]:
            self.history.warn(name, self.function, text)
        return Term(self.sizes) if reasons or is_sum_with_constant else base

    def _graph(self, outputs: Sequence[torch.Tensor], name: str) -> LossGraph:
        counted = {node: item for item in self._counted for node in _nodes_of(item)}
        aliases = {_storage(item.loss): node for node, item in reversed(counted.items())}
        nodes = [
            output.grad_fn or self._calls.get(id(output)) or aliases.get(_storage(output))
            for output in outputs
        ]
        places = self.history.places.setdefault(name, {})
        samples = Samples(self.sizes, self.dim, counted)
        added = self.history.added.setdefault(name, {})
        scaling = Scaling(samples, self._calls, self._given, self._has_num_items, places, added)
        return LossGraph(nodes, counted, samples, scaling)

    def _remember(self, name: str, term: Term) -> None:
        """Remember what noted calls have shown of an output without a graph."""
        self.history.sums.discard(name)
        if term.weights is None:
            self.history.sums.add(name)
        elif not term.losses and not are_proportional(term.weights, self.sizes):
            self.history.warn(
                name,
                self.function,
                "it is a mean over some entries only, and has no graph that shows which; return it "
                "without detach()",
            )

    def _disagreement(self, terms: Sequence[Term], graph: tuple[str, ...]) -> Iterator[str]:
        """Yield why terms do not have the same fractions."""
        for term in terms[1:]:
            one, other = terms[0].weights, term.weights
            if one is None and other is None:
                continue
            if one is None or other is None:
                yield "it adds a mean and a sum over samples"
                continue
            if are_proportional(one, other) or graph in self.history.agreeing:
                continue
            one, other = ([float(weight) for weight in weights] for weights in (one, other))
            if not are_proportional(one, other):
                yield "it adds means over unlike numbers of entries"
            elif not are_proportional(one, self.sizes):  # or it may be by chance
                self.history.agreeing.add(graph)


def _nodes_of(counted: CountedLoss) -> Iterator[Any]:
    """Return the nodes and calls whose value is that of a counted loss."""
    is_of_function = isinstance(counted.loss.grad_fn, torch.autograd.function.BackwardCFunction)
    if counted.node is None and is_of_function:
        # It was computed inside of an autograd function, which has given it a node since.
        counted.value, counted.node = counted.loss, counted.loss.grad_fn
    elif counted.node is None and counted.call is None:
        counted.node = Call("counted", counted.loss.shape)
    return (node for node in (counted.node, counted.call) if node is not None)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def is_loss(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is 0-dim and of a type that has means, as losses are."""
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
