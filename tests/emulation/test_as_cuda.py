"""Test emulated devices under the name "cuda", and functions that exist for either name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from balanced_dp import EmulationError, SymbolicValueError, emulate_devices
from balanced_dp.emulation.machine import current_machine
from balanced_dp.memory.peaks import Peaks

from ..at_once import at_once
from ..versions import since_torch

CUDA0, CUDA1 = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def devices(emulate: Callable[..., Any]) -> Any:
    return emulate(4, memory="64MiB", as_cuda=True)


ON_CUDA_1: dict[str, Callable[[], torch.Tensor]] = {
    "zeros": lambda: torch.zeros(2, device="cuda:1"),
    "normal": lambda: torch.normal(0.0, 1.0, (2,), device="cuda:1"),
    "kaiser_window": lambda: torch.kaiser_window(2, device="cuda:1"),
    "histc": lambda: torch.ones(4, dtype=torch.int32, device="cuda:1").histc(2),
    "torch.device of an int": lambda: torch.zeros(2, device=torch.device(1)),
    "fftfreq": lambda: torch.fft.fftfreq(2, device=torch.device(type="cuda", index=1)),
    "new_zeros": lambda: torch.zeros(3).new_zeros(2, device="cuda:1"),
    "new_tensor": lambda: torch.zeros(3, device=1).new_tensor([1.0, 2.0]),
    "new": lambda: torch.zeros(3, device=1).new(2),
    "to": lambda: torch.ones(2).to("cuda:1"),
    "to a device": lambda: torch.ones(2).to(CUDA1, torch.float64, non_blocking=True),
    "to that of another": lambda: torch.ones(2).to(torch.ones(1, device=1)),
    "cuda": lambda: torch.ones(2).cuda(1),
    "a parameter": lambda: nn.Linear(1, 2).cuda(1).bias,
    "a packed sequence": lambda: nn.utils.rnn.pack_sequence([torch.ones(2)]).to("cuda:1").data,
}


@pytest.mark.parametrize("make", ON_CUDA_1.values(), ids=ON_CUDA_1)
def test_every_way_to_name_a_device(make, devices):
    tensor = make()
    assert (tensor.device, devices[1], tensor.shape) == (CUDA1, CUDA1, (2,))
    assert tensor.is_cuda and tensor.get_device() == 1
    assert tensor.type().startswith("torch.cuda.")
    assert "device='cuda:1'" in repr(tensor)
    assert torch.cuda.memory_allocated(1) > 0
    assert tensor.to("cuda:1") is tensor.cuda(1) is tensor.to(1) is tensor


def test_default_devices(devices):
    with torch.device("cuda:1"):
        assert torch.zeros(2).device == torch.tensor([1.0]).device == CUDA1
    torch.set_default_device("cuda")
    assert torch.get_default_device() == nn.Linear(2, 2).weight.device == CUDA0
    torch.set_default_device(None)
    assert torch.zeros(2).device.type == "cpu"


def test_types_by_their_old_names(devices):
    made = torch.cuda.FloatTensor(2, 3)
    assert (made.device, made.dtype, made.shape) == (CUDA0, torch.float32, (2, 3))
    # tensorboardX refused a tensor of another class.
    assert made.type() == "torch.cuda.FloatTensor" and str(type(made)).startswith("<class 'torch.")
    is_float = [isinstance(x, torch.cuda.FloatTensor) for x in (made, made.half(), made.cpu())]
    assert is_float == [True, False, False]
    assert torch.cuda.LongTensor([1, 2]).tolist() == [1, 2]
    assert torch.cuda.FloatTensor(made.size()).shape == (2, 3)
    for kind in (torch.cuda.HalfTensor, "torch.cuda.HalfTensor"):
        assert torch.ones(2).type(kind).dtype == torch.float16
    assert made.type(torch.FloatTensor).device.type == "cpu"


@pytest.mark.filterwarnings("ignore:torch.set_default_tensor_type")
def test_default_tensor_type(devices):
    """It did not reach other threads, nor ``torch.Tensor([...])``."""
    torch.set_default_tensor_type("torch.cuda.DoubleTensor")
    for make in (lambda: torch.zeros(2), lambda: torch.Tensor([1, 2]), lambda: torch.Tensor(2)):
        made = [make(), *at_once(lambda _, make=make: make())]
        assert {(x.device, x.dtype, x.shape) for x in made} == {(CUDA0, torch.float64, (2,))}
    with torch.device("cpu"):
        assert torch.zeros(1).device.type == "cpu"
    torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.zeros(1).device.type == torch.Tensor(1).device.type == "cpu"


class Named(torch.Tensor):
    """A tensor subclass that operators return again, as those of fastai and torchvision do."""


@pytest.mark.parametrize("moves_first", [False, True])
def test_subclasses(moves_first, devices):
    """They failed with "the raw Tensor object is already associated to a python object"."""
    x = torch.ones(2).cuda(1).as_subclass(Named)
    if not moves_first:
        x = torch.ones(2).as_subclass(Named).cuda(1)
    for y in (x, x + 1, torch.relu(x)[:1], x.detach(), x.to(2)):
        assert isinstance(y, Named) and y.is_cuda
    x.requires_grad_()
    (x * 3).as_subclass(torch.Tensor).sum().backward()
    assert x.grad.tolist() == [3, 3]
    assert type(x.cpu()) is Named
    emulated = type(torch.ones(2).cuda())  # fastai calls this with the class of the source
    assert not isinstance(x.cpu().as_subclass(emulated), emulated)


class Copied(torch.Tensor):
    """Results of operators get the attributes of the first argument, as with fastai's tensors."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Copied):
            result.__dict__ = vars(args[0]).copy()
        return result


