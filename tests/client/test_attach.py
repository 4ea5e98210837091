"""client/attach.py: from a name to tensors, against a real worker."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import weightcached
from tests.client.handmade import DEVICE, Raw, RunningWorker, make_shard
from tests.leaks import NoDescriptorLeaks
from weightcached import attach
from weightcached.errors import (
    ConnectionLost,
    KeyMismatch,
    ManifestError,
    MissingDependency,
    ModelFailed,
    ModelLoading,
    NoSuchModel,
    ProtocolError,
    RuntimeDirectoryError,
    ServiceNotRunning,
    TimedOut,
    WrongDevice,
)
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Status

VALUES = torch.arange(8, dtype=torch.float32)
StartWorker = Callable[[], RunningWorker]


def tiny(**changes: Any) -> Any:
    """A shard of two tensors and an alias."""
    data = VALUES.numpy().tobytes()
    raws = [Raw("b", "F32", (2, 4), data), Raw("a", "F32", (8,), data)]
    return make_shard(raws, **{"aliases": {"tied": "b"}, **changes})


def test_a_copy_lets_go_at_once(worker: RunningWorker) -> None:
    """`mode="copy"` gives writable tensors of its own; the lease has ended when `attach` returns."""
    worker.publish(tiny())
    kept: list[Any] = []

    worker.wait_released(lambda: kept.append(attach("tiny", device=DEVICE, mode="copy")))

    weights = kept[0]
    assert worker.leases() == []
    weights["b"].fill_(3.0)
    assert weights["tied"].unique().tolist() == [3.0]
    with attach("tiny", device=DEVICE) as again:
        assert torch.equal(again["b"], VALUES.reshape(2, 4))


def test_a_process_that_is_killed_gives_up_its_lease(worker: RunningWorker) -> None:
    """After SIGKILL of an attached process its lease is gone, and the next one attaches to the same bytes."""
    worker.publish(tiny())
    script = (
        "import sys, weightcached\n"
        "weights = weightcached.attach('tiny', device='host-0')\n"
        "print(weights['a'].sum().item(), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"28.0\n"
        assert worker.leases() == [child.pid]
        worker.wait_released(lambda: child.send_signal(signal.SIGKILL))
        assert child.wait(10) == -signal.SIGKILL
    with attach("tiny", device=DEVICE) as weights:
        assert weights["a"].sum() == 28


def test_no_descriptor_leaks(worker: RunningWorker) -> None:
    """Attaching, in either mode, and failing to, leave no descriptor behind."""
    worker.publish(tiny())
    worker.publish(tiny(model="broken", slabs=2))
    with attach("tiny", device=DEVICE) as weights:
        weights["a"].sum()
    with Connection.open(worker.path, device=DEVICE) as watch, NoDescriptorLeaks():
        for mode in ("zero_copy", "copy"):
            worker.wait_released(lambda mode=mode: attach("tiny", device=DEVICE, mode=mode).close())
        with pytest.raises(KeyMismatch):
            attach("tiny", device=DEVICE, dtype="bfloat16")
        with pytest.raises(NoSuchModel):
            attach("nothing", device=DEVICE)
        # The worker is a thread of this process: when it has answered, it has also seen the others go.
        watch.request(Status())[1].close()


def test_dtype_and_key_must_match(worker: RunningWorker) -> None:
    """A wanted dtype, by torch's object or name, and wanted key fields must match; all differences are named."""
    worker.publish(tiny())
    attach("tiny", device=DEVICE, dtype=torch.float32, key={"content": "c0"}).close()
    attach("tiny", device=DEVICE, dtype="float32").close()

    with pytest.raises(KeyMismatch) as caught:
        attach("tiny", device=DEVICE, dtype=torch.bfloat16, key={"revision": "main"})

    assert caught.value.differences == {"dtype": ["bfloat16", "float32"], "revision": ["main", None]}
    with pytest.raises(ProtocolError, match="unknown key fields colour"):
        attach("tiny", device=DEVICE, key={"colour": "red"})


@pytest.mark.parametrize(
    "field",
    [f"{kind}_parallel_{part}" for kind in ("tensor", "pipeline", "expert", "data") for part in ("size", "rank")],
)
def test_a_slice_is_only_for_those_who_ask(worker: RunningWorker, field: str) -> None:
    """A shard that is one rank's part, in any of the four ways, is refused by default and given to whoever names it."""
    key = {field: 2} if field.endswith("size") else {field: 1, field.replace("rank", "size"): 2}
    worker.publish(tiny(key=key))

    kind = field.partition("_")[0]
    how = rf'key={{"{kind}_parallel_size": 2' if kind in ("pipeline", "data") else "tensor_parallel=(rank, size)"
    with pytest.raises(KeyMismatch, match=rf"{field} .*{re.escape(how)}") as caught:
        attach("tiny", device=DEVICE)
    assert caught.value.differences == {name: [value - 1, value] for name, value in key.items()}

    attach("tiny", device=DEVICE, key=key).close()


