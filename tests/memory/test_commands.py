"""Test ``balanced-dp probe``."""

from __future__ import annotations

import io
import json
import re
import signal
import sys

import pytest
import torch

from balanced_dp.cli.commands import main

from .conftest import A100, GIB, H100, LOST, NO_LIBRARY, NO_PERMISSION, NOT_LOADED, USED, UUIDS


@pytest.fixture
def probe(monkeypatch, capsys):
    """A function that runs ``balanced-dp probe`` and returns its exit code, output and errors."""

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["balanced-dp", "probe", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def one_gpu(cuda, monkeypatch):
    """Let torch see one CUDA device, the fastest of the three GPUs that NVML lists."""
    cuda(H100).bytes = GIB
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_the_table(driver, probe):
    driver.memory_error[A100] = LOST  # does not end the table
    exit_code, output, errors = probe()
    assert (exit_code, errors) == (0, "")
    assert max(map(len, output.splitlines())) <= 80
    rows = [re.split(" {2,}", line.strip()) for line in output.splitlines()]
    assert [row for row in rows if len(row) == 4] == [
        ["device", "total", "used", "free"],
        ["gpu:0", "11.00 GiB", "1.00 GiB", "9.50 GiB"],
        ["gpu:1", "?", "?", "?"],
        ["gpu:2", "80.00 GiB", "3.00 GiB", "76.50 GiB"],
    ]
    names = ("NVIDIA GeForce GTX 1080 Ti", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3")
    for index, name in enumerate(names):
        lost = "    NVML failed: GPU is lost\n" * (index == A100)
        assert f"gpu:{index}: {name}\n    {UUIDS[index]}\n{lost}" in output


def test_json_is_the_snapshot(driver, probe):
    exit_code, output, _ = probe("--json", "-")
    record = json.loads(output)
    assert (exit_code, record["schema"]) == (0, 1)
    assert [device["used_bytes"] for device in record["devices"]] == list(USED[:3])
    assert [record["devices"][0][key] for key in ("device", "label")] == [None, "gpu:0"]


@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ((), NO_LIBRARY, "NVML Shared Library Not Found"),
        (("--json", "-"), NOT_LOADED, "Driver Not Loaded"),
        (("--watch", "1"), NO_PERMISSION, "Insufficient Permissions"),
    ],
)
def test_one_line_where_nvml_does_not_start(driver, probe, options, error, reason):
    driver.init_error = error
    exit_code, output, errors = probe(*options)
    assert (exit_code, output, errors.count("\n")) == (1, "", 1)
    assert errors.startswith("balanced-dp: ")
    assert f"sees no accelerator, and NVML failed: {reason}" in errors


@pytest.mark.usefixtures("one_gpu")
def test_torchs_side_without_nvml(driver, probe):
    driver.init_error = NOT_LOADED
    exit_code, output, _ = probe("--json", "-")
    [device] = json.loads(output)["devices"]
    assert (exit_code, device["label"], device["allocated_bytes"]) == (1, "cuda:0", GIB)
    assert device["used_bytes"] is None and "Driver Not Loaded" in device["error"]


@pytest.mark.usefixtures("one_gpu")
def test_both_numbers_are_shown(probe):
    exit_code, output, _ = probe()
    assert exit_code == 0
    assert "Devices without a torch number are not visible to torch." in output
    labels = re.findall(r"^ (\S.*?) {2,}[\d.]+ GiB", output, re.MULTILINE)
    assert labels == ["cuda:0 (gpu:2)", "gpu:0", "gpu:1"]


@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_intervals_that_are_refused(driver, probe, seconds):
    exit_code, output, errors = probe("--watch", seconds)
    assert (exit_code, output) == (2, "")
    assert f"a number of seconds above 0, got {seconds}" in errors


def test_watch_goes_on_until_ctrl_c(driver, probe, monkeypatch):
    class Output(io.StringIO):
        def write(self, text: str) -> int:
            driver.used[0] = 7 * GIB
            if self.getvalue().count("\n") == 2:
                signal.raise_signal(signal.SIGINT)
            return super().write(text)

    output = Output()
    monkeypatch.setattr(sys, "stdout", output)
    assert probe("--json", "-", "--watch", "0.01") == (0, "", "")
    records = [json.loads(line) for line in output.getvalue().splitlines()]
    assert [record["devices"][0]["used_bytes"] for record in records] == [USED[0], 7 * GIB]
