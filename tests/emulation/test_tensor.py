from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from balanced_dp import EmulationError, emulate_devices

from ..at_once import at_once
from ..modules import tied
from .models import MODELS, train

exact = {"rtol": 0, "atol": 1e-10}

# Code that mixes devices.

MIXTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "add_": lambda x, y: x.add_(y),
    "matmul": lambda x, y: x @ y,
    "linear": F.linear,
    "cat": lambda x, y: torch.cat([x, y]),
    "stack of numbers": lambda x, y: torch.stack([x.sum(), y.sum()]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0.0),
    "embedding": lambda x, y: F.embedding(x.long(), y),
    "gather": lambda x, y: x.gather(0, y.long()),
    "index_select": lambda x, y: x.index_select(0, y[0].long()),
    "mse_loss": F.mse_loss,
    "out": lambda x, y: torch.add(x, 1, out=y),
}


@pytest.mark.parametrize("mix", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("pair", [(0, 1), (0, None), (None, 0)])
def test_mixed_devices_fail_as_on_cuda(devices, mix, pair):
    x, y = (torch.zeros(2, 2, device="cpu" if i is None else devices[i]) for i in pair)
    before = torch.get_device_module("lazy").memory_allocated(0)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as e:
        mix(x, y)
    assert "lazy:0" in str(e.value)
    assert ("cpu" if None in pair else "lazy:1") in str(e.value)
    del e
    assert torch.get_device_module("lazy").memory_allocated(0) == before


def test_0_dim_cpu_tensors_are_numbers(devices):
    x = torch.arange(3.0, device=devices[0])
    two = torch.tensor(2.0)
    assert (x * two + two).tolist() == (two + two * x).tolist() == [2.0, 4.0, 6.0]
    assert torch.where(x > 0, x, two).tolist() == [2.0, 1.0, 2.0]
    x[1] = two
    assert x.clamp(max=two).mul_(two).tolist() == [0.0, 4.0, 4.0]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        two.add_(x.sum())


def test_indices_and_masks_on_the_cpu(devices):
    x = torch.arange(4.0, device=devices[0])
    assert x[torch.tensor([3, 1])].tolist() == [3.0, 1.0]
    assert x[torch.tensor([True, False, False, True])].tolist() == [0.0, 3.0]
    x[torch.tensor([0, 1])] = torch.tensor([5.0, 6.0], device=devices[0])
    assert x[x > 4].tolist() == [5.0, 6.0]
    for mix in (
        lambda: x.__setitem__(torch.tensor([0, 1]), torch.tensor([5.0, 6.0])),
        lambda: torch.arange(4.0)[torch.tensor([3, 1], device=devices[0])],
        lambda: x[torch.tensor([3, 1], device=devices[1])],
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix()


# Real models.


@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_on_the_cpu(devices, name):
    expected = train(MODELS[name], torch.device("cpu"))
    actual = train(MODELS[name], devices[1])
    assert all(p.device == devices[1] for p in actual.module.parameters())
    torch.testing.assert_close([loss.cpu() for loss in actual.losses], expected.losses, **exact)
    torch.testing.assert_close(
        {key: value.cpu() for key, value in actual.module.state_dict().items()},
        expected.module.state_dict(),
        **exact,
    )
    assert len(expected.losses) == len({loss.item() for loss in expected.losses})  # it trains


# The numbers of the CPU.


def sparse_gradients(device: Any) -> list[Tensor]:
    module = nn.Embedding(10, 4, sparse=True, dtype=torch.float64).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    index = torch.tensor([[1, 2, 1], [7, 7, 0]]).to(device)
    for step in range(6):  # in pairs, which accumulate
        module(index).pow(2).sum().backward()
        assert module.weight.grad.is_sparse
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return [module.weight]


def packed_sequence(device: Any) -> list[Tensor]:
    module = nn.LSTM(3, 5, bidirectional=True).to(device, torch.float64)
    x = torch.randn(4, 3, 3, dtype=torch.float64).to(device).requires_grad_()
    lengths = torch.tensor([2, 4, 3])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    assert (packed.data.device, packed.batch_sizes.device) == (x.device, lengths.device)
    output, _ = nn.utils.rnn.pad_packed_sequence(module(packed)[0])
    output.pow(2).sum().backward()
    return [output, x.grad, module.weight_ih_l0.grad]


def conjugates(device: Any) -> list[Tensor]:
    """Operators got the conjugate's data without its bit, and computed with the original."""
    z = torch.tensor([1 + 2j, 3 - 1j]).to(device).requires_grad_()
    value = (z * z.conj()).sum() + (z.view(1, 2) @ z.view(1, 2).mH).sum() + z.exp().abs().sum()
    value.abs().backward()
    return [value, z.grad, z.conj().imag]


def views_in_place(device: Any) -> list[Tensor]:
    x = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
    y = x * 1
    y.t_().unsqueeze_(0)
    (y * torch.arange(6.0, device=device).view(1, 3, 2)).sum().backward()
    return [x.grad]


def shared_gradients(device: Any) -> list[Tensor]:
    """A gradient is not added to in place while it, or a view of it, waits for another node."""
    leaves = [torch.ones(2, 2, device=device).requires_grad_() for _ in range(4)]
    for waits, added, cut in ((*leaves[:2], lambda x: x), (*leaves[2:], lambda x: x.view(2, 2))):
        late, early = waits * 2, added * 2
        other = early * 3
        ((cut(early) + late).square().sum() + other.square().sum()).backward()
    return [leaf.grad for leaf in leaves]


def forward_mode(device: Any) -> list[Tensor]:
    """Where a tangent is zero, ``_efficientzerotensor`` was missing."""
    w, x = torch.arange(6.0, device=device).view(2, 3), torch.ones(3, device=device)
    return list(torch.func.jvp(lambda x: 2 * (w @ x) + w.sum(), (x,), (x,)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by which torch makes decompositions
@pytest.mark.parametrize(
    "compute",
    [sparse_gradients, packed_sequence, conjugates, views_in_place, shared_gradients, forward_mode],
    ids=lambda compute: compute.__name__,
)
def test_numbers_of_the_cpu(devices, compute):
    results = []
    for device in (devices[0], torch.device("cpu")):
        torch.manual_seed(0)
        results.append([x.detach().cpu() for x in compute(device)])
    torch.testing.assert_close(*results, **exact)


def test_the_bytes_of_sparse_gradients(devices):
    module = nn.Embedding(1000, 64, sparse=True).to(devices[0])
    index = torch.arange(100, device=devices[0])
    before = torch.get_device_module("lazy").memory_allocated(devices[0])
    for num_passes in (1, 2, 3):
        module(index).sum().backward()
        gradient_bytes = sum(
            -(-num_passes * num_bytes // 512) * 512 for num_bytes in (100 * 8, 100 * 64 * 4)
        )
        now = torch.get_device_module("lazy").memory_allocated(devices[0])
        assert now - before == gradient_bytes


def test_gradients_of_gradients(devices):
    def function(x, weight, bias):
        return F.layer_norm(F.linear(x, weight, bias).tanh(), (2,)).softmax(-1)

    shapes = [(3, 4), (2, 4), (2,)]
    args = [
        torch.randn(shape, dtype=torch.float64, device=devices[0], requires_grad=True)
        for shape in shapes
    ]
    assert torch.autograd.gradcheck(function, args)
    assert torch.autograd.gradgradcheck(function, args)


def test_threads_train_as_one_alone(devices):
    # The recurrent one has many small operations, so the threads switch often.
    def trained(device):
        generator = torch.Generator().manual_seed(0)
        module = nn.LSTM(4, 6).to(torch.float64)
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3, generator=generator)
        module.to(device)
        x = torch.randn(6, 2, 4, dtype=torch.float64, generator=generator).to(device)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        for _ in range(5):
            module(x)[0].pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {key: value.cpu() for key, value in module.state_dict().items()}

    expected = trained(torch.device("cpu"))
    for result in at_once(lambda i: trained(devices[i % 3]), 6):
        torch.testing.assert_close(result, expected, **exact)
    assert [torch.get_device_module("lazy").memory_allocated(d) for d in devices] == [0, 0, 0]


# Copies of modules and tensors.


def test_tied_weights_stay_tied(devices):
    module = tied()
    weight = module[0].weight
    for target in (devices[0], devices[1], torch.device("cpu"), devices[0]):
        module.to(target)
        assert module[1].weight is module[0].weight is weight
        assert weight.device == target
        assert isinstance(weight, nn.Parameter)
        assert len(list(module.parameters())) == 1
    module.double()
    module[1](module[0](torch.tensor([1], device=devices[0]))).sum().backward()
    assert weight.grad.dtype == torch.float64
    assert weight.grad.device == devices[0]
    assert type(module.cpu()[0].weight) is nn.Parameter


def test_deep_copies_keep_ties_and_device(devices):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).to(devices[1])
    module[2].weight = module[0].weight
    module(torch.randn(4, 3, device=devices[1])).sum().backward()
    twin = copy.deepcopy(module)
    assert twin[2].weight is twin[0].weight
    assert twin[0].weight is not module[0].weight
    assert isinstance(twin[0].weight, nn.Parameter)
    assert {t.device for t in twin.state_dict().values()} == {devices[1]}
    assert twin[0].weight.grad is None  # as torch's
    with torch.no_grad():
        twin[0].weight.zero_()
    assert module[0].weight.abs().sum().item() > 0


def test_moved_parameters_keep_hooks(devices):
    layer = nn.Linear(2, 2)
    calls = []
    layer.weight.tag = "slow"
    handle = layer.weight.register_hook(lambda grad: grad * 100)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: calls.append("bias"))
    weight = layer.weight
    layer.to(devices[1])
    assert layer.weight is weight and layer.weight.tag == "slow"
    layer(torch.ones(1, 2, device=devices[1])).sum().backward()
    assert layer.weight.grad.tolist() == [[100, 100]] * 2
    assert calls == ["bias"]
    handle.remove()
    layer.zero_grad()
    layer.to("cpu")
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad.tolist() == [[1, 1]] * 2
    assert calls == ["bias"] * 2 and layer.weight.tag == "slow"


def test_a_shallow_copy_shares_memory(devices):
    x = nn.Parameter(torch.zeros(3, device=devices[0]))
    twin = copy.copy(x)
    assert twin.device == devices[0] and isinstance(twin, nn.Parameter)
    with torch.no_grad():
        twin.add_(1.0)
    assert x.tolist() == [1.0] * 3


def test_pickle_makes_cpu_tensors(devices):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(devices[0])
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded[0].weight) is nn.Parameter
    assert {t.device.type for t in loaded.state_dict().values()} == {"cpu"}
    torch.testing.assert_close(loaded[0].weight, module[0].weight.cpu())
    frozen = torch.ones(2, device=devices[0])
    assert pickle.loads(pickle.dumps(frozen)).requires_grad is False
    assert pickle.loads(pickle.dumps(frozen.requires_grad_())).requires_grad is True


def test_checkpoints_load_on_the_cpu():
    file = io.BytesIO()

    def save(device):
        trained = train(MODELS["tied embedding"], device)
        weights = trained.module.state_dict()
        torch.save({"model": weights, "optimizer": trained.optimizer.state_dict()}, file)
        return {key: value.cpu() for key, value in weights.items()}

    with emulate_devices(1) as devices:
        expected = save(devices[0])
    file.seek(0)
    states = torch.load(file)  # with weights_only, its default
    torch.testing.assert_close(states["model"], expected, rtol=0, atol=0)
    weights = states["model"]["0.weight"], states["model"]["1.weight"]
    assert weights[0].data_ptr() == weights[1].data_ptr()
    assert states["optimizer"]["state"][0]["exp_avg"].device.type == "cpu"


def test_checkpoints_of_the_cpu_load(devices):
    source = train(MODELS["conv and batch norm"], torch.device("cpu"))
    target = train(MODELS["conv and batch norm"], devices[0], num_steps=1)
    target.module.load_state_dict(source.module.state_dict())
    target.optimizer.load_state_dict(source.optimizer.state_dict())
    for p, q in zip(target.module.parameters(), source.module.parameters(), strict=True):
        assert p.device == target.optimizer.state[p]["exp_avg"].device == devices[0]
        torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=0, atol=0)


