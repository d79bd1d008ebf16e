"""Collectives of ranks whose tensors are on the stand-in: gloo's, on copies."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .device_module import NAME

BACKEND = "stand_in_gloo"


class GlooOnCopies(dist.ProcessGroup):
    """A backend for tensors that gloo does not know; the host waits for each collective."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self._run(tensors, options or dist.AllreduceOptions(), self._gloo.allreduce)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self._run(tensors, options or dist.BroadcastOptions(), self._gloo.broadcast)

    def allgather(self, outputs: Any, inputs: list[Tensor], options: Any = None) -> dist.Work:
        there = [[t.cpu() for t in row] for row in outputs]
        self._gloo.allgather(there, [t.cpu() for t in inputs]).wait()
        for row, arrived in zip(outputs, there, strict=True):
            torch._foreach_copy_(row, arrived)
        return _done(outputs)

    def getBackendName(self) -> str:
        return BACKEND

    def _run(self, tensors: list[Tensor], options: Any, collective: Any) -> dist.Work:
        there = [tensor.cpu() for tensor in tensors]
        collective(there, options).wait()
        torch._foreach_copy_(tensors, there)
        return _done(tensors)


def _done(result: Sequence[Any]) -> dist.Work:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def register() -> str:
    """Lets ``init_process_group`` know the backend, and returns what it takes for this and gloo."""
    dist.Backend.register_backend(
        BACKEND, lambda *args: GlooOnCopies(*args), devices=[NAME], extended_api=False
    )
    return f"cpu:gloo,{NAME}:{BACKEND}"
