"""One rank of a model, in a process of its own: what it gives for the usual input, or the error, goes to a file.

python -m tests.engines.transformers.rank RANK SIZE STORE FOLDER OUT DEVICE [OPTIONS as JSON]
"""

from __future__ import annotations

import json
import sys
from datetime import timedelta

import torch

from tests.engines.models import outputs
from weightcached.engines.transformers import from_cache
from weightcached.errors import WeightCacheError


def main(rank: int, size: int, store: str, folder: str, out: str, device: str, options: str = "{}") -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=40)
    )
    try:
        model = from_cache(folder, device=device, tp_plan="auto", **json.loads(options))
    except WeightCacheError as error:
        torch.save({"error": f"{type(error).__name__}: {error}"}, out)
    else:
        slabs = {
            parameter.to_local().untyped_storage().data_ptr()
            for parameter in model.parameters()
            if hasattr(parameter, "to_local")
        }
        local = {
            name: list((value.to_local() if hasattr(value, "to_local") else value).shape)
            for name, value in model.named_parameters()
        }
        torch.save({"outputs": outputs(model), "local": local, "slabs": len(slabs)}, out)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
