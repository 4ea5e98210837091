"""A real worker process, with the test in the place of its service, at the other end of its channel."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.wire.serving import SECONDS, Client
from weightcached.fds import FdSet, OwnedFd
from weightcached.shard.host import HostSlab
from weightcached.shard.key import ShardKey
from weightcached.shard.manifest import ManifestHead, SlabEntry, TensorEntry, TensorTable, write_manifest
from weightcached.wire import framing

ROOT = Path(__file__).parents[2]
LIMIT = 1 << 20


class WorkerProcess:
    """``weightcached worker host-0`` and the three descriptors that it shares with this process. `close` ends it."""

    def __init__(
        self,
        *,
        limit: int = LIMIT,
        share: WorkerProcess | None = None,
        options: tuple[str, ...] = (),
        spoiled: str = "",
    ) -> None:
        """`share`: take over the listening socket and the folder of a worker that has ended, as a service does.

        `options` are further ones of the command. `spoiled`: Python that plants a bug in the process before it begins.
        """
        self.folder = Path(tempfile.mkdtemp(prefix="wc-", dir="/tmp")) if share is None else share.folder
        self.path = self.folder / "host-0.sock"
        if share is None:
            self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self.listener.bind(os.fspath(self.path))
            self.listener.listen(64)
            self.lock = OwnedFd(os.open(self.folder / "host-0.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC))
        else:
            self.listener, self.lock = share.listener, share.lock
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.settimeout(SECONDS)
        self._log = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - closed by `close`
        fds = {"--channel-fd": theirs, "--listener-fd": self.listener, "--lock-fd": self.lock}
        arguments = [str(item) for option, fd in fds.items() for item in (option, fd.fileno())]
        main = f"{spoiled}\nimport sys\nfrom weightcached.cli.main import main\nsys.exit(main())"
        program = ["-c", main] if spoiled else ["-m", "weightcached"]
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, *program, "worker", "host-0", "--instance", "test",
                 "--limit", str(limit), *arguments, *options],
                pass_fds=[fd.fileno() for fd in fds.values()],
                stdin=subprocess.DEVNULL,
                stderr=self._log,
                start_new_session=True,
                cwd=ROOT,
            )  # fmt: skip

    # The channel, as the service speaks it.

    def tell(self, message: dict[str, Any], fds: list[OwnedFd] | tuple[OwnedFd, ...] = ()) -> None:
        frame = framing.Frame(message, [fd.fileno() for fd in fds])
        try:
            frame.send(self.channel)
        finally:
            frame.close()

    def hear(self) -> tuple[dict[str, Any], FdSet]:
        """The next message of the worker; the descriptors are the caller's."""
        received = framing.receive(self.channel, large=True)
        assert received is not None, f"the worker ended its channel:\n{self.log()}"
        return framing.decode(received[0]), received[1]

    def heard(self) -> dict[str, Any]:
        """The next message of the worker, without descriptors."""
        message, fds = self.hear()
        with fds:
            assert len(fds) == 0, message
        return message

    def serve(self, generations: dict[str, int] | None = None) -> WorkerProcess:
        self.tell({"serve": {"generations": generations or {}}})
        assert self.heard() == {"serving": {}}
        return self

    def hold(self) -> tuple[dict[str, Any], FdSet]:
        """Waits for a hold, which must be next, and confirms it. The copies are the caller's."""
        message, fds = self.hear()
        what = message["hold"]
        self.tell({"held": {"model": what["model"], "generation": what["generation"]}})
        return what, fds

    # The socket, as clients use it.

    def client(self) -> Client:
        return Client(self.path)

    def status(self) -> dict[str, Any]:
        with self.client() as client:
            return client.ask({"op": "status"})

    def shards(self, model: str) -> list[dict[str, Any]]:
        """A model's part of the status, newest first."""
        return [shard for shard in self.status()["shards"] if shard["model"] == model]

    def publish(self, model: str, data: bytes = b"x" * 256, **changes: Any) -> int:
        """The whole way of a publisher, with this process as the service that holds. Returns the generation."""
        with self.client() as client:
            generation = int(client.ask({"op": "reserve", "model": model, "nbytes": len(data)})["generation"])
            with shard(model, generation, data, **changes) as fds:
                client.send({"op": "publish"}, [fd.fileno() for fd in fds])
            what, copies = self.hold()
            copies.close()
            reply = client.receive()
            assert reply == {"ok": what}, reply
        return generation

    def dropped(self) -> tuple[str, int]:
        """The next message must be a drop: which model and generation. Confirms it."""
        name = self.heard()["drop"]
        self.tell({"dropped": {"model": name["model"], "generation": name["generation"]}})
        return name["model"], name["generation"]

    # The process.

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read().decode()

    def wait(self) -> int:
        return self.process.wait(SECONDS)

    def end(self) -> int:
        """Ends the worker as the end of its service does; its exit code. Listener and lock stay."""
        self.channel.close()
        return self.wait()

    def close(self) -> None:
        """Ends the worker and frees everything."""
        self.channel.close()
        try:
            self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            raise
        finally:
            self._log.close()
            self.listener.close()
            self.lock.close()
            shutil.rmtree(self.folder, ignore_errors=True)


class Shard(FdSet):
    """The descriptors of a hand-made shard: the manifest, then its slabs."""


def shard(
    model: str,
    generation: int,
    data: bytes,
    *,
    change_slab: Callable[[HostSlab], OwnedFd] | None = None,
    nbytes: int | None = None,
    **head: Any,
) -> Shard:
    """A real sealed slab with `data` as one U8 tensor, and its manifest; `head` changes fields of the manifest."""
    slab = HostSlab(len(data))
    slab.view[:] = data
    sealed = slab.seal() if change_slab is None else change_slab(slab)
    listed = len(data) if nbytes is None else nbytes
    fields: dict[str, Any] = {
        "model": model,
        "generation": generation,
        "device": "host-0",
        "key": ShardKey(content="c0ffee", dtype="uint8"),
        "slabs": (SlabEntry(listed),),
        "tensor_count": 1,
        "created": "2026-01-01T00:00:00+00:00",
    }
    table = TensorTable((TensorEntry("w", 0, 0, listed, "U8", (listed,)),))
    manifest = write_manifest(ManifestHead(**{**fields, **head}), table)
    return Shard([manifest.steal(), sealed.steal()])
