"""catalogue: the life of a shard and the arithmetic of room, without sockets and with a device of the test's own."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.leaks import NoDescriptorLeaks
from weightcached.devices import Memory
from weightcached.errors import DeviceFull, KeyMismatch, ManifestError, ModelInUse, NoSuchModel, ProtocolError
from weightcached.fds import OwnedFd
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import ManifestHead, SlabEntry
from weightcached.wire.messages import Renew
from weightcached.wire.peer import Peer
from weightcached.worker.catalogue import Catalogue, Reservation, Shard

PEER = Peer(42, 1000, "python")
OTHER = Peer(43, 1000, "vllm")
NOW = "2026-01-01T00:00:00+00:00"


class Device:
    """A device whose memory the test sets."""

    def __init__(self, free: int = 1 << 40) -> None:
        self.total = 1 << 40
        self.free = free

    def __call__(self) -> Memory:
        return Memory(total=self.total, free=self.free)


def head(model: str = "m", generation: int = 1, nbytes: int = 100, **changes: Any) -> ManifestHead:
    fields: dict[str, Any] = {
        "model": model, "generation": generation, "device": "host-0", "key": ShardKey(content="c", dtype="float32"),
        "slabs": (SlabEntry(nbytes - 1), SlabEntry(1)), "tensor_count": 0, "created": NOW,
    }  # fmt: skip
    return ManifestHead(**{**fields, **changes})


def shard(model: str = "m", generation: int = 1, nbytes: int = 100, **changes: Any) -> Shard:
    """A shard with three real descriptors."""
    manifest, *slabs = [OwnedFd(os.open(os.devnull, os.O_RDONLY)) for _ in range(3)]
    return Shard(head(model, generation, nbytes, **changes), manifest, slabs)


class OnDevice(Catalogue):
    """A catalogue with room for 1000 bytes that is told the memory of a device."""

    def __init__(self, device: Device) -> None:
        super().__init__("host-0", 1000)
        self.memory = device

    def reserve(  # type: ignore[override]
        self, model: str, nbytes: int, peer: Peer, peak: int | None = None
    ) -> Reservation:
        return super().reserve(model, nbytes, peer, self.memory(), peak)

    def victims(self, model: str, nbytes: int, peak: int | None = None) -> list[Shard]:  # type: ignore[override]
        return super().victims(model, nbytes, self.memory(), peak)


@pytest.fixture
def catalogue(descriptors: NoDescriptorLeaks) -> Catalogue:
    """Room for 1000 bytes on a device that has plenty."""
    return OnDevice(Device())


def publish(catalogue: Catalogue, model: str = "m", nbytes: int = 100) -> Shard:
    """The way of a publisher: reserve, publish, in place."""
    reservation = catalogue.reserve(model, nbytes, PEER)
    made = shard(model, reservation.generation, nbytes)
    catalogue.check_publish(reservation, made.head)
    catalogue.release(reservation)
    catalogue.insert(made)
    return made


def full(catalogue: Catalogue, nbytes: int, model: str = "x") -> DeviceFull:
    with pytest.raises(DeviceFull) as caught:
        catalogue.reserve(model, nbytes, PEER)
    return caught.value


def test_from_nothing_to_nothing(catalogue: Catalogue) -> None:
    """reserve, publish, attach, evict, last lease: at each step the bytes are counted once."""
    assert (catalogue.shards, catalogue.held, catalogue.find("m")) == ([], 0, None)
    reservation = catalogue.reserve("m", 120, PEER)
    assert (catalogue.held, catalogue.reservations) == (120, [reservation])
    made = shard(nbytes=100)
    catalogue.check_publish(reservation, made.head)
    catalogue.release(reservation)
    assert catalogue.insert(made) is None
    assert (catalogue.held, catalogue.reservations, catalogue.find("m")) == (100, [], made)
    lease = catalogue.lease(made, PEER, NOW)
    assert catalogue.evict("m", force=True) is made
    assert (catalogue.held, catalogue.find("m"), catalogue.shards) == (100, None, [made])
    catalogue.end_lease(lease)
    assert (catalogue.held, catalogue.shards) == (0, [])


def test_a_shard_describes_itself(catalogue: Catalogue) -> None:
    """A status names model, generation, bytes, key and every holder; a draining shard says that it drains."""
    made = publish(catalogue)
    lease = catalogue.lease(made, OTHER, NOW)
    described = made.describe()
    assert described["state"] == "cached"
    assert (described["model"], described["generation"], described["nbytes"]) == ("m", 1, 100)
    assert described["key"]["dtype"] == "float32"
    assert described["leases"] == [
        {"id": lease.id, "pid": 43, "command": "vllm", "uid": 1000, "since": NOW, "nbytes": 100, "ended": False}
    ]
    catalogue.evict("m", force=True)
    assert made.describe()["state"] == "draining"


class TestRoom:
    """What is free is the limit less everything held, and never more than the device itself has."""

    def test_the_limit_is_reached_exactly(self, catalogue: Catalogue) -> None:
        """The last byte may be reserved, not one more."""
        catalogue.reserve("a", 400, PEER)
        assert full(catalogue, 601).free == 600
        catalogue.reserve("b", 600, PEER)
        assert full(catalogue, 1).free == 0
        catalogue.reserve("c", 0, PEER)

    def test_everything_held_counts(self, catalogue: Catalogue) -> None:
        """Cached shards, draining shards and reservations all take room; the error lists each with its bytes."""
        made = publish(catalogue, "cached", 100)
        draining = publish(catalogue, "old", 200)
        catalogue.lease(draining, PEER, NOW)
        catalogue.evict("old", force=True)
        catalogue.reserve("coming", 300, PEER)

        error = full(catalogue, 500)

        assert error.fields == {
            "device": "host-0", "needed": 500, "free": 400, "evictable": 100, "limit": 1000, "others": 0,
            "holders": [
                "cached 100 bytes", "old 200 bytes (draining, in use by pid 42 (python))", "coming 300 bytes (loading)",
            ],
            "advice": "evict a model or raise memory_limit",
        }  # fmt: skip
        assert "needed 500 bytes, free 400 bytes of a limit of 1000" in str(error)
        made.close()

    def test_room_comes_back(self, catalogue: Catalogue) -> None:
        """Released once or twice, a reservation gives its room back once; an evicted shard gives it back at once, a
        draining one with its last lease."""
        reservation = catalogue.reserve("a", 1000, PEER)
        catalogue.release(reservation)
        catalogue.release(reservation)
        assert catalogue.held == 0
        made = publish(catalogue, "m", 1000)
        leases = [catalogue.lease(made, PEER, NOW) for _ in range(2)]
        catalogue.evict("m", force=True)
        catalogue.end_lease(leases[0])
        assert full(catalogue, 1).free == 0
        catalogue.end_lease(leases[1])
        catalogue.reserve("a", 1000, PEER)

    def test_the_device_has_the_last_word(self, descriptors: NoDescriptorLeaks) -> None:
        """Memory that others use is not free, whatever the limit; nor is what reservations will still take."""
        device = Device(free=500)
        catalogue = OnDevice(device)
        assert full(catalogue, 501).free == 500
        catalogue.reserve("a", 300, PEER)
        assert full(catalogue, 201).free == 200
        device.free = 100  # somebody else took what was reserved
        assert full(catalogue, 1).free == 0

    def test_a_publish_may_be_smaller_than_its_reservation(self, catalogue: Catalogue) -> None:
        """Only what was published stays counted."""
        reservation = catalogue.reserve("m", 900, PEER)
        made = shard(nbytes=100)
        catalogue.check_publish(reservation, made.head)
        catalogue.release(reservation)
        catalogue.insert(made)
        assert catalogue.held == 100
        made.close()

    def test_a_negative_reservation_is_refused(self, catalogue: Catalogue) -> None:
        """Nobody makes room by asking for less than nothing."""
        with pytest.raises(ProtocolError, match="-1 bytes"):
            catalogue.reserve("m", -1, PEER)
        assert catalogue.held == 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "other"}, "model is 'other', reserved was 'm'"),
        ({"generation": 2}, "generation is 2, reserved was 1"),
        ({"device": "host-1"}, "device is 'host-1', reserved was 'host-0'"),
        ({"nbytes": 101}, "101 bytes published, 100 were reserved"),
    ],
)
def test_a_publish_must_be_what_was_reserved(catalogue: Catalogue, changes: dict[str, Any], problem: str) -> None:
    """Another model, generation, device or more bytes than reserved: refused."""
    reservation = catalogue.reserve("m", 100, PEER)
    with pytest.raises(ManifestError, match=problem):
        catalogue.check_publish(reservation, head(**changes))


class TestGenerations:
    """A number is given out once for a model, whatever becomes of it."""

    def test_a_number_is_never_given_twice(self, catalogue: Catalogue) -> None:
        """Given back, evicted, replaced or pending: the next reservation gets the next number."""

        def reserve() -> Reservation:
            return catalogue.reserve("m", 0, PEER)

        first = reserve()
        catalogue.release(first)
        pending = reserve()
        assert (first.generation, pending.generation) == (1, 2)
        publish(catalogue)
        assert catalogue.find("m").generation == 3  # type: ignore[union-attr]
        catalogue.evict("m", force=False)
        assert reserve().generation == 4
        assert catalogue.reserve("other", 0, PEER).generation == 1

    def test_a_refused_reservation_uses_none(self, catalogue: Catalogue) -> None:
        """A reservation that finds no room takes no number."""
        full(catalogue, 2000, "m")
        assert catalogue.reserve("m", 0, PEER).generation == 1

    def test_numbers_of_the_time_before_are_remembered(self, catalogue: Catalogue) -> None:
        """A worker that starts again goes on from what was ever given out, and from what it adopts."""
        catalogue.remember_generations({"m": 7, "n": 3})
        catalogue.remember_generations({"m": 5})
        assert catalogue.reserve("m", 0, PEER).generation == 8
        catalogue.insert(adopted := shard("n", 9))
        assert catalogue.reserve("n", 0, PEER).generation == 10
        adopted.close()


class TestReplace:
    """The next generation is published beside the old one, then takes its place."""

    def test_the_old_one_drains(self, catalogue: Catalogue) -> None:
        """With leases the old shard's bytes count until they end; its descriptors are closed at the switch."""
        old = publish(catalogue)
        lease = catalogue.lease(old, PEER, NOW)
        new = publish(catalogue, nbytes=50)
        assert catalogue.find("m") is new
        assert catalogue.shards == [new, old]
        assert (old.closed, new.closed, catalogue.held) == (True, False, 150)
        catalogue.end_lease(lease)
        assert (catalogue.shards, catalogue.held) == ([new], 50)
        new.close()

    def test_the_old_one_goes_at_once_without_leases(self, catalogue: Catalogue) -> None:
        """Nobody holds it, so nothing of it is left."""
        old = publish(catalogue)
        new = publish(catalogue)
        assert (old.closed, catalogue.shards, catalogue.held) == (True, [new], 100)
        new.close()

    def test_insert_returns_the_one_that_is_no_longer_current(self, catalogue: Catalogue) -> None:
        """The caller is told which shard has been replaced."""
        old, new = shard(generation=1), shard(generation=2)
        assert catalogue.insert(old) is None
        assert catalogue.insert(new) is old
        new.close()

    def test_an_older_one_that_comes_late_loses(self, catalogue: Catalogue) -> None:
        """Of two publishers the one that reserved last wins, whichever is done first; the other's shard is closed."""
        new, old = shard(generation=2), shard(generation=1)
        catalogue.insert(new)
        assert catalogue.insert(old) is old
        assert (old.closed, new.closed, catalogue.find("m")) == (True, False, new)
        assert catalogue.held == 100
        new.close()