def test_a_class_that_copies_attributes(devices):
    """Results had the data of their arguments."""
    with pytest.raises(EmulationError, match="a Copied cannot be on an emulated device"):
        torch.ones(2).as_subclass(Copied).cuda(1)


def test_nested_tensors(devices):
    parts = [torch.ones(2, 3), torch.ones(1, 3)]
    x = torch.nested.nested_tensor(parts, device="cuda:1", layout=torch.jagged)
    assert x.device == CUDA1 and (x * 2).values().sum().item() == 18


@torch.no_grad()
def test_an_encoder_with_padding_in_evaluation(devices):
    """It made a nested tensor, and torch asked to file an issue."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, batch_first=True), 1).cuda()
    encoder.eval()(torch.ones(1, 2, 4).cuda(), None, torch.eye(2)[:1].bool().cuda())


def test_memory(devices):
    torch.ones(1000, device="cuda:1")
    peaks = Peaks([CUDA1])
    assert "Allocated memory      |      0 B   |   4096 B" in torch.cuda.memory_summary(1)
    torch.ones(100, device="cuda:1")
    torch.cuda.reset_peak_memory_stats(1)
    assert peaks.of(CUDA1)[0] == 512  # scripts do not disturb what is measured


def test_properties(devices):
    assert torch.cuda.is_available() and torch.cuda.is_initialized()
    assert torch.cuda.get_device_capability() == (8, 0) and torch.cuda.is_bf16_supported()
    assert torch.get_device_module("cuda") is torch.cuda
    assert torch.device | None  # in annotations
    assert torch.version.cuda.split(".")[0].isdecimal()  # Transformer-XL takes it apart on import


@since_torch("2.6")
def test_the_accelerator(devices):
    torch.cuda.set_device("cuda:3")
    assert (torch.accelerator.current_device_index(), torch.accelerator.device_count()) == (3, 4)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")


def test_streams_and_events(devices):
    stream = torch.cuda.Stream(device=1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.stream(stream):
        assert torch.cuda.current_device() == 1
        torch.ones(2, device="cuda:1").record_stream(stream)
    torch.cuda.current_stream(1).wait_stream(stream)
    end.record(stream)
    torch.cuda.synchronize()
    assert start.elapsed_time(end) >= 0 and stream.query() and end.query()


def test_a_profile_of_cuda_is_of_the_cpu(devices, capfd):
    """Each operator printed that it failed to record an event, with 400 lines of C++ frames."""
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=both) as profile:
        torch.ones(3, device=devices[1]).sum()
    assert "aten::sum" in profile.key_averages().table()
    assert "CUDA event" not in capfd.readouterr().err


def test_random_numbers(devices):
    torch.manual_seed(5)
    drawn = torch.randn(3, device="cuda").tolist()
    states = torch.cuda.get_rng_state_all()
    again = torch.randn(3, device="cuda")
    torch.cuda.set_rng_state_all(states)
    with torch.random.fork_rng(devices=[0]):
        assert torch.randn(3, device="cuda").tolist() == again.tolist()
    assert torch.randn(3, device="cuda").tolist() == again.tolist()
    generator = torch.Generator(device="cuda:1").manual_seed(5)
    assert generator.device == CUDA1 and isinstance(generator, torch.Generator)
    assert torch.randn(3, device=1, generator=generator).tolist() == drawn
    torch.cuda.seed_all()
    assert torch.cuda.initial_seed() == torch.cuda.default_generators[0].initial_seed()


def test_pinned_memory(devices):
    loader = torch.utils.data.DataLoader(torch.arange(8.0), 4, pin_memory=True, num_workers=1)
    batches = [x.cuda(non_blocking=True).tolist() for x in loader]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_mixed_precision_training(devices):
    scaler = torch.amp.GradScaler("cuda")
    model = nn.Linear(4, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    weights = [model.weight.tolist()]
    turn, is_on = torch.set_autocast_enabled, torch.is_autocast_enabled
    assert [turn(on) or is_on() for on in (True, False)] == [True, False]  # of emulated GPUs
    for dtype, fill in ((torch.bfloat16, 1.0), (torch.float16, torch.inf)):
        with torch.autocast("cuda", dtype):
            assert torch.is_autocast_enabled() and torch.is_autocast_enabled("cuda")
            output = model(torch.full((2, 4), fill, device="cuda"))
        assert output.dtype == dtype and not torch.is_autocast_enabled("cuda")
        scaler.scale(output.float().sum()).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)  # the second is skipped: the gradients are not finite
        scaler.update()
        weights.append(model.weight.tolist())
    assert weights[0] != weights[1] == weights[2] and scaler.is_enabled()


def test_processes_cannot_be_spawned(devices):
    with pytest.raises(EmulationError, match="spawned processes cannot use emulated devices"):
        torch.multiprocessing.spawn(print)


@since_torch("2.6")
@pytest.mark.filterwarnings("ignore:Attempted to get default timeout for nccl")
def test_there_is_no_nccl(devices):
    """PyTorch's example asks torch which backend to use."""
    with pytest.raises(RuntimeError, match="NCCL"):
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    cuda = torch.device("cuda")
    assert torch.distributed.get_default_backend_for_device(cuda) == "gloo"


