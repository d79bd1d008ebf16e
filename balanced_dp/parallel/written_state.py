"""Copy what forward writes to the parameters and buffers of a replica back to the module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

import torch
from torch import nn

from .arrivals import parameters_of
from .move import move


class WrittenState:
    """The parameters and buffers of replicas before these run, to find what they write.

    The first replica shares what the network has on its device. What it writes to its copies of
    anything else is copied back by ``write_back``.

    Args:
        network: the module.
        replicas: the replicas of one call.
        silently: the result of ``write_back`` in an earlier call: the indices of parameters that
            were written without a new version or storage, as through ``.data``. None if there was
            none; then the values of all parameters are compared.
        is_shared: whether the first replica is known to have no copies.
    """

    def __init__(
        self,
        network: nn.Module,
        replicas: Sequence[nn.Module],
        silently: frozenset[int] | None,
        is_shared: bool = False,
    ) -> None:
        replica = replicas[0]
        self._copies: list[tuple[int, torch.Tensor, torch.Tensor, Any]] = []
        self._silently = silently
        self._shared: list[tuple[str, torch.Tensor, Any, Any]] = []
        self._others: list[tuple[str, torch.Tensor, Any, torch.Tensor]] = []
        if silently is None:
            shared = [r for i, r in enumerate(replicas) if _shares_parameters(r, replicas[:i])]
            parameters = {id(p): (name, p) for r in shared for name, p in r.named_parameters()}
            self._shared = [(n, p, _signs(p), _values(p)) for n, p in parameters.values()]
            self._others = [
                (name, copy, _signs(copy), first)
                for other in replicas[1:]
                if other not in shared
                for (name, first), copy in zip(_named(replica), _parameters(other), strict=True)
            ]
        self._devices: set[torch.device] = set()
        if not is_shared:
            self._devices = {
                tensor.device for r in replicas for tensor in islice(_parameters(r), 1)
            }
            pairs = enumerate(zip(_state(network), _state(replica), strict=True))
            self._copies = [
                (index, original, copy, _signs(copy))
                for index, (original, copy) in pairs
                if copy is not original
            ]

    def written_by_several(self) -> list[str]:
        """Return the names of parameters that replicas on one device share and have written.

        The list is empty unless ``silently`` is None.
        """
        return [
            name
            for name, parameter, signs, values in self._shared
            if signs != _signs(parameter) or not _are_equal(parameter, values)
        ]

    def written_differently(self) -> list[str]:
        """Return the names of parameters whose copies on other devices got other values.

        The list is empty unless ``silently`` is None.
        """
        names = [
            name
            for name, copy, signs, first in self._others
            if signs != _signs(copy) and not _are_equal(copy, _values(first))
        ]
        return list(dict.fromkeys(names))

    @torch.no_grad()
    def write_back(self) -> frozenset[int]:
        """Copy to the network what was written, and return the indices of all silent writes."""
        found = set(self._silently or ())
        for index, original, copy, before in self._copies:
            if copy.shape != original.shape:
                original.data = move(copy.detach(), original.device)
            elif copy.is_inference() or before != _signs(copy):
                # Where a replica has used the original, backward needs its version.
                is_used = original.device in self._devices
                (original.data if is_used else original).copy_(copy)
            elif not isinstance(original, nn.Parameter) and not _is_expanded(original):
                # Batch norm's kernels write statistics without a new version, so buffers are always
                # copied. The copy makes no new version either, as on a single device.
                original.data.copy_(copy)
            elif (self._silently is None or index in self._silently) and not _are_equal(
                copy, _values(original)
            ):
                found.add(index)
                original.data.copy_(copy)
        return frozenset(found)


def _state(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers, without waiting for their values."""
    return chain(_parameters(module), module.buffers())


def _parameters(module: nn.Module) -> Iterator[torch.Tensor]:
    return (parameter for _, parameter in _named(module))


def _named(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, submodule in module.named_modules():
        for name, parameter in parameters_of(submodule).items():
            if parameter is not None:
                yield f"{prefix}.{name}".lstrip("."), parameter


def _signs(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the version and storage of a tensor; most writes change one of them."""
    storage = tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
    return (0 if tensor.is_inference() else tensor._version, storage)


def _shares_parameters(replica: nn.Module, others: Sequence[nn.Module]) -> bool:
    first = next(_parameters(replica), None)
    return first is not None and any(next(_parameters(other)) is first for other in others)


def _values(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a copy on the CPU, which has room for it; None for emulated tensors without values."""
    try:
        return tensor.detach().to("cpu", copy=True)
    except RuntimeError:
        return None


def _are_equal(one: torch.Tensor, values: torch.Tensor | None) -> bool:
    """Return whether a tensor has these values, or cannot be compared."""
    try:
        if values is None or torch.equal(one.cpu(), values):
            return True
        is_float = values.is_floating_point()  # and may hold NaN
        return is_float and torch.allclose(one.cpu(), values, 0, 0, equal_nan=True)
    except RuntimeError:  # as for sparse tensors
        return True


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(
        stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
    )
