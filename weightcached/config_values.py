"""The values that a config file may hold: each from what TOML makes of it, or `ValueError` with what would be right.

Each type at the end is what pydantic makes of one key, with its JSON schema; `config` says which key is which.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, get_args

from pydantic import AfterValidator, BeforeValidator, PlainValidator, StrictStr, WithJsonSchema

from .devices import is_device_name, is_host
from .parallel.custom import parse_rules
from .parallel.ranks import LayerSplit
from .text import MODEL_NAME

MAX_UID = 2**32 - 2  # the last one is no user (setresuid(2))
MIN_STAGING = 8 << 20  # bytes: two blocks of the digest, one to read while the other is copied

_UNITS = {"B": 1} | {
    prefix + unit: base**power
    for unit, base in (("iB", 1024), ("B", 1000))
    for power, prefix in enumerate("KMGT", start=1)
}
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B)")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How much of a device may hold weights: a share of what it has (0 < share <= 1) or bytes, the other is None."""

    share: Fraction | None = None
    nbytes: int | None = None

    @classmethod
    def parse(cls, value: object) -> MemoryLimit:
        """From "90%", "60GiB", "500MB" or an int of bytes. `ValueError` for anything else."""
        if nbytes := _positive_bytes(value):
            return cls(nbytes=nbytes)
        if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())):
            share = Fraction(match[1]) / 100
            if 0 < share <= 1:
                return cls(share=share)
        raise ValueError(f'{shown(value)} is no limit; write a share such as "90%", a size such as "60GiB", or bytes')

    def bytes_of(self, total: int) -> int:
        """The limit in bytes on a device of `total` bytes, never more than it has."""
        if self.share is not None:
            return int(total * self.share)
        assert self.nbytes is not None
        return min(self.nbytes, total)


def shown(value: object) -> str:
    """A value as the file spells it, near enough: `true`, not Python's `True`."""
    return json.dumps(value, default=str, ensure_ascii=False)


def _positive_bytes(value: object) -> int | None:
    """Bytes from "60GiB", "500MB" or an int; None for anything else, and for less than a byte."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())) and match[2] in _UNITS:
        value = int(Fraction(match[1]) * _UNITS[match[2]])
    return value if _is_int(value) and value > 0 else None


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _staging(value: object) -> int:
    nbytes = _positive_bytes(value)
    if nbytes is None:
        raise ValueError(f'{shown(value)} is no size; write one such as "256MiB", or bytes')
    if nbytes < MIN_STAGING:
        raise ValueError(f"{shown(value)} is too little; a load needs {MIN_STAGING >> 20}MiB at least")
    return nbytes


def _device_list(value: object) -> list[str]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise ValueError(f'{shown(value)} is no list of device names such as ["host-0"]')
    for name in value:
        if not is_device_name(name):
            raise ValueError(f"{shown(name)} is no device name; GPU-<uuid>, MIG-<uuid> and host-<n> are")
    if len(set(value)) < len(value):
        twice = next(name for name in value if value.count(name) > 1)
        raise ValueError(f"{twice} is listed twice")
    return value


def _service_devices(value: object) -> object:
    return value if value == "all" else _device_list(value)


def _model_devices(value: object) -> list[str]:
    names = _device_list(value)
    other = next((name for name in names if is_host(name) != is_host(names[0])), None)
    if other is not None:
        raise ValueError(f"{names[0]} and {other} are of two kinds; a model goes to GPUs or to host devices")
    return names


def _model_name(value: str) -> str:
    if not MODEL_NAME.fullmatch(value):
        raise ValueError(f"{shown(value)} is no model name: letters, digits, . _ -, at most 128, first no . or -")
    return value


def _checkpoint_path(value: object) -> Path:
    if not isinstance(value, str) or not value:
        raise ValueError(f'{shown(value)} is no path; write one such as "/models/minilm"')
    try:
        path = Path(value).expanduser()
    except RuntimeError as error:  # "~name" of a user whose home is not known
        raise ValueError(f"{shown(value)}: {error}") from None
    if not path.is_absolute():
        raise ValueError(f"{shown(value)} is a relative path; write an absolute one, or one that starts with ~")
    return path


def _uid_list(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(_is_int(uid) and 0 <= uid <= MAX_UID for uid in value):
        raise ValueError(f"{shown(value)} is no list of user ids such as [1001, 1002]; `id -u NAME` prints one")
    if len(set(value)) < len(value):
        twice = next(uid for uid in value if value.count(uid) > 1)
        raise ValueError(f"{twice} is listed twice")
    return tuple(value)


def _rank_count(value: object) -> int:
    if not _is_int(value) or value < 1:
        raise ValueError(f"{shown(value)} is no number of ranks; write 1 or more")
    return value


def _stage_layers(value: object) -> object:
    if value in get_args(LayerSplit):
        return value
    if isinstance(value, list) and value and all(_is_int(layers) and layers > 0 for layers in value):
        return tuple(value)
    raise ValueError(
        f'{shown(value)} splits no layers; write "vllm", "transformers", or the number of layers of each stage, '
        "such as [17, 15]"
    )


def _rule_list(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(rule, str) for rule in value):
        raise ValueError(f"{shown(value)} is no list of rules, each a string")
    parse_rules(value)
    return tuple(value)


def _command(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) and "\0" not in word for word in value):
        raise ValueError(
            f"{shown(value)} is no command; write its words as a list, "
            'such as ["python", "-m", "weightcached.engines.vllm", "preload"]'
        )
    if value and not value[0]:
        raise ValueError("the first word is empty; it names the program")
    return tuple(value)


_NAME_SCHEMA = {"type": "string", "pattern": r"^((GPU|MIG)-[0-9A-Za-z-]+|host-[0-9]+)$"}
_LIST_SCHEMA = {"type": "array", "items": _NAME_SCHEMA, "minItems": 1, "uniqueItems": True}
_BYTES_SCHEMA: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "integer", "exclusiveMinimum": 0}]}
_SPLIT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string", "enum": list(get_args(LayerSplit))},
        {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
    ]
}
_Names = Annotated[tuple[str, ...], WithJsonSchema(_LIST_SCHEMA)]

ModelName = Annotated[StrictStr, AfterValidator(_model_name)]
CheckpointPath = Annotated[Path, PlainValidator(_checkpoint_path), WithJsonSchema({"type": "string"})]
ServiceDevices = Annotated[Literal["all"] | _Names, BeforeValidator(_service_devices)]
ModelDevices = Annotated[_Names, BeforeValidator(_model_devices)]
Limit = Annotated[MemoryLimit, PlainValidator(MemoryLimit.parse), WithJsonSchema(_BYTES_SCHEMA)]
Staging = Annotated[int, PlainValidator(_staging), WithJsonSchema(_BYTES_SCHEMA)]
Uids = Annotated[
    tuple[int, ...],
    PlainValidator(_uid_list),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MAX_UID}}),
]
RankCount = Annotated[int, PlainValidator(_rank_count), WithJsonSchema({"type": "integer", "minimum": 1})]
StageLayers = Annotated[LayerSplit | tuple[int, ...], PlainValidator(_stage_layers), WithJsonSchema(_SPLIT_SCHEMA)]
_STRINGS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "string"}}
Rules = Annotated[tuple[str, ...], PlainValidator(_rule_list), WithJsonSchema(_STRINGS_SCHEMA)]
Command = Annotated[tuple[str, ...], PlainValidator(_command), WithJsonSchema(_STRINGS_SCHEMA)]
