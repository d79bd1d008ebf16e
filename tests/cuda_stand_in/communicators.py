"""What ``torch.nn.parallel.comm`` calls where torch was built with CUDA, for the stand-in.

Source: ``torch/csrc/cuda/comm.cpp`` and ``nccl.cpp`` of torch 2.13.
"""

from __future__ import annotations

import threading
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
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
"""What ``to_nccl_data_type`` knows."""


class Communicators:
    """NCCL, which opens a communicator for each list of devices that it is used for, and keeps it.

    Attributes:
        opened: the indices of the devices of each.
        refuses_threads: whether it is an error that two threads use it at the same time.
    """

    def __init__(self, extension: Any) -> None:
        self.opened: list[tuple[int, ...]] = []
        self.refuses_threads = True
        self._extension = extension
        self._in_use = threading.Lock()

    @classmethod
    @contextmanager
    def replaced(cls, extension: Any) -> Iterator[Communicators]:
        """Gives ``torch.nn.parallel.comm`` this, in place of what torch was built without."""
        nccl = cls(extension)
        functions = {
            "_broadcast": nccl.broadcast,
            "_broadcast_out": nccl.broadcast_out,
            "_broadcast_coalesced": nccl.broadcast_coalesced,
            "_scatter": scatter,
            "_gather": gather,
        }
        own = types.SimpleNamespace(is_available=is_available, reduce=nccl.reduce)
        with (
            mock.patch.multiple(torch._C, create=True, **functions),
            mock.patch.object(comm, "nccl", own),
        ):
            yield nccl

    def broadcast(self, tensor: Tensor, devices: Sequence[int]) -> list[Tensor]:
        with torch.no_grad():
            sent = [
                tensor
                if index == tensor.get_device()
                else torch.empty_like(tensor, device=f"{NAME}:{index}")
                for index in devices
            ]
            self.broadcast_out(tensor, [there for there in sent if there is not tensor])
        return sent

    def broadcast_out(self, tensor: Tensor, others: Sequence[Tensor]) -> Sequence[Tensor]:
        if is_available([tensor, *others]):
            self._run("broadcast", [tensor, *others], [tensor, *others], 0)
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
                time.sleep(0.0005)  # lets another thread in, if there is one
            devices = tuple(tensor.get_device() for tensor in inputs)
            if devices not in self.opened:
                self.opened.append(devices)
            self._extension.collective(name, inputs, outputs, root)
        finally:
            self._in_use.release()


def is_available(tensors: Sequence[Tensor]) -> bool:
    """Returns whether NCCL takes these tensors: dense ones, in order, each on another device."""
    devices = {tensor.device for tensor in tensors}
    return len(devices) == len(tensors) and all(
        t.device.type == NAME and not t.is_sparse and t.is_contiguous() for t in tensors
    )


def scatter(
    tensor: Tensor,
    devices: Sequence[int],
    chunk_sizes: Sequence[int] | None,
    dim: int,
    streams: Sequence[torch.Stream | None] | None,
) -> list[Tensor]:
    if chunk_sizes is None:
        chunks = list(tensor.chunk(len(devices), dim))
    else:
        chunks = list(tensor.split(chunk_sizes, dim))
    for i, index in enumerate(devices[: len(chunks)]):
        if index != tensor.get_device():
            stream = None if streams is None else streams[i]
            with nullcontext() if stream is None else torch.get_device_module(NAME).stream(stream):
                chunks[i] = chunks[i].to(f"{NAME}:{index}", non_blocking=True)
    return chunks


def gather(tensors: Sequence[Tensor], dim: int, destination: int | None) -> Tensor:
    device = torch.device("cpu") if destination == -1 else torch.device(NAME, destination or 0)
    sizes = [tensor.shape[dim] for tensor in tensors]
    shape = list(tensors[0].shape)
    shape[dim] = sum(sizes)
    joined = torch.empty(shape, dtype=tensors[0].dtype, device=device)
    for part, tensor in zip(joined.split(sizes, dim), tensors, strict=True):
        part.copy_(tensor, non_blocking=destination != -1)
    return joined
