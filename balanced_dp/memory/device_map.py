"""Which NVML device is ``cuda:i``? Pure: what CUDA, NVML and the environment say goes in.

CUDA numbers what ``CUDA_VISIBLE_DEVICES`` leaves, by default the fastest first. NVML numbers all
boards by their place on the PCI bus. So an index says nothing, and UUIDs are compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ..errors import ProbeError
from .nvml import Board


def find_board(
    cuda_index: int,
    uuid: str,
    pci_bus_id: tuple[int, int, int],
    boards: Sequence[Board],
    environ: Mapping[str, str],
) -> Board:
    """Return the board that is ``cuda:i``: by UUID, then by PCI bus id.

    The slices of a board have its PCI bus id, and CUDA may give them its UUID; then it is the one
    that ``CUDA_VISIBLE_DEVICES`` names, whose UUID may be shortened there.

    ``uuid`` and ``pci_bus_id`` (domain, bus and device) are as torch gives them, and ``environ`` is
    the environment that CUDA read when it started.

    Raises:
        ProbeError: it cannot be known; the message says why.
    """
    with_uuid = [board for board in boards if _bare(board.uuid) == _bare(uuid)]
    on_bus = [board for board in boards if board.pci_bus_id == pci_bus_id]
    visible = environ.get("CUDA_VISIBLE_DEVICES", "")
    prefixes = tuple(name for entry in visible.split(",") if (name := entry.strip()))
    named = [board for board in on_bus if board.uuid and board.uuid.startswith(prefixes)]
    for found in (with_uuid, on_bus, named):
        if len(found) == 1:
            return found[0]
    raise ProbeError(
        f"cannot tell which NVML device is cuda:{cuda_index}: neither its UUID "
        f"({uuid}) nor its PCI bus id is that of one of NVML's {_labels(boards)}, and "
        f"CUDA_VISIBLE_DEVICES is {environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}; name the "
        "UUID of a single MIG slice there before the program starts"
    )


def _bare(uuid: str | None) -> str | None:
    """``GPU-5a...``, ``MIG-5a...`` and torch's ``5a...`` are the same."""
    return None if uuid is None else re.sub(r"^(GPU|MIG)-", "", uuid).lower()


def _labels(boards: Sequence[Board]) -> str:
    return ", ".join(f"{b.label} ({b.uuid or b.error or 'no UUID'})" for b in boards) or "nothing"
