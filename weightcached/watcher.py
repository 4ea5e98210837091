"""The device watcher: a child of the service that waits for the errors of its GPUs, as NVML reports them.

It writes to the channel from the service, and ends when that closes:

    {"watching": {"devices": [...]}}                 at the start: these answer, and their events are waited for
    {"xid": {"device", "xid", "pid", "command"}}     an Xid; whose, if the kernel log may be read and says so
    {"ecc": {"device"}}                              a double-bit ECC error
    {"gone": {"device", "problem"}}                  NVML does not reach the device
    {"back": {"device"}}                             one that was gone, or had a fatal error (`xids`), is usable again

A process of its own, since NVML costs 20 MB for as long as it is mapped, and since a call may hang with its GPU. It is
also what keeps a GPU's state loaded while persistence mode is off and nobody computes: "The GPU state remains loaded in
the driver whenever one or more clients have the device file open" (NVIDIA, Driver Persistence, "Persistence Daemon",
https://docs.nvidia.com/deploy/driver-persistence/persistence-daemon.html), and NVML opens the file with the handle
(nvml.h, nvmlDeviceGetHandleByUUID) and keeps it until nvmlShutdown.

A lost device is let go of, since a reset is refused while anybody has it open (nvidia-smi(1), --gpu-reset). Whether it
is back is asked of a further child (`usable`), after 1, 2, 4 ... 30 seconds: that one may hang, and lets go at its end.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from .errors import DeviceError
from .wire.framing import Frame
from .xids import DOUBLE_BIT_ECC, Kind, LoggedXid, PciAddress, kind_of, parse_line

WAIT_SECONDS = 10.0  # between two looks whether a device that reports nothing still answers
LOST_WAIT_SECONDS = 0.5  # while a device is lost and a child may be answering
LOOK_SECONDS = (1.0, 30.0)  # from a loss to the first look, and at most between two looks
LOOK_LIMIT = 30.0  # for one look; a child that hangs in the driver is killed
_log = logging.getLogger(__name__)

Tell = Callable[[dict[str, Any]], None]


def run(devices: list[str], channel_fd: int) -> int:
    """Watches until the service closes the channel, which this takes over. Returns the exit code; 1: NVML failed."""
    with socket.socket(fileno=channel_fd) as channel:
        failed = threading.Event()

        def tell(message: dict[str, Any]) -> None:
            frame = Frame(message)
            with contextlib.closing(frame), contextlib.suppress(OSError):  # the service is gone: so are we, below
                frame.send(channel)

        def watch() -> None:
            try:
                Watcher(devices, tell).run()
            except DeviceError as error:
                _log.error("%s", error)
            finally:  # whatever it was, the process must not look as if it watched
                failed.set()
                with contextlib.suppress(OSError):
                    channel.shutdown(socket.SHUT_RD)

        # A daemon: a call into a driver that hangs must not keep this process when its service has gone.
        threading.Thread(target=watch, name="nvml", daemon=True).start()
        channel.recv(1)  # the service says nothing: this returns when its end is closed, or when the thread is done
        return 1 if failed.is_set() else 0


class Look:
    """One lost device: when to look for it next, and the child that does."""

    def __init__(self) -> None:
        self._delay = LOOK_SECONDS[0]
        self._next = time.monotonic() + self._delay
        self._child: subprocess.Popen[bytes] | None = None

    def found(self, device: str) -> bool:
        """Whether the device is usable, as far as is known now. Starts and reaps children; never waits for one."""
        now = time.monotonic()
        if self._child is None:
            if now >= self._next:
                self._child = start_look(device)
                self._next = now + LOOK_LIMIT
            return False
        code = self._child.poll()
        if code is None and now < self._next:
            return False
        if code is None:
            self._child.kill()  # not waited for: inside a driver that hangs it cannot even be killed (state D)
        self._child = None
        self._delay = min(2 * self._delay, LOOK_SECONDS[1])
        self._next = now + self._delay
        return code == 0


def start_look(device: str) -> subprocess.Popen[bytes]:
    """A child that exits with 0 if the device is `usable`."""
    command = [sys.executable, "-P", "-m", "weightcached", "watch-devices", "--look", device]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


class Watcher:
    """NVML's events for some devices. `run` never returns; it raises `DeviceError` when NVML itself fails."""

    def __init__(self, devices: Iterable[str], tell: Tell) -> None:
        import pynvml

        self._nvml = pynvml
        self._devices = list(devices)
        self._tell = tell
        self._kernel_log = KernelLog()
        self._events: Any = None
        self._handles: dict[str, Any] = {}  # of the devices that are not lost
        self._served: dict[str, list[str]] = {}  # UUID of a physical GPU -> its devices here: itself or MIG instances
        self._reporting: set[str] = set()  # UUIDs of physical GPUs whose events are waited for
        self._lost: dict[str, Look] = {}

    def run(self) -> None:
        self._open()
        self._tell({"watching": {"devices": [name for name in self._devices if name not in self._lost]}})
        while True:
            self.turn()

    def turn(self) -> None:
        """Waits for one event, or for the time-out, and reports what there is to report."""
        nvml = self._nvml
        wait = LOST_WAIT_SECONDS if self._lost else WAIT_SECONDS
        try:
            event = self._next_event(wait)
        except nvml.NVMLError_Timeout:
            self._check_alive()
        except nvml.NVMLError_GpuIsLost:  # which one is not said
            self._check_alive()
        except nvml.NVMLError as error:
            raise DeviceError(device="NVML", problem=f"cannot wait for events: {error}") from error
        else:
            self._report(event)
        back = [name for name, look in self._lost.items() if look.found(name)]
        if back:
            for name in back:
                del self._lost[name]
            self._open()
            for name in back:
                if name not in self._lost:
                    self._tell({"back": {"device": name}})

    def _next_event(self, seconds: float) -> Any:
        if not self._reporting:  # what waiting for an empty set of events does is not documented
            time.sleep(seconds)
            raise self._nvml.NVMLError_Timeout
        return self._nvml.nvmlEventSetWait_v2(self._events, int(seconds * 1000))

    def _open(self) -> None:
        """Opens NVML anew with every device that is not lost, and registers for their events."""
        nvml = self._nvml
        self._close()
        try:
            nvml.nvmlInit()
            self._events = nvml.nvmlEventSetCreate()
        except nvml.NVMLError as error:
            raise DeviceError(device="NVML", problem=f"cannot be started: {error}") from error
        failed = {}
        for name in self._devices:
            if name not in self._lost:
                try:
                    self._register(name)
                except (nvml.NVMLError, DeviceError) as error:
                    failed[name] = str(error)
        if failed:
            self._lose(failed)

    def _close(self) -> None:
        """Lets go of every device."""
        if self._events is not None:
            self._events = None  # nvmlShutdown frees it
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._handles.clear()
        self._served.clear()
        self._reporting.clear()

    def _register(self, name: str) -> None:
        nvml = self._nvml
        handle = nvml.nvmlDeviceGetHandleByUUID(name)
        gpu = physical_gpu(nvml, name, handle)
        require_no_reset(nvml, gpu, name)
        uuid = str(nvml.nvmlDeviceGetUUID(gpu))
        self._handles[name] = handle
        self._served.setdefault(uuid, []).append(name)
        if uuid not in self._reporting:
            wanted = nvml.nvmlEventTypeXidCriticalError | nvml.nvmlEventTypeDoubleBitEccError
            try:
                nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlDeviceGetSupportedEventTypes(gpu) & wanted, self._events)
            except nvml.NVMLError as error:  # a virtual GPU, say: that it answers is all that can be watched
                _log.warning("%s: its errors are not reported by NVML: %s", name, error)
            else:
                self._reporting.add(uuid)

    def _report(self, event: Any) -> None:
        nvml = self._nvml
        try:
            uuid = str(nvml.nvmlDeviceGetUUID(event.device))
        except nvml.NVMLError:  # it is gone already
            self._check_alive()
            return
        devices = self._served.get(uuid, [])
        if event.eventType == nvml.nvmlEventTypeDoubleBitEccError:
            xid = DOUBLE_BIT_ECC
            messages: list[dict[str, Any]] = [{"ecc": {"device": name}} for name in devices]
        else:
            xid = int(event.eventData)
            logged = self._logged(event.device, xid)
            blame = {"pid": logged.pid if logged else None, "command": logged.command if logged else None}
            messages = [{"xid": {"device": name, "xid": xid, **blame}} for name in devices]
        for message in messages:
            self._tell(message)
        if kind_of(xid) is Kind.FATAL:
            self._lost.update((name, Look()) for name in devices)
            self._open()

    def _logged(self, gpu: Any, xid: int) -> LoggedXid | None:
        try:
            address = PciAddress.parse(_text(self._nvml.nvmlDeviceGetPciInfo(gpu).busId))
        except self._nvml.NVMLError:
            return None
        return self._kernel_log.find(address, xid)

    def _check_alive(self) -> None:
        """Asks each device for what only it can answer. Errors that do not mean that it is lost say nothing here."""
        nvml = self._nvml
        lost = (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_NOT_FOUND)
        failed: dict[str, str] = {}
        for name, handle in self._handles.items():
            try:
                nvml.nvmlDeviceGetMemoryInfo(handle)
            except nvml.NVMLError as error:
                if error.value in lost:
                    failed[name] = str(error)
        if failed:
            self._lose(failed)

    def _lose(self, problems: dict[str, str]) -> None:
        """Says that devices are gone, for these reasons, and lets go of them."""
        for name, problem in problems.items():
            self._lost[name] = Look()
            self._tell({"gone": {"device": name, "problem": problem}})
        self._open()


