from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from balanced_dp import emulate_devices
from balanced_dp.tuning.step import StepMeter, measure_step

from .small_workloads import SMALL


def test_the_second_step_has_optimizer_state():
    with emulate_devices(2, symbolic=True) as devices, StepMeter(SMALL["mlp"](), devices) as meter:
        first = meter.measure((2, 6), num_steps=1)
        measured = meter.measure((2, 6))
        assert not gc.isenabled()
    assert gc.isenabled()
    assert first.peak_bytes[0] <= measured.peak_bytes[0]
    assert measured.uses[0]["optimizer state"] > 0


def test_memory_that_runs_out_is_an_answer():
    workload = SMALL["char_transformer"]()
    with emulate_devices(2, symbolic=True) as devices:
        needed = measure_step(workload, 64, 20, devices).peak_bytes
    with emulate_devices(2, memory=max(needed) // 2, symbolic=True) as devices:
        out = measure_step(workload, 64, 20, devices)
        assert [torch.lazy.memory_allocated(device) for device in devices] == [0, 0]
        assert "out of memory" in out.out_of_memory
        assert out.ran_out == needed.index(max(needed))
        assert measure_step(workload, 4, 1, devices).out_of_memory is None


def test_libraries_that_run_out_of_memory(monkeypatch):
    """Check cuBLAS's message on a full H100, a RuntimeError."""

    def forward(self, x):
        raise RuntimeError(text)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    text = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    with emulate_devices(2, symbolic=True) as devices:
        measured = measure_step(SMALL["mlp"](), 8, 2, devices)
        assert measured.out_of_memory.startswith(text)  # Python 3.10 has no notes
        text = "CUDA error: an illegal memory access was encountered"
        with pytest.raises(RuntimeError, match="illegal memory access"):
            measure_step(SMALL["mlp"](), 8, 2, devices)
