"""cli.output: sizes, tables and JSON as people and programs get them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

import pytest

from weightcached.cli.output import cluster_lines, human_bytes, print_json, print_table, rank_label, shard_notes

TABLE = """
from weightcached.cli.output import print_table
print_table(["NAME", "SIZE"], [["a" * 150, "1.0 GiB"], ["[red]b[/red]", "86.7 MiB"]], right=["SIZE"])
"""


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (90_868_373, "86.7 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (1 << 30, "1.0 GiB"),
        ((1 << 30) - 1, "1.0 GiB"),
        (16_060_522_496, "15.0 GiB"),
        (1 << 42, "4096.0 GiB"),
    ],
)
def test_human_bytes(nbytes: int, text: str) -> None:
    """One decimal, the unit in which the number stays below 1024 after rounding, GiB at most."""
    assert human_bytes(nbytes) == text


def test_table_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    """Into a pipe each row is one line without colour or cuts; numbers align right, brackets are no markup."""
    print_table(["NAME", "SIZE"], [["a" * 150, "1.0 GiB"], ["[red]b[/red]", "86.7 MiB"]], right=["SIZE"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["NAME", "SIZE"],
        ["a" * 150, "1.0", "GiB"],
        ["[red]b[/red]", "86.7", "MiB"],
    ]
    assert {len(line) for line in lines} == {160}, "the last column is aligned right"
    assert "\x1b" not in "".join(lines)


def test_cells_cannot_break_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    """File names with line breaks, terminal codes or undecodable bytes come out as escapes."""
    print_table(["FILE"], [["a\nb\x1b[31m" + os.fsdecode(b"\xff")]])
    assert capsys.readouterr().out.splitlines() == ["FILE", r"a\nb\x1b[31m\udcff"]


def test_empty_table(capsys: pytest.CaptureFixture[str]) -> None:
    """Without rows the header is still printed."""
    print_table(["A", "B"], [])
    assert capsys.readouterr().out.split() == ["A", "B"]


def on_terminal(env: dict[str, str]) -> str:
    """What a child prints when its stdout is a terminal."""
    master, slave = pty.openpty()
    base = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    with os.fdopen(master, "rb", buffering=0) as reader:
        try:
            child = subprocess.Popen(
                [sys.executable, "-c", TABLE], stdout=slave, env={**base, "TERM": "xterm", "COLUMNS": "80", **env}
            )
        finally:
            os.close(slave)
        output = b""
        try:
            while part := reader.read(65536):
                output += part
        except OSError:  # EIO: the child has closed the terminal (pty(7))
            pass
        assert child.wait() == 0
    return output.decode()


def test_terminal_has_colour_and_wraps() -> None:
    """On a terminal there are escape codes, and a long cell is wrapped, not cut."""
    output = on_terminal({})
    assert "\x1b[" in output
    assert output.count("a") == 150
    assert max(len(line) for line in output.replace("\r", "").splitlines()) < 120


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_terminal_without_colour(env: dict[str, str]) -> None:
    """$NO_COLOR and a dumb terminal get no escape code at all, bold included."""
    assert "\x1b" not in on_terminal(env)


def test_no_forced_colour_in_a_pipe() -> None:
    """$FORCE_COLOR does not colour what another program reads."""
    env = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    output = subprocess.run([sys.executable, "-c", TABLE], env=env, capture_output=True, text=True, check=True).stdout
    assert "\x1b" not in output


def test_encoding_without_the_characters() -> None:
    """On an output that cannot hold a character, it becomes an escape instead of a traceback."""
    code = "from weightcached.cli.output import print_table; print_table(['N'], [['caf\\xe9']])"
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    output = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout
    assert output.splitlines() == ["N", r"caf\xe9"]


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON document in ASCII; large integers stay integers."""
    print_json({"schema": 1, "bytes": 1 << 60, "file": "é" + os.fsdecode(b"\xff")})
    output = capsys.readouterr().out
    assert output.isascii()
    assert json.loads(output)["bytes"] == 1 << 60


