"""What systemd's file descriptor store holds for the service, so that the main process's own death loses nothing.

One datagram to ``$NOTIFY_SOCKET`` for each descriptor, since a name goes with a message (systemd, sd_notify(3)):

    <device>.<shard>.<generation>.0        the manifest            <shard>: digest of model name and key, 16 digits
    <device>.<shard>.<generation>.1 ...    its slabs, in order

systemd does not say whether it has taken a descriptor; beyond ``FileDescriptorStoreMax=`` it closes them. So a shard is
followed by a sentinel, the end of a pipe, and a barrier: when the barrier is answered, all before it is done, and if
systemd has closed the sentinel there was no room. Then nothing of the shard stays there: half a shard is of no use.

    waiting ──► sending ──► stored       the sentinel was kept, and is removed
       ▲          │ ▲ └───► refused      the sentinel was closed, or nothing can be sent
       │          ▼ │          │
       │        unknown        │         there is no answer to the barrier yet
       └───────────────────────┘         something was removed, so there may be room
"""

from __future__ import annotations

import array
import asyncio
import collections
import contextlib
import logging
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from ..checkpoint.digest import json_digest
from ..errors import ConnectionFailed, ProtocolError
from ..fds import OwnedFd
from ..shard.manifest import ManifestHead
from ..trace import point

ANSWER_SECONDS = 5.0  # for the answer to a barrier, before it is said that there is none
FIRST_FD = 3  # SD_LISTEN_FDS_START
_SENTINEL = "sentinel"
_NAME = re.compile(  # numbers without zeros in front: what is read is removed by the name that is written
    r"(?P<device>[!-9;-~]+)\.(?P<shard>[0-9a-f]{16})\.(?P<generation>0|[1-9][0-9]{0,17})\.(?P<part>0|[1-9][0-9]{0,3})"
)
_log = logging.getLogger(__name__)

State = Literal["waiting", "sending", "stored", "refused", "unknown"]


class ShardName(NamedTuple):
    """What the names of a shard's descriptors begin with."""

    device: str
    shard: str
    generation: int

    @classmethod
    def of(cls, head: ManifestHead) -> ShardName:
        return cls(head.device, json_digest([head.model, asdict(head.key)])[:16], head.generation)

    def part(self, number: int) -> str:
        """The name of the manifest, 0, or of a slab, from 1 on."""
        return f"{self.device}.{self.shard}.{self.generation}.{number}"


