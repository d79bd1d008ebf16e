"""Test ``MemoryProbe`` on a machine with three different GPUs, and the thread that asks NVML."""

from __future__ import annotations

import time

import pytest

from balanced_dp import MemoryProbe
from balanced_dp.memory.nvml import Board, find_board

from . import conftest as nvml
from .conftest import A100, BUSES, GIB, GTX, H100, RESERVED, SLICE, USED, UUIDS, cuda_device


def columns(*names, devices=None):
    """Take a snapshot, and return a list for each of the fields in ``names``.

    The list has the field's value for each device. For one name, only its list is returned.
    """
    rows = MemoryProbe(devices).snapshot()
    found = [[getattr(row, name) for row in rows] for name in names]
    return found if len(names) > 1 else found[0]


@pytest.mark.parametrize("is_before_510", [False, True])
def test_an_old_driver_counts_its_reserve(driver, is_before_510):
    driver.is_before_510 = is_before_510
    for row, used in zip(MemoryProbe().snapshot(), USED, strict=False):
        assert row.used_bytes == used + RESERVED * is_before_510
        assert row.free_bytes == row.total_bytes - used - RESERVED


@pytest.mark.parametrize("where", ["handle", "memory"])
def test_a_lost_gpu_is_a_row_that_says_so(driver, where):
    getattr(driver, f"{where}_error")[A100] = nvml.LOST
    labels, used, total, errors = columns("label", "used_bytes", "total_bytes", "error")
    assert (labels, used) == (["gpu:0", "gpu:1", "gpu:2"], [USED[GTX], None, USED[H100]])
    assert total[A100] is None and "lost" in errors[A100].lower()


def test_an_unsupported_field_is_none(driver):
    driver.name_error = nvml.NOT_SUPPORTED
    assert columns("name", "used_bytes") == [[None] * 3, list(USED[:3])]


# Which board is cuda:i. CUDA lists the fastest device first and NVML does not, so indices differ.


BOARDS = [Board(i, None, UUIDS[i], f"board {i}", (0, BUSES[i], 0)) for i in range(3)]
SLICES = [Board(A100, i, UUIDS[SLICE + i], "slice", (0, BUSES[A100], 0)) for i in range(2)]


@pytest.mark.parametrize(
    ("device", "boards", "found"),
    [
        *((cuda_device(unit, "of nothing"), BOARDS, BOARDS[unit]) for unit in (GTX, A100, H100)),
        # A virtual machine may number buses anew.
        (cuda_device(GTX, UUIDS[H100]), BOARDS, BOARDS[H100]),
        (cuda_device(A100, UUIDS[SLICE + 1]), [BOARDS[GTX], *SLICES], SLICES[1]),
        # CUDA may report the UUID of the board.
        (cuda_device(A100, UUIDS[A100]), [BOARDS[GTX], SLICES[0]], SLICES[0]),
        (cuda_device(A100, UUIDS[A100]), [BOARDS[GTX], *SLICES], None),
        (cuda_device(GTX, "of nothing"), [Board(0), *BOARDS[1:]], None),
    ],
)
def test_which_board_a_device_is(device, boards, found):
    assert find_board(device, boards) is found


@pytest.mark.parametrize("units", [[H100, A100, GTX], [GTX, H100], [A100]])
def test_boards_of_cuda_devices(cuda, units):
    assert columns("label", "uuid", "used_bytes", devices=cuda(*units).devices) == [
        [f"cuda:{i} (gpu:{u})" for i, u in enumerate(units)],
        [UUIDS[unit] for unit in units],
        [USED[unit] for unit in units],
    ]


def test_a_device_that_nvml_does_not_list(cuda):
    side = cuda(H100)
    side.properties[0].uuid = "of nothing"
    assert columns("used_bytes", devices=side.devices) == [USED[H100]]  # by its bus
    side.properties[0].pci_bus_id = 0xFF
    [row] = MemoryProbe(side.devices).snapshot()
    assert (row.label, row.allocated_bytes, row.used_bytes) == ("cuda:0", 0, None)
    assert "NVML lists no device with the UUID of nothing" in row.error


def test_mig_slices_in_place_of_their_board(driver, cuda):
    driver.has_mig = 1
    order = [GTX, SLICE, SLICE + 1, H100]
    assert columns("label", "uuid", "used_bytes") == [
        ["gpu:0", "gpu:1 mig:0", "gpu:1 mig:1", "gpu:2"],
        [UUIDS[unit] for unit in order],
        [USED[unit] for unit in order],
    ]
    found = columns("label", "used_bytes", devices=cuda(SLICE + 1).devices)
    assert found == [["cuda:0 (gpu:1 mig:1)"], [USED[SLICE + 1]]]


# Blocks measured while a thread samples NVML; its end is checked after each test.


def use(driver, gib, samples=True):
    """Set the used memory of the H100 to ``gib`` GiB, and wait until it has been sampled."""
    driver.used[H100] = gib * GIB
    wanted = driver.num_memory_queries + 4 * samples
    deadline = time.monotonic() + 60
    while driver.num_memory_queries < wanted:
        assert time.monotonic() < deadline, "the sampler does not sample"
        time.sleep(0.001)


def raise_and_lower(driver):
    use(driver, 70)
    use(driver, 3)


def lose_a_board(driver):
    raise_and_lower(driver)
    for error in (nvml.LOST, 0):
        driver.memory_error[H100] = error
        use(driver, 3)


@pytest.mark.parametrize(
    ("block", "peak"),
    [
        (raise_and_lower, 70 * GIB),
        (lambda driver: use(driver, 60, samples=False), 60 * GIB),
        (lambda driver: None, 3 * GIB),  # a peak before the block does not count
        (lose_a_board, 70 * GIB),
    ],
)
def test_peaks_of_used_memory(driver, cuda, block, peak):
    side = cuda(H100, GTX)
    driver.used[H100] = 75 * GIB
    side.reset = lambda: use(driver, 3, samples=False)
    with MemoryProbe(side.devices).measure() as usage:
        block(driver)
    assert [device.peak_used_bytes for device in usage.devices] == [peak, USED[GTX]]
    assert usage.valid


def test_a_block_that_raises_has_no_peaks(cuda):
    with pytest.raises(KeyError), MemoryProbe(cuda(H100).devices).measure() as usage:
        raise KeyError
    assert not usage.valid and not usage.devices and "has raised" in usage.reason


def test_an_allocator_that_retried(cuda):
    side = cuda(H100, GTX)
    with MemoryProbe(side.devices).measure() as usage:
        side.num_retries = 2
    assert not usage.valid
    assert usage.reason.startswith("on cuda:0, cuda:1 the allocator had to empty its cache")
