"""A load by a command of the config: one process for each rank of a model, all at once, each of which publishes.

At once, since the ranks of an engine wait for one another. They meet at MASTER_ADDR and MASTER_PORT: on one node a free
port of 127.0.0.1, another at each run, which nobody holds, so that what an earlier run has left behind listens
elsewhere; on several nodes publisher_port of node 0, where rank 0 listens.

The load is done when every process has published its rank and has ended with exit status 0, on all nodes that take part
(`joint`). Until then clients of a cluster wait; a failure takes back what was published.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time

from ..errors import WeightCacheError
from ..meeting import listen, resolve
from ..text import describe_exit
from .joint import JointLoad
from .membership import LoadState
from .models import Model
from .publisher_rank import Rank
from .vault import HeldShard, Vault

LOOPBACK = "127.0.0.1"
_NO_TCP = (
    "this service may not use TCP, by which ranks meet: its unit restricts it to AF_UNIX, see "
    "network.conf.example beside the unit"
)
_log = logging.getLogger(__name__)


class Publishers:
    """The processes that publish one model, from start to exit. In the place of `loads.LoaderProcess`."""

    def __init__(self, model: Model, vault: Vault, joint: JointLoad | None = None) -> None:
        """`vault`: what is published, borrowed. `joint`: the load together with other nodes, if there are any."""
        self.model = model
        self.spec = model.spec  # its config may change meanwhile
        self.killed = False  # one of them, by somebody else, such as the kernel when memory is short
        self._vault = vault
        self._others = self.spec.parallel.world - len(self.spec.devices)  # ranks on other nodes
        self._joint = joint if self._others else None
        self._tag = model.load_spec or self.spec.digest  # what its shards carry
        self._ranks = [Rank(model.name, self.spec, self._tag, number) for number in range(len(self.spec.devices))]
        self._called_off = False
        self._given_up: str | None = None  # why
        self._before: dict[str, int] = {}  # by device, the newest generation when the load began
        self._ended = asyncio.Event()

    async def run(self) -> WeightCacheError | None:
        """Runs the load. None: published, or called off by `end`. Cancelled, it ends all processes and waits for it."""
        state: LoadState = "failed"
        if self._joint is not None:
            self._joint.begin(self.model.name, self.give_up)
        try:
            error = await self._publish()
            if error is None:
                state = "called off" if self._called_off else "done"
            return error
        except asyncio.CancelledError:
            state = "called off"
            raise
        finally:
            if self._joint is not None:
                self._joint.end(state)
            self._ended.set()

    async def _publish(self) -> WeightCacheError | None:
        began = time.monotonic()
        self._before = {device: self._last_on(device) for device in self.spec.devices}
        problem: str | WeightCacheError | None = None
        try:
            meet = await self._meeting()
        except WeightCacheError as error:
            problem = error
        else:
            if not self._called_off and self._given_up is None:
                problem = await self._run_ranks(meet)
        if self._called_off:
            return None
        if self._given_up is not None:
            self.killed = True  # by what may be over when somebody waits for the model
            return self.model.load_failed(self._given_up)
        if problem is not None:
            self.killed = any(rank.killed for rank in self._ranks)
            return self.model.load_failed(problem)
        self.model.load_seconds = time.monotonic() - began
        _log.info("%s: published by its command in %.2f s", self.model.name, self.model.load_seconds)
        return None

    async def _run_ranks(self, meet: tuple[str, int] | None) -> str | None:
        """From the start of all processes to the end of the last one, here and on the other nodes. Returns what went
        wrong."""
        tasks = [asyncio.create_task(rank.run(meet)) for rank in self._ranks]
        try:
            # The first that ends with a problem decides: the others are waiting for it, and are ended.
            for task in asyncio.as_completed(tasks):
                if (problem := await task) is not None:
                    return problem
            problem = next(filter(None, map(self._not_published, self._ranks)), None)
            if problem is None and self._joint is not None:
                await self._joint.others_done()
            return problem
        finally:
            self._kill()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _meeting(self) -> tuple[str, int] | None:
        """Address and port where the ranks meet. None for one alone, where there is no TCP.

        `ConnectionFailed` where they are on several nodes, if rank 0 is here and cannot listen there.
        """
        if self._others:
            where = self.model.config.meeting
            if where is None or self._joint is None:
                why = f"{self._others} of its ranks are on other nodes, and nothing says where they meet those here"
                raise self.model.load_failed(f"{why}: write publisher_port in [cluster]")
            if self.spec.first == 0:
                host = await resolve(*where)
                listen(host, where[1], setting="publisher_port").close()
            return where
        try:
            return LOOPBACK, free_port()
        except OSError as error:
            if error.errno != errno.EAFNOSUPPORT:
                raise
            if len(self._ranks) > 1:
                raise self.model.load_failed(_NO_TCP) from error
            _log.warning("%s: no MASTER_PORT for its publisher: %s", self.model.name, _NO_TCP)
            return None  # it has nobody to meet

    def own(self) -> set[str]:
        """The devices on which the model's newest shard is one that this load has published."""
        newest = {device: self._vault.find(device, self.model.name) for device in self.spec.devices}
        return {device for device, shard in newest.items() if shard is not None and self._is_own(shard)}

    def call_off(self) -> None:
        """Ends all processes with SIGKILL. `run` returns when nothing of them is left."""
        self._called_off = True
        self._kill()

    def give_up(self, why: str) -> None:
        """Ends all processes with SIGKILL; `run` returns that reason. For ranks on other nodes that do not come."""
        self._given_up = why
        self._kill()

    async def end(self) -> None:
        """`call_off`, and waits until nothing of them is left."""
        self.call_off()
        await self._ended.wait()

    def _kill(self) -> None:
        if self._joint is not None:
            self._joint.stop_waiting()
        for rank in self._ranks:
            rank.kill()

    def _last_on(self, device: str) -> int:
        """The newest generation that the model ever had there."""
        return self._vault.generations(device).get(self.model.name, 0)

    def _is_own(self, shard: HeldShard) -> bool:
        """Whether a process of this load has published the shard."""
        return shard.load_spec == self._tag

    def _not_published(self, rank: Rank) -> str | None:
        """Why what is on the rank's device is not what its process published; None if it is, or was until evicted."""
        if self._last_on(rank.device) <= self._before[rank.device]:
            return rank.problem(f"ended by {describe_exit(0)}, but has not published {self.model.name} there")
        shard = self._vault.find(rank.device, self.model.name)
        if shard is not None and not self._is_own(shard):
            return rank.problem(
                f"ended by {describe_exit(0)}, but generation {shard.generation} there is not its own: "
                "it lacks the attribute spec, the value of WEIGHTCACHED_SPEC"
            )
        return None


def free_port() -> int:
    """A TCP port of LOOPBACK that nobody has now. `OSError` without a descriptor or a port.

    Without SO_REUSEADDR: a port that anybody listens on, or has just left, is not chosen.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
