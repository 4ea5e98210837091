"""budget: who must go so that another model fits, who may not, and what is said when nothing helps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.leaks import NoDescriptorLeaks
from tests.worker.test_catalogue import NOW, OTHER, PEER, Device, OnDevice, full, publish
from weightcached.errors import DeviceFull, ProtocolError
from weightcached.worker.budget import ModelPolicy


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def catalogue(device: Device, descriptors: NoDescriptorLeaks) -> Iterator[OnDevice]:
    """Room for 1000 bytes."""
    made = OnDevice(device)
    yield made
    made.close()


def victims(catalogue: OnDevice, nbytes: int, model: str = "x") -> list[str]:
    return [shard.model for shard in catalogue.victims(model, nbytes)]


def refused(catalogue: OnDevice, nbytes: int, model: str = "x") -> DeviceFull:
    """The refusal of a model for which nothing can be evicted; a reservation as things are says the same."""
    before = catalogue.shards
    with pytest.raises(DeviceFull) as caught:
        catalogue.victims(model, nbytes)
    assert catalogue.shards == before
    assert full(catalogue, nbytes, model).fields == caught.value.fields
    return caught.value


class TestVictims:
    """Idle shards of other models, the least recently used first."""

    def test_nothing_goes_while_there_is_room(self, catalogue: OnDevice) -> None:
        """What fits needs no victim, to the last byte; one byte more does."""
        publish(catalogue, "a", 400)
        assert victims(catalogue, 600) == []
        assert victims(catalogue, 601) == ["a"]

    def test_the_least_recently_used_goes_first(self, catalogue: OnDevice) -> None:
        """An attach that has ended makes a model the last to go."""
        shards = {name: publish(catalogue, name, 300) for name in "abc"}
        assert victims(catalogue, 101) == ["a"]
        catalogue.end_lease(catalogue.lease(shards["a"], PEER, NOW))
        assert victims(catalogue, 101) == ["b"]
        assert victims(catalogue, 401) == ["b", "c"]
        assert victims(catalogue, 1000) == ["b", "c", "a"]

    def test_no_more_than_needed(self, catalogue: OnDevice) -> None:
        """A small old one stays where a larger one that must go anyway is enough."""
        publish(catalogue, "small", 10)
        publish(catalogue, "large", 800)
        publish(catalogue, "newest", 100)
        assert victims(catalogue, 90 + 10) == ["small"]
        assert victims(catalogue, 90 + 11) == ["large"]
        assert victims(catalogue, 90 + 801) == ["small", "large"]

    def test_leased_pinned_and_kept_ones_stay(self, catalogue: OnDevice) -> None:
        """Each of them for itself; what is left goes, or nothing does."""
        leased, _, _, _ = (publish(catalogue, name, 250) for name in ("leased", "pinned", "kept", "free"))
        lease = catalogue.lease(leased, OTHER, NOW)
        catalogue.policies = {"pinned": ModelPolicy(pin=True), "kept": ModelPolicy(keep=True), "free": ModelPolicy()}
        assert victims(catalogue, 250) == ["free"]
        error = refused(catalogue, 251)
        assert (error.free, error.evictable) == (0, 250)
        assert error.holders == [
            "leased 250 bytes (in use by pid 43 (vllm))", "pinned 250 bytes (pinned)", "kept 250 bytes (preloaded)",
            "free 250 bytes",
        ]  # fmt: skip
        catalogue.policies = {}
        catalogue.end_lease(lease)
        assert victims(catalogue, 1000) == ["pinned", "kept", "free", "leased"]

    def test_draining_shards_cannot_be_evicted_again(self, catalogue: OnDevice) -> None:
        """Their memory is their holders'."""
        publish(catalogue, "idle", 300)
        catalogue.lease(publish(catalogue, "old", 600), PEER, NOW)
        catalogue.evict("old", force=True)
        assert victims(catalogue, 400) == ["idle"]
        assert refused(catalogue, 401).evictable == 300

    def test_reservations_are_not_there_to_be_evicted(self, catalogue: OnDevice) -> None:
        """A load in progress keeps its room."""
        catalogue.reserve("loading", 700, PEER)
        publish(catalogue, "idle", 200)
        assert victims(catalogue, 300) == ["idle"]
        assert "loading 700 bytes (loading)" in refused(catalogue, 301).holders

    def test_larger_than_the_limit(self, catalogue: OnDevice) -> None:
        """Refused at once, and the sentence does not send anybody to evict."""
        publish(catalogue, "a", 1000)
        error = refused(catalogue, 1001)
        assert error.advice == "it is larger than memory_limit, whatever is evicted"

    def test_more_held_than_the_limit_is(self, catalogue: OnDevice) -> None:
        """Adopted under a larger limit: what is over the limit must go as well."""
        for name in "abc":
            publish(catalogue, name, 300)
        catalogue.limit = 500
        assert victims(catalogue, 200) == ["a", "b"]
        assert victims(catalogue, 201) == ["a", "b", "c"]


