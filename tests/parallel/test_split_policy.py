"""The split of each call, and the warnings about it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, BalanceWarning, balanced_data_parallel


@pytest.mark.parametrize("hooked", [False, True])
def test_the_warning_of_an_even_split_is_given_where_the_model_is_called(hooked):
    """Hooks add frames of torch's, and it pointed into torch."""
    model = BalancedDataParallel(9, nn.Identity(), ["cpu", "cpu"])
    if hooked:
        model.register_forward_hook(lambda *args: None)
    with pytest.warns(BalanceWarning) as caught:
        model(torch.ones(8))
    assert caught[0].filename == __file__
    with pytest.warns(BalanceWarning) as caught:
        balanced_data_parallel(9, nn.Identity(), torch.ones(8), ["cpu", "cpu"])
    assert caught[0].filename == __file__


@pytest.mark.parametrize("gpu0_bsz", [25, 3500])
def test_a_gpu0_bsz_that_balances_nothing_warns_once(gpu0_bsz):
    """A user set 3500 for a batch of 100 on four devices and wondered why nothing changed."""
    parallel = BalancedDataParallel(gpu0_bsz, nn.Identity(), ["cpu"] * 4)
    message = (
        rf"gpu0_bsz={gpu0_bsz} has no effect: the even share of this first batch of 100 on 4 "
        r"devices is 25, so the split is that of nn.DataParallel, \(25, 25, 25, 25\); choose "
        r"gpu0_bsz below 25"
    )
    with pytest.warns(BalanceWarning, match=message):
        parallel(torch.randn(100, 4))
    parallel(torch.randn(100, 4))


def test_gpu0_bsz_0_does_nothing_on_device_0(emulated):
    """A replica was built on device 0 and thrown away, and backward allocated zeros for it. One
    fork replicated onto the first devices instead, so it was one replica short.
    """
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).to(emulated[0])
    seen = []
    module.register_forward_hook(lambda module, args, output: seen.append(output.device))
    parallel = BalancedDataParallel(0, module, device_ids=emulated[:3], output_device=emulated[1])
    memory = torch.get_device_module(emulated[0])
    before = memory.memory_allocated(emulated[0])
    memory.reset_peak_memory_stats(emulated[0])
    output = parallel(torch.randn(6, 64))
    assert sorted(map(str, seen)) == ["lazy:1", "lazy:2"]
    assert memory.max_memory_allocated(emulated[0]) == before
    output.sum().backward()
    # The gradients themselves, and one that is about to be added to the other replica's.
    gradients = sum(-(-p.grad.nbytes // 512) * 512 for p in module.parameters())
    assert memory.memory_allocated(emulated[0]) == before + gradients
    assert memory.max_memory_allocated(emulated[0]) <= before + gradients + module[0].weight.nbytes
