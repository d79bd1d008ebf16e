"""Records of a device's memory, and of the memory that a ``with`` block took.

This file does not use torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, ProbeError
from .units import format_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of one device, in bytes. Unknown fields are None.

    Memory is counted at three levels. Tensors occupy ``allocated_bytes``. Torch's allocator holds
    ``reserved_bytes``, for the tensors and its cache. On the device, ``used_bytes`` are in use by
    torch's allocator, by CUDA contexts, by workspaces outside of the allocator, and by other
    processes.

    Attributes:
        device: torch's name of the device; None for a GPU that NVML lists but torch does not see.
        nvml_index: the index of the GPU in NVML and nvidia-smi.
        mig_index: the index of the MIG slice; None for a whole GPU.
        uuid: the UUID as nvidia-smi prints it, ``GPU-...`` or ``MIG-...``. If NVML does not know
            the device, the UUID is the one that torch reports, without such a prefix.
        name: the name of the device.
        total_bytes: the capacity of the device.
        used_bytes: memory of the device that is in use by all processes together.
        free_bytes: memory of the device that is not in use.
        allocated_bytes: memory occupied by tensors of this process.
        reserved_bytes: memory managed by torch's allocator.
        peak_allocated_bytes: the maximum of ``allocated_bytes``. ``MemoryProbe.measure`` gives the
            maximum during the measured block, and ``MemoryProbe.snapshot`` the maximum since the
            peak was last reset.
        peak_reserved_bytes: the maximum of ``reserved_bytes`` during the same time.
        peak_used_bytes: the largest sample of ``used_bytes`` during the measured block. This
            sample is a lower bound of the maximum of ``used_bytes``.
        num_alloc_retries: how often torch's allocator emptied its cache to try an allocation again.
        error: the reason why fields are missing, for example that the GPU is lost.
    """

    device: str | None
    nvml_index: int | None = None
    mig_index: int | None = None
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_used_bytes: int | None = None
    num_alloc_retries: int | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        """The device's names in torch and NVML, such as ``"cuda:0 (gpu:3)"``.

        If only one of the two names is known, the label is that name.
        """
        if self.nvml_index is None:
            return str(self.device)
        board = f"gpu:{self.nvml_index}"
        if self.mig_index is not None:
            board += f" mig:{self.mig_index}"
        return f"{self.device} ({board})" if self.device else board


@dataclass(slots=True)
class StepMemory:
    """The memory that a ``with`` block of ``MemoryProbe.measure`` took on each device.

    The fields are complete when the block has ended.

    Attributes:
        devices: the memory of each device. The tuple is empty until the block ends, and stays empty
            if the block raises an exception.
        reason: the reason why the measurement is not valid; None if it is valid. The measurement is
            not valid in three cases: the block is still running, the block has raised an exception,
            or an allocator had to empty its cache to try an allocation again.
    """

    devices: tuple[DeviceMemory, ...] = ()
    reason: str | None = "the block has not ended, or has raised an exception"

    @property
    def valid(self) -> bool:
        """Whether the block ran to its end, and no allocator had to empty its cache."""
        return self.reason is None

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """The peak allocated bytes of each device.

        Raises:
            ProbeError: the block is still running, or has raised an exception.
        """
        if not self.devices:
            raise ProbeError(f"there are no peaks: {self.reason}")
        return tuple(memory.peak_allocated_bytes or 0 for memory in self.devices)

    @property
    def imbalance(self) -> float:
        """How much the peaks of the devices differ: (max - min) / max, from 0 to 1.

        Raises:
            ProbeError: the block is still running, or has raised an exception.
        """
        return imbalance_of(self.peak_bytes)

    @property
    def utilization(self) -> tuple[float, ...]:
        """The peak allocated bytes of each device, as a fraction of the device's capacity.

        Raises:
            ProbeError: the block is still running, or has raised an exception.
        """
        pairs = zip(self.peak_bytes, self.devices, strict=True)
        return tuple(peak / (memory.total_bytes or 1) for peak, memory in pairs)

    @property
    def fullest(self) -> DeviceMemory:
        """The memory of the device with the highest utilization.

        If several devices have the highest utilization, this is the memory of the first of them.

        Raises:
            ProbeError: the block is still running, or has raised an exception.
        """
        return self.devices[self.utilization.index(max(self.utilization))]

    def check_split(self, tolerance: float = 0.10) -> str | None:
        """Return advice on how to balance the memory of the devices, or None if it is balanced.

        The memory is balanced if the peaks of the devices are similar fractions of their
        capacities. So a larger device should hold more memory. If an allocator had to empty its
        cache during the block, the measurement is not valid, and the result says so instead of
        giving advice.

        Args:
            tolerance: the memory counts as balanced if (max - min) / max of ``utilization`` is at
                most this number. It must be at least 0 and below 1.

        Raises:
            ArgumentError: ``tolerance`` is out of range.
            ProbeError: the block is still running, or has raised an exception.
        """
        if not 0 <= tolerance < 1:
            raise ArgumentError(
                f"tolerance must be at least 0 and below 1 (0.05 is 5 %), got {tolerance}"
            )
        utilization = self.utilization
        if not self.valid:
            return f"the measurement is not valid: {self.reason}"
        difference = imbalance_of(utilization)
        if difference <= tolerance:
            return None
        emptiest = self.devices[utilization.index(min(utilization))]
        first, others = utilization[0], max(utilization[1:])
        if imbalance_of([first, others]) <= tolerance:
            remedy = "gpu0_bsz cannot balance these; check what else is on the devices"
        elif first < others:
            remedy = "raise gpu0_bsz"
        else:
            remedy = "lower gpu0_bsz, or if it is 0, see memory_breakdown"
        return f"{_peak(self.fullest)} and {_peak(emptiest)}, {difference:.0%} apart: {remedy}"


def _peak(memory: DeviceMemory) -> str:
    peak, total = format_bytes(memory.peak_allocated_bytes or 0), memory.total_bytes or 0
    return f"{memory.device} peaks at {peak} of {format_bytes(total)}"


def imbalance_of(values: Sequence[float]) -> float:
    """Return (max - min) / max of ``values``, or 0 if all values are 0."""
    return (max(values) - min(values)) / max(values) if max(values) else 0.0