def test_the_rank_that_is_wanted(worker: RunningWorker) -> None:
    """`tensor_parallel` is (rank, size); another rank, another size and the whole model are mismatches."""
    worker.publish(tiny(key={"tensor_parallel_size": 4, "tensor_parallel_rank": 3}))

    attach("tiny", device=DEVICE, tensor_parallel=(3, 4)).close()
    for wanted, differing in (((2, 4), {"rank"}), ((3, 8), {"size"}), ((0, 1), {"rank", "size"})):
        with pytest.raises(KeyMismatch) as caught:
            attach("tiny", device=DEVICE, tensor_parallel=wanted)
        assert set(caught.value.differences) == {f"tensor_parallel_{part}" for part in differing}


@pytest.mark.parametrize(
    "wanted", [(1, 1), (-1, 2), (0, 0), (2, 2), (0,), (0, 1, 2), (0.0, 2), (False, True), "01", 2, None]
)
def test_a_rank_that_is_none_is_refused(wanted: Any) -> None:
    """What is no (rank, size) with 0 <= rank < size is the caller's error."""
    with pytest.raises(ValueError, match=r"tensor_parallel=.*it must be \(rank, size\)"):
        attach("tiny", device=DEVICE, tensor_parallel=wanted)


def test_a_miss_fails_at_once(worker: RunningWorker) -> None:
    """An absent, a loading and a failed model are three errors, each at once."""
    worker.models(slow={"state": "loading", "progress": 0.25}, bad={"state": "failed", "reason": "no such file"})
    start = time.monotonic()

    with pytest.raises(NoSuchModel, match="no model nothing on host-0; there: bad, slow"):
        attach("nothing", device=DEVICE)
    with pytest.raises(ModelLoading, match="25%"):
        attach("slow", device=DEVICE)
    with pytest.raises(ModelFailed, match="no such file"):
        attach("bad", device=DEVICE)

    assert time.monotonic() - start < 5


def test_waiting_for_a_model_that_comes(worker: RunningWorker) -> None:
    """With on_miss="wait" the attach returns when the model is published."""
    worker.models(tiny={"state": "loading", "progress": 0.0})
    publisher = threading.Timer(0.2, worker.publish, [tiny()])
    publisher.start()

    with attach("tiny", device=DEVICE, on_miss="wait", timeout=30) as weights:
        assert torch.equal(weights["a"], VALUES)
    publisher.join()


def test_waiting_for_a_model_that_fails(worker: RunningWorker) -> None:
    """With on_miss="wait" a load that fails ends the wait with its reason."""
    worker.models(tiny={"state": "loading", "progress": 0.0})
    failure = threading.Timer(0.2, worker._tell, [{"models": {"tiny": {"state": "failed", "reason": "bad header"}}}])
    failure.start()

    with pytest.raises(ModelFailed, match="bad header"):
        attach("tiny", device=DEVICE, on_miss="wait", timeout=30)
    failure.join()


def test_waiting_has_an_end(worker: RunningWorker) -> None:
    """A model that never comes is `TimedOut` after the time given, which says what the model was doing."""
    worker.models(tiny={"state": "loading", "progress": 0.5})
    start = time.monotonic()

    with pytest.raises(TimedOut, match="still loading"):
        attach("tiny", device=DEVICE, on_miss="wait", timeout=0.3)

    assert 0.2 < time.monotonic() - start < 5


def test_no_service(runtime_dir: Path) -> None:
    """Without a service: `ServiceNotRunning` with the socket's path; without its directory, with the directory's."""
    with pytest.raises(ServiceNotRunning, match=r"host-0\.sock"):
        attach("tiny", device=DEVICE)
    os.environ["WEIGHTCACHED_RUNTIME_DIR"] += "/missing"
    with pytest.raises(ServiceNotRunning, match="missing"):
        attach("tiny", device=DEVICE)


def test_waiting_for_a_service_that_never_comes(runtime_dir: Path) -> None:
    """With on_miss="wait" and nobody there: `TimedOut` after the time given, no descriptor left."""
    start = time.monotonic()
    with NoDescriptorLeaks(), pytest.raises(TimedOut, match="for the service"):
        attach("tiny", device=DEVICE, on_miss="wait", timeout=0.3)
    assert 0.25 < time.monotonic() - start < 5


