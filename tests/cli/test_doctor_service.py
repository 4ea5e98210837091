"""What doctor says of one instance: of its config, its unit, its descriptors, its memory, its packages."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.fake_host import INACTIVE, USER_UNIT, FakeHost
from weightcached import __version__
from weightcached.cli import doctor_service
from weightcached.cli.doctor_findings import Finding, Level, Systemd, Unit
from weightcached.cli.doctor_service import Instance, cgroup_limit, check_service
from weightcached.config import Config, load_config
from weightcached.devices import host_devices

ON_252 = Systemd(runs=True, version=252)
STORED = {"active": True, "stored": 4, "shards": 2, "pending": 0, "refused": []}
STATUS = {"version": __version__, "pid": 42, "ready": True, "config": "/etc/one.toml", "store": STORED}
LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"
GIB = 1 << 30


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    """A machine whose service runs from the same environment as the tests."""
    monkeypatch.setattr(doctor_service, "_same_environment", lambda command: True)
    return FakeHost(tmp_path / "root")


def config(tmp_path: Path, text: str = 'devices = ["host-0"]\n', models: int = 1, model: str = "") -> Config:
    for number in range(models):
        text += f'[[model]]\nname = "m{number}"\ncheckpoint = "/models/m{number}"\n{model}'
    file = tmp_path / "one.toml"
    file.write_text(text)
    return load_config(file)


def instance(
    tmp_path: Path,
    *,
    unit: Mapping[str, str] | None = USER_UNIT,
    status: Mapping[str, Any] | None = STATUS,
    problem: str | None = None,
) -> Instance:
    return Instance(
        name="one",
        config=config(tmp_path),
        config_problem=None,
        unit=None if unit is None else Unit("weightcached@one.service", "user", unit),
        status=None if status is None else dict(status),
        status_problem=problem,
    )


def findings(host: FakeHost, item: Instance, systemd: Systemd = ON_252) -> dict[str, Finding]:
    found = check_service(host, item, systemd)
    assert all(finding.instance == "one" for finding in found)
    return {finding.check: finding for finding in found}


def test_all_is_well(host: FakeHost, tmp_path: Path) -> None:
    """A running service with its unit and its store: no word but ok."""
    found = findings(host, instance(tmp_path))
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert list(found) == ["config", "unit", "service", "store", "descriptors", "memory", "packages"]
    assert found["unit"].found == f"{USER_UNIT['FragmentPath']}, starts /usr/bin/weightcached, enabled"
    assert "4 of at most 512 descriptors, 2 shards" in found["store"].found
    assert "a stop frees them" in found["store"].found
    assert found["service"].line() == f"ok       one: service: weightcached {__version__}, pid 42, ready"


def test_bad_config(host: FakeHost, tmp_path: Path) -> None:
    """The loader's own words, and no guess about what the file might have meant."""
    item = replace(instance(tmp_path), config=None, config_problem="one.toml: model: unknown key")
    found = findings(host, item)
    assert (found["config"].level, found["config"].found) == (Level.PROBLEM, "one.toml: model: unknown key")
    assert "a restart of the service would fail and lose its cache" in found["config"].next
    assert "descriptors" not in found
    stopped = findings(host, replace(item, status=None))
    assert "restart" not in stopped["config"].next


@pytest.mark.parametrize(
    ("unit", "level", "words"),
    [
        (None, Level.WARNING, "not installed"),
        ({**USER_UNIT, "ActiveState": "failed", "Result": "start-limit-hit"}, Level.PROBLEM, "start-limit-hit"),
        ({**USER_UNIT, "ExecStart": "{ path=/home/u/.local/bin/weightcached ; }"}, Level.PROBLEM, "is not there"),
        ({**USER_UNIT, "Type": "simple"}, Level.PROBLEM, "Type=simple"),
        ({**USER_UNIT, "NotifyAccess": "all"}, Level.PROBLEM, "NotifyAccess=all"),
        ({**USER_UNIT, "NeedDaemonReload": "yes"}, Level.WARNING, "changed since it was read"),
    ],
)
def test_unit(host: FakeHost, tmp_path: Path, unit: Mapping[str, str] | None, level: Level, words: str) -> None:
    """What is wrong with a unit is named, with a next step."""
    finding = findings(host, instance(tmp_path, unit=unit))["unit"]
    assert (finding.level, words in finding.found, bool(finding.next)) == (level, True, True)


