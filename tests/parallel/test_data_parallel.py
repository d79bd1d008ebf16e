from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

from balanced_dp import (
    ArgumentError,
    ArgumentTypeError,
    BalancedDataParallel,
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
    """Arguments, attributes and the keys of checkpoints are those of torch's class."""
    pairs = (nn.DataParallel, BalancedDataParallel), (nn.parallel.data_parallel, data_parallel)
    for theirs, ours in pairs:
        names = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(ours).parameters)[: len(names) + 1] == ["gpu0_bsz", *names]
    module = nn.Linear(4, 2).to(emulated[1])
    parallel = BalancedDataParallel(1, module, emulated[1:4], emulated[2], 1)
    assert isinstance(parallel, nn.DataParallel)
    assert parallel.module is module
    assert (parallel.device_ids, parallel.output_device, parallel.dim) == ([1, 2, 3], 2, 1)
    assert parallel.src_device_obj == emulated[1]
    assert parallel.devices == emulated[1:4]
    stock = nn.DataParallel(nn.Linear(4, 2))
    file = io.BytesIO()
    torch.save(parallel.state_dict(), file)
    file.seek(0)
    stock.load_state_dict(torch.load(file))
    torch.testing.assert_close(stock.module.weight, module.weight.cpu())
    nn.init.ones_(stock.module.weight)
    parallel.load_state_dict(stock.state_dict())
    assert parallel.module.weight.sum().item() == 8


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_work_and_are_independent(duplicate, devices):
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


def test_the_steps_can_be_called_one_by_one(devices):
    """As code does that strings nn.DataParallel's steps together itself."""
    parallel = wrap(devices[:3])
    x = torch.randn(7, 4)
    device_ids = parallel.device_ids
    inputs, kwargs = parallel.scatter((x,), {}, device_ids)
    replicas = parallel.replicate(parallel.module, device_ids)
    outputs = parallel.parallel_apply(replicas, inputs, kwargs)
    joined = parallel.gather(outputs, parallel.output_device)
    torch.testing.assert_close(joined, parallel(x))
    whole, _ = parallel.scatter((3,), None, device_ids)
    assert whole == [(3,)] * 3


@pytest.mark.parametrize("gpu0_bsz", [0, 1, None])
def test_steps_are_overridden_with_torchs_signatures(gpu0_bsz, devices):
    seen = []

    class Logged(BalancedDataParallel):
        def scatter(self, inputs, kwargs, device_ids):
            seen.append("scatter")
            return super().scatter(inputs, kwargs, device_ids)

        def replicate(self, module, device_ids):
            seen.append("replicate")
            return super().replicate(module, device_ids)

        def parallel_apply(self, replicas, inputs, kwargs):
            seen.append("parallel_apply")
            return super().parallel_apply(replicas, inputs, kwargs)

        def gather(self, outputs, output_device):
            seen.append("gather")
            return super().gather(outputs, output_device)

    module = nn.Linear(4, 2).to(devices[0])
    x = torch.randn(7, 4)
    loss = nn.Sequential(module, Lambda(lambda m, h: h.square().mean()))
    for whole in (module, loss):
        found = Logged(gpu0_bsz, whole, devices[:3])(x)
        torch.testing.assert_close(found, whole(x.to(devices[0])))
    assert seen == ["scatter", "replicate", "parallel_apply", "gather"] * 2


# Devices.


@pytest.mark.parametrize("accelerator", [None, "cuda"])
def test_ints_and_none_mean_emulated_devices(accelerator, monkeypatch):
    """On a machine with GPUs they meant those, and the README's examples failed there."""
    monkeypatch.setattr("balanced_dp.devices.accelerator_type", lambda: accelerator)
    with emulate_devices(3) as devices:
        module = nn.Linear(4, 2).to(devices[0])
        for device_ids in (None, [0, 1, 2], ["lazy:0", devices[1], 2]):
            parallel = BalancedDataParallel(1, module, device_ids, 1)
            assert (parallel.devices, parallel.device_ids) == (list(devices), [0, 1, 2])
            assert parallel(torch.randn(7, 4)).device == devices[1]
        assert BalancedDataParallel(1, module, [0, 0])(torch.randn(7, 4)).shape == (7, 2)
        del module, parallel
    assert default_device_type() == accelerator


