"""worker.groups: what a client is told of ranks that are on other devices. With a whole service: tests/service."""

from __future__ import annotations

from typing import Any

import pytest

from weightcached.errors import KeyMismatch, ModelLoading, ModelNotLoaded
from weightcached.shard.key import ShardKey
from weightcached.wire.messages import Attach
from weightcached.worker import groups
from weightcached.worker.catalogue import Shard

TWO = {"first": 0, "ranks": ["host-0", "host-1"], "sizes": [1, 1, 2], "order": []}
MANY = {"first": 0, "ranks": ["host-0"], "sizes": [1, 1, 1], "order": ["host-0", "host-1", "host-2", "host-3"]}


def ask(**key: Any) -> Attach:
    return Attach(model="m", key=key)


def refusal(key: ShardKey, state: dict[str, Any], **wanted: Any) -> KeyMismatch:
    """The error of who asks host-0, whose shard has that key."""

    class Head:
        def __init__(self) -> None:
            self.key, self.model = key, "m"

    shard = Shard.__new__(Shard)
    shard.head = Head()  # type: ignore[assignment]
    with pytest.raises(KeyMismatch) as caught:
        groups.check_key(shard, ask(**wanted), state, "host-0")
    return caught.value


RANK_0 = ShardKey(content="c", tensor_parallel_size=2)


def test_another_rank_is_named_with_its_device() -> None:
    """Both ranks are, and where it is; where it belongs while the model is not whole; that it is on another node."""
    wanted = {"tensor_parallel_size": 2, "tensor_parallel_rank": 1}
    here = "host-0 has tensor parallel rank 0 of 2, asked for was tensor parallel rank 1 of 2"
    assert refusal(RANK_0, {"group": TWO}, **wanted).advice == (
        f"{here}, which is on host-1: attach it with device='host-1'"
    )
    half = refusal(RANK_0, {"group": TWO, "whole": False}, **wanted)
    assert half.advice == f"{here}, which belongs on host-1: attach it with device='host-1'"
    node = {**TWO, "ranks": ["host-0"]}
    assert refusal(RANK_0, {"group": node}, **wanted).advice == f"{here}, which is on another node"
    assert refusal(RANK_0, {}, **wanted).advice == here
    assert half.differences == {"tensor_parallel_rank": [1, 0]}


def test_other_differences_keep_the_usual_advice() -> None:
    """Where more than the rank differs, or something else, no device would help."""
    for wanted in ({"dtype": "x"}, {"dtype": "x", "tensor_parallel_rank": 1}, {"expert_parallel_rank": 1}):
        error = refusal(RANK_0, {"group": TWO}, **wanted)
        assert type(error) is KeyMismatch
        assert "ask for what is cached, with tensor_parallel=(rank, size)" in str(error)
    sizes = refusal(RANK_0, {"group": TWO}, tensor_parallel_size=4, tensor_parallel_rank=0)
    assert 'on_mismatch = "reload"' in sizes.advice


def test_other_sizes_than_are_here_are_told_how_to_ask() -> None:
    """By the argument of tensor parallel, or by the key for the others; in a cluster no other slicing can be loaded."""
    four = {"tensor_parallel_size": 4, "tensor_parallel_rank": 0}
    assert refusal(RANK_0, {"group": TWO}, **four).advice == (
        "host-0 has tensor parallel rank 0 of 2; start the engine with these sizes, tensor_parallel=(rank, size), or "
        'give the model its sizes in the config, or on_mismatch = "reload" there'
    )
    stage = ShardKey(content="c", pipeline_parallel_size=2)
    nodes = {"first": 0, "ranks": ["host-0"], "sizes": [1, 2, 1], "order": []}
    assert refusal(stage, {"group": nodes}, pipeline_parallel_size=1).advice == (
        "host-0 has pipeline parallel rank 0 of 2; start the engine with these sizes, "
        'key={"pipeline_parallel_size": 2, "pipeline_parallel_rank": ...}, or give the model its sizes in the configs '
        "of all nodes"
    )
    both = ShardKey(content="c", data_parallel_size=2, tensor_parallel_size=2)
    assert (
        'these sizes, tensor_parallel=(rank, size) and key={"data_parallel_size": 2, "data_parallel_rank": ...}, or'
        in refusal(both, {}, tensor_parallel_size=1).advice
    )


