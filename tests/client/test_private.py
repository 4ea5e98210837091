"""client/private.py: cached tensors that get memory of their own, in place."""

from __future__ import annotations

import pytest
import torch

from tests.client.handmade import DEVICE, RunningWorker
from tests.client.test_sleeping import VALUES, attached
from weightcached import EngineError, attach


def test_a_private_copy_of_all_ends_the_lease(worker: RunningWorker) -> None:
    """Installed parameters and tensors stay the same objects, with memory that may be written; tied ones stay tied."""
    weights = attached(worker)
    model = torch.nn.Module()
    for name in ("a", "p", "tied"):
        model.register_parameter(name, torch.nn.Parameter(torch.empty(8, device="meta")))
    model.register_parameter("b", torch.nn.Parameter(torch.empty(2, 4, device="meta")))
    weights.install(model)
    parameter, tensor = model.a, weights["a"]
    assert model.tied is parameter

    worker.wait_released(weights.private_copy)

    assert worker.leases() == []
    assert model.a is parameter and weights["a"] is tensor
    assert torch.equal(parameter, VALUES) and torch.equal(model.b.flatten(), VALUES)
    parameter.data.fill_(9)
    assert tensor.unique().tolist() == [9.0], "what shared memory still does"
    with attach("tiny", device=DEVICE) as again:
        assert torch.equal(again["a"], VALUES)
    with pytest.raises(EngineError, match="private copies"):
        weights.unmap()


def test_a_private_copy_of_some_keeps_the_rest(worker: RunningWorker) -> None:
    """Only what is named leaves the slab; the lease goes on, and unknown names are refused."""
    weights = attached(worker)
    a, b = weights["a"], weights["b"]
    places = (a.data_ptr(), b.data_ptr())
    weights.private_copy("tied")  # one name, not its letters
    assert a.data_ptr() != places[0] and b.data_ptr() == places[1]
    assert torch.equal(a, VALUES) and len(worker.leases()) == 1
    with pytest.raises(EngineError, match="no tensor nothing"):
        weights.private_copy(["nothing"])
    weights.unmap()
    assert torch.equal(a, VALUES)


def test_tensors_that_share_bytes_go_on_sharing_them(worker: RunningWorker) -> None:
    """A part is copied with the whole that it lies in, though only one of them is named."""
    weights = attached(worker)
    whole = weights["a"]
    part = whole[4:].detach()
    weights.hand_out("a", part)
    weights.private_copy(["a"])
    whole.fill_(5)
    assert part.tolist() == [5.0] * 4
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_nothing_is_copied_while_it_is_unmapped(worker: RunningWorker) -> None:
    """There are no bytes to copy: a typed error in place of a SIGSEGV."""
    weights = attached(worker)
    weights.unmap()
    with pytest.raises(EngineError, match="unmapped"):
        weights.private_copy()
    weights.remap()
    weights.private_copy()
    weights.private_copy()
    weights.close()
    with pytest.raises(ValueError, match="closed"):
        weights.private_copy()


def test_a_named_tensor_that_nobody_has_had_yet_is_copied(worker: RunningWorker) -> None:
    """It is private when it is asked for later: who names it is going to write to it."""
    weights = attached(worker)
    weights.private_copy(["a"])

    weights["a"].fill_(9)
    assert torch.equal(weights["p"], VALUES)
    slab = weights.require_mapped("").slabs[0]
    assert weights["a"].untyped_storage().data_ptr() != slab.untyped_storage().data_ptr()
