"""`safe_open` as the safetensors library has it, its tensors from the cache where the file is cached.

The library's own file is always opened too: it reads the header and no more, and whatever is asked that is not a
tensor's bytes, errors among it, is its answer.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal

import safetensors

from ..errors import ModelError
from .find import TROUBLE, Found, Stat, find, miss, stat_of, trouble

if TYPE_CHECKING:
    import torch

    from .shared import Attachment

Mode = Literal["private", "map"]

RealFile: Any = safetensors.safe_open  # the library's, whatever `hook` puts in its place later

VARIABLE = "WEIGHTCACHED_SAFETENSORS"  # of the environment: "map" is the mode, any other word is for `hook`
_TORCH = ("pt", "torch", "pytorch")  # names of the framework, as the library takes them


class _AlsoReal(type):
    """The library's own file is an instance too: that is what opening a file that is not cached gives."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, RealFile)


class safe_open(metaclass=_AlsoReal):
    """Opens a safetensors file: `safetensors.safe_open`, with its arguments, methods and errors.

    Args:
        mode: what a tensor from the cache is. "private" (the default): the caller's own to write, as the library's
            are; a copy on the GPU, copy-on-write memory on the host. "map": the cached memory itself, which takes no
            memory on the GPU and is read-only there: a write is a CUDA error that ends the process's use of the GPU.
            None takes ``WEIGHTCACHED_SAFETENSORS=map`` from the environment, else "private".

    Gives the library's own object if the file is not cached on the wanted device. Tensors from the cache are those of
    this file as it was when it was opened; they keep the shard in use as long as they share its memory.
    """

    _file: Any
    _cached: _CachedFile | None  # None: closed, and the library raises first

    def __new__(
        cls, filename: Any, framework: str, device: Any = "cpu", *, mode: Mode | None = None, **options: Any
    ) -> safe_open:
        mode = chosen_mode(mode)
        before = stat_of(filename)
        file = RealFile(filename, framework, device, **options)
        if framework not in _TORCH or before is None:
            return file  # type: ignore[no-any-return]
        found = find(filename, before, device)
        if found is None or stat_of(filename) != before:  # replaced while it was opened: which one is open?
            return file  # type: ignore[no-any-return]
        opened = object.__new__(cls)
        opened._file = file
        opened._cached = _CachedFile(found, filename, before, mode)
        return opened

    def keys(self) -> list[str]:
        """Names of the tensors in the file."""
        names: list[str] = self._file.keys()
        return names

    def offset_keys(self) -> list[str]:
        """Names of the tensors in the file, in the order of their bytes."""
        names: list[str] = self._file.offset_keys()
        return names

    def metadata(self) -> dict[str, str] | None:
        """The header's strings."""
        metadata: dict[str, str] | None = self._file.metadata()
        return metadata

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        part = self._file.get_slice(name)
        assert self._cached is not None
        found = self._cached.tensor(name, part)
        if found is None:
            return self._file.get_tensor(name)
        wait_for_copies(found)
        return found

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor of the file, in the order of their bytes."""
        names = self._file.offset_keys()
        assert self._cached is not None
        found = {name: self._cached.tensor(name, self._file.get_slice(name)) for name in names}
        wait_for_copies(*(tensor for tensor in found.values() if tensor is not None))
        return {name: self._file.get_tensor(name) if tensor is None else tensor for name, tensor in found.items()}

    def get_slice(self, name: str) -> CachedSlice:
        """A tensor to be indexed; nothing is read before."""
        part = self._file.get_slice(name)
        assert self._cached is not None
        return CachedSlice(self._cached, name, part)

    def __enter__(self) -> safe_open:
        self._file.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.__exit__(*exc_info)
        self._cached = None


class CachedSlice:
    """What `safe_open.get_slice` gives: shape and dtype as in the header, and parts of the tensor by indexing."""

    def __init__(self, cached: _CachedFile, name: str, part: Any) -> None:
        self._cached = cached
        self._name = name
        self._part = part

    def get_shape(self) -> list[int]:
        """The whole tensor's shape."""
        shape: list[int] = self._part.get_shape()
        return shape

    def get_dtype(self) -> str:
        """The dtype by its name in the format, such as "F32"."""
        dtype: str = self._part.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self._cached.tensor(self._name, self._part, index, whole=False)
        if found is None:
            return self._part[index]
        wait_for_copies(found)
        return found


