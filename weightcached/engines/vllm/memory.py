"""vLLM's memory accounting and weights that lie outside of it.

What vLLM 0.30 to 0.33 do (`v1/worker/gpu_worker.py`, `utils/mem_utils.py`): a snapshot before the model is loaded; the
KV cache gets total x utilisation - (memory that became used since the snapshot) - the peak of a profiling run.

- A miss. The weights are loaded by torch after the snapshot and then moved to slabs of this process: used memory grows
  by the weights once, whoever holds them, as long as torch's cache of what they left is given back to the device.
  "Model loading took" then shows next to nothing, since it asks torch alone.
- A hit. The slabs were there before the snapshot, so their growth is not seen: they must be taken off the budget. From
  0.32 vLLM asks for that (`get_external_weight_memory`). 0.30 and 0.31 do not, so that the KV cache would be too large
  by the weights, or vLLM refuses to start for want of free memory. There the setting is printed that makes up for it.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
from typing import Any

from .api import LOAD_FORMAT
from .build import holders

_log = logging.getLogger(__name__)
_MARK = "_weightcached_advice"


def give_back(device: str) -> None:
    """What torch keeps of tensors that have moved goes back to the device; its peak counts from here."""
    if not device.startswith("cuda"):
        return
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)


def warn_uncounted(utilization: float, held: int, total: int) -> None:
    """For a vLLM that does not count the weights that it has attached to: `held` bytes of a device of `total`."""
    right = max(math.floor((utilization - held / total) * 1000) / 1000, 0.0)
    _log.warning(
        "this vLLM does not count %.2f GiB of cached weights: start it with --gpu-memory-utilization %.3f in place of "
        "%.3f, or its KV cache takes memory that is used already",
        held / (1 << 30), right, utilization,
    )  # fmt: skip


def advise_on_memory() -> None:
    """Has the check for free memory say how to start beside cached weights. For vLLM before 0.32. May be called again.

    The check comes before any loader is made, so nobody knows yet what will be attached.
    """
    import vllm.v1.worker.utils as utils

    original = utils.request_memory
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def request_memory(init_snapshot: Any, cache_config: Any, *args: Any, **kwargs: Any) -> Any:
        from vllm.config import get_current_vllm_config_or_none

        try:
            return original(init_snapshot, cache_config, *args, **kwargs)
        except ValueError as error:
            config = get_current_vllm_config_or_none()
            if config is None or config.load_config.load_format != LOAD_FORMAT:
                raise
            free = math.floor(init_snapshot.free_memory / init_snapshot.total_memory * 100) / 100
            raise ValueError(
                f"{error} Weights that weightcached holds on the device are not counted by this vLLM: "
                f"start it with --gpu-memory-utilization {free:.2f} or less, or use vLLM 0.32 or newer."
            ) from error

    setattr(request_memory, _MARK, True)
    for names in holders(original, "request_memory"):
        names["request_memory"] = request_memory
