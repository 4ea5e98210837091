"""What NVML says of devices, asked of a child process that ends.

NVML stays mapped in a process that has called it, some 20 MB resident for as long as that lives, and a call may hang
with its GPU. The service and its workers live for weeks and must do neither: ``weightcached probe`` asks for them.
"""

from __future__ import annotations

import contextlib
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
    command = [sys.executable, "-P", "-m", "weightcached", "probe", *(names or ())]
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    except OSError as error:
        raise DeviceError(device="NVML", problem=f"could not be asked: {error.strerror}") from error
    try:
        output, stderr = child.communicate(timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        _give_up(child)
        problem = f"does not answer within {PROBE_SECONDS:.0f} s; try nvidia-smi"
        raise DeviceError(device="NVML", problem=problem) from None
    try:
        reply = json.loads(output)
    except ValueError:
        words = stderr.decode(errors="replace").strip() or f"exit status {child.returncode}"
        raise DeviceError(device="NVML", problem=f"could not be asked: {words}") from None
    if "error" in reply:
        raise from_wire(reply["error"])
    return [Device(**{**item, "memory": Memory(**item["memory"])}) for item in reply["devices"]]


def _give_up(child: subprocess.Popen[bytes]) -> None:
    """Kills the child, and does not wait for long: one that hangs inside the driver cannot be killed (state D)."""
    child.kill()
    for stream in (child.stdout, child.stderr):
        if stream is not None:
            stream.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(timeout=1.0)


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
