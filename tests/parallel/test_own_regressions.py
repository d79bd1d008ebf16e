"""One test for each defect found in this package itself; docstrings tell the story."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import operator
import types
import weakref
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_dp import (
    BalancedCriterion,
    BalancedDataParallel,
    BalanceWarning,
    GatherError,
    Measurement,
    ScatterError,
    balanced_data_parallel,
    emulate_devices,
)
from balanced_dp.devices import default_device_type
from balanced_dp.parallel import written_state

from ..modules import Lambda


class AttributeDict(dict):
    """The old recipe: items are attributes, since the dictionary is its own ``__dict__``."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class MirroredDict(dict):
    """Each item is also set as an attribute."""

    def __init__(self, **kwargs):
        super().__init__()
        for name, value in kwargs.items():
            self[name] = value

    def __setitem__(self, name, value):
        super().__setitem__(name, value)
        object.__setattr__(self, name, value)


@pytest.mark.parametrize("kind", [AttributeDict, MirroredDict])
def test_dictionaries_that_show_their_items_as_attributes(devices, kind):
    """The items were cut, and the attributes still held the whole batch; or one chunk, joined."""

    class Module(nn.Module):
        def forward(self, batch):
            assert batch.x is batch["x"]
            return kind(y=batch.x + 1)

    output = BalancedDataParallel(2, Module(), devices[:3])(kind(x=torch.zeros(8, 4)))
    assert type(output) is kind
    assert output.y is output["y"]
    assert output.y.shape == (8, 4)
    output.more = 1
    assert ("more" in output) == (kind is AttributeDict)


@dataclasses.dataclass
class Derived:
    """Holds more than its fields."""

    logits: torch.Tensor

    def __post_init__(self):
        self.probabilities = self.logits.softmax(-1)

    @functools.cached_property
    def labels(self):
        return self.logits.argmax(-1)


def test_what_a_dataclass_derives_from_its_fields_is_cut_and_joined():
    """It stayed what it was: the whole batch's in the replicas, one replica's in the output."""

    class Module(nn.Module):
        def forward(self, given):
            assert given.labels.shape == given.logits.shape[:1] == given.probabilities.shape[:1]
            output = Derived(given.logits * 2)
            assert output.labels.shape == given.labels.shape
            return output

    given = Derived(torch.randn(8, 3))
    assert given.labels.shape == (8,)  # kept by the cached property
    output = BalancedDataParallel(2, Module(), ["cpu", "cpu"])(given)
    torch.testing.assert_close(output.probabilities, output.logits.softmax(-1))
    assert torch.equal(output.labels, given.labels)


def test_a_dataclass_field_that_was_never_set():
    @dataclasses.dataclass
    class Partly:
        x: torch.Tensor
        later: torch.Tensor = dataclasses.field(init=False)

    output = BalancedDataParallel(2, nn.Identity(), ["cpu", "cpu"])(Partly(torch.ones(8)))
    assert output.x.shape == (8,)
    assert not hasattr(output, "later")


def test_checkpointing_draws_the_same_dropout_again(devices):
    """Replicas on one device ran at the same time and drew from one generator, so that the masks
    of backward were not those of forward.
    """

    class Module(nn.Module):
        def forward(self, x):
            for _ in range(4):
                x = checkpoint(lambda x: nn.functional.dropout(x * 1.0), x, use_reentrant=False)
            return x

    x = torch.ones(64, 256, requires_grad=True, device=devices[0])
    output = BalancedDataParallel(20, Module(), devices[:3])(x)
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient.cpu(), output.detach().cpu())


def stores_a_method(module):
    module.activation = types.MethodType(lambda self, x: x @ self.weight, module)
    module.forward = types.MethodType(lambda self, x: self.activation(x), module)


def stores_a_partial(module):
    module.forward = functools.partial(lambda self, x: x @ self.weight, module)


@pytest.mark.parametrize("store", [stores_a_method, stores_a_partial])
def test_replicas_of_modules_that_store_methods_leave_no_cycle(emulated, store):
    """A method in an instance's own dictionary made a cycle of each replica, and a copy of the
    weights stayed on each device until the garbage collector came by.
    """
    module = nn.Linear(64, 64, device=emulated[0])
    store(module)
    parallel = BalancedDataParallel(2, module, emulated[:3])
    memory = torch.get_device_module(emulated[0])
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            parallel(torch.ones(8, 64)).sum().backward()
        assert [memory.memory_allocated(device) for device in emulated[1:3]] == [0, 0]
    finally:
        gc.enable()


