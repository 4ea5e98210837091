"""families/llama4.py: stacked and transposed experts, or one name each; alone and beside a vision model."""

from __future__ import annotations

import pytest

from tests.parallel.families import checkpoints
from tests.parallel.families.checkpoints import LLAMA4, Checkpoint, linear
from tests.parallel.families.joining import MATRIX, joins
from tests.parallel.families.released import parts_of, shapes_of
from weightcached.errors import CannotCut, UnknownArchitecture
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.slices import plan_slices


@pytest.mark.parametrize("sizes", MATRIX)
@pytest.mark.parametrize("form", LLAMA4)
def test_the_ranks_join_to_the_checkpoint(form: str, sizes: str) -> None:
    """Each rank's slices, filled and joined, give every tensor: both halves of gate_up_proj are cut."""
    joins(LLAMA4[form](), *MATRIX[sizes])


def test_gate_and_up_are_cut_apart() -> None:
    """Rank 1 of 2 has columns 48 to 96 of gate and of up, which starts at column 96; 192 of 2 bytes are a row."""
    llama4, name = checkpoints.llama4(), "model.layers.1.feed_forward.experts.gate_up_proj"

    shard = plan_slices(llama4.ranges(), llama4.config, Parallel(tensor=2))[1]

    assert shapes_of(shard)[name] == (6, 64, 96)
    assert parts_of(shard)[name] == [(48 * 2, 48 * 2, 6 * 64), ((96 + 48) * 2, 48 * 2, 6 * 64)]


def test_scout_for_16_ranks_is_refused() -> None:
    """40 heads divide by 8 ranks and not by 16."""
    entries = linear("model.layers.0.self_attn.q_proj", 5120, 5120) | linear("lm_head", 202048, 5120)
    config = {"architectures": ["Llama4ForCausalLM"], "hidden_size": 5120, "num_hidden_layers": 48}

    with pytest.raises(CannotCut) as refused:
        plan_slices(Checkpoint(config, entries).ranges(), config, Parallel(tensor=16))

    assert "40 attention heads are no multiple of 16 ranks" in str(refused.value)
    assert refused.value.largest == 8  # 10 divides the heads, not the 202048 words


def test_an_unknown_parameter_is_refused_by_name() -> None:
    """A name that the family's table does not have is not cut by a guess."""
    llama4 = checkpoints.llama4()
    more = linear("model.layers.1.feed_forward.experts.0.middle_proj", 32, 64)

    with pytest.raises(UnknownArchitecture, match=r"feed_forward\.experts\.0\.middle_proj\.weight"):
        plan_slices(Checkpoint({}, llama4.entries | more).ranges(), llama4.config, Parallel(tensor=2))
