"""config: what a file may say, how its errors read, where it is found."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weightcached.config import (
    Config,
    ModelConfig,
    config_directories,
    find_config,
    json_schema,
    load_config,
)
from weightcached.devices import is_device_name
from weightcached.errors import ConfigError, WeightCacheError
from weightcached.parallel.ranks import Parallel

EXAMPLES = sorted((Path(__file__).parents[1] / "etc").glob("*.toml"))
MODEL = '[[model]]\nname = "minilm"\ncheckpoint = "/models/minilm"\n'
GIB = 1 << 30

Load = Callable[[str], Config]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a config from its text."""

    def from_text(text: str) -> Config:
        path = tmp_path / "model.toml"
        path.write_text(text)
        return load_config(path)

    return from_text


def problem_of(load: Load, text: str) -> str:
    """The problem, which must come with the file's name and exit code 78."""
    with pytest.raises(ConfigError) as caught:
        load(text)
    error = caught.value
    assert error.exit_code == 78
    assert error.file.endswith("/model.toml")
    assert "\n" not in str(error)
    return str(error.problem)


def test_defaults(load: Load) -> None:
    """An empty file is a whole config."""
    config = load("")
    assert (config.ready, config.devices, config.models) == ("loaded", "all", ())
    assert config.memory_limit.bytes_of(1000) == 900
    assert config.staging_memory == 256 << 20


def test_full_file(load: Load, tmp_path: Path) -> None:
    """Every key is read, models keep their order, and the config knows its file."""
    config = load(
        'ready = "listening"\ndevices = ["GPU-1a", "MIG-2b", "host-1"]\nmemory_limit = "60GiB"\n'
        'staging_memory = "64MiB"\nallow_uids = [1002, 0, 4294967294]\n'
        '[[model]]\nname = "z"\ncheckpoint = "/models/z"\npreload = false\ndevices = ["host-1"]\n'
        'pin = true\nreplace = "evict-first"\n'
        '[[model]]\nname = "a"\ncheckpoint = "/models/a.safetensors"\n'
    )
    assert config.ready == "listening"
    assert config.devices == ("GPU-1a", "MIG-2b", "host-1")
    assert config.memory_limit.bytes_of(80 * GIB) == 60 * GIB
    assert config.staging_memory == 64 << 20
    assert config.allow_uids == (1002, 0, 4294967294)
    assert [model.name for model in config.models] == ["z", "a"]
    assert config.models[0].preload is False
    assert config.models[1].preload is True
    assert (config.models[0].pin, config.models[0].replace) == (True, "evict-first")
    assert (config.models[1].pin, config.models[1].replace) == (False, "beside")
    assert config.models[1].checkpoint == Path("/models/a.safetensors")
    assert config.model_named("a") is config.models[1]
    assert config.model_named("b") is None
    assert config.file == tmp_path / "model.toml"


def test_equal_files_give_equal_models(load: Load) -> None:
    """A reload finds out what changed by comparing models."""
    assert load(MODEL) == load(MODEL)
    assert load(MODEL).models != load(MODEL + "preload = false").models


def test_frozen(load: Load) -> None:
    """Nobody changes a config that others hold."""
    config = load(MODEL)
    with pytest.raises(ValueError, match="frozen"):
        config.ready = "listening"
    with pytest.raises(ValueError, match="frozen"):
        config.models[0].preload = False


