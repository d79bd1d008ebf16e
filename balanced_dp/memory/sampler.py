"""Samples what NVML says is in use, in a process of its own that the GIL cannot starve."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from . import nvml
from .nvml import Board

_START_PATIENCE_S = 10.0
_STOP_PATIENCE_S = 2.0
"""How long the process may take to start and to end; it looks every 10 ms."""

_MARK = "BALANCED_DP_SAMPLING"
"""Set in the process's environment: should that be a program with us in it, it must not sample."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The highest used bytes of each board that never failed, by its label, or why there is none.

    Between two samples more may have been in use, so each is a lower bound.
    """

    peak_used_bytes: dict[str, int] = field(default_factory=dict)
    num_samples: int = 0
    error: str | None = None


class Sampler:
    """A process that samples from ``begin`` to ``stop``.

    It ends by a byte on its stdin or by the end of that, and when this process is gone. It has a
    session of its own, so that Ctrl-C in the terminal does not reach it. Whatever goes wrong with
    it is told by ``stop``, and not raised.

    Args:
        boards: what to sample.
    """

    def __init__(self, boards: Sequence[Board]) -> None:
        self._error = _why_not_to_start()
        self._owner_pid = os.getpid()
        self._process: subprocess.Popen[bytes] | None = None
        if self._error is not None:
            return
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, nvml.__file__, *(board.label for board in boards)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, _MARK: "1", "PYTHONPATH": os.pathsep.join(sys.path)},
                start_new_session=True,
            )
            self._wait_until_ready(process)
        except OSError as error:
            self._error = f"the sampling process did not start: {error}"
        except BaseException:
            self.stop()
            raise

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        deadline = time.monotonic() + _START_PATIENCE_S
        line = b"-"
        # What else it prints is not ours: an interpreter's start may say something.
        while line and line.strip() != nvml.READY.encode():
            if os.name == "posix":  # elsewhere pipes cannot be waited for
                left = max(0.0, deadline - time.monotonic())
                if not select.select([process.stdout], [], [], left)[0]:
                    process.kill()
                    self._error = f"the sampling process was not ready in {_START_PATIENCE_S:.0f} s"
                    return
            line = process.stdout.readline()

    def begin(self) -> None:
        """Forgets what was before and samples from now on."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):  # it has ended; stop says why
                self._process.stdin.write(b"\n")

    def stop(self) -> Samples:
        """Ends the process and returns what it saw. May be called again, for nothing."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner_pid:  # a forked child's is not its own
            return Samples(error=self._error or "the sampling has ended")
        try:
            output, errors = process.communicate(b"\n", timeout=_STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            slow = f"the sampling process did not end within {_STOP_PATIENCE_S:.0f} s"
            return Samples(error=self._error or slow)
        finally:
            process.kill()
            with suppress(subprocess.TimeoutExpired):  # one that hangs in the driver stays
                process.wait(_STOP_PATIENCE_S)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if self._error is not None:
            return Samples(error=self._error)
        return _read(output, errors, process.returncode)


def _why_not_to_start() -> str | None:
    if _MARK in os.environ:
        return "this process samples for another"
    if getattr(sys, "frozen", False) or not sys.executable or not Path(nvml.__file__).is_file():
        return "there is no Python interpreter to sample with: this program brings its own"
    return None


def _read(output: bytes, errors: bytes, returncode: int) -> Samples:
    try:
        record = json.loads(output.strip().rpartition(b"\n")[2])
    except ValueError:
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return Samples(error=last_line or f"the sampling process ended with {returncode}")
    failed = record["errors"]
    return Samples(
        {label: peak for label, peak in record["peaks"].items() if label not in failed},
        record["num_samples"],
        "; ".join(f"{label}: {reason}" for label, reason in failed.items()) or None,
    )
