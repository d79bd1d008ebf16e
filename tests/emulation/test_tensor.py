"""Test that programs compute on emulated devices what they do on the CPU, and fail as on CUDA."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from balanced_dp import EmulationError, emulate_devices

from .models import MODELS, assert_same_outcome, train

CPU = torch.device("cpu")

# Code that mixes devices.

MIXTURES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "matmul": lambda x, y: x @ y,
    "linear": F.linear,
    "stack of numbers": lambda x, y: torch.stack([x.sum(), y.sum()]),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 0.0),
    "embedding": lambda x, y: F.embedding(x.long(), y),
    "out": lambda x, y: torch.add(x, 1, out=y),
    "written by index": lambda x, y: x.index_put_((x[0].long(),), y),
}


@pytest.mark.parametrize("mix", MIXTURES.values(), ids=MIXTURES)
@pytest.mark.parametrize("pair", [(0, 1), (0, None), (None, 0)])
def test_mixed_devices_fail_as_on_cuda(devices, mix, pair):
    x, y = (torch.zeros(2, 2, device="cpu" if i is None else devices[i]) for i in pair)
    before = torch.lazy.memory_allocated(0)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as e:
        mix(x, y)
    assert "lazy:0" in str(e.value)
    assert ("cpu" if None in pair else "lazy:1") in str(e.value)
    del e
    assert torch.lazy.memory_allocated(0) == before


def test_some_cpu_tensors_may_be_mixed_in(devices):
    """Numbers may, unless they are written to, and indices of a device's tensors."""
    x, index = torch.arange(3.0, device=devices[0]), torch.tensor([2, 1])
    assert x[index].tolist() == [2, 1]
    for mix in (
        lambda: torch.tensor(2.0).add_(x.sum()),
        lambda: torch.arange(3.0)[index.to(devices[0])],
        lambda: x[index.to(devices[1])],
    ):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            mix()


# Programs, which get a device and return what they have computed.


def cpu_numbers(d: Any) -> Any:
    x, two = torch.arange(3.0, device=d), torch.tensor(2.0)
    x[1] = two
    return x * two + two, two + two * x, torch.where(x > 0, x, two), x.clamp(max=two).mul_(two)


def cpu_indices(d: Any) -> Any:
    x = torch.arange(4.0, device=d)
    yield x[torch.tensor([3, 1])]
    x[torch.tensor([0, 1])] = torch.tensor([5.0, 6.0], device=d)
    yield x


def sparse_gradients(d: Any) -> Any:
    module = nn.Embedding(10, 4, sparse=True, dtype=torch.float64).to(d)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    index = torch.tensor([[1, 2, 1], [7, 7, 0]]).to(d)
    for step in range(6):  # in pairs, which accumulate
        module(index).pow(2).sum().backward()
        assert module.weight.grad.is_sparse
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return module.weight


def packed_sequence(d: Any) -> Any:
    module = nn.LSTM(3, 5, bidirectional=True).to(d, torch.float64)
    x = torch.randn(4, 3, 3, dtype=torch.float64).to(d).requires_grad_()
    lengths = torch.tensor([2, 4, 3])
    packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
    assert (packed.data.device, packed.batch_sizes.device) == (x.device, lengths.device)
    output, _ = nn.utils.rnn.pad_packed_sequence(module(packed)[0])
    output.pow(2).sum().backward()
    return output, x.grad, module.weight_ih_l0.grad


def conjugates(d: Any) -> Any:
    """Operators once ignored the conjugate bit of their inputs."""
    z = torch.tensor([1 + 2j, 3 - 1j]).to(d).requires_grad_()
    value = (z * z.conj()).sum() + (z[None] @ z[None].mH).sum() + z.exp().abs().sum()
    value = value + F.linear(z[None] * 1j, z[None]).sum()
    value.abs().backward()
    return value, z.grad, z.conj().imag


def gradients_of_views(d: Any) -> Any:
    x = torch.arange(6.0, device=d).view(2, 3).requires_grad_()
    y = x * 1
    y.t_().unsqueeze_(0)
    (y * torch.arange(6.0, device=d).view(1, 3, 2)).sum().backward()
    return x.grad


