"""Becomes a command that ends with its parent: ``python -I -S tied.py PARENT COMMAND ...``. Stands alone, as a file.

For publishers, which are anybody's programs and watch nothing. What lives on after the service was killed would publish
into the next one, and keep its memory. Under systemd the unit's control group ends it; this is for a service that runs
without. What the command starts itself is not tied: the kernel forgets it at a fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h; the signal comes when the thread that made this process ends, see prctl(2)
NOT_STARTED = 127  # exit status, as that of a shell


def main(parent: int, *command: str) -> int:
    """Becomes `command`; returns only if that is not to be started. `parent` is the pid of who should be the parent."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write(f"prctl: {os.strerror(ctypes.get_errno())}\n")
    if os.getppid() != parent:  # it ended before this
        return NOT_STARTED
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and a command would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return NOT_STARTED


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), *sys.argv[2:]))
