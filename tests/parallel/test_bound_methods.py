"""Methods and hooks that a module stores are bound to the modules of its replica."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_dp import BalancedDataParallel

from ..modules import Lambda


def stores_a_method(module):
    module.activation = types.MethodType(lambda self, x: x @ self.weight, module)
    module.forward = types.MethodType(lambda self, x: self.activation(x), module)


def stores_a_partial(module):
    """As accelerate's hooks do it: the old method is kept, the new one is a partial."""
    module.old_forward = module.forward
    module.forward = functools.partial(lambda self, x: self.old_forward(x) @ self.weight, module)


@pytest.mark.parametrize("store", [stores_a_method, stores_a_partial])
def test_what_modules_store_is_bound_to_replicas_without_a_cycle(no_collector, emulated, store):
    """A method in an instance's own dictionary made a cycle of each replica, and a copy of the
    weights stayed on each device until the garbage collector came by.
    """
    module = nn.Linear(64, 64, device=emulated[0])
    store(module)
    parallel = BalancedDataParallel(2, nn.Sequential(module), emulated[:3])
    x = torch.ones(8, 64)
    expected = module(x.to(emulated[0])).detach()
    for _ in range(3):
        output = parallel(x)
        torch.testing.assert_close(output, expected)
        output.sum().backward()
        del output
    memory = torch.get_device_module(emulated[0])
    assert [memory.memory_allocated(device) for device in emulated[1:3]] == [0, 0]


def test_a_checkpoint_calls_what_a_module_stores(no_collector, emulated):
    """The replicas that it keeps until backward end without the garbage collector, too."""
    module = nn.Sequential(nn.Linear(8, 8, device=emulated[0]))
    stores_a_method(module[0])
    outer = Lambda(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=module)
    parallel = BalancedDataParallel(2, outer, emulated[:3])
    x = torch.ones(8, 8)
    for _ in range(2):
        output = parallel(x)
        torch.testing.assert_close(output, module(x.to(emulated[0])))
        output.sum().backward()
        del output
    assert [torch.lazy.memory_allocated(device) for device in emulated[1:3]] == [0, 0]


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