def shared_gradients(d: Any) -> Any:
    """A gradient must not change in place while it, or a view of it, waits for another node."""
    leaves = [torch.ones(2, 2, device=d).requires_grad_() for _ in range(4)]
    for waits, added, cut in ((*leaves[:2], lambda x: x), (*leaves[2:], lambda x: x.view(2, 2))):
        late, early = waits * 2, added * 2
        other = early * 3
        ((cut(early) + late).square().sum() + other.square().sum()).backward()
    return [leaf.grad for leaf in leaves]


def forward_mode(d: Any) -> Any:
    """For zero tangents, forward-mode AD needs ``_efficientzerotensor``, which was missing."""
    w, x = torch.arange(6.0, device=d).view(2, 3), torch.ones(3, device=d)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x.clone().requires_grad_(), x)
        yield forward_ad.unpack_dual(F.linear(dual, w.clone().requires_grad_())).tangent
    yield torch.func.jvp(lambda x: 2 * (w @ x) + w.sum(), (x,), (x,))


def gradients_of_gradients(d: Any) -> Any:
    def function(x, weight, bias, row):
        outputs = F.layer_norm(F.linear(x, weight, bias).tanh(), (2,)).softmax(-1)
        return outputs * F.linear(x, row)[..., None], F.linear(x[0], weight, outputs[0])

    sizes = (2, 3, 4), (2, 4), (2,), (4,)
    args = [torch.randn(n, dtype=torch.float64).to(d).requires_grad_() for n in sizes]
    assert torch.autograd.gradcheck(function, args) and torch.autograd.gradgradcheck(function, args)


def empty_layers(d: Any) -> Any:
    for size in ((2, 0), (0, 3)):
        weight = torch.zeros(size, device=d, requires_grad=True)
        F.linear(torch.zeros(4, size[1], device=d, requires_grad=True), weight).sum().backward()
        yield weight.grad


def quantization(d: Any) -> Any:
    """A fused kernel resizes buffers of an observer, whose wrappers once kept the old shape."""
    quantize = pytest.importorskip("torch.ao.quantization")
    observer = quantize.get_default_qat_qconfig("fbgemm").weight().to(d)
    observer(torch.randn(4, 2).to(d))
    return dict(observer.state_dict())


def values_read(d: Any) -> Any:
    for dtype in (torch.float64, torch.int64, torch.bool, torch.complex64):
        x = torch.tensor([[0, 1], [2, 3]]).to(dtype).to(d)
        yield x.tolist(), x[1, 0].item(), bool(x[0, 1]), x.numpy(force=True).tolist()
        yield f"{torch.tensor(2.5, device=d):.2f}"


def deep_copies(d: Any) -> Any:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)).to(d)
    module[2].weight = module[0].weight
    module(torch.randn(4, 3).to(d)).sum().backward()
    twin = copy.deepcopy(module)
    assert twin[2].weight is twin[0].weight is not module[0].weight
    assert isinstance(twin[0].weight, nn.Parameter) and twin[0].weight.grad is None  # as torch's
    shallow = copy.copy(module[0].bias)
    assert isinstance(shallow, nn.Parameter)
    with torch.no_grad():
        twin[0].weight.zero_()
        shallow.data.add_(1.0)
    return dict(module.state_dict()), dict(twin.state_dict())


def hooks(d: Any) -> Any:
    layer, calls = nn.Linear(2, 2), []
    layer.weight.tag = "slow"
    handle = layer.weight.register_hook(lambda grad: grad * 100)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: calls.append("bias"))
    weight = layer.weight
    for place in (d, "cpu"):
        layer.to(place).zero_grad()
        layer(torch.ones(1, 2, device=place)).sum().backward()
        assert layer.weight is weight and layer.weight.tag == "slow"
        assert isinstance(weight, nn.Parameter) and (place is d or type(weight) is nn.Parameter)
        yield layer.weight.grad, list(calls)
        handle.remove()


