"""One test for each defect that users met in earlier versions of a balanced DataParallel, or in

torch's own. Each docstring tells the story.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, BalanceWarning, ScatterError

from ..modules import Lambda


def linear(devices, **options) -> BalancedDataParallel:
    gpu0_bsz = options.pop("gpu0_bsz", 1)
    return BalancedDataParallel(
        gpu0_bsz, nn.Linear(4, 2).to(devices[0]), device_ids=devices, **options
    )


# The balanced forks, from Transformer-XL's class on.


def test_nothing_is_printed(devices, capfd):
    """Several forks print chunk sizes or device lists in every forward pass."""
    linear(devices[:3])(torch.randn(5, 4)).sum().backward()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("gpu0_bsz", [25, 3500])
def test_a_gpu0_bsz_that_balances_nothing_warns_once(devices, gpu0_bsz):
    """A user set 3500 for a batch of 100 on four devices and wondered why nothing changed."""
    parallel = linear(devices[:4], gpu0_bsz=gpu0_bsz)
    message = (
        rf"gpu0_bsz={gpu0_bsz} balances nothing: the even share of this first batch of 100 on 4 "
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


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
def test_gpu0_bsz_0_keeps_batch_norm_statistics(devices, gpu0_bsz):
    """Statistics live in the buffers of the replica on device 0; without one they were lost. Now
    the first replica that runs gives them back, so they are those of its chunk.
    """
    module = nn.BatchNorm1d(4).to(devices[0])
    expected = copy.deepcopy(module)
    parallel = BalancedDataParallel(gpu0_bsz * 2, module, device_ids=devices[:3])
    for _ in range(3):
        x = torch.randn(8, 4)
        parallel(x)
        expected(x[: parallel.split(8)[0] or parallel.split(8)[1]].to(devices[0]))
    assert module.num_batches_tracked.item() == 3
    torch.testing.assert_close(module.running_mean.cpu(), expected.running_mean.cpu())
    torch.testing.assert_close(module.running_var.cpu(), expected.running_var.cpu())


@pytest.mark.parametrize(
    ("chunks", "gpu0_bsz", "factor"),
    [
        ([5, 11], 5, 1.6),
        ([18, 32, 32, 32], 18, 1.6),
        ([1, 9, 9, 9, 9, 9, 9, 9], 1, 8),
        ([1, 32, 32, 31, 31, 31], 1, 26),
    ],
)
def test_the_mean_of_losses_weighs_every_sample_the_same(devices, chunks, gpu0_bsz, factor):
    """Published recipes call loss.mean() on a vector of one loss a replica. A sample on device 0
    then counts B / (n * c0) times as much as it should: the factor here.
    """
    batch_size = sum(chunks)
    assert batch_size / len(chunks) / chunks[0] == pytest.approx(factor, rel=0.05)
    module = Lambda(lambda m, x: m.a(x).square().mean(), a=nn.Linear(4, 2)).double()
    reference = copy.deepcopy(module)
    parallel = BalancedDataParallel(
        gpu0_bsz, module.to(devices[0]), device_ids=devices[: len(chunks)]
    )
    assert list(parallel.split(batch_size)) == chunks
    x = torch.randn(batch_size, 4, dtype=torch.double)
    loss, expected = parallel(x).mean(), reference(x)
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(module.a.weight.grad.cpu(), reference.a.weight.grad)


# torch.nn.DataParallel itself, version 2.13.


def test_every_attribute_is_set_without_an_accelerator():
    """Stock returns from its constructor before it sets dim and output_device, so code that reads
    them fails on a machine without GPUs only.
    """
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    module = nn.Linear(4, 2)
    parallel = BalancedDataParallel(1, module, dim=1)
    attributes = (parallel.module, parallel.device_ids, parallel.output_device, parallel.dim)
    assert attributes == (module, [], None, 1)
    assert parallel(torch.randn(3, 4)).shape == (3, 2)


def test_a_second_tensor_of_another_length_is_not_truncated(devices):
    """Chunks of both were zipped, so what was left over of the longer one vanished silently."""
    module = Lambda(lambda m, x, bias: m.a(x) + bias, a=nn.Linear(4, 2)).to(devices[0])
    parallel = BalancedDataParallel(1, module, device_ids=devices[:4])
    with pytest.raises(ScatterError, match=r"copies it whole to each device"):
        parallel(torch.randn(8, 4), bias=torch.randn(2))
    whole = BalancedDataParallel(1, module, device_ids=devices[:4], broadcast=("kwargs.bias",))
    with pytest.raises(ScatterError, match=r"broadcast=\('bias',\)"):
        whole(torch.randn(8, 4), bias=torch.randn(2))
    whole = BalancedDataParallel(1, module, device_ids=devices[:4], broadcast=("bias",))
    assert whole(torch.randn(8, 4), bias=torch.randn(2)).shape == (8, 2)


def test_outputs_can_be_gathered_on_the_cpu(devices):
    """output_device="cpu" raised: stock takes accelerator indices only."""
    output = linear(devices[:3], output_device="cpu")(torch.randn(7, 4))
    assert output.device == torch.device("cpu")
    assert linear(devices[:1], output_device="cpu")(torch.randn(7, 4)).device.type == "cpu"
