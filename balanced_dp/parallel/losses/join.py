"""Join the 0-dim outputs of the replicas into those of the batch.

A ``ChunkLosses`` belongs to one call, an ``OutputHistory`` to a model: it remembers what earlier
calls have shown. If all chunks have one size, they do not tell how something depends on their
samples. Then the first replica is tried on as many and on another number, once for each kind of
computation. In the first call, each output for four samples is compared with what is joined from
two and two of them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch

from ...devices import is_symbolic
from ...errors import GatherError, warn
from .. import nested
from ..call_inputs import Arguments, described
from .batch_value import BatchValues
from .facts import Fact, Facts, Place, UnknownKindError
from .reductions import noticing
from .step import UnclearError
from .trace import Trace, tracing
from .weight import weight_of_chunk
from .weighted import weighted_mean

_UNTRIED = (
    "chunks of one size do not tell how it depends on the number of samples, and forward could not "
    "be tried with another number"
)
_MAX_FACTS = 10_000
"""The most facts at the end of a call that the next one still knows."""


@dataclass(slots=True, eq=False)
class OutputHistory:
    """What earlier calls of a model have shown about its outputs.

    Attributes:
        num_calls: the number of calls with (True) and without gradients (False).
        axes: for outputs whose shapes have shown it once, the dimension of the samples.
        kinds, facts: what is known of computations, and of places in them; see ``BatchValues``.
        checked: how outputs, by what ``ChunkLosses.described`` returns, differed for a few samples,
            or "".
        warned: the outputs, as a warning calls them, and names of inputs that were warned of.
    """

    num_calls: Counter[bool] = field(default_factory=Counter)
    axes: dict[str, int] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    facts: dict[Place, Fact] = field(default_factory=dict)
    checked: dict[str, str] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    _maps: OutputHistory | None = field(default=None, init=False)

    def of_maps(self) -> OutputHistory:
        """Return what has shown of functions that are mapped over outputs, other than axes."""
        if self._maps is None:
            self._maps = OutputHistory(warned=self.warned)
        return replace(self._maps, axes={})

    def warn(self, output: str, reason: str) -> None:
        """Warn, once for each output, that it may differ from its value for the whole batch."""
        if output in self.warned:
            return
        self.warned.add(output)
        warn(
            f"{output} may differ from its value for the whole batch: {reason}. Compute it "
            "outside, from gathered outputs; give loss_weight if it is a mean over other entries, "
            "or scalar_outputs='mean' if a mean weighted by samples is meant"
        )


@dataclass(slots=True, eq=False)
class ChunkLosses:
    """The 0-dim outputs of the replicas in one call.

    Attributes:
        history: what earlier calls have shown.
        function: the function that each replica computes.
        chunk_sizes: how many samples each replica has; None if the batch was not split.
        dim: the batch dimension.
        loss_weight: the weight of each replica's losses; if None, it is found out.
        is_auto: whether it is found out how losses were computed; if not, they are weighted by
            chunk size.
    """

    history: OutputHistory
    function: Callable[..., Any]
    chunk_sizes: Sequence[int] | None
    dim: int
    loss_weight: Callable[..., Any] | str | None = None
    is_auto: bool = True
    _traces: Sequence[Trace] = field(default=(), init=False)
    _compares_again: bool = field(default=False, init=False)
    _arguments: Sequence[Arguments] = field(default=(), init=False)
    _weights: list[Any] = field(default_factory=list, init=False)
    _trial: Any = field(default=None, init=False)
    _values: BatchValues | None = field(default=None, init=False)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager in which the replicas run, and means and sums are traced."""
        if len(self.chunk_sizes or ()) < 2 or not self.is_auto:
            with tracing(()):  # not with the traces of a call that this one is part of
                yield
            return
        num_calls, has_gradients = self.history.num_calls, torch.is_grad_enabled()
        num_calls[has_gradients] += 1
        # In the first, second, fourth, eighth call and so on.
        self._compares_again = num_calls[has_gradients].bit_count() == 1
        self._traces = [Trace(self.dim) for _ in self.chunk_sizes or ()]
        with noticing(), tracing(self._traces):
            yield

    @contextlib.contextmanager
    def joining(self, arguments: Sequence[Arguments], trial: Any) -> Iterator[None]:
        """Context manager in which outputs are joined.

        Args:
            arguments: those of each replica, for ``loss_weight``.
            trial: a ``Trial`` of a replica. It is not used on symbolic devices: they have no
                values, and are there to measure memory.
        """
        is_used = self.is_auto and not is_symbolic(trial.device)
        self._arguments, self._trial = arguments, trial if is_used else None
        try:
            yield
        finally:
            self._arguments, self._trial = (), None

    def join(
        self, outputs: Sequence[torch.Tensor], name: str, device: torch.device
    ) -> torch.Tensor:
        """Return the value of the whole batch on ``device``. Differentiable.

        Args:
            outputs: a 0-dim floating tensor of each replica.
            name: the dotted path of the output.
            device: the device of the result.
        """
        sizes = self.chunk_sizes or [1] * len(outputs)
        if self.loss_weight is not None and not self._weights:
            self._weights = [
                weight_of_chunk(self.loss_weight, self.function, args, kwargs)
                for args, kwargs in self._arguments
            ]
        weights = [w.get(name) if isinstance(w, Mapping) else w for w in self._weights]
        if weights and not any(weight is None for weight in weights):
            for trace, output, weight in zip(self._traces, outputs, weights, strict=False):
                if isinstance(weight, torch.Tensor):
                    trace.ignore_gradients_where(weight == 0, output)
            return weighted_mean(outputs, weights, device)
        if not self.is_auto or not self._traces:
            return weighted_mean(outputs, sizes, device)
        values, history = self._values, self.history
        if values is None or values.device != device:
            if len(history.facts) > _MAX_FACTS:
                history.facts.clear()
                history.kinds.clear()
            facts = Facts(sizes, history.facts, self._compares_again)
            values = self._values = BatchValues(self._traces, facts, device, history.kinds)
        doubts = values.facts.doubts
        doubts.clear()
        try:
            value = self._value(values, outputs, name)
            self._check(values, name)
        except UnclearError as error:
            doubts.append(str(error))
            value = weighted_mean(outputs, sizes, device)
        if doubts and not is_symbolic(outputs[0].device):
            history.warn(self.described(name), doubts[0])
        return value

    def check_number(self, name: str) -> None:
        """Check that a number that is equal on all replicas does not depend on their samples.

        Raises:
            GatherError: it does, by a trial of a model whose chunks are of one size.
        """
        sizes, checked, trial = self.chunk_sizes or (), self.history.checked, self._trial
        if len(sizes) < 2 or len(set(sizes)) > 1:
            return
        output = self.described(name)
        if output not in checked and trial is not None and trial.num_samples > 3:
            checked[output] = trial.changes(name)
        if checked.get(output):
            raise GatherError(
                f"{output} is the same number on every replica, since their chunks have one size: "
                f"{checked[output]}. Count outside, from gathered outputs"
            )

    def described(self, name: str) -> str:
        """Return what messages call an output."""
        return f"output {name or '(the whole)'} of {described(self.function)}"

    def axes(self, name: str) -> list[int] | None:
        """Return the dimensions of an output that depend on the number of samples, if known."""
        axes: list[int] | None = self._trial.axes(name) if self._trial is not None else None
        return axes

    def in_place(self, outputs: Sequence[Any], device: torch.device) -> Sequence[Any]:
        """Return the replicas' outputs with the value of the whole batch for each 0-dim output.

        It is computed on ``device``, and copied to that of each replica.
        """
        if not self.is_auto or len(outputs) < 2:
            return outputs
        losses = [
            {name: leaf for name, leaf in nested.leaves(output) if is_loss(leaf)}
            for output in outputs
        ]
        joined = {
            name: self.join([own[name] for own in losses], name, device)
            for name in losses[0]
            if all(name in own for own in losses)
        }
        return [
            nested.replaced(
                output, {n: value.to(own[n].device, copy=True) for n, value in joined.items()}
            )
            for output, own in zip(outputs, losses, strict=True)
        ]

    def _value(
        self, values: BatchValues, outputs: Sequence[torch.Tensor], name: str
    ) -> torch.Tensor:
        tried = set[int]()
        while True:
            try:
                return values.of(outputs, name)
            except UnknownKindError as error:
                [kind] = error.args
                if kind in tried:
                    values.kinds[kind] = _UNTRIED
                elif self._trial is not None:
                    self._trial.learn(kind, values, name)
                tried.add(kind)
                values.kinds.setdefault(kind, _UNTRIED)
                values.facts.compares_again = True  # with the other replicas

    def _check(self, values: BatchValues, name: str) -> None:
        """Raise UnclearError if a check in the first call has shown that an output is not known."""
        checked, output = self.history.checked, self.described(name)
        if output not in checked and self._trial is not None and self._trial.num_samples > 3:
            checked[output] = self._trial.difference(values, name)
        if checked.get(output):
            raise UnclearError(checked[output])


def is_loss(value: object) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a 0-dim tensor of a type that has means, as losses are."""
    return (
        isinstance(value, torch.Tensor)
        and not value.dim()
        and (value.is_floating_point() or value.is_complex())
    )
