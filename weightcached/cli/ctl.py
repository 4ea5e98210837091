"""The command ``weightcachectl``: what runs, what is cached where, who uses it; load, evict, wait, verify, reload."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from .. import __version__
from ..errors import (
    ModelError,
    ModelFailed,
    ModelNotLoaded,
    NoSuchModel,
    ServiceNotRunning,
    TimedOut,
    WeightCacheError,
    from_wire,
)
from ..paths import CONTROL_SUFFIX, check_runtime_dir, control_path, control_paths, runtime_dir, start_command
from ..text import holder, printable
from ..wire.connection import Connection
from ..wire.messages import Evict, Load, Reload, Request, Status, Subscribe, Verify
from .output import cluster_lines, emit, human_bytes, print_json, print_table, rank_label, shard_notes

Takes = Literal["none", "required", "optional"]
HELLO_SECONDS = 10.0  # for a service to say who it is
MAX_NAMES = 10  # of tensors that differ; --json has them all
EPILOG = """\
exit codes:
  0  done                      3  service not running
  1  refused or failed         4  no such model or device
  2  wrong usage               5  in use by a client
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code. Results go to stdout, everything else to stderr."""
    args = _parser().parse_args(argv)
    args.unreachable = []  # services that were passed over
    try:
        return int(args.run(args) or bool(args.unreachable))
    except WeightCacheError as error:
        print(f"weightcachectl: {printable(str(error))}", file=sys.stderr)
        # A service's own exit codes (75, 78) mean nothing here: the command was refused.
        return error.exit_code if error.exit_code < 64 else 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weightcachectl",
        description="Control of the weight cache services of this user.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weightcachectl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(name: str, run: Any, text: str, *, model: Takes = "none") -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text.capitalize() + ".")
        if model != "none":
            sub.add_argument("model", metavar="NAME", nargs="?" if model == "optional" else None, help="a model's name")
        sub.add_argument(
            "--instance", metavar="NAME", help="the service weightcached@NAME (default: all, or the only one)"
        )
        sub.add_argument("--json", action="store_true", help="print one JSON object, bytes as integers")
        sub.set_defaults(run=run)
        return sub

    command("status", _status, "services, devices, models and who uses them")
    command("list", _list, "what is in memory, a line each")
    command("load", _load, "load a configured model", model="required")
    evict = command("evict", _evict, "drop a model's cached weights", model="required")
    evict.add_argument("--device", metavar="DEVICE", help="on this device only")
    evict.add_argument("--force", action="store_true", help="also if clients use it; memory returns when they end")
    wait = command("wait", _wait, "wait until a model, or every model to preload, is served", model="optional")
    wait.add_argument("--timeout", type=float, metavar="S", help="seconds (default: no limit)")
    verify = command("verify", _verify, "compare a model's cached weights with their checksums", model="required")
    verify.add_argument("--device", metavar="DEVICE", help="on this device only")
    command("reload", _reload, "read the config file again and load what is new or changed")
    command("doctor", _doctor, "check what the service needs to run, and its cache to outlive it")
    return parser


def _status(args: argparse.Namespace) -> int:
    services = _all_statuses(args)
    if args.json:
        _print(args, {"services": services})
        return 0
    for service in services:
        state = "ready" if service["ready"] else "starting"
        name = f"weightcached@{service['instance']} {service['version']}"
        emit(f"{name}, pid {service['pid']}, {state}, {service['config']}")
        for line in (*map(_device_line, service["devices"]), *cluster_lines(service.get("cluster"))):
            emit(line)
        columns = ["MODEL", "DEVICE", "RANK", "STATE", "SIZE", "GEN", "USED BY"]
        print_table(columns, _model_rows(service), right=("SIZE", "GEN"))
        for model in service["models"]:
            if model["ranks"] > 1:
                emit(f"{model['model']}: {model['state']}, {model['ranks_cached']}/{model['ranks']} ranks")
            if reason := model.get("held_back"):
                emit(printable(f"{model['model']}: cached, but not given out: {reason}"))
            if model["error"]:
                emit(f"{model['model']}: {from_wire(model['error'])}")
        if refused := service.get("store", {}).get("refused"):
            names = (f"{item['model']} on {item['device']}, generation {item['generation']}" for item in refused)
            emit(f"not kept by the service manager: {'; '.join(names)} ({refused[0]['reason']})")
        if holders := _holder_rows(service):
            print_table(
                ["PID", "COMMAND", "UID", "SINCE", "SIZE", "MODEL", "GEN", "DEVICE"],
                holders,
                right=("PID", "UID", "SIZE", "GEN"),
            )
    return 0


def _holder_rows(service: dict[str, Any]) -> list[list[str]]:
    """One row per lease. A holder that has ended left its connection to a child, which has the memory as well."""
    return [
        [
            str(lease["pid"]),
            f"{lease['command']} (ended)" if lease["ended"] else lease["command"],
            str(lease["uid"]),
            lease["since"],
            human_bytes(lease["nbytes"]),
            shard["model"],
            str(shard["generation"]),
            device["device"],
        ]
        for device in service["devices"]
        for shard in device["shards"]
        for lease in shard["leases"]
    ]


def _device_line(device: dict[str, Any]) -> str:
    if "error" in device:
        return f"{device['device']}: worker does not answer: {device['error']}"
    return (
        f"{device['device']}: {human_bytes(device['held'])} of {human_bytes(device['limit'])} held, "
        f"worker pid {device['pid']}, {device['worker_restarts']} restarts{_health(device)}"
    )


def _health(device: dict[str, Any]) -> str:
    """What a device's errors add to its line: nothing for one without."""
    xids = [f"{xid} x{count}" if count > 1 else xid for xid, count in device.get("xids", {}).items()]
    lost = device.get("lost")
    return (f", Xids {', '.join(xids)}" if xids else "") + (f", LOST: {lost}" if lost else "")