class KernelLog:
    """Whose an Xid is, from /dev/kmsg, which most users may not read; then nothing is ever found."""

    def __init__(self, path: str = "/dev/kmsg") -> None:
        self._seen: collections.deque[LoggedXid] = collections.deque(maxlen=64)
        self._fd: int | None = None
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._fd, 0, os.SEEK_END)  # past what happened before (dev-kmsg of the kernel's ABI documents)
        except OSError as error:
            _log.debug("the kernel log is not read: %s", error)

    def find(self, address: PciAddress, xid: int) -> LoggedXid | None:
        """Takes out the first such Xid that was not taken before. It is in the log before NVML reports it."""
        self._read()
        for logged in self._seen:
            if (logged.address, logged.xid) == (address, xid):
                self._seen.remove(logged)
                return logged
        return None

    def _read(self) -> None:
        while self._fd is not None:
            try:
                record = os.read(self._fd, 8192)  # one record, or nothing yet
            except BlockingIOError:
                return
            except BrokenPipeError:  # records were overwritten before they were read; the next is the oldest there is
                continue
            except OSError as error:
                _log.debug("the kernel log is not read any more: %s", error)
                os.close(self._fd)
                self._fd = None
                return
            if not record:
                return
            for line in record.decode(errors="replace").splitlines():
                if logged := parse_line(line):
                    self._seen.append(logged)


