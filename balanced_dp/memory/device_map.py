"""The NVML device of ``cuda:i``, from properties of CUDA, NVML and the environment. Pure.

CUDA numbers the devices in ``CUDA_VISIBLE_DEVICES``, by default the fastest first. NVML numbers all
boards in the order of their PCI bus ids. So indices differ, and UUIDs are compared.
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
    """Return the board of ``cuda:i``, by UUID or else by PCI bus id.

    MIG slices have the PCI bus id of their board, and CUDA may report its UUID, too. Then
    ``CUDA_VISIBLE_DEVICES`` decides, which names the slice by its UUID or a prefix of it.

    Args:
        cuda_index: the index of the device, for the message.
        uuid: the UUID that torch reports.
        pci_bus_id: domain, bus and device that torch reports.
        boards: the boards that NVML lists.
        environ: the environment in which CUDA was initialized.

    Raises:
        ProbeError: no board matches, or several do; the message says why.
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
        f"({uuid}) nor its PCI bus id is that of exactly one of NVML's {_labels(boards)}, and "
        f"CUDA_VISIBLE_DEVICES is {environ.get('CUDA_VISIBLE_DEVICES', 'not set')!r}; set it to "
        "the UUID of a single MIG slice before the program starts"
    )


def _bare(uuid: str | None) -> str | None:
    """Return a UUID without its prefix, in the form of torch: ``5a...`` for ``GPU-5a...``."""
    return None if uuid is None else re.sub(r"^(GPU|MIG)-", "", uuid).lower()


def _labels(boards: Sequence[Board]) -> str:
    return ", ".join(f"{b.label} ({b.uuid or b.error or 'no UUID'})" for b in boards) or "nothing"
