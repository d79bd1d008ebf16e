"""Compare gradients, memory and time on this machine's devices with the values they should have.

Gradients and outputs should equal those of one device. The peaks of memory should be near those
that emulated devices predict. A training step should take about as long as with
``nn.DataParallel``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.benchmark import timer

from ..devices import resolve_devices
from ..emulation import emulate_devices
from ..emulation.fallback import training_devices
from ..emulation.machine import is_emulated
from ..memory.probe import MemoryProbe
from ..memory.units import format_bytes
from ..parallel.data_parallel import BalancedDataParallel
from ..split import as_integer, even_share
from ..tuning.models import TokenTransformer
from ..tuning.report import RESERVE, Provenance
from ..tuning.step import measure_step
from ..tuning.workload import Workload, find_workload

ALLOWED_ERROR = 0.10
"""The largest accepted error of a predicted memory peak, relative to the measured peak."""

ALLOWED_RATIO = 1.05
"""The longest accepted time of a training step, relative to a step of ``nn.DataParallel``."""


@dataclass(frozen=True, slots=True)
class Check:
    """One of the comparisons of ``validate``, and its result.

    Attributes:
        part: ``"gradients"``, ``"memory"`` or ``"time"``.
        what: the cases that were compared, such as ``"gpu0_bsz=1, allocator"``.
        ok: whether the difference is within its limit.
        value: the number that determines ``ok``, with its unit; ``"equal"`` if all gradients and
            outputs are equal up to rounding.
        note: further numbers, or the reason for the result.
    """

    part: str
    what: str
    ok: bool
    value: str = ""
    note: str = ""

    def __str__(self) -> str:
        outcome = "ok" if self.ok else "not ok"
        return f"{self.part:9}  {self.what:26}  {outcome:6}  {self.value:>10}  {self.note}".rstrip()


@dataclass(frozen=True, slots=True)
class Validation:
    """The result of ``validate``: all checks, the devices and the versions. It prints as a table.

    Attributes:
        devices: a description of the devices, as text.
        versions: a dictionary from names of software, such as ``"CUDA"``, to versions. It also
            contains properties of the machine: the entry ``"CPUs"``, for example, is its number of
            CPUs.
        checks: the checks in the order in which they were made.
    """

    devices: str
    versions: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def gradients_are_right(self) -> bool:
        """Whether all gradients and outputs equal those of one device."""
        return all(check.ok for check in self.checks if check.part == "gradients")

    @property
    def verdict(self) -> str:
        """A sentence that says whether the gradients are right."""
        if self.gradients_are_right:
            rest = " Memory and time need a GPU." * all(c.part == "gradients" for c in self.checks)
            return f"All gradients and outputs equal those of one device.{rest}"
        return "FAILED: not all gradients and outputs equal those of one device."

    def __str__(self) -> str:
        return "\n".join([*map(str, self.checks), "", self.verdict])

    def markdown(self) -> str:
        """Return the table as Markdown, with devices and versions, to paste into an issue."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"### balanced-dp validate: {self.devices}\n\n{versions}\n\n```\n{self}\n```\n"


def validate(
    num_devices: int | None = None,
    *,
    emulate: bool = False,
    workload: str = "gpt2-small",
    on_check: Callable[[Check], object] = lambda check: None,
) -> Validation:
    """Compare gradients, memory and time on several devices with the values they should have.

    Gradients and outputs should equal those of one device. The peaks of memory should be near those
    that emulated devices predict. A training step should take about as long as with
    ``nn.DataParallel``. On emulated devices, only gradients and outputs are compared.

    Args:
        num_devices: the number of devices. What is used depends on the machine:

            - Several GPUs: the first ``num_devices`` GPUs, or emulated devices if there are fewer
              GPUs. None means all GPUs.
            - A single GPU: ``num_devices`` replicas on this GPU. None means four replicas.
            - No GPU: ``num_devices`` emulated devices. None means four.

        emulate: whether to emulate devices even if there are GPUs.
        workload: the name of the workload (a model, its batches and its loss) whose memory and time
            are compared, as for ``find_workload``.
        on_check: a function that is called with each ``Check``, as soon as it is made.

    Raises:
        ArgumentError: ``num_devices`` is below 1, or there is no workload of the name ``workload``.
        ArgumentTypeError: ``num_devices`` is not an integer.
    """
    checks: list[Check] = []
    trained = find_workload(workload)
    with _opened(num_devices, emulate) as devices:
        parts = [_gradients(devices)]
        if is_emulated(devices[0]):
            description = f"{len(devices)} emulated devices"
        else:
            description = ", ".join(map(_described, devices))
            batch_size = 4 * len(devices)
            parts += [_memory(trained, batch_size, devices), _time(trained, batch_size, devices)]
        for part in parts:
            for check in part:
                checks.append(check)
                on_check(check)
        about = Provenance.of(devices)
    versions = {**about.versions, "CUDA": torch.version.cuda or "none", **about.machine}
    return Validation(description, versions, tuple(checks))


