"""Runs PTX without a GPU: the few instructions that weightcached's kernels use, after NVIDIA's "PTX ISA".

Each statement of a kernel stands on a line of its own. A register that is read before it was written, an instruction
or a label that is not known here is an error. Threads of a warp meet at each shuffle, as they must.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol

WARP = 32
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_TWO_OPERANDS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul.lo": operator.mul,
    "mul.wide": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shl": operator.lshift,
    "shr": operator.rshift,
    "min": min,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {"ge": operator.ge, "ne": operator.ne}


class Memory(Protocol):
    """What a kernel sees of the device."""

    def load(self, address: int, nbytes: int) -> bytes: ...

    def add(self, address: int, value: int) -> None:
        """Atomically adds to 64 bits, modulo 2^64."""
        ...


@dataclass(frozen=True)
class Statement:
    """One instruction: the predicate register that must be true, its name, its type, its operands."""

    predicate: str | None
    name: str
    bits: int
    operands: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Kernel:
    name: str
    parameters: tuple[str, ...]
    threads: int
    statements: tuple[Statement, ...]
    labels: dict[str, int]


def parse(text: str) -> dict[str, Kernel]:
    """A module's kernels by name, each written as ``.visible .entry name(parameters) .maxntid n, 1, 1 {...}``."""
    text = re.sub(r"//.*", "", text)
    assert re.match(r"\s*\.version \d+\.\d+\s+\.target sm_\d+\s+\.address_size 64\s", text)
    kernels = {}
    form = r"^\.visible \.entry (\w+)\(([^)]*)\)\s+\.maxntid (\d+), 1, 1\s+^\{$(.*?)^\}$"
    for name, parameters, threads, body in re.findall(form, text, re.MULTILINE | re.DOTALL):
        statements: list[Statement] = []
        labels = {}
        for line in filter(None, map(str.strip, body.splitlines())):
            if line.endswith(":"):
                labels[line[:-1]] = len(statements)
            elif not line.startswith(".reg "):
                statements.append(_statement(line))
        names = tuple(re.findall(r"\.param \.u64 (\w+)", parameters))
        kernels[name] = Kernel(name, names, int(threads), tuple(statements), labels)
    return kernels


def run(kernel: Kernel, blocks: int, threads: int, parameters: Sequence[int], memory: Memory) -> None:
    """All threads of all blocks, one warp after the other."""
    assert threads <= kernel.threads
    assert threads % WARP == 0
    for block in range(blocks):
        for first in range(0, threads, WARP):
            _run_warp(
                [_Thread(kernel, (block, blocks), at, parameters, memory).run() for at in range(first, first + WARP)]
            )


def _run_warp(lanes: list[Generator[tuple[int, int], int, None]]) -> None:
    given: list[int] = []
    while True:
        shuffles = []
        for number, lane in enumerate(lanes):
            try:
                shuffles.append(lane.send(given[number]) if given else next(lane))
            except StopIteration:
                continue
        if not shuffles:
            return
        assert len(shuffles) == WARP, "a shuffle of the whole warp that some threads never reach"
        values = [value for value, _ in shuffles]
        given = [values[at + down] if at + down < WARP else values[at] for at, (_, down) in enumerate(shuffles)]


def _statement(line: str) -> Statement:
    found = re.fullmatch(r"(?:@(%\w+) )?([\w.]+)(?: (.*))?;", line)
    assert found, f"not a statement: {line}"
    predicate, operation, operands = found.groups()
    typed = re.fullmatch(r"(.*)\.[ub](8|32|64)", operation)
    name, bits = (typed[1], int(typed[2])) if typed else (operation, 0)
    return Statement(predicate, name, bits, tuple(_OPERAND.findall(operands or "")), line)


class _Thread:
    def __init__(
        self, kernel: Kernel, grid: tuple[int, int], thread: int, parameters: Sequence[int], memory: Memory
    ) -> None:
        """`grid`: the number of the block, and of blocks."""
        self._kernel = kernel
        self._memory = memory
        self._parameters = dict(zip(kernel.parameters, parameters, strict=True))
        self._registers: dict[str, int] = {"%ctaid.x": grid[0], "%nctaid.x": grid[1], "%tid.x": thread}

    def run(self) -> Generator[tuple[int, int], int, None]:
        """Yields (value, lanes) at a shuffle and is sent the value of the thread so many lanes further on."""
        at = 0
        while True:
            statement = self._kernel.statements[at]
            at += 1
            if statement.predicate is not None and not self._registers[statement.predicate]:
                continue
            match statement.name, statement.operands:
                case "ret", ():
                    return
                case "bra", (label,):
                    at = self._kernel.labels[label]
                case "shfl.sync.down", (target, source, lanes, "31", "0xffffffff"):
                    self._registers[target] = yield self._value(source, 32), int(lanes)
                case _:
                    self._execute(statement)

    def _execute(self, statement: Statement) -> None:
        bits = statement.bits
        match statement.name.split("."), statement.operands:
            case ["ld", "param"], (target, source):
                self._registers[target] = self._parameters[source.strip("[]")]
            case ["ld", "global", "nc", *vector], (target, source):
                targets = target.strip("{}").replace(" ", "").split(",")
                assert vector == ([] if len(targets) == 1 else [f"v{len(targets)}"])
                self._load(targets, source, bits // 8)
            case ["red", "global", "add"], (target, source):
                assert bits == 64
                self._memory.add(self._address(target), self._value(source, 64))
            case ["cvta", "to", "global"], (target, source):
                self._registers[target] = self._value(source, 64)
            case ["mov"], (target, source) if target.startswith("{"):
                low, high = target.strip("{}").replace(" ", "").split(",")
                value = self._value(source, 64)
                self._registers[low], self._registers[high] = value & 0xFFFFFFFF, value >> 32
            case ["mov"], (target, source) if source.startswith("{"):
                low, high = source.strip("{}").replace(" ", "").split(",")
                self._registers[target] = self._value(low, 32) | self._value(high, 32) << 32
            case ["mov"], (target, source):
                self._registers[target] = self._value(source, bits)
            case ["setp", comparison], (target, one, other):
                holds = _COMPARISONS[comparison](self._value(one, bits), self._value(other, bits))
                self._registers[target] = int(holds)
            case _, (target, one, other) if statement.name in _TWO_OPERANDS:
                value = _TWO_OPERANDS[statement.name](self._value(one, bits), self._value(other, bits))
                self._registers[target] = value & ((1 << (64 if "wide" in statement.name else bits)) - 1)
            case _:
                raise NotImplementedError(statement.text)

    def _load(self, targets: list[str], source: str, nbytes: int) -> None:
        address = self._address(source)
        assert address % (nbytes * len(targets)) == 0, "a misaligned address is a fault of the device"
        data = self._memory.load(address, nbytes * len(targets))
        for number, target in enumerate(targets):
            self._registers[target] = int.from_bytes(data[number * nbytes : (number + 1) * nbytes], "little")

    def _address(self, operand: str) -> int:
        register, _, offset = operand.strip("[]").partition("+")
        return self._registers[register] + int(offset or 0)

    def _value(self, operand: str, bits: int) -> int:
        value = self._registers[operand] if operand.startswith("%") else int(operand, 0)
        return value & ((1 << bits) - 1)