def test_on_one_device_the_module_is_moved_and_called_directly(devices):
    seen = []
    module = Lambda(lambda m, x, k: seen.append(m) or m.a(x) + k["b"], a=nn.Linear(4, 2))
    parallel = BalancedDataParallel(1, module, devices[:1])
    assert module.a.weight.device == devices[0]
    # Inputs are moved, and not one of them has to be of the batch's size.
    assert parallel(torch.randn(7, 4), k={"b": torch.randn(2)}).device == devices[0]
    assert seen[0] is module


# Arguments.


WRONG_VALUES = [
    ({"gpu0_bsz": -1}, "gpu0_bsz must be at least 0, got -1"),
    ({"scalar_outputs": "max"}, "scalar_outputs must be one of"),
    ({"scalar_outputs": "sum", "loss_weight": len}, "weighs a mean, but scalar_outputs is 'sum'"),
    ({"broadcast": "maks"}, "broadcast names 'maks', but Linear.forward takes"),
    ({"device_weights": [1, 2, 3]}, "one number for each of 2 devices, got 3"),
    ({"device_weights": [0, 0]}, "device_weights must not all be 0"),
    ({"gpu0_bsz": "auto", "device_weights": [1, 2]}, "is a number or None, got 'auto'"),
    ({"device_ids": []}, "device_ids is empty"),
    ({"device_ids": ["gpu:0"]}, "there is no device 'gpu:0': "),
    ({"device_ids": ["meta", "meta"]}, "there is no device 'meta': "),
    ({"device_ids": ["xpu"]}, "device xpu does not exist: there are 0"),
    ({"device_ids": [0, 1]}, "Leave device_ids out to run without splitting"),
]
WRONG_TYPES = [
    ({"gpu0_bsz": 1.5}, "gpu0_bsz must be an integer, got 1.5"),
    ({"gpu0_bsz": True}, "gpu0_bsz must be an integer, got True"),
    ({"gpu0_bsz": "Auto"}, "an integer, 'auto' or None, got 'Auto'"),
    ({"module": lambda x: x}, "module must be an nn.Module, got function"),
    ({"module": torch.optim.SGD([torch.ones(1)])}, "must be an nn.Module, got SGD"),
    ({"dim": "0"}, "dim must be an integer, got '0'"),
    ({"dim": True}, "dim must be an integer, got True"),
    ({"device_ids": "cpu"}, "must be a list of devices, got 'cpu'"),
    ({"device_ids": 0}, "device_ids must be a list of devices, got 0"),
    ({"device_ids": [True]}, "got True"),
    ({"device_ids": [1.0]}, "an int, a string or a torch.device, got 1.0"),
]


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        *((ArgumentError, *row) for row in WRONG_VALUES),
        *((ArgumentTypeError, *row) for row in WRONG_TYPES),
    ],
)
def test_arguments_that_cannot_be_used(error, options, message, no_accelerator):
    options = {"gpu0_bsz": 1, "module": nn.Linear(4, 2), "device_ids": ["cpu"] * 2, **options}
    with pytest.raises(error, match=message):
        BalancedDataParallel(**options)


@pytest.mark.parametrize(
    ("device_id", "message"),
    [(-1, "must not be negative, got -1"), (5, "lazy:5 does not exist: there are 2 of its type")],
)
def test_indices_that_do_not_exist(device_id, message):
    with emulate_devices(2), pytest.raises(ArgumentError, match=message):
        BalancedDataParallel(1, nn.Linear(4, 2), [0, device_id])


# Batches.


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((torch.zeros(0, 4),), {}), ((), {}), ((), {"y": "text"}), ((None, torch.tensor(2.0)), {})],
)
def test_without_samples_it_is_one_call_on_device_0(devices, gpu0_bsz, args, kwargs):
    calls = []
    module = Lambda(lambda m, x=None, y=0: calls.append(x) or (x, y), a=nn.Linear(4, 2))
    output = wrap(devices[:4], gpu0_bsz, module)(*args, **kwargs)
    assert repr(tree_map(lambda t: t.cpu() if torch.is_tensor(t) else t, output)) == repr(
        module(*args, **kwargs)
    )
    assert {leaf.device for leaf in output if torch.is_tensor(leaf)} <= {devices[0]}
    assert len(calls) == 2


