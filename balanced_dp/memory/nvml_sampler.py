"""A thread that samples the memory in use, as NVML reports it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .nvml import Board, Nvml, NvmlError

SAMPLING_INTERVAL_S = 0.010


class Sampler(threading.Thread):
    """A thread that samples boards from its creation to ``stop``, every 10 ms or less often.

    Other threads may hold Python's lock for longer than 10 ms. Beside four threads of pure Python,
    a sample came every 36 ms. That misses little, because the allocator keeps the memory that it
    has reserved. The last sample is always taken.

    Attributes:
        peaks: the largest sample of each board in bytes, a lower bound of its peak; None if a query
            failed.
    """

    def __init__(self, nvml: Nvml, boards: Sequence[Board]) -> None:
        super().__init__(name="NVML sampler", daemon=True)
        self.peaks: dict[Board, int | None] = dict.fromkeys(boards, 0)
        self._nvml = nvml
        self._stop_requested = threading.Event()
        self.start()

    def run(self) -> None:
        """Sample the boards until ``stop`` is called, and once more."""
        while not self._stop_requested.wait(SAMPLING_INTERVAL_S):
            self._sample()
        self._sample()

    def _sample(self) -> None:
        for board, peak in self.peaks.items():
            try:
                used_bytes = self._nvml.memory(board)["used_bytes"]
                self.peaks[board] = None if peak is None else max(peak, used_bytes)
            except NvmlError:
                self.peaks[board] = None

    def stop(self) -> None:
        """Take the last sample and end the thread."""
        self._stop_requested.set()
        self.join()
