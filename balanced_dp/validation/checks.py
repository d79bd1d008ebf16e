"""Compare gradients, memory and time on the devices of this machine with what is promised."""

from __future__ import annotations

import gc
import json
import platform
import statistics
import subprocess
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..devices import is_emulated, resolve_devices
from ..emulation import emulate_devices
from ..errors import ArgumentError, BalanceWarning
from ..memory.nvml import Nvml, NvmlError
from ..memory.probe import MemoryProbe
from ..parallel.data_parallel import BalancedDataParallel
from ..split import even_share
from ..torch_versions import accelerator_count, accelerator_type
from ..tuning.workload import Workload, find_workload
from ..units import format_bytes

ALLOWED_ERROR = 0.10
"""By how much a predicted peak may differ, as a fraction of the measured one."""

ALLOWED_BYTES = 8 * 2**20
"""By how much the probe and nvidia-smi may differ, which do not ask at the same moment."""

RESERVE_BYTES = 512 * 2**20
"""How much of NVML's used memory may be unpredicted: what a plan keeps free of each device."""

ALLOWED_RATIO = 1.05
"""The most that a step may take, compared with ``nn.DataParallel``."""


Outcome = Literal["ok", "not ok", "-"]


@dataclass(frozen=True, slots=True)
class Check:
    """Record what was compared, and how it turned out.

    Attributes:
        part: ``"gradients"``, ``"probe"``, ``"memory"`` or ``"time"``.
        what: what was compared.
        outcome: ``"-"`` if these devices cannot answer.
        value: the number that decides, with its unit.
        note: more numbers, or the reason.
    """

    part: str
    what: str
    outcome: Outcome
    value: str = ""
    note: str = ""

    def __str__(self) -> str:
        line = f"{self.part:9}  {self.what:36}  {self.outcome:6}  {self.value:>10}  {self.note}"
        return line.rstrip()