def test_a_stored_method_outlives_its_replica_in_a_checkpoint(emulated):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.run = self._run

        def _run(self, x):
            return self.layer(x)

        def forward(self, x):
            return checkpoint(self.run, x, use_reentrant=False)

    module = Module().to(emulated[0])
    x = torch.ones(8, 4, requires_grad=True)
    BalancedDataParallel(2, module, emulated[:3])(x).sum().backward()
    bare = copy.deepcopy(module)
    bare.zero_grad()
    bare(torch.ones(8, 4).to(emulated[0])).sum().backward()
    torch.testing.assert_close(module.layer.weight.grad.cpu(), bare.layer.weight.grad.cpu())


@pytest.mark.filterwarnings("ignore:.* in forward, but a call runs copies")
def test_methods_that_are_hooks_are_bound_to_the_replica(emulated):
    """They wrote to the original, and replicas read what an older batch had left there."""

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(4, 4)
            self.features = None
            self.body.register_forward_hook(self._keep)
            self.body.register_forward_pre_hook(functools.partial(self._count), with_kwargs=True)
            self.count = 0

        def _keep(self, module, args, output):
            self.features = output

        def _count(self, module, args, kwargs):
            self.count += 1

        def forward(self, x):
            self.body(x)
            assert self.count == 1
            return self.features * 2

    module = Module().to(emulated[0])
    output = BalancedDataParallel(2, module, emulated[:3])(x := torch.randn(8, 4))
    expected = copy.deepcopy(module)(x.to(emulated[0]))
    torch.testing.assert_close(output.cpu(), expected.cpu())
    assert module.features is None
    assert module.count == 0


@pytest.mark.parametrize("begin", [nn.ReLU(inplace=True), nn.Hardtanh(inplace=True)])
def test_a_module_may_begin_in_place(emulated, begin):
    """A chunk that stays on its device was one of several views, which may not be written."""
    module = nn.Sequential(begin, nn.Linear(4, 2)).to(emulated[0])
    gradients = []
    for run in (module, BalancedDataParallel(2, module, emulated[:3])):
        x = torch.linspace(-2, 2, 32, device=emulated[0]).reshape(8, 4).requires_grad_()
        run(x * 1.0).pow(2).sum().backward()
        gradients.append(x.grad.cpu())
    torch.testing.assert_close(*gradients)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize("gpu0_bsz", [0, 2])
def test_a_buffer_that_is_only_read_keeps_its_version(emulated, gpu0_bsz):
    """With gpu0_bsz=0 it was written back at each call, which graphs that use it do not allow."""
    module = Scaled().to(emulated[0])
    parallel = BalancedDataParallel(gpu0_bsz, module, emulated[:3])
    x = torch.randn(8, 4)
    (parallel(x) * module.scale + parallel(x)).sum().backward()
    module.scale = torch.ones(1, device=emulated[0]).expand(2)
    parallel(x)


class Writes(nn.Module):
    """Writes to a parameter in forward, in one of the ways that are about."""

    def __init__(self, how, trained):
        super().__init__()
        self.how = how
        self.weight = nn.Parameter(torch.ones(2, dtype=torch.double), requires_grad=trained)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        with torch.no_grad():
            if self.how == "in place":
                self.weight.mul_(0.5)
            elif self.how == "data":
                self.weight.data.mul_(0.5)
            elif self.how == "data assigned":
                self.weight.data = self.weight.data * 0.5
            elif self.how == "detached":
                self.weight.detach().mul_(0.5)
            else:
                self.seen.resize_(len(self.seen) + 1).fill_(len(self.seen))
        return x * self.weight * self.seen.sum().clamp(1)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("how", ["in place", "data", "data assigned", "detached", "resized"])
def test_what_forward_writes_is_kept_though_device_0_runs_nothing(emulated, how, gpu0_bsz, trained):
    """Encoders that follow others, normalized weights and first statistics were lost."""
    reference = Writes(how, trained)
    module = copy.deepcopy(reference).to(emulated[0])
    model = BalancedDataParallel(gpu0_bsz, module, emulated[:3])
    x = torch.randn(8, 2, dtype=torch.double)
    for has_gradients in (True, False, True, True, False):
        with torch.set_grad_enabled(has_gradients):
            torch.testing.assert_close(model(x).cpu(), reference(x))
        torch.testing.assert_close(module.weight.cpu(), reference.weight)
        torch.testing.assert_close(module.seen.cpu(), reference.seen)


