"""What an Xid means for what is cached, by NVIDIA's own list, and the line of the kernel log that carries one.

Source: NVIDIA, "Xid Errors", the Xid catalog for Ampere and newer GPUs, its columns "Resolution Bucket (Immediate
Action)" and "Trigger Conditions": https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. The same page
says that a number means the same in every driver version. docs/decisions/010 has the table and where it was departed
from.

    kind         the catalog's immediate action                          what the service does
    FATAL        reset the GPU, restart the host                         every shard of the device is lost
    APPLICATION  restart the application; or its text blames one         nothing is lost; each shard is verified once
    OTHER        everything else, and numbers that are not in the list   counted and logged
"""

from __future__ import annotations

import enum
import re
from typing import NamedTuple


class Kind(enum.Enum):
    FATAL = "fatal"
    APPLICATION = "application"
    OTHER = "other"


DOUBLE_BIT_ECC = 48  # what NVML's event nvmlEventTypeDoubleBitEccError is in the kernel log

_FATAL = {
    46: "GPU stopped processing",
    DOUBLE_BIT_ECC: "double-bit ECC error",
    62: "internal micro-controller halted",
    79: "GPU has fallen off the bus",
    95: "uncontained memory error",
    109: "context switch timed out",
    110: "security fault",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    158: "fatal timeout of the GPU",
}
_APPLICATION = {
    8: "GPU stopped processing",
    11: "invalid push buffer stream",
    13: "graphics engine exception",
    25: "invalid push buffer stream",
    31: "GPU memory page fault",
    32: "invalid push buffer stream",
    43: "an application's fault stopped it",
    45: "an application's work was torn down",
    69: "graphics engine class error",
    80: "corrupted data sent to the GPU",
    94: "contained memory error",
    137: "NVLink access fault",
    **dict.fromkeys((39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)), "copy engine error"),
    **dict.fromkeys((60, 68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139), "video engine error"),
}
_OTHER = {
    63: "GPU memory was remapped",
    64: "GPU memory could not be remapped, reset the GPU when that is convenient",
    74: "NVLink error",
    92: "many single-bit ECC errors",
    136: "NVLink training failed",
    154: "the recovery that the GPU needs has changed",
    155: "NVLink went down",
    156: "a resource was retired, reset the GPU when that is convenient",
}


def kind_of(xid: int) -> Kind:
    """What to do about it."""
    if xid in _FATAL:
        return Kind.FATAL
    return Kind.APPLICATION if xid in _APPLICATION else Kind.OTHER


def describe(xid: int) -> str:
    """For a log: "Xid 79 (GPU has fallen off the bus)"; a number without a name here is the number alone."""
    name = _FATAL.get(xid) or _APPLICATION.get(xid) or _OTHER.get(xid)
    return f"Xid {xid} ({name})" if name else f"Xid {xid}"


class PciAddress(NamedTuple):
    """Where a GPU is: NVML writes 00000000:3B:00.0, the kernel log 0000:3b:00."""

    domain: int
    bus: int
    device: int

    @classmethod
    def parse(cls, text: str) -> PciAddress:
        """`ValueError` for what is no address."""
        domain, bus, device = text.split(":")
        return cls(int(domain, 16), int(bus, 16), int(device.partition(".")[0], 16))


class LoggedXid(NamedTuple):
    """An Xid in the kernel log. `pid` and `command` are None where the driver does not know whose fault it is."""

    address: PciAddress
    xid: int
    pid: int | None
    command: str | None


# NVRM: Xid (PCI:0000:3b:00): 31, pid=1234, name=python3, Ch 00000008, intr 10000000. ...
# Drivers also write pid='<unknown>', name=<unknown>, or neither.
_LINE = re.compile(
    r"NVRM: Xid \(PCI:([0-9a-fA-F]+:[0-9a-fA-F]+:[0-9a-fA-F]+)[^)]*\): (\d+)"
    r"(?:, pid=(\d+))?(?:, name=([^,<\n]+))?"
)


def parse_line(line: str) -> LoggedXid | None:
    """What a line of the kernel log says of an Xid, None for every other line."""
    found = _LINE.search(line)
    if found is None:
        return None
    address, xid, pid, command = found.groups()
    return LoggedXid(PciAddress.parse(address), int(xid), int(pid) if pid else None, command if pid else None)
