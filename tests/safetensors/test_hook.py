"""safetensors/hook.py: programs that know nothing of the cache read through it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.running import ROOT, import_path
from tests.safetensors.conftest import Cache
from tests.warm import Warm

PROGRAM = """
import sys
from safetensors.torch import load_file, load_model
print(load_file(sys.argv[1])["a"].tolist(), __name__)
"""
RUN_SECONDS = 100
ON_DISK = list(range(6))
CACHED = [number ^ 0x0101010101010101 for number in ON_DISK]

pytestmark = pytest.mark.timeout(3 * RUN_SECONDS)  # imports of torch and transformers, on a machine that is slow


def python(*arguments: str, code: int = 0, **variables: str) -> str:
    """What a new interpreter prints."""
    environment = {**os.environ, "PYTHONPATH": import_path(), **variables}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def test_the_runner_serves_a_script(file: Path, cache: Cache, tmp_path: Path) -> None:
    """Unchanged, it gets the cached bytes under the runner and those on disk without it."""
    cache(file)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)

    assert python(str(script), str(file)) == f"{ON_DISK} __main__\n"
    assert python("-m", "weightcached.safetensors", str(script), str(file)) == f"{CACHED} __main__\n"


def test_the_runner_serves_a_module(file: Path, cache: Cache, tmp_path: Path) -> None:
    """``-m MODULE``, as python and torchrun have it."""
    cache(file)
    (tmp_path / "wc_program.py").write_text(PROGRAM)

    path = f"{tmp_path}:{import_path()}"
    printed = python("-m", "weightcached.safetensors", "-m", "wc_program", str(file), PYTHONPATH=path)

    assert printed == f"{CACHED} __main__\n"


@pytest.fixture(scope="module")
def warm() -> Iterator[Warm]:
    """Forks interpreters that have imported torch, and neither the library nor this package."""
    started = Warm("torch")
    yield started
    started.close()


@pytest.mark.parametrize(
    ("value", "late", "expected"),
    [("1", False, CACHED), ("1", True, CACHED), ("map", True, CACHED), ("0", False, ON_DISK), ("", True, ON_DISK)],
)
def test_an_import_of_the_package_honours_the_variable(
    warm: Warm, file: Path, cache: Cache, value: str, late: bool, expected: list[int]
) -> None:
    """Before or after the library and its users: `load_file` and a `safe_open` taken earlier read through the cache."""
    cache(file)
    imports = ["import weightcached", "from safetensors import safe_open", "from safetensors.torch import load_file"]
    if late:
        imports.append(imports.pop(0))
    program = "\n".join(["import sys; assert not {'safetensors', 'weightcached'} & set(sys.modules)", *imports]) + (
        "\nprint(load_file(sys.argv[1])['a'].tolist());print(safe_open(sys.argv[1], 'pt').get_tensor('a').tolist())"
    )

    environ = {**os.environ, "PYTHONPATH": import_path(), "WEIGHTCACHED_SAFETENSORS": value}
    done = warm.start("-c", program, str(file), cwd=ROOT, environ=environ).wait(RUN_SECONDS)

    assert (done.returncode, done.stdout) == (0, f"{expected}\n{expected}\n"), done.stderr


def test_wrong_arguments_of_the_runner(tmp_path: Path) -> None:
    """Its usage, and exit status 2."""
    python("-m", "weightcached.safetensors", code=2)
    python("-m", "weightcached.safetensors", "-m", code=2)
    assert "usage:" in python("-m", "weightcached.safetensors", "--help")


def test_uninstalling_gives_the_library_back(warm: Warm) -> None:
    """In the library and in a module that had taken it; installing twice is installing once."""
    program = (
        "import safetensors, safetensors.torch; from safetensors._safetensors_rust import safe_open\n"
        "real = [safe_open]\n"  # a plain variable would be replaced too
        "from weightcached.safetensors import hook\n"
        "hook.install(); hook.install()\n"
        "assert hook.installed() and safetensors.torch.safe_open is safetensors.safe_open is not real[0]\n"
        "hook.uninstall()\n"
        "assert not hook.installed() and safetensors.torch.safe_open is safetensors.safe_open is real[0]\n"
    )
    done = warm.start("-c", program, cwd=ROOT, environ={**os.environ, "PYTHONPATH": import_path()}).wait(RUN_SECONDS)
    assert (done.returncode, done.stderr) == (0, "")


def test_transformers_reads_through_it(tmp_path: Path, cache: Cache) -> None:
    """`from_pretrained`, unchanged: its parameters have the cached bytes."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    cache(tmp_path / "model.safetensors")
    name = "model.embed_tokens.weight"
    program = (
        "import sys, torch, transformers\n"
        "model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "print(model.state_dict()[sys.argv[2]].view(torch.uint8).sum(dtype=torch.int64).item())\n"
    )
    script = tmp_path / "program.py"
    script.write_text(program)
    raw = model.state_dict()[name].view(torch.uint8)

    printed = python("-m", "weightcached.safetensors", str(script), str(tmp_path), name)
    assert int(printed) == (raw ^ 1).sum(dtype=torch.int64) != raw.sum(dtype=torch.int64)
