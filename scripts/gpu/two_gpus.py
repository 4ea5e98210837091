"""What two GPUs of one host must do, measured and checked in one run; `two_gpus.sh` runs it and says how.

    load            one loader, two devices: bytes read, rate; beside one device alone
    tensor parallel two ranks under torchrun, each on its device by UUID; killed, and what they need is killed meanwhile
    visibility      CUDA_VISIBLE_DEVICES reversed and restricted; a rank that asks for what is on the other device
    data parallel   two replicas from one read
    isolation       one device's worker killed again and again while the other device serves
    nodes           two services with a device each

Each step gives rows of the table. One that fails is a row as well, and the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sliced_qwen3 import Shape, write
from two_gpus_service import Ranks, Service, StepFailed, free_port, lines, model, require

from weightcached.cli.output import print_table
from weightcached.devices import gpu_devices
from weightcached.errors import WeightCacheError
from weightcached.wire.connection import Connection
from weightcached.wire.messages import Attach

STEPS = ("load", "tensor_parallel", "visibility", "data_parallel", "isolation", "nodes")
SAME = 0.1  # relative difference of logits: 0.03 is seen in bfloat16, other weights give 1 and more


def main() -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: services and files are not left behind
        signal.signal(number, signal.default_int_handler)
    args = _arguments()
    host = args.device == "host"
    devices = ["host-0", "host-1"] if host else [device.name for device in gpu_devices()[:2]]
    if len(devices) < 2:
        print(f"two_gpus: two GPUs are needed, {len(devices)} found; --device host is a dry run", file=sys.stderr)
        return 2
    nbytes = int(args.gb * 1e9) if args.gb is not None else (3_000_000 if host else 30_000_000_000)
    with (
        tempfile.TemporaryDirectory(prefix="wc2-", dir=args.folder) as checkpoints,
        tempfile.TemporaryDirectory(prefix="wc2-", dir="/tmp") as sockets,
    ):
        run = Run(devices, Path(checkpoints), Path(sockets), nbytes, args.kills, args.steps)
        try:
            run.all()
        finally:  # also of what was done before an interruption
            print_table(["STEP", "WHAT", "RESULT", "OK"], run.rows)
            if args.json:
                keys = ("step", "what", "result", "ok")
                rows = [dict(zip(keys, row, strict=True)) for row in run.rows]
                result = {"devices": devices, "bytes": run.nbytes, "rows": rows}
                args.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(any(row[3] == "NO" for row in run.rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="two_gpus.sh", description="Checks and measures weightcached on two GPUs.")
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda", help="host: a dry run without a GPU")
    parser.add_argument("--gb", type=_positive, help="size of the model in GB (default: 30, 0.003 on host devices)")
    parser.add_argument("--kills", type=int, default=50, help="how often a worker is killed (default: 50)")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS, help="only these (default: all)")
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written (default: $TMPDIR)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error("--kills must be 1 or more")
    if args.folder is not None:
        args.folder = args.folder.resolve()
        if not args.folder.is_dir():
            parser.error(f"--folder {args.folder} is no folder")
    if args.json is not None and (args.json.is_dir() or not args.json.resolve().parent.is_dir()):
        parser.error(f"--json {args.json} cannot be written there")
    return args


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is no size")
    return number


class Run:
    """All steps on two devices; `rows` grows as they go."""

    def __init__(
        self, devices: list[str], checkpoints: Path, sockets: Path, nbytes: int, kills: int, steps: Sequence[str]
    ) -> None:
        self.rows: list[list[str]] = []
        self.devices = devices
        self.host = devices[0].startswith("host-")
        self.checkpoint = checkpoints / "model"
        self.sockets = sockets
        self.shape = Shape.of_bytes(nbytes)
        self.nbytes = 0
        self.kills = kills
        self.steps = steps
        self._step = ""

    def all(self) -> None:
        """Every step; the later ones go on where an earlier one has failed."""
        started = time.monotonic()
        self.nbytes = write(self.checkpoint, self.shape)
        small = self.checkpoint.with_name("small")
        write(small, Shape.of_bytes(min(self.nbytes // 4, 3_000_000_000)))
        self._note("checkpoint", f"{self.nbytes / 1e9:.3g} GB written in {time.monotonic() - started:.1f} s")
        later = "preload = false"
        pair = ["tensor_parallel = 2"]
        config = f"devices = {json.dumps(self.devices)}\n" + model("pair", self.checkpoint, self.devices, *pair)
        config += model("whole", self.checkpoint, self.devices[:1], later)
        config += model("twice", self.checkpoint, self.devices, "data_parallel = 2", later)
        config += model("other", small, self.devices[1:], later)
        service = Service(self.sockets, "two", config)
        service.start()
        try:
            service.ready()
            for name in STEPS[:-1]:
                if name in self.steps:
                    self._do(getattr(self, name), service)
        except StepFailed as error:
            self._failed(error)
        finally:
            service.stop()
        if "nodes" in self.steps:
            self._do(self.nodes)

    def load(self, service: Service) -> None:
        """The files are in the page cache by then, for both alike."""
        for name, what in (("pair", "to both devices"), ("whole", "to one device")):
            if name == "pair":
                service.ctl("evict", name)
            loaded = service.load(name)
            self._loaded(what, loaded)

    def tensor_parallel(self, service: Service) -> None:
        whole = Ranks(self.sockets, {**self._job, "model": "whole"}, service, 1)
        try:
            whole.forward()  # writes the reference
            whole.end()
        finally:
            whole.close()
        service.ctl("evict", "whole")
        ranks = self._ranks(service)
        try:
            self._equal("two ranks and the whole model", ranks.forward())
            ranks.close()  # SIGKILL
            ranks = self._ranks(service)
            self._equal("killed and started again", ranks.forward())
            worker = service.worker(self.devices[1])
            require(worker > 0, "a worker that nobody has killed is gone")
            os.kill(worker, signal.SIGKILL)
            self._equal("while a worker is killed", ranks.forward())
            service.ctl("load", "other")
            os.kill(service.role("loader"), signal.SIGKILL)
            self._equal("while another model's loader is killed", ranks.forward())
            service.kill()
            self._equal("while the service is killed", ranks.forward())
            service.start()
            service.ready()
            self._equal("after the service is there again", ranks.forward())
            ranks.end()
        finally:
            ranks.close()
        ranks = self._ranks(service)
        try:
            self._equal("new ranks of the new service", ranks.forward())
            ranks.end()
        finally:
            ranks.close()

    def visibility(self, service: Service) -> None:
        for rank in (0, 1):
            error = self._refused(service, self.devices[rank], 1 - rank)
            other = self.devices[1 - rank]
            require(other in error, f"the error does not name {other}: {error}")
        self._row("rank n on the device of the other", "refused, with the right device's name", "yes")
        if self.host:
            self._row("CUDA_VISIBLE_DEVICES", "not on host devices", "-")
            return
        ranks = self._ranks(service, CUDA_VISIBLE_DEVICES=",".join(reversed(self.devices)))
        try:
            shown = [answer["torch_device"] for answer in ranks.hello]
            require(shown == ["cuda:1", "cuda:0"], f"reversed, the ranks are on {shown}")
            self._equal("CUDA_VISIBLE_DEVICES reversed", ranks.forward())
            ranks.end()
        finally:
            ranks.close()
        job = {**self._job, "model": "whole"}
        service.load("whole")
        only = Ranks(self.sockets, job, service, 1, CUDA_VISIBLE_DEVICES=self.devices[1])
        only.close()
        error = str(only.hello[0].get("error"))
        require("NoSuchDevice" in error, f"who sees the second GPU only and asks for the first gets {only.hello[0]}")
        self._row("GPU 0's shard, with GPU 1 visible only", "refused: NoSuchDevice", "yes")
        service.ctl("evict", "whole")

    def data_parallel(self, service: Service) -> None:
        service.ctl("evict", "pair")
        self._loaded("two replicas", service.load("twice"))
        copies = [line for line in service.log.read_text().splitlines() if "device to device" in line]
        self._row("device to device", copies[-1].partition(": ")[2] if copies else "none: host devices", "-")
        service.ctl("evict", "twice")

    def isolation(self, service: Service) -> None:
        service.load("pair")
        served, failures, seconds = self._attach_while_killing(service)
        rate = f"{served} attaches, {len(failures)} failed, longest {1e3 * max(seconds, default=0):.1f} ms"
        self._row(f"other device's worker killed {self.kills} times", rate, "NO" if failures or not served else "yes")
        restarts = [item["worker_restarts"] for item in service.status()["devices"]]
        require(restarts[1] >= self.kills, f"{restarts[1]} restarts of the killed worker, {self.kills} kills")
        require(not failures, failures[0] if failures else "")

    def nodes(self) -> None:
        port = free_port()
        services = []
        for number, device in enumerate(self.devices):
            config = f'devices = ["{device}"]\n' + model("pair", self.checkpoint, [device], "tensor_parallel = 2")
            config += lines("[cluster]", "nodes = 2", f"node_rank = {number}", 'master_addr = "127.0.0.1"')
            services.append(Service(self.sockets, f"node-{number}", config + f"master_port = {port}\n"))
        try:
            started = time.monotonic()
            for service in services:
                service.start()
            for service in services:
                service.ready()
            self._row("two nodes agreed and loaded", f"{time.monotonic() - started:.1f} s", "yes")
            keys = [service.status()["devices"][0]["shards"][0]["key"] for service in services]
            found = [key["tensor_parallel_rank"] for key in keys]
            require(found == [0, 1], f"the nodes hold ranks {found}")
            require(keys[0]["content"] == keys[1]["content"], "the nodes hold other contents")
            self._row("ranks of the nodes", f"{found[0]} and {found[1]}, one content", "yes")
        except StepFailed as error:
            raise StepFailed(f"{error}\n{services[0].last_words()}\n{services[1].last_words()}") from error
        finally:
            with ExitStack() as stack:  # all of them, whatever becomes of one
                for service in services:
                    stack.callback(service.stop)

    # Internals.

    @property
    def _job(self) -> dict[str, Any]:
        return {
            "model": "pair",
            "devices": self.devices,
            "shape": asdict(self.shape),
            "reference": str(self.checkpoint.with_name("reference.pt")),
            "backend": "gloo" if self.host else "nccl",
        }

    def _ranks(self, service: Service, **environ: str) -> Ranks:
        ranks = Ranks(self.sockets, self._job, service, 2, **environ)
        errors = [answer["error"] for answer in ranks.hello if "error" in answer]
        if errors:
            ranks.close()
            raise StepFailed(errors[0])
        return ranks

    def _refused(self, service: Service, device: str, rank: int) -> str:
        """The error of who asks a device for that rank of two."""
        try:
            self._attach(service, device, rank)[1].close()
        except WeightCacheError as error:
            return str(error)
        raise StepFailed(f"{device} gave out rank {rank}, which it does not have")

    def _attach(self, service: Service, device: str, rank: int) -> tuple[float, Connection]:
        """Seconds of an attach, without mapping, and the connection that holds it."""
        key = {"tensor_parallel_size": 2, "tensor_parallel_rank": rank}
        started = time.monotonic()
        connection = Connection.open(service.runtime / f"{device}.sock", device=device, client="two_gpus")
        try:
            _, fds = connection.request(Attach(model="pair", key=key), timeout=10)
        except BaseException:
            connection.close()
            raise
        fds.close()
        return time.monotonic() - started, connection

    def _attach_while_killing(self, service: Service) -> tuple[int, list[str], list[float]]:
        """How many attaches of the first device succeeded, the errors of others, and the seconds of each."""
        over = threading.Event()
        failures: list[str] = []
        seconds: list[float] = []

        def attach() -> None:
            while not over.is_set():
                try:
                    took, connection = self._attach(service, self.devices[0], 0)
                    connection.close()
                    seconds.append(took)
                except (WeightCacheError, OSError) as error:
                    failures.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=attach)
        thread.start()
        try:
            killed = 0
            for _ in range(self.kills):
                end = time.monotonic() + 60
                while (pid := service.worker(self.devices[1])) in (killed, 0):
                    require(time.monotonic() < end, "the killed worker does not come back")
                os.kill(pid, signal.SIGKILL)
                killed = pid
            self._attach_again(service)
        finally:
            over.set()
            thread.join()
        return len(seconds), failures, seconds

    def _attach_again(self, service: Service) -> None:
        """The device whose worker was killed serves what it had."""
        service.ctl("wait", "pair", "--timeout", "60")
        self._attach(service, self.devices[1], 1)[1].close()

    def _loaded(self, what: str, loaded: dict[str, Any]) -> None:
        ratio = loaded["bytes_done"] / self.nbytes
        rate = loaded["nbytes"] / loaded["load_seconds"] / 1e9
        read = self.nbytes / loaded["load_seconds"] / 1e9
        text = f"{rate:.2f} GB/s to devices, {read:.2f} GB/s read, in {loaded['load_seconds']:.2f} s"
        self._row(f"load {what}", text, "-")
        self._row(f"bytes read / checkpoint, {what}", f"{ratio:.3f}", "yes" if ratio == 1 else "NO")

    def _equal(self, what: str, found: tuple[float, float]) -> None:
        difference, agreeing = found
        text = f"logits differ by {difference:.1e}, same largest at {agreeing:.0%}"
        self._row(what, text, "yes" if difference < SAME else "NO")

    def _do(self, step: Callable[..., None], *arguments: Any) -> None:
        self._step = step.__name__.replace("_", " ")
        print(f"two_gpus: {self._step}", file=sys.stderr)
        try:
            step(*arguments)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a row, and the other steps go on
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, StepFailed | WeightCacheError | OSError):
            traceback.print_exception(error)
            error = StepFailed(f"{type(error).__name__}: {error}")
        first, _, rest = str(error).partition("\n")
        self._row("failed", first, "NO")
        print(rest, file=sys.stderr)

    def _row(self, what: str, result: str, ok: str) -> None:
        self.rows.append([self._step, what, result, ok])
        print(f"    {what}: {result}", file=sys.stderr)  # the table comes after minutes

    def _note(self, what: str, result: str) -> None:
        self._row(what, result, "-")


if __name__ == "__main__":
    sys.exit(main())