def attributes() -> dict[str, Any]:
    """Return the identity of each attribute of torch's modules and of patched classes, by name."""
    owners = [m for name, m in sys.modules.items() if name.partition(".")[0] == "torch"]
    owners += [torch.Tensor, torch.UntypedStorage, nn.Module, torch.amp.GradScaler]
    owners += [torch.distributed.Backend, torch.utils._device.DeviceContext]
    return {
        f"{owner} {name}": id(value)
        for owner in owners
        for name, value in vars(owner).items()
        if not name.startswith("__") or name in ("__init__", "__torch_function__")
    }


@pytest.mark.parametrize("as_cuda", [False, True])
def test_torch_is_as_before_afterwards(as_cuda):
    has_cuda = torch.cuda.is_available()
    with emulate_devices(1, as_cuda=as_cuda):
        pass  # what is made on first use is made now
    before = attributes()
    with suppress(KeyError), emulate_devices(2, as_cuda=as_cuda, symbolic=True):
        assert len(set(attributes().items()) - set(before.items())) > (100 if as_cuda else 10)
        if as_cuda:
            torch.set_default_device("cuda")
        raise KeyError
    assert attributes() == before
    assert torch.empty(0).device.type == "cpu"
    assert torch.cuda.is_available() == has_cuda


def test_the_constructor_keeps_its_signature(devices):
    """Dynamo compares it, and failed if its first import was here."""
    assert str(inspect.signature(torch.Tensor.__new__)) == "(*args, **kwargs)"


@pytest.mark.filterwarnings("ignore:.*jit.script")
def test_transforms_know_the_factories(devices):
    cubes = torch.func.hessian(lambda x: (x**3).sum())
    assert cubes(torch.ones(2)).tolist() == [[6, 0], [0, 6]]
    assert torch.jit.script(with_zeros)(torch.ones(2)).tolist() == [1, 1]


