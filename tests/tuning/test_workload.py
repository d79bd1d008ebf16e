from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from balanced_dp import ArgumentError, ArgumentTypeError, Workload, emulate_devices
from balanced_dp.tuning.models import TokenTransformer
from balanced_dp.tuning.step import measure_step
from balanced_dp.tuning.workload import BUILT_IN, find_workload


@pytest.mark.parametrize("causal", [True, False])
def test_only_causal_layers_hide_what_is_to_come(causal):
    model = TokenTransformer(30, 8, causal, width=16, num_heads=2, num_layers=2).eval()
    tokens = torch.randint(30, (1, 8))
    changed = tokens.clone()
    changed[0, -1] = (tokens[0, -1] + 1) % 30
    same = torch.isclose(model(tokens)[0, :-1], model(changed)[0, :-1], atol=1e-5).all()
    assert bool(same) is causal


@pytest.mark.slow
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_workloads_take_a_step(name):
    """Its batches are the same on each call, so that measurements can be repeated."""
    workload = find_workload(name)
    assert workload.name == name
    with emulate_devices(2, symbolic=True) as devices:
        measured = measure_step(workload, 5, 2, devices)
    assert measured.out_of_memory is None
    assert min(measured.peak_bytes) > 0
    first, again, single = (workload.make_batch(size)[0][0] for size in (6, 6, 1))
    assert torch.equal(first, again)
    assert (len(first), len(single)) == (6, 1)


X, Y = torch.ones(3), torch.zeros(3)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ((X, Y), ((X,), {}, Y)),
        (([X], {"mask": Y}, None), ((X,), {"mask": Y}, None)),
        ((X,), "tuple of Tensor"),
        ((X, {}, Y), "tuple of Tensor, dict, Tensor"),
        (((X,), Y), "tuple of tuple, Tensor"),
        (X, "Tensor"),
        (None, "NoneType"),
    ],
)
def test_batches(batch, expected):
    workload = Workload(nn.Identity(), lambda size: batch, nn.MSELoss())
    if isinstance(expected, tuple):
        assert workload.new_batch(3) == expected
        return
    with pytest.raises(ArgumentTypeError, match=rf"or \(x, y\), but returned {expected}$"):
        workload.new_batch(3)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("net", r"'net'; the built-in .*of your own as package\.module:f"),
        ("nowhere/mine.py:make", "cannot be made: nowhere/mine.py is not a file"),
        ("broken:make", "SyntaxError"),
        ("raises:make", "RuntimeError: not now"),
        (":make", "there is no workload ':make'; the built-in"),
        ("mine.py:", "there is no workload 'mine.py:'; the built-in"),
    ],
)
def test_what_is_no_workload(tmp_path, monkeypatch, target, message):
    (tmp_path / "broken.py").write_text("def make(:")
    (tmp_path / "raises.py").write_text("raise RuntimeError('not now')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ArgumentError, match=message):
        find_workload(target)


def test_a_workload_may_be_named_by_its_file(tmp_path, monkeypatch):
    """As Python finds them for a script, modules beside it can be imported.

    A path may have a colon, as all of Windows have.
    """
    monkeypatch.setattr(sys, "path", sys.path.copy())
    folder = tmp_path / "c:"
    folder.mkdir()
    (folder / "beside_it.py").write_text("from tests.tuning.small_workloads import mlp as it")
    (folder / "named_by_file.py").write_text("from beside_it import it")
    assert isinstance(find_workload(f"{folder}/named_by_file.py:it"), Workload)


def test_a_batch_of_another_size():
    ten = torch.zeros(10, 8)
    workload = Workload(nn.Linear(8, 8), lambda n: (ten, ten), nn.MSELoss())
    with (
        emulate_devices(2, symbolic=True) as devices,
        pytest.raises(ArgumentError, match=r"make_batch\(6\) of workload returned 10 samples"),
    ):
        measure_step(workload, 6, 2, devices)
