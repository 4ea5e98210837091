"""What an engine does when the cache cannot give it its weights: every adapter asks here, so that all do the same.

    wanted = Wanted("vLLM 0.33.0", folder, key, "cuda:0", nbytes, "qwen3-8b")
    if (weights := find(wanted, options)) is not None:
        ...                                     # a hit: install them
    else:
        refuse_beside(wanted)                   # one warning has said why the disk is read
        files = checkpoint_files(folder)
        ...                                     # the engine's own loader
        weights = publish_loaded(wanted, options, model, files)

    on_miss    what is missing is
    fail       raised at once
    wait       waited for up to `timeout`: the service, and the model, which is loaded if it is in the config
    start      as wait; where no service answers, it is started first
    fallback   loaded from disk. Before that what is on its way is waited for, up to `timeout`: a service that starts,
               a model that is loading, another engine that publishes

docs/engines/policies.md has the table of what happens when; `tests/engines/test_policy*.py` hold it, cell by cell.
"""

from __future__ import annotations

import difflib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from ..client.attach import LONGEST_SECONDS, Mode, attach
from ..client.duplicates import is_reserved, wait_for_publisher, worker_status
from ..client.target import import_torch, resolve
from ..client.weights import Weights
from ..errors import (
    ConnectionFailed,
    ConnectionLost,
    EngineError,
    KeyMismatch,
    ModelError,
    ModelFailed,
    ModelLoading,
    ModelNotLoaded,
    NoSuchModel,
    ServiceNotRunning,
    TimedOut,
    TooManyConnections,
    VersionMismatch,
    WeightCacheError,
)
from ..paths import check_instance
from ..shard.manifest import SourceFile
from ..text import MODEL_NAME
from . import outlook
from .room import ANSWER_SECONDS, refuse_beside

if TYPE_CHECKING:
    import torch

OnMiss = Literal["wait", "start", "fallback", "fail"]
Start = Callable[[str, float], object]  # start_service(instance, timeout in seconds)

# The cache cannot be reached, or lacks what was asked for and the disk has: a copy that is cut or cast is such a miss.
# Whatever else goes wrong is raised under every policy: wrong arguments and devices, refused peers, broken manifests.
FALLS_BACK = (
    ConnectionFailed,
    VersionMismatch,
    TooManyConnections,
    NoSuchModel,
    ModelLoading,
    ModelFailed,
    KeyMismatch,
)
PUBLISH_SECONDS = 30.0  # at most for a service that does not answer: the engine has its weights, and is to go on
_EXPLAIN_SECONDS = 2.0  # beyond the timeout, for a service that may be stuck: only the message is better for it
DEFAULT_INSTANCE = "model"  # of the unit as the README starts it
_log = logging.getLogger(__name__)
__all__ = [
    "FALLS_BACK",
    "OnMiss",
    "Options",
    "Wanted",
    "find",
    "obtain",
    "publish_loaded",
    "refuse_beside",
    "without_cache",
]


