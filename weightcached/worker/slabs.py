"""What a worker can tell of a publisher's slabs without touching the device."""

from __future__ import annotations

import os
import stat

from ..devices import is_host
from ..errors import ManifestError
from ..fds import OwnedFd
from ..memfd import require_seals
from ..shard.manifest import ManifestHead

NVIDIA_CONTROL = (195, 255)  # /dev/nvidiactl, by the kernel's list of numbers (Documentation/admin-guide/devices.txt)


def check_slabs(head: ManifestHead, slabs: list[OwnedFd]) -> None:
    """`ManifestError` unless the descriptors are what the manifest lists, for its kind of device.

    A host slab is a sealed memfd of exactly the listed size. A GPU slab is an open /dev/nvidiactl, as which an export
    of the driver shows. What is not checked, since only the driver could tell: that it is an export at all, its size,
    the GPU it is on, and whether somebody else can still write to it. Size and place are checked where it is imported.
    """
    if len(slabs) != len(head.slabs):
        raise ManifestError(problem=f"{len(slabs)} slabs sent, {len(head.slabs)} listed")
    for number, (slab, entry) in enumerate(zip(slabs, head.slabs, strict=True)):
        info = os.fstat(slab.fileno())
        if is_host(head.device):
            require_seals(slab.fileno(), f"slab {number}")
            if info.st_size != entry.nbytes:
                raise ManifestError(problem=f"slab {number} has {info.st_size} bytes, {entry.nbytes} listed")
        elif not stat.S_ISCHR(info.st_mode) or (os.major(info.st_rdev), os.minor(info.st_rdev)) != NVIDIA_CONTROL:
            raise ManifestError(problem=f"slab {number} is not an export of the GPU driver")