def other_data(d: Any) -> Any:
    """``p.data = x`` once changed the shape of ``p``, but not its values."""
    parameter = nn.Parameter(torch.zeros(10, device=d))
    parameter.data = torch.ones(20, device=d)
    module = nn.Linear(3, 2).to(d)
    nn.utils.vector_to_parameters(torch.arange(8.0, device=d), module.parameters())
    return parameter, parameter.sum(), nn.utils.parameters_to_vector(module.parameters())


def loading_beside_a_graph(d: Any) -> Any:
    """Load weights while a variable still holds the last loss and its graph.

    Scripts that restore the best weights after training do this.
    """
    module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)).to(d)
    weight = module[1].weight
    state = {name: value.cpu() + 1 for name, value in module.state_dict().items()}
    _loss = module(torch.ones(8, 4, device=d)).sum()
    module.load_state_dict(state)
    assert module[1].weight is weight
    return weight


def training(name: str, d: Any) -> Any:
    trained = train(MODELS[name], d)
    assert len(trained.losses) == len({loss.item() for loss in trained.losses})  # it trains
    assert {p.device for p in trained.module.parameters()} == {torch.device(d)}
    return trained.losses, dict(trained.module.state_dict())


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    program.__name__: program
    for program in (
        *(cpu_numbers, cpu_indices, sparse_gradients, packed_sequence, conjugates),
        *(gradients_of_views, shared_gradients, forward_mode, gradients_of_gradients),
        *(values_read, deep_copies, hooks, other_data, loading_beside_a_graph, quantization),
        empty_layers,
    )
} | {name: partial(training, name) for name in MODELS}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by which torch makes decompositions
@pytest.mark.filterwarnings("ignore:torch.ao.quantization", "ignore:.*reduce_range")
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_programs_as_on_the_cpu(devices, program):
    assert_same_outcome(program, devices[1])


def test_normal_tensors_in_inference_mode(devices):
    x = torch.zeros(2, 3, device=devices[0])
    with torch.inference_mode():
        x.t()[0].add_(1)
    assert x.add_(1).tolist() == [[2, 1, 1]] * 2 and not x.is_inference()


