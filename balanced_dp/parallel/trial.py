"""Call a replica on fewer samples than it had, to see what depends on their number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
        for one, other in zip(nested.tensors(self.output), nested.tensors(outputs), strict=False):
            if one is output:
                return trace, other, size
        return None

    def _try(self, chunk_size: int, dim: int) -> tuple[Trace, Any, int]:
        # A single sample may lose its dimension, and have no statistics.
        wanted, num_samples = (2, 3, 1), self.num_samples or 0
        size = next(n for n in wanted if n != chunk_size and n <= num_samples)
        # The last ones, since the replica has had the first.
        sizes = [num_samples - size, size]
        _, arguments = self.scatter([torch.device("cpu"), self.device], sizes)
        trace = Trace(dim)
        devices = [] if self.device.type == "cpu" else [self.device]
        with (
            torch.random.fork_rng(devices, device_type=self.device.type),
            noticing(),
            tracing([trace]),
        ):
            [outputs] = parallel_apply([_isolated(self.function)], [arguments], [self.device])
        return trace, outputs, size


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
