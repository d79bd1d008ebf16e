"""One test for each defect that users met in earlier versions of a balanced DataParallel, or in

torch's own. Each docstring tells the story.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, BalanceWarning, ScatterError, split_batch

from .modules import Lambda


def linear(devices, **options) -> BalancedDataParallel:
    gpu0_bsz = options.pop("gpu0_bsz", 1)
    return BalancedDataParallel(
        gpu0_bsz, nn.Linear(4, 2).to(devices[0]), device_ids=devices, **options
    )


# The balanced forks, from Transformer-XL's class on.


@pytest.mark.parametrize(
    ("batch_size", "num_devices", "gpu0_bsz", "was"), [(4, 3, 1, 2), (9, 4, 2, 3)]
)
def test_device_0_does_not_get_more_than_was_asked(batch_size, num_devices, gpu0_bsz, was):
    """Where the others' share came out no larger than device 0's, the split fell back to the even
    one: 4 samples on 3 devices with gpu0_bsz=1 became [2, 2], and 9 on 4 with 2 [3, 3, 3].
    """
    assert split_batch(batch_size, num_devices, gpu0_bsz)[0] == gpu0_bsz < was


@pytest.mark.filterwarnings("ignore:gpu0_bsz")
@pytest.mark.parametrize("batch_size", [1, 2, 3, 5, 10])
def test_fewer_chunks_than_devices(devices, batch_size):
    """torch.chunk gives 10 samples to 8 devices as five chunks of 2; parallel_apply then asserted
    that there are as many replicas as inputs, so the last batch of an epoch crashed.
    """
    x = torch.randn(batch_size, 4)
    parallel = linear(devices, gpu0_bsz=8)
    assert parallel(x).shape == (batch_size, 2)


def test_one_device(devices):
    """The share of the others was divided by their number, which is zero on one device."""
    assert linear(devices[:1])(torch.randn(5, 4)).shape == (5, 2)


def test_a_call_with_keywords_only(devices):
    """The batch size was read from inputs[0], an IndexError where everything is a keyword."""
    assert linear(devices[:3])(input=torch.randn(5, 4)).shape == (5, 2)


def test_a_list_as_first_argument(devices):
    """The batch size was read as inputs[0].size(0), an AttributeError on a list of tensors."""
    module = Lambda(lambda m, xs: m.a(xs[0]) + m.a(xs[1]), a=nn.Linear(4, 2)).to(devices[0])
    parallel = BalancedDataParallel(1, module, device_ids=devices[:3])
    assert parallel([torch.randn(5, 4), torch.randn(5, 4)]).shape == (5, 2)


def test_an_input_that_cannot_be_split_raises(devices):
    """One fork caught everything around scatter, printed "error" and called quit()."""
    parallel = BalancedDataParallel(1, nn.Bilinear(4, 4, 2).to(devices[0]), device_ids=devices[:3])
    with pytest.raises(ScatterError, match=r"input input2 of shape \(3, 4\)"):
        parallel(torch.randn(5, 4), torch.randn(3, 4))


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
    """A replica was built on device 0 and thrown away, and backward allocated zeros for it."""
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


def test_gpu0_bsz_0_keeps_the_power_iteration_of_spectral_norm(devices):
    """The old spectral_norm updates its vectors in place, another buffer that used to be lost."""
    module = nn.utils.spectral_norm(nn.Linear(4, 2)).to(devices[0])
    expected = copy.deepcopy(module)
    parallel = BalancedDataParallel(0, module, device_ids=devices[:3])
    x = torch.randn(6, 4)
    parallel(x)
    expected(x.to(devices[0]))
    torch.testing.assert_close(module.weight_u, expected.weight_u)


def test_gpu0_bsz_0_runs_a_replica_on_every_other_device(emulated):
    """One fork replicated onto the first len(inputs) devices, so it was one replica short."""
    seen = []
    module = Lambda(lambda m, x: seen.append(str(x.device)) or m.a(x), a=nn.Linear(4, 2))
    parallel = BalancedDataParallel(0, module.to(emulated[0]), device_ids=emulated[:4])
    assert parallel(torch.randn(9, 4)).shape == (9, 2)
    assert sorted(seen) == ["lazy:1", "lazy:2", "lazy:3"]


@pytest.mark.parametrize("batch_size", [0, 1, 2])
def test_gpu0_bsz_0_with_a_small_last_batch(devices, batch_size):
    """A batch smaller than the number of devices ended in an assertion."""
    assert linear(devices, gpu0_bsz=0)(torch.randn(batch_size, 4)).shape == (batch_size, 2)


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


@pytest.mark.parametrize("gpu0_bsz", [1, 9])
@pytest.mark.filterwarnings("ignore:gpu0_bsz")
def test_a_keyword_that_is_no_tensor(devices, gpu0_bsz):
    """scatter_kwargs compares the wrong lengths: 9 samples on 4 devices make three chunks, but a
    keyword that is no tensor made four of itself, so one replica ran without inputs.
    """
    module = Lambda(lambda m, x, scale: m.a(x) * scale, a=nn.Linear(4, 2)).to(devices[0])
    parallel = BalancedDataParallel(gpu0_bsz, module, device_ids=devices[:4])
    assert parallel(torch.randn(9, 4), scale=2.0).shape == (9, 2)


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


def test_autocast_keeps_its_dtype():
    """Stock's threads enter autocast without the dtype, so bfloat16 became float16 in them."""
    seen = []
    module = Lambda(lambda m, x: seen.append(m.a(x).dtype) or x, a=nn.Linear(4, 2))
    parallel = BalancedDataParallel(1, module, device_ids=["cpu"] * 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        parallel(torch.randn(7, 4))
    with torch.autocast("cpu", dtype=torch.float16):
        parallel(torch.randn(7, 4))
    parallel(torch.randn(7, 4))
    assert seen == [torch.bfloat16] * 3 + [torch.float16] * 3 + [torch.float32] * 3


def test_inference_mode_reaches_the_replicas(devices):
    """Inference mode belongs to a thread, and stock's threads do not take it over."""
    seen = []
    module = Lambda(
        lambda m, x: seen.append(torch.is_inference_mode_enabled()) or m.a(x), a=nn.Linear(4, 2)
    ).to(devices[0])
    parallel = BalancedDataParallel(1, module, device_ids=devices[:3])
    with torch.inference_mode():
        assert parallel(torch.randn(7, 4)).is_inference()
    assert seen == [True] * 3


def test_outputs_can_be_gathered_on_the_cpu(devices):
    """output_device="cpu" raised: stock takes accelerator indices only."""
    output = linear(devices[:3], output_device="cpu")(torch.randn(7, 4))
    assert output.device == torch.device("cpu")
    assert linear(devices[:1], output_device="cpu")(torch.randn(7, 4)).device.type == "cpu"


def test_a_scalar_loss_with_dim_1(devices):
    """Gathering 0-dim tensors was possible along dim 0 only."""
    module = Lambda(lambda m, x: m.a(x.T).mean(), a=nn.Linear(4, 2)).to(devices[0])
    parallel = BalancedDataParallel(1, module, device_ids=devices[:3], dim=1)
    assert parallel(torch.randn(4, 7)).shape == ()
