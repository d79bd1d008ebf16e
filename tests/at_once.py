"""Call a function from several threads that begin at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

ResultT = TypeVar("ResultT")

NUM_THREADS = 8


def at_once(function: Callable[[int], ResultT], num_threads: int = NUM_THREADS) -> list[ResultT]:
    """Call ``function(i)`` in thread ``i`` of ``num_threads``, and return the results by number.

    An exception in one of the threads is raised here.
    """
    start = threading.Barrier(num_threads)
    with ThreadPoolExecutor(num_threads, initializer=start.wait) as pool:
        return list(pool.map(function, range(num_threads)))
