"""The config file: what it may say, where it is looked for, and its JSON schema.

    ready = "loaded"                    Config
    devices = "all"
    memory_limit = "90%"                MemoryLimit
    [[model]]                           ModelConfig, in file order
    name = "minilm"
    checkpoint = "/models/minilm"
    [cluster]                           ClusterConfig, of `config_cluster`

A key that this version does not know is an error, since a setting that is silently ignored is worse than none. Only the
service and its commands import this module: pydantic costs more than a whole attach.
"""

from __future__ import annotations

import contextlib
import difflib
import math
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    StrictBool,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from .config_cluster import ClusterConfig
from .config_values import (
    CheckpointPath,
    Command,
    Limit,
    ModelDevices,
    ModelName,
    RankCount,
    Rules,
    ServiceDevices,
    StageLayers,
    Staging,
    Uids,
    shown,
)
from .devices import is_host
from .errors import ConfigError
from .parallel.ranks import Parallel, Placement
from .parallel.slicings import parse_name
from .paths import check_instance
from .text import MODEL_NAME

_SIZES = ("tensor_parallel", "pipeline_parallel", "data_parallel")


class ModelConfig(BaseModel):
    """One [[model]]: which checkpoint is cached under which name, cut for which ranks, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ModelName = Field(
        description="The name clients attach by.", json_schema_extra={"pattern": f"^{MODEL_NAME.pattern}$"}
    )
    checkpoint: CheckpointPath = Field(
        description="A folder with *.safetensors files, or one such file; absolute, ~ is the home directory."
    )
    preload: StrictBool = Field(
        True,
        description="Load it when the service starts; false: when `weightcachectl load` or a client that waits asks.",
    )
    pin: StrictBool = Field(
        False, description="Never evict it to make room for other models; `weightcachectl evict` still does."
    )
    replace: Literal["beside", "evict-first"] = Field(
        "beside",
        description="When it is loaded again: beside what is cached, or that goes first if both have no room.",
    )
    dtype: Literal["checkpoint", "float16", "bfloat16", "float32"] = Field(
        "checkpoint", description='The element type of its floating-point weights; "checkpoint": as on disk.'
    )
    tensor_parallel: RankCount = Field(1, description="Ranks that each layer's matrices are cut for.")
    pipeline_parallel: RankCount = Field(1, description="Stages that its layers are split over.")
    pipeline_layers: StageLayers = Field(
        "vllm", description="Which layers a stage holds: as that engine splits them, or the number for each stage."
    )
    data_parallel: RankCount = Field(
        1, description="Replicas; experts are cut, or spread, over the ranks of all of them."
    )
    expert_parallel: StrictBool = Field(
        False, description="Whole experts on each rank, instead of a part of every expert."
    )
    expert_placement: Placement = Field(
        "linear", description="Which experts a rank holds: consecutive ones, or every n-th."
    )
    rules: Rules = Field((), description="How to cut what no built-in rule knows; first match wins.")
    devices: ModelDevices | None = Field(
        None, description="The device of each rank, in rank order; left out: those with the most memory free."
    )
    on_mismatch: Literal["refuse", "reload"] = Field(
        "refuse",
        description="What becomes of an engine that waits with other parallel sizes than these: refused, or the "
        'service loads that slicing as well, as "NAME.tpN" on the first N devices, and gives it out by this name.',
    )
    publisher: Command = Field(
        (),
        description="A command that loads and publishes it in an engine's own layout, run once for each rank, all at "
        'once, instead of the built-in loader; "python" is the one that the service runs on.',
    )

    _file: Path | None = PrivateAttr(None)
    _share: range | None = PrivateAttr(None)  # of the ranks, on this node
    _meeting: tuple[str, int] | None = PrivateAttr(None)  # of a publisher's ranks

    @property
    def ranks_here(self) -> range:
        """The ranks that are on this node, of all `parallel.world`."""
        return range(self.parallel.world) if self._share is None else self._share

    @property
    def meeting(self) -> tuple[str, int] | None:
        """Address and port where the ranks of its publisher meet; None if all are on this node."""
        return self._meeting

    @property
    def parallel(self) -> Parallel:
        """How the model is cut into ranks."""
        return Parallel(
            tensor=self.tensor_parallel,
            pipeline=self.pipeline_parallel,
            data=self.data_parallel,
            expert=self.expert_parallel,
            placement=self.expert_placement,
            layers=self.pipeline_layers,
        )

    def devices_for(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Which of the service's `devices` the ranks go to, in rank order.

        Those that the model names; else the first ones of the kind of the very first, GPUs or host devices.
        `ConfigError` if one is not among them, or if there are too few.
        """
        if self.devices is not None:
            for name in self.devices:
                if name not in devices:
                    raise self._error(f"device {name} is not served here; devices: {', '.join(devices)}")
            return self.devices
        ranks = len(self.ranks_here)
        alike = [name for name in devices if is_host(name) == is_host(devices[0])]
        if len(alike) < ranks:
            raise self._error(
                f"{_ranks(dict(self), ranks)} need {ranks} devices of one kind; "
                f"{len(alike)} served here: {', '.join(alike)}"
            )
        return tuple(alike[:ranks])

    @field_validator("pipeline_layers")
    @classmethod
    def _as_many_as_stages(cls, value: object, info: ValidationInfo) -> object:
        stages = info.data.get("pipeline_parallel")
        if isinstance(value, tuple) and stages is not None and len(value) != stages:
            raise ValueError(f"{shown(value)} for pipeline_parallel = {stages}; write one number for each stage")
        return value

    @field_validator("expert_placement")
    @classmethod
    def _not_in_vain(cls, value: str, info: ValidationInfo) -> str:
        if value != "linear" and info.data.get("expert_parallel") is False:
            raise ValueError(f"{shown(value)} has no effect without expert_parallel = true")
        return value

    @field_validator("devices")
    @classmethod
    def _as_many_as_ranks(cls, value: tuple[str, ...] | None, info: ValidationInfo) -> tuple[str, ...] | None:
        known = all(key in info.data for key in _SIZES)  # one that is missing is wrong itself
        if value is None or not known:
            return value
        ranks = math.prod(info.data[key] for key in _SIZES)
        cluster = (info.context or {}).get("cluster")
        here = ranks if cluster is None else len(cluster.share(ranks))
        if len(value) != here:
            raise ValueError(
                f"{len(value)} {_plural('device', len(value))} for {_ranks(info.data, here)}; "
                "name one for each rank, in rank order"
            )
        return value

    @field_validator("publisher")
    @classmethod
    def _decides_alone(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        for key, default in (("dtype", "checkpoint"), ("rules", ()), ("on_mismatch", "refuse")):
            if value and info.data.get(key, default) != default:
                raise ValueError(f"{key} has no effect with it: the command decides; give it the option that it has")
        return value

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(file=str(self._file or "config"), problem=f"model {self.name}: {problem}")


def _ranks(sizes: dict[str, Any], here: int) -> str:
    """Their number and where it comes from, without sizes of 1: "4 ranks (tensor_parallel 2 x data_parallel 2)".

    `here`: how many of them are on this node.
    """
    ranks = math.prod(sizes[key] for key in _SIZES)
    factors = " x ".join(f"{key} {sizes[key]}" for key in _SIZES if sizes[key] > 1)
    number = f"{ranks} {_plural('rank', ranks)}" + (f" ({factors})" if factors else "")
    return number if here == ranks else f"{here} of {number} on this node"


def _plural(noun: str, number: int) -> str:
    return noun if number == 1 else f"{noun}s"


def _unique_names(models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
    first: dict[str, int] = {}
    for index, model in enumerate(models):
        if model.name in first:
            raise ValueError(f'"{model.name}" is the name of model[{first[model.name]}] and of model[{index}]')
        first[model.name] = index
    for model in models:
        of = parse_name(model.name)
        if of is not None and of[0] in first and models[first[of[0]]].on_mismatch == "reload":
            raise ValueError(f'"{model.name}" is what on_mismatch = "reload" calls a slicing of "{of[0]}"; rename it')
    return models


class Config(BaseModel):
    """A whole config file. `models` is the key [[model]], in file order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ready: Literal["loaded", "listening"] = Field(
        "loaded", description="When the service reports ready: when every preload is served, or when it takes requests."
    )
    devices: ServiceDevices = Field(
        "all", description='The devices served: "all" (every GPU; without one, host-0), or names.'
    )
    memory_limit: Limit = Field(
        "90%", validate_default=True, description='Per device: a share "90%", a size "60GiB", or bytes.'
    )
    allow_uids: Uids = Field(
        (), description="Other users who may attach models and see the status; the service's own user always may."
    )
    staging_memory: Staging = Field(
        "256MiB", validate_default=True, description='Host memory that a load passes bytes through: "256MiB", or bytes.'
    )
    cluster: ClusterConfig | None = Field(None, description="The other nodes, if there are any; all have all models.")
    models: Annotated[tuple[ModelConfig, ...], AfterValidator(_unique_names)] = Field(
        (), alias="model", description="The models, in the order in which they are loaded."
    )

    _file: Path | None = PrivateAttr(None)

    @property
    def file(self) -> Path | None:
        """The file this was read from."""
        return self._file

    def model_named(self, name: str) -> ModelConfig | None:
        """The model of that name, or None."""
        return next((model for model in self.models if model.name == name), None)


def config_directories() -> list[Path]:
    """Where config files are looked for, in order."""
    explicit = os.environ.get("WEIGHTCACHED_CONFIG_DIR")
    xdg = Path(os.environ.get("XDG_CONFIG_HOME") or "")
    own = [Path(explicit).absolute()] if explicit else []
    if xdg.is_absolute():  # the XDG specification ignores relative ones
        own.append(xdg / "weightcached")
    else:
        with contextlib.suppress(RuntimeError):  # neither $HOME nor an entry in the user database
            own.append(Path.home() / ".config" / "weightcached")
    return [*own, Path("/etc/weightcached")]


def find_config(instance: str) -> Path:
    """The config file of a service instance, first found. `ConfigError` with the places looked in if there is none."""
    name = f"{check_instance(instance)}.toml"
    directories = config_directories()
    for directory in directories:
        path = directory / name
        try:
            # lstat: a dangling symlink is found, and then fails by its own name instead of giving way to another file.
            path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise ConfigError(file=str(path), problem=error.strerror) from error
        return path
    places = ", ".join(str(directory) for directory in directories)
    raise ConfigError(file=name, problem=f"not found in {places}; write one there, or name a file with --config")


def load_config(path: Path) -> Config:
    """The config in `path`, whole and checked. `ConfigError` names the file and lists every problem."""
    try:
        data = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(file=str(path), problem=error.strerror) from error
    except UnicodeDecodeError as error:
        raise ConfigError(file=str(path), problem=f"not UTF-8 text at byte {error.start}") from error
    except (ValueError, RecursionError) as error:  # TOMLDecodeError, a number of 5,000 digits, 5,000 brackets
        raise ConfigError(file=str(path), problem=f"not TOML: {error}") from error
    try:
        config = Config.model_validate(data, context={"cluster": _cluster(data)})
    except ValidationError as error:
        raise ConfigError(file=str(path), problem=_join(_problems(error, data))) from None
    config._file = path
    for model in config.models:
        model._file = path
        if config.cluster is not None:
            try:
                model._share = config.cluster.share_of(model)
                model._meeting = config.cluster.meeting_of(model, config.models)
            except ValueError as error:
                raise model._error(str(error)) from None
    if config.devices != "all":
        for model in config.models:
            model.devices_for(config.devices)
    return config


def _cluster(data: dict[str, Any]) -> ClusterConfig | None:
    """The table [cluster] for what depends on it, None without one, and for one that is wrong itself."""
    try:
        return ClusterConfig.model_validate(data["cluster"]) if "cluster" in data else None
    except ValidationError:
        return None


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors and for `weightcached schema`."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Config.model_json_schema()}


def _join(problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems: " + " ".join(f"({number}) {text}" for number, text in enumerate(problems, 1))


def _problems(error: ValidationError, data: dict[str, Any]) -> list[str]:
    """One sentence for each problem, each starting with the key's path in the file."""
    return [f"{_key_path(entry['loc'])}: {_sentence(dict(entry))}" for entry in error.errors(include_url=False)]


def _key_path(loc: tuple[int | str, ...]) -> str:
    """("model", 0, "name") -> "model[0].name"."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path


def _sentence(entry: dict[str, Any]) -> str:
    value, kind = entry["input"], entry["type"]
    if kind == "extra_forbidden":
        return _unknown_key(entry["loc"])
    if kind == "missing":
        return f"missing; every {'[cluster]' if entry['loc'][0] == 'cluster' else '[[model]]'} needs it"
    if kind == "value_error":
        return str(entry["ctx"]["error"])
    if entry["loc"] == ("cluster",) and kind == "model_type":
        return f"{shown(value)} is not what [cluster] makes; start it with [cluster] on a line of its own"
    if entry["loc"] == ("model",) or kind == "model_type":
        return f"{shown(value)} is not what [[model]] makes; start each model with [[model]] on a line of its own"
    if kind == "bool_type":
        return f"{shown(value)} is neither true nor false"
    return f"{shown(value)}: {entry['msg'][:1].lower()}{entry['msg'][1:]}"


def _unknown_key(loc: tuple[int | str, ...]) -> str:
    key = str(loc[-1])
    top = [field.alias or name for name, field in Config.model_fields.items()]
    inner = list(ModelConfig.model_fields)
    if loc[0] == "cluster" and len(loc) > 1:
        inner = list(ClusterConfig.model_fields)
        if key not in inner and key in top:
            return "unknown key in [cluster]; it belongs above it"
    valid, elsewhere = (top, inner) if len(loc) == 1 else (inner, top)
    if key in elsewhere:
        return (
            "unknown key at the top; it belongs below a [[model]]"
            if elsewhere is inner
            else "unknown key in a model; it belongs above the first [[model]]"
        )
    if near := difflib.get_close_matches(key, valid, n=1):
        return f'unknown key; did you mean "{near[0]}"?'
    return f"unknown key; valid here: {', '.join(valid)}"
