"""Sizes, ranks in order, and the layers and experts that each holds."""

from __future__ import annotations

from typing import Any

import pytest

from weightcached.parallel.ranks import Parallel


def sizes(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [last - first for first, last in ranges]


@pytest.mark.parametrize(
    ("layers", "stages", "vllm", "transformers"),
    [
        (61, 4, [15, 15, 16, 15], [15, 15, 15, 16]),
        (36, 5, [7, 7, 7, 8, 7], [7, 7, 7, 7, 8]),
        (32, 3, [11, 11, 10], [10, 10, 12]),
        (7, 4, [2, 2, 2, 1], [1, 1, 1, 4]),
        (32, 4, [8] * 4, [8] * 4),
        (5, 5, [1] * 5, [1] * 5),
        (32, 1, [32], [32]),
    ],
)
def test_the_two_engines_give_the_remainder_to_different_stages(
    layers: int, stages: int, vllm: list[int], transformers: list[int]
) -> None:
    """vLLM: one each to the stages before the last, backwards. transformers: all to the last. Nothing is left out."""
    by_vllm = Parallel(pipeline=stages).stage_layers(layers)
    by_transformers = Parallel(pipeline=stages, layers="transformers").stage_layers(layers)

    assert sizes(by_vllm) == vllm
    assert sizes(by_transformers) == transformers
    for ranges in (by_vllm, by_transformers):
        assert [number for first, last in ranges for number in range(first, last)] == list(range(layers))


def test_explicit_layers_are_taken_as_they_are() -> None:
    """The given counts, if they add up to the model's layers; otherwise both numbers are in the error."""
    parallel = Parallel(pipeline=3, layers=(10, 20, 31))

    assert parallel.stage_layers(61) == ((0, 10), (10, 30), (30, 61))
    with pytest.raises(ValueError, match=r"10, 20, 31 add up to 61, the model has 62 layers"):
        parallel.stage_layers(62)


def test_a_stage_without_layers_is_refused() -> None:
    """Three layers do not fill four stages."""
    with pytest.raises(ValueError, match="3 layers do not fill 4 pipeline stages"):
        Parallel(pipeline=4).stage_layers(3)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tensor": 0}, "tensor parallel size must be a whole number of at least 1, found 0"),
        ({"pipeline": -1}, "pipeline parallel size must be a whole number of at least 1, found -1"),
        ({"data": True}, "data parallel size must be a whole number of at least 1, found True"),
        ({"tensor": "2"}, "tensor parallel size must be a whole number of at least 1, found '2'"),
        ({"placement": "zigzag"}, "expert placement must be one of linear, round_robin, found 'zigzag'"),
        ({"layers": "sglang"}, "pipeline layers must be one of vllm, transformers or the layers of each stage"),
        ({"layers": (3, 0), "pipeline": 2}, "every pipeline stage needs at least 1 layer, found 3, 0"),
        ({"layers": (3, 2.0), "pipeline": 2}, "every pipeline stage needs at least 1 layer, found 3, 2.0"),
        ({"layers": [3, 3], "pipeline": 2}, r"pipeline layers must be one of vllm, transformers .* found \[3, 3\]"),
        ({"layers": (3, 3)}, "pipeline layers are given for 2 stages, pipeline parallel size is 1"),
    ],
)
def test_sizes_that_cannot_be_are_refused(fields: dict[str, Any], sentence: str) -> None:
    """Each with a sentence that says what was found."""
    with pytest.raises(ValueError, match=sentence):
        Parallel(**fields)


def test_tensor_ranks_are_neighbours_and_data_ranks_far_apart() -> None:
    """vLLM's order: data slowest, then pipeline, tensor fastest; a rank knows its place in its stage."""
    ranks = Parallel(tensor=2, pipeline=2, data=2).ranks()

    assert [(rank.data, rank.pipeline, rank.tensor) for rank in ranks] == [
        (data, pipeline, tensor) for data in range(2) for pipeline in range(2) for tensor in range(2)
    ]
    assert [rank.moe_rank for rank in ranks] == [0, 1, 0, 1, 2, 3, 2, 3]
    assert {rank.moe_size for rank in ranks} == {4}
    assert ranks[0].parallel.world == len(ranks) == 8


def test_sixty_experts_on_eight_ranks() -> None:
    """The remainder goes to the first ranks; round robin takes every eighth; each expert is somewhere once."""
    linear = Parallel(tensor=8, expert=True)
    robin = Parallel(tensor=4, data=2, expert=True, placement="round_robin")

    assert [len(linear.experts_of(60, rank)) for rank in range(8)] == [8, 8, 8, 8, 7, 7, 7, 7]
    assert [linear.experts_of(60, rank).start for rank in range(8)] == [0, 8, 16, 24, 32, 39, 46, 53]
    assert list(robin.experts_of(60, 5)) == [5, 13, 21, 29, 37, 45, 53]
    for parallel in (linear, robin):
        assert sorted(expert for rank in range(8) for expert in parallel.experts_of(60, rank)) == list(range(60))


@pytest.mark.parametrize("placement", ["linear", "round_robin"])
@pytest.mark.parametrize("total", [8, 9, 15, 16, 60, 256])
def test_the_owner_of_an_expert_holds_it(placement: Any, total: int) -> None:
    """The two directions agree for every expert."""
    parallel = Parallel(tensor=4, data=2, expert=True, placement=placement)

    for expert in range(total):
        assert expert in parallel.experts_of(total, parallel.owner_of(expert, total))