class TestEvict:
    """Evicting drops a shard, or says why not."""

    def test_an_absent_model_is_named_with_what_is_there(self, catalogue: Catalogue) -> None:
        """`NoSuchModel` lists the models of the device."""
        made = publish(catalogue, "other")
        with pytest.raises(NoSuchModel, match="no model m on host-0; there: other"):
            catalogue.evict("m", force=True)
        made.close()

    def test_a_model_in_use_stays(self, catalogue: Catalogue) -> None:
        """Without force a leased shard is kept, and its holders are named."""
        made = publish(catalogue)
        lease = catalogue.lease(made, OTHER, NOW)
        with pytest.raises(ModelInUse) as caught:
            catalogue.evict("m", force=False)
        assert caught.value.holders == ["pid 43 (vllm)"]
        assert (catalogue.find("m"), made.closed) == (made, False)
        catalogue.end_lease(lease)
        assert catalogue.evict("m", force=False) is made
        assert made.closed

    def test_a_drained_model_may_come_again(self, catalogue: Catalogue) -> None:
        """A model that is evicted by force can be published again while its old holders live; each drains alone."""
        old = publish(catalogue)
        lease = catalogue.lease(old, PEER, NOW)
        catalogue.evict("m", force=True)
        new = publish(catalogue)
        assert catalogue.shards == [new, old]
        catalogue.end_lease(lease)
        assert catalogue.shards == [new]
        new.close()


