"""The service as a whole: what it starts, what it tells systemd, what ends it, what it refuses at its start."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest

from tests.checkpoint.files import write_sharded
from tests.checkpoint.strict_cases import entry, file_of
from tests.llama import Tensor
from tests.running import RunningService, children_of, process_of_role, wait_for_end
from tests.service.conftest import HOST, HOSTS, StartService, attach, model, slab_bytes

Llama = tuple[Path, dict[str, Tensor]]


def test_serves_what_it_preloads_and_leaves_nothing(start_service: StartService, checkpoint: Path) -> None:
    """Ready comes when the preloaded model is served; after SIGTERM the exit status is 0 and no file is left."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    assert service.model("small")["state"] == "cached"
    assert service.status()["ready"] is True
    shard = service.status()["devices"][0]["shards"][0]
    assert (shard["model"], shard["generation"], shard["tensors"], shard["leases"]) == ("small", 1, 2, [])
    assert shard["files"][0]["digest"] and shard["key"]["content"]
    worker, fds = attach("small")
    with worker, fds:
        data = checkpoint.read_bytes()
        assert slab_bytes(fds)[:4096] == data[-4110:-14]
        assert [lease["pid"] for lease in service.status()["devices"][0]["shards"][0]["leases"]] == [os.getpid()]
    service.stop()


def test_tells_systemd_of_progress_ready_and_stopping(start_service: StartService, checkpoint: Path) -> None:
    """Before ready each status extends the start timeout; ready and stopping are said once each, in order."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    assert all("EXTEND_TIMEOUT_USEC=" in message for message in service.messages[:-1])
    service.wait_for("serving small (1 of 1 models")
    service.process.send_signal(signal.SIGTERM)
    service.wait_for("STOPPING=1")
    service.stop()


def test_the_ranks_of_a_model_are_served_together(start_service: StartService, llama: Llama) -> None:
    """Ready comes when every rank is there; the log names the devices in rank order; a client needs its own only."""
    sizes = ["tensor_parallel = 2", 'devices = ["host-3", "host-2"]']
    service = start_service(HOSTS + model("cut", llama[0], *sizes)).ready()
    assert (service.model("cut")["ranks_cached"], service.model("cut")["ranks"]) == (2, 2)
    assert "serving cut on host-3, host-2" in service.log
    service.wait_for("serving cut (1 of 1 models")
    os.kill(process_of_role(service, "host-2"), signal.SIGKILL)
    worker, fds = attach("cut", device="host-3", tensor_parallel_rank=0)
    fds.close()
    worker.close()
    worker, fds = attach("cut", wait=20, device="host-2", tensor_parallel_rank=1)
    fds.close()
    worker.close()
    assert service.model("cut")["ranks_cached"] == 2
    service.stop()


def test_one_device_has_one_service(start_service: StartService, checkpoint: Path) -> None:
    """A second instance for the same device ends with 75 and names the first; the first goes on."""
    first = start_service(HOST + model("small", checkpoint)).ready()
    second = start_service(HOST, instance="other")
    assert second.wait() == 75
    assert f"weightcached@test, pid {first.process.pid}" in second.log
    second.stop(code=75, shared=True)
    assert first.model("small")["state"] == "cached"
    first.stop()


def test_take_over_ends_the_holder_first(start_service: StartService, checkpoint: Path) -> None:
    """With --take-over the second instance ends the first, which exits cleanly, and serves the device."""
    first = start_service(HOST + model("small", checkpoint)).ready()
    second = start_service(HOST + model("small", checkpoint), instance="other", options=("--take-over",)).ready()
    assert first.wait() == 0
    assert second.model("small")["state"] == "cached"
    second.stop()
    first.stop()


def test_the_end_of_the_main_process_ends_the_workers(start_service: StartService, checkpoint: Path) -> None:
    """SIGKILL of the service: its worker sees the channel close and ends; a new service starts over the stale files."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    children = children_of(service.process.pid)
    service.process.kill()
    service.process.wait()
    for pid in children:
        wait_for_end(pid)
    service.stop(code=None)
    again = start_service(HOST + model("small", checkpoint)).ready()
    assert again.model("small")["state"] == "cached"
    again.stop()


