"""scripts/check_engine_api: an engine without a name that a plug-in uses is told by file, before anybody runs it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "check_engine_api"

LOADER = """
from .base import Base as Above
try:
    import fast
except ImportError:
    LIMIT = 3

class Loader(Above):
    size: int = 0
    def __init__(self, config, *, role=None):
        self.config = config

def load(path, *, strict=True): ...
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An engine of two versions: in 2.0 `load` has lost a parameter, and `Loader` its base class."""
    for version, source in (
        ("1.10", LOADER),
        ("2.0", LOADER.replace("strict=True", "lax=False").replace("(Above)", "")),
    ):
        package = tmp_path / f"vllm-{version}" / "vllm"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("from .loader import load as load_model\nraise SystemExit('was run')\n")
        (package / "loader.py").write_text(source)
        (package / "base.py").write_text("class Base:\n    def weights(self, names): ...\n")
    return tmp_path


def run(*arguments: object, env: dict[str, str] | None = None) -> tuple[int, str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, timeout=50)
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout


def used(module: str, name: str, *parameters: str, **limits: str | None) -> dict[str, Any]:
    return {"module": module, "name": name, "parameters": list(parameters), "why": "tested", **limits}


def write_api(folder: Path, *entries: dict[str, Any]) -> Path:
    """A plug-in's api.py that lists these."""
    api = folder / "api.py"
    api.write_text(f"USED = {list(entries)!r}\n")
    return api


def check(folder: Path, version: str, *entries: dict[str, Any]) -> tuple[int, str]:
    api = write_api(folder, *entries)
    return run("--engine", "vllm", "--versions", version, "--folder", folder, "--api", api)


PRESENT = (
    used("vllm", "load_model", "path", "strict"),  # by a re-export, under another name
    used("vllm.loader", "LIMIT"),  # where an import is tried
    used("vllm.loader", "Loader", "config", "role"),
    used("vllm.loader", "Loader.size"),
    used("vllm.loader", "Loader.config"),  # set in a method
    used("vllm.loader", "Loader.weights", "names"),  # of a base class in another module
)


def test_names_that_are_there_are_found_wherever_they_come_from(folder: Path) -> None:
    """Functions, classes, attributes and constants, re-exported and inherited ones too, without running the engine."""
    status, output = check(folder, "1.10", *PRESENT)
    assert status == 0, output
    assert output.splitlines()[-1].split() == ["vllm", "1.10", str(len(PRESENT)), "0"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (used("vllm.gone", "load"), "vllm.gone.load: no such module"),
        (used("vllm.loader", "unload"), "vllm.loader.unload: no such name"),
        (used("vllm.loader", "Loader.weight"), "vllm.loader.Loader.weight: no such name"),
        (used("vllm.loader", "load", "path", "device"), "vllm.loader.load: no parameter device"),
        (used("vllm.loader", "LIMIT", "path"), "vllm.loader.LIMIT: takes no parameters"),
    ],
)
def test_what_is_missing_fails_the_check_and_is_named(folder: Path, entry: dict[str, Any], said: str) -> None:
    """A module, a name, a member or a parameter that is not there: exit status 1, and a line that says which."""
    status, output = check(folder, "1.10", PRESENT[0], entry)
    assert status == 1
    assert f"    {said} (tested)" in output.splitlines()


def test_a_later_version_that_has_changed_is_caught(folder: Path) -> None:
    """The same names fail for the version that has lost a parameter and a base class, and only those two."""
    status, output = check(folder, "2.0", *PRESENT)
    assert status == 1
    lines = [line.strip() for line in output.splitlines() if line.startswith("    ")]
    assert lines == [
        "vllm.load_model: no parameter strict (tested)",
        "vllm.loader.Loader.weights: no such name (tested)",
    ]


def test_a_name_is_looked_for_only_in_the_versions_that_it_is_used_in(folder: Path) -> None:
    """`since` and `until` are inclusive and compared as numbers: 1.9 is before 1.10."""
    gone = {"module": "vllm.loader", "name": "gone", "why": "tested"}
    assert check(folder, "1.10", {**gone, "until": "1.9"})[0] == 0
    assert check(folder, "1.10", {**gone, "since": "1.11"})[0] == 0
    assert check(folder, "1.10", {**gone, "since": "1.10"})[0] == 1
    assert check(folder, "1.10", {**gone, "until": "1.10"})[0] == 1


def test_a_wheel_that_cannot_be_had_is_skipped_with_the_reason(folder: Path, tmp_path: Path) -> None:
    """Offline, or without the folder: the reason, and exit status 77, which is neither success nor failure."""
    status, output = run("--engine", "vllm", "--versions", "9.9", "--folder", folder, "--api", write_api(folder))
    assert (status, "skipped: " in output, "vllm-9.9" in output) == (77, True, True)
    offline = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PIP_NO_INDEX": "1",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(tmp_path),
    }
    status, output = run("--engine", "vllm", "--versions", "9.9", "--api", write_api(folder), env=offline)
    assert status == 77
    assert "skipped: " in output


def test_a_miss_outweighs_a_skipped_version(folder: Path) -> None:
    """One version that cannot be had does not hide what is missing in another one."""
    api = write_api(folder, used("vllm.loader", "gone"))
    status, _ = run("--engine", "vllm", "--versions", "9.9", "1.10", "--folder", folder, "--api", api)
    assert status == 1


def test_the_plug_ins_name_what_they_use() -> None:
    """Each engine's list and versions are read by the script as they are; each entry is of the form that it checks."""
    paths = list((ROOT / "weightcached" / "engines").glob("*/api.py"))
    assert {path.parent.name for path in paths} == {"vllm", "sglang"}
    for path in paths:
        names = runpy.run_path(str(path))
        assert names["USED"]
        assert names["VERSIONS"]
        for entry in names["USED"]:
            assert entry["module"].partition(".")[0] == path.parent.name
            assert entry["name"] is not None
            assert entry["why"]
