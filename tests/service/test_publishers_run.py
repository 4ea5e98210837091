"""service/publishers.py: one load by a command, in this process: where its ranks meet, and how it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import socket
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.running import import_path, own_children
from tests.service.commands import PRINT, run_command
from weightcached.config import ModelConfig
from weightcached.errors import ConnectionFailed, RuntimeDirectoryError
from weightcached.service import publisher_rank, publishers
from weightcached.service.joint import JointLoad
from weightcached.service.models import Model
from weightcached.service.publishers import Publishers, free_port
from weightcached.service.spec import LoadSpec
from weightcached.service.vault import Vault


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher imports this package's modules, whose service runs in another folder."""
    monkeypatch.setenv("PYTHONPATH", import_path())


def test_ranks_on_several_nodes_meet_where_they_are_told(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of two nodes: ranks count from the first one here, of all; without a place to meet nothing is run."""
    config = ModelConfig.model_validate(
        {"name": "m", "checkpoint": "/m", "publisher": ["sh", "-c", PRINT], "tensor_parallel": 3}
    )
    model = Model(config, ("host-0", "GPU-aa"))
    monkeypatch.setattr(Model, "spec", LoadSpec.of(config, model.devices)._replace(first=1))

    assert "1 of its ranks are on other nodes" in str(asyncio.run(Publishers(model, Vault()).run()))
    monkeypatch.setattr(ModelConfig, "meeting", ("10.0.0.1", 29600))
    with caplog.at_level(logging.INFO):
        asyncio.run(Publishers(model, Vault(), JointLoad(1, 60.0, lambda: None)).run())

    said = [record.getMessage() for record in caplog.records]
    for rank, local, last in ((1, "0", []), (2, "0", ["GPU-aa"])):
        lines = [line.removeprefix(f"m: rank {rank}: ") for line in said if line.startswith(f"m: rank {rank}: ")]
        assert lines == [str(rank), local, "3", "2", "10.0.0.1", *last]


@pytest.mark.parametrize("how", ["called off", "failed"])
def test_what_ends_before_a_process_is_started(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Called off while node 0 looks for its own address, or without one: no process, and the other nodes know which."""
    config = ModelConfig.model_validate(
        {"name": "m", "checkpoint": "/m", "publisher": ["sh", "-c", PRINT], "tensor_parallel": 2}
    )
    joint = JointLoad(0, 60.0, lambda: None)
    load = Publishers(Model(config, ("host-0",)), Vault(), joint)

    async def resolve(name: str, port: int) -> str:
        if how == "called off":
            load.call_off()
        raise ConnectionFailed(path=name, problem="is not to be found")

    monkeypatch.setattr(publishers, "resolve", resolve)
    monkeypatch.setattr(ModelConfig, "meeting", ("node-0", 29600))
    with caplog.at_level(logging.INFO):
        error = asyncio.run(load.run())
    assert (error is None) == (how == "called off")
    assert joint.load is not None and joint.load.state == how
    assert not caplog.records


def test_an_error_of_the_service_itself_is_a_failure_for_others(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a socket directory that is no longer to be trusted."""
    config = ModelConfig.model_validate(
        {"name": "m", "checkpoint": "/m", "publisher": ["sh", "-c", PRINT], "tensor_parallel": 2}
    )
    joint = JointLoad(0, 60.0, lambda: None)
    monkeypatch.setattr(ModelConfig, "meeting", ("127.0.0.1", free_port()))

    def not_trusted() -> Path:
        raise RuntimeDirectoryError(path=str(runtime_dir), problem="others can write to it")

    monkeypatch.setattr(publisher_rank, "runtime_dir", not_trusted)
    with pytest.raises(RuntimeDirectoryError):
        asyncio.run(Publishers(Model(config, ("host-0",)), Vault(), joint).run())
    assert joint.load is not None and joint.load.state == "failed"


def test_all_ranks_have_one_free_port(runtime_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same for both, bound by nobody, and another one at the next run."""
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            run_command(("host-0", "host-1"), "sh", "-c", "echo port=$MASTER_PORT", tensor_parallel=2)
    said = [record.getMessage() for record in caplog.records]
    ports = [int(line.rpartition("=")[2]) for line in said if ": port=" in line]
    assert len(ports) == 4
    assert ports[0] == ports[1] != ports[2] == ports[3]
    for port in {*ports}:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_a_service_without_tcp_says_so(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under the unit as shipped: ranks that cannot meet are not started; one alone runs without a place to meet."""

    def refuse() -> int:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(publishers, "free_port", refuse)
    monkeypatch.setenv("MASTER_PORT", "inherited")
    command = ["sh", "-c", "echo port=$MASTER_PORT."]
    with caplog.at_level(logging.INFO):
        _, error = run_command(("host-0", "host-1"), *command, tensor_parallel=2)
        assert "may not use TCP, by which ranks meet" in str(error)
        assert "network.conf.example" in str(error)
        assert not caplog.records
        run_command(("host-0",), *command)
    said = [record.getMessage() for record in caplog.records]
    assert "m: rank 0: port=." in said
    assert len([line for line in said if "no MASTER_PORT for its publisher" in line]) == 1


def test_a_load_that_is_cancelled_leaves_nothing(runtime_dir: Path, descriptors: NoDescriptorLeaks) -> None:
    """Cancelled while its processes run: they are gone when it returns."""
    config = ModelConfig.model_validate({"name": "m", "checkpoint": "/m", "publisher": ["sleep", "600"]})

    async def run() -> list[int]:
        task = asyncio.create_task(Publishers(Model(config, ("host-0",)), Vault()).run())
        async with asyncio.timeout(20):
            while not (pids := own_children("sleep")):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the kernel reports no event for a new child
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return pids

    for pid in asyncio.run(run()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_load_that_is_given_up_ends_with_the_reason(runtime_dir: Path) -> None:
    """Its processes are ended; who waits for the model later has it tried again."""
    config = ModelConfig.model_validate({"name": "m", "checkpoint": "/m", "publisher": ["sleep", "600"]})
    model = Model(config, ("host-0",))

    async def scene() -> None:
        model.begin()
        load = Publishers(model, Vault())
        task = asyncio.create_task(load.run())
        await asyncio.sleep(0)
        load.give_up("node 1 is gone")
        error = await task
        assert error is not None and str(error).endswith("failed: node 1 is gone")
        model.fail(error, killed=load.killed)
        assert model.may_be_tried_again

    asyncio.run(scene())
