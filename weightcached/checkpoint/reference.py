"""The verdict of the safetensors library on a header, beside our own."""

from __future__ import annotations

import os

from safetensors import SafetensorError, safe_open

from .resources import lacking

# The library imports the named framework only after it has judged the header. This one is hardly ever installed beside
# PyTorch, and its ImportError then stands for "header accepted" after 0.3 ms. "np" would import numpy: 100 ms, 15 MB
# and a thread that stays, in processes that need none of it. With "pread" nothing of the framework is used after it.
_FRAMEWORK = "paddle"


def reference_refusal(start: bytes, size: int, file: str) -> str | None:
    """The library's reason to refuse a file of `size` bytes, None when it takes it; `start` is its length and header.

    Our own pass is meant to refuse all that the library refuses. Where a rule of the format was missed there or a
    newer library learns one, this says so, instead of a checkpoint that loads here and nowhere else.

    The library maps what it opens, so it gets a sparse memfd of the same length that holds the header alone: it judges
    exactly the bytes that we judged, reads no weights, and a file that shrinks meanwhile cannot kill us with SIGBUS.
    That takes two descriptors and `size` bytes of address space for a moment, and next to no memory. `ResourceError`
    where they are not to be had: nothing that fails here is the fault of the file.
    """
    try:
        fd = os.memfd_create("weightcached-header", os.MFD_CLOEXEC)
    except OSError as error:
        raise lacking(file, "no memory to check the header in", error) from error
    path = f"/proc/self/fd/{fd}"
    try:
        with open(fd, "wb", closefd=False) as copy:
            copy.write(start)
        os.ftruncate(fd, size)
        with safe_open(path, framework=_FRAMEWORK, backend="pread"):
            return None
    except ImportError:
        return None
    except SafetensorError as error:
        return str(error)
    except OSError as error:
        raise lacking(file, "cannot check the header", _reason(path, error)) from error
    except MemoryError as error:
        raise lacking(file, f"cannot check the header, which maps {size} bytes without using them", error) from error
    finally:
        os.close(fd)


def _reason(path: str, error: OSError) -> OSError:
    """Why the library could not open `path`: whatever the kernel says, it calls it "No such file" without an errno."""
    if error.errno is None:
        try:
            os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as found:
            return found
    return error
