"""What the service manager hands back at a start: shards that an earlier process of this service held.

Only a shard that is whole and is what its manifest says goes into the vault; everything else is closed here and removed
from the store, with a line in the log. A shard of a model that the config does not list any more is adopted all the
same: it stays until it is evicted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..devices import is_host
from ..errors import DeviceError, ManifestError, WeightCacheError
from ..fds import OwnedFd
from ..shard.manifest import ManifestHead
from ..trace import point
from ..wire.validate import parse_manifest_head
from ..worker.slabs import check_slabs
from .store import ShardName, Store, parse_name
from .vault import Vault
from .verify import inspect

INSPECT_PAUSES = (0.5, 2.0)  # seconds before another try when a device's driver gives no answer
_log = logging.getLogger(__name__)

Inspect = Callable[[str, Sequence[tuple[str, list[OwnedFd]]]], Awaitable[list[WeightCacheError | None]]]


@dataclass(slots=True, eq=False)
class Group:
    """The descriptors that came under the names of one shard, by the number of their part. Owned until `close`."""

    name: ShardName
    parts: dict[int, OwnedFd] = field(default_factory=dict)
    head: ManifestHead | None = None  # once it is checked

    @property
    def names(self) -> list[str]:
        return [self.name.part(number) for number in self.parts]

    @property
    def label(self) -> str:
        model = f"{self.head.model} on " if self.head is not None else ""
        return f"{model}{self.name.device}, generation {self.name.generation}"

    @property
    def descriptors(self) -> list[OwnedFd]:
        """The manifest, then the slabs."""
        return [self.parts[number] for number in sorted(self.parts)]

    def close(self) -> None:
        for item in self.parts.values():
            item.close()


async def adopt(
    handed: Iterable[tuple[str, OwnedFd]],
    devices: Collection[str],
    vault: Vault,
    store: Store,
    inspect_slabs: Inspect = inspect,
) -> None:
    """Takes over all descriptors that were handed back: into the vault what is good, the rest is dropped.

    `devices`: those that are served. Where the driver of one gives no answer, its shards are taken over with a warning:
    whoever maps a slab checks the same, and one broken GPU must not cost what is cached on the others.
    """
    groups = _group(handed, store)
    try:
        for group in list(groups):
            try:
                group.head = await asyncio.to_thread(_check, group, devices)
            except WeightCacheError as wrong:
                _drop(group, groups, store, wrong)
        for device in sorted({group.name.device for group in groups if not is_host(group.name.device)}):
            there = [group for group in groups if group.name.device == device]
            for group, error in zip(there, await _inspect(device, there, inspect_slabs), strict=True):
                if error is not None:
                    _drop(group, groups, store, error)
        while groups:
            group = groups.pop(0)
            assert group.head is not None
            _log.info("adopted %s: %d bytes", group.label, group.head.nbytes)
            vault.adopt(group.head, group.descriptors)
        point("service.adopted")
    finally:
        for group in groups:
            group.close()


def _group(handed: Iterable[tuple[str, OwnedFd]], store: Store) -> list[Group]:
    """Groups in the order of their names; what has no name of ours is closed and removed."""
    groups: dict[ShardName, Group] = {}
    unknown: set[str] = set()
    for name, item in handed:
        found = parse_name(name)
        if found is None:
            unknown.add(name)
            item.close()
            continue
        group = groups.setdefault(found[0], Group(found[0]))
        if found[1] in group.parts:  # the newest came first; the store removes all of a name together
            item.close()
        else:
            group.parts[found[1]] = item
    if unknown:
        _log.warning("the service manager kept what is none of ours, it is removed: %s", ", ".join(sorted(unknown)))
        store.remove(sorted(unknown))
    return [groups[name] for name in sorted(groups)]


def _check(group: Group, devices: Collection[str]) -> ManifestHead:
    """The head of a shard that is whole and, as far as can be told without its device, good."""
    if 0 not in group.parts:
        raise ManifestError(problem=f"the manifest is not among the {len(group.parts)} parts that are there")
    head = parse_manifest_head(group.parts[0].fileno())
    if ShardName.of(head) != group.name:
        raise ManifestError(
            problem=f"the manifest is that of {head.model} on {head.device}, generation {head.generation}"
        )
    if group.name.device not in devices:
        raise DeviceError(device=group.name.device, problem="is not served any more")
    missing = sorted(set(range(1, len(head.slabs) + 1)) - set(group.parts))
    if missing:
        raise ManifestError(problem=f"slab {missing[0]} of {len(head.slabs)} is missing")
    check_slabs(head, group.descriptors[1:])
    return head


async def _inspect(device: str, groups: list[Group], inspect_slabs: Inspect) -> list[WeightCacheError | None]:
    shards = [(group.label, group.descriptors) for group in groups]
    for pause in (*INSPECT_PAUSES, None):
        try:
            return await inspect_slabs(device, shards)
        except WeightCacheError as error:
            if pause is None:
                _log.error("%s; its shards are adopted unchecked, clients check them when they map them", error)
            else:
                _log.warning("%s; another try in %.1f s", error, pause)
                await asyncio.sleep(pause)
    return [None] * len(groups)


def _drop(group: Group, groups: list[Group], store: Store, error: WeightCacheError) -> None:
    _log.error("%s, was kept by the service manager and is dropped: %s", group.label, error)
    groups.remove(group)
    store.remove(group.names)
    group.close()
