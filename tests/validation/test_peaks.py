"""Test the comparison of predicted with measured peaks, and what communicators take."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from balanced_dp import MemoryProbe, emulate_devices
from balanced_dp.validation import peaks

from ..tuning.small_workloads import SMALL

MIB = 2**20


@pytest.fixture
def workload():
    return replace(SMALL["char_transformer"](), name="char-transformer")


def test_the_memory_model_predicts_what_emulated_devices_hold(workload):
    predicted = peaks.predict_peaks(workload, 8, 2, is_shared=False)
    with emulate_devices(2) as devices:
        checks = list(peaks.peak_checks(workload, 8, predicted, list(devices), {}))
    assert next(iter(predicted)) == 4  # the even split
    by_torch, by_nvml = checks[::2], checks[1::2]
    assert [c.what for c in by_torch] == [f"gpu0_bsz={n}, torch's counters" for n in predicted]
    for check in by_torch:
        assert (check.outcome, check.value) == ("ok", pytest.approx(0, abs=1))
    for check in by_nvml:
        assert (check.outcome, check.note) == ("-", "no NVML for these devices")


def test_replicas_that_share_a_device_are_predicted_together(workload):
    predicted = peaks.predict_peaks(workload, 6, 3, is_shared=True)
    with emulate_devices(1) as devices:
        [by_torch, by_nvml] = peaks.peak_checks(workload, 6, predicted, list(devices) * 3, {})
    assert (by_torch.value, by_torch.note) == (0, "one device")
    assert by_nvml.outcome == "-"


def test_workspaces_of_libraries_are_left_out(workload, stand_in):
    predicted = peaks.predict_peaks(workload, 6, 2, is_shared=True)
    with stand_in.workspaces(MIB):
        check = next(peaks.peak_checks(workload, 6, predicted, stand_in.devices[:1] * 2, {}))
    assert check.outcome == "ok"
    assert check.note == "one device; workspaces of 2.00 MiB left out"


def test_memory_that_runs_out_is_no_wrong_prediction(workload, stand_in):
    with stand_in.limited(1, MIB):
        checks = list(peaks.peak_checks(workload, 8, {4: (1, 1)}, stand_in.devices[:2], {}))
    assert [c.outcome for c in checks] == ["-", "-"]
    assert checks[0].note == "out of memory on the devices"


BYTES = st.lists(st.integers(1, 2**40), min_size=1, max_size=8)


@given(BYTES, st.data())
def test_a_peak_is_right_if_each_device_is_within_a_tenth(held, data):
    errors = data.draw(
        st.lists(
            st.floats(-0.5, 0.5).filter(lambda x: abs(abs(x) - 0.1) > 1e-6),
            min_size=len(held),
            max_size=len(held),
        )
    )
    predicted = [h * (1 + e) for h, e in zip(held, errors, strict=True)]
    check = peaks.torch_check("", predicted, held)
    worst = max(errors, key=abs)
    assert abs(check.value) == pytest.approx(abs(100 * worst), abs=1e-6)
    assert check.outcome == ("ok" if abs(worst) <= 0.1 else "not ok")
    assert check.note.endswith("; allowed: 10%") == (check.outcome == "not ok")


@given(BYTES, st.data())
def test_nvml_may_see_more_than_predicted_by_the_reserve_of_a_plan(predicted, data):
    more = [data.draw(st.integers(-p + 1, 2 * peaks.RESERVE)) for p in predicted]
    used = [p + m for p, m in zip(predicted, more, strict=True)]
    check = peaks.nvml_check("", predicted, used)
    assert check.outcome == ("ok" if max(more) <= peaks.RESERVE else "not ok")
    assert peaks.nvml_check("", predicted, [*used[:-1], None], "no driver").note == "no driver"


def test_the_sign_is_that_of_the_prediction():
    assert peaks.torch_check("", [95, 101], [100, 100]).value == pytest.approx(-5)
    assert peaks.torch_check("", [95, 101], [100, 100]).note == "by device: -5.0, +1.0"
    assert (
        peaks.nvml_check("", [90 * MIB], [100 * MIB]).note == "one device; 10.00 MiB not predicted"
    )


def test_what_the_first_step_takes_outside_of_torch_belongs_to_communicators(
    workload, stand_in, monkeypatch
):
    """The stand-in's communicators take no memory, so its driver is told to count some."""
    module = torch.get_device_module(stand_in.devices[0])
    informed = module.mem_get_info

    def mem_get_info(device=None):
        free_bytes, total_bytes = informed(device)
        return free_bytes - 3 * MIB * len(stand_in.nccl.opened), total_bytes

    monkeypatch.setattr(module, "mem_get_info", mem_get_info)
    snapshot = MemoryProbe.snapshot
    monkeypatch.setattr(
        MemoryProbe,
        "snapshot",
        lambda probe: tuple(replace(memory, nvml_index=0) for memory in snapshot(probe)),
    )
    [check] = peaks.communicator_checks(stand_in.devices[:3], workload, 9)
    assert (check.outcome, check.value) == ("ok", 3 * MIB)
    assert check.note == "by device: 3.00 MiB, 3.00 MiB, 3.00 MiB"


def test_communicators_are_not_asked_for_without_nvml_or_a_second_device(workload, stand_in):
    for devices in (stand_in.devices[:2], stand_in.devices[:1] * 2):
        [check] = peaks.communicator_checks(devices, workload, 8)
        assert check.outcome == "-"
    assert not stand_in.nccl.opened
