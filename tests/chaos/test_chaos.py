"""Nothing is lost, leaked or left behind while processes are killed at random; the checks would see it if it were.

$WEIGHTCACHED_CHAOS_ROUNDS rounds (200), of the seed $WEIGHTCACHED_CHAOS_SEED (random, and printed).
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.chaos.driver import Chaos
from tests.chaos.plan import Planner
from tests.chaos.tracing import OF_PUBLISHERS, POINTS
from tests.chaos.world import Violation, send
from tests.running import wait_for_end
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Evict, Load

PACKAGE = Path(__file__).parents[2] / "weightcached"
AT_ONCE = 1.0  # seconds that a check gets to see what will not pass, beside what will


@pytest.fixture(scope="module")
def chaos() -> Iterator[Chaos]:
    seed = int(os.environ.get("WEIGHTCACHED_CHAOS_SEED") or secrets.randbelow(10**6))
    with Chaos(seed) as run:
        yield run


def test_every_point_of_the_code_is_known_and_the_other_way_round() -> None:
    """The driver can strike at each `point("...")` of the package, and names none that is not there."""
    found = [name for path in PACKAGE.rglob("*.py") for name in re.findall(r'\bpoint\("([^"]+)"\)', path.read_text())]

    assert sorted(set(found)) == sorted([*OF_PUBLISHERS, *(name for names in POINTS.values() for name in names)])


def test_a_seed_decides_everything() -> None:
    """Two planners of one seed plan the same rounds, and another seed others."""
    one, same, other = ([str(planner.next()) for _ in range(100)] for planner in map(Planner, (7, 7, 8)))

    assert one == same != other


def test_a_stored_copy_too_many_is_found(chaos: Chaos) -> None:
    """A descriptor in the store that belongs to no cached shard."""
    chaos.checker.settled(set())
    name, fd = next(iter(chaos.world.manager.stored.items()))
    chaos.world.manager.put(f"{name}9", fd)
    try:
        with pytest.raises(Violation, match="store: "):
            chaos.checker.settled(set(), AT_ONCE)
    finally:
        chaos.world.manager.remove(f"{name}9")
    chaos.checker.settled(set())


def test_a_memfd_that_a_process_keeps_is_found(chaos: Chaos) -> None:
    """An engine that holds memory of the service beyond what it has attached."""
    engine = chaos.world.engines[0]
    engine.ask("leak")
    with pytest.raises(Violation, match=r"engine [0-9]+: 1 memfds for 0"):
        chaos.checker.settled(set(), AT_ONCE)
    send(engine.pid, signal.SIGKILL)
    chaos.world.revive()
    chaos.checker.settled(set())


def test_a_descriptor_that_a_worker_keeps_is_found(chaos: Chaos) -> None:
    """A worker with one socket more than at rest (two, where the connection of the status is still to be closed)."""
    path = chaos.world.runtime_dir / "host-1.sock"
    with (
        closing(Connection.open(path, device="host-1", client="chaos")),
        pytest.raises(Violation, match=r"worker: more descriptors than at rest: {'socket': [12]}"),
    ):
        chaos.checker.settled(set(), AT_ONCE)
    chaos.checker.settled(set())


def test_an_orphan_is_found(chaos: Chaos) -> None:
    """A process whose parent has ended."""
    shell = subprocess.run(["sh", "-c", "sleep 1000 >&2 & echo $!"], stdout=subprocess.PIPE, check=True)
    orphan = int(shell.stdout)
    try:
        with pytest.raises(Violation, match=f"orphan or left over: {orphan} sleep"):
            chaos.checker.settled(set(), AT_ONCE)
    finally:
        send(orphan, signal.SIGKILL)
    wait_for_end(orphan)
    chaos.checker.settled(set())


def test_a_lost_shard_is_found(chaos: Chaos) -> None:
    """A model that is gone though nobody was meant to touch it, and one that was loaded again."""
    chaos.checker.settled(set())
    chaos.world.ask(Evict("plain"))
    with pytest.raises(Violation, match=r"lost: Shard\(device='host-0', model='plain'"):
        chaos.checker.settled(set(), AT_ONCE)
    chaos.world.ask(Load("plain"))
    with pytest.raises(Violation, match=r"lost: Shard\(device='host-0', model='plain'"):
        chaos.checker.settled(set(), 1.0)
    chaos.checker.settled({"plain"})


def test_wrong_bytes_are_found(chaos: Chaos) -> None:
    """A shard whose bytes are not those of its content."""
    files = chaos.world.models["cut"]
    content = files.order[files.current]
    right = files.contents[content]
    files.contents[content] = right[::-1]
    try:
        with pytest.raises(Violation, match=r"cut rank 0 .*has other bytes"):
            chaos.checker.look("cut", 0.0)
    finally:
        files.contents[content] = right
    chaos.checker.look("cut", 0.0)


def test_a_lock_that_nobody_holds_is_found(chaos: Chaos) -> None:
    """A lock file that was replaced under its holder."""
    path = chaos.world.runtime_dir / "host-0.lock"
    aside = path.with_suffix(".aside")
    path.rename(aside)
    path.write_bytes(aside.read_bytes())
    try:
        with pytest.raises(Violation, match=r"host-0.lock is not locked"):
            chaos.checker.settled(set(), AT_ONCE)
    finally:
        aside.rename(path)
    chaos.checker.settled(set())


@pytest.mark.timeout(900)
def test_rounds(chaos: Chaos) -> None:
    """Random loads, attaches, evictions, reloads, config changes and kills; after each round all checks are content."""
    rounds = int(os.environ.get("WEIGHTCACHED_CHAOS_ROUNDS", "200"))
    print(f"chaos: seed {chaos.seed}, {rounds} rounds; again: python -m tests.chaos.driver --seed {chaos.seed}")

    while chaos.done < rounds:
        chaos.round()

    assert chaos.world.manager.starts > 1 or rounds < 50  # the service itself was killed now and then
