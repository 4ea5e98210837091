"""`scripts/bench load` runs without a GPU, compares every byte, and says what it leaves out; so do its parts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors import safe_open

from tests.scripts.test_bench import SCRIPTS, bench, session_is_empty, temporary
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.devices import gpu_devices

__all__ = ["temporary"]  # a fixture, found here by its name
MIB = 1 << 20
TINY = ["--gib", "0.02", "--repeats", "2", "--cold-repeats", "1"]
ELSEWHERE = "prefetch,instanttensor"  # GPU loaders, for which no process is started here


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that imports one of the benchmark's modules."""
    monkeypatch.syspath_prepend(str(SCRIPTS))

    def get(name: str) -> ModuleType:
        return __import__(name)

    return get


@pytest.fixture
def on_disk() -> Iterator[Path]:
    """A folder whose files can be dropped from page cache: beside the tests, since /tmp may be tmpfs."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=SCRIPTS.parent) as folder:
        yield Path(folder)


@pytest.mark.timeout(240)
def test_load_measures_hot_and_cold_and_leaves_nothing(temporary: Path, tmp_path: Path) -> None:
    """Each loader is measured as often as asked and compared byte for byte; nothing is left behind."""
    pytest.importorskip("torch")
    target = tmp_path / "out.json"

    options = [*TINY, "--repeats", "1", "--only", "dense", "--peers", f"safetensors,{ELSEWHERE}"]
    process = bench(temporary, "load", *options, "--json", str(target))
    output, errors = process.communicate(timeout=230)

    assert process.returncode == 0, errors
    assert session_is_empty(process.pid)
    found = json.loads(target.read_text())
    assert (found["failed"], found["left_out"], found["goals"]) == ({}, [], [])
    assert found["missing"] == dict.fromkeys(ELSEWHERE.split(","), "loads to a GPU only")
    cases = {"dense, hot": 1, "dense, cold": 1}
    if not any(row["case"] == "dense, cold" for row in found["results"]):
        assert any("dense, cold: not measured: the kernel keeps" in note for note in found["notes"])  # tmpfs
        del cases["dense, cold"]
    runs = {(row["case"], row["loader"]): row["runs"] for row in found["results"]}
    assert runs == {(case, name): count for case, count in cases.items() for name in ("weightcached", "safetensors")}
    size = found["checkpoints"]["dense"]["bytes"]
    for row in found["results"]:
        assert row["case"] in output
        assert 0.99 * size < row["bytes_compared"] <= size  # headers are not compared
        # The start of our loader's processes is within its clock, and what they read of Python's own files.
        assert 0.99 < row["read"] < (1.05 if row["loader"] == "safetensors" else 1 + os.cpu_count() * 2 * MIB / size)
        assert row["gb_per_second"]["min"] <= row["gb_per_second"]["median"] <= row["gb_per_second"]["max"]
        resident = [sample["resident_before"] for sample in row["samples"]]
        assert all(share > 0.99 if row["cache"] == "hot" else share < 0.01 for share in resident)
    ours = {row["case"]: row["ratio"] for row in found["results"] if row["loader"] == "weightcached"}
    assert ours == dict.fromkeys(cases, 1.0)
    assert {row["kind"] for row in found["ceilings"]} >= {"hot"}


@pytest.mark.timeout(120)
def test_an_interrupted_run_cleans_up_and_reports(temporary: Path, tmp_path: Path) -> None:
    """SIGTERM in the middle ends with status 1; what there is is written, and no process and no file is left."""
    target = tmp_path / "out.json"

    process = bench(temporary, "load", *TINY, "--only", "fp8", "--json", str(target))
    assert process.stderr is not None
    while "fp8: " not in (line := process.stderr.readline()):
        assert line, process.communicate()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=100)

    assert process.returncode == 1
    assert session_is_empty(process.pid)
    assert "interrupted" in json.loads(target.read_text())["notes"][-1]


@pytest.mark.timeout(120)
def test_a_spent_budget_names_what_it_leaves_out(temporary: Path, tmp_path: Path) -> None:
    """With no time at all nothing is measured, and every round that was not is named."""
    target = tmp_path / "out.json"
    options = ["--only", "moe", "--cold", "none", "--peers", "safetensors", "--budget", "0"]

    process = bench(temporary, "load", *TINY, *options, "--json", str(target))
    output, errors = process.communicate(timeout=110)

    assert process.returncode == 1, errors
    first, second = "weightcached, safetensors", "safetensors, weightcached"  # each is after the other once
    names = [f"warm-up and check: {first}", f"round 1 of 2: {first}", f"round 2 of 2: {second}"]
    names = [f"moe, hot: {name}" for name in names]
    assert json.loads(target.read_text())["left_out"] == names
    assert all(f"left out, the budget was spent: {name}" in output for name in names)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--only", "dense,sparse"], "no sparse"),
        (["--peers", "mmap"], "no mmap"),
        (["--gib", "many"], "dense=12"),
        (["--gib", "tp=1"], "no checkpoint tp"),
        (["--only", "none", "--cold", "none"], "both are none"),
        (["--tp", "1"], "--tp"),
    ],
)
def test_wrong_usage(arguments: list[str], reason: str, temporary: Path) -> None:
    """Wrong usage exits with 2 and says what is wrong before anything is written."""
    process = bench(temporary, "load", *arguments)
    _, errors = process.communicate(timeout=50)

    assert process.returncode == 2
    assert reason in errors


def test_no_gpu_is_a_sentence(temporary: Path) -> None:
    """Without a GPU, `--device cuda` exits with 1 and says so before a checkpoint is written."""
    if gpu_devices():
        pytest.skip("this host has a GPU")

    process = bench(temporary, "load", "--device", "cuda")
    output, errors = process.communicate(timeout=50)

    assert process.returncode == 1
    assert errors == "bench: no GPU: NVML finds none\n"
    assert "GB/S" not in output


# Checkpoints.


@pytest.mark.parametrize(
    ("name", "gib", "tensors", "layers"), [("dense", 12, 219, 24), ("moe", 15, 18_867, 48), ("fp8", 9.5, 10_937, 14)]
)
def test_layouts_are_real_models(name: str, gib: float, tensors: int, layers: int, modules: Any) -> None:
    """At full size a layout has its model's count of tensors, each once, and files of about equal size."""
    layout = modules("bench_load_checkpoints").LAYOUTS[name](int(gib * (1 << 30)))

    assert len(layout.tensors) == len({tensor.name for tensor in layout.tensors}) == tensors
    assert layout.config["num_hidden_layers"] == layers
    assert 0.9 < layout.nbytes / (gib * (1 << 30)) <= 1.0
    sizes = [sum(tensor.nbytes for tensor in part) for part in layout.files().values()]
    assert sum(sizes) == layout.nbytes
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("name", ["dense", "moe", "fp8"])
def test_a_checkpoint_is_written_once(name: str, modules: Any, tmp_path: Path) -> None:
    """Both our reader and safetensors take the files; they are random; they are kept, and made anew when damaged."""
    checkpoints = modules("bench_load_checkpoints")
    layout = checkpoints.LAYOUTS[name](20 * MIB)
    folder = tmp_path / name

    assert checkpoints.write(folder, layout, os.urandom)
    with open_checkpoint(folder) as checkpoint:
        assert {tensor.name: tensor.shape for tensor in checkpoint.tensors()} == {
            tensor.name: tensor.shape for tensor in layout.tensors
        }
        assert checkpoint.ignored == ()
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(path, framework="pt") as file:
            assert set(file.keys()) == {tensor.name for tensor in layout.files()[path.name]}
        content = path.read_bytes()
        last = content[-64 * 1024 :]
        assert min(map(last.count, map(bytes, zip(range(256))))) > 0  # every byte value occurs
    before = [path.read_bytes() for path in files]

    assert not checkpoints.write(folder, layout, os.urandom)
    assert [path.read_bytes() for path in files] == before
    os.truncate(files[0], 100)
    assert checkpoints.write(folder, layout, os.urandom)
    assert [path.stat().st_size for path in files] == [len(content) for content in before]