@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("how", ["in place", "data", "data assigned", "detached"])
def test_parameters_that_replicas_share_and_write_are_warned_of(emulated, how, gpu0_bsz):
    """A moving average on ["cpu"] * 3 moved three times."""
    for devices in (["cpu"] * 3, [emulated[0], emulated[1], emulated[1]]):
        model = BalancedDataParallel(gpu0_bsz, Writes(how, False).to(devices[0]), devices)
        with pytest.warns(BalanceWarning, match="writes weight in forward, which .* share") as seen:
            for _ in range(3):
                model(torch.ones(8, 2, dtype=torch.double))
        assert len(seen) == 1


def test_parameters_that_replicas_share_are_compared_in_first_calls_only(monkeypatch):
    compared = []
    values = written_state._values
    monkeypatch.setattr(written_state, "_values", lambda p: compared.append(p) or values(p))
    model = BalancedDataParallel(2, nn.Linear(4, 2), ["cpu"] * 3)
    for has_gradients, num_compared in ((True, 2), (True, 2), (False, 4), (False, 4), (True, 4)):
        with torch.set_grad_enabled(has_gradients):
            model(torch.ones(8, 4))
        assert len(compared) == num_compared


def test_a_cache_of_transformers_is_refused_with_the_remedy():
    """use_cache is on by default in generating models, and their caches cannot be joined."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = BalancedDataParallel(2, transformers.GPT2LMHeadModel(config), ["cpu", "cpu"])
    ids = torch.randint(0, 50, (8, 6))
    with pytest.raises(GatherError, match=r"past_key_values is a DynamicCache.*use_cache=False"):
        model(input_ids=ids, labels=ids)
    with pytest.raises(ScatterError, match=r"past_key_values is a DynamicCache.*use_cache=False"):
        model(input_ids=ids, past_key_values=transformers.DynamicCache())
    assert model(input_ids=ids, labels=ids, use_cache=False).logits.shape == (8, 6, 50)


@pytest.mark.parametrize(
    "container", [types.MappingProxyType, lambda x: {x["x"]}], ids=["proxy", "set"]
)
def test_tensors_in_containers_that_cannot_be_rebuilt_are_refused(container):
    """They went whole to each replica."""
    model = BalancedDataParallel(2, nn.Identity(), ["cpu", "cpu"])
    with pytest.raises(ScatterError, match=r"cannot be rebuilt with other tensors; use a dict"):
        model(container({"x": torch.ones(8)}))


def test_deques_and_lists_of_their_own_kind_are_cut():
    class Named(list):
        def __init__(self, values, name):
            super().__init__(values)
            self.name = name

    model = BalancedDataParallel(2, nn.Identity(), ["cpu", "cpu"])
    output = model(deque([torch.arange(8)], maxlen=3))
    assert output.maxlen == 3
    assert output[0].tolist() == list(range(8))
    output = model(Named([torch.arange(8)], "x"))
    assert (type(output), output.name, output[0].tolist()) == (Named, "x", list(range(8)))


def test_dictionaries_are_joined_by_name_whatever_their_order():
    class Module(nn.Module):
        def forward(self, x):
            pairs = [("a", x), ("b", x + 10)]
            return dict(pairs if len(x) == 2 else reversed(pairs))

    output = BalancedDataParallel(2, Module(), ["cpu", "cpu"])(torch.arange(8))
    assert output["b"].tolist() == list(range(10, 18))


def test_an_open_context_of_emulated_devices_is_what_ints_mean(monkeypatch):
    """On a machine with GPUs they meant those, and the README's examples failed there."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    with emulate_devices(3) as devices:
        assert BalancedDataParallel(1, nn.Identity()).devices == list(devices)
    assert default_device_type() == "cuda"


def test_a_peak_of_nothing_is_balanced():
    measured = Measurement("", "real", 2, 1, (1, 1), "ok", (0, 0), (0, 0), None, ({}, {}), 1.0)
    assert measured.imbalance == 0


