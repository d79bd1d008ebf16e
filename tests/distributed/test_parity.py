"""Training on several ranks is training on one with the whole batch."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .launch import finished, torchrun
from .worker import CASES

TOLERANCE = 1e-10

Results = dict[str, float | str]


@pytest.fixture(scope="module", params=[2, 3, 4], ids="{} ranks".format)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What all cases came to; the processes are started once."""
    path = tmp_path_factory.mktemp("ranks") / "results.json"
    exit_code, output = finished(torchrun("worker.py", [path], num_processes=request.param))
    assert exit_code == 0, output
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", CASES)
def test_ranks_train_as_one_process_does(results, case):
    assert isinstance(results[case], float), results[case]
    assert results[case] < TOLERANCE


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, str]]:
    """Two network namespaces that reach each other, and nothing else."""
    names = ("balanced-dp-0", "balanced-dp-1")
    if shutil.which("ip") is None:
        pytest.skip("did not run: there is no ip command to make network namespaces with")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "bdp0", "netns", names[0], "type", "veth", "peer", "bdp1", "netns", names[1])
        for index, name in enumerate(names):
            inside = ("-n", name)
            ip(*inside, "address", "add", f"10.77.0.{index + 1}/24", "dev", f"bdp{index}")
            ip(*inside, "link", "set", f"bdp{index}", "up")
            ip(*inside, "link", "set", "lo", "up")
        yield names
    except subprocess.CalledProcessError as error:
        pytest.skip(f"did not run: network namespaces are not to be had here: {error.stderr}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def results_of_two_hosts(
    hosts: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    path = Path(tmp_path_factory.mktemp("hosts")) / "results.json"
    meeting = ("--nnodes", "2", "--master-addr", "10.77.0.1", "--master-port", "29511")
    processes = [
        torchrun(
            "worker.py",
            [path],
            (*meeting, "--node-rank", str(index)),
            num_processes=2,
            prefix=("ip", "netns", "exec", name),
            GLOO_SOCKET_IFNAME=f"bdp{index}",
        )
        for index, name in enumerate(hosts)
    ]
    for process in processes:
        exit_code, output = finished(process)
        assert exit_code == 0, output
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", CASES)
def test_ranks_on_two_hosts_train_as_one_process_does(results_of_two_hosts, case):
    assert isinstance(results_of_two_hosts[case], float), results_of_two_hosts[case]
    assert results_of_two_hosts[case] < TOLERANCE
    assert results_of_two_hosts["master"] == "10.77.0.1"
