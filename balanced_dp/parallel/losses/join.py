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
from typing import Any

import torch

from ...devices import is_symbolic
from ...errors import warn
from .. import nested
from ..call_inputs import Arguments, described
from .batch_value import BatchValues
from .facts import Fact, Facts, Place, UnknownKindError
from .reductions import noticing
from .step import UnclearError
from .trace import Trace, tracing
from .weight import weight_of_chunk
from .weighted import weighted_mean

_TOLERANCE = 0.02
"""How much a value that is not float64 may depend on how many samples are computed at a time."""

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
        checked: how outputs differed for a few samples, or "", by name; None if that is not asked.
        warned: the outputs, as a warning calls them, and names of inputs that were warned of.
    """

    num_calls: Counter[bool] = field(default_factory=Counter)
    axes: dict[str, int] = field(default_factory=dict)
    kinds: dict[int, str] = field(default_factory=dict)
    facts: dict[Place, Fact] = field(default_factory=dict)
    checked: dict[str, str] | None = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)
    _maps: OutputHistory | None = field(default=None, init=False)

    def of_maps(self) -> OutputHistory:
        """Return what has shown of functions that are mapped over outputs, other than axes."""
        if self._maps is None:
            self._maps = OutputHistory(checked=None, warned=self.warned)
        return replace(self._maps, axes={})

    def warn(self, name: str, function: Callable[..., Any], reason: str) -> None:
        """Warn, once for each output, that it may differ from its value for the whole batch."""
        output = f"output {name or '(the whole)'} of {described(function)}"
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
        traces: what each replica has computed; those of an earlier call go on.
    """

    history: OutputHistory
    function: Callable[..., Any]
    chunk_sizes: Sequence[int] | None
    dim: int
    loss_weight: Callable[..., Any] | str | None = None
    is_auto: bool = True
    traces: Sequence[Trace] = ()
    _trial: Any = field(default=None, init=False)
    _compares_again: bool = field(default=False, init=False)
    _weights: list[Any] = field(default_factory=list, init=False)
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
        self.traces = self.traces or [Trace(self.dim) for _ in self.chunk_sizes or ()]
        with noticing(), tracing(self.traces):
            yield

    @contextlib.contextmanager
    def joining(self, arguments: Sequence[Arguments], trial: Any) -> Iterator[None]:
        """Context manager in which outputs are joined.

        Args:
            arguments: those of each replica, for ``loss_weight``.
            trial: a ``Trial`` of the first replica. It is not used on symbolic devices: they have
                no values, and are there to measure memory.
        """
        if self.loss_weight is not None and any(map(is_loss, nested.tensors(trial.output))):
            self._weights = [
                weight_of_chunk(self.loss_weight, self.function, args, kwargs)
                for args, kwargs in arguments
            ]
        self._trial = None if is_symbolic(trial.device) else trial
        try:
            yield
        finally:
            self._trial = None

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
        weights = [w.get(name) if isinstance(w, Mapping) else w for w in self._weights]
        if weights and not any(weight is None for weight in weights):
            for trace, output, weight in zip(self.traces, outputs, weights, strict=False):
                if isinstance(weight, torch.Tensor):
                    trace.ignore_gradients_where(weight == 0, output)
            return weighted_mean(outputs, weights, device)
        if not self.is_auto or not self.traces:
            return weighted_mean(outputs, sizes, device)
        values, history = self._values, self.history
        if values is None or values.device != device:
            if len(history.facts) > _MAX_FACTS:
                history.facts.clear()
                history.kinds.clear()
            facts = Facts(sizes, history.facts, self._compares_again)
            values = self._values = BatchValues(self.traces, facts, device, history.kinds)
        doubts = values.facts.doubts
        doubts.clear()
        try:
            value = self._value(values, outputs, name)
            self._check(values, outputs[0], name)
        except UnclearError as error:
            doubts.append(str(error))
            value = weighted_mean(outputs, sizes, device)
        if doubts and not is_symbolic(outputs[0].device):
            history.warn(name, self.function, doubts[0])
        return value

    def _value(
        self, values: BatchValues, outputs: Sequence[torch.Tensor], name: str
    ) -> torch.Tensor:
        kinds, learned = self.history.kinds, set[int]()
        while True:
            try:
                return values.of(outputs, name)
            except UnknownKindError as error:
                [kind] = error.args
                if kind not in learned:
                    self._learn(kind, values, outputs[0], name)
                    learned.add(kind)
                else:
                    kinds[kind] = _UNTRIED
                kinds.setdefault(kind, _UNTRIED)
                values.facts.compares_again = True  # with the other replicas

    def _learn(self, kind: int, values: BatchValues, output: torch.Tensor, name: str) -> None:
        """Learn from a trial how the first replica's output depends on the number of samples."""
        history, size = self.history, values.facts.chunk_sizes[0]
        most = self._trial.num_samples if self._trial else 0
        # A single sample may lose its dimension, and have no statistics.
        other = next((n for n in (2, 3, 1) if n != size and n <= most), None)
        if other is None:
            return
        # Both start with the same buffers, which the call itself may have written to.
        if size + other <= most:
            pair = self._trial.outputs(output, [size, other])
        else:
            pair = [*self._trial.outputs(output, [size]), *self._trial.outputs(output, [other])]
        if len(pair) < 2:
            return
        traces, outputs = zip(*pair, strict=True)
        facts = Facts([size, other], history.facts, True, is_trial=True)
        try:
            with torch.no_grad():
                BatchValues(traces, facts, values.device, history.kinds).of(outputs, name)
        except UnclearError as error:
            history.kinds[kind] = str(error)
        values.facts.doubts.extend(facts.doubts)

    def _check(self, values: BatchValues, output: torch.Tensor, name: str) -> None:
        """Raise UnclearError if a check in the first call has shown that an output is not known."""
        checked = self.history.checked
        if checked is None:
            return
        if name not in checked and self._trial is not None and self._trial.num_samples > 3:
            checked[name] = self._difference(values.device, output, name)
        if checked.get(name):
            raise UnclearError(checked[name])

    def _difference(self, device: torch.device, output: torch.Tensor, name: str) -> str:
        """Return how what is joined from two times two samples differs from all four, or ""."""
        parts = self._trial.outputs(output, [2, 2], evaluates=True)
        whole = self._trial.outputs(output, [4], evaluates=True)
        if not parts or not whole:
            return ""
        traces, outputs = zip(*parts, *whole, strict=True)
        facts = Facts([2, 2], dict(self.history.facts), True)
        joined = BatchValues(traces[:2], facts, device, dict(self.history.kinds))
        try:
            with torch.no_grad():
                value = joined.of(outputs[:2], name).item()
        except (UnclearError, UnknownKindError):  # another loss than in training
            return ""
        a, b, *again, found, found_again = [output.item() for output in outputs]
        if [a, b, found] != [*again, found_again]:  # it is random
            return ""
        eps = torch.finfo(output.dtype).eps
        relative, absolute = (1e-6, 1e-9) if eps < 1e-9 else (max(_TOLERANCE, 8 * eps), 1e-5)
        if abs(value - found) > relative * max(abs(a), abs(b), abs(found)) + absolute:  # no NaN
            return f"for four samples it is {found:g}, but {value:g} if joined from two and two"
        return ""


def is_loss(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is 0-dim and of a type that has means, as losses are."""
    return not tensor.dim() and (tensor.is_floating_point() or tensor.is_complex())