def _model_rows(service: dict[str, Any]) -> list[list[str]]:
    """One row per shard, then one for each rank of a configured model that has no shard on its device."""
    rows = []
    states = {model["model"]: model for model in service["models"]}
    shown = set()
    for device in service["devices"]:
        for shard in device["shards"]:
            model = states.get(shard["model"], {})
            state = shard["state"]
            if state == "cached" and model.get("state") == "loading":
                state = f"cached, {_progress(model)}"
            if state == "cached" and model.get("held_back") and device["device"] in model["devices"]:
                state += ", held back"
            state += shard_notes(shard)
            users = ", ".join(f"{lease['pid']} ({lease['command']})" for lease in shard["leases"])
            rows.append(
                [
                    shard["model"],
                    device["device"],
                    rank_label(shard["key"]),
                    state,
                    human_bytes(shard["nbytes"]),
                    str(shard["generation"]),
                    users or "-",
                ]
            )
            shown.add((shard["model"], device["device"]))
    for name, model in states.items():
        state = _progress(model) if model["state"] == "loading" else model["state"]
        rows += [
            [name, device, "-", state, "-", "-", "-"] for device in model["devices"] if (name, device) not in shown
        ]
    return rows


def _progress(model: dict[str, Any]) -> str:
    total = model["bytes_to_read"]
    return f"loading {100 * model['bytes_done'] // total} %" if total else "loading"


def _list(args: argparse.Namespace) -> int:
    shards = [
        {"instance": service["instance"], "device": device["device"], **shard}
        for service in _all_statuses(args)
        for device in service["devices"]
        for shard in device["shards"]
    ]
    if args.json:
        _print(args, {"shards": shards})
    else:
        columns = ["MODEL", "DEVICE", "RANK", "STATE", "SIZE", "TENSORS", "DTYPE", "CONTENT"]
        rows = [
            [
                shard["model"],
                shard["device"],
                rank_label(shard["key"]),
                shard["state"],
                human_bytes(shard["nbytes"]),
                str(shard["tensors"]),
                shard["key"]["dtype"] or "-",
                shard["key"]["content"],
            ]
            for shard in shards
        ]
        print_table(columns, rows, right=("SIZE", "TENSORS"))
    return 0


