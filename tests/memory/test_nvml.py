"""The probe with the real pynvml, on a stand-in for the driver with three different GPUs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from balanced_dp.memory.nvml import Board, find_board

from .driver import A100, BUSES, GIB, GTX, H100, RESERVED, SLICE, USED, UUIDS

LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, NO_PERMISSION = 12, 9, 4
NOT_SUPPORTED, GPU_IS_LOST = 3, 15


def column(rows, name):
    return [row[name] for row in rows]


def test_boards_where_torch_has_no_cuda(driver):
    found = driver.run("boards")
    assert column(found, "label") == ["gpu:0", "gpu:1", "gpu:2"]
    assert column(found, "uuid") == list(UUIDS[:3])
    assert column(found, "total_bytes") == [11 * GIB, 40 * GIB, 80 * GIB]
    assert found[H100]["name"] == "NVIDIA H100 80GB HBM3"
    for name in ("device", "allocated_bytes", "peak_allocated_bytes", "num_alloc_retries", "error"):
        assert column(found, name) == [None] * 3


@pytest.mark.parametrize(("name", "counted"), [("driver", 0), ("old_driver", RESERVED)])
def test_an_old_driver_counts_its_reserve(request, name, counted):
    for row, used in zip(request.getfixturevalue(name).run("boards"), USED, strict=False):
        assert row["used_bytes"] == used + counted
        assert row["free_bytes"] == row["total_bytes"] - used - RESERVED


@pytest.mark.parametrize("where", ["handle", "memory"])
def test_a_lost_gpu_is_a_row_that_says_so(driver, where):
    getattr(driver.state, f"{where}_error")[A100] = GPU_IS_LOST
    found = driver.run("boards")
    assert "lost" in found[A100]["error"].lower()
    assert column(found, "label") == ["gpu:0", "gpu:1", "gpu:2"]
    assert found[A100]["total_bytes"] is None
    assert column(found, "used_bytes") == [USED[GTX], None, USED[H100]]


def test_a_field_that_is_not_supported_is_none(driver):
    driver.state.name_error = NOT_SUPPORTED
    found = driver.run("boards")
    assert column(found, "name") == [None] * 3
    assert column(found, "used_bytes") == list(USED[:3])


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DRIVER_NOT_LOADED, "Driver Not Loaded"),
        (NO_PERMISSION, "Insufficient Permissions"),
        (LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"),
    ],
)
def test_why_nvml_does_not_start(driver, error, reason):
    driver.state.init_error = error
    expected = f"ProbeError: torch sees no accelerator, and NVML failed: {reason}"
    assert driver.run("boards") == expected


# Which board is cuda:i. CUDA lists the fastest device first and NVML does not, so indices differ.


BOARDS = [Board(i, None, UUIDS[i], f"board {i}", (0, BUSES[i], 0)) for i in range(3)]
SLICES = [Board(A100, i, UUIDS[SLICE + i], "slice", (0, BUSES[A100], 0)) for i in range(2)]


def cuda_device(unit: int, uuid: str = "of nothing") -> SimpleNamespace:
    """Return torch's properties of a device with the PCI bus id of a unit of the driver."""
    uuid = uuid.split("-", 1)[-1]
    return SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=BUSES[unit], pci_device_id=0)


@pytest.mark.parametrize(
    ("device", "boards", "found"),
    [
        *((cuda_device(unit), BOARDS, BOARDS[unit]) for unit in (GTX, A100, H100)),
        # A virtual machine may number buses anew.
        (cuda_device(GTX, UUIDS[H100]), BOARDS, BOARDS[H100]),
        (cuda_device(A100, UUIDS[SLICE + 1]), [BOARDS[GTX], *SLICES], SLICES[1]),
        # CUDA may report the UUID of the board.
        (cuda_device(A100, UUIDS[A100]), [BOARDS[GTX], SLICES[0]], SLICES[0]),
        (cuda_device(A100, UUIDS[A100]), [BOARDS[GTX], *SLICES], None),
        (cuda_device(GTX), [Board(0, error="GPU is lost"), *BOARDS[1:]], None),
    ],
)
def test_which_board_a_device_is(device, boards, found):
    assert find_board(device, boards) is found


@pytest.mark.parametrize("units", [[H100, A100, GTX], [GTX, H100], [A100]])
def test_boards_of_cuda_devices(driver, units):
    found = driver.run("cuda", json.dumps(units))
    assert column(found, "label") == [f"cuda:{i} (gpu:{u})" for i, u in enumerate(units)]
    assert column(found, "uuid") == [UUIDS[unit] for unit in units]
    assert column(found, "used_bytes") == [USED[unit] for unit in units]


def test_a_device_that_nvml_does_not_list(driver):
    [row] = driver.run("cuda_of_unknown_boards")
    assert (row["label"], row["allocated_bytes"], row["used_bytes"]) == ("cuda:0", 0, None)
    assert "NVML lists no device with the UUID of nothing" in row["error"]


def test_mig_slices_in_place_of_their_board(driver):
    driver.state.has_mig = 1
    found = driver.run("boards")
    assert column(found, "label") == ["gpu:0", "gpu:1 mig:0", "gpu:1 mig:1", "gpu:2"]
    assert column(found, "uuid") == [UUIDS[0], UUIDS[3], UUIDS[4], UUIDS[2]]
    assert column(found, "used_bytes") == [USED[0], USED[3], USED[4], USED[2]]
    [row] = driver.run("cuda", json.dumps([SLICE + 1]))
    assert row["label"] == "cuda:0 (gpu:1 mig:1)"
    assert row["used_bytes"] == USED[SLICE + 1]
