"""Tells watchers when an optimizer has made a step."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Set
from typing import Any, Protocol

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class Watcher(Protocol):
    """Wants to know of steps; must be hashable, and is not kept alive."""

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each step of any optimizer of torch."""


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()


def watch_optimizer_steps(watcher: Watcher) -> None:
    """Has every optimizer of torch tell ``watcher``, from now on, when it has made a step."""
    _watchers.add(watcher)
    _register_hook()


def has_any(optimizer: torch.optim.Optimizer, parameter_ids: Set[int]) -> bool:
    """Returns whether the optimizer has one of the parameters with these ids."""
    return any(id(p) in parameter_ids for group in optimizer.param_groups for p in group["params"])


@functools.cache
def _register_hook() -> None:
    def note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for watcher in list(_watchers):
            watcher.note_step(optimizer)

    register_optimizer_step_post_hook(note_step)
