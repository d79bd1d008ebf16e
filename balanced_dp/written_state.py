"""What forward writes to the parameters and buffers of a replica -> those of the module."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from .scatter_gather import move


class WrittenState:
    """The parameters and buffers of a replica, as they were before it ran.

    Where the replica is on the network's device it shares them. Where the network's device runs
    nothing, what the first replica writes to its copies is to be kept all the same.

    Args:
        network: the module.
        replica: its first replica, on another device.
        silently: indices of what was written without a sign, such as through ``.data``; None if
            that is to be found out.
    """

    def __init__(
        self, network: nn.Module, replica: nn.Module, silently: frozenset[int] | None
    ) -> None:
        def state(module: nn.Module) -> Iterator[torch.Tensor]:
            return chain(module.buffers(), module.parameters())

        self._copies: list[tuple[torch.Tensor, torch.Tensor, Any]] = []
        self._silently = silently
        if next(state(network), None) is not next(state(replica), None):
            self._copies = [
                (original, copy, _signs(copy))
                for original, copy in zip(state(network), state(replica), strict=True)
            ]

    @torch.no_grad()
    def write_back(self) -> frozenset[int] | None:
        """Copies to the network what was written since, and returns what was silently."""
        if not self._copies:
            return self._silently
        found = set()
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
                original, copy
            ):
                found.add(index)
                original.data.copy_(copy)
        return frozenset(found | (self._silently or set()))


def _signs(tensor: torch.Tensor) -> tuple[int, int]:
    """Returns what a write changes, but for one through ``.data``."""
    storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    return (0 if tensor.is_inference() else tensor._version, storage)


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        return torch.equal(one.cpu(), other.cpu())  # where there is memory for both
    except RuntimeError:  # sparse ones do not tell, nor do emulated ones without values
        return True


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