# What goes wrong in a replica.


class Unusual(Exception):
    """Cannot be made again from its text, as torch's wrapper would try to."""

    def __init__(self, code, *, detail):
        super().__init__(code)
        self.detail = detail


@pytest.mark.parametrize(
    ("gpu0_bsz", "size", "note"),
    [
        (1, 8, "in replica 2 on lazy:2, with 2 of the batch's 8 samples"),
        (0, 8, "in replica 1 on lazy:2, with 3 of the batch's 8 samples"),
        (0, 1, "in replica 0 on lazy:1, with 1 of the batch's 1 samples"),
        (1, None, "in replica 0 on lazy:0"),
    ],
)
def test_an_exception_is_raised_as_it_is_with_a_note(emulated, gpu0_bsz, size, note):
    error = Unusual(3, detail="x")

    def fail(m, x=None):
        if x is None or str(x.device) in note:
            raise error
        return m.a(x)

    parallel = wrap(emulated[:4], gpu0_bsz, Lambda(fail, a=nn.Linear(4, 2)))
    with pytest.raises(Unusual) as caught:
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
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried") as caught:
            model(torch.randn(8, 4))
        replica = index if first else 0
        assert notes_of(caught.value) == [
            f"in replica {replica} on lazy:{index}, with {sizes[index]} of the batch's 8 samples",
            f"the batch of 8 was split lazy:0: {first}, lazy:1: {other}; give the device that ran "
            "out fewer samples (gpu0_bsz, or device_weights), or lower the batch size",
        ]
        del caught, model, module
        assert [torch.lazy.memory_allocated(device) for device in devices] == [0, 0]


@pytest.mark.parametrize(("gpu0_bsz", "expected"), [(None, (2, 5, 5)), (1, (1, 6, 5))])
def test_device_weights_split_in_proportion(devices, gpu0_bsz, expected):
    model = wrap(devices[:3], gpu0_bsz, device_weights=[10, 22, 22])
    model(torch.randn(12, 4))
    assert model.chunk_sizes == model.split(12) == expected
    assert model.gpu0_bsz == gpu0_bsz


def test_a_value_that_is_refused_changes_nothing():
    model = BalancedDataParallel(2, torch.nn.Linear(2, 2), ["cpu", "cpu"])
    for value in (-1, "AUTO", 2.5):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            model.gpu0_bsz = value
        assert model.gpu0_bsz == 2
    with pytest.raises(AttributeError):
        model.device_weights = [1, 1]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo's
def test_compiled_it_runs_as_it_is():
    module = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    model = BalancedDataParallel(1, module, ["cpu"] * 3)
    x = torch.randn(7, 4)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), module(x))
    compiled = torch.compile(lambda x: 2 * model(x + 1), backend="eager")
    torch.testing.assert_close(compiled(x), 2 * module(x + 1))


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


@pytest.mark.parametrize("device_ids", [None, ["cpu"], ["cpu"] * 3])
def test_outputs_of_a_model_go_into_another_on_any_number_of_devices(device_ids, no_accelerator):
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    models = [BalancedDataParallel(1, m, device_ids, gather=False) for m in (first, second)]
    x = torch.randn(8, 3)
    torch.testing.assert_close(models[1](models[0](x)).gather(), second(first(x)))
    torch.testing.assert_close(models[1](input=models[0](x)).gather(), second(first(x)))
    outputs = BalancedDataParallel(1, first, ["cpu"] * 2, gather=False)(x)
    if device_ids is None:
        with pytest.raises(ScatterError, match=r"is PerDevice.* on cpu; gather\(\) it first"):
            models[1](outputs)


def test_every_attribute_is_set_without_an_accelerator(no_accelerator):
    """Stock returns from its constructor before it sets dim and output_device, so code that reads
    them fails on a machine without GPUs only.
    """
    module = nn.Linear(4, 2)
    parallel = BalancedDataParallel(1, module, dim=1)
    attributes = (parallel.module, parallel.device_ids, parallel.output_device, parallel.dim)
    assert attributes == (module, [], None, 1)
    assert parallel(torch.randn(3, 4)).shape == (3, 2)
