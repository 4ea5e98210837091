"""How the commands print: tables for people, JSON for programs. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ..text import printable

_KIB = 1024


def human_bytes(nbytes: int) -> str:
    """Bytes for people: "14.9 GiB", "86.7 MiB", "1.5 KiB", "12 B"."""
    if nbytes < _KIB:
        return f"{nbytes} B"
    for power, unit in ((1, "KiB"), (2, "MiB")):
        value = round(nbytes / _KIB**power, 1)
        if value < _KIB:  # after rounding, or 1 byte less than a GiB would be "1024.0 MiB"
            return f"{value:.1f} {unit}"
    return f"{nbytes / _KIB**3:.1f} GiB"


def rank_label(key: Mapping[str, Any]) -> str:
    """Which rank a shard is, from the fields of its key: "tp 1/2", "pp 0/2 tp 1/2", "-" for a whole model."""
    parts = []
    for label, axis in (("dp", "data"), ("pp", "pipeline"), ("tp", "tensor"), ("ep", "expert")):
        rank, size = key[f"{axis}_parallel_rank"], key[f"{axis}_parallel_size"]
        if size > 1:
            parts.append(f"{label} {rank}/{size}")
    return " ".join(parts) or "-"


def shard_notes(shard: Mapping[str, Any]) -> str:
    """What there is to say beside "cached": ", pinned", and what is not known yet, or never will be, of its files."""
    if shard["state"] != "cached":
        return ""
    digest = str(shard.get("digest", "known")).partition(":")[0]  # behind it is the reason, which --json has
    return (", pinned" if shard.get("pin") else "") + (f", digest {digest}" if digest != "known" else "")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, right: Collection[str] = ()) -> None:
    """Prints a table to stdout; columns named in `right` are aligned right.

    On a terminal by rich: coloured, unless $NO_COLOR is set (no-color.org) or $TERM is dumb, and long cells wrap. Into
    a pipe every row is one line, no cell is cut, and rich, which takes longer to import than `status` takes, is not.
    """
    cells = [[printable(str(cell)) for cell in row] for row in rows]
    emit(_rich_table(columns, cells, right) if sys.stdout.isatty() else _plain_table(columns, cells, right))


def _plain_table(columns: Sequence[str], rows: list[list[str]], right: Collection[str]) -> str:
    widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
    lines = []
    for row in (columns, *rows):
        fields = zip(columns, row, widths, strict=True)
        aligned = [cell.rjust(width) if name in right else cell.ljust(width) for name, cell, width in fields]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join(lines)


def _rich_table(columns: Sequence[str], rows: list[list[str]], right: Collection[str]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(force_terminal=True, color_system="standard" if _use_colour() else None)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # Text, not str: rich would read brackets in a str as markup
    with console.capture() as capture:
        console.print(table)
    return capture.get().rstrip("\n")


def cluster_lines(cluster: dict[str, Any] | None) -> list[str]:
    """The nodes of a status reply, a line each, below one for all; none for a service without other nodes."""
    if not cluster:
        return []
    agreed = "agreed" if cluster["agreed"] else "not agreed"
    if cluster.get("meeting") is not None:
        agreed += f", meeting for {cluster['meeting']:.0f} s"
    problem = f": {cluster['problem']}" if cluster["problem"] else ""
    which = f"node {cluster['node']} of {len(cluster['nodes'])}, meets at {cluster['master']}"
    lines = [f"cluster: {which}, {agreed}{problem}"]
    for node in cluster["nodes"]:
        absent = node.get("absent", ())
        here = node["node"] == cluster["node"]
        # Of the others it is what they said when all met last.
        since = " (not cached)" if here or cluster["agreed"] else " (not cached when the nodes met last)"
        ranks = ", ".join(
            f"{model} {_rank_range(*pair)}{since if model in absent else ''}" for model, pair in node["ranks"].items()
        )
        seen = "" if here or node["seen"] is None else f", seen {node['seen']:.0f} s ago"
        where = "this one" if here else node["address"] or "no address known"
        reason = f": {node['problem']}" if node["problem"] else ""
        lines.append(f"  node {node['node']}: {node['state']}, {where}{seen}, ranks {ranks or 'none'}{reason}")
    if cluster["dropped"]:
        dropped = ", ".join(f"{number} {kind}" for kind, number in sorted(cluster["dropped"].items()))
        lines.append(f"  datagrams dropped: {dropped}")
    return [printable(line) for line in lines]


def _rank_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def print_json(obj: object) -> None:
    """Prints one JSON document to stdout; non-ASCII as escapes, so that it is valid in any locale."""
    emit(json.dumps(obj, indent=2))


def emit(text: str) -> None:
    """Writes `text` and a line end to stdout, what its encoding lacks as escapes.

    Where nobody reads any more (`| head`), the process ends quietly with 1; on a full disk with a sentence.
    """
    if sys.stdout is None:  # started with standard output closed
        return
    encoding = sys.stdout.encoding
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit and would complain there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(f"standard output: {error.strerror}") from None


def _use_colour() -> bool:
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
