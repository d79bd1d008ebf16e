"""Which NVML device is ``cuda:i``? Pure: what CUDA, NVML and the environment say goes in.

CUDA numbers what ``CUDA_VISIBLE_DEVICES`` leaves, by default the fastest first. NVML numbers all
boards by their place on the PCI bus. So an index says nothing by itself, and UUIDs are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import ProbeError
from .nvml import Board


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A device as torch describes it; None where it does not tell."""

    cuda_index: int
    uuid: str | None = None
    pci_bus_id: tuple[int, int, int] | None = None
    """Domain, bus and device."""


def find_board(
    device: CudaDevice, num_devices: int, boards: Sequence[Board], environ: Mapping[str, str]
) -> Board:
    """Returns the board that is ``device``: by UUID, then by PCI bus id, then by index.

    By index only where it cannot be wrong: ``CUDA_VISIBLE_DEVICES`` names the board itself, or
    ``CUDA_DEVICE_ORDER`` is ``PCI_BUS_ID``, or all boards are alike.

    Args:
        device: the device looked for.
        num_devices: how many devices CUDA has.
        boards: what NVML lists.
        environ: the environment that CUDA read when it started.

    Raises:
        ProbeError: it cannot be known; the message says why and what helps.
    """
    if device.uuid is not None:
        for named in ("uuid", "board_uuid"):
            found = [
                board for board in boards if _bare(getattr(board, named)) == _bare(device.uuid)
            ]
            if len(found) == 1:
                return found[0]
    if device.pci_bus_id is not None:
        found = [board for board in boards if board.pci_bus_id == device.pci_bus_id]
        if len(found) == 1:
            return found[0]
    visible = visible_boards(boards, environ)
    if len(visible) != num_devices:
        raise ProbeError(
            f"cannot tell which NVML device is cuda:{device.cuda_index}: CUDA has {num_devices} "
            f"devices, NVML lists {_labels(boards)} and {_environment(environ)}"
        )
    board = visible[device.cuda_index]
    if board is None:
        raise ProbeError(
            f"cannot tell which NVML device is cuda:{device.cuda_index}: neither its UUID "
            f"({device.uuid}) nor its PCI bus id is among NVML's {_labels(boards)}, and "
            "CUDA numbers boards that are not alike in another order. Set "
            "CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs in CUDA_VISIBLE_DEVICES, before the "
            f"program starts ({_environment(environ)})"
        )
    return board


def visible_boards(boards: Sequence[Board], environ: Mapping[str, str]) -> list[Board | None]:
    """Returns the boards that CUDA sees, in its order; None for one that is not known which.

    What follows an entry that names nothing is not seen, a UUID may be shortened while it is
    unique, and an entry that is there twice leaves no device at all.

    Source:
        CUDA C++ Programming Guide, "CUDA Environment Variables"; for what is there twice,
        ``_parse_visible_devices`` in torch/cuda/__init__.py, torch 2.13.
    """
    order_is_known = _index_order_is_known(boards, environ)
    by_index: list[Board | None] = [board if order_is_known else None for board in boards]
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return by_index
    visible: list[Board | None] = []
    entries: list[object] = []
    for entry in text.split(","):
        number = re.match(r"\s*\+?(\d+)", entry)  # CUDA too reads "1gpu" as 1
        if number is not None:
            index = int(number[1])
            if index >= len(boards):
                break
            visible.append(by_index[index])
            entries.append(boards[index].label if order_is_known else index)
        else:
            prefix = entry.strip()
            named = [b for b in boards if prefix and b.uuid and b.uuid.startswith(prefix)]
            if len(named) != 1:
                break
            visible.append(named[0])
            entries.append(named[0].label)
    return visible if len(set(entries)) == len(entries) else []


def _index_order_is_known(boards: Sequence[Board], environ: Mapping[str, str]) -> bool:
    """Whether CUDA's order of all boards is NVML's: never with MIG or a board that is lost."""
    if any(board.mig_index is not None or board.error is not None for board in boards):
        return False
    alike = len({(board.name, board.total_bytes) for board in boards}) <= 1
    return alike or environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"


def _bare(uuid: str | None) -> str | None:
    """``GPU-5a...``, ``MIG-5a...`` and torch's ``5a...`` are the same."""
    return None if uuid is None else re.sub(r"^(GPU|MIG)-", "", uuid).lower()


def _labels(boards: Sequence[Board]) -> str:
    return ", ".join(f"{b.label} ({b.uuid or b.error or 'no UUID'})" for b in boards) or "nothing"


def _environment(environ: Mapping[str, str]) -> str:
    names = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
    return ", ".join(f"{name} is {environ.get(name, 'not set')!r}" for name in names)
