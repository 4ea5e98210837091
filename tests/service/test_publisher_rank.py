"""One process of a publisher, run in this process: what it is told, and when it is ended."""

from __future__ import annotations

import logging
import re
import time
from pathlib import Path

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.running import import_path
from tests.service.commands import PRINT, run_command
from weightcached.service import publisher_rank


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The publisher imports this package's modules, whose service runs in another folder."""
    monkeypatch.setenv("PYTHONPATH", import_path())


@pytest.mark.parametrize(
    ("devices", "local", "visible"),
    [
        (("host-0", "host-1"), ["0", "1"], ["inherited", "inherited"]),
        (("GPU-aa", "MIG-bb"), ["0", "0"], ["GPU-aa", "MIG-bb"]),
    ],
)
def test_each_rank_is_told_its_place(
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    devices: tuple[str, ...],
    local: list[str],
    visible: list[str],
) -> None:
    """As torchrun tells a child. On a GPU or a MIG instance it sees that one alone, by UUID, as its number 0."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "inherited")
    with caplog.at_level(logging.INFO):
        run_command(devices, "sh", "-c", PRINT, tensor_parallel=2)
    said = [record.getMessage() for record in caplog.records]
    for rank in (0, 1):
        lines = [line.removeprefix(f"m: rank {rank}: ") for line in said if line.startswith(f"m: rank {rank}: ")]
        assert lines == [str(rank), local[rank], "2", "2", "127.0.0.1", visible[rank]]


@pytest.mark.parametrize("world", [1, 2])
def test_vllms_preload_understands_what_it_is_told(
    runtime_dir: Path, caplog: pytest.LogCaptureFixture, world: int
) -> None:
    """Name, rank, number of ranks and the place to meet, in the environment of this package's own publisher."""
    program = "from weightcached.engines.vllm.preload import Place; print(*Place.from_environment())"
    devices = tuple(f"host-{rank}" for rank in range(world))
    with caplog.at_level(logging.INFO):
        run_command(devices, "python", "-c", program, tensor_parallel=world)
    said = [record.getMessage() for record in caplog.records if "tcp://" in record.getMessage()]
    met = {line.rpartition(" ")[2] for line in said}
    assert len(said) == world
    assert len(met) == 1
    assert re.fullmatch(r"tcp://127\.0\.0\.1:[0-9]+", met.pop())
    assert {line.rpartition(" ")[0] for line in said} == {f"m: rank {rank}: m {rank} {world}" for rank in range(world)}


def test_who_says_nothing_for_long_is_ended(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, descriptors: NoDescriptorLeaks
) -> None:
    """Half a second here: one that speaks more often goes on, and its silence afterwards ends it and its child."""
    monkeypatch.setattr(publisher_rank, "SILENT_SECONDS", 0.5)
    began = time.monotonic()
    load, error = run_command(("host-0",), "sh", "-c", "for i in 1 2 3 4; do echo $i; sleep 0.25; done; sleep 600")
    assert "has said nothing for 0 s and was ended; it said last: 1 | 2 | 3 | 4" in str(error)
    assert 1.0 < time.monotonic() - began < 20
    assert not load.killed


def test_a_failed_rank_does_not_wait_for_what_it_has_started(runtime_dir: Path) -> None:
    """Its child, which holds the output open, goes with it: the other rank is ended at once."""
    began = time.monotonic()
    command = "if [ $RANK = 1 ]; then sleep 600 & exit 3; else exec sleep 600; fi"
    _, error = run_command(("host-0", "host-1"), "sh", "-c", command, tensor_parallel=2)
    assert "of rank 1 on host-1 ended by exit status 3" in str(error)
    assert time.monotonic() - began < publisher_rank.END_SECONDS
