"""An accelerator with CUDA's streams, events, allocator and communicators, for machines without.

``torch.device("stand_in", 0)`` to ``3`` run the code that only CUDA takes. The CPU computes at
once, while vector clocks tell what a GPU might have run in another order. It is compiled when it is
first imported, which must be before the first backward: autograd makes its threads then.

It is a model of the hardware, not hardware.
"""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from balanced_dp.devices import CUDA_LIKE, default_device_type

from ..versions import has_torch
from . import clock
from .communicators import Communicators
from .device_module import NAME, NUM_DEVICES, TOTAL_BYTES, DeviceModule

BUILD_NAME = f"cuda_stand_in-{torch.__version__}-{sysconfig.get_config_var('SOABI')}"


def _why_not() -> str | None:
    if not (shutil.which("g++") and shutil.which("ninja")):
        return "the stand-in for CUDA devices is compiled, which needs g++ and ninja"
    if not has_torch("2.13"):
        return "the stand-in for CUDA devices needs torch 2.13"
    if default_device_type() is not None:
        return "torch has one accelerator at a time, and there is one here"
    return None


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a folder of torch's builds while one of them compiles.

    torch's own lock is a file, for which others wait forever if its process was killed. This one
    is the system's, which ends with the process, so whoever has it may remove that file.
    """
    import fcntl  # Windows has none

    with (folder / "in_use").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        (folder / "lock").unlink(missing_ok=True)
        yield


def _load() -> Any:
    from torch.utils import cpp_extension

    folder = Path(__file__).parents[2] / "build" / BUILD_NAME
    folder.mkdir(parents=True, exist_ok=True)
    source = str(Path(__file__).with_name("stand_in.cpp"))
    flags = ["-O1", "-g0"]
    with alone_in(folder):
        extension = cpp_extension.load(NAME, [source], build_directory=folder, extra_cflags=flags)
    torch.utils.rename_privateuse1_backend(NAME)
    return extension


WHY_NOT = _why_not()
"""Why it cannot be used here; None if it can."""

if WHY_NOT is None:
    extension = _load()
    module = DeviceModule(extension)
    torch._register_device_module(NAME, module)


class StandIn:
    """The stand-in while it is the accelerator.

    Attributes:
        devices: its devices.
        nccl: the communicators that NCCL would have opened.
    """

    def __init__(self, nccl: Communicators) -> None:
        self.devices = [torch.device(NAME, index) for index in range(NUM_DEVICES)]
        self.nccl = nccl

    def races(self) -> list[str]:
        """Returns what does not come after what it must, and forgets it."""
        return extension.races()

    @contextmanager
    def recorded(self) -> Iterator[list[clock.Work]]:
        """Records what is launched, for a clock to run; all before it is done when it begins."""
        for device in self.devices:
            torch.accelerator.synchronize(device)
        work: list[clock.Work] = []
        extension.set_recording(True)
        try:
            yield work
        finally:
            extension.set_recording(False)
            work += extension.take_record()

    def run(
        self, work: Sequence[clock.Work], operations_per_s: float, bytes_per_s: float
    ) -> list[clock.Span]:
        """Returns when each piece of work would have run."""
        return clock.run(work, extension.STREAMS_EACH, operations_per_s, bytes_per_s)

    @contextmanager
    def limited(self, index: int, num_bytes: int, failure: str = "") -> Iterator[None]:
        """Lets a device hold so much, beyond which a request fails.

        Args:
            index: of the device.
            num_bytes: what it can hold.
            failure: the text of the error; if empty, it is torch's own, which is counted.
        """
        extension.set_limit(index, num_bytes, failure)
        module.total_bytes[index] = num_bytes
        try:
            yield
        finally:
            extension.set_limit(index, 0, "")
            module.total_bytes[index] = TOTAL_BYTES

    @property
    def num_waits(self) -> int:
        """How many times the host has waited for a device."""
        return extension.num_waits()


_flatten_parameters = nn.RNNBase.flatten_parameters


@torch.no_grad()
def _flatten_as_cudnn(rnn: nn.RNNBase) -> None:
    """Gives the weights of an RNN a new storage, as ``_cudnn_rnn_flatten_weight`` does."""
    weights: list[Any] = rnn._flat_weights
    if any(weight.device.type != NAME for weight in weights):
        _flatten_parameters(rnn)
    elif len({weight.data_ptr() for weight in weights}) == len(weights):
        flat = torch.cat([weight.flatten() for weight in weights])
        parts = flat.split([weight.numel() for weight in weights])
        for weight, part in zip(weights, parts, strict=True):
            weight.set_(part.view_as(weight))


@contextmanager
def opened() -> Iterator[StandIn]:
    """Makes the stand-in the accelerator that ``device_ids`` means.

    Raises:
        AssertionError: at the end, if there was a race that nobody has asked for.
    """
    # Module.to keeps parameters, and tied ones tied, on CUDA; without this, not on PrivateUse1.
    keeps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    CUDA_LIKE.add(NAME)
    extension.reset()
    try:
        with (
            mock.patch.object(module, "is_open", True),
            mock.patch.object(nn.RNNBase, "flatten_parameters", _flatten_as_cudnn),
            Communicators.replaced(extension) as nccl,
        ):
            yield StandIn(nccl)
            found = list(dict.fromkeys(extension.races()))
            assert not found, "races:\n" + "\n".join(found)
    finally:
        extension.reset()
        torch.accelerator.empty_cache()  # or each test would leave its blocks
        CUDA_LIKE.remove(NAME)
        torch.__future__.set_swap_module_params_on_conversion(keeps)
