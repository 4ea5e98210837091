"""Maps of experts by vLLM itself: as a load from disk computes them, beside `experts_mapped_on`.

    python -m tests.engines.vllm.real expert-maps

Needs no ranks: which part of the experts is whose is a plain value for it.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from weightcached.engines.vllm.build import experts_mapped_on

PLACEMENTS = ("linear", "round_robin")
BACKENDS = ("allgather_reducescatter", "deepep_low_latency")


def compared() -> int:
    """How many maps were compared and are the same; `AssertionError` for the first that is not."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    count = 0
    for experts, size, placement, backend in itertools.product((8, 130), (2, 3), PLACEMENTS, BACKENDS):
        for rank in range(size):
            case = (experts, size, rank, placement, backend)
            with device:
                disk = described(*case)
            with torch.device("meta"), experts_mapped_on(device):
                ours = described(*case)
            assert disk["_expert_map"][0] == str(device)
            assert ours == disk, case
            count += 1
    return count


def described(experts: int, size: int, rank: int, placement: str, backend: str) -> dict[str, Any]:
    """All that a map has; of a tensor device, dtype and values."""
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    # DeepEP has routing tables on the device too, if there are data parallel ranks.
    replicas = 2 if backend == "deepep_low_latency" else 1
    config = FusedMoEParallelConfig(
        tp_size=1, tp_rank=0, pcp_size=1, pcp_rank=0, dp_size=replicas, dp_rank=0, ep_size=size, ep_rank=rank,
        sp_size=1, use_ep=True, all2all_backend=backend, enable_eplb=False,
    )  # fmt: skip
    manager = ExpertMapManager(
        max_num_batched_tokens=64, top_k=2, global_num_experts=experts, num_redundant_experts=0, num_expert_group=2,
        moe_parallel_config=config, placement_strategy=placement, enable_eplb=False,
    )  # fmt: skip
    return {name: plain(value) for name, value in vars(manager).items()}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.device), str(value.dtype), value.tolist()
    return tuple(map(plain, value)) if type(value) is tuple else value
