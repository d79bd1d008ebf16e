"""Test ``balanced-dp probe``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys

import pytest

from .driver import A100, GIB, ROOT, USED, UUIDS

DRIVER_NOT_LOADED, GPU_IS_LOST = 9, 15


def test_the_table(driver):
    done = driver.command("probe")
    assert done.returncode == 0
    assert done.stderr == ""
    rows = [re.split(" {2,}", line.strip()) for line in done.stdout.splitlines()]
    assert [row for row in rows if len(row) == 4] == [
        ["device", "total", "used", "free"],
        ["gpu:0", "11.00 GiB", "1.00 GiB", "9.50 GiB"],
        ["gpu:1", "40.00 GiB", "2.00 GiB", "37.50 GiB"],
        ["gpu:2", "80.00 GiB", "3.00 GiB", "76.50 GiB"],
    ]
    names = ("NVIDIA GeForce GTX 1080 Ti", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3")
    for index, name in enumerate(names):
        assert f"gpu:{index}: {name}\n    {UUIDS[index]}\n" in done.stdout


def test_a_lost_gpu_does_not_end_the_table(driver):
    driver.state.memory_error[A100] = GPU_IS_LOST
    done = driver.command("probe")
    assert done.returncode == 0
    assert all(uuid in done.stdout for uuid in UUIDS[:3])
    assert "lost" in done.stdout.lower()


def test_json_is_the_snapshot(driver):
    done = driver.command("probe", "--json", "-")
    record = json.loads(done.stdout)
    assert done.returncode == 0
    assert record["schema"] == 1
    assert [device["used_bytes"] for device in record["devices"]] == list(USED[:3])
    assert record["devices"][0]["device"] is None
    assert record["devices"][0]["label"] == "gpu:0"


@pytest.mark.parametrize("options", [(), ("--json", "-"), ("--watch", "1")])
def test_one_line_where_nvml_does_not_answer(driver, options):
    driver.state.init_error = DRIVER_NOT_LOADED
    done = driver.command("probe", *options)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("balanced-dp: ")
    assert "NVML failed: Driver Not Loaded" in done.stderr


def test_torchs_side_is_shown_though_nvml_does_not_answer(driver):
    driver.state.init_error = DRIVER_NOT_LOADED
    shown = driver.run("command_with_cuda", "probe", "--json", "-")
    assert shown["exit_code"] == 1
    [device] = json.loads(shown["stdout"])["devices"]
    assert device["label"] == "cuda:0"
    assert device["allocated_bytes"] == GIB
    assert device["used_bytes"] is None
    assert "Driver Not Loaded" in device["error"]


def test_both_numbers_are_shown(driver):
    shown = driver.run("command_with_cuda", "probe")
    assert shown["exit_code"] == 0
    assert "cuda:0 (gpu:2)" in shown["stdout"]
    assert "Devices without a torch number are not visible to torch." in shown["stdout"]
    labels = re.findall(r"^ (\S.*?) {2,}[\d.]+ GiB", shown["stdout"], re.MULTILINE)
    assert labels == ["cuda:0 (gpu:2)", "gpu:0", "gpu:1"]


@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_intervals_that_are_refused(driver, seconds):
    done = driver.command("probe", "--watch", seconds)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"a number of seconds above 0, got {seconds}" in done.stderr


def test_watch_goes_on_until_ctrl_c(driver):
    process = subprocess.Popen(
        [sys.executable, "-m", "balanced_dp", "probe", "--json", "-", "--watch", "0.01"],
        env=driver.environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    first = json.loads(process.stdout.readline())
    driver.state.used[0] = 7 * GIB
    while (now := json.loads(process.stdout.readline())) == first:
        pass
    assert now["devices"][0]["used_bytes"] == 7 * GIB
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
