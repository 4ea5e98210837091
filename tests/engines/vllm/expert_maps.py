"""Maps of experts by vLLM itself: as a load from disk computes them, beside `experts_mapped_on`.

    python -m tests.engines.vllm.expert_maps

Needs no ranks: which part of the experts is whose is a plain value for it. Prints how many maps were compared.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch

from weightcached.engines.vllm.build import experts_mapped_on

PLACEMENTS = ("linear", "round_robin")
# The second has its routing tables on the device too, with more than one data parallel rank.
BACKENDS = (("allgather_reducescatter", 1), ("deepep_low_latency", 2))


def manager(experts: int, size: int, rank: int, placement: str, backend: tuple[str, int]) -> Any:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
    from vllm.model_executor.layers.fused_moe.expert_map_manager import ExpertMapManager

    ones = dict.fromkeys(("tp_size", "pcp_size", "sp_size"), 1) | dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank"), 0)
    config = FusedMoEParallelConfig(
        **ones,
        dp_size=backend[1],
        ep_size=size,
        ep_rank=rank,
        use_ep=True,
        all2all_backend=backend[0],
        enable_eplb=False,
    )
    return ExpertMapManager(
        max_num_batched_tokens=64, top_k=2, global_num_experts=experts, num_redundant_experts=0, num_expert_group=2,
        moe_parallel_config=config, placement_strategy=placement, enable_eplb=False,
    )  # fmt: skip


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return str(value.device), str(value.dtype), value.tolist()
    return tuple(map(plain, value)) if type(value) is tuple else value


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    compared = 0
    for experts, size, placement, backend in itertools.product((8, 130), (2, 3), PLACEMENTS, BACKENDS):
        for rank in range(size):
            case = (experts, size, rank, placement, backend)
            with device:
                disk = {name: plain(value) for name, value in vars(manager(*case)).items()}
            with torch.device("meta"), experts_mapped_on(device):
                ours = {name: plain(value) for name, value in vars(manager(*case)).items()}
            assert disk["_expert_map"][0] == str(device)
            assert ours == disk, case
            compared += 1
    print(compared)


if __name__ == "__main__":
    main()