def test_service_that_does_not_run(host: FakeHost, tmp_path: Path) -> None:
    """Not started is a warning with the command; started and silent, or answering with an error, a problem."""
    stopped = findings(host, instance(tmp_path, unit={**USER_UNIT, **INACTIVE}, status=None))
    assert stopped["service"].level is Level.WARNING
    assert stopped["service"].next == "systemctl --user start weightcached@one"
    assert "store" not in stopped
    silent = findings(host, instance(tmp_path, status=None))["service"]
    assert (silent.level, silent.next) == (Level.PROBLEM, "journalctl --user -u weightcached@one.service")
    refused = findings(host, instance(tmp_path, status=None, problem="peer of uid 7 refused"))["service"]
    assert (refused.level, refused.found) == (Level.PROBLEM, "peer of uid 7 refused")


def test_service_beside_its_unit(host: FakeHost, tmp_path: Path) -> None:
    """One that was started by hand is not the unit's: nothing restarts it or keeps its cache."""
    found = findings(host, instance(tmp_path, unit={**USER_UNIT, **INACTIVE}))
    assert (found["service"].level, found["store"].level) == (Level.WARNING, Level.WARNING)
    assert "not started by weightcached@one.service" in found["service"].found
    assert "no service manager keeps descriptors" in found["store"].found


def test_service_of_another_version(host: FakeHost, tmp_path: Path) -> None:
    """After an upgrade the old service still runs: a restart, which keeps the cache, is the next step."""
    finding = findings(host, instance(tmp_path, status={**STATUS, "version": "0.0.9"}))["service"]
    assert (finding.level, finding.next) == (Level.WARNING, "systemctl --user restart weightcached@one.service")


REFUSED = {"model": "big", "device": "host-0", "generation": 1, "reason": "the store is full"}


@pytest.mark.parametrize(
    ("unit", "store", "level", "words"),
    [
        ({"FileDescriptorStoreMax": "0"}, STORED, Level.PROBLEM, "FileDescriptorStoreMax=0"),
        ({}, {"active": False}, Level.PROBLEM, "gives systemd nothing"),
        ({}, {**STORED, "refused": [REFUSED]}, Level.PROBLEM, "big on host-0 (the store is full)"),
        ({}, {**STORED, "pending": 1}, Level.WARNING, "1 more on their way"),
        ({"NFileDescriptorStore": "3"}, STORED, Level.PROBLEM, "systemd keeps 3 descriptors, the service counts 4"),
        ({"FileDescriptorStorePreserve": "yes"}, STORED, Level.OK, "crash, restart and stop"),
        ({"FileDescriptorStorePreserve": "restart"}, STORED, Level.OK, "a stop frees them"),
    ],
)
def test_store(
    host: FakeHost, tmp_path: Path, unit: dict[str, str], store: dict[str, Any], level: Level, words: str
) -> None:
    """What systemd keeps is compared with what the service believes that it keeps."""
    item = instance(tmp_path, unit={**USER_UNIT, **unit}, status={**STATUS, "store": store})
    finding = findings(host, item)["store"]
    assert (finding.level, words in finding.found) == (level, True), finding
    assert bool(finding.next) == (level is not Level.OK)


def test_newer_systemd_could_keep_more(host: FakeHost, tmp_path: Path) -> None:
    """On 254 a store that a stop empties is good, and the finding names the setting that would keep it."""
    newer = Systemd(runs=True, version=254)
    item = instance(tmp_path, unit={**USER_UNIT, "FileDescriptorStorePreserve": "restart"})
    assert "FileDescriptorStorePreserve=yes" in findings(host, item, newer)["store"].found
    assert "FileDescriptorStorePreserve" not in findings(host, item)["store"].found


def test_without_systemd_the_unit_is_no_subject(host: FakeHost, tmp_path: Path) -> None:
    """In a container there is no finding about a unit, the store's says what is lost when, and a service that does not
    run is started by hand."""
    found = findings(host, instance(tmp_path, unit=None), Systemd(runs=False))
    assert "unit" not in found
    assert "end of the main process frees the cache" in found["store"].found
    stopped = findings(host, instance(tmp_path, unit=None, status=None), Systemd(runs=False))
    assert stopped["service"].next == "weightcached serve --instance one"


