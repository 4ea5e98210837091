"""Starting a service from an engine: systemd is asked, as its user would do it by hand."""

from __future__ import annotations

import subprocess
import time

from ..errors import ConnectionFailed, TimedOut
from ..paths import check_instance, start_command


def start_service(instance: str, timeout: float) -> None:
    """Starts weightcached@`instance`, a service that runs already included; returns when systemd says that it is ready.

    `timeout` in seconds; a start that takes longer goes on, and is `TimedOut` here. `ConnectionFailed` where there is
    no systemctl, and with its words where the start fails; the journal has the service's own.
    """
    command = start_command().replace("INSTANCE", check_instance(instance)).split()
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout
        )
    except FileNotFoundError:
        problem = "there is no systemd here; start the service yourself: weightcached serve --instance " + instance
        raise ConnectionFailed(path=command[0], problem=problem) from None
    except OSError as error:
        raise ConnectionFailed(path=command[0], problem=f"cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired:
        seconds = round(time.monotonic() - began, 1)
        raise TimedOut(path=command[0], seconds=seconds, waited_for=f"{' '.join(command)}, which goes on") from None
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise ConnectionFailed(
            path=" ".join(command), problem=f"failed: {words[0]}; weightcachectl doctor may tell why"
        )
