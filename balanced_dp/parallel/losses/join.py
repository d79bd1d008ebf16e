"""Join the 0-dim outputs of the replicas into those of the batch.

A ``ChunkLosses`` belongs to one call, an ``OutputHistory`` to a model: it remembers what earlier
calls have shown.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch

from ...errors import warn
from .. import nested
from ..call_inputs import Arguments, described
from .batch_value import BatchValues
from .facts import Fact, Facts, Place, UnclearError
from .reductions import noticing
from .trace import Trace, tracing
from .weight import weight_of_chunk
from .weighted import weighted_mean


@dataclass(slots=True, eq=False)
class OutputHistory:
    """What earlier calls of a model have shown about its outputs.

    Attributes:
        num_calls: the number of calls with (True) and without gradients (False).
        axes: for outputs whose shapes have shown it once, the dimension of the samples.
        facts: what is known of places in the computation of losses; see ``BatchValues``.
        warned: the outputs, as a warning calls them, and names of inputs that were warned of.
    """

    num_calls: Counter[bool] = field(default_factory=Counter)
    axes: dict[str, int] = field(default_factory=dict)
    facts: dict[Place, Fact] = field(default_factory=dict)
    warned: set[str] = field(default_factory=set)

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
    _compares_again: bool = field(default=False, init=False)
    _given: list[Any] = field(default_factory=list, init=False)
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
        for trace in self.traces:
            trace.keeps_corners = self._compares_again
        with noticing(), tracing(self.traces):
            yield

    def read_arguments(self, arguments: Sequence[Arguments], outputs: Sequence[Any]) -> None:
        """Read what losses in the outputs need from the arguments of each replica."""
        if not any(map(is_loss, nested.tensors(outputs[0]))):
            return
        if self.loss_weight is not None:
            self._weights = [
                weight_of_chunk(self.loss_weight, self.function, args, kwargs)
                for args, kwargs in arguments
            ]
        if any(True for _ in _scalars(arguments[:1])):
            self._given = list(_scalars(arguments))

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
        if self._values is None or self._values.device != device:
            facts = Facts(sizes, self._given, self.history.facts, self._compares_again)
            self._values = BatchValues(self.traces, facts, device)
        doubts = self._values.facts.doubts
        doubts.clear()
        try:
            value = self._values.of(outputs, name)
        except UnclearError as error:
            doubts.insert(0, str(error))
            value = weighted_mean(outputs, sizes, device)
        if doubts:
            self.history.warn(name, self.function, doubts[0])
        return value


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
    else:
        for _, child in nested.items(value) or ():
            yield from _scalars(child)