# Attributes and representations of tensors.


def test_tensors_say_where_they_are(devices):
    x = torch.zeros(2, 3, device=devices[1])
    assert (x.device, x.get_device(), x.is_cuda, x.is_cpu) == (devices[1], 1, False, False)
    assert (x.shape, x.stride(), x.nbytes) == ((2, 3), (3, 1), 24)
    assert x.to(devices[1]) is x


def test_views_share_an_address(devices):
    """Safetensors compares addresses to find tied weights, so that Trainer could not save any."""
    x, other = torch.zeros(2, 3, device=devices[0]), torch.zeros(2, 3, device=devices[0])
    addresses = [tensor.untyped_storage().data_ptr() for tensor in (x, x[1:].t(), other)]
    assert addresses[0] == addresses[1] != addresses[2]
    assert addresses[0] == x.data_ptr() == x[1:].data_ptr() - 3 * 4
    assert x.untyped_storage().nbytes() == 24


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_values_can_be_read(devices, dtype):
    on_cpu = torch.tensor([[0, 1], [2, 3]]).to(dtype)
    x = on_cpu.to(devices[0])
    assert x.tolist() == on_cpu.tolist()
    assert x[1, 0].item() == on_cpu[1, 0].item()
    assert [row.tolist() for row in x] == on_cpu.tolist()
    assert torch.equal(x.cpu(), on_cpu)
    assert bool(x[0, 1])
    assert (x.numpy(force=True) == on_cpu.numpy()).all()


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), np.asarray])
def test_numpy_takes_it_from_the_cpu_only(devices, convert):
    x = torch.ones(2, device=devices[0])
    with pytest.raises(TypeError, match=r"can't convert lazy:0 .* to numpy. Use Tensor.cpu\(\)"):
        convert(x)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda d: torch.tensor([1.5, 2.0], device=d), "tensor([1.5000, 2.0000], device='lazy:0')"),
        (lambda d: torch.tensor([1], device=d), "tensor([1], device='lazy:0')"),
        (
            lambda d: torch.ones(1, dtype=torch.float64, device=d, requires_grad=True),
            "tensor([1.], dtype=torch.float64, device='lazy:0', requires_grad=True)",
        ),
    ],
)
def test_its_text_names_the_device(devices, make, text):
    x = make(devices[0])
    assert repr(x) == str(x) == f"{x}" == text


