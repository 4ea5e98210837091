"""Workers of a real service: one that dies is replaced, with the shards it held."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.running import process_of_role, wait_for_end
from tests.service.conftest import HOST, StartService, attach, generation, model, slab_bytes


def test_a_killed_worker_loses_nothing(start_service: StartService, checkpoint: Path) -> None:
    """After SIGKILL of the worker the shard is served again with its generation, and nothing is read from disk."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    holder, held = attach("small")
    before = slab_bytes(held)
    checkpoint.unlink()  # so that a second load could not succeed
    for round_number in range(3):
        pid = process_of_role(service, "worker")
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        # Connecting waits in the socket's queue, which outlives the worker.
        worker, fds = attach("small", wait=10)
        with worker, fds:
            assert slab_bytes(fds) == before
            assert generation(fds) == 1
        assert service.status()["devices"][0]["worker_restarts"] == round_number + 1
    assert slab_bytes(held) == before
    held.close()
    holder.close()
    service.stop()
