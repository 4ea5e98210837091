"""What loading leaves beside parameters: carried, private, or left out."""

from __future__ import annotations

from pathlib import Path

from tests.client.handmade import RunningWorker
from tests.engines.vllm.conftest import Vllm, run
from weightcached.shard.manifest import Scalar


def test_scalars_of_processing_are_carried(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """What loading set on modules is there again (weights_padding_cols of NVFP4, flags of drafts); nothing else is."""
    vllm.start(folder)
    model = vllm.start(folder)
    assert (model.linear.weights_padding_cols, model.has_own_lm_head, model.attn._k_scale_float) == (3, True, 1.0)
    carried: dict[str, Scalar] = model._weightcached.table.attributes
    assert set(carried) == {
        "linear.weights_padding_cols", "linear.input_scale", "has_own_lm_head", "attn._k_scale_float",
        "weightcached_held",
    }  # fmt: skip


def test_consumed_parameters_are_gone(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """A scale that processing has consumed is no parameter of the next engine either."""
    vllm.start(folder)
    assert not hasattr(vllm.start(folder).linear, "raw_scale")


def test_written_buffers_are_private(vllm: Vllm, worker: RunningWorker, folder: Path) -> None:
    """What engines write while they run is each one's own; the table of rotary angles is shared."""
    first = vllm.start(folder)
    second = vllm.start(folder)
    run(second)
    run(second)
    assert second.attn.seen.tolist() == [2] * 4
    assert first.attn.seen.tolist() == [0] * 4
    private = {entry.name for entry in second._weightcached.table.tensors if entry.private}
    assert {"attn.seen", "attn._k_scale", "norm.weight"} <= private
    assert "attn.cos_sin_cache" not in private