def test_a_loss_weight_may_be_a_number_of_numpy():
    model = BalancedDataParallel(
        2, Lambda(lambda _, x: x.mean()), ["cpu", "cpu"], loss_weight=lambda x: np.int64(len(x))
    )
    assert model(torch.arange(8.0)) == 3.5


def test_a_packed_sequence_needs_no_cutting_on_one_device():
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    with emulate_devices(1) as devices:
        model = BalancedDataParallel(1, Lambda(lambda _, p: p.data.sum()), list(devices))
        assert model(packed).item() == 10


def test_parameters_can_be_given_other_data(emulated):
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
    del parameter, module, vector


def test_a_checkpoint_is_loaded_while_a_graph_is_alive(emulated):
    """As restoring the best weights does, with the last loss still in a variable."""
    module = nn.Sequential(nn.Linear(4, 2), nn.Linear(2, 2)).to(emulated[0])
    weight = module[1].weight
    state = {name: value.cpu() + 1 for name, value in module.state_dict().items()}
    loss = module(torch.ones(8, 4, device=emulated[0])).sum()
    module.load_state_dict(state)
    assert module[1].weight is weight
    assert torch.equal(weight.cpu(), state["1.weight"])
    del loss, module, weight


def test_tensors_are_described_on_the_meta_device(emulated):
    x = torch.ones(3, 2, device=emulated[0])
    for described in (x.to("meta"), torch.empty_like(x, device="meta")):
        assert described.device.type == "meta"
        assert described.shape == (3, 2)


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_with_device_0_left_out(emulated, mode):
    """Without gradients every copy of a parameter looked frozen, and none of the originals did."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(emulated[0])
    module[0].bias.requires_grad_(False)
    model = BalancedDataParallel(0, module, emulated[:3])
    x = torch.randn(8, 4)
    expected = copy.deepcopy(module).eval()(x.to(emulated[0]))
    with mode():
        torch.testing.assert_close(model.eval()(x).cpu(), expected.detach().cpu())
    del expected, module, model


def short_of_memory_in_backward(devices):
    """A model whose backward pass needs twice what forward does, on a small device 0."""
    layers = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(inplace=True))
    net = Lambda(lambda self, x: self.layers(x).sum(1), layers=layers).to(devices[0])
    return net, torch.optim.SGD(net.parameters(), lr=0.1)


def test_a_backward_pass_that_runs_out_of_memory_gives_all_back():
    """The other devices' nodes waited for the next backward pass, with their memory."""
    with emulate_devices(3, memory=["24MiB", "64MiB", "64MiB"]) as devices:
        net, optimizer = short_of_memory_in_backward(devices)
        model = BalancedDataParallel(999, net)
        held = [torch.get_device_module(d).memory_allocated(d) for d in devices]
        for _ in range(3):
            loss = model(torch.ones(3000, 64)).mean()
            with pytest.raises(torch.OutOfMemoryError):
                loss.backward()
            del loss
            net.zero_grad()
            assert [torch.get_device_module(d).memory_allocated(d) for d in devices] == held
        del net, model, optimizer


def test_auto_repeats_a_step_that_ran_out_in_backward():
    with emulate_devices(3, memory=["24MiB", "64MiB", "64MiB"]) as devices:
        net, optimizer = short_of_memory_in_backward(devices)
        model = BalancedDataParallel("auto", net)
        values = []
        while len(values) < 12:
            optimizer.zero_grad()
            try:
                model(torch.ones(3000, 64)).mean().backward()
            except torch.OutOfMemoryError:
                assert values == []
                assert model.gpu0_bsz < 1000  # it has moved by now
            else:
                optimizer.step()
                values.append(model.chunk_sizes[0])
        assert model._policy.auto.balance.is_frozen
        del net, model, optimizer


@pytest.mark.parametrize(
    "reduce",
    [
        lambda x: x.mean(0),
        lambda x: x.mean(0, keepdim=True),
        lambda x: x.topk(1, dim=0).values,
        lambda x: x.new_ones(3),
    ],
)
def test_what_has_no_row_for_each_sample_is_no_output(reduce):
    """It was joined to three times the size."""
    model = BalancedDataParallel(1, Lambda(lambda m, x: reduce(x)), ["cpu"] * 3)
    with pytest.raises(GatherError, match="it has no row for each of them"):
        model(torch.randn(7, 3))
    outputs = BalancedDataParallel(1, nn.Identity(), ["cpu"] * 3, gather=False)(torch.randn(7, 3))
    with pytest.raises(GatherError, match="it has no row for each of them"):
        BalancedCriterion(reduce)(outputs)