def parse_name(name: str) -> tuple[ShardName, int] | None:
    """The shard and the number of the part, None for a name that this service does not give."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    return ShardName(match["device"], match["shard"], int(match["generation"])), int(match["part"])


@dataclass(slots=True, eq=False)
class KeptShard:
    """A shard as the store knows it. Its descriptors are borrowed until `Store.forget`; closed ones are not sent."""

    model: str
    name: ShardName
    descriptors: Sequence[OwnedFd]
    state: State = "waiting"
    reason: str = ""  # why it is refused or unknown
    warned: bool = False
    sent: asyncio.Event = field(default_factory=asyncio.Event)  # by then it outlives this process, or never will

    @property
    def names(self) -> list[str]:
        """Of its descriptors, in order."""
        return [self.name.part(number) for number in range(len(self.descriptors))]

    @property
    def label(self) -> str:
        return f"{self.model} on {self.name.device}, generation {self.name.generation}"


class Store:
    """Speaks to the service manager about descriptors. Owns one socket until `close`.

    What is asked of it is done by `run`, in order and one shard after the other, so that none is judged by another's
    sentinel. A manager that reads nothing delays that and nothing else.
    """

    def __init__(self, address: str | None) -> None:
        """`address`: of the manager's socket, a path or "@" and an abstract name; None: there is no manager.

        `ConnectionFailed` when nothing listens there.
        """
        self._socket: socket.socket | None = None
        self._kept: dict[ShardName, KeptShard] = {}
        self._todo: collections.deque[KeptShard | list[str] | asyncio.Event] = collections.deque()
        self._wake = asyncio.Event()
        if address is None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._socket.connect("\0" + address[1:] if address.startswith("@") else address)
        except OSError as error:
            self._socket.close()
            raise ConnectionFailed(path=address, problem=f"NOTIFY_SOCKET names it, but {error.strerror}") from error
        self._socket.setblocking(False)

    @classmethod
    def from_environ(cls) -> Store:
        """The store of the manager that ``$NOTIFY_SOCKET`` names, or one that keeps nothing when that is unset."""
        return cls(os.environ.get("NOTIFY_SOCKET") or None)

    @property
    def active(self) -> bool:
        """Whether there is a service manager."""
        return self._socket is not None

    def keep(self, model: str, name: ShardName, descriptors: Sequence[OwnedFd]) -> KeptShard:
        """Has a shard stored, all of it or nothing. Its descriptors must stay open until `forget`."""
        kept = self._kept[name] = KeptShard(model, name, descriptors)
        self._do(kept)
        return kept

    def adopted(self, model: str, name: ShardName, descriptors: Sequence[OwnedFd]) -> KeptShard:
        """Notes a shard that came out of the store and is still there."""
        kept = self._kept[name] = KeptShard(model, name, descriptors, "stored")
        return kept

    def forget(self, kept: KeptShard) -> None:
        """Has a shard removed. Its descriptors may be closed at once."""
        if self._kept.get(kept.name) is kept:
            del self._kept[kept.name]
        kept.sent.set()
        if kept in self._todo:
            self._todo.remove(kept)
        if kept.state in ("sending", "stored", "unknown"):
            self.remove(kept.names)

    def remove(self, names: Iterable[str]) -> None:
        """Has whatever is stored by these names removed."""
        self._do(list(names))

    async def settled(self) -> None:
        """Returns when the manager has done everything asked for so far, or has not for 5 seconds, which is logged."""
        if not self.active:
            return
        done = asyncio.Event()
        self._do(done)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await done.wait()
        except TimeoutError:
            _log.warning("the service manager has not answered within %.0f s", ANSWER_SECONDS)

    async def run(self) -> None:
        """Does what is asked for, until cancelled."""
        while True:
            while not self._todo:
                self._wake.clear()
                await self._wake.wait()
            match self._todo.popleft():
                case KeptShard() as kept:
                    await self._store(kept)
                case asyncio.Event() as done:
                    with contextlib.suppress(OSError):  # it was said where something was to be sent
                        await self._barrier()
                    done.set()
                case list() as names:
                    await self._remove(names)
                    point("store.removed")
                    self._try_again()

    def describe(self) -> dict[str, Any]:
        """The store in a status reply; `stored` counts descriptors, `refused` are shards that may not be there."""
        if not self.active:
            return {"active": False}
        stored = [kept for kept in self._kept.values() if kept.state == "stored"]
        return {
            "active": True,
            "stored": sum(len(kept.descriptors) for kept in stored),
            "shards": len(stored),
            "pending": sum(kept.state in ("waiting", "sending") and not kept.reason for kept in self._kept.values()),
            "refused": [
                {
                    "device": kept.name.device,
                    "model": kept.model,
                    "generation": kept.name.generation,
                    "reason": kept.reason,
                }
                for kept in self._kept.values()
                if kept.reason
            ],
        }

    def close(self) -> None:
        """Closes the socket; systemd keeps what it has. Idempotent."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        self._todo.clear()

    # Internals.

    def _do(self, item: KeptShard | list[str] | asyncio.Event) -> None:
        if self.active:
            self._todo.append(item)
            self._wake.set()

    async def _store(self, kept: KeptShard) -> None:
        kept.state = "sending"
        try:
            with contextlib.ExitStack() as ends:
                read, write = (ends.enter_context(OwnedFd(fd)) for fd in os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
                for name, fd in [*zip(kept.names, kept.descriptors, strict=True), (_SENTINEL, write)]:
                    await self._send(f"FDSTORE=1\nFDPOLL=0\nFDNAME={name}", fd)
                kept.sent.set()  # what is on its way is in the kernel's hands
                write.close()
                point("store.sent")
                await self._barrier(kept)
                taken = not _at_end(read.fileno())
        except OSError as error:  # no descriptor to be had, or the manager is gone
            await self._refused(kept, f"it cannot be sent: {error.strerror}")
            return
        point("store.answered")
        await self._remove([_SENTINEL])
        if not taken:
            problem = "the service manager has no room for it: raise FileDescriptorStoreMax= of the unit (0 is off)"
            await self._refused(kept, problem)
        elif self._kept.get(kept.name) is kept:
            if kept.reason:
                _log.info("%s: the service manager keeps it now", kept.label)
            kept.state, kept.reason = "stored", ""

    async def _refused(self, kept: KeptShard, reason: str) -> None:
        kept.sent.set()
        await self._remove(kept.names)
        if self._kept.get(kept.name) is not kept:
            return
        kept.state, kept.reason = "refused", reason
        if not kept.warned:
            kept.warned = True
            _log.warning("%s will not survive the end of this process: %s", kept.label, reason)

    def _try_again(self) -> None:
        """Something was removed: there may be room for what was refused."""
        for kept in self._kept.values():
            if kept.state == "refused":
                kept.state = "waiting"
                self._do(kept)

    async def _remove(self, names: list[str]) -> None:
        try:
            for name in names:
                await self._send(f"FDSTOREREMOVE=1\nFDNAME={name}")
        except OSError as error:
            _log.warning("the service manager cannot be told to let go of %s: %s", names[0], error.strerror)

    async def _barrier(self, kept: KeptShard | None = None) -> None:
        """Returns when the manager has done all that was sent to it; `kept` is unknown while that takes too long."""
        loop = asyncio.get_running_loop()
        with contextlib.ExitStack() as ends:
            read, write = (ends.enter_context(OwnedFd(fd)) for fd in os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
            await self._send("BARRIER=1", write)
            write.close()
            answered = asyncio.Event()
            loop.add_reader(read.fileno(), answered.set)
            ends.callback(loop.remove_reader, read.fileno())
            if kept is not None:
                try:
                    async with asyncio.timeout(ANSWER_SECONDS):
                        await answered.wait()
                except TimeoutError:
                    kept.state, kept.reason = "unknown", "the service manager does not answer"
                    _log.warning("%s: the service manager does not answer, it may not keep it", kept.label)
            # Nothing is sent before: what came after this shard would be taken for a part of it.
            await answered.wait()

    async def _send(self, text: str, fd: OwnedFd | None = None) -> None:
        """One datagram, once the manager has room for it; not sent if its descriptor is closed meanwhile."""
        loop = asyncio.get_running_loop()
        while self._socket is not None and (fd is None or not fd.closed):
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd.fileno()]))] if fd else []
            try:
                self._socket.sendmsg([text.encode()], rights, socket.MSG_NOSIGNAL)
                return
            except BlockingIOError:
                number = self._socket.fileno()
                writable = asyncio.Event()
                loop.add_writer(number, writable.set)
                try:
                    await writable.wait()
                finally:
                    loop.remove_writer(number)


def take_listen_fds() -> list[tuple[str, OwnedFd]]:
    """What systemd hands to this process at its start, with names, newest first; takes the variables out of the
    environment. The caller owns the descriptors.

    To be called before anything else: until then they are passed on to every child. `ProtocolError` if they are not
    there.
    """
    pid, count, names, _ = (os.environ.pop(f"LISTEN_{name}", "") for name in ("PID", "FDS", "FDNAMES", "PIDFDID"))
    if pid != str(os.getpid()):
        return []  # meant for a parent
    found = []
    try:
        for number in range(int(count or 0)):
            os.set_inheritable(FIRST_FD + number, False)
            found.append(OwnedFd(FIRST_FD + number))
    except (OSError, ValueError) as error:
        for item in found:
            item.close()
        raise ProtocolError(problem=f"LISTEN_FDS={count}, but descriptor {FIRST_FD + len(found)}: {error}") from error
    known = names.split(":")
    return [(known[index] if index < len(known) else "", item) for index, item in enumerate(found)]


def _at_end(fd: int) -> bool:
    """Whether the other end of a pipe is closed everywhere. Nothing is ever written to it."""
    try:
        return os.read(fd, 1) == b""
    except BlockingIOError:
        return False
