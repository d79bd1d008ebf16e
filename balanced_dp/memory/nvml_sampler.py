"""Samples what NVML says is in use, in a thread."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from .nvml import Board, Nvml, NvmlError

SAMPLING_INTERVAL_S = 0.010


@dataclass(frozen=True, slots=True)
class Samples:
    """The highest used bytes of each board that never failed, by its label, or why there is none.

    Between two samples more may have been in use, so each is a lower bound.
    """

    peak_used_bytes: dict[str, int]
    num_samples: int = 0
    error: str | None = None


class Sampler:
    """Samples until ``stop``, every 10 ms where other threads let it, and at both ends."""

    def __init__(self, nvml: Nvml, boards: Sequence[Board]) -> None:
        self._nvml = nvml
        self._boards = boards
        self._peaks = {board.label: 0 for board in boards}
        self._errors: dict[str, NvmlError] = {}
        self._num_samples = 0
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="NVML sampler", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._told.wait(SAMPLING_INTERVAL_S if self._num_samples else 0)
            for board in self._boards:
                try:
                    used_bytes = self._nvml.memory(board).used_bytes
                    self._peaks[board.label] = max(self._peaks[board.label], used_bytes)
                except NvmlError as error:
                    self._errors[board.label] = error
            self._num_samples += 1

    def stop(self) -> Samples:
        """Ends the thread and returns what it saw."""
        self._told.set()
        self._thread.join()
        return Samples(
            {label: peak for label, peak in self._peaks.items() if label not in self._errors},
            self._num_samples,
            "; ".join(f"{label}: {error}" for label, error in self._errors.items()) or None,
        )
