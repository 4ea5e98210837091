"""engines/sglang/state.py: what a load changes beside parameters and buffers is carried, or told."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.engines.sglang.standin import HfConfig, Model, QuantMethod
from weightcached.client.modules import NamedTensor
from weightcached.engines.sglang.state import Snapshot


@pytest.fixture
def model() -> Model:
    made = Model(HfConfig([]))
    for parameter in made.parameters():
        nn.init.ones_(parameter)
    return made


def test_an_untouched_model_has_nothing_to_carry(model: Model) -> None:
    """No attribute and no problem; of tensors its scratch, which every engine needs a copy of."""
    found = Snapshot.of(model).changes(model.eval())
    assert (found.attributes, found.problems) == ({}, [])
    assert found.tensor_attributes == ["attention.scratch"]
    assert found.private(NamedTensor("attention.scratch", model.attention.scratch, "attribute"))


def test_views_of_weights_and_tensors_of_the_load_are_shared(model: Model) -> None:
    """As RadixLinearAttention.conv_weights, a view from the start, and MLA's w_kc, made by the load: no copies."""
    model.attention.conv_weights = model.embed.weight.detach().view(16, 32)
    snapshot = Snapshot.of(model)
    model.attention.w_kc = torch.ones(4)
    found = snapshot.changes(model)
    assert found.problems == []
    assert sorted(found.tensor_attributes) == ["attention.conv_weights", "attention.scratch", "attention.w_kc"]
    assert found.scratch == {"attention.scratch"}


def test_scalars_that_the_load_sets_are_carried(model: Model) -> None:
    """New ones, changed ones, and a parameter that became None."""
    model.width = 1
    snapshot = Snapshot.of(model)
    model.width = 2
    model.attention.use_deep_gemm_bmm = True
    model.attention.kv_b_proj.input_scale = None
    found = snapshot.changes(model)
    assert found.problems == []
    assert found.attributes == {
        "width": 2,
        "attention.use_deep_gemm_bmm": True,
        "attention.kv_b_proj.input_scale": None,
    }


def _mark(model: Model) -> None:
    model.embed.weight.format_ue8m0 = True  # type: ignore[attr-defined]


def _object(model: Model) -> None:
    model.attention.kv_b_proj.quant_method = QuantMethod()


def _in_an_object(model: Model) -> None:
    model.attention.kv_b_proj.quant_method.use_marlin = True


def _tuple(model: Model) -> None:
    model.parts = (torch.ones(2),)


def _held(model: Model) -> None:
    model.attention.kv_b_proj.quant_method.workspace = torch.ones(2)


def _module(model: Model) -> None:
    model.extra = nn.Identity()


def _gone(model: Model) -> None:
    del model.attention.scratch


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_mark, "embed.weight.format_ue8m0 is True after the load"),
        (_object, "attention.kv_b_proj.quant_method is another QuantMethod"),
        (_in_an_object, "attention.kv_b_proj.quant_method is another QuantMethod"),
        (_tuple, "parts is another tuple"),
        (_held, "attention.kv_b_proj.quant_method.workspace is a tensor that no module has"),
        (_module, "extra is a module that the load has added"),
        (_gone, "attention.scratch is gone"),
    ],
)
def test_what_cannot_be_carried_is_told(model: Model, change: Callable[[Model], None], said: str) -> None:
    """Each by the place where it is."""
    snapshot = Snapshot.of(model)
    change(model)
    assert any(said in problem for problem in snapshot.changes(model).problems)


def test_look_up_tables_are_no_problem(model: Model) -> None:
    """Many models of SGLang's keep dict(named_parameters()) when they load, some with the parameters of then."""
    snapshot = Snapshot.of(model)
    model._cached_params_dict = dict(model.named_parameters())
    model.by_layer = {0: [model.embed.weight]}
    model.embed.weight = nn.Parameter(torch.zeros(32, 16), requires_grad=False)
    model.lm_head.weight = model.embed.weight
    model.by_layer = {0: [model.embed.weight]}
    assert snapshot.changes(model).problems == []


def test_a_snapshot_keeps_no_memory(model: Model) -> None:
    """What the load replaces is freed at once: a snapshot must not double the memory of a load."""
    snapshot = Snapshot.of(model)
    old = weakref.ref(model.attention.scratch)
    model.attention.scratch = torch.ones(16)
    gc.collect()
    assert old() is None
    assert snapshot.changes(model).scratch == set()


def test_small_buffers_and_kv_scales_are_private() -> None:
    """An engine may write them after loading; large buffers, such as rotary tables, are shared."""
    private = Snapshot.of(nn.Module()).changes(nn.Module()).private
    assert private(NamedTensor("counter", torch.zeros(4), "buffer"))
    assert not private(NamedTensor("cos_sin_cache", torch.zeros(1 << 18), "buffer"))
    assert private(NamedTensor("attn.k_scale", torch.zeros(1)))
    assert not private(NamedTensor("attn.weight", torch.zeros(1)))
