"""Which NVML device is cuda:i? CUDA lists the stand-in's boards in reverse: the fastest first."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import ProbeError
from balanced_dp.memory.device_map import CudaDevice, find_board, visible_boards
from balanced_dp.memory.nvml import Board

from .driver import A100, BUSES, GIB, GTX, H100, UUIDS

SLICE = 3  # the first MIG slice of the A100
# What CUDA makes of CUDA_VISIBLE_DEVICES, written by hand: units of the driver, in CUDA's order.
BY_INDEX = [
    (None, [H100, A100, GTX]),
    ("0,2", [H100, GTX]),
    ("2,0", [GTX, H100]),
    (" 1 , 0 ", [A100, H100]),
    ("1", [A100]),
    ("", []),
    ("-1", []),
    ("0,0", []),
    ("0,7,1", [H100]),
    ("1,-1,0", [A100]),
    ("2,nonsense,0", [GTX]),
]
BY_UUID = [
    (f"{UUIDS[A100]},{UUIDS[GTX]}", [A100, GTX]),
    ("GPU-c3,GPU-5a2", [H100, A100]),  # shortened
    ("GPU-5a", []),  # of two
    ("GPU-c3,GPU-c3b7", []),  # one twice
    ("GPU-c3,GPU-99,GPU-5a2", [H100]),  # unknown
]
PCI_ORDER = [
    (None, [GTX, A100, H100]),
    ("0,2", [GTX, H100]),
    ("2,0", [H100, GTX]),
    ("", []),
    ("-1", []),
    ("0,0", []),
    ("0,7,1", [GTX]),
    ("1,-1,0", [A100]),
]


def boards(alike: bool = False, mig: bool = False) -> list[Board]:
    """What NVML lists: the stand-in driver's boards, as the probe reads them."""
    listed = [
        Board(i, None, UUIDS[i], UUIDS[i], "a" if alike else f"board {i}", (0, BUSES[i], 0), GIB)
        for i in range(3)
    ]
    if mig:
        listed[A100 : A100 + 1] = [
            Board(A100, i, UUIDS[3 + i], UUIDS[A100], "slice", (0, BUSES[A100], 0), GIB)
            for i in range(2)
        ]
    return listed


def environ(visible: str | None, order: str | None = None) -> dict[str, str]:
    found = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    return {name: value for name, value in found.items() if value is not None}


def cuda_device(index: int, unit: int, tells: str) -> CudaDevice:
    return CudaDevice(
        index,
        UUIDS[unit].split("-", 1)[1] if tells == "uuid" else None,
        (0, BUSES[unit], 0) if tells == "pci" else None,
    )


@pytest.mark.parametrize("tells", ["uuid", "pci"])
@pytest.mark.parametrize(("visible", "units"), BY_INDEX + BY_UUID)
def test_by_uuid_or_pci_bus_id_whatever_is_visible(visible, units, tells):
    for index, unit in enumerate(units):
        device = cuda_device(index, unit, tells)
        board = find_board(device, len(units), boards(), environ(visible))
        assert board.nvml_index == unit


@pytest.mark.parametrize(("visible", "units"), PCI_ORDER)
def test_by_index_in_pci_order(visible, units):
    given = environ(visible, "PCI_BUS_ID")
    assert [board.nvml_index for board in visible_boards(boards(), given)] == units
    for index, unit in enumerate(units):
        assert find_board(CudaDevice(index), len(units), boards(), given).nvml_index == unit


@pytest.mark.parametrize(("visible", "units"), PCI_ORDER)
def test_by_index_where_all_boards_are_alike(visible, units):
    given = environ(visible)
    for index, unit in enumerate(units):
        found = find_board(CudaDevice(index), len(units), boards(alike=True), given)
        assert found.nvml_index == unit


@pytest.mark.parametrize(("visible", "units"), BY_UUID)
@pytest.mark.parametrize("order", [None, "PCI_BUS_ID"])
def test_by_the_uuids_that_are_visible(visible, units, order):
    given = environ(visible, order)
    assert [board.nvml_index for board in visible_boards(boards(), given)] == units


@pytest.mark.parametrize(("visible", "units"), [case for case in BY_INDEX if case[1]])
def test_the_index_alone_is_refused(visible, units):
    for index in range(len(units)):
        with pytest.raises(ProbeError, match="Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name UUIDs"):
            find_board(CudaDevice(index), len(units), boards(), environ(visible))


