"""Plans read out of transformers' source: what they cover, and every reason why they do not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.tensors import tensor
from weightcached.errors import UnknownArchitecture
from weightcached.parallel.borrowed import borrowed_family
from weightcached.parallel.ranks import Parallel
from weightcached.parallel.rules import COL, REPLICATE, ROW, Rule
from weightcached.parallel.slices import plan_slices

CONFIGURATION = """
import torch_that_is_not_here

class OtherConfig(PreTrainedConfig):
    model_type = "other"
    base_model_tp_plan = {"layers.*.x": "colwise"}

class NewConfig(PreTrainedConfig):
    model_type = "new-er"
    keys = compute()
    base_model_tp_plan: dict[str, str] = PLAN
"""
MODELING = """
class NewPreTrainedModel(PreTrainedModel):
    base_model_prefix = "model"

class NewForCausalLM(NewPreTrainedModel):
    _tp_plan = {"lm_head": "colwise_gather_output"}

class NewForSequenceClassification(GenericForSequenceClassification, NewPreTrainedModel):
    pass
"""
PLAN = {"embed_tokens": "embedding_rowwise", "layers.*.up": "colwise", "layers.*.down": "rowwise"}
CONFIG: dict[str, Any] = {
    "architectures": ["NewForCausalLM"],
    "model_type": "new-er",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
NAMES = [f"model.{name}.weight" for name in ("embed_tokens", "layers.0.up", "layers.0.down", "norm")] + [
    "lm_head.weight"
]


def models(folder: Path, plan: object = PLAN, configuration: str = CONFIGURATION, modeling: str = MODELING) -> Path:
    """A folder of models as transformers has it, with one family of them."""
    (folder / "new_er").mkdir()
    (folder / "new_er" / "configuration_new.py").write_text(configuration.replace("PLAN", repr(plan)))
    (folder / "new_er" / "modeling_new.py").write_text(modeling)
    return folder


def test_a_plan_becomes_rules(tmp_path: Path) -> None:
    """Read as text, with imports that would fail; below the base model's name, then the head, the rest replicated."""
    family = borrowed_family(CONFIG, Parallel(tensor=4), NAMES, models(tmp_path))

    assert family.rules == (
        Rule("model.embed_tokens", COL),
        Rule("model.layers.*.up", COL),
        Rule("model.layers.*.down", ROW),
        Rule("lm_head", COL),
        Rule("**", REPLICATE),
    )
    assert (family.layers, family.embedding, family.head) == (None, None, None)


@pytest.mark.parametrize(
    ("config", "parallel", "problem"),
    [
        ({}, Parallel(tensor=2, pipeline=2), "it is for tensor parallel alone"),
        ({}, Parallel(tensor=2, data=2), "it is for tensor parallel alone"),
        ({"model_type": None}, Parallel(tensor=2), "config.json says no model_type"),
        ({"model_type": "../new_er"}, Parallel(tensor=2), "config.json says no model_type"),
        ({"model_type": "new_er"}, Parallel(tensor=2), "it has none for new_er"),
        ({"model_type": "missing"}, Parallel(tensor=2), "it has none for missing"),
        ({"architectures": ["Else"]}, Parallel(tensor=2), "it does not tell how the parts of Else are named"),
        (
            {"architectures": ["NewForSequenceClassification"]},
            Parallel(tensor=2),
            "the parts of NewForSequenceClassification are named",
        ),
        ({}, Parallel(tensor=8), "8 ranks do not divide 8 attention heads and 4 key/value heads"),
        ({"num_key_value_heads": None}, Parallel(tensor=3), "do not divide 8 attention heads and 8 key/value heads"),
        ({"num_attention_heads": None}, Parallel(tensor=2), "config.json does not say num_attention_heads"),
    ],
)
def test_where_a_plan_is_not_enough(config: dict[str, Any], parallel: Parallel, problem: str, tmp_path: Path) -> None:
    """Other dimensions, no plan, and heads that the ranks do not divide: refused with the reason and the next step."""
    with pytest.raises(UnknownArchitecture, match=f"{problem}; give rules = "):
        borrowed_family(CONFIG | config, parallel, NAMES, models(tmp_path))


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (
            PLAN | {"layers.*.up": "packed_colwise"},
            r"it cuts layers\.\*\.up as packed_colwise, which has no equal here",
        ),
        (PLAN | {"layers.*.up": "colwise_gather_output"}, r"it cuts layers\.\*\.up as colwise_gather_output"),
        (PLAN | {"layers.*.experts": "moe_tp_experts"}, "as moe_tp_experts, which has no equal here"),
        (PLAN | {"layers.*.experts.up": "colwise"}, r"it names model\.layers\.\*\.experts\.up, which the checkpoint"),
        ({}, "it has none for new-er"),
        ({"layers.*.up": 1}, "it has none for new-er"),
    ],
)
def test_a_plan_that_may_mean_something_else(plan: dict[str, Any], problem: str, tmp_path: Path) -> None:
    """Kinds that cut other bytes than ours, and modules that transformers makes itself while loading."""
    with pytest.raises(UnknownArchitecture, match=problem):
        borrowed_family(CONFIG, Parallel(tensor=2), NAMES, models(tmp_path, plan))


