"""What this process or host may lack while it reads a checkpoint: descriptors, memory, address space.

The files may be as good as any then, so it is never a `CheckpointError`: the service must be started again after one.
"""

from __future__ import annotations

import errno
import os
import resource

from ..errors import CheckpointError, ResourceError

# A load has every file of a set open, and its readers have each once more, for O_DIRECT. Beside them there are
# sockets, slabs, the devices of every rank and what Python and the driver hold: some dozens, with room to spare.
_PER_FILE = 2
_BESIDE = 256

_NEXT_STEP = {
    errno.EMFILE: "raise its hard limit of open files (LimitNOFILE= of the unit, ulimit -Hn)",
    errno.ENFILE: "that is all that the host allows: end what holds them, or raise fs.file-max",
    errno.ENOMEM: "free memory, or raise this process's limits (MemoryMax= and LimitAS= of the unit, ulimit -v)",
    errno.EFBIG: "raise this process's limit of a file's size (LimitFSIZE= of the unit, ulimit -f)",
}


def read_failure(file: str, doing: str, error: OSError) -> ResourceError | CheckpointError:
    """What to raise when the kernel refuses to open or read a file: `doing` is what failed, such as "cannot be opened".

    `ResourceError` for EMFILE, ENFILE and ENOMEM, `CheckpointError` for everything else.
    """
    if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        return lacking(file, doing, error)
    return CheckpointError(file=file, problem=f"{doing}: {error.strerror or error}")


def lacking(file: str, doing: str, error: OSError | MemoryError) -> ResourceError:
    """The error for what this process lacks, with the kernel's words and the next step."""
    number = error.errno if isinstance(error, OSError) else errno.ENOMEM
    words = os.strerror(number) if number is not None else str(error)
    if number == errno.EMFILE:
        words += f", this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
    step = _NEXT_STEP.get(number or 0, "see the limits of this process (ulimit -a)")
    return ResourceError(file=file, errno=number, problem=f"{doing}: {words}; {step}")


def lacking_for_set(error: ResourceError, files: int) -> ResourceError:
    """The same error, of one file of a set of so many: where descriptors are lacking, with how many are needed."""
    if error.errno != errno.EMFILE:
        return error
    needed = _PER_FILE * files + _BESIDE
    problem = f"{error.problem} to {needed} at least: the set has {files} files, and a load opens each twice"
    return ResourceError(file=error.file, errno=error.errno, problem=problem)
