"""What NVML says of devices, asked of a child process that ends.

NVML stays mapped in a process that has called it, some 20 MB resident for as long as that lives, and a call may hang
with its GPU. The service and its workers live for weeks and must do neither: ``weightcached probe`` asks for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict

from .devices import Device, Memory, default_devices, find_devices, is_host
from .errors import DeviceError, WeightCacheError, from_wire, to_wire

PROBE_SECONDS = 30.0


def probe_devices(names: Sequence[str] | None) -> list[Device]:
    """The named devices in order, None for `default_devices`. Blocks for some 0.2 s if NVML must be asked.

    Raises what `find_devices` raises, and `DeviceError` when the child ends or hangs.
    """
    if names is not None and all(map(is_host, names)):
        return find_devices(list(names))
    command = [sys.executable, "-m", "weightcached", "probe", *(names or ())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        problem = f"does not answer within {PROBE_SECONDS:.0f} s; try nvidia-smi"
        raise DeviceError(device="NVML", problem=problem) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        words = done.stderr.decode(errors="replace").strip() or f"exit status {done.returncode}"
        raise DeviceError(device="NVML", problem=f"could not be asked: {words}") from None
    if "error" in answer:
        raise from_wire(answer["error"])
    return [Device(**{**item, "memory": Memory(**item["memory"])}) for item in answer["devices"]]


def probe_memory(name: str) -> Memory:
    """The bytes of one device now; as `probe_devices`."""
    return probe_devices([name])[0].memory


def answer(names: Sequence[str]) -> str:
    """What the child prints: one JSON object with "devices" or "error"."""
    try:
        found = find_devices(list(names)) if names else default_devices()
    except WeightCacheError as error:
        return json.dumps({"error": to_wire(error)})
    return json.dumps({"devices": [asdict(device) for device in found]})