def physical_gpu(nvml: Any, name: str, handle: Any) -> Any:
    """The handle of a GPU, or of the GPU that a MIG instance is a part of: events are the whole GPU's."""
    return nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if name.startswith("MIG-") else handle


def require_no_reset(nvml: Any, gpu: Any, name: str) -> None:
    """`DeviceError` if its driver says that the GPU must be reset; drivers before R565 do not say it."""
    try:
        (action,) = nvml.nvmlDeviceGetFieldValues(gpu, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
    except nvml.NVMLError:  # it does not know the question; whether the GPU is there at all, other calls tell
        return
    harmless = (nvml.NVML_GPU_RECOVERY_ACTION_NONE, nvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P)
    if action.nvmlReturn == nvml.NVML_SUCCESS and action.value.uiVal not in harmless:
        raise DeviceError(device=name, problem=f"must be reset (NVML's recovery action {action.value.uiVal})")


def usable(device: str) -> bool:
    """Whether NVML reaches the device, its memory is there, and its driver asks for no reset. Lets go of it again."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(device)
            nvml.nvmlDeviceGetMemoryInfo(handle)
            require_no_reset(nvml, physical_gpu(nvml, device, handle), device)
        finally:
            nvml.nvmlShutdown()
    except (nvml.NVMLError, DeviceError) as error:
        _log.debug("%s is not back: %s", device, error)
        return False
    return True


def _text(value: bytes | str) -> str:
    """Versions of pynvml differ in which of the two they return."""
    return value.decode() if isinstance(value, bytes) else value
