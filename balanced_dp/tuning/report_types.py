"""What tuning comes to: the report, a plan with what it rests on and where that comes from."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ..planning.memory_model import MemoryModel
from ..planning.split_planner import Plan
from .step_benchmark import Measurement

SCHEMA = 2
"""The version of a report's fields."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and how figures came about.

    Attributes:
        created: when, in ISO 8601, UTC.
        command: the command line.
        versions: of Python and the packages that matter.
        machine: the operating system, the number of CPUs, and the names of the devices.
    """

    created: str
    command: str
    versions: dict[str, str]
    machine: dict[str, str]

    @classmethod
    def of_this_process(cls, devices: Iterable[str] = ()) -> Origin:
        """Returns that of figures obtained here and now on devices of these names."""
        packages = ("balanced-dp", "torch", "nvidia-ml-py")
        return cls(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            command=_command(),
            versions={
                "python": platform.python_version(),
                **{name: _version(name) for name in packages},
            },
            machine={
                "platform": platform.platform(),
                "num_cpus": str(os.cpu_count()),
                "devices": ", ".join(devices),
            },
        )


def _command() -> str:
    path = Path(sys.argv[0])
    if path.name == "ipykernel_launcher.py":
        return "a notebook"
    program = f"python -m {path.parent.name}" if path.name == "__main__.py" else path.name
    return " ".join([program, shlex.join(sys.argv[1:])]).strip()


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # imported from a folder
        return "not installed"


@dataclass(frozen=True, slots=True)
class Alternative:
    """The same batch, with the loss computed elsewhere.

    Attributes:
        plan: the plan for it.
        chosen: the planned split, measured.
    """

    plan: Plan
    chosen: Measurement


@dataclass(frozen=True, slots=True)
class Report:
    """A plan and what it rests on.

    Attributes:
        schema: the version of these fields.
        origin: where and how it came about.
        workload: the workload's name.
        num_parameters: how many numbers its model learns.
        precision: the dtype of autocast, or None.
        gather: whether outputs are gathered on device 0 and their loss computed there; else it is
            computed on each device, as with ``gather=False`` and ``BalancedCriterion``.
        plan: the plan.
        chosen: the planned split, measured.
        even: the even split of ``nn.DataParallel``, measured.
        weighted: the split of ``plan.weighted``, measured, where there is one.
        alternative: the best split if ``gather`` were the other, None where that was not measured.
        no_alternative: why it was not, or None.
        model: the laws.
        measurements: what they were fitted to, in the order of measuring.
    """

    schema: int
    origin: Origin
    workload: str
    num_parameters: int
    precision: str | None
    gather: bool
    plan: Plan
    chosen: Measurement
    even: Measurement
    weighted: Measurement | None
    alternative: Alternative | None
    no_alternative: str | None
    model: MemoryModel
    measurements: tuple[Measurement, ...]

    @property
    def prediction_error(self) -> float:
        """How far the farthest device's prediction is off, as a part of what was measured."""
        pairs = zip(self.plan.predicted_bytes, self.chosen.peak_bytes, strict=True)
        return max(abs(predicted - held) / held for predicted, held in pairs if held)

    @property
    def line(self) -> str:
        """What to write in a training script."""
        return self._line(f"gpu0_bsz={self.plan.gpu0_bsz}, module=model")

    @property
    def weighted_line(self) -> str | None:
        """The same with a share for each device, where the capacities differ."""
        if self.plan.weighted is None:
            return None
        weights = list(self.plan.weighted.chunk_sizes)
        return self._line(f"gpu0_bsz=None, module=model, device_weights={weights}")

    def _line(self, arguments: str) -> str:
        return f"BalancedDataParallel({arguments}{'' if self.gather else ', gather=False'})"

    @property
    def advice(self) -> tuple[str, ...]:
        """What else would help, in sentences without their full stop."""
        if self.model.is_lawful:
            return self.plan.advice
        return (
            *self.plan.advice,
            f"the predictions are off by up to {self.model.residual:.0%}: what this workload "
            "needs does not grow evenly with the batch. So the choice is among the measured "
            "values, and the largest batch is a guess",
        )
