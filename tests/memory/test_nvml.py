"""The probe with the real pynvml, on a stand-in for the driver with three different GPUs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from balanced_dp import ProbeError
from balanced_dp.memory.nvml import Board, find_board

from ..processes import python
from .driver import A100, BUSES, GIB, GTX, H100, MIB, RESERVED, SLICE, USED, UUIDS

LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, NO_PERMISSION, VERSION_MISMATCH = 12, 9, 4, 18
NOT_SUPPORTED, GPU_IS_LOST = 3, 15


def column(rows, name):
    return [row[name] for row in rows]


def test_boards_are_shown_where_torch_has_no_cuda(driver):
    found = driver.run("boards")
    assert column(found, "label") == ["gpu:0", "gpu:1", "gpu:2"]
    assert column(found, "uuid") == list(UUIDS[:3])
    assert column(found, "total_bytes") == [11 * GIB, 40 * GIB, 80 * GIB]
    assert found[H100]["name"] == "NVIDIA H100 80GB HBM3"
    for name in ("device", "allocated_bytes", "peak_allocated_bytes", "num_alloc_retries", "error"):
        assert column(found, name) == [None] * 3


def test_the_driver_says_its_version(driver):
    assert driver.run("driver_version") == "580.95.05"


@pytest.mark.parametrize(
    ("name", "version", "counted", "told"),
    [("driver", 2, 0, RESERVED), ("old_driver", 1, RESERVED, None)],
)
def test_an_old_driver_counts_its_reserve_as_used(request, name, version, counted, told):
    for row, used in zip(request.getfixturevalue(name).run("boards"), USED, strict=False):
        assert row["memory_info_version"] == version
        assert row["used_bytes"] == used + counted
        assert row["reserved_by_driver_bytes"] == told
        assert row["free_bytes"] == row["total_bytes"] - used - RESERVED


def list_processes(driver, *processes):
    driver.state.num_processes = len(processes)
    for i, (pid, size) in enumerate(processes):
        driver.state.process_pid[i], driver.state.process_bytes[i] = pid, size


def test_process_bytes_are_those_of_our_pid(driver):
    list_processes(driver, (999_999, 2 * GIB), (0, 1500 * MIB), (999_998, 1 * GIB))
    found = driver.run("process_bytes")
    assert list(found.values()) == [[1500 * MIB, "process", 3 * GIB]] * 4


def test_a_host_pid_leaves_the_devices_change_since_the_probe_was_made(driver):
    list_processes(driver, (999_999, 2 * GIB))
    assert driver.run("process_bytes") == {
        "untouched": [0, "process", 2 * GIB],
        "context only": [None, "unknown", None],
        "holding": [GIB + 300 * MIB, "device-delta", None],
        "held before": [None, "unknown", None],
    }


def test_a_pid_that_is_another_process_s_is_not_believed(driver):
    """In a container our PID may be that of a host's process, or be listed with 0 bytes."""
    list_processes(driver, (0, 0))
    found = driver.run("process_bytes")
    assert found["holding"] == [GIB + 300 * MIB, "device-delta", None]


@pytest.mark.parametrize(("pid", "size"), [(999_998, 100 * MIB), (999_999, 7 * MIB)])
def test_a_process_that_is_listed_twice(driver, pid, size):
    """The bytes of its contexts are summed; those of the list for graphics are the same."""
    list_processes(driver, (0, GIB), (0, 5 * MIB), (999_999, 7 * MIB))
    driver.state.graphics_pid, driver.state.graphics_bytes = pid, size
    others = 7 * MIB + (size if pid == 999_998 else 0)
    assert driver.run("process_bytes")["holding"] == [GIB + 5 * MIB, "process", others]


@pytest.mark.parametrize("cause", ["no permission", "an old driver", "no figure"])
def test_a_driver_that_does_not_tell_processes(driver, old_driver, cause):
    driver.state.process_error = NO_PERMISSION if cause == "no permission" else 0
    if cause == "no figure":
        list_processes(driver, (0, 2**64 - 1))
    found = (old_driver if cause == "an old driver" else driver).run("process_bytes")
    assert found["context only"] == [None, "unknown", None]
    assert found["holding"] == [GIB + 300 * MIB, "device-delta", None]
    assert found["untouched"] == [None, "unknown", None]


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
        (DRIVER_NOT_LOADED, "driver is not loaded"),
        (NO_PERMISSION, "no permission"),
        (VERSION_MISMATCH, "restart the machine"),
        (LIBRARY_NOT_FOUND, "no NVML library"),
        (999, "NVML failed: Unknown Error"),
    ],
)
def test_why_nvml_does_not_start(driver, error, reason):
    driver.state.init_error = error
    found = driver.run("boards")
    assert found.startswith("ProbeError: torch sees no accelerator, and ")
    assert reason in found


