"""Define the report of a tuning run: a plan, the measurements behind it, and their provenance."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from ..planning.memory_model import MemoryModel
from ..planning.split_planner import Goal, Plan
from .measurement import Measurement
from .options import Option, ranked

SCHEMA = 4
"""The version of a report's fields."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Record when, where and how figures were obtained.

    Attributes:
        created: the time in ISO 8601, UTC.
        command: the command line.
        versions: versions of Python and the relevant packages.
        machine: the operating system, the number of CPUs, and the names of the devices.
    """

    created: str
    command: str
    versions: dict[str, str]
    machine: dict[str, str]

    @classmethod
    def of_this_process(cls, devices: Iterable[str] = ()) -> Provenance:
        """Return the provenance of figures obtained by this process on the named devices."""
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
    """List the ways to train the same batch with another ``gather`` or ``spread``.

    Attributes:
        gather: whether outputs are gathered, as in ``Report``.
        spread: whether parameters are spread over all devices.
        reason: why it could not be measured, or None.
        options: ways to train with them.
    """

    gather: bool
    spread: bool
    reason: str | None = None
    options: tuple[Option, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Combine a plan with the measurements behind it.

    Attributes:
        schema: the version of these fields.
        provenance: where and how the measurements were made.
        workload: the workload's name.
        num_parameters: number of trained parameters.
        precision: the dtype of autocast, or None.
        gather: whether outputs are gathered on device 0 and their loss is computed there. Otherwise
            it is computed on each device, as with ``gather=False`` and ``BalancedCriterion``.
        spread: whether parameters, gradients and optimizer state are spread over all devices.
        plan: the plan.
        chosen: the measurement of the planned split.
        even: the measurement of the even split of ``nn.DataParallel``.
        options: ways to train with the same ``gather`` and ``spread``.
        alternatives: options with another ``gather`` or ``spread``, if measured.
        goal: what the best option is the best in.
        model: the memory model.
        measurements: all measurements, in order; those that ran are what the model is fitted to.
    """

    schema: int
    provenance: Provenance = field(metadata={"alias": "origin"})  # the key in files
    workload: str
    num_parameters: int
    precision: str | None
    gather: bool
    spread: bool
    plan: Plan
    chosen: Measurement
    even: Measurement
    options: tuple[Option, ...]
    alternatives: tuple[Alternative, ...]
    model: MemoryModel
    measurements: tuple[Measurement, ...]
    goal: Goal = "speed"

    @property
    def prediction_error(self) -> float:
        """Return the largest relative error of the predicted peaks of the chosen split."""
        pairs = zip(self.plan.predicted_bytes, self.chosen.peak_bytes, strict=True)
        return max(abs(predicted - held) / held for predicted, held in pairs if held)

    @property
    def ranked_options(self) -> list[Option]:
        """Return the options that fit and that no other one exceeds in all, the best first."""
        others = [option for other in self.alternatives for option in other.options]
        plan = self.plan
        return ranked((*self.options, *others), plan.batch_size, plan.budgets, self.goal)

    @property
    def best(self) -> Option:
        """Return the best option, or the planned split if none fits."""
        if options := self.ranked_options:
            return options[0]
        return next(o for o in self.options if o.chunk_sizes == self.plan.chunk_sizes)

    @property
    def line(self) -> str:
        """Return the expression for a training script that wraps the model as the best option."""
        return self.best.line

    @property
    def advice(self) -> tuple[str, ...]:
        """Return sentences about what else would help, without their full stops."""
        if self.model.is_accurate:
            return self.plan.advice
        return (
            *self.plan.advice,
            f"the predictions are off by up to {self.model.residual:.0%}: the memory of this "
            "workload does not grow linearly with the batch. So the choice is among the measured "
            "values, and the largest batch is a guess",
        )