def test_numbers_are_formatted(devices):
    x = torch.tensor(2.5, device=devices[0])
    assert f"{x:.2f} {x:>6}" == "2.50    2.5"
    assert f"{x}" == f"{torch.tensor(2.5)}"


# Views and in-place operators.


@pytest.mark.parametrize(
    "mode", [torch.enable_grad, torch.no_grad, torch.inference_mode], ids=lambda mode: mode.__name__
)
def test_views_share_values_with_their_base(devices, mode):
    base = torch.zeros(2, 3, device=devices[0])
    with mode():
        fresh = torch.zeros(2, 3, device=devices[0])
        for x in (base, fresh):
            x[0].add_(1.0)
            x.view(-1)[3:].mul_(2.0).add_(5.0)
            x.detach()[:, 0].zero_()
            x += 1
            x.t()[2].copy_(torch.tensor([7.0, 8.0]))
            assert x.tolist() == [[1.0, 2.0, 7.0], [1.0, 6.0, 8.0]]
    base[1].add_(1.0)
    assert base.tolist() == [[1.0, 2.0, 7.0], [2.0, 7.0, 9.0]]
    assert base.is_inference() is False
    assert fresh.is_inference() is (mode is torch.inference_mode)


SHAPES_IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.squeeze_(),
    "squeeze_ one": lambda x: x.squeeze_(0),
    "t_": lambda x: x.squeeze_(0).t_(),
    "transpose_": lambda x: x.transpose_(0, 2),
    "swapaxes_": lambda x: x.swapaxes_(1, 2),
    "as_strided_": lambda x: x.as_strided_((2, 2), (1, 2), 1),
    "resize_ to less": lambda x: x.resize_(2, 2),
    "resize_ to more": lambda x: x.resize_(20, 30).fill_(1.0),
}


