"""The probe with the real pynvml, on a stand-in for the driver with three different GPUs."""

from __future__ import annotations

import pytest

from ..processes import python
from .driver import A100, GIB, GTX, H100, MIB, RESERVED, USED, UUIDS

LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, NO_PERMISSION, VERSION_MISMATCH = 12, 9, 4, 18
NOT_SUPPORTED, GPU_IS_LOST = 3, 15


def test_boards_are_shown_where_torch_has_no_cuda(driver):
    found = driver.run("boards")
    assert [row["label"] for row in found] == ["gpu:0", "gpu:1", "gpu:2"]
    assert [row["uuid"] for row in found] == list(UUIDS[:3])
    assert [row["total_bytes"] for row in found] == [11 * GIB, 40 * GIB, 80 * GIB]
    assert found[H100]["name"] == "NVIDIA H100 80GB HBM3"
    for row in found:
        assert row["device"] is None
        assert (
            row["allocated_bytes"] is row["reserved_bytes"] is row["peak_allocated_bytes"] is None
        )
        assert row["num_alloc_retries"] is row["error"] is None


def test_the_driver_says_its_version(driver):
    assert driver.run("driver_version") == "580.95.05"


@pytest.mark.parametrize(
    ("age", "version", "counted", "told"),
    [("newest", 2, 0, RESERVED), ("no memory v2", 1, RESERVED, None)],
)
def test_an_old_driver_counts_its_reserve_as_used(make_driver, age, version, counted, told):
    for row, used in zip(make_driver(age).run("boards"), USED, strict=False):
        assert row["memory_info_version"] == version
        assert row["used_bytes"] == used + counted
        assert row["reserved_by_driver_bytes"] == told
        assert row["free_bytes"] == row["total_bytes"] - used - RESERVED


def list_processes(driver, processes):
    driver.state.num_processes = len(processes)
    for i, (pid, size) in enumerate(processes):
        driver.state.process_pid[i], driver.state.process_bytes[i] = pid, size


@pytest.mark.parametrize("age", ["newest", "no processes v3"])
def test_process_bytes_are_those_of_our_pid(make_driver, age):
    driver = make_driver(age)
    list_processes(driver, [(999_999, 2 * GIB), (0, 1500 * MIB), (999_998, 1 * GIB)])
    found = driver.run("process_bytes")
    expected = [1500 * MIB, "process", 3 * GIB]
    assert list(found.values()) == [expected] * 4


def test_a_host_pid_leaves_the_devices_change_since_the_probe_was_made(driver):
    list_processes(driver, [(999_999, 2 * GIB)])
    assert driver.run("process_bytes") == {
        "untouched": [0, "process", 2 * GIB],
        "context only": [None, "unknown", None],
        "holding": [GIB + 300 * MIB, "device-delta", None],
        "held before": [None, "unknown", None],
    }


def test_a_pid_that_is_another_process_s_is_not_believed(driver):
    """In a container our PID may be that of a host's process, or be listed with 0 bytes."""
    list_processes(driver, [(0, 0)])
    found = driver.run("process_bytes")
    assert found["holding"] == [GIB + 300 * MIB, "device-delta", None]


def test_a_process_that_is_listed_twice(driver):
    """The bytes of its contexts are summed; those of the list for graphics are the same."""
    list_processes(driver, [(0, GIB), (0, 5 * MIB), (999_999, 7 * MIB)])
    driver.state.graphics_pid, driver.state.graphics_bytes = 999_998, 100 * MIB
    expected = [GIB + 5 * MIB, "process", 107 * MIB]
    assert driver.run("process_bytes")["holding"] == expected
    driver.state.graphics_pid, driver.state.graphics_bytes = 999_999, 7 * MIB
    expected = [GIB + 5 * MIB, "process", 7 * MIB]
    assert driver.run("process_bytes")["holding"] == expected


@pytest.mark.parametrize("cause", ["no permission", "no such call", "no figure"])
def test_a_driver_that_does_not_tell_processes(make_driver, cause):
    driver = make_driver("no processes" if cause == "no such call" else "newest")
    if cause == "no permission":
        driver.state.process_error = NO_PERMISSION
    if cause == "no figure":
        list_processes(driver, [(0, 2**64 - 1)])
    found = driver.run("process_bytes")
    assert found["context only"] == [None, "unknown", None]
    assert found["holding"] == [GIB + 300 * MIB, "device-delta", None]
    assert found["untouched"] == [None, "unknown", None]


@pytest.mark.parametrize("where", ["handle", "memory"])
def test_a_lost_gpu_is_a_row_that_says_so(driver, where):
    getattr(driver.state, f"{where}_error")[A100] = GPU_IS_LOST
    found = driver.run("boards")
    assert "lost" in found[A100]["error"].lower()
    assert found[A100]["label"] == "gpu:1"
    assert found[A100]["used_bytes"] is found[A100]["total_bytes"] is None
    assert [found[i]["used_bytes"] for i in (GTX, H100)] == [USED[GTX], USED[H100]]


def test_a_field_that_is_not_supported_is_none(driver):
    driver.state.name_error = NOT_SUPPORTED
    for row in driver.run("boards"):
        assert row["name"] is None
        assert row["used_bytes"] is not None


def test_mig_slices_are_listed_in_place_of_their_board(driver):
    driver.state.has_mig = 1
    found = driver.run("boards")
    assert [row["label"] for row in found] == ["gpu:0", "gpu:1 mig:0", "gpu:1 mig:1", "gpu:2"]
    assert [row["uuid"] for row in found] == [UUIDS[0], UUIDS[3], UUIDS[4], UUIDS[2]]
    assert [row["used_bytes"] for row in found] == [USED[0], USED[3], USED[4], USED[2]]


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