def test_the_bytes_of_sparse_gradients(devices):
    module = nn.Embedding(1000, 64, sparse=True).to(devices[0])
    index = torch.arange(100, device=devices[0])
    before = torch.lazy.memory_allocated(0)
    for num_passes in (1, 2, 3):
        module(index).sum().backward()
        sizes = (num_passes * num_bytes for num_bytes in (100 * 8, 100 * 64 * 4))
        rounded = sum(-(-size // 512) * 512 for size in sizes)
        assert torch.lazy.memory_allocated(0) - before == rounded


# Files.


def test_pickle_makes_cpu_tensors(devices):
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(devices[0])
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded[0].weight) is nn.Parameter
    assert {t.device.type for t in loaded.state_dict().values()} == {"cpu"}
    torch.testing.assert_close(loaded[0].weight, module[0].weight.cpu())
    assert not pickle.loads(pickle.dumps(torch.ones(2, device=devices[0]))).requires_grad


@pytest.mark.parametrize("as_cuda", [False, True], ids=["lazy", "cuda"])
def test_checkpoints_load_to_a_device(as_cuda, emulate, tmp_path):
    """Files load on the CPU by default, unless the devices are named cuda.

    Tensors that were loaded to a device could not be saved, and counted as activations.
    """
    devices, path = emulate(4, as_cuda=as_cuda), tmp_path / "model.pt"
    kind, (_, model, optimizer) = devices[0].type, train(MODELS["tied weights"], devices[1])
    torch.save([model.state_dict(), optimizer.state_dict(), torch.arange(3)], path)
    weights, states, epoch = torch.load(path)  # with weights_only, its default
    where = [x.device for x in (weights["0.weight"], states["state"][0]["exp_avg"], epoch)]
    assert where == [devices[1] if as_cuda else CPU] * 2 + [CPU]
    assert bool(torch.lazy.memory_breakdown(devices[1]).now["other"]) == as_cuda
    assert weights["0.weight"].data_ptr() == weights["1.weight"].data_ptr()
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    assert optimizer.state[model[0].weight]["exp_avg"].device == devices[1]
    by_cuda = [(lambda storage, place: storage.cuda(2), devices[2])] if as_cuda else []
    for location, device in (
        ("cpu", CPU),
        (f"{kind}:2", devices[2]),
        (torch.device(kind), devices[0]),
        ({"cuda:1": "cuda:3", "cpu": f"{kind}:3"}, devices[3]),
        (lambda storage, place: storage, CPU),
        *by_cuda,
    ):
        weight = torch.load(path, map_location=location)[0]["0.weight"]
        assert weight.device == device
        assert torch.equal(weight.cpu(), model[0].weight.detach().cpu())
        torch.save(weight, tmp_path / "again.pt")
    with pytest.raises(EmulationError, match=f"no emulated device {kind}:9"):
        torch.load(path, map_location=f"{kind}:9")


# Attributes and representations of tensors.


def test_tensors_say_where_they_are(devices):
    x = torch.zeros(2, 3, device=devices[1])
    assert (x.device, x.get_device(), x.is_cuda, x.is_cpu) == (devices[1], 1, False, False)
    assert (x.shape, x.stride(), x.nbytes, x.untyped_storage().nbytes()) == ((2, 3), (3, 1), 24, 24)
    assert x.to(devices[1]) is x
    for described in (x.to("meta"), torch.empty_like(x, device="meta")):
        assert (described.device.type, described.shape) == ("meta", (2, 3))
    assert repr(x[0]) == str(x[0]) == f"{x[0]}" == "tensor([0., 0., 0.], device='lazy:1')"
    text = "tensor([1.], dtype=torch.float64, device='lazy:1', requires_grad=True)"
    assert repr(torch.ones(1, dtype=torch.float64, device=x.device, requires_grad=True)) == text
    assert f"{x.sum() + 2.5:>6} {x.sum()}" == f"   2.5 {torch.tensor(0.0)}"


def test_moved_data_is_counted_there(devices):
    parameter = nn.Parameter(torch.zeros(10, device=devices[0]))
    parameter.data = torch.ones(20, device=devices[1])
    assert parameter.device == devices[1]
    assert [torch.lazy.memory_allocated(device) for device in devices[:2]] == [0, 512]


def test_views_share_an_address(device):
    """Safetensors compares addresses to find tied weights, so that Trainer could not save any.

    In symbolic mode all of them were 0, and it took all weights for tied ones.
    """
    x, other = torch.zeros(2, 3, device=device), torch.zeros(2, 3, device=device)
    addresses = [tensor.untyped_storage().data_ptr() for tensor in (x, x[1:].t(), other)]
    assert addresses[0] == addresses[1] != addresses[2]
    assert addresses[0] == x.data_ptr() == x[1:].data_ptr() - 3 * 4


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), np.asarray])
def test_numpy_takes_it_from_the_cpu_only(devices, convert):
    x = torch.ones(2, device=devices[0])
    with pytest.raises(TypeError, match=r"can't convert lazy:0 .* to numpy. Use Tensor.cpu\(\)"):
        convert(x)


# After the context.


USES: dict[str, Callable[[Tensor], Any]] = {
    "cpu": Tensor.cpu,
    "item": lambda x: x[0].item(),
    "copy to it": lambda x: x.copy_(torch.zeros(3)),
    "copy from it": lambda x: torch.zeros(3).copy_(x),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}


@pytest.mark.filterwarnings("ignore:tensors outlive:ResourceWarning")
@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("another", [nullcontext, partial(emulate_devices, 2)])
def test_no_tensor_works_after_its_context(use, another):
    with emulate_devices(2) as devices:
        x = torch.ones(3, device=devices[1])
    reasons = "was on lazy:1, whose .* context has ended", "no emulated devices here"
    reason = "|".join(reasons[: 1 + (another is nullcontext)])
    with another(), pytest.raises(EmulationError, match=reason):
        use(x)
    assert x.shape == (3,)
