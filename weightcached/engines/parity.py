"""Whether a model that was attached is the model that a disk load gives: tensor by tensor, and by what it generates.

    python -m weightcached.engines.parity A.json B.json
    python -m weightcached.engines.parity --model qwen3-8b --engine transformers --device cuda:0

The first form compares two descriptions, which engines write with ``WEIGHTCACHED_PARITY=A.json`` in the environment
(`write_if_asked`; "{pid}" in the name becomes the process's). The second loads the model twice in one process, from
disk and from the cache, and compares both, and the tokens that they generate greedily. Exit code 0: they are the same;
1: they differ.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ..client.modules import held_tensors, named_tensors
from ..client.storages import is_plain
from ..client.tensors import contiguous_stride
from ..errors import EngineError, WeightCacheError

if TYPE_CHECKING:
    import torch

VARIABLE = "WEIGHTCACHED_PARITY"
SCHEMA = 1
_CHUNK = 64 << 20  # bytes that are brought to the host at once
_PROMPT = (1, 5, 9, 13, 2, 7, 11, 3)  # ids that every vocabulary has
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Facts:
    """A tensor. `role` is "held" for one in a plain object of the engine, under its path.

    `memory` is what it shares bytes with: the first name of all that do, and its distance from that one in bytes; of
    tensors that share nothing, itself and 0. `digest` is the xxh3-128 of the elements in order; None on meta, where
    there are none. `stride` None is contiguous.
    """

    role: str
    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] | None
    persistent: bool
    device: str
    memory: tuple[str, int]
    digest: str | None


@dataclass(frozen=True, slots=True)
class Description:
    """Every tensor of a module by name, and the scalars that its submodules hold as attributes."""

    module: str
    tensors: dict[str, Facts]
    scalars: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @classmethod
    def from_json(cls, data: Any) -> Description:
        """`EngineError` for what is no description."""
        try:
            if data["schema"] != SCHEMA:
                raise ValueError(f"schema {data['schema']}, this version reads {SCHEMA}")
            tensors = {name: _facts(facts) for name, facts in data["tensors"].items()}
            return cls(data["module"], tensors, dict(data["scalars"].items()))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise EngineError(problem=f"no description of a module: {error!r}") from error

    def save(self, path: str | os.PathLike[str]) -> None:
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Description:
        """`EngineError` for a file that cannot be read, or is no description."""
        try:
            return cls.from_json(json.loads(Path(path).read_text()))
        except (OSError, ValueError) as error:
            raise EngineError(problem=f"{os.fspath(path)} cannot be read: {error}") from error


def _facts(data: dict[str, Any]) -> Facts:
    facts = dict(data)
    facts["shape"] = tuple(facts["shape"])
    facts["stride"] = None if facts["stride"] is None else tuple(facts["stride"])
    facts["memory"] = tuple(facts["memory"])
    return Facts(**facts)


class Difference(NamedTuple):
    """`what` is "missing" (only in the first), "extra" (only in the second), "meta", "scalar" or a field of `Facts`."""

    name: str
    what: str
    first: Any = None
    second: Any = None

    def __str__(self) -> str:
        if self.what in ("missing", "extra"):
            return f"{self.name}: {self.what}"
        return f"{self.name}: {self.what} {self.first} / {self.second}"


def describe(module: torch.nn.Module) -> Description:
    """Reads every byte of the module's parameters, buffers, and tensors that its plain objects hold.

    `EngineError` for one that is more than elements in one memory: sparse, quantised by torch, a wrapper of others.
    """
    from torch.nn.parameter import is_lazy

    tensors: dict[str, tuple[str, bool, torch.Tensor]] = {}
    for name, tensor, role, persistent in named_tensors(module):
        tensors[name] = (role, persistent, tensor)
    for item in held_tensors(module):
        tensors.setdefault(item.path, ("held", False, item.tensor))
    for name, (_, _, tensor) in tensors.items():
        if is_lazy(tensor) or not (tensor.is_meta or is_plain(tensor)):
            raise EngineError(problem=f"{name} cannot be described: {type(tensor).__name__}, {tensor.layout}")
    memory = _memory({name: tensor for name, (_, _, tensor) in tensors.items()})
    digests: dict[tuple[Any, ...], str | None] = {}
    facts = {}
    for name, (part, persistent, tensor) in tensors.items():
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        known = (tensor.device, tensor.data_ptr(), tensor.dtype, shape, stride)
        if known not in digests or tensor.is_meta:
            digests[known] = _digest(tensor)
        contiguous = tensor.is_contiguous() or stride == contiguous_stride(shape)
        dtype = str(tensor.dtype).removeprefix("torch.")
        device = tensor.device.type
        facts[name] = Facts(
            part, shape, dtype, None if contiguous else stride, persistent, device, memory[name], digests[known]
        )
    return Description(type(module).__name__, facts, _scalars(module))


def _memory(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[str, int]]:
    """By the bytes that they cover, since the storage of an attached tensor is its whole slab."""
    spans = []
    found = {name: (name, 0) for name in tensors}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            elements = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + elements * tensor.element_size(), name))
    group: list[tuple[str, int, int, str]] = []
    end = 0
    for span in [*sorted(spans), ("", 0, 0, "")]:  # the last one ends the last group
        if group and (span[0] != group[0][0] or span[1] >= end):
            first = min(group, key=lambda item: item[3])
            found.update({name: (first[3], start - first[1]) for _, start, _, name in group})
            group, end = [], 0
        group.append(span)
        end = max(end, span[2])
    return found


def _digest(tensor: torch.Tensor) -> str | None:
    import torch
    import xxhash

    if tensor.is_meta:
        return None
    state = xxhash.xxh3_128()
    flat = tensor.detach().contiguous().view(-1)
    if flat.stride(0) != 1:  # of one element: torch takes it for contiguous whatever its stride
        flat = flat.clone(memory_format=torch.contiguous_format)
    raw = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    for start in range(0, raw.numel(), _CHUNK):
        state.update(memoryview(raw[start : start + _CHUNK].cpu().numpy()))
    return state.hexdigest()


def _scalars(module: torch.nn.Module) -> dict[str, Any]:
    """Plain attributes of the submodules that JSON has, torch's own ones left out."""
    import torch

    own = set(vars(torch.nn.Module()))
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if name not in own and isinstance(value, bool | int | float | str)
    }


