"""What NVML says of this machine's GPUs: the only file that speaks with ``pynvml``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_REASONS = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "there is no NVML library (libnvidia-ml.so.1): it comes with "
    "NVIDIA's driver; in a container, start it with the NVIDIA runtime (--gpus all)",
    "NVML_ERROR_DRIVER_NOT_LOADED": "NVIDIA's driver is not loaded: install it, or load it with "
    "modprobe nvidia",
    "NVML_ERROR_NO_PERMISSION": "no permission to speak with NVIDIA's driver: see who may read and "
    "write /dev/nvidiactl",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "NVML's library and the loaded driver are of different "
    "versions, as after an update: restart the machine",
}
"""By the name of the constant in pynvml, which is the error's in nvml.h."""


class NvmlError(Exception):
    """NVML cannot answer; the message says why and, where something can be done, what."""


@dataclass(frozen=True, slots=True)
class Board:
    """A GPU, or a MIG slice of one, as NVML lists it; None where NVML does not tell."""

    nvml_index: int
    mig_index: int | None = None
    uuid: str | None = None
    name: str | None = None
    pci_bus_id: tuple[int, int, int] | None = None
    """Domain, bus and device; a slice has those of its board."""
    handle: Any = None
    error: str | None = None
    """Why there is no handle."""

    @property
    def label(self) -> str:
        """``gpu:3``, or ``gpu:3 mig:1``."""
        mig = "" if self.mig_index is None else f" mig:{self.mig_index}"
        return f"gpu:{self.nvml_index}{mig}"


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Bytes of one board; the version is that of the query, 1 or 2."""

    total_bytes: int
    used_bytes: int
    free_bytes: int
    reserved_by_driver_bytes: int | None
    memory_info_version: int


class Nvml:
    """A connection to NVML, which lasts as long as the process.

    Raises:
        NvmlError: there is no library, driver or permission.
    """

    def __init__(self) -> None:
        self._nvml = _import_pynvml()
        with self._telling_why():
            self._nvml.nvmlInit()

    def boards(self) -> list[Board]:
        """Return all boards by index; one that is split by MIG is given as its slices.

        Raises:
            NvmlError: NVML cannot count them.
        """
        with self._telling_why():
            count = self._nvml.nvmlDeviceGetCount()
        return [board for index in range(count) for board in self._boards_at(index)]

    def memory(self, board: Board) -> MemoryInfo:
        """Return the board's memory; by version 2 of the query where the driver has it.

        Version 1 counts what the driver reserves for itself as used.

        Source:
            ``nvidia-smi --query-gpu=memory.total,memory.used,memory.free,memory.reserved``;
            nvmlMemory_v2_t in NVML's API reference, driver 510 and newer.

        Raises:
            NvmlError: the board does not answer.
        """
        if board.error is not None:
            raise NvmlError(board.error)
        nvml = self._nvml
        with self._telling_why():
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
        """Return bytes by PID of the processes that use the board, None if it won't tell.

        Bytes are None where only the process is told.

        Source:
            ``nvidia-smi --query-compute-apps=pid,used_memory``, with graphics and MPS clients.
        """
        compute = self._processes("Compute", board)
        if compute is None:
            return None
        others = [self._processes(kind, board) or {} for kind in ("Graphics", "MPSCompute")]
        found: dict[int, int | None] = {}
        for listed in (compute, *others):  # a process may be on two lists, with all its bytes
            for pid, size in listed.items():
                known = found.get(pid, 0)
                found[pid] = None if size is None or known is None else max(known, size)
        return found

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
            found: dict[int, int | None] = {}
            for process in listed:
                size, known = process.usedGpuMemory, found.get(process.pid, 0)
                found[process.pid] = None if size is None or known is None else known + size
            return found
        return None

    def _boards_at(self, index: int) -> list[Board]:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            return [Board(index, error=self._reason(error))]
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
        """Return the answer, or None where there is none."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError:
            return None

    @contextmanager
    def _telling_why(self) -> Iterator[None]:
        try:
            yield
        except self._nvml.NVMLError as error:
            raise NvmlError(self._reason(error)) from None

    def _reason(self, error: Any) -> str:
        for name, reason in _REASONS.items():
            if error.value == getattr(self._nvml, name):
                return reason
        return f"NVML says: {error}"


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
