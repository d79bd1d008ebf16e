"""A replacement of NCCL for the stand-in for CUDA devices.

It provides the functions that ``torch.nn.parallel.comm`` calls if torch is built with CUDA.

Source: ``torch/csrc/cuda/comm.cpp`` and ``nccl.cpp`` of torch 2.13.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.parallel import comm

from .device_module import NAME

NCCL_DTYPES = {
    *(torch.float32, torch.float16, torch.float64, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
}
"""The dtypes that torch's function ``to_nccl_data_type`` accepts."""


class Communicators:
    """A replacement of NCCL, which keeps one communicator for each list of devices it is used for.

    Attributes:
        opened: the communicators, each as a tuple of device indices.
        refuses_threads: whether it is an error if two threads use NCCL at the same time.
    """

    def __init__(self, extension: Any) -> None:
        self.opened: list[tuple[int, ...]] = []
        self.refuses_threads = True
        self._extension = extension
        self._in_use = threading.Lock()

    @classmethod
    @contextmanager
    def replaced(cls, extension: Any) -> Iterator[Communicators]:
        """Provide the functions that ``torch.nn.parallel.comm`` needs and this torch lacks."""
        nccl = cls(extension)
        functions = {
            "_broadcast": nccl.broadcast,
            "_broadcast_out": nccl.broadcast_out,
            "_broadcast_coalesced": nccl.broadcast_coalesced,
            "_scatter": scatter,
            "_gather": gather,
        }
        own = SimpleNamespace(is_available=is_available, reduce=nccl.reduce)
        with (
            mock.patch.multiple(torch._C, create=True, **functions),
            mock.patch.object(comm, "nccl", own),
        ):
            yield nccl

    @torch.no_grad()
    def broadcast(self, tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
        names = [f"{NAME}:{index}" for index in devices]
        sent = [torch.empty_like(tensor, device=name) for name in names]
        sent = [tensor if t.device == tensor.device else t for t in sent]
        self.broadcast_out(tensor, [there for there in sent if there is not tensor])
        return sent

    def broadcast_out(self, tensor: Tensor, others: Sequence[Tensor]) -> Sequence[Tensor]:
        if is_available(everyone := [tensor, *others]):
            self._run("broadcast", everyone, everyone, 0)
        else:
            for other in others:
                other.copy_(tensor, non_blocking=True)
        return others

    def broadcast_coalesced(
        self, tensors: Sequence[Tensor], devices: Sequence[int], buffer_size: int
    ) -> list[list[Tensor]]:
        sent = [self.broadcast(tensor, devices) for tensor in tensors]
        return [[there[i] for there in sent] for i in range(len(devices))]

    def reduce(self, inputs: Sequence[Tensor], output: Tensor, root: int) -> None:
        outputs = [output if i == root else t for i, t in enumerate(inputs)]
        self._run("reduce", list(inputs), outputs, root)

    def _run(self, name: str, inputs: list[Tensor], outputs: list[Tensor], root: int) -> None:
        if inputs[0].dtype not in NCCL_DTYPES:
            raise RuntimeError(f"Unconvertible NCCL type {inputs[0].dtype}")
        if not self._in_use.acquire(blocking=not self.refuses_threads):
            raise RuntimeError("two threads use NCCL at the same time")
        try:
            if self.refuses_threads:
                time.sleep(0.0005)  # lets another thread run, if there is one
            devices = tuple(tensor.get_device() for tensor in inputs)
            if devices not in self.opened:
                self.opened.append(devices)
            self._extension.collective(name, inputs, outputs, root)
        finally:
            self._in_use.release()


def is_available(tensors: Sequence[Tensor]) -> bool:
    """Return whether NCCL accepts ``tensors``: dense, contiguous, and each on another device."""
    devices = {tensor.device for tensor in tensors}
    return len(devices) == len(tensors) and all(
        t.device.type == NAME and not t.is_sparse and t.is_contiguous() for t in tensors
    )


def scatter(tensor: Tensor, devices: Any, sizes: Any, dim: int, streams: Any) -> list[Tensor]:
    chunks = tensor.split(sizes, dim) if sizes else tensor.chunk(len(devices), dim)
    moved = []
    for i, chunk in enumerate(chunks):
        with torch.get_device_module(NAME).stream(streams[i]) if streams else nullcontext():
            moved.append(chunk.to(f"{NAME}:{devices[i]}", non_blocking=True))
    return moved


def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    device = torch.device("cpu") if destination == -1 else torch.device(NAME, destination or 0)
    return torch.cat([t.to(device, non_blocking=destination != -1) for t in tensors], dim)
