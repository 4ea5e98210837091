"""Files that a machine made up: valid ones are read as the library reads them, broken ones are refused in one way.

`oracle` states the rules a second time; each answer of the reader is held against it and against the library.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint.files import INDEX, shard_bytes, write_sharded
from tests.checkpoint.judge import data_bytes, judge_config, judge_header, judge_index, read
from tests.checkpoint.mutate import mutate, mutate_bytes
from tests.checkpoint.oracle import (
    BITS,
    Violation,
    check_accepted,
    check_same_as_library,
    library_refusal,
)
from tests.checkpoint.strict_cases import CASES, Case, entry, file_of
from weightcached.checkpoint import header
from weightcached.checkpoint.header import Header, TensorRange

# Not `st.randoms`, which draws each number by itself and takes ten times as long.
chances = st.integers(0, 2**32).map(random.Random)
texts = st.text(max_size=8)
names = texts.filter(lambda name: name != "__metadata__")


class Made(NamedTuple):
    """A valid file: its header's JSON text, its data, and the names of its tensors in the order of their bytes."""

    header: bytes
    data: bytes
    order: list[str]

    @property
    def content(self) -> bytes:
        return file_of(self.header) + self.data


@st.composite
def shapes(draw: st.DrawFn, dtype: str) -> list[int]:
    """A shape that fills whole bytes, in every row where two elements share one; at times empty, with a large size."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    group = {4: 2, 6: 4}.get(BITS[dtype], 1)
    if group > 1:
        shape = [*shape, group * draw(st.integers(0, 3))]
    if 0 in shape and draw(st.booleans()):
        shape.insert(draw(st.integers(0, len(shape))), 2**20)
    return shape


@st.composite
def files(draw: st.DrawFn) -> Made:
    """A valid file, in any order of its entries and their fields and in any spelling of its JSON."""
    head: dict[str, Any] = {}
    offset = 0
    for name in draw(st.lists(names, unique=True, max_size=6)):
        dtype = draw(st.sampled_from(sorted(BITS)))
        shape = draw(shapes(dtype))
        bits = BITS[dtype]
        for length in shape:
            bits *= length
        more = draw(
            st.dictionaries(st.sampled_from(["x", "origin", "é"]), st.none() | st.integers() | texts, max_size=1)
        )
        head[name] = entry(dtype, shape, offset, offset + bits // 8, **more)
        offset += bits // 8
    order = list(head)
    if draw(st.booleans()):
        head["__metadata__"] = draw(st.none() | st.dictionaries(texts, texts, max_size=3))
    chance = draw(chances)
    head = {name: head[name] for name in chance.sample(list(head), len(head))}
    for name in order:
        head[name] = {field: head[name][field] for field in chance.sample(list(head[name]), len(head[name]))}
    spelled = json.dumps(head, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 0, 3, "\t"])))
    space = st.text(" \n\r\t", max_size=5)
    return Made(
        (draw(space) + spelled + draw(space)).encode(), draw(st.binary(min_size=offset, max_size=offset)), order
    )


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Thousands of warnings about unknown fields would bury what a failing test has to say."""
    logger = logging.getLogger(header.__name__)
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(logging.NOTSET)


@settings(max_examples=200, deadline=None)
@given(files())
def test_valid_files_are_accepted_and_read_as_by_the_library(made: Made) -> None:
    """Names, dtypes, shapes, metadata and bytes of every valid file, in the order of the bytes."""
    found = read(made.content, len(made.content))
    check_accepted(made.content, len(made.content), found)
    check_same_as_library(made.content, found)
    begins = [(tensor.begin, tensor.end) for tensor in found.tensors]
    assert begins == sorted(begins)
    assert sorted(tensor.name for tensor in found.tensors) == sorted(made.order)


@settings(max_examples=200, deadline=None)
@given(files(), st.integers(-9, 9).filter(bool))
def test_any_other_length_is_refused(made: Made, difference: int) -> None:
    """A valid file that is a few bytes shorter or longer is refused, by both."""
    size = max(len(made.content) + difference, 0)
    assert judge_header(made.content[:size].ljust(size, b"\0"), size) is not None


@settings(max_examples=300, deadline=None)
@given(files(), chances)
def test_changed_values(made: Made, chance: random.Random) -> None:
    """Values, members and elements changed, doubled, left out or put in: both readers agree, or ours says why not."""
    text = mutate(made.header, chance)
    judge_header(file_of(text), 8 + len(text) + data_bytes(text) + chance.choice((0, 0, 0, 0, 1, -1)))