def test_descriptors(host: FakeHost, tmp_path: Path) -> None:
    """Two generations of a manifest and a slab for each rank must fit the store, and the process's hard limit."""
    model = 'tensor_parallel = 2\ndevices = ["host-0", "host-1"]\n'
    many = config(tmp_path, 'devices = ["host-0", "host-1"]\n', models=3, model=model)
    item = replace(instance(tmp_path), config=many)
    assert findings(host, item)["descriptors"].found == "6 shards need up to 24 during a reload; limit 524288"
    unit = Unit("weightcached@one.service", "user", {**USER_UNIT, "FileDescriptorStoreMax": "24"})
    full = findings(host, replace(item, unit=unit))["descriptors"]
    assert (full.level, full.next) == (Level.PROBLEM, "FileDescriptorStoreMax=25 in a drop-in")
    host.write(
        "/proc/42/limits", LIMITS + "Max open files            1024                 1047                 files     \n"
    )
    tight = findings(host, item)["descriptors"]
    assert (tight.level, tight.next) == (Level.PROBLEM, "LimitNOFILE=1048 in a drop-in")
    host.write(
        "/proc/42/limits", LIMITS + "Max open files            1024                 1048                 files     \n"
    )
    assert findings(host, item)["descriptors"].level is Level.OK


def test_memory_of_host_devices(host: FakeHost, tmp_path: Path) -> None:
    """The limits of all host devices together must fit the machine, and the cgroup of the service."""
    total = sum(device.memory.total for device in host_devices())
    assert findings(host, instance(tmp_path))["memory"].level is Level.OK
    twice = config(tmp_path, 'devices = ["host-0", "host-90"]\nmemory_limit = "100%"\n')
    assert findings(host, replace(instance(tmp_path), config=twice))["memory"].level is Level.WARNING
    host.write("/proc/42/cgroup", "0::/user.slice/user-1000.slice/one.service\n")
    host.write("/sys/fs/cgroup/user.slice/user-1000.slice/memory.max", f"{total // 3}\n")
    item = replace(instance(tmp_path), config=config(tmp_path, 'devices = ["host-0"]\nmemory_limit = "50%"\n'))
    finding = findings(host, item)["memory"]
    assert (finding.level, "its cgroup allows" in finding.found) == (Level.PROBLEM, True)


def test_more_than_the_limit(host: FakeHost, tmp_path: Path) -> None:
    """A device that holds more than it may is named with both numbers; one whose worker does not answer is left out."""
    devices = [
        {"device": "host-0", "held": 3 * GIB, "limit": 2 * GIB},
        {"device": "host-1", "held": GIB, "limit": GIB},
        {"device": "host-2", "error": "no answer", "limit": GIB},
    ]
    over = [
        finding
        for finding in check_service(host, instance(tmp_path, status={**STATUS, "devices": devices}), ON_252)
        if finding.check == "limit"
    ]
    assert [(finding.level, finding.found.partition(";")[0]) for finding in over] == [
        (Level.WARNING, "host-0 holds 3.0 GiB, more than its 2.0 GiB")
    ]


def test_memory_of_gpus_is_not_the_hosts(host: FakeHost, tmp_path: Path) -> None:
    """With GPUs alone, whatever the cgroup allows, only the staging memory is the host's."""
    host.write("/sys/module/nvidia/version", "580.159.03\n")
    item = replace(instance(tmp_path), config=config(tmp_path, 'devices = "all"\n'))
    assert (
        findings(host, item)["memory"].found == "weights are in GPU memory alone; a load takes 256.0 MiB of the host's"
    )


