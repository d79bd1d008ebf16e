"""Test that steps, even those that fail, free their memory without the garbage collector."""

from __future__ import annotations

import functools
import gc
import types

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from balanced_dp import BalancedCriterion, BalancedDataParallel

from ..modules import Lambda
from ..versions import since_torch


def sets_an_attribute(self, x):
    self.memory = self.inner(x)
    return self.memory


def with_a_method():
    """Return a module with methods in its instance dictionary.

    Such a method once made a reference cycle of each replica. So a copy of the weights stayed on
    each device until the garbage collector ran.
    """
    module = nn.Linear(8, 8)
    module.activation = types.MethodType(lambda self, x: x @ self.weight, module)
    module.forward = types.MethodType(lambda self, x: self.activation(x), module)
    return module


def with_a_partial():
    """Return a module that keeps its old forward, and whose new one is a partial.

    The hooks of accelerate make such modules.
    """
    module = nn.Linear(8, 8)
    module.old_forward = module.forward
    module.forward = functools.partial(lambda self, x: self.old_forward(x) @ self.weight, module)
    return module


def with_a_hook():
    """Return a module with a hook that is a method of the module and sets an attribute.

    In replicas, such a hook once set the attribute of the original module. So replicas read the
    value of an older batch.
    """
    module = Lambda(lambda self, x: [self.inner(x), self.inner.kept][1], inner=nn.Linear(8, 8))
    keep = types.MethodType(lambda self, *args: setattr(self, "kept", args[-1]), module.inner)
    module.inner.register_forward_hook(keep)
    return module


def with_checkpoints():
    inner = nn.Sequential(with_a_method())
    return Lambda(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=inner)


MODULES = {
    "plain": lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
    "attribute": lambda: Lambda(sets_an_attribute, inner=nn.Linear(8, 8)),
    "method": lambda: nn.Sequential(with_a_method()),
    "partial": lambda: nn.Sequential(with_a_partial()),
    "hook": with_a_hook,
    "checkpoint": with_checkpoints,
}


@pytest.mark.filterwarnings("ignore:.* in forward, but a call runs copies")
@pytest.mark.parametrize(
    ("gathers", "gpu0_bsz", "num_steps"),
    [
        *((gathers, gpu0_bsz, 12) for gathers in (True, False) for gpu0_bsz in (0, 2)),
        pytest.param(True, 2, 1008, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "name",  # after an error, checkpoint closed its context in whichever thread freed it
    [pytest.param(n, marks=[since_torch("2.13")] * (n == "checkpoint")) for n in MODULES],
)
def test_steps_leave_nothing_behind(no_collector, emulated, name, gathers, gpu0_bsz, num_steps):
    module = MODULES[name]().to(emulated[0])
    x = torch.randn(9, 8)
    expected = module(x.to(emulated[0])).square().mean().item()
    for part in module.modules():
        vars(part).pop("memory", vars(part).pop("kept", None))
    model = BalancedDataParallel(gpu0_bsz, module, emulated[:3], gather=gathers)
    mean = BalancedCriterion(lambda output: output.square().mean())
    held, num_objects = set(), []
    for step in range(num_steps):
        with torch.set_grad_enabled(step % 2 == 0):
            if step % 3 == 2:
                with pytest.raises(RuntimeError, match=r"shapes|size"):
                    model(x[:, :3])
            else:
                loss = mean(model(x))
                assert loss.item() == pytest.approx(expected)
                if loss.requires_grad:
                    loss.backward()
                del loss
        module.zero_grad()
        held.add(tuple(map(torch.lazy.memory_allocated, emulated[:3])))
        if (step + 1) % (num_steps // 2) == 0:
            num_objects.append(len(gc.get_objects()))
    assert len(held) == 1 and held.pop()[1:] == (0, 0)
    # Of checkpoints, torch leaves cycles without us, too.
    assert num_objects[1] - num_objects[0] < 12 or name == "checkpoint"
    assert not {"memory", "kept"} & {name for part in module.modules() for name in vars(part)}
    del model, module, part
    assert torch.lazy.memory_allocated(emulated[0]) == 0 or name not in ("plain", "attribute")
