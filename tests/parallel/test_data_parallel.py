"""The wrapper is an nn.DataParallel, and names what cannot be used."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_map

from balanced_dp import (
    ArgumentError,
    ArgumentTypeError,
    BalancedDataParallel,
    BalanceWarning,
    ScatterError,
    emulate_devices,
)
from balanced_dp import balanced_data_parallel as data_parallel
from balanced_dp.devices import default_device_type

from ..modules import Lambda, assert_same_gradients
from ..notes import notes_of


def wrap(devices, gpu0_bsz=1, module=None, **options):
    module = nn.Linear(4, 2) if module is None else module
    return BalancedDataParallel(gpu0_bsz, module.to(devices[0]), device_ids=devices, **options)


# It is an nn.DataParallel.


def test_it_is_an_nn_data_parallel(emulated):
    """Arguments and attributes are those of torch's class."""
    pairs = (nn.DataParallel, BalancedDataParallel), (nn.parallel.data_parallel, data_parallel)
    for theirs, ours in pairs:
        names = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(names) + 1] == ["gpu0_bsz", *names]
    module = nn.Linear(4, 2).to(emulated[1])
    parallel = BalancedDataParallel(1, module, emulated[1:4], emulated[2], 1)
    assert isinstance(parallel, nn.DataParallel) and parallel.module is module
    assert (parallel.device_ids, parallel.output_device, parallel.dim) == ([1, 2, 3], 2, 1)
    assert (parallel.src_device_obj, parallel.devices) == (emulated[1], emulated[1:4])


def test_attributes_without_an_accelerator(no_accelerator):
    """Stock returns from its constructor before it sets dim and output_device, so code that reads
    them fails on a machine without GPUs only.
    """
    for device in ("cpu", "meta"):  # or MPS: the call is where the module is
        module = nn.Linear(4, 2, device=device)
        parallel = BalancedDataParallel(1, module, dim=1)
        attributes = (parallel.module, parallel.device_ids, parallel.output_device, parallel.dim)
        assert attributes == (module, [], None, 1)
        assert parallel(torch.ones(3, 4, device=device)).device.type == device
        BalancedDataParallel(None, module, device_weights=[1, 2])  # for a machine with two


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_are_independent(duplicate, devices):
    parallel = wrap(devices[:3], broadcast=("inputs.1",), scalar_outputs="sum")
    x = torch.randn(7, 4)
    with torch.no_grad():
        expected = parallel(x)
        twin = duplicate(parallel)
        twin.module.to(devices[0])  # a pickle of emulated tensors is on the CPU
        torch.testing.assert_close(twin(x), expected)
        assert (twin.broadcast, twin.scalar_outputs) == ({"inputs.1"}, "sum")
        twin.module.weight.zero_()
        assert parallel.module.weight.any()


STEPS = ["scatter", "replicate", "parallel_apply", "gather"]


@pytest.mark.parametrize("gpu0_bsz", [0, 1, None])
def test_steps_are_overridden_as_torchs_are(gpu0_bsz, devices):
    """And called one by one, as code does that strings nn.DataParallel's steps together itself."""
    seen = []

    def logged(name):
        theirs = inspect.signature(getattr(nn.DataParallel, name))

        def step(self, *args):
            assert len(args) == len(theirs.parameters) - 1
            seen.append(name)
            return getattr(BalancedDataParallel, name)(self, *args)

        return step

    cls = type("Logged", (BalancedDataParallel,), {name: logged(name) for name in STEPS})
    module = nn.Linear(4, 2).to(devices[0])
    x = torch.randn(7, 4)
    loss = nn.Sequential(module, Lambda(lambda m, h: h.square().mean()))
    for whole in (loss, module):
        model, expected = cls(gpu0_bsz, whole, devices[:3]), whole(x.to(devices[0]))
        torch.testing.assert_close(model(x), expected)
    inputs, kwargs = model.scatter((x,), {}, model.device_ids)
    replicas = model.replicate(module, model.device_ids)
    outputs = model.parallel_apply(replicas, inputs, kwargs)
    torch.testing.assert_close(model.gather(outputs, model.output_device), expected)
    assert seen == STEPS * 3
    assert model.scatter((3,), None, model.device_ids)[0] == [(3,)] * 3