@settings(max_examples=200, deadline=None)
@given(files(), chances)
def test_changed_bytes(made: Made, chance: random.Random) -> None:
    """Bytes changed anywhere in the file, its length included: both readers agree, or ours says why not."""
    content = mutate_bytes(made.content, chance)
    judge_header(content, len(content))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes(content: bytes) -> None:
    """Bytes without any form, as the whole file and as a header of the right length."""
    judge_header(content, len(content))
    judge_header(file_of(content), 8 + len(content))


def test_changes_reach_both_verdicts() -> None:
    """The changes are worth their time: of 5,000 about a fifth are accepted, and the rest breaks every kind of rule."""
    chance = random.Random(7)
    seeds = [case.content[8:] for case in CASES if case.refusal is None]
    problems: Counter[str | None] = Counter()
    for _ in range(5000):
        start = chance.choice(seeds)
        text = mutate(start[: start.rindex(b"}") + 1], chance)
        problem = judge_header(file_of(text), 8 + len(text) + data_bytes(text))
        problems[problem and next((words for words in KINDS if words in problem), problem)] += 1
    assert problems[None] > 500
    assert set(KINDS) <= set(problems), set(KINDS) - set(problems)


KINDS = (
    "is not valid JSON",
    "header must be a JSON object",
    "occurs twice in the header",
    "its entry must be an object",
    "expected, missing",
    "field 'dtype' occurs twice",
    "unknown dtype",
    "shape must be",
    "data_offsets must be two",
    "must not decrease",
    "overflows: at most",
    "whole bytes expected",
    "data_offsets hold",
    "belong to no tensor",
    "it overlaps",
    "half a surrogate pair",
    "__metadata__ must be an object of strings",
)


@pytest.mark.parametrize("case", [case for case in CASES if len(case.content) >= 8], ids=lambda case: case.name)
def test_oracle_knows_the_table(case: Case) -> None:
    """The oracle accepts what the table accepts, and explains what the table refuses and the library takes."""
    assert (judge_header(case.content, len(case.content)) is None) == (case.refusal is None)


def lenient(content: bytes) -> Header | None:
    """What a careless reader makes of a file: the last of equal keys, any JSON that Python takes, no checks."""
    start = 8 + int.from_bytes(content[:8], "little")
    try:
        entries = json.loads(content[8:start])
        entries.pop("__metadata__", None)
        tensors = [
            TensorRange(name, fields["dtype"], tuple(fields["shape"]), *(start + at for at in fields["data_offsets"]))
            for name, fields in entries.items()
        ]
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None
    return Header(tuple(sorted(tensors, key=lambda tensor: (tensor.begin, tensor.end))), {}, start)


CARELESS = [
    case for case in CASES if case.refusal is not None and len(case.content) >= 8 and lenient(case.content) is not None
]


@pytest.mark.parametrize("case", CARELESS, ids=lambda case: case.name)
def test_oracle_finds_a_careless_reader(case: Case) -> None:
    """What a careless reader accepts of the refused cases is a violation to the oracle, or refused by the library."""
    found = lenient(case.content)
    assert found is not None
    try:
        check_accepted(case.content, len(case.content), found)
    except (Violation, UnicodeEncodeError):
        return
    assert library_refusal(case.content, len(case.content)) is not None


def test_most_cases_catch_a_careless_reader() -> None:
    """The test above has cases to work on."""
    assert len(CARELESS) > 25


indexes = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d", "é"]),
    st.sampled_from(["one.safetensors", "two.safetensors", "three.safetensors"]),
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(indexes, st.booleans(), chances)
def test_changed_index(
    tmp_path_factory: pytest.TempPathFactory, weight_map: dict[str, str], keep: bool, chance: random.Random
) -> None:
    """Whatever an index says, what is opened is what it maps, each name once, from files of its own folder."""
    folder = tmp_path_factory.mktemp("set")
    write_sharded(folder, {"one.safetensors": ["a", "b"], "two.safetensors": ["b", "c"]})
    document = json.dumps({"metadata": {"total_size": 12}, "weight_map": weight_map}).encode()
    (folder / INDEX).write_bytes(document if keep else mutate(document, chance))
    judge_index(folder)


@settings(max_examples=200, deadline=None)
@given(chances)
def test_changed_config(tmp_path_factory: pytest.TempPathFactory, chance: random.Random) -> None:
    """Whatever a config says, it is refused with `CheckpointError`, or has the types that a shard's key is made of."""
    path = tmp_path_factory.mktemp("config") / "config.json"
    (path.parent / "model.safetensors").write_bytes(shard_bytes(["w"]))
    path.write_bytes(mutate(b'{"architectures":["A"],"quantization_config":{"quant_method":"fp8","bits":[1]}}', chance))
    judge_config(path.parent)
