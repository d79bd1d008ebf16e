"""A thread that samples the memory in use, as NVML reports it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from .nvml import Board, Nvml, NvmlError

SAMPLING_INTERVAL_S = 0.010


class Sampler(threading.Thread):
    """A thread that samples boards from its creation to ``stop``, every 10 ms or less often.

    Other threads may hold Python's lock for longer than 10 ms: beside four threads of pure Python,
    a sample came every 36 ms. That misses little, since the allocator keeps what it has reserved.
    The first and the last sample are taken in any case.
    """

    def __init__(self, nvml: Nvml, boards: Sequence[Board]) -> None:
        super().__init__(name="NVML sampler", daemon=True)
        self.num_samples = 0
        self._nvml = nvml
        self._boards = boards
        self._peaks = dict.fromkeys((board.label for board in boards), 0)
        self._errors: dict[str, NvmlError] = {}
        self._stop_requested = threading.Event()
        self.start()

    def run(self) -> None:
        """Sample the boards until ``stop`` is called, and once more."""
        is_last = False
        while not is_last:
            is_last = self._stop_requested.wait(SAMPLING_INTERVAL_S if self.num_samples else 0)
            for board in self._boards:
                try:
                    used_bytes = self._nvml.used_bytes(board)
                    self._peaks[board.label] = max(self._peaks[board.label], used_bytes)
                except NvmlError as error:
                    self._errors[board.label] = error
            self.num_samples += 1

    def stop(self) -> None:
        """Take the last sample and end the thread."""
        self._stop_requested.set()
        self.join()

    def peak_used_bytes(self, board: Board) -> int | None:
        """Return the largest sample of a board, None if one of its queries failed.

        More may have been in use between two samples, so it is a lower bound.
        """
        return None if board.label in self._errors else self._peaks[board.label]

    @property
    def error(self) -> str | None:
        """The messages of failed queries, None if there are none."""
        return "; ".join(f"{label}: {error}" for label, error in self._errors.items()) or None