@dataclass(frozen=True)
class Options:
    """How an engine uses the cache, as its user has set it.

    on_miss: see the module. publish: after a load from disk the engine's weights are handed to the service, so that the
    next start finds them. mode: as of `attach`. timeout: seconds, for everything that is waited for. model: the name of
    the cached model, where the checkpoint's content is not to decide alone. instance: which weightcached@INSTANCE
    `start` starts, None is weightcached@model.
    """

    on_miss: OnMiss = "fallback"
    publish: bool = True
    mode: Mode = "zero_copy"
    timeout: float = 30.0
    model: str | None = None
    instance: str | None = None

    @classmethod
    def parse(cls, data: Mapping[str, Any]) -> Options:
        """From an engine's own configuration, such as a JSON object. `EngineError` names what is wrong with it."""
        if not isinstance(data, Mapping):
            raise EngineError(problem=f"the options are {data!r}; they must be names with values")
        known = [item.name for item in fields(cls)]
        for name in data:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                guess = f"did you mean {near[0]!r}?" if near else "there are"
                problem = f"no option {name!r}; {guess} {'' if near else ', '.join(known)}".rstrip()
                raise EngineError(problem=problem)
        options = cls(**{**data, "timeout": _seconds(data.get("timeout", cls.timeout))})
        for name, allowed in (("on_miss", get_args(OnMiss)), ("mode", get_args(Mode))):
            if getattr(options, name) not in allowed:
                found = getattr(options, name)
                raise EngineError(problem=f"{name} is {found!r}; it must be one of {', '.join(allowed)}")
        if not isinstance(options.publish, bool):
            raise EngineError(problem=f"publish is {options.publish!r}; it must be true or false")
        for name in ("model", "instance"):
            value = getattr(options, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise EngineError(problem=f"{name} is {value!r}; it must be a name")
        if options.model is not None and MODEL_NAME.fullmatch(options.model) is None:
            raise EngineError(problem=f"model is {options.model!r}; no cached model can have that name")
        if options.instance is not None:
            check_instance(options.instance)
        return options


@dataclass(frozen=True)
class Wanted:
    """What one rank of an engine needs.

    engine: name and version, for messages. checkpoint: the folder on disk, None where there is none: then only a model
    that the options name is used. key: fields of `ShardKey` that must match, "layout" among them, "content" not.
    device: "cuda:0", "host-0". nbytes: what a load from disk takes on that device, in bytes, 0 if unknown. name: under
    which the engine publishes.
    """

    engine: str
    checkpoint: Path | None
    key: dict[str, Any]
    device: str
    nbytes: int
    name: str


def find(wanted: Wanted, options: Options, *, start: Start | None = None) -> Weights | None:
    """The cached weights; None if the engine shall load from disk, which one warning has then explained.

    `start` is what starts a service, for on_miss="start". Raises what `attach` raises: under "fallback" only what is
    none of `FALLS_BACK`. `EngineError` where neither files nor a name say which weights are meant.
    """
    if wanted.checkpoint is None and options.model is None:
        problem = "no files on disk to compare the cache with; name the cached model with the option model"
        without_cache(wanted, options, EngineError(problem=problem))
        return None
    if options.on_miss != "fallback":
        return obtain(wanted, options, start=start)
    try:
        return obtain(wanted, options)
    except FALLS_BACK as error:
        _from_disk(wanted, error)
        return None


def obtain(wanted: Wanted, options: Options, *, start: Start | None = None) -> Weights:
    """As `find`, but where that gives None under "fallback" the reason is raised, one of `FALLS_BACK`."""
    request = _Request(wanted, options)
    try:
        match options.on_miss:
            case "fallback":
                return request.or_soon()
            case "fail":
                return request.now()
            case "start":
                request.start(start or _start_service)
        return request.wait()
    except FALLS_BACK as error:
        raise request.explained(error) from None


def without_cache(wanted: Wanted, options: Options, reason: EngineError) -> None:
    """For weights that the cache cannot hold, such as those of a quantisation that is not supported.

    Under "fallback" one warning says that the engine loads from disk, and why; the adapter then does not publish. Under
    every other policy the reason is raised.
    """
    if options.on_miss != "fallback":
        raise reason
    _from_disk(wanted, reason)


def publish_loaded(
    wanted: Wanted,
    options: Options,
    module: torch.nn.Module | Mapping[str, torch.Tensor],
    files: Sequence[SourceFile] | None,
    **publish_arguments: Any,
) -> Weights | None:
    """Hands over what the engine has loaded from disk, which then runs from the shared copy; None if it does not.

    `files` are those of `checkpoint_files`, taken before the load. `publish_arguments` go to `weightcached.publish`.
    Where the same weights have been published meanwhile, say by an engine that started with this one, this engine runs
    from that copy. Trouble with the cache is no trouble of the engine's: without a service one line at INFO says so;
    where the service has no room, refuses, goes away or does not answer, one warning gives the reason, and the engine
    runs on from its own memory. It is held up for `timeout`, but no longer than PUBLISH_SECONDS, and the move itself.
    """
    if not options.publish:
        return None
    from ..client.publish import publish

    torch = import_torch("publish")
    arguments = {
        "key": wanted.key,
        "device": wanted.device,
        "checkpoint": wanted.checkpoint,
        "files": files,
        "if_cached": "share",
        "timeout": min(options.timeout or ANSWER_SECONDS, PUBLISH_SECONDS),
        **publish_arguments,
    }
    try:
        return publish(wanted.name, module, **arguments)
    except ServiceNotRunning as error:
        _log.info("%s: %s is not published: %s", wanted.engine, wanted.name, error)
    except ModelError as error:
        _log.warning("%s: %s is not published, and this engine keeps the copy of its own: %s",
                     wanted.engine, wanted.name, error)  # fmt: skip
    except (WeightCacheError, OSError, torch.cuda.OutOfMemoryError) as error:
        _log.warning("%s: %s is not published, so the next start loads from disk again; this one runs on: %s",
                     wanted.engine, wanted.name, error)  # fmt: skip
    return None


@dataclass
class _Request:
    """One search for the weights, in the ways that the policies want."""

    wanted: Wanted
    options: Options
    end: float = field(init=False)  # monotonic seconds

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        self.end = self._started + _seconds(self.options.timeout)

    @property
    def device(self) -> str:
        """The device by the name that the service knows it by."""
        return resolve(self.wanted.device).name

    @property
    def key(self) -> dict[str, Any]:
        """What must match. By the digest of config.json a checkpoint is cut; it is no part of an engine's layout."""
        key = self.wanted.key
        return key if key.get("layout", "checkpoint") == "checkpoint" else {"config": None, **key}

    @property
    def left(self) -> float:
        return max(self.end - time.monotonic(), 0.0)

    def now(self) -> Weights:
        """Asks once. A service that is there but slow, since it starts, has the whole timeout to answer."""
        return self._attach("fail", self.left or ANSWER_SECONDS)

    def wait(self) -> Weights:
        """Asks until the end. A model that the config has for these files is asked for by name: so it is loaded."""
        if (model := self._configured()) is not None:
            self._by_name(model.model)
        return self._attach("wait", self.left)

    def start(self, start: Start) -> None:
        """Starts the service, if none answers."""
        try:
            worker_status(self.device, time.monotonic() + ANSWER_SECONDS)
        except ServiceNotRunning:
            instance = self.options.instance or DEFAULT_INSTANCE
            _log.info("%s: no service for %s; starting weightcached@%s", self.wanted.engine, self.device, instance)
            start(instance, self.left)

    def or_soon(self) -> Weights:
        """Asks once, and again after what is on its way has come."""
        try:
            return self.now()
        except (NoSuchModel, ModelLoading, ConnectionLost) as miss:
            if not self.options.timeout or isinstance(miss, ModelNotLoaded) or not self._has_come(miss):
                raise
        return self._attach("fail", max(self.left, ANSWER_SECONDS))

    def explained(self, error: WeightCacheError) -> WeightCacheError:
        """The error, or a better one.

        A wait is as long as all of it took, and says what another policy would do. For files that match nothing: what
        the service's config has for them is loading, not loaded or failed; or they are cached, but cut, cast or
        processed in another way, and then the differences are told.
        """
        if isinstance(error, TimedOut):
            return self._with_advice(error)
        if type(error) is not NoSuchModel or self.wanted.checkpoint is None:
            return error
        self.end = max(self.end, time.monotonic() + _EXPLAIN_SECONDS)
        model = self._configured()
        if model is not None and (better := model.why_not_there(self.device)) is not None:
            return better
        try:
            shards = worker_status(self.device, self.end)["shards"]
        except WeightCacheError:
            return error
        if (found := outlook.in_another_form(shards, self.key, self.wanted.checkpoint)) is None:
            return error
        return KeyMismatch(model=found[0], differences=found[1])

    def _with_advice(self, error: TimedOut) -> TimedOut:
        waited_for = error.waited_for
        if self.options.on_miss != "fallback" and self.wanted.checkpoint is not None:
            then = "load it from disk and publish it" if self.options.publish else "load it from disk"
            waited_for += f"; on_miss='fallback' would {then}"
        return TimedOut(path=error.path, seconds=round(time.monotonic() - self._started, 1), waited_for=waited_for)

    def _has_come(self, miss: WeightCacheError) -> bool:
        """Waits for what is on its way, if anything is. Whether to ask again; `TimedOut` if it is still not there."""
        if isinstance(miss, ConnectionLost):  # its worker was killed: the next one has the same shards
            return True
        model = self._configured()
        if model is not None and model.coming:
            self._by_name(model.model)
            return True
        if model is None and isinstance(miss, ModelLoading):  # its service does not tell us more
            self._by_name(miss.model)
            return True
        names = [name for name in (self.options.model, self.wanted.name) if name is not None]
        try:
            status = worker_status(self.device, self.end)
        except TimedOut:  # a service that does not answer has had all the time; the miss is what is known
            return False
        if is_reserved(status, names):
            _log.info("%s: waiting up to %g s for who publishes %s", self.wanted.engine, self.left, self.wanted.name)
            wait_for_publisher(self.device, names, self.end)
            return True
        return False

    def _configured(self) -> outlook.Configured | None:
        """What the config has for this; None where it has nothing, or nobody says."""
        try:
            status = worker_status(self.device, self.end)
        except FALLS_BACK:  # who waits for the weights will meet it again, and knows what to do
            return None
        layout = str(self.wanted.key.get("layout", "checkpoint"))
        return outlook.configured(status, self.wanted.checkpoint, self.options.model, layout, self.end)

    def _by_name(self, name: str) -> None:
        """Waits for a model by its name, which has it loaded, and tells at once when the load fails."""
        attach(name, device=self.wanted.device, on_miss="wait", timeout=self.left, key=self.key).close()

    def _attach(self, on_miss: Literal["fail", "wait"], timeout: float) -> Weights:
        return attach(
            self.options.model,
            checkpoint=self.wanted.checkpoint,
            device=self.wanted.device,
            mode=self.options.mode,
            on_miss=on_miss,
            timeout=timeout,
            key=self.key,
        )


def _from_disk(wanted: Wanted, reason: WeightCacheError) -> None:
    what = wanted.checkpoint or wanted.name
    _log.warning("%s: %s is loaded from disk: %s", wanted.engine, what, reason)


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:  # NaN too
        raise EngineError(problem=f"timeout is {value!r}; it must be seconds, 0 or more")
    return float(min(value, LONGEST_SECONDS))


def _start_service(instance: str, timeout: float) -> None:
    from ..client.start import start_service

    start_service(instance, timeout)