class _CachedFile:
    """The cached tensors of one opened file. Attached at the first tensor: many open a file for its names only.

    `shared` imports `RealFile` from here, so it is imported where it is used.
    """

    def __init__(self, found: Found, path: Any, stat: Stat, mode: Mode) -> None:
        self._found = found
        self._path = path
        self._stat = stat
        self._mode = mode
        self._attachment: Attachment | None = None
        self._given_up = False  # from then on all that this opening is asked for is read from disk

    def tensor(self, name: str, part: Any, index: Any = ..., *, whole: bool = True) -> torch.Tensor | None:
        """The tensor, or the part of it that `index` means; None if it has to be read from disk.

        A copy on a GPU may not be finished yet: `wait_for_copies` before it is given out. `part` is the library's slice
        of it. Errors of an index are torch's own, as they are from the library.
        """
        from .shared import serves

        dtype, shape = part.get_dtype(), part.get_shape()
        if not serves(dtype) or (dtype == "F4" and not whole):  # the library's slices of F4 are its own matter
            return None
        attachment = self._attach()
        if attachment is None or not (attachment.on_host or _is_basic(index)):
            return None
        entry = attachment.entry(name, dtype, shape)
        if entry is None:
            miss(self._path, f"{name} cannot be told from a tensor of another file, or is not cached as it is here")
            return None
        try:
            view = attachment.view(entry)
        except TROUBLE as error:
            trouble(self._found.socket, error)
            self._attachment, self._given_up = None, True
            return None
        if not whole:
            view = view[index]
        return view if attachment.on_host or self._mode == "map" else view.clone()

    def _attach(self) -> Attachment | None:
        """The attachment of this opening of the file, None if the cache turned out not to work."""
        from .shared import attaching

        attachment = self._attachment
        if attachment is not None and attachment.lost is None:  # without the lock, since every tensor comes by here
            return attachment
        with attaching():
            if self._attachment is not None and (why := self._attachment.lost) is not None:
                miss(self._path, f"the memory of {self._found.model} is lost: {why}")
                self._attachment, self._given_up = None, True
            if self._attachment is None and not self._given_up:
                self._attachment = self._acquire()
                self._given_up = self._attachment is None
            return self._attachment

    def _acquire(self) -> Attachment | None:
        """`shared.acquire`; None has been logged with its reason."""
        from .shared import acquire

        try:
            made = acquire(self._found, self._path, self._stat)
        except ModelError as error:  # it has been evicted since it was found
            miss(self._path, str(error))
            return None
        except TROUBLE as error:
            trouble(self._found.socket, error)
            return None
        if made is None:
            miss(self._path, f"{self._found.model} has been replaced since it was found")
        return made


def wait_for_copies(*tensors: torch.Tensor) -> None:
    """Waits until tensors on a GPU are copied: the memory that they are copied from may be unmapped next."""
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        import torch

        torch.cuda.current_stream(device).synchronize()


def chosen_mode(mode: str | None = None) -> Mode:
    """`mode`, or what the environment asks for. `ValueError` for another word."""
    if mode is None:
        return "map" if os.environ.get(VARIABLE, "").lower() == "map" else "private"
    if mode not in ("private", "map"):
        raise ValueError(f"mode={mode!r}; it must be one of private, map")
    return "map" if mode == "map" else "private"


def _is_basic(index: Any) -> bool:
    """Whether an index is made of integers, slices, None and Ellipsis.

    Others are left to the library on a GPU: torch checks them by an assertion on the device, which ends its use.
    """
    items = index if isinstance(index, tuple) else (index,)
    return all(item is None or item is ... or type(item) in (int, slice) for item in items)
