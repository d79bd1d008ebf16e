"""Compare the time of training steps with nn.DataParallel and DistributedDataParallel."""

from __future__ import annotations

import gc
import math
import re
import statistics
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn
from torch.nn.parallel import DistributedDataParallel

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
    except (OSError, ProcessRaisedException, ProcessExitedException) as error:
        reason = _first_error(str(error))
        yield Check("seconds", names[1], "-", note=f"no times of the ranks: {reason}")
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

    The ranks are processes, each with an even share of the batch.

    Raises:
        ProcessRaisedException, ProcessExitedException: A rank failed.
        TimeoutError: They did not end in time.
    """
    num_samples = even_share(batch_size, num_ranks)
    deadline = time.monotonic() + _RANKS_TIME_LIMIT_S
    with tempfile.TemporaryDirectory() as folder:
        arguments = (num_ranks, workload, num_samples, device_type, folder)
        ranks = spawn(_run_rank, arguments, num_ranks, join=False)
        try:
            while not ranks.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise TimeoutError(f"they took more than {_RANKS_TIME_LIMIT_S:.0f} s")
        finally:
            for process in ranks.processes:
                process.terminate()
                process.join()
        return float(Path(folder, "seconds").read_text())


def _run_rank(
    rank: int, num_ranks: int, workload: str, num_samples: int, device_type: str, folder: str
) -> None:
    """Time the steps of a rank, which wait for those of the others; rank 0 writes the median."""
    torch.set_num_threads(1)
    torch.get_device_module(device_type).set_device(rank)
    meeting = Path(folder, "ranks").as_uri()
    dist.init_process_group(init_method=meeting, rank=rank, world_size=num_ranks)
    trained = find_workload(workload)
    module = trained.new_model().to(device_type)
    model = DistributedDataParallel(module, gradient_as_bucket_view=True)
    [median] = step_seconds(trained, num_samples, {"DistributedDataParallel": model}).values()
    if rank == 0:
        Path(folder, "seconds").write_text(str(median))
    dist.barrier()
    del model
    gc.collect()  # no model outlives its group
    dist.destroy_process_group()


def _first_error(text: str) -> str:
    """Return the line of a traceback that names the error, or what is there instead of one."""
    found = re.search(r"^(?:\w+\.)*(\w*(?:Error|Exception): .+)$", text, re.M)
    return textwrap.shorten(found[1] if found else text, MAX_NOTE, placeholder=" ...")
