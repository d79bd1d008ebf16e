"""Call a replica on other samples than it had, to see how outputs depend on their number."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from . import nested
from .call_inputs import Arguments
from .losses.join import is_loss
from .losses.reductions import noticing
from .losses.trace import Trace, tracing
from .parallel_apply import parallel_apply

_MAX_NUMEL = 2**16
"""The most entries of a parameter that is not trained, but copied for a trial."""


@dataclass(slots=True, eq=False)
class Trial:
    """Calls a replica again. This changes no gradients, buffers or random numbers of torch.

    Neither does it change parameters, other than large ones without gradients that forward writes.

    Attributes:
        function: the replica, or what else was called.
        device: its device.
        output: what it returned.
        dim: the batch dimension.
        num_samples: how many samples there are to choose from.
        scatter: returns the arguments on each of several devices, for so many of these samples.
    """

    function: Callable[..., Any]
    device: torch.device
    output: Any
    dim: int
    num_samples: int
    scatter: Callable[[Sequence[torch.device], Sequence[int]], Sequence[Arguments]]
    _tried: dict[Any, list[tuple[Trace, dict[str, torch.Tensor]]]] = field(
        default_factory=dict, init=False
    )

    def outputs(
        self, output: torch.Tensor, sizes: Sequence[int], evaluates: bool = False
    ) -> list[tuple[Trace, torch.Tensor]]:
        """Return an output for other samples, and how it was computed; nothing if that fails.

        Args:
            output: one of the replica's 0-dim outputs; the others are 0-dim as well.
            sizes: how many samples each output is for; they are the last ones.
            evaluates: whether modules are in evaluation mode, and all is computed twice.
        """
        key = (*sizes, evaluates)
        if key not in self._tried:
            try:
                self._tried[key] = self._call(sizes, evaluates)
            except Exception:  # of whatever forward does with so few samples
                self._tried[key] = []
        paths = {id(one): path for path, one in _losses(self.output)}
        path = paths.get(id(output), "not among them")  # where gather is overridden
        tried = [(trace, losses.get(path)) for trace, losses in self._tried[key]]
        found = [(trace, one) for trace, one in tried if one is not None]
        return found if len(found) == len(tried) else []

    @torch.no_grad()
    def _call(
        self, sizes: Sequence[int], evaluates: bool
    ) -> list[tuple[Trace, dict[str, torch.Tensor]]]:
        devices = [torch.device("cpu"), *[self.device] * len(sizes)]
        _, *arguments = self.scatter(devices, [self.num_samples - sum(sizes), *sizes])
        arguments *= 1 + evaluates
        traces, modules = [Trace(self.dim) for _ in arguments], []
        if evaluates and isinstance(self.function, nn.Module):
            modules = [module for module in self.function.modules() if module.training]
        with (
            torch.random.fork_rng(
                [] if self.device.type == "cpu" else [self.device], device_type=self.device.type
            ),
            warnings.catch_warnings(),
            noticing(),
            tracing(traces),
        ):
            warnings.simplefilter("ignore")  # the call itself has warned
            for module in modules:
                module.training = False
            try:
                functions = [_isolated(self.function) for _ in arguments]
                losses = parallel_apply(functions, arguments, [self.device] * len(arguments))
            finally:
                for module in modules:
                    module.training = True
        return list(zip(traces, losses, strict=True))


def _losses(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the losses in nested containers, and their dotted paths."""
    if isinstance(value, torch.Tensor) and is_loss(value):
        yield path, value
    for name, child in nested.items(value) or ():
        yield from _losses(child, f"{path}.{name}")


def _isolated(function: Callable[..., Any]) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a function that returns the losses only, and keeps a module's tensors as they are."""
    if not isinstance(function, nn.Module):
        return lambda *args, **kwargs: dict(_losses(function(*args, **kwargs)))
    tensors = {name: buffer.clone() for name, buffer in function.named_buffers()}
    for name, parameter in function.named_parameters():
        copy = parameter.detach()
        if not parameter.requires_grad and parameter.numel() <= _MAX_NUMEL:
            copy = copy.clone()  # counts and means are written in forward
        copy.requires_grad_(parameter.requires_grad)
        if isinstance(parameter, nn.Parameter):
            copy = nn.Parameter(copy, parameter.requires_grad)
        vars(copy).update(vars(parameter))
        tensors[name] = copy
    return lambda *args, **kwargs: dict(_losses(functional_call(function, tensors, args, kwargs)))
