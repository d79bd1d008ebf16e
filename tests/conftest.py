from __future__ import annotations

import gc
import importlib.util
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import hypothesis
import pytest
import torch

from balanced_dp import emulate_devices
from balanced_dp.emulation import EmulatedDevices

from . import cuda_stand_in
from .cuda_stand_in import StandIn
from .devices import KINDS, open_devices

# The first call of a model imports torch._dynamo. If it did so in a test without the garbage
# collector, reference cycles with the frames of this call would keep the test's tensors alive.
importlib.import_module("torch._dynamo")

NEEDS = {
    "typer": ["cli", "report", "memory/test_commands.py", "test_documentation.py"],
    "transformers": ["integrations/test_loops.py", "integrations/test_transformers.py"],
    "accelerate": ["integrations/test_loops.py", "integrations/test_transformers.py"],
    "lightning": ["integrations/test_loops.py"],
}
"""For each optional package, the tests that need it."""

MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]
collect_ignore = sorted({file for name in MISSING for file in NEEDS[name]})


def pytest_report_header() -> str | None:
    if not MISSING:
        return None
    return f"not run, for want of {', '.join(MISSING)}: {', '.join(collect_ignore)}"


# Torch's first call of an operator is slow, so examples have no deadline.
hypothesis.settings.register_profile("fast", deadline=None, max_examples=30)
hypothesis.settings.register_profile("all", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Let hypothesis try fewer examples if slow tests are left out."""
    hypothesis.settings.load_profile("fast" if config.option.markexpr == "not slow" else "all")


# Tensors here are tiny, and threads that wait for each other by spinning are slow on busy machines.
torch.set_num_threads(1)


# A shell that starts the tests in the background lets them ignore SIGINT. Without this line, the
# processes that tests start would ignore it, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out tests that are not selected
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of notebooks as slow, since a notebook cannot contain a pytest mark."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.slow)


gc.disable()  # imports make no garbage to collect


def pytest_collection_finish() -> None:
    """Let the garbage collector ignore imported objects, which it would visit each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def collects_what_it_makes() -> None:
    """Let the garbage collector ignore the objects that earlier test modules have left.

    Measured steps run the garbage collector, which would visit these objects.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    # Two kinds of threads live as long as the process: tqdm's monitor, which transformers starts,
    # and, in torch before 2.8, the reader of inductor's workers.
    of_process = ("tqdm_monitor", "_read_thread")
    started = [thread for thread in threading.enumerate() if thread not in before]
    left = {t for t in started if not any(name in t.name for name in of_process)}
    if left:
        gc.collect()  # a model's threads end with the model, which may be part of a cycle
    for thread in left:  # a thread that was told to end may need a moment
        thread.join(5)
    left = {thread for thread in left if thread.is_alive()}
    assert not left, f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Turn the garbage collector off, so that memory is only released by reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """The kind of devices of a test: each of ``KINDS`` in turn, unless the test gives others."""
    return request.param


@pytest.fixture
def devices(kind: str) -> Iterator[list[torch.device]]:
    """Eight devices of ``kind``, as ``open_devices`` gives them."""
    with open_devices(kind, 8) as opened:
        yield opened


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch report that there is no accelerator, even if there is one."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))


@pytest.fixture
def emulated() -> Iterator[list[torch.device]]:
    """Eight emulated devices, for tests that need distinct devices or exactly counted memory."""
    with open_devices("emulated", 8) as opened:
        yield opened


@pytest.fixture
def emulate() -> Iterator[Callable[..., EmulatedDevices]]:
    """A function that opens emulated devices and returns them.

    It takes the arguments of ``emulate_devices``. The devices are closed after the test has ended
    and its tensors have been deleted.
    """
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(emulate_devices(*args, **kwargs))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in for CUDA devices: four devices that need no GPU. A race fails the test."""
    if cuda_stand_in.WHY_NOT is not None:
        pytest.skip(cuda_stand_in.WHY_NOT)
    # nn.DataParallel keeps a list of streams, one for each device that existed at its first use.
    monkeypatch.setattr("torch.nn.parallel._functions._streams", None)
    with cuda_stand_in.opened() as opened:
        yield opened