@pytest.mark.parametrize("change", SHAPES_IN_PLACE.values(), ids=SHAPES_IN_PLACE)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_shapes_change_in_place(devices, change, mode):
    with mode():
        on_cpu = torch.arange(6.0).view(1, 2, 3)
        x = on_cpu.to(devices[0])
        for tensor in (x, on_cpu):
            change(tensor)
        assert (x.shape, x.stride()) == (on_cpu.shape, on_cpu.stride())
        assert x.storage_offset() == on_cpu.storage_offset()
        assert x.add_(1).tolist() == on_cpu.add_(1).tolist()


# After the context.


USES: dict[str, Callable[[Tensor], Any]] = {
    "cpu": Tensor.cpu,
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "add": lambda x: x + 1,
    "view": lambda x: x.view(-1),
    "copy to it": lambda x: x.copy_(torch.zeros(3)),
    "copy from it": lambda x: torch.zeros(3).copy_(x),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda x: torch.save(x, io.BytesIO()),
}


@pytest.mark.filterwarnings("ignore:tensors outlive:ResourceWarning")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize(
    ("another", "reason"),
    [
        (nullcontext, "context has ended|no emulated devices here"),
        (lambda: emulate_devices(2), "was on lazy:1, whose .* context has ended"),
    ],
    ids=["in none", "in another"],
)
def test_no_tensor_works_after_its_context(use, another, reason):
    with emulate_devices(2) as devices:
        x = torch.ones(3, device=devices[1])
    with another(), pytest.raises(EmulationError, match=reason):
        use(x)
    assert x.shape == (3,)


