"""Call a replica on fewer samples than it had, to see what depends on their number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from . import nested
from .call_inputs import Arguments
from .losses.reductions import noticing
from .losses.trace import Trace, tracing
from .parallel_apply import parallel_apply


@dataclass(slots=True, eq=False)
class Trial:
    """Calls a replica again, at most once. It changes neither tensors nor random numbers.

    Attributes:
        function: the replica, or what else was called.
        device: its device.
        output: what it returned.
        scatter: returns the arguments on each of several devices, for so many samples.
        num_samples: how many samples there are to choose from; None if they were not split.
    """

    function: Callable[..., Any]
    device: torch.device
    output: Any
    scatter: Callable[[Sequence[torch.device], Sequence[int]], Sequence[Arguments]]
    num_samples: int | None
    _tried: tuple[Trace, Any, int] | None = field(default=None, init=False)
    _has_failed: bool = field(default=False, init=False)
    _parts: tuple[list[Trace], list[Any]] | None = field(default=None, init=False)

    def __call__(
        self, output: torch.Tensor, chunk_size: int, dim: int
    ) -> tuple[Trace, torch.Tensor, int] | None:
        """Return what an output is for another number of samples, and how it was computed.

        Args:
            output: one of the replica's outputs.
            chunk_size: for how many samples that is.
            dim: the batch dimension.

        Returns:
            The trace, the output and the number of samples; None if the trial has failed.
        """
        if self._tried is None and not self._has_failed:
            try:
                self._tried = self._try(chunk_size, dim)
            except Exception:  # of whatever forward does with so few samples
                self._has_failed = True
        if self._tried is None:
            return None
        trace, outputs, size = self._tried
        other = self._same_output(outputs, output)
        return None if other is None else (trace, other, size)

    def _same_output(self, outputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        """Return the one among other outputs that is in the place of ``output``."""
        name = next((name for name, one in _named(self.output) if one is output), None)
        return next((one for other, one in _named(outputs) if other == name), None)

    def parts_and_whole(
        self, output: torch.Tensor, dim: int
    ) -> tuple[Sequence[Trace], Sequence[torch.Tensor]]:
        """Return an output for two samples, for another one, and twice for all three.

        Modules are in evaluation mode.

        Args:
            output: one of the replica's outputs.
            dim: the batch dimension.

        Returns:
            How the first two were computed, and the four outputs; none if the trial has failed.
        """
        if self._parts is None:
            traces = [Trace(dim) for _ in range(4)]
            try:
                self._parts = traces, self._try_parts(traces)
            except Exception:  # of whatever forward does with so few samples
                self._parts = traces, []
        traces, outputs = self._parts
        same = [self._same_output(one, output) for one in outputs]
        found = [one for one in same if one is not None]
        return traces[:2], found if len(found) == len(same) else []

    @torch.no_grad()
    def _try_parts(self, traces: Sequence[Trace]) -> list[Any]:
        others = (self.num_samples or 0) - 3
        cpu, device = torch.device("cpu"), self.device
        _, *arguments = self.scatter([cpu, device, device], [others, 2, 1])
        _, together = self.scatter([cpu, device], [others, 3])
        arguments += [together, together]
        modules = list(self.function.modules()) if isinstance(self.function, nn.Module) else []
        training = [module for module in modules if module.training]
        for module in training:
            module.training = False
        try:
            return self._run(arguments, traces)
        finally:
            for module in training:
                module.training = True

    def _try(self, chunk_size: int, dim: int) -> tuple[Trace, Any, int]:
        # A single sample may lose its dimension, and have no statistics.
        wanted, num_samples = (2, 3, 1), self.num_samples or 0
        size = next(n for n in wanted if n != chunk_size and n <= num_samples)
        # The last ones, since the replica has had the first.
        sizes = [num_samples - size, size]
        _, arguments = self.scatter([torch.device("cpu"), self.device], sizes)
        trace = Trace(dim)
        return trace, self._run([arguments], [trace])[0], size

    def _run(self, arguments: Sequence[Arguments], traces: Sequence[Trace]) -> list[Any]:
        devices, times = [] if self.device.type == "cpu" else [self.device], len(arguments)
        with (
            torch.random.fork_rng(devices, device_type=self.device.type),
            noticing(),
            tracing(traces),
        ):
            functions = [_isolated(self.function) for _ in arguments]
            return parallel_apply(functions, arguments, [self.device] * times)


def _named(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers, and their dotted paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    for name, child in nested.items(value) or ():
        yield from _named(child, f"{path}.{name}")


def _isolated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function, with other tensors if it is a module, so that a call changes no others."""
    if not isinstance(function, nn.Module):
        return function
    tensors: dict[str, torch.Tensor] = {
        name: parameter.detach().requires_grad_(parameter.requires_grad)
        for name, parameter in function.named_parameters()
    }
    tensors.update({name: buffer.clone() for name, buffer in function.named_buffers()})
    return lambda *args, **kwargs: functional_call(function, tensors, args, kwargs)