def _opened(
    num_devices: int | None, emulate: bool
) -> AbstractContextManager[Sequence[torch.device]]:
    """Return a context manager that yields a sequence of the devices, one for each replica.

    If there is a single GPU, all replicas are on it.
    """
    found = [] if emulate else resolve_devices(None)
    if len(found) == 1:
        num_replicas = 4 if num_devices is None else num_devices
        return nullcontext(found * as_integer("num_devices", num_replicas, minimum=1))
    return training_devices(num_devices, emulate=emulate)


def _described(device: torch.device) -> str:
    return f"{device} {torch.get_device_module(device).get_device_properties(device).name}"


def _gradients(devices: Sequence[torch.device]) -> Iterator[Check]:
    """Yield checks that compare outputs and gradients with those of one device, in float64."""
    batch_size = 3 * len(devices) + 1
    module: nn.Module = TokenTransformer(31, 12, True, width=32, num_heads=4, num_layers=2)
    module = module.double().to(devices[0])
    tokens = torch.randint(31, (batch_size, 12))
    values = range(even_share(batch_size, len(devices)) + 1)
    cases = {
        f"gpu0_bsz 0 to {values[-1]}": [(value, tokens) for value in values],
        f"batches of 1 to {batch_size - 1}": [(1, tokens[:n]) for n in range(1, batch_size)],
    }
    for what, calls in cases.items():
        found = []
        for gpu0_bsz, batch in calls:
            result = BalancedDataParallel(gpu0_bsz, module, devices).check(batch)
            found += [(one.relative, one.what, result.chunk_sizes) for one in result.differences]
        worst, name, chunk_sizes = max(found, default=(0.0, "", ()))
        note = f"{name}, chunks of {chunk_sizes}" if found else "up to rounding in float64"
        yield Check("gradients", what, not found, f"{worst:.0e}" if found else "equal", note)


def _memory(
    workload: Workload, batch_size: int, devices: Sequence[torch.device]
) -> Iterator[Check]:
    """Yield checks that compare the memory peaks of emulated devices with measured peaks.

    The measured peaks are those of torch's allocator and those that NVML reports.
    """
    used_before = [at.used_bytes for at in MemoryProbe(devices).snapshot()]
    even = even_share(batch_size, len(devices))
    for gpu0_bsz in sorted({even, even // 2, 0}, reverse=True):
        with emulate_devices(len(set(devices)), symbolic=True) as emulated:
            replicas = list(emulated) * (len(devices) // len(emulated))
            predicted = measure_step(workload, batch_size, gpu0_bsz, replicas).peak_bytes
        with MemoryProbe(devices).measure() as usage:
            measured = measure_step(workload, batch_size, gpu0_bsz, devices).peak_bytes
        # Libraries keep workspaces after the step. Predictions do not include these workspaces, so
        # the workspaces are subtracted from the measured peaks.
        kept = [torch.get_device_module(device).memory_allocated(device) for device in devices]
        errors = [p / (m - k) - 1 for p, m, k in zip(predicted, measured, kept, strict=True)]
        worst = max(errors, key=abs)
        is_near, what = abs(worst) <= ALLOWED_ERROR, f"gpu0_bsz={gpu0_bsz}"
        note = f"predicted {', '.join(map(format_bytes, predicted))}"
        yield Check("memory", f"{what}, allocator", is_near, f"{worst:+.1%}", note)
        beyond = [
            at.peak_used_bytes - before - peak
            for at, before, peak in zip(usage.devices, used_before, predicted, strict=False)
            if at.peak_used_bytes is not None and before is not None
        ]
        if beyond:
            extra = max(0, *beyond)
            note = "beyond the prediction: contexts, communicators, cache"
            ok = extra <= RESERVE
            yield Check("memory", f"{what}, NVML", ok, format_bytes(extra), note)


def _time(workload: Workload, batch_size: int, devices: Sequence[torch.device]) -> Iterator[Check]:
    """Yield a check that compares the time of a training step with that of ``nn.DataParallel``.

    A step here is a forward and a backward pass, without an optimizer step. Steps with
    ``BalancedDataParallel`` and steps with ``nn.DataParallel`` alternate, and the median times are
    compared.
    """
    module = workload.new_model().to(devices[0])
    ours = BalancedDataParallel(None, module, devices)
    models = (ours, nn.DataParallel(module, [device.index for device in devices]))
    args, kwargs, target = workload.new_batch(batch_size)

    def seconds(model: nn.Module) -> float:
        start = timer()  # waits for the device
        output: Tensor = model(*args, **kwargs)
        workload.loss(output, target.to(devices[0])).backward()
        return timer() - start

    times = [tuple(map(seconds, models)) for _ in range(3 + 20)][3:]  # 3 to warm up
    medians = [statistics.median(own) for own in zip(*times, strict=True)]
    ratio = medians[0] / medians[1]
    note = "{:.1f} ms, nn.DataParallel {:.1f} ms".format(*(1e3 * median for median in medians))
    yield Check("time", "even split", ratio <= ALLOWED_RATIO, f"{ratio:.2f}", note)