class TestRenew:
    """Leases that a worker before this one has granted. What clients may say is in `test_handlers`."""

    def said(self, **changes: Any) -> Renew:
        fields = {"model": "m", "generation": 1, "created": NOW, "nbytes": 100, "since": NOW}
        return Renew(**{**fields, **changes})

    def test_the_current_one_before_any_other(self, catalogue: Catalogue) -> None:
        """Of equal shards, one that drains among them, the lease is on the current one, which is in use by it."""
        made = publish(catalogue)
        lease = catalogue.renew(self.said(), OTHER, NOW)
        assert lease.shard is made
        with pytest.raises(ModelInUse, match=r"pid 43 \(vllm\)"):
            catalogue.evict("m", force=False)
        catalogue.evict("m", force=True)
        again = catalogue.renew(self.said(), PEER, NOW)
        assert again.shard is made
        catalogue.end_lease(lease)
        assert catalogue.shards == [made]
        catalogue.end_lease(again)
        assert catalogue.shards == []

    def test_the_own_users_word_counts(self, catalogue: Catalogue) -> None:
        """Memory that is not here takes room, once, as long as a process of the worker's own user says that it has it;
        what only others say is shown and takes none."""
        own = Peer(1, os.geteuid(), "engine")
        guest = Peer(2, os.geteuid() + 1, "guest")
        first = catalogue.renew(self.said(nbytes=600), guest, NOW)
        assert (catalogue.held, len(catalogue.shards)) == (0, 1)
        second = catalogue.renew(self.said(nbytes=600), own, NOW)
        third = catalogue.renew(self.said(nbytes=600), own, NOW)
        assert (catalogue.held, len(catalogue.shards)) == (600, 1)
        assert full(catalogue, 401).free == 400
        for lease, held in ((second, 600), (third, 0)):
            catalogue.end_lease(lease)
            assert catalogue.held == held
        assert first.shard.describe()["nbytes"] == 600
        catalogue.end_lease(first)
        assert catalogue.shards == []

    def test_it_is_no_generation_of_the_model(self, catalogue: Catalogue) -> None:
        """What another service gave out as a number does not change what this one gives out."""
        lease = catalogue.renew(self.said(generation=7), PEER, NOW)
        made = publish(catalogue)
        assert made.generation == 1
        catalogue.end_lease(lease)
        made.close()


