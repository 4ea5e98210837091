"""A publisher as a config names one: it publishes one small tensor, as its environment and its arguments tell it.

python publishing.py [WORD...]      say=TEXT      a line on stdout, or on stderr with err=TEXT
                                    value=TEXT    what is in the tensor, in front of the rank's number
                                    nothing=RANK  that rank publishes nothing
                                    exit=RANK:N   that rank ends with this status before it publishes
                                    late=N        ends with this status after it has published
                                    hold=RANK:PATH that rank, once it has published, reads its status from this FIFO
                                    gate=PATH     reads this FIFO to its end before it publishes
                                    hang=RANK     that rank stops for ever, before it publishes
                                    child=        leaves a child behind that holds the output
                                    meet=PATH     waits for the other rank there
                                    nospec=       does not carry the spec on
                                    count=PATH    a byte more in this file for each run
                                    touch=        rank 0 gives the checkpoint new times before it looks at it
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from tests.client.handmade import Raw, make_shard
from weightcached.checkpoint.digest import json_digest
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.paths import socket_path
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Publish, Reserve


def main(words: list[str]) -> int:
    options = dict(word.split("=", 1) for word in words)
    rank = os.environ["WEIGHTCACHED_RANK"]
    if "count" in options:
        with Path(options["count"]).open("ab") as count:
            count.write(b".")
    if "touch" in options and rank == "0":
        os.utime(os.environ["WEIGHTCACHED_CHECKPOINT"])
    if "say" in options:
        print(options["say"], flush=True)
    if "err" in options:
        print(options["err"], file=sys.stderr, flush=True)
    if "child" in options:
        subprocess.Popen(["sleep", "600"])
    if "meet" in options:
        meet(options["meet"], rank)
    if "gate" in options:
        Path(options["gate"]).read_bytes()
    if options.get("hang") == rank:
        signal.pause()
    ends, _, code = options.get("exit", "").partition(":")
    if ends == rank:
        return int(code)
    if options.get("nothing") != rank:
        publish(options.get("value", "x"), spec="nospec" not in options)
    holds, _, fifo = options.get("hold", "").partition(":")
    if holds == rank:
        print("holds", flush=True)
        return int(Path(fifo).read_text())
    return int(options.get("late", 0))


def meet(path: str, rank: str) -> None:
    """Returns when the other of two ranks is here too."""
    with socket.socket(socket.AF_UNIX) as listener:
        if rank == "0":
            listener.bind(path + ".new")
            listener.listen()
            os.rename(path + ".new", path)
            listener.accept()[0].close()
        else:
            while not os.path.exists(path):  # bounded by the test that waits for the load
                os.sched_yield()
            listener.connect(path)


def publish(value: str, *, spec: bool) -> None:
    environ = os.environ
    name, device, rank = (environ[f"WEIGHTCACHED_{key}"] for key in ("PUBLISH_NAME", "DEVICE", "RANK"))
    with open_checkpoint(environ["WEIGHTCACHED_CHECKPOINT"]) as checkpoint:
        files = tuple(file.source for file in checkpoint.files)
    data = f"{value}{rank}".encode().ljust(16)
    with Connection.open(socket_path(device), device=device) as connection:
        granted, fds = connection.request(Reserve(name, len(data)))
        fds.close()
        made = make_shard(
            [Raw("w", "U8", (16,), data)],
            model=name,
            device=device,
            generation=granted["generation"],
            files=files,
            key={
                "content": f"stat:{json_digest([file.stat for file in files])}",
                "layout": "test-1/0",
                "tensor_parallel_size": int(environ["WEIGHTCACHED_WORLD"]),
                "tensor_parallel_rank": int(rank),
            },
            attributes={
                "checkpoint": environ["WEIGHTCACHED_CHECKPOINT"],
                **({"spec": environ["WEIGHTCACHED_SPEC"]} if spec else {}),
            },
        )
        _, fds = connection.request(Publish(), [item.fileno() for item in (made.manifest, *made.slabs)])
        fds.close()
    made.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
