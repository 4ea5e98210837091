"""The command ``weightcached``: the service and its child processes, and what needs no service: check and schema.

    weightcached serve | check | schema           for people and systemd
    weightcached worker DEVICE, loader DEVICE MODEL, verifier DEVICE MODEL, digest CHECKPOINT, probe,
    watch-devices ..., rendezvous ADDRESS NODE    started by the service, so that ps shows role and device

A module that takes time to import is imported in the branch that needs it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from .. import __version__, logs
from ..errors import WeightCacheError
from ..paths import check_instance
from ..text import printable

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

_EPILOG = """\
exit codes:
  0   done                          75  another service holds the device's lock
  1   refused or failed             78  bad config file; serve: or a checkpoint or
  2   wrong usage                       device in it that is not there or not loadable
  4   check: no such device         130 interrupted
"""


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code. `SystemExit` for wrong usage (2), --help and --version (0)."""
    arguments = sys.argv[1:] if argv is None else argv
    role = _ROLES.get(arguments[0]) if arguments else None
    args = role().parse_args(arguments[1:]) if role is not None else _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except WeightCacheError as error:
        prefix = logs.line_prefix(logging.ERROR)
        if args.debug:
            import traceback

            for line in traceback.format_exc().splitlines():
                print(f"{prefix}{line}", file=sys.stderr)
        print(f"{prefix}weightcached: error: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weightcached",
        description="Keeps model weights in device memory, outside of the engines that use them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"weightcached {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")

    serve = commands.add_parser("serve", help="run the service in the foreground", parents=[_selection(), _common()])
    serve.add_argument(
        "--take-over", action="store_true", help="end a service that holds a device's lock, then take its place"
    )
    serve.set_defaults(run=_serve, parser=serve)

    check = commands.add_parser(
        "check", help="show what would be loaded where, without loading", parents=[_selection(), _common()]
    )
    check.add_argument("--json", action="store_true", help="print one JSON object, bytes as integers")
    check.set_defaults(run=_check, parser=check)

    schema = commands.add_parser("schema", help="print the JSON schema of the config file", parents=[_common()])
    schema.set_defaults(run=_schema)
    return parser


def _common() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--debug", action="store_true", help="log every step; show tracebacks of errors")
    return parser


def _selection() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument(
        "--instance", metavar="NAME", type=_instance, help="read NAME.toml from the first config directory that has it"
    )
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="read FILE; the instance is its name without .toml, or --instance"
    )
    return parser


def _instance(text: str) -> str:
    try:
        return check_instance(text)
    except WeightCacheError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _config_path(args: argparse.Namespace) -> Path:
    if args.config is not None:
        return Path(args.config).absolute()
    if args.instance is None:
        args.parser.error("one of the arguments --instance --config is required")
    from ..config import find_config

    return find_config(args.instance)


def open_standard_descriptors() -> None:
    """Opens /dev/null for each of 0, 1 and 2 that is closed: a lock or a socket must not get such a number.

    A child's standard descriptors are replaced, so it would find something else there than what it was handed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number (open(2)), which is this one


def _serve(args: argparse.Namespace) -> int:
    open_standard_descriptors()
    path = _config_path(args)
    instance = args.instance
    if instance is None:
        try:
            instance = check_instance(path.stem)
        except WeightCacheError as error:
            args.parser.error(f"{error}; name it with --instance")
    logs.setup(_level(args))
    from ..service.main import serve

    return serve(path, instance, args.take_over)


def _check(args: argparse.Namespace) -> int:
    path = _config_path(args)
    from .check import check

    return check(path, as_json=args.json)


def _schema(args: argparse.Namespace) -> int:
    from ..config import json_schema
    from .output import print_json

    print_json(json_schema())
    return 0


def _worker_parser() -> argparse.ArgumentParser:
    """Its arguments are the parameters of `worker.main.run`."""
    parser = argparse.ArgumentParser(prog="weightcached worker", parents=[_common()])
    parser.add_argument("device")
    parser.add_argument("--instance", required=True)
    parser.add_argument("--limit", type=int, required=True, help="bytes of the device that may hold weights")
    parser.add_argument("--allow-uid", type=int, action="append", default=[], help="another user to let in")
    for name in ("--channel-fd", "--listener-fd", "--lock-fd"):
        parser.add_argument(name, type=int, required=True)
    parser.set_defaults(run=_worker)
    return parser


def _worker(args: argparse.Namespace) -> int:
    logs.setup(_level(args), f"worker {args.device}")
    from ..worker.main import run

    return run(
        device=args.device,
        instance=args.instance,
        limit=args.limit,
        channel_fd=args.channel_fd,
        listener_fd=args.listener_fd,
        lock_fd=args.lock_fd,
        allow_uids=tuple(args.allow_uid),
    )


def _loader_parser() -> argparse.ArgumentParser:
    """Its arguments are the parameters of `loader.process.run`."""
    return _job_parser("loader", _loader)


def _job_parser(role: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    """Of a process that does one job, which comes on its channel."""
    parser = argparse.ArgumentParser(prog=f"weightcached {role}", parents=[_common()])
    parser.add_argument("device")
    parser.add_argument("model")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.set_defaults(run=run)
    return parser


def _loader(args: argparse.Namespace) -> int:
    logs.setup(_level(args), f"loader {args.device} {args.model}")
    from ..loader.process import run

    return run(device=args.device, model=args.model, channel_fd=args.channel_fd)


def _verifier_parser() -> argparse.ArgumentParser:
    """Its arguments are the parameters of `verifier.run`."""
    return _job_parser("verifier", _verifier)


def _verifier(args: argparse.Namespace) -> int:
    logs.setup(_level(args), f"verifier {args.device} {args.model}")
    from ..verifier import run

    return run(device=args.device, model=args.model, channel_fd=args.channel_fd)


def _digest_parser() -> argparse.ArgumentParser:
    """Its arguments are the parameters of `digester.run`."""
    parser = argparse.ArgumentParser(prog="weightcached digest", parents=[_common()])
    parser.add_argument("checkpoint")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.set_defaults(run=_digest)
    return parser


def _digest(args: argparse.Namespace) -> int:
    logs.setup(_level(args), f"digest {args.checkpoint}")
    from ..digester import run

    return run(checkpoint=args.checkpoint, channel_fd=args.channel_fd)


def _rendezvous_parser() -> argparse.ArgumentParser:
    """Its last argument is the parameter of `rendezvous.run`; the others are for who reads a process list."""
    parser = argparse.ArgumentParser(prog="weightcached rendezvous", parents=[_common()])
    parser.add_argument("address")
    parser.add_argument("node", help="N/NODES")
    parser.add_argument("--channel-fd", type=int, required=True)
    parser.set_defaults(run=_rendezvous)
    return parser


def _rendezvous(args: argparse.Namespace) -> int:
    logs.setup(_level(args), f"rendezvous {args.node}")
    from ..rendezvous import run

    return run(channel_fd=args.channel_fd)


def _probe_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="weightcached probe", parents=[_common()])
    parser.add_argument("names", nargs="*", metavar="DEVICE")
    parser.set_defaults(run=_probe)
    return parser


def _probe(args: argparse.Namespace) -> int:
    from ..probe import answer

    print(answer(args.names))
    return 0


def _watcher_parser() -> argparse.ArgumentParser:
    """Its arguments are the parameters of `watcher.run`, or the one of `watcher.usable`."""
    parser = argparse.ArgumentParser(prog="weightcached watch-devices", parents=[_common()])
    parser.add_argument("devices", nargs="*", metavar="DEVICE")
    parser.add_argument("--look", metavar="DEVICE", help="only say by the exit code whether this one is usable")
    parser.add_argument("--channel-fd", type=int)
    parser.set_defaults(run=_watch_devices)
    return parser


def _watch_devices(args: argparse.Namespace) -> int:
    logs.setup(_level(args), "device watcher")
    from ..watcher import run, usable

    if args.look is not None:
        return 0 if usable(args.look) else 1
    return run(args.devices, args.channel_fd)


def _level(args: argparse.Namespace) -> int:
    return logging.DEBUG if args.debug else logging.INFO


# Not among the commands of the main parser, which lists those in its messages: nobody types these.
_ROLES: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "worker": _worker_parser,
    "loader": _loader_parser,
    "verifier": _verifier_parser,
    "digest": _digest_parser,
    "rendezvous": _rendezvous_parser,
    "probe": _probe_parser,
    "watch-devices": _watcher_parser,
}


if __name__ == "__main__":
    sys.exit(main())
