"""The names at the top of the package."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import weightcached
from weightcached.client import attach as attach_module

ROOT = Path(__file__).parents[1]


def test_every_public_name_is_there() -> None:
    """`__all__` names each thing once, each can be had, and `dir` shows it."""
    assert len(set(weightcached.__all__)) == len(weightcached.__all__)
    for name in weightcached.__all__:
        assert getattr(weightcached, name) is not None
        assert name in dir(weightcached)


def test_lazy_names_are_those_of_their_module() -> None:
    """`attach` and `Weights` come from the client, the same objects each time."""
    assert weightcached.attach is attach_module.attach
    assert weightcached.Weights is attach_module.Weights
    assert weightcached.attach is weightcached.attach


def test_an_unknown_name_is_an_attribute_error() -> None:
    """With the words Python itself uses, so that hasattr and import work as usual."""
    with pytest.raises(AttributeError, match="module 'weightcached' has no attribute 'attack'"):
        _ = weightcached.attack


def test_the_version_has_one_source() -> None:
    """The installed package's version is the one in the module, and the changelog has a section for it."""
    assert re.fullmatch(r"\d+\.\d+\.\d+", weightcached.__version__)
    assert f"## [{weightcached.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    try:
        installed = importlib.metadata.version("weightcached")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only on the path")
    assert installed == weightcached.__version__


def test_python_dash_m_is_the_command() -> None:
    """``python -m weightcached`` is ``weightcached``."""
    run = subprocess.run([sys.executable, "-m", "weightcached", "--help"], cwd=ROOT, capture_output=True, text=True)

    assert run.returncode == 0, run.stderr
    assert "serve" in run.stdout
