"""Compare the time of training steps with nn.DataParallel and DistributedDataParallel."""

from __future__ import annotations

import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ..devices import is_emulated
from ..errors import BalanceWarning
from ..parallel.data_parallel import BalancedDataParallel
from ..split import even_share
from ..tuning.workloads import Workload, find_workload
from .check import MAX_NOTE, Check, judged

ALLOWED = 1.05
"""The most that a step may take, compared with ``nn.DataParallel``."""

ROUNDS = 20
NUM_WARM_UP = 3
"""Steps that are not counted: they tune kernels and take memory."""

_TIME_LIMIT_S = 20.0
"""Seconds for the rounds in this process."""

_RANKS_TIME_LIMIT_S = 60.0
"""Seconds for the ranks, from their start to their end."""


def time_checks(workload: str, batch_size: int, devices: Sequence[torch.device]) -> Iterator[Check]:
    """Yield a check against ``nn.DataParallel`` and one against ``DistributedDataParallel``."""
    names = ["nn.DataParallel", "DistributedDataParallel"]
    if is_emulated(devices[0]):
        for name in names:
            yield Check("seconds", name, "-", note="not on emulated devices")
        return
    times = data_parallel_seconds(find_workload(workload), batch_size, devices)
    ours, stock = times["ours"], times["nn.DataParallel"]
    ratio, note = ours / stock, _milliseconds(ours, stock)
    yield judged("seconds", names[0], ratio, note, ratio <= ALLOWED, f"{ALLOWED}")
    if len(set(devices)) < len(devices):
        yield Check("seconds", names[1], "-", note="NCCL starts no two ranks on one device")
        return
    torch.get_device_module(devices[0]).empty_cache()  # the ranks need the memory
    try:
        ranks = rank_seconds(workload, batch_size, devices[0].type, len(devices))
    except (OSError, subprocess.SubprocessError, RuntimeError) as error:
        yield Check("seconds", names[1], "-", note=f"no times of the ranks: {error}")
        return
    yield Check("seconds", names[1], "ok", ours / ranks, f"{_milliseconds(ours, ranks)}; no limit")


def _milliseconds(ours: float, theirs: float) -> str:
    return f"{1e3 * ours:.1f} ms and {1e3 * theirs:.1f} ms"


def data_parallel_seconds(
    workload: Workload, batch_size: int, devices: Sequence[torch.device]
) -> dict[str, float]:
    """Return the seconds of a training step with the even split, ours and ``nn.DataParallel``'s."""
    module = workload.new_model().to(devices[0])
    ours = BalancedDataParallel(even_share(batch_size, len(devices)), module, devices)
    stock = nn.DataParallel(module, [device.index for device in devices])
    try:
        models = {"ours": ours, "nn.DataParallel": stock}
        return step_seconds(workload, batch_size, models, time_limit_s=_TIME_LIMIT_S)
    finally:
        ours.close()


def step_seconds(
    workload: Workload,
    batch_size: int,
    models: Mapping[str, nn.Module],
    *,
    training: bool = True,
    rounds: int = ROUNDS,
    time_limit_s: float = math.inf,
) -> dict[str, float]:
    """Return the median seconds of a step of each model, which take turns.

    A step is a forward pass and its loss, and in training a backward pass. After
    ``time_limit_s``, no round begins once there were three.
    """
    times: dict[str, list[float]] = {name: [] for name in models}
    deadline = time.perf_counter() + time_limit_s
    for index in range(NUM_WARM_UP + rounds):
        if index >= NUM_WARM_UP + 3 and time.perf_counter() > deadline:
            break
        for name, model in models.items():
            args, kwargs, target = workload.new_batch(batch_size)
            model.zero_grad()
            device = next(model.parameters()).device
            torch.get_device_module(device).synchronize(device)
            start = time.perf_counter()
            with torch.set_grad_enabled(training), warnings.catch_warnings():
                warnings.simplefilter("ignore", BalanceWarning)  # the even split is compared
                if not isinstance(model, nn.DataParallel):  # which scatters what is on the CPU
                    args = tuple(value.to(device) for value in args)
                loss = workload.loss(model(*args, **kwargs), target.to(device))
                if training:
                    loss.backward()
            torch.get_device_module(device).synchronize(device)
            if index >= NUM_WARM_UP:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def rank_seconds(workload: str, batch_size: int, device_type: str, num_ranks: int) -> float:
    """Return the median seconds of a training step with ``DistributedDataParallel``.

    The ranks are processes that torchrun starts, each with an even share of the batch.

    Raises:
        RuntimeError: The ranks failed, or did not end in time.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "seconds.json")
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(num_ranks), "-m", "balanced_dp.validation.rank"),
            *(workload, str(even_share(batch_size, num_ranks)), device_type, str(file)),
        ]
        package = str(Path(__file__).parents[2])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            _, errors = process.communicate(timeout=_RANKS_TIME_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"they took more than {_RANKS_TIME_LIMIT_S:.0f} s") from None
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun then ends the ranks
                process.communicate()
        if process.returncode:
            raise RuntimeError(_first_error(errors))
        seconds: float = json.loads(file.read_text())
        return seconds


def _first_error(output: str) -> str:
    """Return the first error in the output of the ranks, which torchrun may have marked."""
    found = re.search(r"^(?:\[[^\]]*\]:? ?)*(?:\w+\.)*(\w*(?:Error|Exception): .+)$", output, re.M)
    return textwrap.shorten(found[1], MAX_NOTE, placeholder=" ...") if found else "torchrun failed"