def test_texts_beside_the_tensors_are_cut_or_warned_of():
    """Each replica got the texts of all samples."""

    def forward(module: Any, x: Any, texts: Any) -> Any:
        return x + torch.tensor([len(text) for text in texts[: len(x)]])

    x, texts = torch.zeros(5), ["a", "bb", "ccc", "dddd", "eeeee"]
    model = BalancedDataParallel(1, Lambda(forward), ["cpu"] * 3)
    with pytest.warns(BalanceWarning, match=r"split=\('args.1',\)"):
        assert model(x, texts).tolist() == [1, 1, 2, 1, 2]
    model = BalancedDataParallel(1, Lambda(forward), ["cpu"] * 3, split=("args.1",))
    assert model(x, texts).tolist() == [1, 2, 3, 4, 5]


class Sets(nn.Module):
    """Sets attributes in forward, which copies of a module lose."""

    def __init__(self, how):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.how, self.step, self.losses = how, 0, []
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x):
        if self.how == "new":
            self.aux = x.mean()
        elif self.how == "number":
            self.step += 1
        elif self.how == "list":
            self.losses.append(x.mean())
        elif self.how == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        elif self.how == "same":
            self.step, self.how = 0, "same"
        elif self.how == "in place":
            self.mean.add_(1)
        return self.layer(x)


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize(
    ("how", "name"),
    [("new", "aux"), ("number", "step"), ("list", "losses"), ("buffer", "mean")],
)
def test_attributes_that_forward_sets_are_warned_of_once(devices, how, name, gpu0_bsz):
    module = nn.Sequential(nn.Linear(2, 2), Sets(how)).to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4])
    with pytest.warns(BalanceWarning, match=rf"sets 1\.{name} in forward.*return it") as caught:
        for _ in range(4):
            model(torch.ones(8, 2)).sum().backward()
    assert len(caught) == 1


@pytest.mark.parametrize("how", ["same", "in place"])
def test_attributes_that_stay_as_they_were_are_not_warned_of(devices, how):
    module = nn.Sequential(nn.utils.spectral_norm(nn.Linear(2, 2)), Sets(how)).to(devices[0])
    model = BalancedDataParallel(1, module, devices[:4])
    for _ in range(4):
        model(torch.ones(8, 2)).sum().backward()


def test_hooks_that_forward_registers_are_of_one_replica(emulated):
    """Replicas had the module's own dictionaries: 0.24 off, or a race."""

    class Hooked(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2).double()

        def forward(self, x):
            self.layer.register_forward_hook(lambda module, inputs, output: 2 * output)
            return self.layer(x)

    module = Hooked().to(emulated[0])
    reference = copy.deepcopy(module)
    model = BalancedDataParallel(0, module, emulated[:3])
    x = torch.randn(6, 2, dtype=torch.double)
    expected = reference(x.to(emulated[0]))
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)
    assert not module.layer._forward_hooks
    del expected