def test_other_files_are_not_overwritten(modules: Any, tmp_path: Path) -> None:
    """A folder with something else in it is refused and left as it was."""
    checkpoints = modules("bench_load_checkpoints")
    (tmp_path / "model-00001-of-00004.safetensors").write_text("precious")

    with pytest.raises(modules("bench_common").BenchError, match="not of this benchmark"):
        checkpoints.write(tmp_path, checkpoints.dense(20 * MIB), os.urandom)

    assert [path.read_text() for path in tmp_path.iterdir()] == ["precious"]


def test_a_header_longer_than_a_block_is_left_alone(
    modules: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where header and data share blocks, only data is random."""
    checkpoints = modules("bench_load_checkpoints")
    monkeypatch.setattr(checkpoints, "BLOCK", 1000)
    tensors = tuple(checkpoints.Tensor(f"tensor.{number}", "F32", (number,)) for number in range(100))

    checkpoints.write(tmp_path / "it", checkpoints.Layout("it", {}, tensors, 2), lambda count: b"\xff" * count)

    for path in (tmp_path / "it").glob("*.safetensors"):
        content = path.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        assert json.loads(content[8:start])
        assert set(content[start:]) == {0xFF}


# Page cache.


def test_page_cache_is_emptied_and_filled(modules: Any, on_disk: Path) -> None:
    """What mincore sees follows: nothing of the files after one, everything after the other."""
    cache = modules("bench_load_cache")
    paths = [on_disk / "one", on_disk / "two"]
    for path in paths:
        path.write_bytes(os.urandom(3 * MIB + 5))
    assert cache.resident(paths) == 1.0  # written through page cache

    try:
        assert cache.make_cold(paths) < cache.TOLERANCE
    except modules("bench_common").BenchError as error:
        pytest.skip(f"this file system: {error}")
    assert cache.resident(paths) < cache.TOLERANCE
    with paths[0].open("rb") as file:
        file.read()
    assert cache.resident(paths) == pytest.approx(0.5, abs=0.01)
    assert cache.make_hot(paths) == 1.0


def test_a_refusal_to_empty_page_cache_is_said(modules: Any) -> None:
    """Memory of a memfd has no other place: dropping it is refused in words, with the share that stays."""
    cache = modules("bench_load_cache")
    fd = os.memfd_create("test")
    try:
        os.write(fd, bytes(MIB))
        with pytest.raises(modules("bench_common").BenchError, match=r"keeps 100\.0%"):
            cache.make_cold([Path(f"/proc/self/fd/{fd}")])
    finally:
        os.close(fd)


# Loaders and the check.


@pytest.fixture
def loaded(modules: Any, tmp_path: Path) -> Any:
    """(module, job, tensors): a tiny fp8 checkpoint as safetensors loads it."""
    pytest.importorskip("torch")
    checkpoints, peers = modules("bench_load_checkpoints"), modules("bench_load_peers")
    checkpoints.write(tmp_path / "fp8", checkpoints.fp8(12 * MIB), os.urandom)
    files = sorted(map(str, (tmp_path / "fp8").glob("*.safetensors")))
    job = peers.Job(str(tmp_path / "fp8"), files, "cpu")
    with ExitStack() as held:
        [tensors] = peers.safetensors(job, held)()()
    return modules("bench_load_child"), job, tensors


@pytest.mark.parametrize("rank", [0, 3, None])
@pytest.mark.parametrize("loader", ["weightcached", "weightcached-starting", "get_slice"])
def test_slices_are_what_plain_cuts_give(loader: str, rank: int | None, modules: Any, tmp_path: Path) -> None:
    """Of 4 ranks, one or all: our slabs and `get_slice` hold what a plain cut of the files gives."""
    pytest.importorskip("torch")
    checkpoints, peers = modules("bench_load_checkpoints"), modules("bench_load_peers")
    checkpoints.write(tmp_path / "dense", checkpoints.dense(12 * MIB), os.urandom)
    files = sorted(map(str, (tmp_path / "dense").glob("*.safetensors")))
    job = peers.Job(str(tmp_path / "dense"), files, "cpu", ranks=4, rank=rank)
    with ExitStack() as held:
        load = peers.SLICERS[loader].prepare(job, held)
        compared = modules("bench_load_child").check(load()(), job)

    share = compared / sum(map(os.path.getsize, files))
    assert share == pytest.approx(1.0 if rank is None else 0.25, rel=0.03)  # norms are on every rank


def test_processes_read_every_buffer_once(modules: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The ceiling by processes: their shares together are all whole buffers, while something is copied."""
    ceilings, bench_common = modules("bench_load_ceilings"), modules("bench_common")
    file = tmp_path / "file"
    buffers = 200  # so many that reading them takes longer than this process may have to wait for its turn
    with file.open("wb") as sparse:
        sparse.truncate(buffers * ceilings.BUFFER + 1)

    class Copies:
        """Stands for the GPU: how long it would have copied."""

        def copy_while(self, going_on: Any) -> float:
            self.seen = going_on()
            while going_on():
                os.sched_yield()
            return 1.0

    copies = Copies()
    started = time.perf_counter()
    rate, copied = ceilings.read_by_processes([file], 2, copies, digest=True)

    assert rate > buffers * ceilings.BUFFER / (time.perf_counter() - started), "their start is not counted"
    assert (copied, copies.seen) == (1.0, True)
    monkeypatch.setattr(ceilings, "_line", lambda child: "4096")
    with pytest.raises(bench_common.BenchError, match="2 processes read 8192 bytes"):
        ceilings.read_by_processes([file], 2, copies, digest=False)


def test_the_check_takes_what_is_right(loaded: Any) -> None:
    """All tensors as in the files: every byte of data was compared."""
    child, job, tensors = loaded

    assert child.check([tensors], job) == sum(tensor.nbytes for tensor in tensors.values())


def test_the_check_finds_one_wrong_bit(loaded: Any) -> None:
    """A bit of one scale among many, and of the last element of a weight: the tensor is named."""
    import torch

    child, job, tensors = loaded
    for suffix in ("experts.3.up_proj.weight_scale_inv", "experts.5.down_proj.weight"):
        name = next(name for name in tensors if name.endswith(suffix))
        wrong = tensors[name].clone()
        wrong.view(-1)[-1:].view(torch.uint8)[0] ^= 1

        with pytest.raises(SystemExit, match=name):
            child.check([{**tensors, name: wrong}], job)


def test_the_check_finds_what_is_missing_or_of_another_kind(loaded: Any) -> None:
    """A tensor too few, one too many, another shape, another element type of the same size."""
    import torch

    child, job, tensors = loaded
    name = "model.norm.weight"
    norm = tensors[name]
    fewer = {key: tensor for key, tensor in tensors.items() if key != name}

    for wrong, reason in (
        (fewer, "tensors came"),
        ({**tensors, "extra": norm}, "tensors came"),
        ({**tensors, name: norm.view(1, -1)}, "expected"),
        ({**tensors, name: norm.view(torch.float16)}, "expected"),
    ):
        with pytest.raises(SystemExit, match=reason):
            child.check([wrong], job)


@pytest.mark.timeout(120)
def test_a_loader_that_fails_stops_no_other(modules: Any, tmp_path: Path) -> None:
    """A broken file is a failure with its reason for each loader; one that is not installed is named as missing."""
    pytest.importorskip("torch")
    rounds = modules("bench_load_rounds")
    checkpoints = modules("bench_load_checkpoints")
    checkpoints.write(tmp_path / "dense", checkpoints.dense(12 * MIB), os.urandom)
    os.truncate(next((tmp_path / "dense").glob("*.safetensors")), 5)
    record = rounds.Record()
    measured = rounds.Rounds(record, tmp_path, "cpu", site=None, slow=1.0, deadline=None)

    absent = {"runai": "not installed: no module runai_model_streamer"}
    if find_spec("runai_model_streamer"):
        absent = {}
    measured.measure(rounds.Case("dense", "hot"), ["weightcached", "safetensors", *absent], 1, check=False)

    assert record.samples == {}
    assert record.failed.keys() == {"dense, hot: weightcached", "dense, hot: safetensors"}
    assert "CheckpointError" in record.failed["dense, hot: weightcached"]
    assert "SafetensorError" in record.failed["dense, hot: safetensors"]
    assert record.missing == absent


@pytest.mark.timeout(120)
def test_a_package_without_the_function_is_missing(modules: Any) -> None:
    """safetensors before 0.9 has no prefetch: the process says so, and what to do, instead of failing."""
    pytest.importorskip("torch")
    import safetensors

    if hasattr(safetensors, "PrefetchLoader"):
        pytest.skip("this safetensors has it")
    processes = modules("bench_load_processes")
    what = {"folder": "", "files": [], "device": "cpu", "ranks": 1, "rank": None, "site": None}
    child = processes.Child({"peer": "prefetch", "slices": False, "check": False, "what": what}, {})
    try:
        with pytest.raises(processes.Missing, match="--prefetch-site"):
            child.ready()
    finally:
        child.close()


# The report and the picture.


def result(loader: str, rate: float, **more: Any) -> dict[str, Any]:
    """A line of the result."""
    row = {"case": "dense, hot", "checkpoint": "dense", "cache": "hot", "ranks": 1, "rank": None, "loader": loader}
    rates = {"median": rate, "min": rate * 0.9, "max": rate * 1.1}
    return {**row, "gb_per_second": rates, "of_ceiling": rate / 50, "ratio": rate / 40, "version": "1", **more}


def test_goals_name_the_best_other(modules: Any) -> None:
    """Ours is held to the fastest other loader of the same case and to the ceiling; cold, 5 % are allowed."""
    goals = modules("bench_load_report").goals
    cold = {"case": "dense, cold", "cache": "cold"}
    rows = [result("weightcached", 40), result("prefetch", 41), result("safetensors", 5)]
    rows += [result("weightcached", 2.0, **cold), result("prefetch", 2.1, **cold), result("runai", 1.0, **cold)]

    found = {goal["what"]: goal["met"] for goal in goals(rows, "cuda:0")}

    assert found == {
        "dense, hot: beside the best other, prefetch": False,
        "dense, hot: of the ceiling": False,
        "dense, cold: beside the best other, prefetch": True,
    }
    assert goals(rows, "cpu") == []


def test_the_picture_has_a_bar_for_each_loader(tmp_path: Path) -> None:
    """The picture is XML with a bar per line of the result, in proportion, and the names escaped."""
    document = {
        "results": [result("weightcached", 40), result("a<b", 20), result("weightcached", 3, case="fp8, hot")],
        "checkpoints": {"dense": {"tensors": 219, "bytes": 12_566_536_192}},
        "device": "a GPU", "cpus": 16, "date": "2026-11-29T00:00:00+00:00",
    }  # fmt: skip
    source, target = tmp_path / "in.json", tmp_path / "out.svg"
    source.write_text(json.dumps(document))

    subprocess.run([sys.executable, str(SCRIPTS / "bench_plot.py"), str(source), str(target)], check=True)

    root = ElementTree.parse(target).getroot()
    bars = [float(bar.attrib["width"]) for bar in root.iter() if bar.get("class") == "bar"]
    texts = [text.text for text in root.iter() if text.tag.endswith("text")]
    assert len(bars) == 3
    assert bars[0] == pytest.approx(2 * bars[1], rel=0.01)
    assert "a<b" in texts
    assert "20.00 (0.50 x)" in texts


@pytest.mark.parametrize("content", ["", "{}", '{"results": []}'])
def test_the_picture_of_something_else_is_an_error(content: str, tmp_path: Path) -> None:
    """What `bench load` did not write gives one line and exit status 1, and no picture."""
    (tmp_path / "in.json").write_text(content)
    command = [sys.executable, str(SCRIPTS / "bench_plot.py"), str(tmp_path / "in.json"), str(tmp_path / "out.svg")]

    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out.svg").exists()