def test_a_request_for_other_sizes_gets_their_name() -> None:
    """Only where the config allows it, and where its rank belongs on this device."""
    wanted = ask(tensor_parallel_size=2, tensor_parallel_rank=1)
    assert groups.meant(wanted, {}, "host-0") is wanted
    assert groups.meant(wanted, {"group": {**TWO, "sizes": [1, 1, 1]}}, "host-0") is wanted
    whole = ask(tensor_parallel_size=1)
    assert groups.meant(whole, {"group": MANY}, "host-0") is whole
    assert groups.meant(wanted, {"group": MANY}, "host-1") == Attach(model="m.tp2", key=wanted.key)
    with pytest.raises(KeyMismatch, match="attach it with device='host-1'") as caught:
        groups.meant(wanted, {"group": MANY}, "host-2")
    assert caught.value.differences == {"tensor_parallel_size": [2, 1]}


def test_only_who_waits_has_a_slicing_loaded() -> None:
    """Who does not is told so; of one that is being loaded, or was not renamed, the error stays as it is."""
    asked = ask(tensor_parallel_size=2, tensor_parallel_rank=0)
    request = groups.meant(asked, {"group": MANY}, "host-0")
    absent = ModelNotLoaded(model="m.tp2", device="host-0")
    told = groups.absent_now(absent, asked, request, {"group": MANY})
    assert "on_miss='wait' the service loads this slicing, as m.tp2" in str(told)
    loading = ModelLoading(model="m.tp2", device="host-0", progress=0.5)
    assert groups.absent_now(loading, asked, request, {"group": MANY}) is loading
    assert groups.absent_now(absent, asked, asked, {"group": MANY}) is absent


def test_a_device_of_other_models_is_no_place_for_a_slicing() -> None:
    """What is asked for there is looked for as it is: an engine may have published it under this very name."""
    wanted = ask(tensor_parallel_size=2, tensor_parallel_rank=1)
    assert groups.meant(wanted, {"group": MANY}, "GPU-1") is wanted


def elsewhere(state: dict[str, Any], **key: Any) -> str | None:
    """What who asks host-9 is told."""
    error = groups.elsewhere(ask(**key), state, "host-9")
    return None if error is None else str(error)


def test_a_device_without_a_rank_names_those_that_have_them() -> None:
    """One for the whole model; the rank's own, where the key says which; that it is on another node."""
    said = "m belongs on host-0, and is not on host-9; attach it with device='host-0'"
    assert elsewhere({"belongs": ["host-0"]}) == said
    assert elsewhere({"belongs": ["host-0"], "group": MANY}, tensor_parallel_size=1) == said
    two = {"belongs": ["host-0", "host-1"], "group": TWO}
    said = "m belongs on host-0, host-1, and is not on host-9; attach "
    assert elsewhere(two) == said + "rank 0 with device='host-0', rank 1 with device='host-1'"
    assert elsewhere(two, tensor_parallel_size=1) == elsewhere(two)
    ranks = [{"tensor_parallel_size": 2, "tensor_parallel_rank": rank} for rank in (0, 1)]
    assert elsewhere(two, **ranks[1]) == said + "tensor parallel rank 1 of 2 with device='host-1'"
    node = {"belongs": ["host-0"], "group": {**TWO, "ranks": ["host-0"], "first": 1}}
    assert str(elsewhere(node, **ranks[1])).endswith("attach tensor parallel rank 1 of 2 with device='host-0'")
    assert str(elsewhere(node, **ranks[0])).endswith("; tensor parallel rank 0 of 2 is on another node")
    for state in ({}, {"state": "absent", "group": TWO}, {"belongs": []}):
        assert elsewhere(state) is None


def test_what_may_be_made() -> None:
    """A slicing of a model that has somewhere to put it, which this device is, unless the service has named it."""
    states: dict[str, dict[str, Any]] = {"m": {"group": MANY}, "n": {"group": TWO}, "o": {}}
    assert groups.may_be_made("m.tp2", states, "host-0")
    assert not any(groups.may_be_made(name, states, "host-0") for name in ("m", "n.tp2", "o.tp2", "p.tp2"))
    assert not groups.may_be_made("m.tp2", {**states, "m.tp2": {"state": "failed"}}, "host-0")
    assert not groups.may_be_made("m.tp2", states, "GPU-1")
