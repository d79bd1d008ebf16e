"""Run training scripts as people write them by ``balanced-dp run``, on four emulated GPUs.

The losses must be those of one device.
"""

from __future__ import annotations

import functools
import os
import re
from pathlib import Path

import pytest

from ..processes import python

SCRIPTS = Path(__file__).with_name("scripts")


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"loss (\d+\.\d{6,})", output)]


@functools.cache
def losses_on_cpu(*command: str) -> list[float]:
    done = python(*command, cwd=SCRIPTS, environ={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    return losses(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("gpu0_bsz", ["auto", "1", "even"])
@pytest.mark.parametrize("script", ["xl.py", "gpt.py", "gpt.py --ema 80", "hf.py", "hf.py --own"])
def test_losses_are_those_of_one_device(script, gpu0_bsz, tmp_path):
    script, *arguments = script.split()
    command = ["-m", "balanced_dp", "run", "--devices", "4", "--gpu0-bsz", gpu0_bsz]
    done = python(*command, str(SCRIPTS / script), *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 4 emulated GPUs" in done.stderr
    expected = losses_on_cpu(script, *arguments)
    assert len(expected) >= 10
    assert losses(done.stdout) == pytest.approx(expected, abs=1e-4, rel=0)