# Devices.


@pytest.mark.parametrize("accelerator", [None, "cuda"])
def test_ints_and_none_mean_emulated_devices(accelerator, monkeypatch):
    """On a machine with GPUs they meant those, and the README's examples failed there."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device(accelerator or "cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with emulate_devices(3) as devices:
        module = nn.Linear(4, 2).to(devices[0])
        for device_ids in (None, [0, 1, 2], ["lazy:0", devices[1], 2]):
            parallel = BalancedDataParallel(1, module, device_ids, 1)
            assert (parallel.devices, parallel.device_ids) == (list(devices), [0, 1, 2])
            assert parallel(torch.randn(7, 4)).device == devices[1]
        assert BalancedDataParallel(1, module, [0, 0])(torch.randn(7, 4)).shape == (7, 2)
        for gpu0_bsz, wrong, message in (
            (1, -1, "there is no device -1: Invalid device string: 'lazy:-1'"),
            (1, 5, "lazy:5 does not exist: torch finds 3 of this type"),
            ("auto", 0, "needs distinct devices .* got .'lazy:0', 'lazy:0'"),
        ):
            with pytest.raises(ArgumentError, match=message):
                BalancedDataParallel(gpu0_bsz, module, [0, wrong])
        del module, parallel
    assert default_device_type() == accelerator


def test_one_device_calls_the_module_itself(devices):
    seen = []
    module = Lambda(lambda m, x, k: seen.append(m) or m.a(x) + k["b"], a=nn.Linear(4, 2))
    parallel = BalancedDataParallel(1, module, devices[:1])
    assert module.a.weight.device == devices[0]
    # Inputs are moved, and not one of them has to be of the batch's size.
    assert parallel(torch.randn(7, 4), k={"b": torch.randn(2)}).device == devices[0]
    assert seen[0] is module


@pytest.mark.parametrize("device_ids", [None, ["cpu"], ["cpu"] * 3])
def test_outputs_go_into_another_model(device_ids, no_accelerator):
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    models = [BalancedDataParallel(1, m, device_ids, gather=False) for m in (first, second)]
    x = torch.randn(8, 3)
    torch.testing.assert_close(models[1](models[0](x)).gather(), second(first(x)))
    torch.testing.assert_close(models[1](input=models[0](x)).gather(), second(first(x)))
    outputs = BalancedDataParallel(1, first, ["cpu"] * 2, gather=False)(x)
    if device_ids is None:
        with pytest.raises(ScatterError, match=r"is PerDevice.* on cpu; gather\(\)"):
            models[1](outputs)


# Arguments.


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (ArgumentTypeError, {"gpu0_bsz": 1.5}, "gpu0_bsz must be an integer, got 1.5"),
        (ArgumentTypeError, {"gpu0_bsz": "Auto"}, "None, or 'auto' .*, got 'Auto'"),
        (ArgumentTypeError, {"module": len}, "must be an nn.Module, got builtin_function"),
        (ArgumentTypeError, {"dim": "0"}, "dim must be an integer, got '0'"),
        (ArgumentError, {"broadcast": "maks"}, "broadcast names 'maks', but the parameters of"),
        (ArgumentError, {"scalar_outputs": "max"}, "scalar_outputs must be one of"),
        (ArgumentError, {"scalar_outputs": "sum", "loss_weight": len}, "not both"),
        (ArgumentError, {"device_weights": [1, 2, 3]}, "2 numbers, one for each device, got 3"),
        (ArgumentTypeError, {"gpu0_bsz": "auto", "device_weights": [1, 2]}, "without device_w"),
        (ArgumentError, {"device_ids": []}, "device_ids is empty"),
        (ArgumentError, {"device_ids": ["gpu:0"]}, "there is no device 'gpu:0': "),
        (ArgumentError, {"device_ids": ["meta", "meta"]}, "there is no device 'meta': "),
        (ArgumentError, {"gpu0_bsz": "auto"}, "count their memory, got .*; give a number"),
        (ArgumentError, {"device_ids": [0, 1]}, "omit device_ids to run without splitting"),
        (ArgumentTypeError, {"device_ids": "cpu"}, "must be a list of devices, got 'cpu'"),
        (ArgumentError, {"device_ids": [1.0]}, "there is no device 1.0: "),
    ],
)
def test_arguments_that_cannot_be_used(error, options, message, no_accelerator):
    options = {"gpu0_bsz": 1, "module": nn.Linear(4, 2), "device_ids": ["cpu"] * 2, **options}
    with pytest.raises(error, match=message):
        BalancedDataParallel(**options)


# Batches and splits.


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((torch.zeros(0, 4),), {}), ((), {}), ((), {"y": "text"}), ((None, torch.tensor(2.0)), {})],
)
def test_without_samples_device_0_runs_one_call(devices, gpu0_bsz, args, kwargs):
    calls = []
    module = Lambda(lambda m, x=None, y=0: calls.append(x) or (x, y), a=nn.Linear(4, 2))
    output = wrap(devices[:4], gpu0_bsz, module)(*args, **kwargs)
    assert {leaf.device for leaf in output if torch.is_tensor(leaf)} <= {devices[0]}
    shown = repr(tree_map(lambda t: t.cpu() if torch.is_tensor(t) else t, output))
    assert shown == repr(module(*args, **kwargs))
    assert len(calls) == 2


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("gpu0_bsz", [25, 3500])
def test_a_gpu0_bsz_without_effect_warns_once(gpu0_bsz, hooked):
    """A user set 3500 for a batch of 100 on four devices and wondered why nothing changed. Hooks
    add frames of torch's, and the warning pointed into torch.
    """
    parallel = BalancedDataParallel(gpu0_bsz, nn.Identity(), ["cpu"] * 4)
    if hooked:
        parallel.register_forward_hook(lambda *args: None)
    fresh = copy.deepcopy(parallel)
    message = rf"gpu0_bsz={gpu0_bsz} has no effect: .* of 100 .* into \(25, .* below 25"
    x = torch.randn(100, 4)
    parallel(x[:1])  # no split of one sample has an effect
    for call in (
        lambda: parallel(x),
        lambda: data_parallel(gpu0_bsz, nn.Identity(), x, ["cpu"] * 4),
        lambda: exec("m(x)", {"m": fresh, "x": x}),  # has no name for its module
    ):
        with pytest.warns(BalanceWarning, match=message) as caught:
            call()
        assert caught[0].filename in (__file__, "<string>")
    parallel(x)


def test_gpu0_bsz_0_does_nothing_on_device_0(emulated):
    """A replica was built on device 0 and thrown away, and backward allocated zeros for it. One
    fork replicated onto the first devices instead, so it was one replica short.
    """
    module = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)).to(emulated[0])
    seen = []
    module.register_forward_hook(lambda module, args, output: seen.append(output.device))
    parallel = BalancedDataParallel(0, module, device_ids=emulated[:3], output_device=emulated[1])
    before = torch.lazy.memory_allocated(emulated[0])
    torch.lazy.reset_peak_memory_stats(emulated[0])
    output = parallel(torch.randn(6, 64))
    assert sorted(map(str, seen)) == ["lazy:1", "lazy:2"]
    assert torch.lazy.max_memory_allocated(emulated[0]) == before
    output.sum().backward()
    # The gradients themselves, and one that is about to be added to the other replica's.
    gradients = sum(-(-p.grad.nbytes // 512) * 512 for p in module.parameters())
    assert torch.lazy.memory_allocated(emulated[0]) == before + gradients
    peak = torch.lazy.max_memory_allocated(emulated[0])
    assert peak <= before + gradients + module[0].weight.nbytes


# What goes wrong in a replica.


@pytest.mark.parametrize(
    ("gpu0_bsz", "size", "note"),
    [
        (0, 8, "in replica 1 on lazy:2, with 3 of the batch's 8 samples"),
        (0, 1, "in replica 0 on lazy:1, with 1 of the batch's 1 samples"),
        (1, None, "in replica 0 on lazy:0"),
    ],
)
def test_an_exception_is_raised_with_a_note(emulated, gpu0_bsz, size, note):
    error = KeyError(3)  # torch's wrapper makes another one of its text

    def fail(m, x=None):
        if x is None or str(x.device) in note:
            raise error
        return m.a(x)

    parallel = wrap(emulated[:4], gpu0_bsz, Lambda(fail, a=nn.Linear(4, 2)))
    with pytest.raises(KeyError) as caught:
        parallel(*([] if size is None else [torch.randn(size, 4)]))
    assert caught.value is error
    assert notes_of(error) == [note]
    assert "fail" in [entry.name for entry in caught.traceback]


@pytest.mark.parametrize(
    ("gpu0_bsz", "weights", "index"),
    [(2, None, 0), (0, None, 1), (None, None, 1), (None, (0, 1), 1)],
)
def test_out_of_memory_adds_the_split_and_advice(gpu0_bsz, weights, index):
    memory = ["1MiB", "1MiB"]
    memory[index] = "3KiB"
    with emulate_devices(2, memory=memory) as devices:
        module = Lambda(lambda m, x: x.repeat(1, 100), a=nn.Linear(2, 2))
        model = wrap(list(devices), gpu0_bsz, module, device_weights=weights)
        first, other = sizes = model.split(8)
        assert model.device_weights == weights and (sizes == (0, 8) or not weights)
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried") as caught:
            model(torch.randn(8, 4))
        replica = index if first else 0
        assert notes_of(caught.value) == [
            f"in replica {replica} on lazy:{index}, with {sizes[index]} of the batch's 8 samples",
            f"the batch of 8 samples was split as lazy:0: {first}, lazy:1: {other}; use smaller "
            "batches, or fewer samples on the full device (gpu0_bsz, device_weights)",
        ]
        del caught, model, module
        assert [torch.lazy.memory_allocated(device) for device in devices] == [0, 0]


# Compiled and parametrized modules.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_compiled_it_runs_as_it_is():
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    model = BalancedDataParallel(1, module, ["cpu"] * 3)
    x = torch.randn(7, 4)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), module(x))
    compiled = torch.compile(lambda x: 2 * model(x + 1), backend="eager")
    torch.testing.assert_close(compiled(x), 2 * module(x + 1))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("is_whole", [True, False])
def test_compiled_modules_are_replicated(is_whole, backend):
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    reference = copy.deepcopy(module)
    if not is_whole:
        module[0] = torch.compile(module[0], backend=backend)
    compiled = torch.compile(module, backend=backend) if is_whole else module
    model = BalancedDataParallel(1, compiled, ["cpu"] * 3)
    num_graphs = []
    for step in range(5):
        x = torch.randn(10 + step % 3, 4, dtype=torch.double)
        for net in (model, reference):
            net(x).square().mean().backward()
        num_graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert_same_gradients(module, reference)
    assert num_graphs[1] == num_graphs[-1]  # no step compiles anew


def test_cached_parametrizations():
    """torch caches a weight by the original module, for all replicas, so that these share it."""
    plain = parametrizations.weight_norm(nn.Linear(4, 2))
    x = torch.randn(9, 4)
    shared = copy.deepcopy(plain)
    for call in (BalancedDataParallel(1, shared, ["cpu"] * 3), plain):
        with parametrize.cached():
            call(x).square().mean().backward()
    torch.testing.assert_close(*([p.grad for p in m.parameters()] for m in (shared, plain)))