class TestUse:
    """Which shard was used last: `budget` asks for it."""

    def test_publishing_attaching_and_letting_go_are_uses(self, catalogue: Catalogue) -> None:
        """Each makes the shard the most recently used one; a lease that ends late counts, and nothing else does."""
        a, b, c = (publish(catalogue, name) for name in "abc")

        def order() -> str:
            return "".join(item.model for item in sorted(catalogue.shards, key=lambda item: item.used))

        assert order() == "abc"
        lease = catalogue.lease(a, PEER, NOW)
        assert order() == "bca"
        catalogue.end_lease(catalogue.lease(b, OTHER, NOW))
        assert order() == "cab"
        a.describe(), catalogue.find("a"), catalogue.check_key(a, {})
        catalogue.end_lease(lease)
        assert order() == "cba"
        for item in (a, b, c):
            item.close()

    def test_what_is_adopted_counts_in_that_order(self, catalogue: Catalogue) -> None:
        """A worker that starts again knows nothing of the uses before."""
        adopted = [shard(name, 7 - number) for number, name in enumerate("xyz")]
        for item in adopted:
            catalogue.insert(item)
        assert sorted(catalogue.shards, key=lambda item: item.used) == adopted
        for item in adopted:
            item.close()


class TestLeases:
    """A lease is one holder of one shard."""

    def test_ids_are_unique(self, catalogue: Catalogue) -> None:
        """Each lease has a number of its own, across shards."""
        shards = [publish(catalogue, name) for name in ("a", "b")]
        leases = [catalogue.lease(item, PEER, NOW) for item in shards for _ in range(3)]
        assert len({lease.id for lease in leases}) == 6
        for item in shards:
            item.close()

    def test_ending_twice_is_ending_once(self, catalogue: Catalogue) -> None:
        """The end of a lease is idempotent, in every state of its shard."""
        made = publish(catalogue)
        lease = catalogue.lease(made, PEER, NOW)
        other = catalogue.lease(made, OTHER, NOW)
        catalogue.end_lease(lease)
        catalogue.end_lease(lease)
        assert list(made.leases.values()) == [other]
        catalogue.evict("m", force=True)
        catalogue.end_lease(other)
        catalogue.end_lease(other)
        assert catalogue.shards == []

    def test_a_current_shard_outlives_its_leases(self, catalogue: Catalogue) -> None:
        """A cached shard stays when its last holder goes."""
        made = publish(catalogue)
        catalogue.end_lease(catalogue.lease(made, PEER, NOW))
        assert (catalogue.find("m"), made.closed) == (made, False)
        made.close()

    def test_the_key_must_match(self, catalogue: Catalogue) -> None:
        """Every differing field is listed with both values; fields that nobody asks for do not count."""
        made = publish(catalogue)
        catalogue.check_key(made, {})
        catalogue.check_key(made, {"dtype": "float32", "layers": None})
        with pytest.raises(KeyMismatch) as caught:
            catalogue.check_key(made, {"dtype": "bfloat16", "content": "d", "layout": "checkpoint"})
        assert caught.value.differences == {"dtype": ["bfloat16", "float32"], "content": ["d", "c"]}
        made.close()


def test_close_closes_every_descriptor_once(catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaced, evicted, draining, late and current shards: each descriptor is closed, and none twice."""
    closed: list[int] = []
    monkeypatch.setattr("weightcached.fds.os.close", lambda fd: (closed.append(fd), os_close(fd))[1])
    leases = [catalogue.lease(publish(catalogue, name), PEER, NOW) for name in ("a", "b")]
    publish(catalogue, "a")
    catalogue.evict("b", force=True)
    catalogue.insert(shard("a", 1))
    catalogue.close()
    catalogue.close()
    for lease in leases:
        catalogue.end_lease(lease)
    assert len(closed) == 4 * 3
    assert catalogue.shards == []


os_close = os.close
