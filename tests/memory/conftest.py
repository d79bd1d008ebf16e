from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .driver import Driver, build


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The stand-in driver library, and one that is older than driver 510."""
    if shutil.which("gcc") is None:
        pytest.fail("these tests build a stand-in for NVIDIA's driver and need gcc on the PATH")
    folder = tmp_path_factory.mktemp("drivers")
    return build(folder / "new"), build(folder / "old", "-DBEFORE_510")


@pytest.fixture
def driver(builds: tuple[Path, Path], tmp_path: Path) -> Driver:
    return Driver(builds[0], tmp_path / "state")


@pytest.fixture
def old_driver(builds: tuple[Path, Path], tmp_path: Path) -> Driver:
    return Driver(builds[1], tmp_path / "old_state")
