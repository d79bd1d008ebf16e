from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .driver import Driver, build

FLAGS = {
    "newest": (),
    "no memory v2": ("-DNO_MEMORY_V2",),
    "no processes v3": ("-DNO_PROCESSES_V3",),
    "no processes": ("-DNO_PROCESSES_V3", "-DNO_PROCESSES_V2"),
}


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Several versions of the stand-in driver library, by name."""
    if shutil.which("gcc") is None:
        pytest.fail("these tests build a stand-in for NVIDIA's driver and need gcc on the PATH")
    folder = tmp_path_factory.mktemp("drivers")
    return {name: build(folder / name.replace(" ", "_"), *flags) for name, flags in FLAGS.items()}


@pytest.fixture
def driver(builds: dict[str, Path], tmp_path: Path) -> Driver:
    return Driver(builds["newest"], tmp_path / "state")


@pytest.fixture
def make_driver(builds: dict[str, Path], tmp_path: Path):
    return lambda name: Driver(builds[name], tmp_path / name.replace(" ", "_"))
