from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, BalanceWarning

from ..modules import Lambda


def compiled_in_place():
    module = nn.Linear(2, 2)
    module.compile(backend="eager")
    return module


IN_PLACE = r"a Linear that was compiled in place .*; wrap what torch.compile\(module\) returns"


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.LazyLinear(2), "uninitialized parameters"),
        (lambda: torch.jit.script(nn.Linear(2, 2)), "ScriptModule"),
        (compiled_in_place, IN_PLACE),
    ],
)
def test_what_cannot_be_replicated(make, message):
    with pytest.raises(RuntimeError, match=message):
        BalancedDataParallel(1, make(), ["cpu"] * 2)(torch.ones(4, 2))


def sets_aux(self, x):
    self.aux = x.mean()
    return x


def test_warnings_point_to_the_caller():
    """They pointed into contextlib, and ended what has no name for its module."""
    for run in (lambda m, x: m(x), lambda m, x: exec("m(x)", {"m": m, "x": x})):
        model = BalancedDataParallel(1, Lambda(sets_aux), ["cpu"] * 2)
        with pytest.warns(BalanceWarning, match="sets aux in forward") as caught:
            run(model, torch.ones(8, 2))
        assert caught[0].filename in (__file__, "<string>")


@pytest.mark.filterwarnings("ignore:Calling .zero_grad")
def test_zero_grad_in_forward_has_no_effect(devices):
    """The first replica has the module's own parameters: their gradients were erased."""

    def forward(self, x):
        self.zero_grad()
        self.layer.zero_grad(set_to_none=False)
        return self.layer(x)

    module = Lambda(forward, layer=nn.Linear(2, 1)).to(devices[0])
    model = BalancedDataParallel(1, module, devices)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"zero_grad\(\) from a module .* has no effect"):
            model(torch.ones(32, 2, device=devices[0])).sum().backward()
    assert model.module.layer.bias.grad.item() == 64
    model.zero_grad()
    assert model.module.layer.bias.grad is None


# Weights that forward takes out, replaces or shares; nn.DataParallel is exact for all of them.


class WeightDrop(nn.Module):
    """The weight of an RNN is computed in forward and set as a plain attribute.

    Source: https://github.com/salesforce/awd-lstm-lm/blob/master/weight_drop.py
    """

    def __init__(self):
        super().__init__()
        self.module = nn.LSTM(4, 4, batch_first=True)
        self.module.flatten_parameters = self.nothing
        weight = self.module._parameters.pop("weight_hh_l0")
        self.module.register_parameter("weight_hh_l0_raw", nn.Parameter(weight.data))

    def nothing(self):
        return

    def forward(self, x):
        self.module.weight_hh_l0 = nn.functional.dropout(self.module.weight_hh_l0_raw, p=0.0)
        return self.module.forward(x)[0]


def ties_again(self, x):
    self.other.weight = self.layer.weight
    return self.other(self.layer(x))


def takes_out_and_restores(self, x):
    weight = self.layer.weight
    del self.layer.weight
    self.layer.weight = 2 * weight
    doubled = self.layer(x)
    del self.layer.weight
    self.layer.register_parameter("weight", weight)
    return doubled + self.layer(x)


def of_a_tensor_on_the_weight(self, x):
    return self.layer(x) @ self.layer.weight.original


def two_layers(forward):
    module = Lambda(forward, layer=nn.Linear(4, 4), other=nn.Linear(4, 4))
    module.layer.weight.original = torch.eye(4).double() + 1
    return module


class CopiesItself(nn.Linear):
    """Gives its replicas something of their own in each call, as memories of language models."""

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()
        replica.memory = []
        return replica

    def forward(self, x):
        self.memory.append(x)
        assert len(self.memory) == 1 or not hasattr(self, "_is_replica")
        return super().forward(x)


def copies_itself():
    layer = CopiesItself(4, 4)
    layer.memory = []
    return layer


CHANGED_WEIGHTS = {
    "dropped": WeightDrop,
    "tied again": lambda: two_layers(ties_again),
    "restored": lambda: two_layers(takes_out_and_restores),
    "with a tensor": lambda: two_layers(of_a_tensor_on_the_weight),
    "of a class that copies itself": copies_itself,
}


@pytest.mark.parametrize("gpu0_bsz", [0, 2])
@pytest.mark.parametrize("name", CHANGED_WEIGHTS)
def test_weights_that_forward_replaces(devices, name, gpu0_bsz):
    """They were an AttributeError, a ValueError or a TypeError, or on another device."""
    plain = CHANGED_WEIGHTS[name]().double()
    module = copy.deepcopy(plain).to(devices[0])
    for net, device in ((plain, None), (module, devices[0])):
        if hasattr(net, "layer"):  # to() and deepcopy() may leave it out
            net.layer.weight.original = (torch.eye(4).double() + 1).to(device)
    model = BalancedDataParallel(gpu0_bsz, module, devices[:4])
    x = torch.randn(12, 3, 4).double()
    for has_gradients in (True, False, True):
        with torch.set_grad_enabled(has_gradients):
            outputs = [model(x).cpu(), plain(x)]
        torch.testing.assert_close(*outputs, rtol=1e-10, atol=1e-10)
        if has_gradients:
            for output in outputs:
                output.square().sum().backward()
    if name != "tied again":  # then the plain module has one parameter less
        named = dict(plain.named_parameters())  # in another order if they were restored
        for key, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, named[key].grad, check_device=False)
