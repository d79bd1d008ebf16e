"""The clock of the stand-in: what it takes for side by side, and what one after the other."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import comm

from . import StandIn
from .clock import computing_s, length_s

SIZE = 8
OPERATIONS = 2 * SIZE**3
BYTES = 4 * SIZE**2


def spans(stand_in: StandIn, work) -> list[tuple[float, float, str]]:
    """Returns start, end and name, where a product takes a second and a matrix's transfer, too."""
    found = sorted(stand_in.run(work, OPERATIONS, BYTES), key=lambda span: span.start_s)
    return [(span.start_s, span.end_s, span.name) for span in found]


@pytest.fixture
def matrices(stand_in: StandIn) -> list[torch.Tensor]:
    return [torch.randn(SIZE, SIZE, device=device) for device in stand_in.devices]


def test_devices_compute_side_by_side(matrices, stand_in: StandIn):
    """Streams of one device do not."""
    with stand_in.recorded() as work:
        matrices[0] @ matrices[0] + 1
        with torch.Stream(stand_in.devices[0]):
            matrices[0] @ matrices[0]
        matrices[1] @ matrices[1]
    assert spans(stand_in, work) == [(0, 1, "mm"), (0, 1, "mm"), (1, 2, "mm")]
    torch.accelerator.synchronize(0)


def test_a_transfer_beside_computing(matrices, stand_in: StandIn):
    side, there = (torch.Stream(device) for device in stand_in.devices[:2])
    main = torch.accelerator.current_stream(stand_in.devices[1])
    with stand_in.recorded() as work:
        matrices[0] @ matrices[0]
        with side, torch.get_device_module("stand_in").stream(there):
            arrived = matrices[0].to(stand_in.devices[1])
        matrices[1] @ matrices[1]
        main.wait_stream(there)
        arrived.record_stream(main)
        arrived @ arrived
    assert spans(stand_in, work) == [(0, 1, "mm"), (0, 1, "copy"), (0, 1, "mm"), (1, 2, "mm")]
    matrices[0].record_stream(side)


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


def test_the_host_waits_too(matrices, stand_in: StandIn):
    with stand_in.recorded() as work:
        (matrices[0] @ matrices[0]).sum().item()
        matrices[1] @ matrices[1]
    assert spans(stand_in, work) == [(0, 1, "mm"), (1, 2, "mm")]
