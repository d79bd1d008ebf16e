"""Training on several ranks is training on one with the whole batch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from .launch import finished, torchrun
from .worker import CASES

TOLERANCE = 1e-10
ADDRESSES = ("10.77.0.1", "10.77.0.2")

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
def hosts() -> Iterator[list[tuple[str, str]]]:
    """Two network namespaces that reach each other, and nothing else."""
    pid = os.getpid()
    names, links = [f"bdp-{i}-{pid}" for i in range(2)], [f"bdp{i}-{pid}" for i in range(2)]
    if shutil.which("ip") is None:
        pytest.skip("did not run: there is no ip command to make network namespaces with")
    try:
        for name in names:
            ip("netns", "add", name)
        pair = ("type", "veth", "peer", links[1], "netns", names[1])
        ip("link", "add", links[0], "netns", names[0], *pair)
        for name, link, address in zip(names, links, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", link, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield list(zip(names, links, strict=True))
    except subprocess.CalledProcessError as error:
        pytest.skip(f"did not run: network namespaces are not to be had here: {error.stderr}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def results_of_two_hosts(
    hosts: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    path = Path(tmp_path_factory.mktemp("hosts")) / "results.json"
    meeting = ("--nnodes", "2", "--master-addr", ADDRESSES[0], "--master-port", "29511")
    processes = [
        torchrun(
            "worker.py",
            [path],
            (*meeting, "--node-rank", str(index)),
            num_processes=2,
            prefix=("ip", "netns", "exec", name),
            GLOO_SOCKET_IFNAME=link,
        )
        for index, (name, link) in enumerate(hosts)
    ]
    for process in processes:
        exit_code, output = finished(process)
        assert exit_code == 0, output
    return json.loads(path.read_text())


@pytest.mark.parametrize("case", CASES)
def test_ranks_on_two_hosts_train_as_one_process_does(results_of_two_hosts, case):
    assert isinstance(results_of_two_hosts[case], float), results_of_two_hosts[case]
    assert results_of_two_hosts[case] < TOLERANCE
    assert results_of_two_hosts["master"] == ADDRESSES[0]
