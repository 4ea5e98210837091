"""What the fuzz targets share: the reader instrumented for coverage, seeds, JSON mutations, and bugs to be found.

A target is a program. In the root of the project, for as long as you like:

    python -m tests.fuzz.fuzz_header /tmp/corpus -max_total_time=3600

The corpus folder is made and seeded when it is not there; the options are libFuzzer's. A finding ends the run with its
traceback and a file that repeats it: ``python -m tests.fuzz.fuzz_header crash-<sha1>``. Needs atheris.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import atheris

from tests.checkpoint.mutate import mutate

if "weightcached.checkpoint.header" in sys.modules:
    raise ImportError("the reader was imported before this module could instrument it: import this module first")
with atheris.instrument_imports(include=["weightcached.checkpoint"]):
    from tests.checkpoint.judge import data_bytes, judge_config, judge_header, judge_index
    from weightcached.checkpoint import documents, fileset, header

__all__ = ["data_bytes", "fuzz", "judge_config", "judge_header", "judge_index"]

MAX_INPUT_BYTES = 4096
PLANT_VARIABLE = "WEIGHTCACHED_FUZZ_PLANT"  # names a bug of `PLANTS` to put into the reader of this process


def fuzz(target: Callable[[bytes], None], seeds: Iterable[bytes], mutated_from: int) -> None:
    """Runs the target on the command line's corpus. Does not return: libFuzzer ends the process.

    The first `mutated_from` bytes of an input are the target's own; JSON follows, which `mutate` knows how to change.
    """
    logging.disable(logging.CRITICAL)
    if plant := os.environ.get(PLANT_VARIABLE):
        PLANTS[plant]()
    arguments = [f"-max_len={MAX_INPUT_BYTES}", "-timeout=10", "-rss_limit_mb=2048", *sys.argv[1:]]
    for argument in arguments:
        if not argument.startswith("-") and not Path(argument).exists():
            write_seeds(Path(argument), seeds)

    def mutator(data: bytes, max_size: int, seed: int) -> bytes:
        chance = random.Random(seed)
        if chance.random() < 0.25:
            return atheris.Mutate(data, max_size)
        return (data[:mutated_from] + mutate(data[mutated_from:], chance))[:max_size]

    atheris.Setup([sys.argv[0], *arguments], target, custom_mutator=mutator)
    atheris.Fuzz()


def write_seeds(folder: Path, seeds: Iterable[bytes]) -> None:
    """One file for each seed that is not too long, named by its content as libFuzzer names them."""
    folder.mkdir(parents=True)
    for seed in seeds:
        if len(seed) <= MAX_INPUT_BYTES:
            (folder / hashlib.sha1(seed).hexdigest()).write_bytes(seed)


# Bugs to be found, for a run that proves that the target finds them. No seed reaches the first two.


@atheris.instrument_func
def _rare(dtype: str, shape: list[int]) -> bool:
    if dtype != "C64":
        return False
    return len(shape) == 3


def _plant_crash() -> None:
    """The reader raises something else than a `CheckpointError`."""
    honest = header._expected_bytes

    def broken(dtype: str, shape: list[int]) -> int | str:
        if _rare(dtype, shape):
            raise KeyError(dtype)
        return honest(dtype, shape)

    header._expected_bytes = broken


def _plant_hang() -> None:
    """The reader never comes back."""
    honest = header._expected_bytes

    def broken(dtype: str, shape: list[int]) -> int | str:
        while dtype == "C64":
            pass
        return honest(dtype, shape)

    header._expected_bytes = broken


def _plant_lax() -> None:
    """The reader takes tensors that leave holes or overlap, and asks nobody else."""
    header._check_layout = lambda tensors, data_start, size: None
    header.reference_refusal = lambda start, size, file: None


def _plant_stray() -> None:
    """The reader follows the index out of its folder."""
    documents._require_bare = lambda path, tensor, name: None


def _plant_unlisted() -> None:
    """The reader loads every tensor of the files that the index names."""
    fileset._owned_tensors = lambda path, head, owned, chosen: head.tensors


PLANTS = {
    "crash": _plant_crash,
    "hang": _plant_hang,
    "lax": _plant_lax,
    "stray": _plant_stray,
    "unlisted": _plant_unlisted,
}