@pytest.mark.parametrize("keeps", ["children", "parameters"])
def test_a_replica_whose_members_somebody_keeps_is_not_used_again(emulated, keeps):
    """Checkpoints over values() or items() found None there in backward; a cache was stale."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
            self.cache = weakref.WeakKeyDictionary()

        def forward(self, x):
            layers = self.layers.values()
            key = self.layers["a"]
            cached = self.cache.setdefault(key, (key.weight._version, key.weight.detach().clone()))
            if cached[0] == key.weight._version:
                assert cached[1].equal(key.weight)

            members = [layer._parameters for layer in layers]

            def run(x):
                for layer in layers:
                    x = layer(x)
                return x

            def run_with_parameters(x):
                for member in members:
                    x = torch.nn.functional.linear(x, member["weight"], member["bias"])
                return x

            return checkpoint(
                run if keeps == "children" else run_with_parameters, x, use_reentrant=False
            )

    module = Checkpointed().to(emulated[0])
    reference = copy.deepcopy(module)
    model = BalancedDataParallel(1, module, emulated[:3])
    for _ in range(3):
        with torch.no_grad():
            for net in (module, reference):
                net.layers["a"].weight.add_(1)
        x = torch.randn(7, 2)
        losses = [model(x).sum(), reference(x.to(emulated[0])).sum()]
        for loss in losses:
            loss.backward()
        for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
    del losses, loss


def test_attributes_of_parameters_travel_with_their_copies(emulated):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.weight * self.weight.scale

    module = Scaled().to(emulated[0])
    module.weight.scale = 3.0
    model = BalancedDataParallel(0, module, emulated[:3])
    for has_gradients in (True, False):
        with torch.set_grad_enabled(has_gradients):
            assert model(torch.ones(6, 2)).unique().tolist() == [3]


def test_gradients_inside_forward_need_none_outside(emulated):
    """Adaptation to a task in forward, evaluated: "does not require grad"."""

    class Adapts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            with torch.enable_grad():
                loss = self.layer(x).square().mean()
                (slope,) = torch.autograd.grad(loss, [self.layer.weight])
            return x @ (self.layer.weight - 0.1 * slope).T

    model = BalancedDataParallel(1, Adapts().to(emulated[0]), emulated[:3])
    with torch.no_grad():
        assert model(torch.randn(7, 2)).shape == (7, 1)


def test_flat_weights_of_an_rnn_are_those_of_the_replica(emulated):
    """flatten_parameters() in forward, as advised, was of the original's, by all threads."""

    def forward(self, x):
        self.rnn.flatten_parameters()
        seen.append(all(map(operator.is_, self.rnn._flat_weights, self.rnn.parameters())))
        return self.rnn(x)[0]

    seen = []
    module = Lambda(forward, rnn=nn.GRU(2, 3, batch_first=True)).to(emulated[0])
    model = BalancedDataParallel(1, module, emulated[:3])
    for _ in range(2):
        model(torch.randn(7, 4, 2)).sum().backward()
    assert seen == [True] * 6


def test_the_class_may_take_the_place_of_its_base(monkeypatch):
    """To change scripts that one cannot edit; super() found a partial instead of a class."""
    monkeypatch.setattr(nn, "DataParallel", functools.partial(BalancedDataParallel, 1))
    assert nn.DataParallel(nn.Linear(2, 2), ["cpu", "cpu"])(torch.ones(4, 2)).shape == (4, 2)


class Refills(nn.Module):
    """Changes, in forward, what it holds."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("first", torch.full((3,), 1.0))
        self.register_buffer("second", torch.full((3,), 2.0))
        self.register_buffer("cache", None)
        self.layer = nn.Linear(3, 3)
        self.layer.register_forward_hook(lambda module, args, output: 2 * output)

    def forward(self, x):
        if self.how == "registered again":
            first = self.first
            del self.first
            self.register_buffer("first", first)
        elif self.how == "filled" and self.cache is None:
            self.cache = self.layer.weight.detach().sum()
        elif self.how == "class":
            self.layer.__class__ = type("Other", (nn.Linear,), {"forward": lambda self, x: x})
        elif self.how == "hooks":
            self.layer._forward_hooks.clear()
            self.layer.register_forward_hook(lambda module, args, output: 3 * output)
        self.how = "done"
        return self.layer(x) * self.first + (0 if self.cache is None else self.cache)


@pytest.mark.filterwarnings("ignore:Refills sets")
@pytest.mark.parametrize("gpu0_bsz", [0, 1])
@pytest.mark.parametrize("how", ["registered again", "filled", "class", "hooks"])
def test_what_forward_changes_of_its_module_is_gone_in_the_next_call(emulated, how, gpu0_bsz):
    """Replicas that were used again kept it; a buffer even had the values of another."""
    module = Refills(how).to(emulated[0])
    model = BalancedDataParallel(gpu0_bsz, module, emulated[:2])
    x = torch.randn(8, 3, device=emulated[0])
    for _ in range(4):
        fresh = BalancedDataParallel(gpu0_bsz, copy.deepcopy(module), emulated[:2])
        torch.testing.assert_close(model(x), fresh(x))
        assert (module.first[0].item(), module.second[0].item()) == (1, 2)
        with torch.no_grad():
            module.layer.weight.mul_(0.5)


@pytest.mark.parametrize("gpu0_bsz", [0, 1])
def test_gradients_of_inputs_only_in_a_block_that_puts_them_off(devices, gpu0_bsz):
    """``autograd.grad`` got device 0's alone, and ``backward(inputs=...)`` gave more than asked."""
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double().to(devices[0])
    model = BalancedDataParallel(gpu0_bsz, module, devices[:3])
    x = torch.randn(8, 3, dtype=torch.double)
    weight = module[0].weight
    [expected] = torch.autograd.grad(model(x).sum(), weight)
    with model.shared_weights():
        [found] = torch.autograd.grad(model(x).sum(), weight)
        torch.testing.assert_close(found, expected)
        model(x).sum().backward(inputs=[weight])
        model(x).sum().backward(inputs=[weight])
    torch.testing.assert_close(weight.grad, 2 * expected)
    assert [p.grad is None for p in module.parameters()] == [False, True, True, True]


