"""The shape of the package: who imports whom, what an import costs, and that every module and test says what it is."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "weightcached"
TESTS = ROOT / "tests"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400

# Modules without a test file of their own, and why.
UNMIRRORED = {
    "__main__.py": "three lines around cli.main, run by the tests of the commands",
    "safetensors/__main__.py": "three lines around hook.run; test_hook runs them",
    "engines/vllm/__main__.py": "what -m runs; test_preload runs the command behind it",
    "shard/slab.py": "an interface without code; test_host and test_cuda hold its two kinds to it",
}

# What an engine imports to attach; `pyproject.toml` names the same for the contract "client-is-light".
LIGHT = ["errors.py", "fds.py", "memfd.py", "paths.py", "shard", "client"]
LIGHT_WIRE = ["wire/messages.py", "wire/framing.py", "wire/connection.py"]
HEAVY = ["pydantic", "torch", "rich", "asyncio", "pynvml", "transformers", "numpy", "cuda"]

# One forbidden import for each contract, to see it found.
PLANTED = {
    "no-torch": ("loader/plan.py", "import torch"),
    "worker-is-a-broker": ("worker/catalogue.py", "from ..shard import cuda"),
    "checkpoint-knows-files": ("checkpoint/header.py", "from ..devices import all_devices"),
    "parallel-is-pure": ("parallel/slices.py", "from ..devices import all_devices"),
    "client-apart": ("client/attach.py", "from ..service import main"),
    "wire-apart": ("wire/framing.py", "from ..worker import catalogue"),
    "shard-is-a-noun": ("shard/key.py", "from ..wire import messages"),
    "leaves": ("fds.py", "from . import devices"),
    "client-is-light": ("client/tensors.py", "import pydantic"),
}


def name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def lint_imports(folder: Path, *contracts: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import sys; from importlinter.cli import lint_imports\n"
        "sys.exit(lint_imports(limit_to_contracts=tuple(sys.argv[1:]), no_cache=True, no_logo=True))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *contracts],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_the_arrows_hold() -> None:
    """No module imports what its place in the design forbids."""
    run = lint_imports(ROOT)

    assert run.returncode == 0, run.stdout + run.stderr


def test_every_contract_has_a_planted_import() -> None:
    """A new contract needs its own counter-example below."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())

    assert {contract["id"] for contract in config["tool"]["importlinter"]["contracts"]} == set(PLANTED)


@pytest.mark.parametrize("contract", PLANTED)
def test_a_planted_import_breaks_its_contract(contract: str, tmp_path: Path) -> None:
    """With one forbidden import added to a copy of the package, exactly that contract is broken."""
    shutil.copytree(PACKAGE, tmp_path / "weightcached", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    module, line = PLANTED[contract]
    with open(tmp_path / "weightcached" / module, "a") as file:
        file.write(f"\n{line}\n")

    run = lint_imports(tmp_path, contract)

    assert run.returncode == 1, run.stdout + run.stderr
    assert "0 kept, 1 broken" in run.stdout


def light_modules() -> list[str]:
    paths = [PACKAGE / part for part in LIGHT + LIGHT_WIRE]
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    parts = [file.relative_to(ROOT).with_suffix("").parts for file in files]
    return [".".join(part).removesuffix(".__init__") for part in parts]


def test_attaching_imports_nothing_heavy() -> None:
    """A fresh process that imports all client modules has loaded none of the packages that take time."""
    program = "import importlib, json, sys\nfor name in json.loads(sys.argv[1]): importlib.import_module(name)\n"
    program += "print(json.dumps(sorted(set(json.loads(sys.argv[2])) & set(sys.modules))))"

    run = subprocess.run(
        [sys.executable, "-c", program, json.dumps(["weightcached", *light_modules()]), json.dumps(HEAVY)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )

    assert json.loads(run.stdout) == []


def test_the_package_itself_imports_only_errors() -> None:
    """`import weightcached` loads its errors and no other module of the package."""
    program = "import sys, weightcached; print(*sorted(m for m in sys.modules if m.startswith('weightcached')))"

    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)

    assert run.stdout.split() == ["weightcached", "weightcached.errors"]


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=name)
def test_every_module_has_its_test(path: Path) -> None:
    """weightcached/a/b.py is tested by tests/a/test_b.py, or stands in the list of exceptions, and not both."""
    mirror = TESTS / path.relative_to(PACKAGE).with_name(f"test_{path.name}")

    assert mirror.exists() != (name(path) in UNMIRRORED), (
        f"{mirror.relative_to(ROOT)}: missing, or a needless exception"
    )


def test_the_exceptions_exist() -> None:
    """An exception for a module that is gone is removed."""
    assert set(UNMIRRORED) <= {name(path) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=name)
def test_every_module_is_short_and_says_what_it_is(path: Path) -> None:
    """At most 400 lines, and a docstring."""
    text = path.read_text()

    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(ast.parse(text)), "no docstring"


@pytest.mark.parametrize("path", sorted(TESTS.rglob("test_*.py")), ids=lambda path: path.relative_to(TESTS).as_posix())
def test_every_test_states_its_fact(path: Path) -> None:
    """Each test function has a docstring."""
    silent = [
        f"{node.name} (line {node.lineno})"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
        and not ast.get_docstring(node)
    ]

    assert not silent
