"""Parameters have homes on all devices, and a model trains as with all of them on one."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from balanced_dp import BalancedDataParallel, emulate_devices

from ..modules import CASES


def test_homes_hold_what_their_memory_allows():
    """Parameters keep their identity. Scripts ask the first one for the device of targets: it stays
    on the first device, though the second one is larger.
    """
    with emulate_devices(3, memory=["2GiB", "4GiB", "2GiB"]) as devices:
        module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40))).to(devices[0])
        parameters = list(module.parameters())
        model = BalancedDataParallel(None, module, spread=True)
        assert all(map(operator.is_, module.parameters(), parameters))
        held = [torch.lazy.memory_allocated(d) for d in devices]
        bucket = sum(held) / 6
        assert held == pytest.approx([sum(held) / 4, sum(held) / 2, sum(held) / 4], abs=bucket)
        assert held[1] > 1.4 * max(held[0], held[2])
        # Weight and bias of a layer stay together.
        homes = list(model.homes().values())
        assert homes[::2] == homes[1::2] == [p.device for p in parameters[::2]]
        assert homes[0] == devices[0]
        del parameters, model, module


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(2, 4))
def test_no_device_holds_much_above_its_share(widths, num_devices):
    with emulate_devices(num_devices, symbolic=True) as devices:
        module = nn.ModuleList(nn.Linear(width, 10) for width in widths).to(devices[0])
        model = BalancedDataParallel(None, module, spread=True)
        sizes = [sum(p.nbytes for p in child.parameters()) for child in module]
        held = dict.fromkeys(devices, 0)
        for parameter in module.parameters():
            held[parameter.device] += parameter.nbytes
        share = sum(sizes) / num_devices
        assert max(held.values()) <= share + share / 2 + max(sizes)
        assert set(model.homes()) == {name for name, _ in module.named_parameters()}
        del model, module, parameter


def test_a_spread_module_runs_on_one_device(emulated):
    """By itself it does not run. Moving the wrapper to its first device spreads it again."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(emulated[0])
    plain = copy.deepcopy(module)
    BalancedDataParallel(1, module, emulated[:2], spread=True)
    model = BalancedDataParallel(2, module, emulated[:2], spread=True)  # and again
    homes, x = model.homes(), torch.ones(3, 4, device=emulated[0])
    assert len(set(homes.values())) == 2
    assert model.to(emulated[0]) is model
    assert model.homes() == homes == model.float().homes()
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        module(x)
    with model.on_one_device() as alone:
        assert alone is module
        assert torch.equal(alone(x), plain(x))
    assert model.homes() == homes
    assert torch.allclose(model(x), plain(x))


def test_a_checkpoint_fits_any_number_of_devices(emulated, tmp_path):
    make = CASES["tied weights"].make_module
    model = BalancedDataParallel(None, make().to(emulated[0]), emulated[:3], spread=True)
    torch.save(model.state_dict(), tmp_path / "spread.pt")
    state = torch.load(tmp_path / "spread.pt", map_location="cpu")
    bare, tokens = make(), torch.randint(7, (7, 5))
    bare.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    for spread in (True, False):
        other = BalancedDataParallel(1, make().to(emulated[0]), emulated[:2], spread=spread)
        other.load_state_dict(state)
        assert torch.allclose(other(tokens).cpu(), bare(tokens))


@pytest.mark.parametrize("where", ["cpu", "lazy:0"])
def test_models_and_optimizers_may_be_older(where):
    """No device holds the model. Parameters, tied ones too, keep their identity and gradient, and
    the state that an optimizer has is moved by loading it.
    """
    with emulate_devices(4, memory="9MiB" if where == "cpu" else None) as devices:
        layers = [nn.Linear(512, 512) for _ in range(4)]  # 3 MiB, 12 with AdamW
        layers[3].weight = layers[0].weight
        module = nn.Sequential(*layers, nn.BatchNorm1d(512)).to(where)
        parameters, optimizer = [*module.parameters()], torch.optim.AdamW(module.parameters())
        layers[1].weight.grad = torch.ones(512, 512, device=where)
        optimizer.step()
        model = BalancedDataParallel(None, module, spread=True)
        assert all(map(operator.is_, module.parameters(), parameters))
        assert len({p.device for p in parameters}) == 4
        assert layers[1].weight.grad.device == layers[1].weight.device
        assert module[4].running_mean.device == devices[0]
        optimizer.load_state_dict(optimizer.state_dict())
        for _ in range(2):
            model(torch.ones(8, 512)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].device == parameter.device
        del model, module, layers, parameters, parameter, optimizer, state


def test_a_parameter_that_left_the_devices_is_an_error(emulated):
    model = BalancedDataParallel(None, nn.Linear(4, 2).to(emulated[0]), emulated[:2], spread=True)
    model.module.weight = nn.Parameter(torch.ones(2, 4))
    with pytest.raises(RuntimeError, match=r"lazy:0, lazy:1 \(device_ids\), but .* device: cpu"):
        model(torch.ones(3, 4))
