"""The reader's answers to made-up files, each held against the oracle and the safetensors library.

Shared by the property tests and the fuzz targets: all raise for an answer that is wrong, whatever it is, and return for
one that is right.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.checkpoint.files import INDEX
from tests.checkpoint.mutate import last_end
from tests.checkpoint.oracle import Pairs, check_accepted, check_refused, library_refusal, require
from weightcached.checkpoint.fileset import open_checkpoint
from weightcached.checkpoint.header import Header, read_header
from weightcached.errors import CheckpointError


def read(content: bytes, size: int) -> Header:
    """The header of a file of `size` bytes that begins with `content`."""
    fd = os.memfd_create("file", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        return read_header(fd, size, "model.safetensors")
    finally:
        os.close(fd)


def judge_header(content: bytes, size: int) -> str | None:
    """The reader's problem, None when it accepts. Raises unless oracle and library agree with the answer."""
    content = content[:size]
    try:
        found = read(content, size)
    except CheckpointError as error:
        require(error.file == "model.safetensors", "a refusal names its file", error.file)
        check_refused(content, size, error.problem)
        return str(error.problem)
    check_accepted(content, size, found)
    refusal = library_refusal(content, size)
    require(refusal is None, "nothing is accepted that the library refuses", refusal, content[:2000])
    return None


def data_bytes(text: bytes) -> int:
    """The bytes of data that a header asks for, 0 where it asks for none or more than a file system has."""
    try:
        tree = json.loads(text, object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        return 0
    end = last_end(tree) if isinstance(tree, Pairs) else 0
    return end if end < 2**40 else 0


def judge_index(folder: Path) -> None:
    """Raises unless the folder's checkpoint is refused with `CheckpointError`, or is what its index says."""
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        require(Path(error.file).parent == folder, "a refusal names its file", error.file)
        return
    with checkpoint:
        said = json.loads((folder / INDEX).read_bytes())["weight_map"]
        tensors = [(tensor.name, file.name) for file in checkpoint.files for tensor in file.tensors]
        require(dict(tensors) == said and len(tensors) == len(said), "what is loaded is what the index says", tensors)
        for file in checkpoint.files:
            held = {tensor.name for tensor in file.header.tensors}
            require(held <= set(said), "no tensor that the index does not know", held)
            opened = os.path.realpath(f"/proc/self/fd/{file.fd.fileno()}")
            require(os.path.dirname(opened) == os.path.realpath(folder), "no file of another folder", opened)


def judge_config(folder: Path) -> None:
    """Raises unless the folder's checkpoint is refused with `CheckpointError`, or has what a shard's key is made of."""
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError as error:
        require(Path(error.file).parent == folder, "a refusal names its file", error.file)
        return
    with checkpoint:
        config = json.loads((folder / "config.json").read_bytes())
        require(json.dumps(checkpoint.config) == json.dumps(config), "the config is the file's")
        for name in (checkpoint.architecture, (checkpoint.quantization or {}).get("quant_method")):
            if isinstance(name, str):
                name.encode()
        require(isinstance(checkpoint.architecture, str | None), "a name or none", checkpoint.architecture)
