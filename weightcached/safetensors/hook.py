"""`import safetensors` answered from the cache, for programs that know nothing of it.

    WEIGHTCACHED_SAFETENSORS=1 python program.py          a program that imports weightcached somewhere
    python -m weightcached.safetensors program.py ...     any program; -m MODULE for a module

Installing puts this package's `safe_open` into the place of the library's, in the library and in every module that has
already taken it from there. Nothing is installed into the interpreter, and no file changes.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from types import ModuleType

import safetensors

from . import files

_OFF = ("", "0", "off", "no", "false")
_USAGE = "usage: python -m weightcached.safetensors (SCRIPT | -m MODULE) [ARGUMENT ...]"
_KEPT = ("safetensors._safetensors_rust", "weightcached.safetensors")  # where the library's own class has to stay
_replaced: list[tuple[ModuleType, str]] = []


def install() -> None:
    """From now on `safetensors.safe_open`, and `load_file` and `load_model` with it, answer from the cache."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_KEPT):
            continue
        # Not every entry is a module, and asking a lazy one for its names would load it.
        for variable, value in list(getattr(module, "__dict__", {}).items()):
            if value is files.RealFile:
                setattr(module, variable, files.safe_open)
                _replaced.append((module, variable))


def uninstall() -> None:
    """Undoes `install`. A module that has taken `safe_open` from the library in between keeps this package's."""
    while _replaced:
        module, variable = _replaced.pop()
        setattr(module, variable, files.RealFile)


def installed() -> bool:
    """Whether `import safetensors` gives this package's `safe_open`."""
    return bool(getattr(safetensors, "safe_open") is files.safe_open)  # noqa: B009 - mypy takes it for the library's


def install_if_wanted() -> None:
    """`install`, if the environment asks for it; what an import of weightcached calls."""
    if wanted():
        install()


def wanted() -> bool:
    """Whether the environment asks for it: ``WEIGHTCACHED_SAFETENSORS`` is 1, or map."""
    return os.environ.get(files.VARIABLE, "").lower() not in _OFF


def run(arguments: Sequence[str]) -> int:
    """Installs, and runs a script or a module as `python` does, in this process. Exit status 2 for wrong arguments.

    The variable is set too, for children that import weightcached.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        (sys.stdout if arguments else sys.stderr).write(_USAGE + "\n")
        return 0 if arguments else 2
    if not wanted():
        os.environ[files.VARIABLE] = "1"
    install()
    if arguments[0] == "-m":
        if len(arguments) < 2:
            sys.stderr.write(_USAGE + "\n")
            return 2
        sys.argv = list(arguments[1:])
        _first_on_path(os.getcwd())
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        _first_on_path(os.path.dirname(os.path.realpath(arguments[0])))
        runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _first_on_path(folder: str) -> None:
    if not sys.flags.safe_path:
        sys.path[0] = folder