@dataclass(frozen=True, slots=True)
class Validation:
    """Combine all checks with what they ran on; prints as a table.

    Attributes:
        devices: the devices in words.
        versions: of the software, by name.
        checks: the checks in order.
    """

    devices: str
    versions: dict[str, str]
    checks: tuple[Check, ...]

    @property
    def gradients_are_right(self) -> bool:
        """Whether no gradient and no output differs from that of one device."""
        return all(check.outcome != "not ok" for check in self.checks if check.part == "gradients")

    @property
    def verdict(self) -> str:
        """A sentence on the gradients, which decide."""
        if self.gradients_are_right:
            return "All gradients and outputs are those of one device."
        return "FAILED: not all gradients and outputs are those of one device."

    def __str__(self) -> str:
        return "\n".join([*map(str, self.checks), "", self.verdict])

    def markdown(self) -> str:
        """Return the table with devices and versions, to paste into an issue."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return f"### balanced-dp validate: {self.devices}\n\n{versions}\n\n```\n{self}\n```\n"

    def json(self) -> str:
        """Return all fields as JSON."""
        return json.dumps(asdict(self), indent=2) + "\n"


def validate(
    num_devices: int | None = None,
    *,
    emulate: bool = False,
    workload: str | None = None,
    on_check: Callable[[Check], object] = lambda check: None,
) -> Validation:
    """Compare gradients, memory and time on all GPUs, or on emulated devices without any.

    Args:
        num_devices: number of devices, by default all GPUs; of emulated devices, or of replicas
            that share a single GPU, four.
        emulate: whether to emulate devices even if there are GPUs.
        workload: what is trained for memory and time, by default ``"gpt2-small"``, and on emulated
            devices ``"char-lm"``.
        on_check: called with each check.

    Raises:
        ArgumentError: there are not so many devices, or fewer than two are asked for.
    """
    checks: list[Check] = []
    with _opened(num_devices, emulate) as devices:
        is_real = not is_emulated(devices[0])
        trained = find_workload(workload or ("gpt2-small" if is_real else "char-lm"))
        for part, found in {
            "gradients": _gradients(devices),
            "probe": _probe(devices),
            "memory": _memory(trained, 4 * len(devices), devices),
            "time": _time(trained, 4 * len(devices), devices),
        }.items():
            for check in _guarded(part, found):
                checks.append(check)
                on_check(check)
        described = _described(devices) if is_real else f"{len(devices)} emulated devices"
    return Validation(described, _versions(), tuple(checks))


def _guarded(part: str, checks: Iterator[Check]) -> Iterator[Check]:
    """Yield checks; if they end with an error, yield that as the last one."""
    try:
        yield from checks
    except Exception as error:  # the other parts can be checked without this one
        note = textwrap.shorten(f"{type(error).__name__}: {error}", 160, placeholder=" ...")
        yield Check(part, "ended with an error", "not ok", note=note)


def _described(devices: Sequence[torch.device]) -> str:
    found = dict.fromkeys(devices)
    names = [torch.get_device_module(d).get_device_properties(d).name for d in found]
    sharing = f"{len(devices)} replicas on " if len(found) < len(devices) else ""
    return sharing + ", ".join(f"{d} {name}" for d, name in zip(found, names, strict=True))


@contextmanager
def _opened(num_devices: int | None, emulate: bool) -> Iterator[Sequence[torch.device]]:
    """Yield the device of each replica."""
    count = 0 if emulate else accelerator_count()
    wanted = num_devices or (count if count > 1 else 4)
    if wanted < 2:
        raise ArgumentError(f"num_devices must be at least 2, got {wanted}")
    if 1 < count < wanted:
        raise ArgumentError(
            f"num_devices={wanted}, but there are {count} accelerators; emulate them (--emulate)"
        )
    if not count:
        with emulate_devices(wanted) as devices:
            yield devices
    else:
        found = resolve_devices(None, accelerator_type())
        yield found[:wanted] if count > 1 else found * wanted


class _Model(nn.Module):
    """A small transformer, which returns logits, or with targets their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(31, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 31)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the logits at each position, or the mean loss of the targets that count."""
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _gradients(devices: Sequence[torch.device]) -> Iterator[Check]:
    """Compare outputs and gradients with those of one device, in float64."""
    batch_size = 3 * len(devices) + 1
    module = _Model().double().to(devices[0])
    tokens, targets = torch.randint(31, (2, batch_size, 12))
    padded = targets.masked_fill(torch.arange(12) >= torch.arange(batch_size)[:, None] % 13, -100)
    values = range(even_share(batch_size, len(devices)) + 1)
    sizes = range(1, batch_size)
    cases: dict[str, list[tuple[int, tuple[Tensor, ...]]]] = {
        f"gpu0_bsz 0 to {values[-1]}": [(value, (tokens,)) for value in values],
        "the same, padded loss in forward": [(value, (tokens, padded)) for value in values],
        f"batches of 1 to {sizes[-1]}": [(1, (tokens[:size],)) for size in sizes],
    }
    for what, calls in cases.items():
        found = []
        for gpu0_bsz, arguments in calls:
            with closing(BalancedDataParallel(gpu0_bsz, module, devices)) as model:
                found += [
                    (one.relative, f"{one.what}, chunks of {result.chunk_sizes}")
                    for result in [model.check(*arguments)]
                    for one in result.differences
                ]
        worst, where = max(found, default=(0.0, "up to rounding in float64"))
        value = f"{worst:.0e}" if found else "equal"
        yield Check("gradients", what, "not ok" if found else "ok", value, where)


def _probe(devices: Sequence[torch.device]) -> Iterator[Check]:
    """Compare what the probe reads from NVML with nvidia-smi, which rounds to MiB."""
    fields = ("total_bytes", "used_bytes", "free_bytes")
    query = "--query-gpu=uuid,memory.total,memory.used,memory.free"
    try:
        answer = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        yield Check("probe", "nvidia-smi's numbers", "-", note="nvidia-smi does not answer here")
        return
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    listed = {uuid: [int(mib) * 2**20 for mib in sizes] for uuid, *sizes in rows}
    for memory in MemoryProbe(devices).snapshot():
        found = [getattr(memory, field) for field in fields]
        sizes = listed.get(memory.uuid or "")
        if sizes is None or None in found:
            reason = memory.error or f"nvidia-smi does not list {memory.uuid}"
            yield Check("probe", memory.label, "-", note=reason)
            continue
        worst = max(abs(a - b) for a, b in zip(found, sizes, strict=True))
        outcome: Outcome = "ok" if worst <= ALLOWED_BYTES else "not ok"
        note = "total, used and free, next to nvidia-smi"
        yield Check("probe", memory.label, outcome, format_bytes(worst), note)


def _memory(
    workload: Workload, batch_size: int, devices: Sequence[torch.device]
) -> Iterator[Check]:
    """Compare peaks on emulated devices with those of torch's allocator and of NVML."""
    if is_emulated(devices[0]):
        yield Check("memory", "predicted peaks", "-", note="not on emulated devices")
        return
    used_before = [at.used_bytes for at in MemoryProbe(devices).snapshot()]
    even = even_share(batch_size, len(devices))
    for gpu0_bsz in sorted({even, even // 2, 0}, reverse=True):
        with emulate_devices(len(set(devices)), symbolic=True) as emulated:
            replicas = list(emulated) * (len(devices) // len(emulated))
            predicted, _ = _peaks(workload, batch_size, gpu0_bsz, replicas)
        measured, used = _peaks(workload, batch_size, gpu0_bsz, devices)
        worst = max((p / m - 1 for p, m in zip(predicted, measured, strict=True)), key=abs)
        note = f"predicted {', '.join(map(format_bytes, predicted))}"
        outcome: Outcome = "ok" if abs(worst) <= ALLOWED_ERROR else "not ok"
        yield Check("memory", f"gpu0_bsz={gpu0_bsz}, allocator", outcome, f"{worst:+.1%}", note)
        pairs = zip(used, used_before, strict=True)
        grown = [now - before for now, before in pairs if now is not None and before is not None]
        if len(grown) < len(used):
            yield Check("memory", f"gpu0_bsz={gpu0_bsz}, NVML", "-", note="NVML does not say")
            continue
        beyond = max(g - p for g, p in zip(grown, predicted, strict=True))
        outcome = "ok" if beyond <= RESERVE_BYTES else "not ok"
        note = "not predicted: contexts, communicators, cache"
        unpredicted = format_bytes(max(0, beyond))
        yield Check("memory", f"gpu0_bsz={gpu0_bsz}, NVML", outcome, unpredicted, note)


def _peaks(
    workload: Workload, batch_size: int, gpu0_bsz: int, devices: Sequence[torch.device]
) -> tuple[list[int], list[int | None]]:
    """Return the peaks of a second training step, by the allocator and by NVML."""
    model = BalancedDataParallel(gpu0_bsz, workload.new_model().to(devices[0]), devices)
    optimizer = workload.make_optimizer(model.parameters())
    with closing(model):
        for _ in range(2):
            with model.memory.measure() as usage:
                _step(workload, batch_size, model)
                optimizer.step()
    del model, optimizer
    gc.collect()
    # Libraries keep workspaces, which are not of the step.
    kept = [torch.get_device_module(d).memory_allocated(d) for d in dict.fromkeys(devices)]
    held = [peak - size for peak, size in zip(usage.peak_bytes, kept, strict=True)]
    return held, [at.peak_used_bytes for at in usage.devices]


def _step(workload: Workload, batch_size: int, model: nn.Module) -> None:
    args, kwargs, target = workload.new_batch(batch_size)
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BalanceWarning)  # the even split is compared
        output = model(*args, **kwargs)
    workload.loss(output, target.to(next(model.parameters()).device)).backward()


def _time(workload: Workload, batch_size: int, devices: Sequence[torch.device]) -> Iterator[Check]:
    """Compare forward and backward passes with those of ``nn.DataParallel``, in turns."""
    what = "nn.DataParallel, even split"
    if is_emulated(devices[0]):
        yield Check("time", what, "-", note="not on emulated devices")
        return
    module = workload.new_model().to(devices[0])
    even = even_share(batch_size, len(devices))
    ours = BalancedDataParallel(even, module, devices)
    times: list[list[float]] = [[], []]
    with closing(ours):
        for _ in range(3 + 20):  # the first ones tune kernels
            for model, own in zip(
                (ours, nn.DataParallel(module, [d.index for d in devices])), times, strict=True
            ):
                torch.get_device_module(devices[0]).synchronize(devices[0])
                start = time.perf_counter()
                _step(workload, batch_size, model)
                torch.get_device_module(devices[0]).synchronize(devices[0])
                own.append(time.perf_counter() - start)
    seconds = [statistics.median(own[3:]) for own in times]
    ratio, note = (
        seconds[0] / seconds[1],
        "{:.1f} ms, {:.1f} ms".format(*(1e3 * s for s in seconds)),
    )
    yield Check("time", what, "ok" if ratio <= ALLOWED_RATIO else "not ok", f"{ratio:.2f}", note)


def _versions() -> dict[str, str]:
    try:
        driver = Nvml().driver_version() or "unknown"
    except NvmlError:
        driver = "none"
    found: dict[str, Any] = {"balanced-dp": version("balanced-dp"), "torch": torch.__version__}
    found |= {"CUDA": torch.version.cuda or "none", "driver": driver}
    return found | {"Python": platform.python_version(), "on": platform.platform()}
