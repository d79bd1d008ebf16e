"""What each rank counts of a batch, told by all of them to all of them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cached_property
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import ArgumentError, ArgumentTypeError, DistributedError

_SEARCH_TIME_S = 5.0
"""How long ranks look for those that do not answer, once one does not."""


class Share:
    """What this rank counts of one batch, and when all ranks have told theirs, of how much."""

    def __init__(self, own: float, group: dist.ProcessGroup) -> None:
        self.own = own
        self._group = group
        self._total = torch.tensor(own, dtype=torch.float64, device="cpu")
        self._work = dist.all_reduce(self._total, group=group, async_op=True)

    @cached_property
    def factor(self) -> float:
        """What gradients are multiplied by before ranks average them; waits for all counts."""
        wait(self._work, self._group)
        total = float(self._total)
        return self.own * self._group.size() / total if total else 0.0


class LocalWeight:
    """Is ``model.local_weight``.

    Counts travel through a group of their own, of CPU tensors: whatever device trains does not have
    to wait for them, and they cannot get between the gradients.
    """

    def __init__(self, ranks: list[int], timeout: timedelta | None) -> None:
        self.group = dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)
        self.is_replaced = False
        self._share: Share | None = None
        self._followers: list[tuple[Callable[[], bool], list[Share]]] = []

    def __call__(self, n: float | Tensor) -> None:
        """Tells all ranks that this one's loss is a mean over ``n``."""
        if self.is_replaced:
            raise DistributedError(
                "parameters of this model are weighted by another one, which was given to "
                "weight_gradients later; use that, or one model for both"
            )
        number: object = n.item() if isinstance(n, Tensor) and n.numel() == 1 else n
        if isinstance(number, bool) or not isinstance(number, Real):
            raise ArgumentTypeError(f"n must be a number, got {n!r}")
        own = float(number)
        if not 0 <= own < math.inf:
            raise ArgumentError(f"n must be at least 0 and finite, got {own}")
        self._share = Share(own, self.group)
        for has_gradients, shares in self._followers:
            if has_gradients():
                shares.append(self._share)

    @property
    def share(self) -> Share:
        """That of the present pass."""
        if self._share is None:
            raise DistributedError(
                "gradients are to be weighted, but no weight was told; call model.local_weight(n) "
                "before backward"
            )
        return self._share

    def __reduce__(self) -> Any:
        return _copied_weight, ()  # a process group cannot be copied

    def follow(self, has_gradients: Callable[[], bool]) -> list[Share]:
        """Returns a list that grows by each share that is told from now on with gradients."""
        shares: list[Share] = []
        self._followers.append((has_gradients, shares))
        return shares


def _copied_weight() -> Callable[[float], None]:
    """Returns what a copy of a model has for ``local_weight``."""

    def local_weight(n: float | Tensor) -> None:
        raise DistributedError("copies of a model have no weights; call weight_gradients with it")

    return local_weight


def wait(work: dist.Work, group: dist.ProcessGroup) -> None:
    """Waits for work of the group.

    Raises:
        DistributedError: a rank does not answer, and which.
    """
    try:
        work.wait()
    except RuntimeError as error:
        raise DistributedError(f"{_who_is_lost(group)} ({error})") from error


def _who_is_lost(group: dist.ProcessGroup) -> str:
    """Returns which ranks do not answer, asked by way of the store in which ranks met."""
    ranks = dist.get_process_group_ranks(group)
    try:
        store = group.get_group_store()
        # Attempts of torchrun may share a store.
        prefix = f"balanced_dp/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
        store.set(f"{prefix}/{dist.get_rank()}", "answers")
        deadline = time.monotonic() + _SEARCH_TIME_S
        lost = [rank for rank in ranks if not _is_there(store, f"{prefix}/{rank}", deadline)]
    except RuntimeError as error:
        return f"a rank does not answer, nor does the store that could tell which: {error}"
    if not lost:
        return "the weights of the ranks could not be added up, though all of them answer"
    return (
        f"no answer from rank {', '.join(map(str, lost))} of {ranks}; every rank calls "
        "model.local_weight(n) for each backward pass, with 0 where it has no samples"
    )


def _is_there(store: Any, key: str, deadline: float) -> bool:
    while not store.check([key]):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