@pytest.mark.parametrize("start_with", ["nothing", "stale socket", "no directory"])
def test_waiting_for_a_service_that_comes(runtime_dir: Path, start_worker: StartWorker, start_with: str) -> None:
    """With on_miss="wait" the service may start later: from nothing, over a dead socket, without its directory."""
    if start_with == "no directory":
        runtime_dir.rmdir()
    elif start_with == "stale socket":
        start_worker().stop()
        (runtime_dir / "lock").unlink()
        import socket

        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
            dead.bind(str(runtime_dir / "host-0.sock"))
    attached: list[Any] = []
    thread = threading.Thread(
        target=lambda: attached.append(attach("tiny", device=DEVICE, on_miss="wait", timeout=30)["a"].clone())
    )
    thread.start()
    thread.join(0.3)  # so that it waits when the worker comes; the result does not depend on it
    (runtime_dir / "host-0.sock").unlink(missing_ok=True)

    start_worker().publish(tiny())
    thread.join(30)

    assert torch.equal(attached[0], VALUES)


def test_a_connection_that_is_lost(runtime_dir: Path, start_worker: StartWorker) -> None:
    """A worker that ends while a client waits: `ConnectionLost` is not the end, the next worker serves it."""
    first = start_worker()
    attached: list[Any] = []
    thread = threading.Thread(
        target=lambda: attached.append(attach("tiny", device=DEVICE, on_miss="wait", timeout=30)["a"].clone())
    )
    thread.start()
    thread.join(0.3)
    first.stop()

    start_worker().publish(tiny())
    thread.join(30)

    assert torch.equal(attached[0], VALUES)


def test_bad_replies(worker: RunningWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply without a manifest and a manifest of another device are refused; no lease and no descriptor stays."""
    worker.publish(tiny())
    from weightcached.client import attach as module
    from weightcached.fds import FdSet

    real = module.Connection.request
    with monkeypatch.context() as patch:

        def empty(self: Any, *args: Any, **kwargs: Any) -> Any:
            content, fds = real(self, *args, **kwargs)
            fds.close()
            return content, FdSet()

        patch.setattr(module.Connection, "request", empty)
        with NoDescriptorLeaks(), pytest.raises(ManifestError, match="no manifest"):
            attach("tiny", device=DEVICE)
    with monkeypatch.context() as patch:
        elsewhere = tiny(device="host-1")

        def other(self: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
            content, fds = real(self, message, *args, **kwargs)
            if message.op != "attach":
                return content, fds
            fds.close()
            return content, FdSet([elsewhere.manifest.dup().steal()])

        patch.setattr(module.Connection, "request", other)
        with NoDescriptorLeaks(), pytest.raises(WrongDevice, match="wanted host-0, found host-1"):
            attach("tiny", device=DEVICE)
        elsewhere.close()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, TypeError),
        ({"model": "tiny", "mode": "zero-copy"}, ValueError),
        ({"model": "tiny", "on_miss": "ignore"}, ValueError),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception]) -> None:
    """No model and no checkpoint, or a word that is not offered, is the caller's error."""
    with pytest.raises(error):
        attach(device=DEVICE, **arguments)


def test_the_runtime_directory_is_checked(runtime_dir: Path, worker: RunningWorker) -> None:
    """A client refuses a runtime directory that others can write to, too."""
    runtime_dir.chmod(0o755)
    with pytest.raises(RuntimeDirectoryError, match="open to other users"):
        attach("tiny", device=DEVICE)
    runtime_dir.chmod(0o700)


def test_without_torch() -> None:
    """Without torch `import weightcached` works and `attach` names the extra to install."""
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import weightcached\n"
        "try: weightcached.attach('tiny', device='host-0')\n"
        "except weightcached.MissingDependency as error: print(error)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)

    assert run.stdout == "attach needs torch: pip install 'weightcached[torch]'\n", run.stderr


def test_importing_the_package_stays_light() -> None:
    """`import weightcached` and the client's modules import neither torch nor pydantic, rich, asyncio or pynvml."""
    script = (
        "import sys, weightcached, weightcached.client.attach, weightcached.client.identity\n"
        "print([name for name in ('torch', 'pydantic', 'rich', 'asyncio', 'pynvml') if name in sys.modules])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50)

    assert run.stdout == "[]\n", run.stderr


def test_public_names() -> None:
    """`weightcached.attach` and `weightcached.Weights` are the client's."""
    from weightcached.client.attach import Weights

    assert weightcached.Weights is Weights
    assert issubclass(MissingDependency, weightcached.WeightCacheError)
    assert issubclass(ConnectionLost, weightcached.ConnectionFailed)


@pytest.mark.parametrize("timeout", [-1, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    """Negative seconds and NaN are the caller's error."""
    with pytest.raises(ValueError, match="timeout="):
        attach("m", device=DEVICE, timeout=timeout)


def test_an_endless_timeout_is_a_long_one(worker: RunningWorker) -> None:
    """Infinity is taken for the longest that sockets can wait."""
    worker.publish(tiny())
    attach("tiny", device=DEVICE, timeout=float("inf"), on_miss="wait").close()
