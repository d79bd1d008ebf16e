"""Ask NVML (NVIDIA's management library) about the GPUs of this machine.

No other file calls functions of ``pynvml``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml


@dataclass(frozen=True, slots=True, eq=False)
class Board:
    """A whole GPU that NVML lists, or one MIG slice of a GPU. Unknown fields are None."""

    nvml_index: int
    mig_index: int | None = None
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: tuple[int, int, int] | None = None
    """The PCI domain, bus and device numbers. A MIG slice has those of its GPU."""
    handle: Any = None
    """NVML's handle of the board, an argument of NVML's functions.

    It is None if NVML returns no handle, as for a lost GPU.
    """


def list_boards() -> list[Board]:
    """Return a ``Board`` for each GPU that NVML lists, in the order of NVML's indices.

    If a GPU is divided into MIG slices, the list has a ``Board`` for each slice, and none for the
    whole GPU.

    Each call initializes NVML, because a forked process must initialize it again. NVML stays open
    until the process ends.

    Raises:
        pynvml.NVMLError: there is no library, driver or permission, or NVML cannot count the GPUs.
    """
    pynvml.nvmlInit()
    indices = range(pynvml.nvmlDeviceGetCount())
    return [board for index in indices for board in _boards_at(index)]


def memory_of(board: Board) -> dict[str, Any]:
    """Return the total, used and free bytes of a board (a GPU or a MIG slice).

    The result is a dict, whose keys are fields of ``DeviceMemory``.

    With drivers from version 510 on, the used bytes do not include memory that the driver has
    reserved. Older drivers only have version 1 of ``nvmlDeviceGetMemoryInfo``, which counts
    reserved memory as used.

    Source:
        The struct ``nvmlMemory_v2_t`` in NVML's API reference. The command ``nvidia-smi
        --query-gpu=memory.total,memory.used,memory.free`` prints the same numbers.

    Raises:
        pynvml.NVMLError: the query failed.
    """
    handle = board.handle or pynvml.nvmlDeviceGetHandleByIndex(board.nvml_index)
    query = pynvml.nvmlDeviceGetMemoryInfo
    info = _ask(query, handle, pynvml.nvmlMemory_v2) or query(handle)
    return {"total_bytes": info.total, "used_bytes": info.used, "free_bytes": info.free}


def _boards_at(index: int) -> list[Board]:
    handle = _ask(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return [Board(index)]
    pci = _ask(pynvml.nvmlDeviceGetPciInfo, handle)
    num_slices = _ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    slices: dict[int | None, Any] = {
        mig_index: _ask(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, mig_index)
        for mig_index in range(num_slices)
    }
    return [
        Board(
            nvml_index=index,
            mig_index=mig_index,
            uuid=_ask(pynvml.nvmlDeviceGetUUID, part),
            name=_ask(pynvml.nvmlDeviceGetName, part),
            pci_bus_id=(pci.domain, pci.bus, pci.device) if pci else None,
            handle=part,
        )
        for mig_index, part in (slices if any(slices.values()) else {None: handle}).items()
        if part is not None
    ]


def _ask(query: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function of NVML, or None if NVML reports an error."""
    try:
        return query(*arguments)
    except pynvml.NVMLError:
        return None


def find_board(properties: Any, boards: Sequence[Board]) -> Board | None:
    """Return the NVML board of a CUDA device, or None if it cannot be identified.

    A board is a GPU or a MIG slice. If exactly one board has the UUID of the device, this board
    is returned. Otherwise, if exactly one board has the PCI bus id of the device, that board is
    returned.

    The index of a device cannot identify its board, because CUDA and NVML number devices
    differently. CUDA numbers devices in the order in which ``CUDA_VISIBLE_DEVICES`` lists them. If
    ``CUDA_VISIBLE_DEVICES`` is unset, the order depends on ``CUDA_DEVICE_ORDER``: by default, the
    fastest device comes first, and with ``PCI_BUS_ID``, the order is that of the PCI bus ids. NVML
    numbers all GPUs, in the order of their PCI bus ids. All MIG slices of a GPU have the GPU's PCI
    bus id, so a PCI bus id alone may not identify a board.

    Args:
        properties: the result of ``torch.cuda.get_device_properties``.
        boards: the boards that NVML lists.
    """
    uuid = str(properties.uuid).lower()
    bus = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    # Torch writes 5a... for the UUIDs GPU-5a... and MIG-5a... of NVML.
    with_uuid = [b for b in boards if b.uuid and b.uuid.partition("-")[2].lower() == uuid]
    on_bus = [board for board in boards if board.pci_bus_id == bus]
    return next((found[0] for found in (with_uuid, on_bus) if len(found) == 1), None)