def test_parameters_get_other_data(emulated):
    """On emulated devices ``p.data = x`` changed the shape that was shown and not the numbers."""
    parameter = nn.Parameter(torch.zeros(10, device=emulated[0]))
    parameter.data = torch.ones(20, device=emulated[1])
    assert parameter.shape == (20,)
    assert parameter.device == emulated[1]
    assert parameter.sum().item() == 20
    memory = torch.get_device_module(emulated[0])
    assert [memory.memory_allocated(device) for device in emulated[:2]] == [0, 512]
    module = nn.Linear(3, 2).to(emulated[0])
    vector = torch.arange(8.0, device=emulated[0])
    nn.utils.vector_to_parameters(vector, module.parameters())
    assert nn.utils.parameters_to_vector(module.parameters()).tolist() == list(range(8))


def test_loading_while_a_graph_is_alive(emulated):
    """As restoring the best weights does, with the last loss still in a variable."""
    module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)).to(emulated[0])
    weight = module[1].weight
    state = {name: value.cpu() + 1 for name, value in module.state_dict().items()}
    _loss = module(torch.ones(8, 4, device=emulated[0])).sum()
    module.load_state_dict(state)
    assert module[1].weight is weight
    assert torch.equal(weight.cpu(), state["1.weight"])


def test_tensors_go_to_the_meta_device(emulated):
    x = torch.ones(3, 2, device=emulated[0])
    for described in (x.to("meta"), torch.empty_like(x, device="meta")):
        assert described.device.type == "meta"
        assert described.shape == (3, 2)


@pytest.mark.parametrize("location", [torch.device, str], ids=["device", "name"])
def test_checkpoints_load_to_a_device(location):
    file = io.BytesIO()
    torch.save(torch.arange(3.0), file)
    file.seek(0)
    with emulate_devices(2) as devices:
        loaded = torch.load(file, map_location=location(devices[1]))
        assert (loaded.device, loaded.tolist()) == (devices[1], [0, 1, 2])
        assert torch.get_device_module("lazy").memory_allocated(devices[1]) == 512
        file = io.BytesIO()
        torch.save({"weight": loaded}, file)
        file.seek(0)
        del loaded
    assert torch.load(file)["weight"].tolist() == [0, 1, 2]