class TestOwn:
    """The generation that a model has already."""

    def test_beside_it_stays(self, catalogue: OnDevice) -> None:
        """Others make room for the next one; where that is not enough, the sentence says what would help."""
        publish(catalogue, "m", 400)
        publish(catalogue, "idle", 300)
        catalogue.policies = {"m": ModelPolicy()}
        assert victims(catalogue, 600, "m") == ["idle"]
        error = refused(catalogue, 601, "m")
        assert (error.needed, error.free, error.evictable) == (601, 300, 300)
        assert error.advice == (
            "its generation 1 of 400 bytes stays until the next one is there; "
            'replace = "evict-first" in its config lets it go before; evict a model or raise memory_limit'
        )
        assert 'replace = "evict-first"' in str(error)

    def test_evict_first_it_goes_before_others(self, catalogue: OnDevice) -> None:
        """Beside if there is room as it is; else it goes, since it would go anyway, and others only if that is not
        enough."""
        publish(catalogue, "idle", 300)
        publish(catalogue, "m", 400)
        catalogue.policies = {"m": ModelPolicy(replace="evict-first", pin=True)}
        assert victims(catalogue, 300, "m") == []
        assert victims(catalogue, 301, "m") == ["m"]
        assert victims(catalogue, 700, "m") == ["m"]
        assert victims(catalogue, 701, "m") == ["m", "idle"]
        assert victims(catalogue, 400) == ["idle"]  # for another model it is pinned
        refused(catalogue, 601)

    def test_evict_first_in_use_it_stays(self, catalogue: OnDevice) -> None:
        """Its memory would not come back: others go, or the refusal names its holders."""
        publish(catalogue, "idle", 300)
        lease = catalogue.lease(publish(catalogue, "m", 400), OTHER, NOW)
        catalogue.policies = {"m": ModelPolicy(replace="evict-first")}
        assert victims(catalogue, 600, "m") == ["idle"]
        error = refused(catalogue, 601, "m")
        assert "its generation 1 of 400 bytes is in use, by pid 43 (vllm)" in error.advice
        catalogue.end_lease(lease)
        assert victims(catalogue, 601, "m") == ["m"]

    @pytest.mark.parametrize("policies", [{}, {"m": ModelPolicy()}], ids=["not of the config", "would not help"])
    def test_no_advice_that_does_not_help(self, catalogue: OnDevice, policies: dict[str, ModelPolicy]) -> None:
        """A model of an engine's own has no config; an old one without which there is no room either is not named."""
        publish(catalogue, "m", 400)
        catalogue.lease(publish(catalogue, "used", 500), PEER, NOW)
        catalogue.policies = policies
        assert refused(catalogue, 501 if policies else 400, "m").advice == "evict a model or raise memory_limit"


class TestOthers:
    """Memory of the device that is in use by nobody whom the catalogue knows."""

    def test_others_make_it_smaller_than_the_limit(self, catalogue: OnDevice, device: Device) -> None:
        """The refusal says how many bytes others use; raising the limit is no advice then."""
        publish(catalogue, "a", 200)
        device.total, device.free = 1000, 300  # 500 of somebody else
        assert victims(catalogue, 300) == []
        assert victims(catalogue, 500) == ["a"]
        error = refused(catalogue, 501)
        assert (error.free, error.evictable, error.others) == (300, 200, 500)
        assert error.advice == "500 bytes of the device are used by others; evict a model"

    def test_the_limit_alone(self, catalogue: OnDevice, device: Device) -> None:
        """Where the device has more than the limit leaves, others are not the reason and are not named."""
        device.total, device.free = 5000, 2000
        catalogue.lease(publish(catalogue, "a", 200), PEER, NOW)
        error = refused(catalogue, 801)
        assert (error.others, error.advice) == (0, "evict a model or raise memory_limit")

    def test_reservations_are_not_others(self, catalogue: OnDevice, device: Device) -> None:
        """A loader that has allocated what it has reserved is nobody else."""
        catalogue.reserve("loading", 700, PEER)
        device.total, device.free = 1000, 300
        error = refused(catalogue, 1)
        assert (error.free, error.others) == (0, 0)


class TestPeak:
    """A publisher that frees as it goes needs its bytes of the limit, and of the device only the peak."""

    def test_the_device_need_not_have_both(self, catalogue: OnDevice, device: Device) -> None:
        """600 bytes are admitted with 100 free on the device, if no more are taken at once."""
        device.free = 100
        with pytest.raises(DeviceFull):
            catalogue.victims("x", 600)
        assert catalogue.victims("x", 600, 100) == []
        catalogue.reserve("x", 600, PEER, 100)
        assert catalogue.held == 600

    def test_peaks_are_spoken_for(self, catalogue: OnDevice, device: Device) -> None:
        """What one reservation may still take of the device is not another one's."""
        device.free = 100
        catalogue.reserve("x", 300, PEER, 60)
        with pytest.raises(DeviceFull) as caught:
            catalogue.reserve("y", 300, OTHER, 41)
        assert (caught.value.needed, caught.value.free) == (41, 40)
        catalogue.reserve("y", 300, OTHER, 40)

    def test_the_limit_counts_all_bytes(self, catalogue: OnDevice) -> None:
        """However small the peak is."""
        with pytest.raises(DeviceFull) as caught:
            catalogue.reserve("x", 1001, PEER, 1)
        assert (caught.value.needed, caught.value.free) == (1001, 1000)

    def test_others_go_for_a_peak(self, catalogue: OnDevice, device: Device) -> None:
        """An idle shard is evicted where the device lacks bytes, though the limit has room."""
        publish(catalogue, "idle", 100)
        device.free = 10
        assert [shard.model for shard in catalogue.victims("x", 600, 50)] == ["idle"]

    def test_a_negative_peak_is_no_reservation(self, catalogue: OnDevice) -> None:
        """As little as a negative size is."""
        with pytest.raises(ProtocolError):
            catalogue.reserve("x", 10, PEER, -1)
