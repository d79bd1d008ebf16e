"""nn.DataParallel and Trainer of a script, replaced by ours however the script gets at them."""

from __future__ import annotations

import gc
import importlib
import io
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


@pytest.fixture
def recorder() -> Iterator[Loop]:
    with emulate_devices(4, as_cuda=True) as devices:
        recorder = Loop(1, devices)
        recorder.options[()] = option((1,), (1,))  # after the even split, to compare with
        with replaced_data_parallel(recorder):
            yield recorder
        recorder.model = recorder._optimizer = None
        gc.collect()


FILE = importlib.import_module("torch.nn.parallel.data_parallel")  # torch.nn.parallel hides it
WAYS: dict[str, Callable[[], Any]] = {
    "torch.nn.DataParallel": lambda: nn.DataParallel,
    "torch.nn.parallel.DataParallel": lambda: nn.parallel.DataParallel,
    "from torch.nn.parallel.data_parallel": lambda: FILE.DataParallel,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_way_to_import_the_class(way, recorder):
    model = way()(nn.Linear(4, 2).cuda())
    assert isinstance(model, BalancedDataParallel)
    assert isinstance(model, way()) and isinstance(model, TORCHS)
    assert model(torch.ones(10, 4)).shape == (10, 2)
    assert model.chunk_sizes == (1, 3, 3, 3)
    model.close()


def test_it_has_the_arguments_of_torchs(recorder):
    model = nn.DataParallel(nn.Linear(4, 2).cuda(1), [1, 3], 3, 0)
    output = model(torch.ones(6, 4))
    assert (output.device, model.chunk_sizes) == (torch.device("cuda:3"), (1, 5))
    model.close()


def test_batches_along_another_dimension(recorder):
    model = nn.DataParallel(device_ids=None, module=nn.Identity().cuda(), dim=1)
    assert model(torch.ones(3, 7)).shape == (3, 7)
    assert model.chunk_sizes == (1, 2, 2, 2)
    other = nn.DataParallel(nn.Identity().cuda(), [0, 1])  # not the devices that are measured
    assert other(torch.ones(8, 1)).shape == (8, 1)
    assert other.chunk_sizes == (4, 4)
    for wrapped in (model, other):
        wrapped.close()


def test_instances_of_other_classes_are_none(recorder):
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
    assert not isinstance(model.module, nn.DataParallel)


def test_the_functional_form(recorder):
    layer = nn.Linear(4, 2).cuda()
    inputs = torch.ones(9, 4)
    for function in (nn.parallel.data_parallel, FILE.data_parallel):
        output = function(layer, inputs)
        assert torch.equal(output, layer(inputs.cuda()))
        output = function(layer, None, [0, 1], 1, module_kwargs={"input": inputs})
        assert output.device == torch.device("cuda:1")


def test_a_subclass_with_steps_of_its_own(recorder):
    """Published classes of this name override the steps of nn.DataParallel with their arguments."""

    class Balanced(nn.DataParallel):
        def __init__(self, gpu0_bsz: int, *args: Any, **kwargs: Any) -> None:
            self.gpu0_bsz = gpu0_bsz
            super().__init__(*args, **kwargs)

        def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
            sizes = [self.gpu0_bsz, *[3] * (len(device_ids) - 1)]
            chunks = torch.nn.parallel._functions.Scatter.apply(device_ids, sizes, 0, inputs[0])
            return [(chunk,) for chunk in chunks], [{}] * len(chunks)

    model = Balanced(1, nn.Linear(4, 2).cuda())
    assert isinstance(model, nn.DataParallel) and isinstance(model, TORCHS)
    assert not isinstance(model, BalancedDataParallel)
    with recorder.recording():
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            model(torch.ones(10, 4)).sum().backward()
            optimizer.step()
    assert min(recorder.last.peak_bytes) > 0


def test_a_wrapped_model_can_be_pickled_as_torchs(recorder):
    model = nn.DataParallel(nn.Linear(4, 2).cuda())
    assert type(model).__module__ == "torch.nn.parallel.data_parallel"
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)
    stream.seek(0)
    model.load_state_dict(torch.load(stream))


def test_the_places_of_calls_are_noted():
    with emulate_devices(2, as_cuda=True) as devices:
        with replaced_data_parallel(Loop("auto", devices)) as calls:
            line = sys._getframe().f_lineno + 1
            nn.DataParallel(nn.Linear(4, 2).cuda())
            assert calls == [(__file__, line)]
            for _ in range(2):
                nn.DataParallel(nn.Linear(4, 2).cuda())
            assert calls == [(__file__, line), (__file__, line + 3)]
        gc.collect()


def test_everything_is_as_before_afterwards():
    before = TORCHS, nn.parallel.data_parallel, list(sys.meta_path)
    with emulate_devices(2) as devices:
        recorder = Loop("auto", devices)
        with pytest.raises(KeyError), replaced_data_parallel(recorder):
            assert nn.DataParallel is not TORCHS
            raise KeyError
    assert (nn.DataParallel, nn.parallel.data_parallel, list(sys.meta_path)) == before
    assert nn.parallel.DataParallel is TORCHS
    assert FILE.DataParallel is TORCHS
