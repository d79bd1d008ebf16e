"""Test that ``replaced_data_parallel`` replaces nn.DataParallel in an unchanged script.

It does so for every way in which a script may access nn.DataParallel.
"""

from __future__ import annotations

import gc
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from balanced_dp import BalancedDataParallel, emulate_devices
from balanced_dp.integrations.replacements import replaced_data_parallel
from balanced_dp.tuning.loop import Loop

from ..tuning.measured import option

TORCHS = nn.DataParallel
FILE = importlib.import_module("torch.nn.parallel.data_parallel")  # torch.nn.parallel hides it
INPUTS = torch.ones(10, 4)


class AfterTheEvenSplit(Loop):
    """A ``Loop`` that does not begin with the even split, as if this had already been measured.

    It has one option, which stands for the measurement of the even split.
    """

    options = (option((1,), (1,)),)


@pytest.fixture
def loop() -> Iterator[Loop]:
    with emulate_devices(4, as_cuda=True) as devices:
        loop = AfterTheEvenSplit(1, devices)
        with replaced_data_parallel(loop):
            yield loop
        gc.collect()


WAYS: dict[str, Callable[[], Any]] = {
    "torch.nn": lambda: nn.DataParallel,
    "torch.nn.parallel": lambda: nn.parallel.DataParallel,
    "torch.nn.parallel.data_parallel": lambda: FILE.DataParallel,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_import_the_class(way, loop):
    model = way()(nn.Linear(4, 2).cuda())
    assert isinstance(model, BalancedDataParallel) and isinstance(model, TORCHS)
    assert isinstance(model, way()) and type(model) is way()
    assert not isinstance(model.module, way())
    assert model(INPUTS).shape == (10, 2)
    assert model.chunk_sizes == (1, 3, 3, 3)
    assert pickle.loads(pickle.dumps(type(model))) is way()
    assert pickle.loads(pickle.dumps(model)).split(10) == (1, 3, 3, 3)


CALLS: dict[str, tuple[Any, ...]] = {
    "positional": (lambda m: nn.DataParallel(m, [0, 3], 3, 0), (1, 9), 3),
    "named": (lambda m: nn.DataParallel(device_ids=None, module=m, dim=1), (1, 1, 1, 1), 0),
    # Those are not the devices that are measured.
    "other devices": (lambda m: [nn.DataParallel(m), nn.DataParallel(m, [0, 1])][1], (5, 5), 0),
}


@pytest.mark.parametrize(("wrap", "sizes", "device"), CALLS.values(), ids=CALLS)
def test_it_takes_the_arguments_of_torchs(wrap, sizes, device, loop):
    model = wrap(nn.Identity().cuda())
    output = model(INPUTS)
    assert output.shape == (10, 4) and output.device == torch.device("cuda", device)
    assert model.chunk_sizes == sizes


def test_a_subclass_without_steps_of_its_own(loop):
    class Wrapper(nn.DataParallel):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

    model = Wrapper(nn.Linear(4, 2).cuda())
    assert model.in_features == 4
    assert isinstance(model, Wrapper) and isinstance(model, BalancedDataParallel)
    assert not isinstance(nn.DataParallel(nn.Linear(1, 1).cuda()), Wrapper)


def test_a_subclass_with_steps_of_its_own(loop):
    """Published classes of this name override the steps of nn.DataParallel with their arguments."""

    class Balanced(nn.DataParallel):
        def __init__(self, gpu0_bsz: int, *args: Any, **kwargs: Any) -> None:
            self.gpu0_bsz = gpu0_bsz
            super().__init__(*args, **kwargs)

        def forward(self, *inputs: Any, **kwargs: Any) -> Any:
            inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
            replicas = self.replicate(self.module, self.device_ids)
            outputs = self.parallel_apply(replicas, self.device_ids, inputs, kwargs)
            return self.gather(outputs, self.output_device)

        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            sizes = [self.gpu0_bsz, *[3] * (len(device_ids) - 1)]
            chunks = torch.nn.parallel._functions.Scatter.apply(device_ids, sizes, 0, inputs[0])
            return [(chunk,) for chunk in chunks], [{}] * len(chunks)

        def parallel_apply(self, replicas: Any, device_ids: Any, inputs: Any, kwargs: Any) -> Any:
            return nn.parallel.parallel_apply(replicas, inputs, kwargs, device_ids)

    model = Balanced(1, nn.Linear(4, 2).cuda())
    assert isinstance(model, nn.DataParallel) and isinstance(model, TORCHS)
    assert not isinstance(model, BalancedDataParallel)
    assert torch.equal(model(INPUTS), model.module(INPUTS.cuda()))
    with loop.recording():
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(INPUTS).sum().backward()
            optimizer.step()
    assert min(loop.highest.peak_bytes) > 0


def test_each_call_that_wraps_is_noted_once():
    with emulate_devices(2, as_cuda=True) as devices:
        with replaced_data_parallel(Loop("auto", devices)) as calls:
            line = sys._getframe().f_lineno + 1
            nn.DataParallel(nn.Linear(4, 2).cuda())
            assert calls == [(__file__, line)]
            for _ in range(2):
                nn.DataParallel(nn.Linear(4, 2).cuda())
            assert calls == [(__file__, line), (__file__, line + 3)]
        gc.collect()


def test_everything_is_as_before_afterwards(emulated):
    before = TORCHS, nn.parallel.data_parallel, list(sys.meta_path)
    loop = Loop(1, emulated)
    with pytest.raises(KeyError), replaced_data_parallel(loop):
        assert TORCHS is not nn.DataParallel
        assert before[1] is not FILE.data_parallel is nn.parallel.data_parallel
        raise KeyError
    assert (nn.DataParallel, nn.parallel.data_parallel, list(sys.meta_path)) == before
    assert all(way() is TORCHS for way in WAYS.values())