def _load(args: argparse.Namespace) -> int:
    answer = _ask(args, Load(model=args.model))
    where = ", ".join(answer["devices"])
    if args.json:
        _print(args, answer)
    elif answer["state"] == "cached" and (reason := answer.get("held_back")):
        emit(printable(f"{args.model} is cached on {where} already, but not given out: {reason}"))
    elif answer["state"] == "cached":
        emit(f"{args.model} is cached on {where} already")
    else:
        emit(f"{args.model} is {answer['state']} on {where}; follow it: weightcachectl wait {args.model}")
    return 0


def _evict(args: argparse.Namespace) -> int:
    answer = _ask(args, Evict(model=args.model, device=args.device, force=args.force), timeout=60.0)
    if args.json:
        _print(args, answer)
        return 0
    if answer["called_off"]:
        emit(f"the load of {args.model} is called off")
    for item in answer["evicted"]:
        emit(f"evicted {item['model']} from {item['device']}: {human_bytes(item['nbytes'])}")
        if item["draining"]:
            holders = ", ".join(holder(lease["pid"], lease["command"], lease["ended"]) for lease in item["draining"])
            emit(f"its memory returns when its holders end: {holders}")
    return 0


def _wait(args: argparse.Namespace) -> int:
    end = None if args.timeout is None else time.monotonic() + args.timeout
    with _connect(args) as service:
        status = service.ask(Subscribe())
        states = {model["model"]: model for model in status["models"]}
        wanted = [args.model] if args.model else [name for name, model in states.items() if model["preload"]]
        for name in wanted:
            if name not in states:
                raise NoSuchModel(model=name, device=f"weightcached@{status['instance']}", known=sorted(states))
        while missing := [states[name] for name in wanted if not _is_there(states[name])]:
            try:
                event = service.next_event(None if end is None else end - time.monotonic())
            except TimedOut:
                what = ", ".join(f"{item['model']} ({item.get('held_back') or item['state']})" for item in missing)
                raise TimedOut(path=str(service.path), seconds=args.timeout, waited_for=what) from None
            if event.get("what") == "model":
                states[event["model"]] = event
    if args.json:
        _print(args, {"models": [states[name] for name in wanted]})
    return 0


def _is_there(model: dict[str, Any]) -> bool:
    where = ", ".join(model["devices"])
    if model["state"] == "absent":  # never asked for, or evicted: nobody loads it, so nobody need wait
        raise ModelNotLoaded(model=model["model"], device=where)
    for_good = model.get("held_back_for_good", False)
    if model["error"] is None and not for_good:
        return bool(model["state"] == "cached" and not model.get("held_back"))
    reason = model["held_back"] if for_good else str(from_wire(model["error"]))
    if model["state"] == "cached" and not for_good:
        numbers = dict.fromkeys(str(number) for number in model["generations"])  # mostly the same on every device
        problem = f"its last load failed, generation {', '.join(numbers)} is still served: {reason}"
        raise ModelError(model=model["model"], problem=problem)
    raise ModelFailed(model=model["model"], device=where, reason=reason)


def _verify(args: argparse.Namespace) -> int:
    # Without a limit of time, as nobody knows how fast the memory is; an interrupt ends it here and in the service.
    answer = _ask(args, Verify(model=args.model, device=args.device), timeout=None)
    if args.json:
        _print(args, answer)
    for result in answer["results"]:
        where = f"{args.model} on {result['device']}"
        if "error" in result:
            print(f"weightcachectl: {where}: {printable(str(from_wire(result['error'])))}", file=sys.stderr)
        elif not args.json:
            emit(printable(f"{where}: {_verdict(result)}"))
    return 1 if any(result.get("error") or result["differ"] for result in answer["results"]) else 0


