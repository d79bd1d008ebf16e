"""Queries of NVML about the GPUs of this machine: the only file that uses ``pynvml``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ProbeError
from .records import board_label

_REASONS = {
    "NVMLError_LibraryNotFound": "there is no NVML library (libnvidia-ml.so.1): it comes with "
    "NVIDIA's driver; in a container, start it with the NVIDIA runtime (--gpus all)",
    "NVMLError_DriverNotLoaded": "NVIDIA's driver is not loaded: install it, or load it with "
    "modprobe nvidia",
    "NVMLError_NoPermission": "no permission to use NVIDIA's driver: check who may read and "
    "write /dev/nvidiactl",
    "NVMLError_LibRmVersionMismatch": "NVML's library and the loaded driver have different "
    "versions, as after an update: restart the machine",
}
"""Messages by the name of the error's class in pynvml."""


class NvmlError(Exception):
    """A query of NVML failed; the message gives the reason and, where there is one, the remedy."""


@dataclass(frozen=True, slots=True)
class Board:
    """A GPU that NVML lists, or a MIG slice of one; None where NVML does not say."""

    nvml_index: int
    mig_index: int | None = None
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: tuple[int, int, int] | None = None
    """Domain, bus and device; those of its board for a slice."""
    handle: Any = None
    error: str | None = None
    """Why there is no handle."""

    @property
    def label(self) -> str:
        """The name of the board, ``gpu:3``, or of the slice, ``gpu:3 mig:1``."""
        return board_label(self.nvml_index, self.mig_index)


class Nvml:
    """A connection to NVML, which stays open until the process ends.

    Raises:
        NvmlError: there is no library, driver or permission.
    """

    def __init__(self) -> None:
        self._nvml = _import_pynvml()
        self._query(self._nvml.nvmlInit)

    def driver_version(self) -> str | None:
        """Return the version of the driver, as ``nvidia-smi --query-gpu=driver_version``."""
        version: str | None = self._ask(self._nvml.nvmlSystemGetDriverVersion)
        return version

    def boards(self) -> list[Board]:
        """Return all boards in the order of their indices; a board in MIG mode as its slices.

        Raises:
            NvmlError: NVML cannot count the boards.
        """
        count = self._query(self._nvml.nvmlDeviceGetCount)
        return [board for index in range(count) for board in self._boards_at(index)]

    def memory(self, board: Board) -> dict[str, Any]:
        """Return the fields of ``DeviceMemory`` that NVML knows of a board.

        They are from version 2 of the query if the driver supports it.

        Version 1 counts the memory that the driver reserves for itself as used.

        Source:
            ``nvidia-smi --query-gpu=memory.total,memory.used,memory.free,memory.reserved``;
            nvmlMemory_v2_t in NVML's API reference, driver 510 and newer.

        Raises:
            NvmlError: the query failed.
        """
        if board.error is not None:
            raise NvmlError(board.error)
        query = self._nvml.nvmlDeviceGetMemoryInfo
        info = self._ask(query, board.handle, self._nvml.nvmlMemory_v2)
        version = 1 if info is None else 2
        info = info or self._query(query, board.handle)
        return {
            "total_bytes": info.total,
            "used_bytes": info.used,
            "free_bytes": info.free,
            "reserved_by_driver_bytes": info.reserved if version == 2 else None,
            "memory_info_version": version,
        }

    def used_bytes(self, board: Board) -> int:
        """Return the memory in use on a board, by all processes.

        Raises:
            NvmlError: the query failed.
        """
        used_bytes: int = self.memory(board)["used_bytes"]
        return used_bytes

    def processes(self, board: Board) -> dict[int, int | None] | None:
        """Return the bytes in use by each process, by PID; None if the query fails.

        The bytes of a process are None if NVML does not report them.

        Source:
            ``nvidia-smi --query-compute-apps=pid,used_memory``, with graphics and MPS clients;
            driver 510 and newer.
        """
        compute = self._processes("Compute", board)
        if compute is None:
            return None
        sizes = dict(compute)
        for kind in ("Graphics", "MPSCompute"):
            # A process may be on two lists, each with all its bytes.
            for pid, size in (self._processes(kind, board) or {}).items():
                known = sizes.get(pid, 0)
                sizes[pid] = None if size is None or known is None else max(known, size)
        return sizes

    def _processes(self, kind: str, board: Board) -> dict[int, int | None] | None:
        query = getattr(self._nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3")
        listed = self._ask(query, board.handle)
        if listed is None:
            return None
        sizes: dict[int, int | None] = {}
        for process in listed:  # once for each of its contexts
            size, known = process.usedGpuMemory, sizes.get(process.pid, 0)
            sizes[process.pid] = None if size is None or known is None else known + size
        return sizes

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
        """Return the result of a query; raise an NvmlError with the reason if it fails."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            reason = _REASONS.get(type(error).__name__, f"NVML failed: {error}")
            raise NvmlError(reason) from None

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


def find_board(
    cuda_index: int, properties: Any, boards: Sequence[Board], visible: str | None
) -> Board:
    """Return the board of ``cuda:i``, by UUID or else by PCI bus id.

    Indices differ: CUDA numbers the devices in ``CUDA_VISIBLE_DEVICES``, by default the fastest
    first, and NVML all boards in the order of their PCI bus ids. MIG slices have the PCI bus id of
    their board, and CUDA may report its UUID, too. Then ``CUDA_VISIBLE_DEVICES`` decides, which
    names the slice by its UUID or a prefix of it.

    Args:
        cuda_index: the index of the device, for the message.
        properties: what ``torch.cuda.get_device_properties`` returns.
        boards: the boards that NVML lists.
        visible: ``CUDA_VISIBLE_DEVICES`` as CUDA was initialized with it, None if it is not set.

    Raises:
        ProbeError: no board matches, or several do; the message says why.
    """
    uuid = str(properties.uuid)
    bus = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    # Of GPU-5a... and MIG-5a..., torch's form is 5a...
    with_uuid = [b for b in boards if b.uuid and b.uuid.partition("-")[2].lower() == uuid.lower()]
    on_bus = [board for board in boards if board.pci_bus_id == bus]
    prefixes = tuple(filter(None, map(str.strip, (visible or "").split(","))))
    named = [board for board in on_bus if board.uuid and board.uuid.startswith(prefixes)]
    for found in (with_uuid, on_bus, named):
        if len(found) == 1:
            return found[0]
    listed = ", ".join(f"{b.label} ({b.uuid or b.error or 'no UUID'})" for b in boards)
    raise ProbeError(
        f"cannot tell which NVML device is cuda:{cuda_index}: neither its UUID ({uuid}) nor its "
        f"PCI bus id is that of exactly one of NVML's {listed or 'nothing'}, and "
        f"CUDA_VISIBLE_DEVICES is {'not set' if visible is None else repr(visible)}; set it to "
        "the UUID of a single MIG slice before the program starts"
    )


def _import_pynvml() -> Any:
    try:
        import pynvml
    except ImportError:
        raise NvmlError(
            "the package nvidia-ml-py is not installed: pip install nvidia-ml-py"
        ) from None
    if hasattr(pynvml, "__path__"):  # nvidia-ml-py is a single file
        raise NvmlError(
            "the retired package pynvml hides nvidia-ml-py: "
            "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py"
        )
    return pynvml
