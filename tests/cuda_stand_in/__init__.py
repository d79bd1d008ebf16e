"""A stand-in for CUDA devices, for machines without GPUs.

The stand-in is an accelerator with CUDA's streams, events, allocator and communicators. Its devices
are ``torch.device("stand_in", 0)`` to ``torch.device("stand_in", 3)``. They run the code of
balanced_dp that otherwise runs only on CUDA devices. The CPU computes each operation immediately,
while vector clocks record which operations a GPU might have run in another order.

The C++ extension is compiled when this package is first imported. This must be before the first
backward pass, in which autograd makes its threads. The stand-in is a model of the hardware, not
hardware.
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
    """Keep other processes out of a build folder while this process compiles the extension.

    torch's own lock is the file ``lock``. If a process that has made this file is killed, all
    others wait forever. The lock of this function is a lock of the operating system, which ends
    with the process. So the process that holds it may remove torch's file.
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
"""The reason why the stand-in cannot be used on this machine; None if it can."""

if WHY_NOT is None:
    extension = _load()
    module = DeviceModule(extension)
    torch._register_device_module(NAME, module)


class StandIn:
    """The stand-in for CUDA devices while it is torch's accelerator. ``opened`` yields it.

    Attributes:
        devices: the devices of the stand-in.
        nccl: the replacement of NCCL, which also lists the communicators that were opened.
    """

    def __init__(self, nccl: Communicators) -> None:
        self.devices = [torch.device(NAME, index) for index in range(NUM_DEVICES)]
        self.nccl = nccl

    def races(self) -> list[str]:
        """Return a message for each race since the last call.

        In a race, an operation reads or writes memory without waiting for another operation that
        reads or writes it.
        """
        return extension.races()

    @contextmanager
    def recorded(self) -> Iterator[list[clock.Work]]:
        """Record the work that is launched in a ``with`` block, so that ``run`` can time it.

        The devices are synchronized when the block begins.

        Yields:
            A list, which has the recorded work when the block has ended.
        """
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
        """Return when each piece of recorded work would run on devices with the given speeds."""
        return clock.run(work, extension.STREAMS_EACH, operations_per_s, bytes_per_s)

    @contextmanager
    def limited(self, index: int, num_bytes: int, failure: str = "") -> Iterator[None]:
        """Limit the memory of a device inside a ``with`` block. Larger requests fail.

        Args:
            index: the index of the device.
            num_bytes: the bytes that the device can hold.
            failure: the message of the error. If empty, the error is torch's out-of-memory error,
                which the allocator's statistics count.
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
        """The number of times that the host has waited for a device."""
        return extension.num_waits()


_flatten_parameters = nn.RNNBase.flatten_parameters


@torch.no_grad()
def _flatten_as_cudnn(rnn: nn.RNNBase) -> None:
    """Give the weights of an RNN a new storage, as torch's ``_cudnn_rnn_flatten_weight`` does."""
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
    """Make the stand-in torch's accelerator, and so the type of int device ids, for a block.

    Raises:
        AssertionError: when the block ends, if there were races that ``StandIn.races`` has not
            returned.
    """
    # On CUDA, Module.to keeps the Parameter objects, so tied parameters remain tied. Without this
    # setting, it does not keep them on devices of type PrivateUse1, such as the stand-in.
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
        torch.accelerator.empty_cache()  # else each test would leave its cached blocks
        CUDA_LIKE.remove(NAME)
        torch.__future__.set_swap_module_params_on_conversion(keeps)
