"""Queries of NVML about the GPUs of this machine: the only file that uses ``pynvml``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


class NvmlError(Exception):
    """A query of NVML failed; the message is NVML's."""


@dataclass(frozen=True, slots=True, eq=False)
class Board:
    """A GPU that NVML lists, or a MIG slice of one. Unknown fields are None."""

    nvml_index: int
    mig_index: int | None = None
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: tuple[int, int, int] | None = None
    """Domain, bus and device; a slice has those of its board."""
    handle: Any = None
    error: str | None = None
    """Why there is no handle."""


class Nvml:
    """A connection to NVML, which stays open until the process ends.

    Raises:
        NvmlError: there is no library, driver or permission.
    """

    def __init__(self) -> None:
        import pynvml

        self._nvml = pynvml
        self._query(pynvml.nvmlInit)

    def boards(self) -> list[Board]:
        """Return all boards in the order of their indices. A board in MIG mode is listed by slice.

        Raises:
            NvmlError: NVML cannot count the boards.
        """
        count = self._query(self._nvml.nvmlDeviceGetCount)
        return [board for index in range(count) for board in self._boards_at(index)]

    def memory(self, board: Board) -> dict[str, int]:
        """Return the fields of ``DeviceMemory`` that NVML has for a board.

        Drivers before 510 only have version 1 of the query, which counts memory that is reserved by
        the driver as used.

        Source:
            ``nvidia-smi --query-gpu=memory.total,memory.used,memory.free``; nvmlMemory_v2_t in
            NVML's API reference.

        Raises:
            NvmlError: the query failed.
        """
        if board.error is not None:
            raise NvmlError(board.error)
        query = self._nvml.nvmlDeviceGetMemoryInfo
        info = self._ask(query, board.handle, self._nvml.nvmlMemory_v2)
        info = info or self._query(query, board.handle)
        return {"total_bytes": info.total, "used_bytes": info.used, "free_bytes": info.free}

    def _boards_at(self, index: int) -> list[Board]:
        nvml = self._nvml
        try:
            handle = self._query(nvml.nvmlDeviceGetHandleByIndex, index)
        except NvmlError as error:
            return [Board(index, error=str(error))]
        pci = self._ask(nvml.nvmlDeviceGetPciInfo, handle)
        num_slices = self._ask(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
        slices: dict[int | None, Any] = {
            mig_index: self._ask(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, mig_index)
            for mig_index in range(num_slices)
        }
        return [
            Board(
                nvml_index=index,
                mig_index=mig_index,
                uuid=self._ask(nvml.nvmlDeviceGetUUID, part),
                name=self._ask(nvml.nvmlDeviceGetName, part),
                pci_bus_id=(pci.domain, pci.bus, pci.device) if pci else None,
                handle=part,
            )
            for mig_index, part in (slices if any(slices.values()) else {None: handle}).items()
            if part is not None
        ]

    def _query(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a query; raise an NvmlError if it fails."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            raise NvmlError(f"NVML failed: {error}") from None

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a query, or None if it fails."""
        try:
            return self._query(function, *arguments)
        except NvmlError:
            return None


@functools.cache
def connection(pid: int) -> Nvml:
    """Return the connection of this process, which a forked process cannot use."""
    return Nvml()


def find_board(properties: Any, boards: Sequence[Board]) -> Board | None:
    """Return the board of a CUDA device, by UUID or else by PCI bus id; None if it is ambiguous.

    Indices differ: CUDA numbers the devices in ``CUDA_VISIBLE_DEVICES``, by default the fastest
    first, and NVML all boards in the order of their PCI bus ids. MIG slices have the PCI bus id of
    their board.

    Args:
        properties: the result of ``torch.cuda.get_device_properties``.
        boards: the boards that NVML lists.
    """
    uuid = str(properties.uuid).lower()
    bus = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    # Of GPU-5a... and MIG-5a..., torch's form is 5a...
    with_uuid = [b for b in boards if b.uuid and b.uuid.partition("-")[2].lower() == uuid]
    on_bus = [board for board in boards if board.pci_bus_id == bus]
    for found in (with_uuid, on_bus):
        if len(found) == 1:
            return found[0]
    return None
