"""A publisher of several ranks, which meet as torch.distributed has it and publish a module by `weightcached.publish`.

python gathering.py [WORD...]       count=PATH    a byte more in this file for each run of rank 0
                                    port=PATH     where rank 0 writes MASTER_PORT
                                    leave=PATH    as count, and the first run fails: rank 0 leaves a process behind,
                                                  outside of its group, which goes on listening at MASTER_PORT
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import weightcached
from weightcached.client.publish import checkpoint_files

ENGINE = "gathering-1/0"  # its layout
LISTEN = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=8)
print("listening", flush=True)
time.sleep(600)
"""


def main(words: list[str]) -> int:
    options = dict(word.split("=", 1) for word in words)
    rank = int(os.environ["RANK"])
    files = checkpoint_files(os.environ["WEIGHTCACHED_CHECKPOINT"])
    if rank == 0:
        for name in ("count", "leave"):
            if name in options:
                with Path(options[name]).open("ab") as count:
                    count.write(b".")
        if "port" in options:
            with Path(options["port"]).open("a") as ports:
                ports.write(os.environ["MASTER_PORT"] + "\n")
    if "leave" in options and not Path(options["leave"] + ".pid").exists():
        if rank == 0:
            left = subprocess.Popen(
                [sys.executable, "-c", LISTEN, os.environ["MASTER_PORT"]],
                start_new_session=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert left.stdout is not None and left.stdout.readline() == b"listening\n"
            Path(options["leave"] + ".pid").write_text(str(left.pid))
            return 9
        signal.pause()  # until the service ends it
    dist.init_process_group("gloo")
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([rank + 10]))
    print(f"met {[int(size) for size in sizes]}")
    module = torch.nn.Linear(3, 2)
    with torch.no_grad():
        module.weight.fill_(float(sum(sizes)))
        module.bias.fill_(float(rank))
    weights = weightcached.publish(
        os.environ["WEIGHTCACHED_PUBLISH_NAME"],
        module,
        key={
            "layout": ENGINE,
            "dtype": "float32",
            "tensor_parallel_size": dist.get_world_size(),
            "tensor_parallel_rank": rank,
        },
        device=os.environ["WEIGHTCACHED_DEVICE"],
        checkpoint=os.environ["WEIGHTCACHED_CHECKPOINT"],
        files=files,
    )
    dist.barrier()
    dist.destroy_process_group()
    weights.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
