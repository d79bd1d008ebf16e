"""The NVML device of cuda:i. CUDA lists the stand-in's boards in reverse: the fastest first."""

from __future__ import annotations

import json

import pytest

from balanced_dp import ProbeError
from balanced_dp.memory.device_map import find_board
from balanced_dp.memory.nvml import Board

from .driver import A100, BUSES, GTX, H100, UUIDS

SLICE = 3  # the first MIG slice of the A100


def boards(mig: bool = False) -> list[Board]:
    """Return the stand-in driver's boards, as ``Nvml.boards`` does."""
    listed = [Board(i, None, UUIDS[i], f"board {i}", (0, BUSES[i], 0)) for i in range(3)]
    if mig:
        listed[A100 : A100 + 1] = [
            Board(A100, i, UUIDS[SLICE + i], "slice", (0, BUSES[A100], 0)) for i in range(2)
        ]
    return listed


def cuda_device(unit: int, uuid: str = "of nothing") -> tuple[int, str, tuple[int, int, int]]:
    """Return torch's properties of a device with the PCI bus id of a unit of the driver."""
    return 3, uuid.split("-", 1)[-1], (0, BUSES[unit], 0)


def visible(names: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": names}


@pytest.mark.parametrize("unit", [GTX, A100, H100])
def test_by_uuid_or_pci_bus_id(unit):
    other_bus = cuda_device((unit + 1) % 3, UUIDS[unit])
    for device in (cuda_device(unit), other_bus):  # a virtual machine may number buses anew
        assert find_board(*device, boards(), {}).nvml_index == unit


def test_a_mig_slice_by_its_uuid():
    found = find_board(*cuda_device(A100, UUIDS[SLICE + 1]), boards(mig=True), {})
    assert found.label == "gpu:1 mig:1"


@pytest.mark.parametrize("names", [UUIDS[SLICE + 1], f" {UUIDS[SLICE + 1][:12]} , 7"])
def test_a_mig_slice_by_its_name_in_the_environment(names):
    device = cuda_device(A100, UUIDS[A100])
    assert find_board(*device, boards(mig=True), visible(names)).label == "gpu:1 mig:1"


def test_the_only_slice_of_a_board():
    listed = [board for board in boards(mig=True) if board.mig_index != 1]
    assert find_board(*cuda_device(A100, UUIDS[A100]), listed, {}).label == "gpu:1 mig:0"


@pytest.mark.parametrize("environ", [{}, visible(""), visible("0"), visible("MIG-"), visible(",")])
def test_an_unnamed_slice_of_several(environ):
    with pytest.raises(ProbeError, match="set it to the UUID of a single MIG slice"):
        find_board(*cuda_device(A100, UUIDS[A100]), boards(mig=True), environ)


def test_a_device_that_nvml_does_not_list():
    listed = [Board(0, error="GPU is lost"), *boards()[1:]]
    refused = (
        r"cuda:3: neither its UUID \(of nothing\) .* NVML's gpu:0 \(GPU is lost\), gpu:1 \(GPU"
    )
    with pytest.raises(ProbeError, match=refused):
        find_board(*cuda_device(GTX), listed, {})


def test_through_the_real_bindings(driver):
    """CUDA lists the fastest device first and NVML does not, so indices differ."""
    cases = [[H100, A100, GTX], [GTX, H100], [A100]]
    for units, rows in zip(cases, driver.run("cuda", json.dumps(cases)), strict=True):
        assert [row["label"] for row in rows] == [
            f"cuda:{i} (gpu:{u})" for i, u in enumerate(units)
        ]
        assert [row["uuid"] for row in rows] == [UUIDS[unit] for unit in units]
        assert [row["used_bytes"] for row in rows] == [driver.state.used[unit] for unit in units]


def test_mig_through_the_real_bindings(driver):
    driver.state.has_mig = 1
    [[row]] = driver.run("cuda", json.dumps([[SLICE + 1]]))
    assert row["label"] == "cuda:0 (gpu:1 mig:1)"
    assert row["used_bytes"] == driver.state.used[SLICE + 1]
