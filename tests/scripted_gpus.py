"""GPUs whose errors a test writes: the folder behind `tests/fake_nvml/pynvml.py`, and the environment to select it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

MODULE = Path(__file__).parent / "fake_nvml"


class ScriptedGpus:
    """Some GPUs, all in order at first. `close` must be called."""

    def __init__(self, folder: Path, names: list[str], mig: dict[str, str] | None = None) -> None:
        """`mig`: names of MIG instances -> the GPU, one of `names`, that each is a part of."""
        self.folder = folder
        (folder / "devices").mkdir()
        os.mkfifo(folder / "events")
        self._events = os.open(folder / "events", os.O_RDWR | os.O_CLOEXEC)  # open, so that nothing in it is lost
        self._gpus: dict[str, dict[str, Any]] = {}
        for number, name in enumerate(names):
            (folder / "devices" / name).touch()
            self._gpus[name] = {"pci": f"00000000:{0x3B + number:02X}:00.0", "state": "ok"}
        for name, parent in (mig or {}).items():
            self._gpus[name] = {**self._gpus[parent], "parent": parent}
        self._write()

    @property
    def environ(self) -> dict[str, str]:
        """For a process that is to see these GPUs."""
        return {"PYTHONPATH": str(MODULE), "FAKE_NVML": str(self.folder)}

    def say(self, **event: object) -> None:
        """NVML reports this: device= and xid= or ecc=True; or error=, a number of NVML."""
        os.write(self._events, json.dumps(event).encode() + b"\n")

    def set(self, name: str, state: str) -> None:
        """From now on the GPU is "ok", or what else `fake_nvml/pynvml.py` knows."""
        self._gpus[name]["state"] = state
        self._write()

    def opened_by(self, pid: int) -> set[str]:
        """The GPUs whose device file a process holds open."""
        found = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = Path(os.readlink(fd))
            except FileNotFoundError:  # closed meanwhile
                continue
            if target.parent == self.folder / "devices":
                found.add(target.name)
        return found

    def close(self) -> None:
        os.close(self._events)

    def _write(self) -> None:
        path = self.folder / "gpus.json"
        path.with_suffix(".new").write_text(json.dumps(self._gpus))
        path.with_suffix(".new").replace(path)  # at once: a reader sees the old or the new