def test_a_sparse_gradient_before_a_dense_one_in_a_block(emulated):
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5, 2))

        def forward(self, x, sparse):
            return nn.functional.embedding(x, self.weight, sparse=sparse)

    module, x = Lookup(), torch.arange(8) % 5
    for sparse in (True, False):
        module(x, sparse).sum().backward()
    expected, module.weight.grad = module.weight.grad.to_dense(), None
    model = BalancedDataParallel(1, module.to(emulated[0]), emulated[:3])
    with model.accumulate():
        for sparse in (True, False):
            model(x, sparse).sum().backward()
    torch.testing.assert_close(module.weight.grad.to_dense().cpu(), expected)


def test_silent_writes_are_looked_for_anew_where_the_module_has_changed(emulated):
    module = Writes("data", False).to(emulated[0])
    model = BalancedDataParallel(0, module, emulated[:3])
    for num_calls in range(1, 5):
        if num_calls == 3:
            module.register_buffer("extra", torch.zeros(1, device=emulated[0]))
        model(torch.ones(8, 2, dtype=torch.double))
        assert module.weight[0].item() == 0.5**num_calls


@pytest.mark.parametrize("device_ids", [["cpu"], ["cpu"] * 3])
def test_outputs_of_a_model_go_into_another_on_any_number_of_devices(device_ids):
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    models = [BalancedDataParallel(1, m, device_ids, gather=False) for m in (first, second)]
    x = torch.randn(8, 3)
    torch.testing.assert_close(models[1](models[0](x)).gather(), second(first(x)))


def test_outputs_of_a_model_go_into_another_without_an_accelerator(no_accelerator):
    first, second = nn.Linear(3, 2), nn.Linear(2, 1)
    models = [BalancedDataParallel(1, m, gather=False) for m in (first, second)]
    x = torch.randn(8, 3)
    torch.testing.assert_close(models[1](models[0](x)).gather(), second(first(x)))


def test_warnings_of_the_replicator_point_to_the_caller():
    """They pointed into contextlib, and ended what has no name for its module."""
    for run in (lambda m, x: m(x), lambda m, x: exec("m(x)", {"m": m, "x": x})):
        model = BalancedDataParallel(1, Sets("new"), ["cpu"] * 2)
        with pytest.warns(BalanceWarning, match="sets aux in forward") as caught:
            run(model, torch.ones(8, 2))
        assert caught[0].filename in (__file__, "<string>")


def test_a_parameter_with_nan_that_nobody_writes_is_not_warned_of():
    module = nn.Linear(2, 2)
    nn.init.constant_(module.weight, float("nan"))
    BalancedDataParallel(1, module, ["cpu"] * 3)(torch.ones(8, 2))


# Dynamo reads it of whatever it compiles for.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("has_gradients", [True, False])
def test_a_function_that_is_compiled_whole_runs_in_forward(has_gradients):
    """Where calls were noted, torch could not compile that."""

    @torch.compile(backend="eager", fullgraph=True)
    def mean(inner: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return (x @ inner.weight).square().mean()

    class Compiles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mean(self.inner, x)

    module, x = Compiles().double(), torch.randn(8, 4, dtype=torch.double)
    expected = (x @ module.inner.weight).square().mean()
    model = BalancedDataParallel(2, module, ["cpu", "cpu"])
    with torch.set_grad_enabled(has_gradients):
        for _ in range(3):
            torch.testing.assert_close(model(x), expected, rtol=1e-10, atol=1e-10)