def test_memory_at_rest(start_service: StartService, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The service stays below 60 MB and a worker below 40 MB of resident memory."""
    service = start_service(HOST + model("small", checkpoint)).ready()
    worker = process_of_role(service, "worker")
    service_kb, worker_kb = _resident(service.process.pid), _resident(worker)
    with capsys.disabled():
        print(f"\nresident: service {service_kb / 1000:.1f} MB, worker {worker_kb / 1000:.1f} MB")
    assert service_kb < 60_000
    assert worker_kb < 40_000
    service.stop()


def _resident(pid: int) -> int:
    """Kilobytes, without the pages of sealed slabs, which a process only counts where it has mapped them."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0])


def refused_at_start(start_service: StartService, config: str, code: int) -> str:
    """The log of a service that does not start; its exit status must be `code`."""
    service: RunningService = start_service(config)
    assert service.wait() == code, service.log
    log = service.log
    service.stop(code=code)
    return log


class TestRefusedAtStart:
    """What ends a start, with which exit status and which words."""

    def test_missing_checkpoint(self, start_service: StartService, tmp_path: Path) -> None:
        """The path that is not there is named; 78, since another start would not find it either."""
        log = refused_at_start(start_service, HOST + model("gone", tmp_path / "nowhere"), 78)
        assert str(tmp_path / "nowhere") in log
        assert "model gone" in log

    def test_lfs_pointer(self, start_service: StartService, tmp_path: Path) -> None:
        """A Git LFS pointer in place of weights is called that."""
        path = tmp_path / "p.safetensors"
        path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 90000000\n")
        assert "LFS pointer" in refused_at_start(start_service, HOST + model("p", path), 78)

    def test_too_few_descriptors(self, start_service: StartService, tmp_path: Path) -> None:
        """A set of more files than the process may open is no bad config: 1, with both numbers, so it is restarted."""
        write_sharded(tmp_path, {f"m-{n:05}.safetensors": [f"t{n}"] for n in range(300)})
        service = start_service(HOST + model("many", tmp_path), limits={resource.RLIMIT_NOFILE: 200})
        assert service.wait() == 1, service.log
        assert "Too many open files, this process may have 200; raise its hard limit" in service.log
        assert "856 at least: the set has 300 files" in service.log
        service.stop(code=1)

    def test_too_little_address_space(self, start_service: StartService, tmp_path: Path) -> None:
        """A file that is larger than the address space that is left to map its check in: 1, with what is lacking."""
        path = tmp_path / "large.safetensors"
        path.write_bytes(file_of({"w": entry("U8", [1 << 40], 0, 1 << 40)}))
        os.truncate(path, path.stat().st_size + (1 << 40))
        service = start_service(HOST + model("large", path), limits={resource.RLIMIT_AS: 1 << 36})
        assert service.wait() == 1, service.log
        assert "Cannot allocate memory; free memory, or raise this process's limits" in service.log
        service.stop(code=1)

    def test_no_such_device(self, start_service: StartService) -> None:
        """A GPU that is not in this host is named together with what is."""
        log = refused_at_start(start_service, 'devices = ["GPU-00000000-0000-0000-0000-000000000000"]\n', 78)
        assert "GPU-00000000-0000-0000-0000-000000000000" in log
        assert "host-0" in log

    def test_more_than_the_limit(self, start_service: StartService, checkpoint: Path) -> None:
        """A model over the memory limit is refused with needed and free bytes before anything is allocated."""
        config = HOST.replace("\n", "\nmemory_limit = 1000\n") + model("small", checkpoint)
        log = refused_at_start(start_service, config, 1)
        assert "needed 4110 bytes, free 1000" in log

    def test_too_few_devices(self, start_service: StartService, checkpoint: Path) -> None:
        """Ranks without a device of their own: how many are needed and served."""
        log = refused_at_start(start_service, HOST + model("cut", checkpoint, "tensor_parallel = 2"), 78)
        assert "model cut: 2 ranks (tensor_parallel 2) need 2 devices of one kind; 1 served here: host-0" in log

    @pytest.mark.parametrize(
        ("sizes", "problem"), [("tensor_parallel = 3", "cannot be cut"), ("pipeline_parallel = 4", "3 layers")]
    )
    def test_sizes_that_do_not_fit(self, start_service: StartService, llama: Llama, sizes: str, problem: str) -> None:
        """A cut that the model does not allow is the config's fault: 78, since another start would end alike."""
        log = refused_at_start(start_service, HOSTS + model("cut", llama[0], sizes), 78)
        assert "model cut: " in log
        assert problem in log

    def test_unknown_architecture(self, start_service: StartService, checkpoint: Path) -> None:
        """A model without rules is not cut by a guess: 78."""
        log = refused_at_start(start_service, HOSTS + model("cut", checkpoint, "tensor_parallel = 2"), 78)
        assert "model cut: " in log
        assert "rules = [...]" in log

    def test_unknown_key(self, start_service: StartService) -> None:
        """Named with its nearest valid one."""
        assert 'did you mean "devices"' in refused_at_start(start_service, 'device = ["host-0"]\n', 78)

    def test_bad_runtime_directory(self, start_service: StartService, runtime_dir: Path) -> None:
        """A runtime directory that others may enter is refused."""
        runtime_dir.chmod(0o755)
        assert "755" in refused_at_start(start_service, HOST, 1)
