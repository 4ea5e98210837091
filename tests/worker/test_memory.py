"""The worker's own memory, after a large manifest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = """
import ctypes
from weightcached.worker.memory import give_back_unused
def resident():
    return int(open("/proc/self/status").read().partition("VmRSS:")[2].split()[0])
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
blocks = [libc.malloc(ctypes.c_size_t(64 << 10)) for _ in range(640)]
for block in blocks:
    ctypes.memset(block, 1, 64 << 10)
for block in blocks[:-1]:
    libc.free(ctypes.c_void_p(block))  # the last one keeps the heap from shrinking by itself
before = resident()
give_back_unused()
print(before - resident())
"""


def test_freed_memory_goes_back_to_the_kernel() -> None:
    """Some 40 MB that are freed below a block in use are resident until they are given back."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert int(done.stdout) > 30_000  # kilobytes