def with_zeros(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(2, device=x.device)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_old_ways(devices):
    scalar = torch.ones((), device="cuda")
    assert torch.tensor([scalar, 2 * scalar]).tolist() == [1, 2]
    assert torch.FloatTensor([scalar]).tolist() == [1]
    convolution = nn.utils.weight_norm(nn.Conv1d(4, 4, 3)).cuda()
    assert convolution(torch.ones(1, 4, 5, device="cuda")).device == CUDA0
    embedding = nn.Embedding(10, 3, sparse=True).cuda()
    embedding(torch.tensor([1, 2], device="cuda")).sum().backward()
    before = embedding.weight.detach().clone()
    torch.optim.SparseAdam(embedding.parameters()).step()
    assert (embedding.weight != before).any(1).tolist() == [False, True, True, *[False] * 7]


# Shapes only.


def test_a_scaler_of_unknown_gradients(emulate):
    emulate(1, as_cuda=True, symbolic=True)
    parameter = nn.Parameter(torch.ones(2, device="cuda"))
    optimizer = torch.optim.AdamW([parameter])
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert optimizer.state[parameter]


def test_unknown_numbers_are_nan(emulate):
    emulate(1, as_cuda=True, symbolic=True)
    loss = torch.ones(3, device="cuda").mean()
    current_machine().reads_unknown_as_nan = True
    assert f"{loss:.2f} {loss.item():.2f} {float(loss)} {loss.tolist()}" == "nan nan nan nan"
    assert loss.cpu().isnan()
    assert not loss < 9 and not loss.isnan() and (loss > 0).item() is False
    with pytest.raises(SymbolicValueError):
        torch.ones(3, device="cuda").argmax().cpu()


# The module of the devices, whatever their name.


@pytest.fixture(params=[False, True], ids=["lazy", "cuda"])
def either(request: pytest.FixtureRequest, emulate: Callable[..., Any]) -> Any:
    """Three emulated devices named "lazy" or "cuda". The last one has only 4 KiB of memory."""
    return emulate(3, memory=["1MiB", "1MiB", 4096], as_cuda=request.param)


def test_no_devices_outside_of_a_context():
    with emulate_devices(2):
        lazy = torch.lazy
        assert (lazy.is_available(), lazy.device_count()) == (True, 2)
    assert (lazy.is_available(), lazy.device_count()) == (False, 0)
    for function in (lazy.current_device, lazy.memory_allocated, lazy.synchronize):
        with pytest.raises(EmulationError, match=r"inside the block of emulate_devices"):
            function()
    with pytest.raises(EmulationError, match=r"inside the block of emulate_devices"):
        torch.zeros(1, device="lazy")


def test_the_current_device(either):
    module = torch.get_device_module(either[0])
    assert module.current_device() == 0
    module.set_device(2)
    assert module.current_device() == 2
    with module.device(str(either[1])):
        assert module.current_device() == 1
        with module.device(None), module.device(either[0]):
            assert module.current_device() == 0
        assert module.current_device() == 1
        module.set_device(0)
    assert module.current_device() == 2
    kind = either[0].type
    x = torch.zeros(1, device=kind)
    assert x.device == torch.zeros(1).to(kind).device == either[2]
    assert module.memory_allocated() == module.memory_allocated(2) == 512


@pytest.mark.parametrize("name", [lambda device: device.index, str, torch.device])
def test_memory_of_devices_named_any_way(either, name):
    """The names of the statistics are CUDA's."""
    device, module = name(either[1]), torch.get_device_module(either[0])
    kept = torch.zeros(256, device=either[1])
    _ = kept.exp().sin()
    assert module.memory_allocated(device) == module.memory_reserved(device) == 2 * 1024
    assert module.max_memory_allocated(device) == module.max_memory_reserved(device) == 3 * 1024
    stats = module.memory_stats(device)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        sizes = [stats[f"{kind}.all.{key}"] for key in ("current", "peak", "allocated", "freed")]
        assert sizes == [2 * 1024, 3 * 1024, 3 * 1024, 1024]
    assert (stats["num_ooms"], stats["num_alloc_retries"]) == (0, 0)
    assert module.mem_get_info(device) == (2**20 - 2 * 1024, 2**20)
    assert module.get_device_name(device) == "Emulated device 1"
    assert module.memory_allocated() == 0
    module.reset_peak_memory_stats(device)
    assert module.max_memory_allocated(device) == 2 * 1024
    module.synchronize(device)
    module.empty_cache()
    assert module.memory_allocated(device) == 2 * 1024


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (3, "no emulated device lazy:3, because num_devices=3; raise it"),
        (-1, "no emulated device lazy:-1"),
        ("cpu", "cpu is not an emulated device"),
    ],
)
def test_no_such_device(emulate, device, reason):
    devices, module = emulate(3), torch.lazy
    names = """memory_allocated max_memory_allocated reset_peak_memory_stats memory_stats
        mem_get_info get_device_properties set_device device synchronize get_rng_state"""
    for function in (*(getattr(module, name) for name in names.split()), devices.memory_breakdown):
        with pytest.raises(EmulationError, match=reason):
            function(device)
    assert module.current_device() == 0


def test_a_tensor_on_no_such_device(either):
    missing = f"{either[0].type}:3"
    for call in (lambda: torch.zeros(1, device=missing), lambda: torch.zeros(1).to(missing)):
        with pytest.raises(EmulationError, match=f"no emulated device {missing}"):
            call()


# Random numbers.


def test_a_context_continues_torchs_seed():
    def drawn(seed):
        torch.manual_seed(seed)
        with emulate_devices(1) as devices:
            return torch.rand(3, device=devices[0]).tolist()

    assert drawn(1) == drawn(1) != drawn(2)