def test_cgroup_limit_is_the_least_above(host: FakeHost) -> None:
    """Version 2 and version 1, each with every folder above the process's own; "max" and huge numbers are no limit."""
    assert cgroup_limit(host, "42") is None
    host.write("/proc/42/cgroup", "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/x/y\n")
    host.write("/sys/fs/cgroup/x/y/memory.max", "max\n")
    assert cgroup_limit(host, "42") is None
    host.write("/sys/fs/cgroup/x/memory.max", f"{3 * GIB}\n")
    assert cgroup_limit(host, "42") == 3 * GIB
    host.write("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    host.write("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", f"{2 * GIB}\n")
    assert cgroup_limit(host, "42") == 2 * GIB


def test_packages(host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch is needed where a model is cast, cuda-bindings where GPUs are served; what is not needed is not missed."""
    monkeypatch.setattr(doctor_service, "_installed", lambda module: False)
    item = instance(tmp_path)
    assert findings(host, item)["packages"].level is Level.OK
    cast = findings(host, replace(item, config=config(tmp_path, model='dtype = "bfloat16"\n')))["packages"]
    assert (cast.level, cast.next) == (Level.PROBLEM, "pip install 'weightcached[torch]'")
    gpu = findings(host, replace(item, config=config(tmp_path, 'devices = ["GPU-1"]\n')))["packages"]
    assert (gpu.level, gpu.next) == (Level.PROBLEM, "pip install 'weightcached[cuda]'")


def test_packages_of_another_environment_are_not_judged(tmp_path: Path) -> None:
    """A service that runs from elsewhere has its own packages: the finding says which doctor to ask."""
    host = FakeHost(tmp_path / "root")
    finding = findings(host, instance(tmp_path))["packages"]
    assert (finding.level, finding.next) == (Level.WARNING, "/usr/bin/weightcachectl doctor")
    own = os.path.join(sys.prefix, "bin", "weightcached")
    host.write(own, "").chmod(0o755)
    item = instance(tmp_path, unit={**USER_UNIT, "ExecStart": f"{{ path={own} ; }}"})
    assert findings(host, item)["packages"].level is Level.OK


def test_installed_looks_without_importing() -> None:
    """A package that is there, one that is not, and one below a package that is not."""
    installed = doctor_service._installed
    assert (installed("pydantic"), installed("no_such_package"), installed("no_such_package.part")) == (
        True,
        False,
        False,
    )


CLUSTER = '[cluster]\nnodes = 2\nnode_rank = 0\nmaster_addr = "10.0.0.1"\nmaster_port = 29650\n'
NODES = [{"node": 0, "state": "loaded"}, {"node": 1, "state": "loaded"}]
AGREED = {"problem": None, "agreed": True, "nodes": NODES}


@pytest.mark.parametrize(
    ("unit", "said", "level", "words"),
    [
        ({}, AGREED, Level.OK, "node 0 of 2, meets at 10.0.0.1:29650; all nodes are there"),
        ({}, {**AGREED, "agreed": False}, Level.OK, "all nodes are there, not agreed yet"),
        ({}, None, Level.OK, "node 0 of 2, meets at 10.0.0.1:29650"),
        ({"RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6"}, AGREED, Level.OK, "all nodes are there"),
        ({"RestrictAddressFamilies": "~AF_NETLINK"}, AGREED, Level.OK, "all nodes are there"),
        ({"RestrictAddressFamilies": "AF_UNIX"}, AGREED, Level.PROBLEM, "its unit cuts it off the network"),
        ({"PrivateNetwork": "yes"}, None, Level.PROBLEM, "its unit cuts it off the network"),
        ({}, {**AGREED, "problem": "the nodes differ: m"}, Level.PROBLEM, "the nodes differ: m"),
        ({}, {**AGREED, "nodes": [NODES[0], {"node": 1, "state": "gone"}]}, Level.WARNING, "node 1 gone"),
    ],
)
def test_a_node_of_a_cluster(
    host: FakeHost,
    tmp_path: Path,
    unit: Mapping[str, str],
    said: Mapping[str, Any] | None,
    level: Level,
    words: str,
) -> None:
    """Whether its unit lets it reach the others, and what it says of them; with a next step where one is needed."""
    item = instance(tmp_path, unit={**USER_UNIT, **unit}, status={**STATUS, "cluster": said})
    item = replace(item, config=config(tmp_path, model="tensor_parallel = 2\n" + CLUSTER))
    finding = findings(host, item)["cluster"]
    assert (finding.level, finding.found.endswith(words)) == (level, True)
    assert bool(finding.next) == (level is not Level.OK)


def test_agreeing_needs_torch(host: FakeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node without it is found before it waits for others."""
    monkeypatch.setattr(doctor_service, "_installed", lambda module: False)
    item = replace(instance(tmp_path), config=config(tmp_path, model="tensor_parallel = 2\n" + CLUSTER))
    finding = findings(host, item)["packages"]
    assert finding.level is Level.PROBLEM
    assert "no torch, which agrees with the other nodes" in finding.found