def compare(a: Description, b: Description, *, ignore: Iterable[str] = ()) -> list[Difference]:
    """What differs, by name; a tensor on meta is a difference even if both are. `ignore`: fnmatch patterns of names."""
    patterns = tuple(ignore)
    found = []
    for name in sorted(a.tensors.keys() | b.tensors.keys()):
        first, second = a.tensors.get(name), b.tensors.get(name)
        if first is None or second is None:
            found.append(Difference(name, "extra" if first is None else "missing"))
            continue
        if first.digest is None or second.digest is None:
            found.append(Difference(name, "meta", first.device, second.device))
        for what in Facts.__dataclass_fields__:
            one, other = getattr(first, what), getattr(second, what)
            if one != other and not (what in ("digest", "device") and None in (first.digest, second.digest)):
                found.append(Difference(name, what, one, other))
    for name in sorted(a.scalars.keys() | b.scalars.keys()):
        one, other = a.scalars.get(name), b.scalars.get(name)
        if (type(one), repr(one)) != (type(other), repr(other)):  # by text: NaN is NaN, 1 is not True
            found.append(Difference(name, "scalar", one, other))
    return [item for item in found if not any(fnmatchcase(item.name, pattern) for pattern in patterns)]


def write_if_asked(module: torch.nn.Module) -> Path | None:
    """Writes a description to the file that `WEIGHTCACHED_PARITY` names; None where it names none.

    For an engine's adapter, once a load is done, from disk or from the cache.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    path = Path(name.replace("{pid}", str(os.getpid())))
    describe(module).save(path)
    _log.info("%s: the loaded tensors are described in %s", VARIABLE, path)
    return path


def compare_transformers(name_or_folder: str, device: str | None, tokens: int) -> list[Difference]:
    """Loads from disk and from the cache, beside each other, and compares tensors and `tokens` greedy tokens."""
    from ..client.attach import attach
    from ..client.target import resolve
    from .transformers import from_cache

    attached: Any = from_cache(name_or_folder, device=device)
    folder = name_or_folder
    if not os.path.isdir(folder):
        with attach(name_or_folder, device=device) as weights:
            folder = str(weights.manifest.attributes.get("checkpoint", ""))
    if not os.path.isdir(folder):
        raise EngineError(problem=f"{name_or_folder} does not say from which folder it was cached; name the folder")
    disk = type(attached).from_pretrained(folder, torch_dtype="auto", local_files_only=True)
    disk = disk.requires_grad_(False).to(resolve(device).torch_device).eval()
    # Private scalars are transformers' own notes on how a model was made.
    found = [item for item in compare(describe(disk), describe(attached)) if not _is_private_scalar(item)]
    if tokens and disk.can_generate():
        ours, theirs = _generate(attached, tokens), _generate(disk, tokens)
        if ours != theirs:
            found.append(Difference("generation", "tokens", theirs, ours))
    return found


def _is_private_scalar(item: Difference) -> bool:
    return item.what == "scalar" and item.name.rpartition(".")[2].startswith("_")


def _generate(model: Any, tokens: int) -> list[int]:
    import torch

    prompt = torch.tensor([_PROMPT], device=model.device)
    with torch.no_grad():
        made = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=tokens, num_beams=1
        )
    return [int(token) for token in made[0].tolist()]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives its exit code."""
    parser = argparse.ArgumentParser(prog="python -m weightcached.engines.parity", description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="*", metavar="DESCRIPTION", help="two files that an engine has written")
    parser.add_argument("--model", help="a cached model's name, or its checkpoint folder")
    parser.add_argument("--engine", choices=["transformers"], default="transformers")
    parser.add_argument("--device", help="as for attach")
    parser.add_argument("--tokens", type=int, default=32, help="greedy tokens to compare (default 32, 0: none)")
    parser.add_argument("--ignore", action="append", default=[], metavar="PATTERN", help="names to leave out")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if (len(options.files) != 2) == (options.model is None) or (options.files and options.model):
        parser.error("name two descriptions, or --model")
    try:
        if options.model is not None:
            found = compare_transformers(options.model, options.device, options.tokens)
            found = [item for item in found if not any(fnmatchcase(item.name, pattern) for pattern in options.ignore)]
        else:
            found = compare(*(Description.load(file) for file in options.files), ignore=options.ignore)
    except WeightCacheError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    if options.json:
        text = json.dumps({"schema": SCHEMA, "same": not found, "differences": [item._asdict() for item in found]})
    else:
        text = "\n".join(map(str, found)) if found else "the same"
    sys.stdout.write(f"{text}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
