"""The config file: what it may say, where it is looked for, and its JSON schema.

    ready = "loaded"                    Config
    devices = "all"
    memory_limit = "90%"                MemoryLimit
    [[model]]                           ModelConfig, in file order
    name = "minilm"
    checkpoint = "/models/minilm"

A key that this version does not know is an error, since a setting that is silently ignored is worse than none. Only the
service and its commands import this module: pydantic costs more than a whole attach.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
import tomllib
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    PrivateAttr,
    StrictBool,
    StrictStr,
    ValidationError,
    WithJsonSchema,
)

from .devices import is_device_name
from .errors import ConfigError
from .paths import check_instance

_UNITS = {"B": 1} | {
    prefix + unit: base**power
    for unit, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)")
_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How much of a device may hold weights: a share of what it has (0 < share <= 1) or bytes, the other is None."""

    share: Fraction | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, value: object) -> MemoryLimit:
        """From "90%", "60GiB", "500MB" or an int of bytes. `ValueError` for anything else."""
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(nbytes=value)
        if isinstance(value, str):
            if match := _PERCENT.fullmatch(value.strip()):
                share = Fraction(match[1]) / 100
                if 0 < share <= 1:
                    return cls(share=share)
            elif (match := _SIZE.fullmatch(value.strip())) and match[2] in _UNITS:
                nbytes = int(Fraction(match[1]) * _UNITS[match[2]])
                if nbytes > 0:
                    return cls(nbytes=nbytes)
        raise ValueError(f'{_shown(value)} is no limit; write a share such as "90%", a size such as "60GiB", or bytes')

    def bytes_of(self, total: int) -> int:
        """The limit in bytes on a device of `total` bytes, never more than it has."""
        if self.share is not None:
            return int(total * self.share)
        assert self.nbytes is not None
        return min(self.nbytes, total)


def _shown(value: object) -> str:
    """A value as the file spells it, near enough: `true`, not Python's `True`."""
    return json.dumps(value, default=str, ensure_ascii=False)


def _device_list(value: object) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(f'{_shown(value)} is no list of device names such as ["host-0"]')
    for name in value:
        if not is_device_name(name):
            raise ValueError(f"{_shown(name)} is no device name; GPU-<uuid>, MIG-<uuid> and host-<n> are")
    if len(set(value)) < len(value):
        twice = next(name for name in value if value.count(name) > 1)
        raise ValueError(f"{twice} is listed twice")
    return value


def _service_devices(value: object) -> object:
    return value if value == "all" else _device_list(value)


def _model_devices(value: object) -> list[str]:
    names = _device_list(value)
    if len(names) > 1:
        raise ValueError(f"{len(names)} devices; this version loads a model whole to one device, so name one")
    return names


def _model_name(value: str) -> str:
    if not _MODEL_NAME.fullmatch(value):
        raise ValueError(f"{_shown(value)} is no model name: letters, digits, . _ -, at most 128, first no . or -")
    return value


def _checkpoint_path(value: object) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(f'{_shown(value)} is no path; write one such as "/models/minilm"')
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:  # "~name" of a user whose home is not known
        raise ValueError(f"{_shown(value)}: {error}") from None
    if not path.is_absolute():
        raise ValueError(f"{_shown(value)} is a relative path; write an absolute one, or one that starts with ~")
    return path


_NAME_SCHEMA = {"type": "string", "pattern": r"^((GPU|MIG)-[0-9A-Za-z-]+|host-[0-9]+)$"}
_LIST_SCHEMA = {"type": "array", "items": _NAME_SCHEMA, "minItems": 1, "uniqueItems": True}
_Devices = Annotated[tuple[str, ...], WithJsonSchema(_LIST_SCHEMA)]
_ModelDevices = Annotated[
    tuple[str, ...], BeforeValidator(_model_devices), WithJsonSchema({**_LIST_SCHEMA, "maxItems": 1})
]


class ModelConfig(BaseModel):
    """One [[model]]: which checkpoint is cached under which name, and where."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Annotated[StrictStr, AfterValidator(_model_name)] = Field(
        description="The name clients attach by.", json_schema_extra={"pattern": f"^{_MODEL_NAME.pattern}$"}
    )
    checkpoint: Annotated[Path, PlainValidator(_checkpoint_path), WithJsonSchema({"type": "string"})] = Field(
        description="A folder with *.safetensors files, or one such file; absolute, ~ is the home directory."
    )
    preload: StrictBool = Field(
        True,
        description="Load it when the service starts; false: when `weightcachectl load` or a client that waits asks.",
    )
    devices: _ModelDevices | None = Field(
        None, description="The device it goes to, one in this version; left out: the service's first device."
    )

    _file: Path | None = PrivateAttr(None)

    def device_for(self, devices: list[str]) -> str:
        """Which of the service's devices this model goes to. `ConfigError` if the one it names is not among them."""
        if self.devices is None:
            return devices[0]
        if self.devices[0] not in devices:
            served = ", ".join(devices)
            raise ConfigError(
                file=str(self._file or "config"),
                problem=f"model {self.name}: device {self.devices[0]} is not served here; devices: {served}",
            )
        return self.devices[0]


def _unique_names(models: tuple[ModelConfig, ...]) -> tuple[ModelConfig, ...]:
    first: dict[str, int] = {}
    for index, model in enumerate(models):
        if model.name in first:
            raise ValueError(f'"{model.name}" is the name of model[{first[model.name]}] and of model[{index}]')
        first[model.name] = index
    return models


class Config(BaseModel):
    """A whole config file. `models` is the key [[model]], in file order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    ready: Literal["loaded", "listening"] = Field(
        "loaded", description="When the service reports ready: when every preload is served, or when it takes requests."
    )
    devices: Annotated[Literal["all"] | _Devices, BeforeValidator(_service_devices)] = Field(
        "all", description='The devices served: "all" (every GPU; without one, host-0), or names.'
    )
    memory_limit: Annotated[
        MemoryLimit,
        PlainValidator(MemoryLimit.parse),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer", "exclusiveMinimum": 0}]}),
    ] = Field("90%", validate_default=True, description='Per device: a share "90%", a size "60GiB", or bytes.')
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
        config = Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(file=str(path), problem=_join(_problems(error, data))) from None
    config._file = path
    for model in config.models:
        model._file = path
    if config.devices != "all":
        for model in config.models:
            model.device_for(list(config.devices))
    return config


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
        return "missing; every [[model]] needs it"
    if kind == "value_error":
        return str(entry["ctx"]["error"])
    if entry["loc"] == ("model",) or kind == "model_type":
        return f"{_shown(value)} is not what [[model]] makes; start each model with [[model]] on a line of its own"
    if kind == "bool_type":
        return f"{_shown(value)} is neither true nor false"
    return f"{_shown(value)}: {entry['msg'][:1].lower()}{entry['msg'][1:]}"


def _unknown_key(loc: tuple[int | str, ...]) -> str:
    key = str(loc[-1])
    top = [field.alias or name for name, field in Config.model_fields.items()]
    valid = top if len(loc) == 1 else list(ModelConfig.model_fields)
    if near := difflib.get_close_matches(key, valid, n=1):
        return f'unknown key; did you mean "{near[0]}"?'
    if len(loc) > 1 and key in top:
        return "unknown key in a model; it belongs above the first [[model]]"
    return f"unknown key; valid here: {', '.join(valid)}"
