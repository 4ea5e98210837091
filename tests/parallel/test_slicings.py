"""parallel.slicings: names of other slicings, and which rank of one a key asks for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slicings import Sizes, parse_name, wanted_rank, wanted_sizes
from weightcached.text import MODEL_NAME

NUMBERS = st.integers(1, 100)


@given(st.from_regex(MODEL_NAME, fullmatch=True), NUMBERS, NUMBERS, NUMBERS)
def test_a_name_says_which_slicing_of_which_model(model: str, data: int, pipeline: int, tensor: int) -> None:
    """It is made and read in one way, and is a name that a model may have, as far as its length goes."""
    sizes = Sizes(data, pipeline, tensor)
    name = sizes.name(model)
    found = parse_name(name)
    assert found is not None
    assert found[1].name(found[0]) == name
    assert found == (model, sizes) or ".tp" in model or ".pp" in model or ".dp" in model
    assert len(name) > 128 or MODEL_NAME.fullmatch(name)


@pytest.mark.parametrize("name", ["m", "m.tp", "m.tp0", "m.tp02", "m.pp1tp2", "m.dp1tp1", ".tp2", "m.pp2", "m.tp2.x"])
def test_other_names_are_no_slicings(name: str) -> None:
    """Nor are those that `Sizes.name` would not make."""
    assert parse_name(name) is None


def test_names() -> None:
    """One tensor parallel rank is named as well; sizes of 1 of the others are not."""
    assert [Sizes(1, 1, 1).name("m"), Sizes(1, 2, 1).name("m"), Sizes(2, 2, 4).name("m-1.5")] == [
        "m.tp1",
        "m.pp2tp1",
        "m-1.5.dp2pp2tp4",
    ]


def test_ranks_are_in_the_order_of_the_model() -> None:
    """The number of a rank is its place among `Parallel.ranks`."""
    parallel = Parallel(data=2, pipeline=3, tensor=2)
    sizes = Sizes(2, 3, 2)
    for number, rank in enumerate(parallel.ranks()):
        key = {
            "data_parallel_rank": rank.data,
            "pipeline_parallel_rank": rank.pipeline,
            "tensor_parallel_rank": rank.tensor,
        }
        assert wanted_rank(key, sizes) == number
    assert sizes.world == parallel.world


@pytest.mark.parametrize(
    ("key", "sizes", "rank"),
    [
        ({}, Sizes(1, 1, 2), None),
        ({"tensor_parallel_rank": 1}, Sizes(1, 1, 2), 1),
        ({"tensor_parallel_size": 4, "tensor_parallel_rank": 4}, Sizes(1, 1, 4), None),
        ({"tensor_parallel_size": 1}, Sizes(1, 1, 1), 0),
        ({"tensor_parallel_size": "4", "tensor_parallel_rank": True}, Sizes(1, 1, 2), None),
        ({"pipeline_parallel_size": 0, "tensor_parallel_rank": -1}, Sizes(1, 1, 2), None),
    ],
)
def test_what_a_key_leaves_out_is_the_models_own(key: dict[str, Any], sizes: Sizes, rank: int | None) -> None:
    """A size that is missing, or is none, is the config's; a rank that is none is None."""
    found = wanted_sizes(key, Sizes(1, 1, 2))
    assert found == sizes
    assert wanted_rank(key, found) == rank
