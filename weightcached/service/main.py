"""The service's main process: from the config file to ready, and from SIGTERM to the end.

    claims        one lock and socket per device, one for the service itself
    workers       one process per device, each kept running
    loads         the queue of models and the loader process of the current one
    vault         copies of every published shard's descriptors
    store         copies of those that the service manager keeps
    digests       processes that read what engines loaded, for its digest
    verifications processes that compare what is cached with its checksums
    health        the process that watches the GPUs for errors
    cluster       the other nodes, if there are any
    control       the socket of weightcachectl
    notifier      what systemd is told

Everything runs on one asyncio loop; nothing on it blocks. SIGTERM and SIGINT stop, SIGHUP reloads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .. import __version__
from ..config import Config, ModelConfig, load_config
from ..devices import Device
from ..errors import DeviceError, NoSuchModel, WeightCacheError
from ..fds import OwnedFd, raise_descriptor_limit
from ..paths import control_path, ensure_runtime_dir, lock_path, socket_path
from .adopt import adopt
from .claim import Claim, Owner
from .cluster import Cluster
from .control import Control
from .digests import Digests
from .health import Health, Recovery, watched
from .loads import Loads
from .models import Model, keep_together, release_kept, start_failure, summary
from .notify import Notifier
from .placement import Placement, devices_of
from .reload import (
    cached_ranks,
    changed_files,
    left_over,
    loads_of_start,
    only_at_restart,
    read_changes,
    weights_of,
)
from .shards import Shards
from .slicings import kept, order_of, slicings_of
from .store import Store, take_listen_fds
from .underway import UnderWay
from .vault import Vault
from .verify import Verifications
from .workers import WorkerProcess

WORKER_START_SECONDS = 60.0
EXTEND_SECONDS = 10.0  # between two extensions of systemd's start timeout while models are loading
_log = logging.getLogger(__name__)


def serve(config_file: Path, instance: str, take_over: bool = False) -> int:
    """Runs the service until it is stopped. Returns 0; every failure is an error of the tree with its exit code."""
    handed = take_listen_fds()
    with contextlib.ExitStack() as held:
        for _, item in handed:
            held.callback(item.close)
        raise_descriptor_limit()
        config = load_config(config_file)
        devices = devices_of(config, to_lose=bool(handed))
        shared = bool(config.allow_uids)
        ensure_runtime_dir(shared=shared)
        owner = Owner.this_process(instance)

        def take(lock: Path, path: Path, what: str) -> Claim:
            claim = Claim.take(lock, path, owner, what=what, take_over=take_over, shared=shared)
            held.callback(claim.close)
            return claim

        names = [device.name for device in devices]
        paths = {name: socket_path(name, create=True, shared=shared) for name in names}
        claims = {name: take(lock_path(name), path, name) for name, path in paths.items()}
        control = control_path(instance)
        own = take(control.with_suffix(".lock"), control, f"instance {instance}")
        notifier = Notifier.from_environ()
        held.callback(notifier.close)
        store = Store.from_environ()
        held.callback(store.close)
        return asyncio.run(Service(config, instance, devices, claims, own, notifier, store, handed).run())


class Service:
    """All parts together. Borrows the claims, the notifier and the store; owns the vault and the processes."""

    def __init__(
        self,
        config: Config,
        instance: str,
        devices: list[Device],
        claims: dict[str, Claim],
        own: Claim,
        notifier: Notifier,
        store: Store | None = None,
        handed: Sequence[tuple[str, OwnedFd]] = (),
    ) -> None:
        """`handed`: descriptors from an earlier process of this service, with their names in the store."""
        self.config = config
        self._started_with = config
        self._reloading = asyncio.Lock()
        self._signalled: asyncio.Task[None] | None = None
        self.instance = instance
        self.devices = devices
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.ready = False
        self.models: dict[str, Model] = {}
        self._store = store or Store(None)
        self._handed = handed
        self.vault = Vault(self._store)
        staging = lambda: self.config.staging_memory  # noqa: E731
        self.cluster = Cluster(config, lambda: self.models, self._cluster_changed, to_lose=bool(handed))
        under_way = UnderWay(control_path(instance).with_suffix(".loading"))
        self.loads = Loads(
            self._model_changed, staging, self.vault, lambda *it: shards.withdraw(*it), self.cluster.joint, under_way
        )
        self.digests = Digests(lambda device, *told: self.workers[device].digested(*told))
        self.verifications = Verifications()
        self._control = Control(self, own.listener)
        shards = Shards(
            self,
            load=self._load,
            take_over=self._take_over,
            changed=self._model_changed,
            tell_workers=self._tell_workers,
            announce=self._control.announce,
        )
        self.workers = {
            device.name: WorkerProcess(
                device.name,
                config.memory_limit.bytes_of(device.memory.total),
                instance,
                claims[device.name],
                self.vault,
                shards,
                config.allow_uids,
            )
            for device in devices
        }
        self._placement = Placement.of(config, {item.name: item.memory.free for item in devices}, to_lose=bool(handed))
        self.health = Health(watched(devices), Recovery(self, self._model_changed, self._control.holders))
        self._notifier = notifier
        self._stopping = asyncio.Event()
        self._state_changed = asyncio.Event()

    async def run(self) -> int:
        """Starts, serves and stops. Returns the exit code 0, or raises why it could not start or go on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        loop.add_signal_handler(signal.SIGHUP, self._reload_by_signal)
        self.vault.filled.clear()  # workers start meanwhile
        storing = asyncio.create_task(self._store.run(), name="store")
        background = [storing, *(worker.start() for worker in self.workers.values())]
        background.append(asyncio.create_task(self.loads.run(), name="loads"))
        background.append(asyncio.create_task(self.digests.run(), name="digests"))
        background.append(asyncio.create_task(self.cluster.run(), name="cluster"))
        background.append(asyncio.create_task(self._keep_alive(), name="keep alive"))
        stop = asyncio.create_task(self._stopping.wait(), name="stop")
        pending: set[asyncio.Task[Any]] = {stop, asyncio.create_task(self._start(), name="start"), *background}
        try:
            while not self._stopping.is_set():
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            return 0
        except WeightCacheError as error:
            self.cluster.fails(error)
            raise
        finally:
            await self._end(pending - {storing}, storing)

    def stop(self) -> None:
        """Begins to stop; `run` returns when everything has ended."""
        self._stopping.set()

    def load(self, name: str) -> Model:
        """Queues a configured model, or leaves it if it is there or on its way. `NoSuchModel` otherwise."""
        model = self.models.get(name)
        if model is None:
            raise NoSuchModel(model=name, device=f"weightcached@{self.instance}", known=sorted(self.models))
        if model.state != "cached" or model.error is not None:  # the last load failed, an older generation is served
            self._load([model])
        return model

    def load_together(self, models: list[Model]) -> None:
        """Loads the models of a start, a reload or a device's return, which do not evict one another."""
        keep_together(self.models.values(), models)
        self._load(models)
        release_kept(self.models.values())
        self._tell_workers()

    async def reload(self) -> dict[str, Any]:
        """Reads the config again, loads what is new or changed, and calls off loads of models that are in it no more.

        `ConfigError` changes nothing. Returns {"loading": names of models queued, "left": copies that no model of the
        config stands for any more, which stay cached until they are evicted, "restart": settings that only a restart
        applies}.
        """
        async with self._reloading:
            await asyncio.to_thread(self._placement.look_again, self.config.file)
            changes = read_changes(self.config, self.models, self.vault, self._placement)
            # Reading headers may take long, or hang with its disk: not on the loop.
            loading = await asyncio.to_thread(changes.models_to_load)
            self.config = changes.config
            before = list(self.models.values())
            self._set_models(changes.config)
            loading += slicings_of(loading, self.models)
            # One that began meanwhile may be loading what the file meant before; `Loads` knows.
            self.load_together(
                [item for item in self.models.values() if item.name in loading or item.state == "loading"]
            )
            for model in before:
                if model.name not in self.models:
                    await self.loads.call_off(model)
        restart = only_at_restart(self._started_with, self.config)
        for setting in restart:
            _log.warning("reload: %s changed; it takes effect at the next restart", setting)
        return {"loading": loading, "left": left_over(self.models, self.vault, self.workers), "restart": restart}

    # Internals.

    def _set_models(self, config: Config) -> None:
        """Takes over the config's models; what is cached of them already, by whatever publisher, counts as cached."""
        previous, self.models = self.models, {}
        for item in config.models:
            model = self._take_over(item, self._placement.devices_for(item), previous.get(item.name))
            model.order = order_of(item, self._placement.served)
        held = {shard.model for name in self.workers for shard in self.vault.of_device(name)}
        for item in kept(self.models, previous.values(), held):
            self._take_over(item, item.devices or (), previous.get(item.name))
        self._tell_workers()

    def _take_over(self, item: ModelConfig, devices: tuple[str, ...], before: Model | None) -> Model:
        model = self.models[item.name] = before or Model(item, devices)
        model.configure(item, devices)
        if before is None:
            for shard in cached_ranks(model, self.vault):
                model.published(shard.device, shard.generation, shard.nbytes, weights_of(shard))
        if problem := self._placement.problem(devices):
            self._refuse(model, problem)
        return model

    def _load(self, models: list[Model]) -> None:
        for model in models:
            if problem := self._placement.problem(model.devices):
                self._refuse(model, problem)
                self._model_changed(model)
            else:
                self.loads.add(model)

    def _refuse(self, model: Model, problem: DeviceError) -> None:
        self.loads.abandon(model)  # if one is under way, it is of what the config meant before
        model.queue()
        model.fail(problem)

    def _cluster_changed(self) -> None:
        self._control.announce_cluster()
        self._tell_workers()
        self._show_status()

    def _model_changed(self, model: Model) -> None:
        self.cluster.models_changed()
        self._tell_workers(None if release_kept(self.models.values()) else model.devices)
        self._control.announce({"what": "model", **model.describe()})
        self._state_changed.set()
        self._show_status()

    def _tell_workers(self, devices: Iterable[str] | None = None) -> None:
        """Tells the workers of `devices`, or all, what becomes of the models there, and where the others belong."""
        for name in self.workers if devices is None else [name for name in devices if name in self.workers]:
            models = self.models.values()
            told = {item.name: item.for_worker() if name in item.devices else item.for_others() for item in models}
            self.workers[name].tell_models(told)

    def _show_status(self) -> None:
        text = "; ".join(filter(None, [summary(self.models.values()), self.cluster.sentence()]))
        if self.ready:
            self._notifier.status(text)
        else:
            self._notifier.progress(text)

    def _become_ready(self) -> None:
        self.ready = True
        self._notifier.ready("ready")
        self._show_status()
        served = [model for model in self.models.values() if model.complete and model.given_out]
        names = "; ".join(f"{model.name} on {', '.join(model.devices)}" for model in served) or "no model yet"
        _log.info("ready: weightcached %s, instance %s, serving %s", __version__, self.instance, names)

    async def _start(self) -> None:
        self._notifier.progress("starting workers")
        async with self._reloading:  # a SIGHUP means what is there then
            if self._handed:
                await adopt(self._handed, self.workers, self.vault, self._store)
            self.loads.settle()
            self.vault.filled.set()
            for worker in self.workers.values():
                try:
                    async with asyncio.timeout(WORKER_START_SECONDS):
                        await worker.serving.wait()
                except TimeoutError:
                    problem = f"its worker does not serve within {WORKER_START_SECONDS:.0f} s"
                    raise DeviceError(device=worker.device, problem=problem) from None
            self._control.start()
            await asyncio.to_thread(self._placement.look, self.config)
            self._placement.choose(self.config, self.models, self.vault)
            self._set_models(self.config)
            self.health.start()
            adopted = [model for model in self.models.values() if model.complete]
            self.load_together(loads_of_start(self.models.values(), self.vault))
            for shard in [shard for name in self.workers for shard in self.vault.of_device(name)]:
                self.digests.add(shard)
        if self.config.ready == "loaded":
            await self._all_loaded(to_lose=bool(self._handed))
        await self.cluster.loaded()
        self._become_ready()
        async with self._reloading:
            changed = await asyncio.to_thread(changed_files(adopted, self.vault))
            models = [model for model in adopted if model in self.models.values() and model.name in changed]
            self.load_together(models)

    async def _all_loaded(self, *, to_lose: bool) -> None:
        """Returns when every preload is cached; raises what made the first one fail.

        With something `to_lose` one that fails is logged and shown, as in a service that runs: a start that fails for
        good would cost all that the service manager keeps. Most often there is no room beside what engines use.
        """
        while True:
            self._state_changed.clear()
            # A model that is absent with nothing queued was evicted by its operator, who does not want to wait for it.
            wanted = [model for model in self.models.values() if model.config.preload and model.state != "absent"]
            for model in wanted:
                # If it is complete, what was adopted is served.
                if model.error is not None and not model.complete and not to_lose:
                    raise start_failure(model, model.error, self.config)
            # Idle: the last loader has ended too, and with it its CUDA context.
            if self.loads.idle and all(model.state in ("cached", "failed") for model in wanted):
                return
            await self._state_changed.wait()

    async def _keep_alive(self) -> None:
        """Extends systemd's start timeout while loading, feeds its watchdog, repeats what it has not taken."""
        interval = min(EXTEND_SECONDS, self._notifier.watchdog_seconds or EXTEND_SECONDS)
        while True:
            await asyncio.sleep(interval)
            if not self.ready:
                self._show_status()
            self._notifier.repeat()
            if self._notifier.watchdog_seconds is not None:
                self._notifier.watchdog()

    def _reload_by_signal(self) -> None:
        if self._signalled is None or self._signalled.done():
            self._signalled = asyncio.create_task(self._tell_and_reload(), name="reload")
        else:
            _log.warning("SIGHUP while a reload is under way is ignored")

    async def _tell_and_reload(self) -> None:
        # READY=1 ends a reload for systemd, and a start as well: before the service is ready neither is said.
        started = self.ready
        if started:
            self._notifier.reloading()
        try:
            await self.reload()
        except WeightCacheError as error:
            _log.error("reload refused, nothing is changed: %s", error)
        finally:
            if started:
                self._notifier.ready("reloaded")
            self._show_status()

    async def _end(self, tasks: set[asyncio.Task[Any]], storing: asyncio.Task[None]) -> None:
        self._notifier.stopping("stopping")
        self._control.stop()
        if self._signalled is not None:
            tasks = {*tasks, self._signalled}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.health.stop()
        await self.verifications.stop()
        await asyncio.gather(*(worker.stop() for worker in self.workers.values()))
        await self.vault.settled()  # what was published last is in its hands: a restart finds it
        storing.cancel()
        await asyncio.gather(storing, return_exceptions=True)
        self.vault.close()
