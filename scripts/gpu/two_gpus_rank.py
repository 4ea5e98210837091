"""An engine's rank for `two_gpus.py`: attaches its shard, computes, compares; asked over a unix socket.

The argument is one JSON object: "model", "devices" (by rank), "shape", "socket", "reference" (a file of the whole
model's logits, which a rank of one writes), "backend". RANK and WORLD_SIZE are in the environment, as of torchrun.
"names", if it is there, has a model's name for each rank. Every line that comes is answered by one JSON object:

    forward    {"difference", "agreeing"}: of the logits from the reference's, relative, by their norms; the share of
               positions at which the same logit is the largest
    end        {"ended"}

The first answer comes unasked: {"rank", "device", "seconds"} of the attach, or {"error"} of it, with which it ends.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from sliced_qwen3 import Shape, forward

import weightcached
from weightcached.errors import WeightCacheError


def main() -> int:
    job: dict[str, Any] = json.loads(sys.argv[1])
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(job["socket"])
        with channel.makefile("rw", buffering=1) as lines:
            try:
                return serve(lines, job, rank, size)
            except WeightCacheError as error:
                say(lines, {"rank": rank, "error": f"{type(error).__name__}: {error}"})
                return 1


def say(lines: Any, answer: dict[str, Any]) -> None:
    lines.write(json.dumps(answer) + "\n")
    lines.flush()


def serve(lines: Any, job: dict[str, Any], rank: int, size: int) -> int:
    torch.manual_seed(1)
    shape = Shape(**job["shape"])
    started = time.monotonic()
    name = job.get("names", [job["model"]] * size)[rank]
    weights = weightcached.attach(
        name, device=job["devices"][rank], tensor_parallel=(rank, size), on_miss="wait", timeout=300
    )
    seconds = time.monotonic() - started
    device = weights["model.norm.weight"].device
    tokens = torch.randint(shape.vocab, (32,)).to(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size > 1:
        dist.init_process_group(job["backend"], timeout=timedelta(seconds=120))
    say(lines, {"rank": rank, "device": job["devices"][rank], "torch_device": str(device), "seconds": seconds})
    for line in lines:
        if line.strip() == "end":
            break
        with torch.inference_mode():
            logits = forward(weights, shape, tokens, rank, size, add_up if size > 1 else lambda part: None).cpu()
        if size == 1:
            torch.save(logits, job["reference"])
        whole = torch.load(job["reference"], weights_only=True)
        difference = float((logits - whole).norm() / whole.norm())
        agreeing = float((logits.argmax(-1) == whole.argmax(-1)).float().mean())
        say(lines, {"rank": rank, "difference": difference, "agreeing": agreeing})
    if size > 1:
        dist.destroy_process_group()
    say(lines, {"rank": rank, "ended": True})
    return 0


def add_up(part: torch.Tensor) -> None:
    dist.all_reduce(part)


if __name__ == "__main__":
    sys.exit(main())
