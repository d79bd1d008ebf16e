"""Samples what NVML says is in use, in a process of its own that the GIL cannot starve."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from . import nvml
from .nvml import Board

_PATIENCE_S = 2.0
"""How long the process may take to end; it looks every 10 ms."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The highest used bytes of each board that never failed, by its label, or why there is none.

    Between two samples more may have been in use, so each is a lower bound.
    """

    peak_used_bytes: dict[str, int] = field(default_factory=dict)
    num_samples: int = 0
    error: str | None = None


class Sampler:
    """Samples from its creation, which waits for the first sample, until :meth:`stop`.

    The process ends by a byte on its stdin or by its end, and when this process is gone. It has a
    session of its own, so that Ctrl-C in the terminal does not reach it.

    Args:
        boards: what to sample.
    """

    def __init__(self, boards: Sequence[Board]) -> None:
        self._error: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = subprocess.Popen(
                [sys.executable, nvml.__file__, str(os.getpid()), *(b.label for b in boards)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            assert self._process.stdout is not None
            self._process.stdout.readline()
        except OSError as error:
            self._error = f"the sampling process did not start: {error}"
        except BaseException:
            self.stop()
            raise

    def stop(self) -> Samples:
        """Ends the process and returns what it saw. May be called again, for nothing."""
        process, self._process = self._process, None
        if process is None:
            return Samples(error=self._error or "the sampling has ended")
        try:
            output, errors = process.communicate(b"\n", timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            return Samples(error=f"the sampling process did not end within {_PATIENCE_S:.0f} s")
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        return _read(output, errors, process.returncode)


def _read(output: bytes, errors: bytes, returncode: int) -> Samples:
    try:
        record = json.loads(output)
    except ValueError:
        last_line = errors.decode(errors="replace").strip().rpartition("\n")[2]
        return Samples(error=last_line or f"the sampling process ended with {returncode}")
    failed = record["errors"]
    return Samples(
        {label: peak for label, peak in record["peaks"].items() if label not in failed},
        record["num_samples"],
        "; ".join(f"{label}: {reason}" for label, reason in failed.items()) or None,
    )
