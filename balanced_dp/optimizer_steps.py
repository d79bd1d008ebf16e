"""Who wants to know that an optimizer has made a step is told here."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle


class Watcher(Protocol):
    """Wants to know of steps; must be hashable, and is not kept alive."""

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each step of any optimizer of torch."""


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def watch_optimizer_steps(watcher: Watcher) -> None:
    """Has every optimizer of torch tell ``watcher``, from now on, when it has made a step."""
    _watchers.add(watcher)
    _register_hook()


@functools.cache
def _register_hook() -> RemovableHandle:
    def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for watcher in list(_watchers):
            watcher.note_step(optimizer)

    return register_optimizer_step_post_hook(note_step)