@pytest.mark.parametrize(
    ("pynvml", "remedy"),
    [
        ("None", "pip install nvidia-ml-py"),
        (
            "json",  # a package and not a module, as the retired pynvml
            "pip uninstall -y pynvml && pip install --force-reinstall nvidia-ml-py",
        ),
    ],
)
def test_without_the_package(driver, pynvml, remedy):
    program = f"import json, sys; sys.modules['pynvml'] = {pynvml}"
    done = python(
        "-c", f"{program}; import balanced_dp as b; b.MemoryProbe()", environ=driver.environ()
    )
    assert done.stderr.splitlines()[-1].endswith(remedy)


# Which board is cuda:i. CUDA lists the fastest device first and NVML does not, so indices differ.


BOARDS = [Board(i, None, UUIDS[i], f"board {i}", (0, BUSES[i], 0)) for i in range(3)]
SLICES = [Board(A100, i, UUIDS[SLICE + i], "slice", (0, BUSES[A100], 0)) for i in range(2)]


def cuda_device(unit: int, uuid: str = "of nothing") -> SimpleNamespace:
    """Return torch's properties of a device with the PCI bus id of a unit of the driver."""
    uuid = uuid.split("-", 1)[-1]
    return SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=BUSES[unit], pci_device_id=0)


SLICED = cuda_device(A100, UUIDS[A100])  # CUDA may report the UUID of the board


@pytest.mark.parametrize("unit", [GTX, A100, H100])
def test_a_board_by_uuid_or_pci_bus_id(unit):
    other_bus = cuda_device((unit + 1) % 3, UUIDS[unit])
    for device in (cuda_device(unit), other_bus):  # a virtual machine may number buses anew
        assert find_board(3, device, BOARDS, None).nvml_index == unit


@pytest.mark.parametrize(
    ("device", "boards", "visible", "label"),
    [
        (cuda_device(A100, UUIDS[SLICE + 1]), SLICES, None, "gpu:1 mig:1"),
        (SLICED, SLICES, UUIDS[SLICE + 1], "gpu:1 mig:1"),
        (SLICED, SLICES, f" {UUIDS[SLICE + 1][:12]} , 7", "gpu:1 mig:1"),
        (SLICED, SLICES[:1], None, "gpu:1 mig:0"),
    ],
    ids=["by its UUID", "by its name in the environment", "by a part of it", "the only one"],
)
def test_a_mig_slice(device, boards, visible, label):
    found = find_board(3, device, [BOARDS[GTX], *boards, BOARDS[H100]], visible)
    assert found.label == label


@pytest.mark.parametrize("visible", [None, "", "0", "MIG-", ","])
def test_an_unnamed_slice_of_several(visible):
    with pytest.raises(ProbeError, match="set it to the UUID of a single MIG slice"):
        find_board(3, SLICED, SLICES, visible)


def test_a_device_that_nvml_does_not_list():
    listed = [Board(0, error="GPU is lost"), *BOARDS[1:]]
    refused = (
        r"cuda:3: neither its UUID \(of nothing\) .* NVML's gpu:0 \(GPU is lost\), gpu:1 \(GPU"
    )
    with pytest.raises(ProbeError, match=refused):
        find_board(3, cuda_device(GTX), listed, None)


@pytest.mark.parametrize("units", [[H100, A100, GTX], [GTX, H100], [A100]])
def test_boards_of_cuda_devices(driver, units):
    found = driver.run("cuda", json.dumps(units))
    assert column(found, "label") == [f"cuda:{i} (gpu:{u})" for i, u in enumerate(units)]
    assert column(found, "uuid") == [UUIDS[unit] for unit in units]
    assert column(found, "used_bytes") == [USED[unit] for unit in units]


def test_mig_slices_are_listed_in_place_of_their_board(driver):
    driver.state.has_mig = 1
    found = driver.run("boards")
    assert column(found, "label") == ["gpu:0", "gpu:1 mig:0", "gpu:1 mig:1", "gpu:2"]
    assert column(found, "uuid") == [UUIDS[0], UUIDS[3], UUIDS[4], UUIDS[2]]
    assert column(found, "used_bytes") == [USED[0], USED[3], USED[4], USED[2]]
    [row] = driver.run("cuda", json.dumps([SLICE + 1]))
    assert row["label"] == "cuda:0 (gpu:1 mig:1)"
    assert row["used_bytes"] == USED[SLICE + 1]
