"""Queries of NVML about the GPUs of this machine: the only file that uses ``pynvml``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
        mig = "" if self.mig_index is None else f" mig:{self.mig_index}"
        return f"gpu:{self.nvml_index}{mig}"


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """The memory of one board in bytes, and the version of the query, 1 or 2."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_by_driver_bytes: int | None
    memory_info_version: int


class Nvml:
    """A connection to NVML, which stays open until the process ends.

    Raises:
        NvmlError: there is no library, driver or permission.
    """

    def __init__(self) -> None:
        self._nvml = _import_pynvml()
        with self._as_nvml_error():
            self._nvml.nvmlInit()

    def driver_version(self) -> str | None:
        """Return the version of the driver, as ``nvidia-smi --query-gpu=driver_version``."""
        version = self._ask(self._nvml.nvmlSystemGetDriverVersion)
        return None if version is None else str(version)

    def boards(self) -> list[Board]:
        """Return all boards in the order of their indices; a board in MIG mode as its slices.

        Raises:
            NvmlError: NVML cannot count the boards.
        """
        with self._as_nvml_error():
            count = self._nvml.nvmlDeviceGetCount()
        return [board for index in range(count) for board in self._boards_at(index)]

    def memory(self, board: Board) -> MemoryInfo:
        """Return the board's memory, from version 2 of the query if the driver supports it.

        Version 1 counts the memory that the driver reserves for itself as used.

        Source:
            ``nvidia-smi --query-gpu=memory.total,memory.used,memory.free,memory.reserved``;
            nvmlMemory_v2_t in NVML's API reference, driver 510 and newer.

        Raises:
            NvmlError: the query failed.
        """
        if board.error is not None:
            raise NvmlError(board.error)
        nvml = self._nvml
        with self._as_nvml_error():
            try:
                info = nvml.nvmlDeviceGetMemoryInfo(board.handle, nvml.nvmlMemory_v2)
                return MemoryInfo(info.total, info.used, info.free, info.reserved, 2)
            except (
                nvml.NVMLError_FunctionNotFound,
                nvml.NVMLError_ArgumentVersionMismatch,
                nvml.NVMLError_NotSupported,
            ):
                info = nvml.nvmlDeviceGetMemoryInfo(board.handle)
                return MemoryInfo(info.total, info.used, info.free, None, 1)

    def processes(self, board: Board) -> dict[int, int | None] | None:
        """Return the bytes in use by each process, by PID; None if the query fails.

        The bytes of a process are None if NVML does not report them.

        Source:
            ``nvidia-smi --query-compute-apps=pid,used_memory``, with graphics and MPS clients.
        """
        compute = self._processes("Compute", board)
        if compute is None:
            return None
        others = [self._processes(kind, board) or {} for kind in ("Graphics", "MPSCompute")]
        sizes: dict[int, int | None] = {}
        for listed in (compute, *others):  # a process may be on two lists, each with all its bytes
            for pid, size in listed.items():
                known = sizes.get(pid, 0)
                sizes[pid] = None if size is None or known is None else max(known, size)
        return sizes

    def _processes(self, kind: str, board: Board) -> dict[int, int | None] | None:
        nvml = self._nvml
        for version in ("v3", "v2"):  # v3: driver 510 and newer
            function = getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_{version}")
            try:
                listed = function(board.handle)
            except nvml.NVMLError_FunctionNotFound:
                continue
            except nvml.NVMLError:
                return None
            sizes: dict[int, int | None] = {}
            for process in listed:  # once for each of its contexts
                size, known = process.usedGpuMemory, sizes.get(process.pid, 0)
                sizes[process.pid] = None if size is None or known is None else known + size
            return sizes
        return None

    def _boards_at(self, index: int) -> list[Board]:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            return [Board(index, error=_reason(error))]
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

    def _ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of a query, or None if it fails."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    @contextmanager
    def _as_nvml_error(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise NvmlError(_reason(error)) from None


def _reason(error: Exception) -> str:
    return _REASONS.get(type(error).__name__, f"NVML failed: {error}")


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
