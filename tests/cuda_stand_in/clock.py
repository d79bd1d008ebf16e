"""How long recorded work would take, had devices run it side by side.

Matrix products take time by their operations, copies and broadcasts by their bytes; all else, and
launching, takes none. A device computes one product at a time, and one transfer at a time goes into
a device. Lengths are to be compared with each other, not with hardware.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

TRANSFERS = ("copy", "upload", "download", "broadcast", "reduce")

Work = tuple[str, list[tuple[int, int]], list[int], float, dict[int, int]]
"""As the extension records it: its name, its streams and their counts, the devices that it
transfers to, its operations or bytes, and what it comes after, itself included."""


@dataclass(frozen=True, slots=True)
class Span:
    """When a piece of work ran.

    Attributes:
        start_s: when it began.
        end_s: when it ended.
        device: whose stream it was in.
        stream: the index of the stream on that device, 0 for the default one.
        name: the operator, or the kind of transfer.
        targets: the devices that it transferred to; -1 is the host.
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
    """Returns when each piece of work runs that takes time, a collective once for each stream.

    Work is served in the order in which it is ready, whatever the order of launching.
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
    """Returns when all has ended."""
    return max(span.end_s for span in spans)


def computing_s(spans: Iterable[Span]) -> float:
    """Returns for how long the device computes that computes the longest."""
    busy_s: dict[int, float] = {}
    for span in spans:
        if not span.targets:
            busy_s[span.device] = busy_s.get(span.device, 0.0) + span.end_s - span.start_s
    return max(busy_s.values())