def test_a_mig_slice_by_its_uuid():
    found = find_board(cuda_device(0, SLICE + 1, "uuid"), 1, boards(mig=True), {})
    assert found.label == "gpu:1 mig:1"


@pytest.mark.parametrize("visible", [UUIDS[SLICE + 1], UUIDS[SLICE + 1][:12]])
@pytest.mark.parametrize("tells", ["the board's uuid", "pci", "nothing"])
def test_a_mig_slice_by_its_name_in_the_environment(visible, tells):
    device = CudaDevice(
        0,
        UUIDS[A100].split("-", 1)[1] if tells == "the board's uuid" else None,
        (0, BUSES[A100], 0) if tells == "pci" else None,
    )
    found = find_board(device, 1, boards(mig=True), environ(visible))
    assert found.label == "gpu:1 mig:1"


def test_the_only_slice_of_a_board_by_the_boards_uuid():
    listed = [board for board in boards(mig=True) if board.mig_index != 1]
    device = CudaDevice(0, UUIDS[A100].split("-", 1)[1])
    assert find_board(device, 1, listed, {}).label == "gpu:1 mig:0"


@pytest.mark.parametrize("order", [None, "PCI_BUS_ID"])
def test_indices_say_nothing_beside_mig_or_a_lost_board(order):
    lost = [Board(0, error="GPU is lost"), *boards()[1:]]
    for listed in (boards(mig=True), lost):
        with pytest.raises(ProbeError):
            find_board(CudaDevice(0), len(listed), listed, environ(None, order))


def test_a_device_that_nvml_does_not_list():
    with pytest.raises(ProbeError, match=r"CUDA has 4 devices, NVML lists gpu:0 \(GPU-5a1f"):
        find_board(CudaDevice(3, "no-such-uuid"), 4, boards(), {})


@given(st.lists(st.sampled_from(["0", "1", "2", "3", "-1", "GPU-c3", "GPU-5a", "x", " "])))
def test_visible_boards_are_distinct_and_no_more_than_named(entries):
    for order in (None, "PCI_BUS_ID"):
        found = visible_boards(boards(), environ(",".join(entries), order))
        known = [board for board in found if board is not None]
        assert len({board.nvml_index for board in known}) == len(known)
        assert len(found) <= len(entries)


CASES = [case for case in [*BY_INDEX, *BY_UUID] if case[1]]


@pytest.mark.parametrize("tells", ["uuid", "pci"])
def test_through_the_real_bindings(driver, tells):
    """CUDA's devices are the fastest first, NVML's are not: an index alone would be wrong."""
    cases = {json.dumps(units): visible for visible, units in CASES}
    found = driver.run("cuda_cases", json.dumps(list(cases)), tells)
    for units in cases:
        rows = found[units]
        expected = [f"cuda:{i} (gpu:{unit})" for i, unit in enumerate(json.loads(units))]
        assert [row["label"] for row in rows] == expected
        assert [row["uuid"] for row in rows] == [UUIDS[unit] for unit in json.loads(units)]
        assert [row["used_bytes"] for row in rows] == [
            driver.state.used[unit] for unit in json.loads(units)
        ]


def test_mig_through_the_real_bindings(driver):
    driver.state.has_mig = 1
    [row] = driver.run("cuda", json.dumps([SLICE + 1]), "uuid")
    assert row["label"] == "cuda:0 (gpu:1 mig:1)"
    assert row["used_bytes"] == driver.state.used[SLICE + 1]


def test_an_ambiguous_index_through_the_real_bindings(driver):
    refused = driver.run("cuda", "[2, 1, 0]", "")
    assert refused.startswith("ProbeError: cannot tell which NVML device is cuda:0")
    by_pci_order = driver.run("cuda", "[0, 1, 2]", "", CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert [row["label"] for row in by_pci_order] == [f"cuda:{i} (gpu:{i})" for i in range(3)]
    driver.state.alike = 1
    alike = driver.run("cuda", "[2]", "", CUDA_VISIBLE_DEVICES="2")
    assert [row["label"] for row in alike] == ["cuda:0 (gpu:2)"]