def _verdict(result: dict[str, Any]) -> str:
    differ = result["differ"]
    if not differ:
        size = human_bytes(result["bytes"])
        return f"{result['tensors']} tensors, {size} verified in {result['seconds']:.1f} s"
    names = ", ".join(differ[:MAX_NAMES]) + (f" and {len(differ) - MAX_NAMES} more" if len(differ) > MAX_NAMES else "")
    return f"{len(differ)} of {result['tensors']} tensors differ: {names}; evict the model and load it again"


def _reload(args: argparse.Namespace) -> int:
    answer = _ask(args, Reload(), timeout=60.0)
    if args.json:
        _print(args, answer)
        return 0
    emit(f"loading: {', '.join(answer['loading']) or 'nothing'}")
    for item in answer["left"]:
        emit(f"not configured any more, still cached: weightcachectl evict {item['model']} --device {item['device']}")
    if answer["restart"]:
        emit(f"changed, takes effect at the next restart: {', '.join(answer['restart'])}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import doctor  # with the config it imports pydantic, which no other command needs

    return doctor(args.instance, as_json=args.json)


def _all_statuses(args: argparse.Namespace) -> list[dict[str, Any]]:
    with contextlib.ExitStack() as stack:
        statuses = []
        for service in _services(args, stack):
            with _passing_over(args, service.path):
                statuses.append(service.ask(Status(), timeout=30.0))
        return statuses


def _ask(args: argparse.Namespace, request: Request, timeout: float | None = 10.0) -> dict[str, Any]:
    with _connect(args) as service:
        return service.ask(request, timeout=timeout)


def _connect(args: argparse.Namespace) -> Connection:
    """The one service that is meant. The caller closes the connection."""
    with contextlib.ExitStack() as stack:
        services = _services(args, stack)
        if len(services) > 1:
            names = ", ".join(str(service.greeting.get("instance")) for service in services)
            raise WeightCacheError(problem=f"several services run here; choose one with --instance: {names}")
        if not services:
            raise WeightCacheError(problem="no service that runs here can be asked")
        stack.pop_all()
        return services[0]


def _services(args: argparse.Namespace, stack: contextlib.ExitStack) -> list[Connection]:
    """The running services that are meant and can be asked. `ServiceNotRunning` when none runs.

    A service that was killed leaves its socket file, which says nothing about the others.
    """
    if args.instance:
        path = control_path(args.instance)
        check_runtime_dir()
        return [stack.enter_context(Connection.open(path, client="weightcachectl", timeout=HELLO_SECONDS))]
    services = []
    for path in control_paths():
        with contextlib.suppress(ServiceNotRunning), _passing_over(args, path):
            services.append(stack.enter_context(Connection.open(path, client="weightcachectl", timeout=HELLO_SECONDS)))
    if not services and not args.unreachable:
        raise ServiceNotRunning(path=str(runtime_dir()), start=start_command())
    return services


@contextlib.contextmanager
def _passing_over(args: argparse.Namespace, path: Path) -> Iterator[None]:
    """A service that hangs or refuses is reported, and the others are asked, unless it is the one that was named."""
    try:
        yield
    except WeightCacheError as error:
        if args.instance or isinstance(error, ServiceNotRunning):
            raise
        instance = path.name.removesuffix(CONTROL_SUFFIX)
        args.unreachable.append({"instance": instance, "error": str(error)})
        print(f"weightcachectl: weightcached@{instance}: {printable(str(error))}", file=sys.stderr)


def _print(args: argparse.Namespace, answer: dict[str, Any]) -> None:
    """The answer as JSON, with the services that could not be asked."""
    print_json({"schema": 1, **answer, "unreachable": args.unreachable})


if __name__ == "__main__":
    sys.exit(main())