def test_home_is_expanded(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint may start with ~."""
    monkeypatch.setenv("HOME", "/home/ada")
    config = load('[[model]]\nname = "a"\ncheckpoint = "~/models/a"\n')
    assert config.models[0].checkpoint == Path("/home/ada/models/a")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("reddy = 1", 'reddy: unknown key; did you mean "ready"?'),
        ("memory_limits = 1", 'memory_limits: unknown key; did you mean "memory_limit"?'),
        ("models = []", 'models: unknown key; did you mean "model"?'),
        ("allow_uid = []", 'allow_uid: unknown key; did you mean "allow_uids"?'),
        (
            "[clutter]\nnodes = 2",
            'clutter: unknown key; did you mean "cluster"?',
        ),
        ("tensor_parallel = 2", "tensor_parallel: unknown key at the top; it belongs below a [[model]]"),
        (MODEL + "preloads = true", 'model[0].preloads: unknown key; did you mean "preload"?'),
        (MODEL + 'memory_limit = "5%"', "model[0].memory_limit: unknown key in a model; it belongs above the first"),
        (MODEL + "tensor_paralel = 2", 'model[0].tensor_paralel: unknown key; did you mean "tensor_parallel"?'),
        (
            MODEL + "epoch = 1",
            "model[0].epoch: unknown key; valid here: name, checkpoint, preload, pin, replace, dtype, tensor_",
        ),
    ],
)
def test_unknown_keys(load: Load, text: str, problem: str) -> None:
    """An unknown key is named by its path, with the nearest valid key, or where it belongs, or what is valid."""
    assert problem_of(load, text).startswith(problem)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('ready = "now"', "ready: \"now\": input should be 'loaded' or 'listening'"),
        ('devices = "host-0"', 'devices: "host-0" is no list of device names such as ["host-0"]'),
        ("devices = []", 'devices: [] is no list of device names such as ["host-0"]'),
        ("devices = [0]", 'devices: [0] is no list of device names such as ["host-0"]'),
        ('devices = ["cuda:0"]', 'devices: "cuda:0" is no device name; GPU-<uuid>, MIG-<uuid> and host-<n> are'),
        ('devices = ["host-0", "GPU-1", "host-0"]', "devices: host-0 is listed twice"),
        ('memory_limit = "0%"', 'memory_limit: "0%" is no limit; write a share such as "90%", a size such as "60GiB"'),
        ('memory_limit = "101%"', 'memory_limit: "101%" is no limit'),
        ('memory_limit = "60gib"', 'memory_limit: "60gib" is no limit'),
        ('memory_limit = "60"', 'memory_limit: "60" is no limit'),
        ("memory_limit = true", "memory_limit: true is no limit"),
        ("memory_limit = 0", "memory_limit: 0 is no limit"),
        ("memory_limit = 0.9", "memory_limit: 0.9 is no limit"),
        ('[model]\nname = "a"', 'model: {"name": "a"} is not what [[model]] makes; start each model with [[model]]'),
        ('model = ["a"]', 'model[0]: "a" is not what [[model]] makes'),
        ('[[model]]\nname = "a"', "model[0].checkpoint: missing; every [[model]] needs it"),
        ('[[model]]\ncheckpoint = "/a"', "model[0].name: missing; every [[model]] needs it"),
        (MODEL + 'preload = "yes"', 'model[0].preload: "yes" is neither true nor false'),
        (MODEL + "preload = 1", "model[0].preload: 1 is neither true nor false"),
        (MODEL + "pin = 1", "model[0].pin: 1 is neither true nor false"),
        (MODEL + 'replace = "after"', "model[0].replace: \"after\": input should be 'beside' or 'evict-first'"),
        (MODEL + "devices = []", "model[0].devices: [] is no list of device names"),
        (MODEL + 'devices = "host-0"', 'model[0].devices: "host-0" is no list of device names'),
        (
            MODEL + 'devices = ["host-0", "host-1"]',
            "model[0].devices: 2 devices for 1 rank; name one for each rank, in rank order",
        ),
        (
            MODEL + 'tensor_parallel = 2\npipeline_parallel = 3\ndevices = ["host-0", "host-1"]',
            "model[0].devices: 2 devices for 6 ranks (tensor_parallel 2 x pipeline_parallel 3); name one for each rank",
        ),
        (
            MODEL + 'data_parallel = 2\ndevices = ["host-1", "host-1"]',
            "model[0].devices: host-1 is listed twice",
        ),
        (
            MODEL + 'data_parallel = 2\ndevices = ["GPU-1", "host-1"]',
            "model[0].devices: GPU-1 and host-1 are of two kinds; a model goes to GPUs or to host devices",
        ),
        (MODEL + "tensor_parallel = 0", "model[0].tensor_parallel: 0 is no number of ranks; write 1 or more"),
        (MODEL + "pipeline_parallel = true", "model[0].pipeline_parallel: true is no number of ranks"),
        (MODEL + 'data_parallel = "2"', 'model[0].data_parallel: "2" is no number of ranks'),
        (MODEL + "tensor_parallel = 2.0", "model[0].tensor_parallel: 2.0 is no number of ranks"),
        (
            MODEL + 'pipeline_layers = "even"',
            'model[0].pipeline_layers: "even" splits no layers; write "vllm", "transformers", or the number of layers',
        ),
        (MODEL + "pipeline_layers = [0]", "model[0].pipeline_layers: [0] splits no layers"),
        (MODEL + "pipeline_layers = []", "model[0].pipeline_layers: [] splits no layers"),
        (
            MODEL + "pipeline_parallel = 3\npipeline_layers = [10, 12]",
            "model[0].pipeline_layers: [10, 12] for pipeline_parallel = 3; write one number for each stage",
        ),
        (MODEL + "pipeline_layers = [10, 12]", "model[0].pipeline_layers: [10, 12] for pipeline_parallel = 1"),
        (MODEL + "expert_parallel = 2", "model[0].expert_parallel: 2 is neither true nor false"),
        (
            MODEL + 'expert_parallel = true\nexpert_placement = "random"',
            "model[0].expert_placement: \"random\": input should be 'linear' or 'round_robin'",
        ),
        (
            MODEL + 'expert_placement = "round_robin"',
            'model[0].expert_placement: "round_robin" has no effect without expert_parallel = true',
        ),
        (
            MODEL + 'dtype = "fp16"',
            "model[0].dtype: \"fp16\": input should be 'checkpoint', 'float16', 'bfloat16' or 'float32'",
        ),
        (MODEL + 'rules = "a: col"', 'model[0].rules: "a: col" is no list of rules, each a string'),
        (MODEL + "rules = [1]", "model[0].rules: [1] is no list of rules, each a string"),
        (MODEL + 'publisher = "a b"', 'model[0].publisher: "a b" is no command; write its words as a list, such as ["'),
        (MODEL + "publisher = [1]", "model[0].publisher: [1] is no command; write its words as a list"),
        (MODEL + 'publisher = ["a\\u0000"]', 'model[0].publisher: ["a\\u0000"] is no command; write its words as'),
        (MODEL + 'publisher = ["", "x"]', "model[0].publisher: the first word is empty; it names the program"),
        (
            MODEL + 'dtype = "bfloat16"\npublisher = ["x"]',
            "model[0].publisher: dtype has no effect with it: the command decides; give it the option that it has",
        ),
        (
            MODEL + 'publisher = ["x"]\nrules = ["*.q_proj: col"]',
            "model[0].publisher: rules has no effect with it: the command decides; give it the option that it has",
        ),
        (MODEL + 'rules = ["*.q_proj: rows"]', "model[0].rules: rule '*.q_proj: rows': 'rows' is no kind; valid are"),
        ("staging_memory = true", 'staging_memory: true is no size; write one such as "256MiB", or bytes'),
        ('staging_memory = "10%"', 'staging_memory: "10%" is no size'),
        ('staging_memory = "8388607B"', 'staging_memory: "8388607B" is too little; a load needs 8MiB at least'),
        ('[[model]]\nname = "a"\ncheckpoint = "models/a"', 'model[0].checkpoint: "models/a" is a relative path'),
        ('[[model]]\nname = "a"\ncheckpoint = ""', 'model[0].checkpoint: "" is no path'),
        ('[[model]]\nname = "a"\ncheckpoint = 1', "model[0].checkpoint: 1 is no path"),
        ('[[model]]\nname = "a"\ncheckpoint = "~no-such-user-here/a"', 'model[0].checkpoint: "~no-such-user-here/a": '),
        (MODEL + MODEL, 'model: "minilm" is the name of model[0] and of model[1]'),
        (
            MODEL + 'on_mismatch = "reload"\n' + MODEL.replace('"minilm"', '"minilm.tp2"'),
            'model: "minilm.tp2" is what on_mismatch = "reload" calls a slicing of "minilm"; rename it',
        ),
    ],
)
def test_bad_values(load: Load, text: str, problem: str) -> None:
    """A bad value is named by its path, shown as the file spells it, with what would be right."""
    assert problem_of(load, text).startswith(problem)


@pytest.mark.parametrize("name", ["a", "Qwen3-8B", "_x", "1.2_3-4", "a" * 128])
def test_good_model_names(load: Load, name: str) -> None:
    """Letters, digits, dot, underscore and dash make a name, up to 128 of them."""
    assert load(f'[[model]]\nname = "{name}"\ncheckpoint = "/a"').models[0].name == name


@pytest.mark.parametrize("name", ["", "a b", "a/b", "..", ".a", "-a", "a\\n", "ä", "a" * 129])
def test_bad_model_names(load: Load, name: str) -> None:
    """A name that could be an option, a hidden file, a path or a line break is refused."""
    assert "is no model name" in problem_of(load, f'[[model]]\nname = "{name}"\ncheckpoint = "/a"')


def test_all_problems_are_listed(load: Load) -> None:
    """Several problems come in one error, each numbered."""
    problem = problem_of(load, 'reddy = 1\nmemory_limit = "x"\n[[model]]\nname = "a"\ncheckpoint = "b"\n')
    assert problem.startswith("3 problems: (1) ")
    for part in ("reddy: unknown", 'memory_limit: "x"', "model[0].checkpoint:", "(2) ", "(3) "):
        assert part in problem


def test_syntax_error_names_the_line(load: Load) -> None:
    """A file that is not TOML is refused with the line."""
    problem = problem_of(load, 'ready = "loaded"\ndevices = \n')
    assert problem.startswith("not TOML: ")
    assert "line 2" in problem


def test_not_text(tmp_path: Path) -> None:
    """A file that is not UTF-8 is refused with the position."""
    path = tmp_path / "model.toml"
    path.write_bytes(b"# caf\xe9\n")
    with pytest.raises(ConfigError, match="not UTF-8 text at byte 5"):
        load_config(path)


def test_unreadable_files(tmp_path: Path) -> None:
    """A missing file and a folder are refused by name and reason."""
    with pytest.raises(ConfigError, match=r"gone\.toml: No such file"):
        load_config(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match=f"{tmp_path}: Is a directory"):
        load_config(tmp_path)


def test_a_model_is_cut_as_its_keys_say(load: Load) -> None:
    """The keys of a model become its sizes; without any it is whole."""
    cut, whole = load(
        MODEL + "tensor_parallel = 2\npipeline_parallel = 2\npipeline_layers = [10, 12]\ndata_parallel = 3\n"
        'expert_parallel = true\nexpert_placement = "round_robin"\ndtype = "bfloat16"\n'
        'rules = ["model.layers.*.extra: col"]\n'
        '[[model]]\nname = "whole"\ncheckpoint = "/a"\n'
    ).models
    assert cut.parallel == Parallel(2, 2, 3, expert=True, placement="round_robin", layers=(10, 12))
    assert (cut.parallel.world, cut.dtype, cut.rules) == (12, "bfloat16", ("model.layers.*.extra: col",))
    assert (whole.parallel, whole.dtype, whole.rules) == (Parallel(), "checkpoint", ())


@pytest.mark.parametrize("layers", ["vllm", "transformers"])
def test_stages_split_as_an_engine_splits_them(load: Load, layers: str) -> None:
    """Either engine's way may be named."""
    (model,) = load(MODEL + f'pipeline_parallel = 4\npipeline_layers = "{layers}"\n').models
    assert (model.parallel.pipeline, model.parallel.layers) == (4, layers)


def test_ranks_go_to_the_named_devices(load: Load) -> None:
    """In the order in which they are named, which is that of the ranks."""
    (model,) = load(MODEL + 'tensor_parallel = 2\ndevices = ["host-2", "host-0"]\n').models
    assert model.devices_for(["host-0", "host-1", "host-2"]) == ("host-2", "host-0")
    with pytest.raises(ConfigError, match=r"model minilm: device host-2 is not served here; devices: host-0"):
        model.devices_for(["host-0"])


def test_ranks_go_to_the_first_devices(load: Load) -> None:
    """Without names a model gets the service's first devices, one for each rank, all of one kind."""
    whole, cut = load(MODEL + '[[model]]\nname = "cut"\ncheckpoint = "/a"\ntensor_parallel = 2\n').models
    assert whole.devices_for(["host-0", "host-1"]) == ("host-0",)
    assert cut.devices_for(["host-3", "host-1", "host-0"]) == ("host-3", "host-1")
    assert cut.devices_for(["GPU-1", "host-0", "MIG-2"]) == ("GPU-1", "MIG-2")
    with pytest.raises(
        ConfigError,
        match=r"model cut: 2 ranks \(tensor_parallel 2\) need 2 devices of one kind; 1 served here: GPU-1",
    ):
        cut.devices_for(["GPU-1", "host-0"])


def test_too_few_devices_are_found_when_the_file_is_read(load: Load) -> None:
    """With listed devices, a model of more ranks is refused at once."""
    problem = problem_of(load, 'devices = ["host-0", "host-1"]\n' + MODEL + "tensor_parallel = 4\n")
    assert problem == (
        "model minilm: 4 ranks (tensor_parallel 4) need 4 devices of one kind; 2 served here: host-0, host-1"
    )


def test_device_that_the_service_does_not_list(load: Load) -> None:
    """With listed devices, a model elsewhere is found when the file is read."""
    problem = problem_of(load, 'devices = ["host-0"]\n' + MODEL + 'devices = ["host-1"]\n')
    assert problem == "model minilm: device host-1 is not served here; devices: host-0"


@pytest.fixture
def homes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The explicit folder and the user's folder, both empty."""
    explicit, home = tmp_path / "explicit", tmp_path / "home" / ".config" / "weightcached"
    explicit.mkdir()
    home.mkdir(parents=True)
    monkeypatch.setenv("WEIGHTCACHED_CONFIG_DIR", str(explicit))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    return explicit, home


INSTANCE = "test-of-config"  # nobody has such a file in /etc


def test_first_found_wins(homes: tuple[Path, Path]) -> None:
    """The explicit folder comes before the user's."""
    explicit, home = homes
    (home / f"{INSTANCE}.toml").touch()
    assert find_config(INSTANCE) == home / f"{INSTANCE}.toml"
    (explicit / f"{INSTANCE}.toml").touch()
    assert find_config(INSTANCE) == explicit / f"{INSTANCE}.toml"


def test_dangling_link_is_found(homes: tuple[Path, Path]) -> None:
    """A dangling link fails by its own name; the next folder's file is not taken instead."""
    explicit, home = homes
    (home / f"{INSTANCE}.toml").touch()
    (explicit / f"{INSTANCE}.toml").symlink_to("/nowhere")
    with pytest.raises(ConfigError, match=f"{explicit}/{INSTANCE}.toml: No such file"):
        load_config(find_config(INSTANCE))


def test_nothing_found(homes: tuple[Path, Path]) -> None:
    """The error lists the places in order."""
    explicit, home = homes
    with pytest.raises(ConfigError, match=f"{INSTANCE}.toml: not found in {explicit}, {home}, /etc/weightcached; "):
        find_config(INSTANCE)


def test_xdg_config_home(homes: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """$XDG_CONFIG_HOME moves the user's folder; a relative one is ignored, as its specification says."""
    explicit, home = homes
    monkeypatch.setenv("XDG_CONFIG_HOME", "/xdg")
    assert config_directories() == [explicit, Path("/xdg/weightcached"), Path("/etc/weightcached")]
    monkeypatch.setenv("XDG_CONFIG_HOME", "xdg")
    assert config_directories() == [explicit, home, Path("/etc/weightcached")]
    monkeypatch.delenv("WEIGHTCACHED_CONFIG_DIR")
    assert config_directories() == [home, Path("/etc/weightcached")]


def test_instance_cannot_leave_the_folders(homes: tuple[Path, Path]) -> None:
    """An instance name is checked before it becomes a path."""
    with pytest.raises(WeightCacheError, match="instance name"):
        find_config("../x")


def test_examples_exist() -> None:
    """The parametrized tests below have something to run on."""
    assert {path.name for path in EXAMPLES} >= {"model.toml", "host-demo.toml"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_load(path: Path) -> None:
    """Every example in etc/ is accepted and lists a model."""
    assert load_config(path).models


def test_example_names_every_key() -> None:
    """etc/model.toml shows every key that there is, in use or as a comment."""
    text = (Path(__file__).parents[1] / "etc" / "model.toml").read_text()
    lines = {line.removeprefix("# ").split(" = ")[0] for line in text.splitlines()}
    assert {"ready", "devices", "memory_limit", "allow_uids", "staging_memory", "[[model]]"} <= lines
    assert set(ModelConfig.model_fields) <= lines


def test_the_commented_example_is_valid(load: Load) -> None:
    """etc/model.toml with its commented keys in use is a config too, with a model of several ranks."""
    text = (Path(__file__).parents[1] / "etc" / "model.toml").read_text()
    config = load(re.sub(r"(?m)^# (?=\w+ = |\[\[model\]\])", "", text).replace("...", ""))
    assert config.models[-1].parallel == Parallel(tensor=2, pipeline=2, expert=True, layers=(23, 25))
    assert len(config.models[-1].devices_for([f"GPU-{name}" for name in ("2d5e", "77c0", "91fe", "a3b8")])) == 4


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> list[str]:
    """What of `value` breaks the keywords of JSON schema that our schema uses; an unknown keyword fails the test."""
    known = {"$ref", "anyOf", "type", "const", "enum", "pattern", "properties", "required", "additionalProperties"}
    known |= {"items", "minItems", "uniqueItems", "exclusiveMinimum", "minimum"}
    assert set(schema) <= known | {"$schema", "$defs", "title", "description", "default"}
    if "$ref" in schema:
        return violations(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root)
    if "anyOf" in schema:
        found = [violations(value, option, root) for option in schema["anyOf"]]
        return [] if [] in found else [problem for option in found for problem in option]
    types: dict[str, Any] = {
        "object": dict,
        "array": list,
        "string": str,
        "integer": int,
        "boolean": bool,
        "null": type(None),
    }
    types["number"] = (int, float)
    if not isinstance(value, types[schema["type"]]):
        return [f"{value!r} is no {schema['type']}"]
    if value != schema.get("const", value) or value not in schema.get("enum", [value]):
        return [f"{value!r} is another value"]
    if schema["type"] == "array":
        return [problem for item in value for problem in violations(item, schema["items"], root)]
    if schema["type"] != "object":
        return []
    unknown = [f"unknown {key}" for key in value if key not in schema["properties"]]
    assert schema["additionalProperties"] is False
    missing = [f"missing {key}" for key in schema.get("required", ()) if key not in value]
    inner = [
        problem
        for key, item in value.items()
        if key in schema["properties"]
        for problem in violations(item, schema["properties"][key], root)
    ]
    return unknown + missing + inner


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_schema_accepts_the_examples(path: Path) -> None:
    """What the loader accepts, the schema accepts."""
    schema = json_schema()
    assert violations(tomllib.loads(path.read_text()), schema, schema) == []


@pytest.mark.parametrize("name", ["GPU-1a", "MIG-1a-2b", "host-12", "cuda:0", "GPU-", "GPU-a/b", "host-x", "xhost-0"])
def test_schema_knows_device_names(name: str) -> None:
    """The schema's pattern accepts the device names that the loader accepts."""
    pattern = json_schema()["properties"]["devices"]["anyOf"][1]["items"]["pattern"]
    assert (re.search(pattern, name) is not None) == is_device_name(name)


def test_schema_refuses_what_the_loader_refuses() -> None:
    """Unknown and missing keys and wrong types are errors of the schema too; every key has a description."""
    schema = json_schema()
    found = violations({"reddy": 1, "ready": "now", "model": [{"name": 1, "epoch": True}]}, schema, schema)
    assert found == ["unknown reddy", "'now' is another value", "unknown epoch", "missing checkpoint", "1 is no string"]
    for properties in (schema["properties"], schema["$defs"]["ModelConfig"]["properties"]):
        assert all("description" in entry or "$ref" in entry for entry in properties.values())


def test_unusable_place_is_an_error(homes: tuple[Path, Path]) -> None:
    """A place that cannot be looked at is an error of its own, not an empty one."""
    with pytest.raises(ConfigError, match=r"aaa\.toml: File name too long"):
        find_config("a" * 300)


@pytest.mark.parametrize("text", ["x = " + "1" * 5000, "x = " + "[" * 5000], ids=["digits", "brackets"])
def test_toml_that_python_chokes_on_is_a_config_error(tmp_path: Path, text: str) -> None:
    """A number too long to convert and brackets too deep to follow are named as the file's fault."""
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="not TOML"):
        load_config(path)


def test_a_user_without_a_home_has_the_other_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no home directory is known, /etc and the explicit directory are still looked in."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("WEIGHTCACHED_CONFIG_DIR", "/explicit")
    monkeypatch.setattr(Path, "home", unknown)
    assert config_directories() == [Path("/explicit"), Path("/etc/weightcached")]