def test_closed_pipe_is_quiet() -> None:
    """When nobody reads, the process ends with 1 and without a traceback."""
    code = "from weightcached.cli.output import print_json; print_json(list(range(100000)))"
    read, write = os.pipe()
    os.close(read)
    try:
        child = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(write)
    assert (child.returncode, child.stderr) == (1, "")


def test_rich_is_imported_for_terminals_only() -> None:
    """JSON, and tables that a program reads, do not pay for rich."""
    code = (
        f"import sys{TABLE}from weightcached.cli.output import print_json; print_json(1); print('rich' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("sizes", "label"),
    [
        ({}, "-"),
        ({"tensor": (1, 2)}, "tp 1/2"),
        ({"tensor": (1, 2), "pipeline": (0, 3)}, "pp 0/3 tp 1/2"),
        ({"tensor": (0, 2), "data": (1, 2), "expert": (2, 4)}, "dp 1/2 tp 0/2 ep 2/4"),
    ],
)
def test_a_rank_is_named_by_what_is_cut(sizes: dict[str, tuple[int, int]], label: str) -> None:
    """Only dimensions of more than one rank are named, from the slowest to the fastest, as rank/size."""
    places = {axis: sizes.get(axis, (0, 1)) for axis in ("tensor", "pipeline", "expert", "data")}
    key = {f"{axis}_parallel_rank": rank for axis, (rank, _) in places.items()}
    key |= {f"{axis}_parallel_size": size for axis, (_, size) in places.items()}
    assert rank_label(key) == label


def test_the_nodes_of_a_cluster_are_a_line_each() -> None:
    """With state, address, age and ranks; what came from elsewhere cannot forge a line. None without a cluster."""
    usual = {"address": None, "seen": None, "problem": None, "ranks": {}}
    cut_off = {"node": 1, "state": "gone", "address": "10.0.0.2", "seen": 17.4}
    nodes = [
        {**usual, "node": 0, "state": "loaded", "address": "10.0.0.1", "seen": 0.0, "ranks": {"m": [0, 7]}},
        {**cut_off, "problem": "a\nb", "ranks": {"m": [8, 8]}, "absent": ["m"]},
        {**usual, "node": 2, "state": "unknown"},
    ]
    cluster = {"node": 0, "master": "10.0.0.1:29650", "agreed": False, "problem": "why", "dropped": {}, "nodes": nodes}
    assert cluster_lines(cluster) == [
        "cluster: node 0 of 3, meets at 10.0.0.1:29650, not agreed: why",
        "  node 0: loaded, this one, ranks m 0-7",
        "  node 1: gone, 10.0.0.2, seen 17 s ago, ranks m 8 (not cached when the nodes met last): a\\nb",
        "  node 2: unknown, no address known, ranks none",
    ]
    dropped = cluster_lines({**cluster, "agreed": True, "problem": None, "dropped": {"malformed": 3, "foreign": 1}})
    assert dropped[0].endswith("29650, agreed")
    assert "ranks m 8 (not cached): a" in dropped[2]  # what they agreed on is what is so
    nodes[0]["absent"] = ["m"]
    assert cluster_lines(cluster)[1] == "  node 0: loaded, this one, ranks m 0-7 (not cached)"
    assert cluster_lines({**cluster, "meeting": 12.3})[0].endswith("29650, not agreed, meeting for 12 s: why")
    assert dropped[-1] == "  datagrams dropped: 1 foreign, 3 malformed"
    assert cluster_lines(None) == []


@pytest.mark.parametrize(
    ("shard", "notes"),
    [
        ({"state": "cached", "digest": "known", "pin": False}, ""),
        ({"state": "cached"}, ""),  # of a worker of an older version
        ({"state": "cached", "digest": "pending", "pin": True}, ", pinned, digest pending"),
        ({"state": "cached", "digest": "given up: it is gone: all"}, ", digest given up"),
        ({"state": "draining", "digest": "pending", "pin": True}, ""),
    ],
)
def test_notes_beside_a_shards_state(shard: dict[str, object], notes: str) -> None:
    """Only of what can still be attached: that it stays, and that its files have no digest."""
    assert shard_notes(shard) == notes
