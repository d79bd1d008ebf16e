"""Test that the stand-in for CUDA devices detects races, and that its clock is right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import comm

from ..at_once import at_once
from . import StandIn
from .clock import computing_s, length_s


def test_tensors_of_two_devices_are_an_error(stand_in: StandIn):
    one, other, cpu = (torch.ones(2, device=d) for d in (*stand_in.devices[:2], "cpu"))
    for mix in (lambda: one + other, lambda: torch.mm(one[None], cpu[:, None])):
        with pytest.raises(RuntimeError, match="on the same device"):
            mix()
    assert (one + cpu[0]).tolist() == [2, 2]


@pytest.fixture
def x(stand_in: StandIn) -> Iterator[Tensor]:
    """A tensor on the first device. The device is synchronized after the test."""
    yield torch.zeros(1000, device=stand_in.devices[0])
    torch.accelerator.synchronize(0)


def side_stream(device: torch.device) -> torch.Stream:
    """Return a new stream that waits for the work in the current stream."""
    side = torch.Stream(device)
    side.wait_stream(torch.accelerator.current_stream(device))
    return side


READS = "add reads on {} what add writes on {}"


@pytest.mark.parametrize(
    ("on_side", "on_main", "race"),
    [
        (lambda x: x.add_(1), lambda x: x + 1, READS),
        (lambda x: x.add_(1), lambda x: x.mul_(2), "mul writes on {} what add writes on {}"),
        (lambda x: x + 1, lambda x: x.add_(1), "add writes on {} what add reads on {}"),
        (lambda x: x + 1, lambda x: x + 2, ""),
        (lambda x: x[:2].add_(1), lambda x: x[1:3].add_(1), READS),
        (lambda x: x[:2].add_(1), lambda x: x[2:].add_(1), ""),
    ],
)
def test_a_missing_wait_is_a_race(on_side, on_main, race, x, stand_in: StandIn):
    side = side_stream(x.device)
    with side:
        kept = on_side(x)
    on_main(x)
    races = stand_in.races()
    message = race.format("device 0 stream 0", f"device 0 stream {side.stream_id}")
    assert message in races or (not races and not race)
    torch.accelerator.synchronize(0)
    del kept


WAITS = {
    "wait_stream": lambda x, main, side: main.wait_stream(side),
    "event": lambda x, main, side: main.wait_event(side.record_event()),
    "synchronize": lambda x, main, side: side.synchronize(),
    "item": lambda x, main, side: x[0].item(),
}


@pytest.mark.parametrize("wait", WAITS.values(), ids=WAITS)
def test_a_wait_leaves_no_race(wait, x, stand_in: StandIn):
    main, side = torch.accelerator.current_stream(), side_stream(x.device)
    with side:
        x.add_(1)
        wait(x, main, side)
    x.mul_(2)
    assert not stand_in.races()


def test_a_copy_between_devices_waits_twice(stand_in: StandIn):
    x, y = (torch.zeros(4, device=device) for device in stand_in.devices[:2])
    x.add_(1)
    y.add_(1)
    y.copy_(x)  # after both
    y.add_(1)
    x.add_(1)
    assert (x.tolist(), y.tolist()) == ([2] * 4, [2] * 4)
    with side_stream(y.device):
        y.add_(1)
    y.copy_(x)  # waits for the current stream of y's device, which is not the one that writes
    assert stand_in.races()
    torch.accelerator.synchronize(stand_in.devices[1])


@pytest.mark.parametrize("records", [False, True])
def test_memory_is_recorded_or_a_race(records, stand_in: StandIn):
    x = torch.zeros(1000, device=stand_in.devices[0])
    side = side_stream(x.device)
    with side:
        x.sum()
    if records:
        x.record_stream(side)
    address = x.data_ptr()
    del x
    assert bool(stand_in.races()) != records
    again = torch.empty(1000, device=stand_in.devices[0])
    assert (again.data_ptr() == address) != records
    assert again.isnan().all()  # who reads what it has not written sees it
    if records:
        side.synchronize()  # the allocator learns of it when it is asked for memory
        assert torch.empty(1000, device=stand_in.devices[0]).data_ptr() == address


def test_the_host_waits_for_what_it_reads(stand_in: StandIn):
    x = torch.zeros(3, device=stand_in.devices[0])
    x + 1, x.to(stand_in.devices[1]), torch.ones(3).to(stand_in.devices[0], non_blocking=True)
    before = stand_in.num_waits
    for wait in (x.sum().item, x.cpu, x.nonzero, lambda: torch.ones(3).to(stand_in.devices[0])):
        wait()
    assert stand_in.num_waits == before + 4


def test_communicators_refuse_what_nccl_does(stand_in: StandIn):
    x = torch.arange(6.0, device=stand_in.devices[0])
    sent = comm.broadcast_coalesced([x, x[:2].double() + 1], [0, 1, 3])
    assert [[t.tolist() for t in there] for there in sent] == [[[0, 1, 2, 3, 4, 5], [1, 2]]] * 3
    comm.broadcast_coalesced([x], [0, 2, 2])  # NCCL does not take a device twice: these are copies
    assert stand_in.nccl.opened == [(0, 1, 3)]
    with pytest.raises(RuntimeError, match=r"Unconvertible NCCL type torch\.int16"):
        comm.broadcast_coalesced([x.short()], [0, 1])


def test_its_streams_alone_wait_for_it(stand_in: StandIn):
    x = torch.ones(4, device=stand_in.devices[0])
    _, there = comm.broadcast(x, [0, 1])
    there + 1
    assert not stand_in.races()
    with torch.Stream(stand_in.devices[1]):
        there + 1
    assert stand_in.races()
    torch.accelerator.synchronize(stand_in.devices[1])


def test_nccl_is_for_one_thread_at_a_time(stand_in: StandIn):
    x = torch.ones(4, device=stand_in.devices[0])
    with pytest.raises(RuntimeError, match="two threads use NCCL"):
        at_once(lambda _: [comm.broadcast(x, [0, 1]) for _ in range(20)], num_threads=2)


# The clock: what it takes for side by side, and what one after the other.

SIZE = 8
OPERATIONS = 2 * SIZE**3
BYTES = 4 * SIZE**2


def spans(stand_in: StandIn, work) -> list[tuple[float, float, str]]:
    """Return start, end and name of each piece of work, in the order of the starts.

    A product of two matrices takes a second, and so does the transfer of a matrix.
    """
    found = sorted(stand_in.run(work, OPERATIONS, BYTES), key=lambda span: span.start_s)
    return [(span.start_s, span.end_s, span.name) for span in found]


@pytest.fixture
def matrices(stand_in: StandIn) -> list[torch.Tensor]:
    return [torch.randn(SIZE, SIZE, device=device) for device in stand_in.devices]


def test_devices_compute_side_by_side(matrices, stand_in: StandIn):
    """Streams of one device do not, nor does what is launched after the host has waited."""
    with stand_in.recorded() as work:
        matrices[0] @ matrices[0] + 1
        with torch.Stream(stand_in.devices[0]):
            matrices[0] @ matrices[0]
        matrices[1] @ matrices[1]
        torch.accelerator.synchronize(0)
        matrices[1] @ matrices[1]
    assert spans(stand_in, work) == [(0, 1, "mm"), (0, 1, "mm"), (1, 2, "mm"), (2, 3, "mm")]


def test_transfers_into_a_device_queue(matrices, stand_in: StandIn):
    with stand_in.recorded() as work:
        matrices[1] @ matrices[1]  # the first copy waits for it, and is served after the others
        for matrix in matrices[1:]:
            with torch.Stream(stand_in.devices[0]):
                matrix.to(stand_in.devices[0])
    copies = [(i, i + 1, "copy") for i in range(3)]
    assert spans(stand_in, work) == [(0, 1, "mm"), *copies]
    for device in stand_in.devices:
        torch.accelerator.synchronize(device)


def test_a_collective_is_in_all_its_streams(matrices, stand_in: StandIn):
    with stand_in.recorded() as work:
        matrices[1] @ matrices[1]
        comm.broadcast(matrices[0], [0, 1, 2])
        matrices[0] @ matrices[0]
        matrices[3] @ matrices[3]
    found = stand_in.run(work, OPERATIONS, BYTES)
    together = [(s.start_s, s.end_s, s.device) for s in found if s.name == "broadcast"]
    assert together == [(1, 2, 0), (1, 2, 1), (1, 2, 2)]
    assert sorted(s.end_s for s in found if s.name == "mm") == [1, 1, 3]
    assert (length_s(found), computing_s(found)) == (3, 1)
