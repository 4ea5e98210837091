"""client/weights.py: a mapping of tensors, and how long it holds the lease."""

from __future__ import annotations

import copy
import gc
import os
import pickle
from collections.abc import Callable

import pytest
import torch

from tests.client.handmade import DEVICE, Raw, RunningWorker, make_shard
from tests.client.test_attach import VALUES, tiny
from weightcached import attach
from weightcached.errors import (
    ManifestError,
)

StartWorker = Callable[[], RunningWorker]


def test_a_mapping_in_the_manifests_order(worker: RunningWorker) -> None:
    """Names come in the manifest's order, tied names after them; values and properties are as in the manifest."""
    worker.publish(tiny(attributes={"checkpoint": "/models/tiny"}))

    with attach("tiny", device=DEVICE) as weights:
        assert list(weights) == ["b", "a", "tied"]
        assert len(weights) == 3
        assert "tied" in weights and "c" not in weights and 5 not in weights
        assert torch.equal(weights["b"], VALUES.reshape(2, 4))
        assert weights["tied"] is weights["b"]
        assert weights["b"] is weights["b"]
        assert dict(weights).keys() == {"a", "b", "tied"}
        assert (weights.device, weights.generation, weights.nbytes) == (DEVICE, 1, weights.manifest.nbytes)
        assert weights.key.content == "c0"
        assert weights.manifest.attributes == {"checkpoint": "/models/tiny"}
        assert repr(weights) == "<Weights of tiny, generation 1, on host-0: 2 tensors, 288 bytes>"
        with pytest.raises(KeyError, match="'c'"):
            weights["c"]


def test_the_lease_lasts_as_long_as_any_tensor(worker: RunningWorker) -> None:
    """`close` keeps tensors that were made; the worker sees the lease end when the last of them is gone."""
    worker.publish(tiny())
    weights = attach("tiny", device=DEVICE)
    kept = [weights["a"]]
    assert worker.leases() == [os.getpid()]

    weights.close()
    gc.collect()
    assert worker.leases() == [os.getpid()]
    assert torch.equal(kept[0], VALUES)
    assert weights.closed and len(weights) == 3
    with pytest.raises(ValueError, match="the weights of tiny are closed"):
        weights["b"]

    worker.wait_released(kept.clear)
    assert worker.leases() == []


def test_the_weights_themselves_hold_the_lease(worker: RunningWorker) -> None:
    """Weights without any tensor made, even of a model without bytes, are in use until they are dropped."""
    worker.publish(make_shard([Raw("e", "F32", (0,), b"")]))
    held = [attach("tiny", device=DEVICE)]
    assert held[0]["e"].shape == (0,)
    assert worker.leases() == [os.getpid()]

    closed = attach("tiny", device=DEVICE)
    closed.close()
    with pytest.raises(ValueError, match="the weights of tiny are closed"):
        len(closed)

    worker.wait_released(held.clear)


def test_the_table_is_checked_when_it_is_first_needed() -> None:
    """A tensor past its slab is refused at the first look-up, before any view of it exists."""
    from dataclasses import replace

    from weightcached.client.attach import Weights
    from weightcached.shard.manifest import read_documents, write_manifest

    shard = tiny()
    entries = (shard.table.tensors[0]._replace(offset=1 << 20), *shard.table.tensors[1:])
    with write_manifest(shard.head, replace(shard.table, tensors=entries)) as fd:
        _, table = read_documents(fd.fileno())
    shard.close()
    weights = Weights(shard.head, table, [torch.zeros(288, dtype=torch.uint8)], None)

    with pytest.raises(ManifestError, match="ends at byte"):
        weights["a"]


@pytest.mark.parametrize("do", [copy.copy, copy.deepcopy, pickle.dumps])
def test_they_belong_to_one_process(worker: RunningWorker, do: Callable[[object], object]) -> None:
    """A copy would not know of an unmap of the other; the error says what to do."""
    worker.publish(tiny())
    with attach("tiny", device=DEVICE) as weights, pytest.raises(TypeError, match="copied or pickled: attach again"):
        do(weights)
