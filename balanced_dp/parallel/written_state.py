"""What forward writes to the parameters and buffers of a replica -> those of the module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from .arrivals import parameters_of
from .scatter_gather import move


class WrittenState:
    """The parameters and buffers of replicas, as they were before these ran.

    Where the first replica is on the network's device it shares them. Where the network's device
    runs nothing, what it writes to its copies is to be kept all the same.

    Args:
        network: the module.
        replicas: of one call.
        silently: indices of what was written without a sign, such as through ``.data``; None if
            that is to be found out.
    """

    def __init__(
        self,
        network: nn.Module,
        replicas: Sequence[nn.Module],
        silently: frozenset[int] | None,
    ) -> None:
        replica = replicas[0]
        self._copies: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self._silently = silently
        self._shared: list[tuple[str, torch.Tensor, Any, Any]] = []
        if silently is None:
            shared = [r for i, r in enumerate(replicas) if _shares_parameters(r, replicas[:i])]
            parameters = {id(p): (name, p) for r in shared for name, p in r.named_parameters()}
            self._shared = [(n, p, _signs(p), _values(p)) for n, p in parameters.values()]
        if next(_state(network), None) is not next(_state(replica), None):
            self._copies = [
                (original, copy, _signs(copy))
                for original, copy in zip(_state(network), _state(replica), strict=True)
            ]

    def written_by_several(self) -> list[str]:
        """Returns the names of parameters that replicas on one device share and have written.

        Only where ``silently`` is None.
        """
        return [
            name
            for name, parameter, signs, values in self._shared
            if signs != _signs(parameter) or not _are_equal(parameter, values)
        ]

    @torch.no_grad()
    def write_back(self) -> frozenset[int]:
        """Copies to the network what was written since, and returns what was silently."""
        found = set(self._silently or ())
        for index, (original, copy, before) in enumerate(self._copies):
            if copy is original:
                continue
            if copy.shape != original.shape:
                original.data = move(copy.detach(), original.device)
            elif copy.is_inference() or before != _signs(copy):
                original.copy_(copy)
            elif not isinstance(original, nn.Parameter) and not _is_expanded(original):
                # Batch norm's kernels write statistics without a new version, so a buffer may be
                # new all the same; to autograd it is not, here as there.
                original.data.copy_(copy)
            elif (self._silently is None or index in self._silently) and not _are_equal(
                copy, _values(original)
            ):
                found.add(index)
                original.data.copy_(copy)
        return frozenset(found)


def _state(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yields buffers and parameters, without waiting for their values."""
    return chain(module.buffers(), _parameters(module))


def _parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    for submodule in module.modules():
        for parameter in parameters_of(submodule).values():
            if parameter is not None:
                yield parameter


def _signs(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns what a write changes, but for one through ``.data``."""
    storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    return (0 if tensor.is_inference() else tensor._version, storage)


def _shares_parameters(replica: nn.Module, others: Sequence[nn.Module]) -> bool:
    first = next(_parameters(replica), None)
    return first is not None and any(next(_parameters(other)) is first for other in others)


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns a copy on the CPU, where there is memory for it; emulated ones may have no values."""
    try:
        return tensor.detach().to("cpu", copy=True)
    except RuntimeError:
        return None


def _are_equal(one: torch.Tensor, values: torch.Tensor | None) -> bool:
    try:
        if values is None or torch.equal(one.cpu(), values):
            return True
        is_float = values.is_floating_point()  # and may hold NaN
        return is_float and torch.allclose(one.cpu(), values, 0, 0, equal_nan=True)
    except RuntimeError:  # sparse ones do not tell
        return True


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
