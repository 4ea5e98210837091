"""settling: the first seconds of a worker that has adopted something, on a loop of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.worker.test_catalogue import shard
from weightcached.worker import settling
from weightcached.worker.catalogue import Catalogue
from weightcached.worker.settling import Settling


@pytest.fixture
def catalogue(descriptors: NoDescriptorLeaks) -> Catalogue:
    return Catalogue("host-0", 1000)


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await body()

    asyncio.run(main())


def test_nothing_adopted_nothing_to_wait_for(catalogue: Catalogue) -> None:
    """A worker that begins empty is settled at once, and so is one that has not begun."""

    async def body() -> None:
        found = Settling(catalogue)
        await found.over()
        found.begin()
        assert found.seconds_left == 0.0
        await found.over()
        called: list[int] = []
        found.then(lambda: called.append(1))
        assert called == [1]

    run(body)


def test_what_was_adopted_settles(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adopted shards are marked until the time is over, which everybody who waits is told then, in order; what is
    published meanwhile is not marked."""
    monkeypatch.setattr(settling, "RENEW_SECONDS", 0.1)

    async def body() -> None:
        adopted, published = shard("a"), shard("b")
        catalogue.insert(adopted)
        found = Settling(catalogue)
        found.begin()
        catalogue.insert(published)
        assert (adopted.settling, published.settling) == (True, False)
        assert 0 < found.seconds_left <= 0.1
        told: list[bool] = []
        found.then(lambda: told.append(adopted.settling))
        waiting = [asyncio.create_task(found.over()) for _ in range(2)]
        await asyncio.sleep(0)
        assert told == []
        await asyncio.gather(*waiting)
        assert told == [False]
        assert found.seconds_left == 0.0
        await found.over()

    run(body)
    catalogue.close()


def test_who_gives_up_waiting_disturbs_nobody(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asked for an eviction and went away is not waited for; the others are told all the same."""
    monkeypatch.setattr(settling, "RENEW_SECONDS", 0.1)

    async def body() -> None:
        catalogue.insert(shard("a"))
        found = Settling(catalogue)
        found.begin()
        gone, stays = (asyncio.create_task(found.over()) for _ in range(2))
        await asyncio.sleep(0)
        gone.cancel()
        await stays
        assert gone.cancelled()

    run(body)
    catalogue.close()
