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
import torch._dynamo  # noqa: F401, or the first call of a model does, and leaves cycles with its frames

from balanced_dp import emulate_devices
from balanced_dp.emulation import EmulatedDevices

from . import cuda_stand_in
from .cuda_stand_in import StandIn
from .devices import KINDS, open_devices

NEEDS = {
    "typer": ["cli", "report", "memory/test_commands.py", "test_documentation.py"],
    "transformers": ["integrations/test_loops.py", "integrations/test_transformers.py"],
    "accelerate": ["integrations/test_loops.py", "integrations/test_transformers.py"],
    "lightning": ["integrations/test_loops.py"],
}
"""What an extra, or a package of the group dev, is needed for."""

MISSING = [name for name in NEEDS if importlib.util.find_spec(name) is None]
collect_ignore = sorted({file for name in MISSING for file in NEEDS[name]})


def pytest_report_header() -> str | None:
    if not MISSING:
        return None
    return f"not run, for want of {', '.join(MISSING)}: {', '.join(collect_ignore)}"


# Torch's first call of an operator is slow, and speed is not what these tests are about.
hypothesis.settings.register_profile("fast", deadline=None, max_examples=30)
hypothesis.settings.register_profile("all", deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples where what is slow is left out."""
    hypothesis.settings.load_profile("fast" if config.option.markexpr == "not slow" else "all")


# Tensors here are tiny, and threads that wait for each other in spinning are slow on busy machines.
torch.set_num_threads(1)


# A shell that starts the tests in the background lets them ignore it, and so would their processes.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before those that are not asked for are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the notebooks, which have no other place for it."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker(pytest.mark.slow)


gc.disable()  # nothing that is imported is garbage


def pytest_collection_finish() -> None:
    """Take what was imported from the garbage collector, which would look at it each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def collects_what_it_makes() -> None:
    """Take what earlier modules left from the garbage collector, which measured steps run."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_thread_left_behind() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    # tqdm's monitor, which transformers starts, lives as long as the process, and so does the
    # reader of inductor's workers in torch before 2.8.
    of_process = ("tqdm_monitor", "_read_thread")
    started = [thread for thread in threading.enumerate() if thread not in before]
    left = {t for t in started if not any(name in t.name for name in of_process)}
    if left:
        gc.collect()  # a model's threads end with it, and it may be part of a cycle
    for thread in left:  # one that was told to end may need a moment
        thread.join(5)
    left = {thread for thread in left if thread.is_alive()}
    assert not left, f"threads left behind: {left}"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Turn the garbage collector off: memory must be released by counting references alone."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of devices in turn, or those that a test is parametrized with."""
    return request.param


@pytest.fixture
def devices(kind: str) -> Iterator[list[torch.device]]:
    """Eight devices of each kind in turn."""
    with open_devices(kind, 8) as opened:
        yield opened


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide GPUs where there are any."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))


@pytest.fixture
def emulated() -> Iterator[list[torch.device]]:
    """Eight emulated devices, for what only distinct devices or an exact ledger can show."""
    with open_devices("emulated", 8) as opened:
        yield opened


@pytest.fixture
def emulate() -> Iterator[Callable[..., EmulatedDevices]]:
    """A function that opens emulated devices until the test has ended and its tensors are gone."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(emulate_devices(*args, **kwargs))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Four devices of CUDA's kind that need no GPU; a race fails the test."""
    if cuda_stand_in.WHY_NOT is not None:
        pytest.skip(cuda_stand_in.WHY_NOT)
    # torch's nn.DataParallel has one for each device that there was when it was first used.
    monkeypatch.setattr("torch.nn.parallel._functions._streams", None)
    with cuda_stand_in.opened() as opened:
        yield opened
