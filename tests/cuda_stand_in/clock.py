"""Compute how long recorded work would take if the devices ran it in parallel.

The time of a matrix product depends on its number of operations, and the time of a copy or
collective on its bytes. Everything else, including launching, takes no time. A device computes one
product at a time and receives one transfer at a time. The times are for comparison with each other,
not with the times of real hardware.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TRANSFERS = ("copy", "upload", "download", "broadcast", "reduce")

Work = tuple[str, list[tuple[int, int]], list[int], float, dict[int, int]]
"""A piece of work, as the extension records it.

It is the name, the streams with the count of each stream, the devices that data is transferred to,
the number of operations or bytes, and the vector clock. The vector clock is a dict from streams to
counts: the work comes after the work with these counts. It includes the counts of the work itself.
"""


@dataclass(frozen=True, slots=True)
class Span:
    """The time in which a piece of work ran.

    Attributes:
        start_s: when the work began, in seconds.
        end_s: when the work ended, in seconds.
        device: the index of the device in whose stream the work ran.
        stream: the index of the stream on the device; 0 for the default stream.
        name: the name of the operator, or of the kind of transfer.
        targets: the indices of the devices that data was transferred to; -1 is the host.
    """

    start_s: float
    end_s: float
    device: int
    stream: int
    name: str
    targets: tuple[int, ...]


def run(
    record: Sequence[Work], streams_each: int, operations_per_s: float, bytes_per_s: float
) -> list[Span]:
    """Return a ``Span`` for each piece of work that takes time.

    A collective has a span for each of its streams. Work starts in the order in which it becomes
    ready, which may differ from the order in which it was launched.
    """
    of_count = {own: i for i, (_, streams, *_) in enumerate(record) for own in streams}
    followers: list[list[int]] = [[] for _ in record]
    num_awaited = [0] * len(record)
    for i, (_, streams, _, _, after) in enumerate(record):
        before = after | {stream: count - 1 for stream, count in streams}
        awaited = {of_count[own] for own in before.items() if own in of_count}
        num_awaited[i] = len(awaited)
        for j in awaited:
            followers[j].append(i)
    ready_s = [0.0] * len(record)
    free_s: dict[tuple[str, int], float] = {}
    queue = [(0.0, i) for i, count in enumerate(num_awaited) if not count]
    spans: list[Span] = []
    while queue:
        start_s, i = heapq.heappop(queue)
        name, streams, targets, amount, _ = record[i]
        duration_s = amount / (bytes_per_s if name in TRANSFERS else operations_per_s)
        end_s = start_s
        if duration_s:
            needed = [("into", target) for target in targets]
            needed = needed or [("computing", streams[0][0] // streams_each)]
            start_s = max(start_s, *(free_s.get(resource, 0.0) for resource in needed))
            end_s = start_s + duration_s
            free_s.update(dict.fromkeys(needed, end_s))
            for stream, _ in streams:
                device, index = divmod(stream, streams_each)
                spans.append(Span(start_s, end_s, device, index, name, tuple(targets)))
        for j in followers[i]:
            ready_s[j] = max(ready_s[j], end_s)
            num_awaited[j] -= 1
            if not num_awaited[j]:
                heapq.heappush(queue, (ready_s[j], j))
    return spans


def length_s(spans: Iterable[Span]) -> float:
    """Return the time at which the last of the spans ends, in seconds."""
    return max(span.end_s for span in spans)


def computing_s(spans: Iterable[Span]) -> float:
    """Return the computing time of the device that computes for the longest time, in seconds."""
    busy_s: dict[int, float] = {}
    for span in spans:
        if not span.targets:
            busy_s[span.device] = busy_s.get(span.device, 0.0) + span.end_s - span.start_s
    return max(busy_s.values())
