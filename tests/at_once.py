"""Calls from several threads that begin at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")

NUM_THREADS = 8


def at_once(function: Callable[[int], ResultT], num_threads: int = NUM_THREADS) -> list[ResultT]:
    """Return what each thread's call with its number returned; raises what one of them raised."""
    start = threading.Barrier(num_threads)
    with ThreadPoolExecutor(num_threads, initializer=start.wait) as pool:
        return list(pool.map(function, range(num_threads)))
