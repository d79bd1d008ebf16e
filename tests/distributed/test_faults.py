"""Ranks that are lost end the others, which say who it was; and training resumes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from .faulty import NUM_SAMPLES
from .launch import finished, torchrun


def run(checkpoint: Path, fault: str, *options: str) -> tuple[int, str]:
    options = ("--standalone", *options)
    # Attempts share the store else, and processes of one find addresses of the last
    # (pytorch/pytorch#135712, and so in torch 2.13).
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    script = torchrun("faulty.py", [checkpoint, fault], options, num_processes=3, **own_store)
    return finished(script)


def test_a_killed_rank_ends_the_others_and_is_named(tmp_path):
    exit_code, output = run(tmp_path / "checkpoint", "killed")
    assert exit_code == 1
    assert re.search(r"rank *: 1 \(local_rank: 1\)\s+exitcode *: -9 ", output), output


def test_a_stuck_rank_ends_the_others_and_is_named(tmp_path):
    """torchrun would blame those that gave up waiting: the stuck one has not failed."""
    exit_code, output = run(tmp_path / "checkpoint", "stuck")
    assert exit_code == 1
    assert "DistributedError: no answer from rank 1 of [0, 1, 2]" in output, output
    assert "no answer from rank 0" not in output
    assert "no answer from rank 2" not in output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("undisturbed") / "checkpoint"
    exit_code, output = run(checkpoint, "not")
    assert exit_code == 0, output
    return torch.load(checkpoint)


def test_a_restart_resumes_with_each_sample_seen_once(tmp_path, undisturbed):
    exit_code, output = run(tmp_path / "checkpoint", "restarted", "--max-restarts", "1")
    assert exit_code == 0, output
    resumed = torch.load(tmp_path / "checkpoint")
    assert sorted(resumed["seen"]) == list(range(NUM_SAMPLES))
    assert resumed["seen"] == undisturbed["seen"]
    torch.testing.assert_close(resumed["model"], undisturbed["model"], rtol=0, atol=1e-10)
    torch.testing.assert_close(resumed["optimizer"], undisturbed["optimizer"], rtol=0, atol=1e-10)