def test_a_checkpoint_with_other_names(tmp_path: Path) -> None:
    """The plan is about model.*, and the checkpoint has none of it."""
    with pytest.raises(UnknownArchitecture, match=r"no tensor of the checkpoint is named model\.\*"):
        borrowed_family(CONFIG, Parallel(tensor=2), ["transformer.h.0.up.weight"], models(tmp_path))


def test_source_that_is_no_python(tmp_path: Path) -> None:
    """The file is named."""
    folder = models(tmp_path, configuration="class NewConfig(:\n")

    with pytest.raises(UnknownArchitecture, match=r"configuration_new\.py cannot be read"):
        borrowed_family(CONFIG, Parallel(tensor=2), NAMES, folder)


def test_without_transformers_the_refusal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service's environment usually has none."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(UnknownArchitecture, match="transformers is not installed; give rules = "):
        borrowed_family(CONFIG, Parallel(tensor=2), NAMES)


def granite() -> tuple[list[Any], dict[str, Any]]:
    """A small Granite, which has no family here and has a plan in transformers."""
    tensors = [tensor(f"{name}.weight", (64, 16)) for name in ("model.embed_tokens", "lm_head")]
    for name, shape in (("q", (32, 16)), ("k", (16, 16)), ("v", (16, 16)), ("o", (16, 32))):
        tensors.append(tensor(f"model.layers.0.self_attn.{name}_proj.weight", shape))
    for name, shape in (("gate", (48, 16)), ("up", (48, 16)), ("down", (16, 48))):
        tensors.append(tensor(f"model.layers.0.mlp.{name}_proj.weight", shape))
    tensors.append(tensor("model.norm.weight", (16,)))
    config = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    return tensors, config | {"num_attention_heads": 4, "num_key_value_heads": 2}


def test_the_plan_of_the_installed_transformers() -> None:
    """Granite by its plan: rows and columns as it says, norms and embedding whole, the head's rows cut."""
    pytest.importorskip("transformers")
    tensors, config = granite()

    shards = plan_slices(tensors, config, Parallel(tensor=2))

    assert any("q_proj" in rule for rule in shards[0].rules), "another version's plan is another key"
    assert [{one.name.removesuffix(".weight"): one.shape for one in shard.slices} for shard in shards] == [
        {
            "model.embed_tokens": (64, 16),
            "lm_head": (32, 16),
            "model.layers.0.self_attn.q_proj": (16, 16),
            "model.layers.0.self_attn.k_proj": (8, 16),
            "model.layers.0.self_attn.v_proj": (8, 16),
            "model.layers.0.self_attn.o_proj": (16, 16),
            "model.layers.0.mlp.gate_proj": (24, 16),
            "model.layers.0.mlp.up_proj": (24, 16),
            "model.layers.0.mlp.down_proj": (16, 24),
            "model.norm": (16,),
        }
    ] * 2


def test_reading_a_plan_imports_nothing() -> None:
    """Neither transformers nor torch is loaded by it."""
    pytest.importorskip("transformers")
    program = (
        "import sys; from tests.parallel.test_borrowed import granite\n"
        "from weightcached.parallel.ranks import Parallel\n"
        "for name in ('torch', 'transformers'): assert name not in sys.modules\n"
        "from weightcached.parallel.slices import plan_slices\n"
        "tensors, config = granite(); plan_slices(tensors, config, Parallel(tensor=2))\n"
        "print(*({'torch', 'transformers'} & set(sys.modules)))"
    )

    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == ""
