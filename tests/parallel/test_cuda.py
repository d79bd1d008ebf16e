"""What only a GPU shows: that copies from the CPU do not wait for kernels."""

from __future__ import annotations

import pytest
import torch

from balanced_dp.parallel.scatter import Inputs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole"])
def test_inputs_do_not_wait_for_what_is_queued(whole):
    devices = [torch.device("cuda", i % torch.cuda.device_count()) for i in range(4)]
    x = torch.randn(13, 1 << 16)
    sizes = None if whole else [1, 4, 4, 4]
    inputs = Inputs(torch.sin, (x,), {})
    inputs.scatter(devices, sizes)  # makes the streams
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    queued = torch.cuda.Event()
    queued.record()
    chunks = inputs.scatter(devices, sizes)
    assert not queued.query()
    found = [chunk.cpu() for [chunk], _ in chunks]
    expected = [x] * 4 if whole else x.split(sizes)
    torch.testing.assert_close(found, list(expected))
