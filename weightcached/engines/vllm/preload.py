"""`python -m weightcached.engines.vllm preload MODEL [arguments of vLLM]`: publishes the weights of one rank.

As the service starts it for a model with `publisher = [...]`: name, device, rank and number of ranks come from the
environment (WEIGHTCACHED_PUBLISH_NAME, WEIGHTCACHED_DEVICE, WEIGHTCACHED_RANK, WEIGHTCACHED_WORLD). No engine,
no KV cache, no graphs: the weights are loaded, processed and published, and the process ends, its CUDA context with it.
The arguments must be those of the engine that will attach, since they shape the weights.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from typing import Any, NamedTuple

from ...client.target import resolve
from ...errors import EngineError, WeightCacheError, WrongDevice
from ...text import MODEL_NAME
from ..policy import Options
from .api import LOAD_FORMAT
from .loader import load_to_publish
from .reload import ATTRIBUTE
from .versions import require_supported, vllm_version

_log = logging.getLogger(__name__)
# vLLM's own ways to reduce over GPUs, off as custom all-reduce is: that looks up the other ranks' GPUs by number, while
# a publisher's process sees one, and symmetric memory makes a buffer with them. Nothing is reduced here, and none of
# these shapes weights.
_REDUCING = tuple(f"VLLM_ALLREDUCE_USE_{name}" for name in ("SYMM_MEM", "FLASHINFER", "FLASHINFER_PCIE_IPC"))
USAGE = "usage: python -m weightcached.engines.vllm preload MODEL [arguments of vLLM]"


class Place(NamedTuple):
    """Which rank this process is, and under which name it publishes; None: under the loader's own."""

    name: str | None = None
    rank: int = 0
    world: int = 1
    rendezvous: str | None = None

    @classmethod
    def from_environment(cls) -> Place:
        """`EngineError` for values that are none. Ranks of more than one meet at MASTER_ADDR and MASTER_PORT."""
        name = os.environ.get("WEIGHTCACHED_PUBLISH_NAME") or None
        if name is not None and not MODEL_NAME.fullmatch(name):
            raise EngineError(problem=f"WEIGHTCACHED_PUBLISH_NAME={name!r} is no name for a model")
        try:
            rank, world = (int(os.environ.get(f"WEIGHTCACHED_{what}") or n) for what, n in (("RANK", 0), ("WORLD", 1)))
        except ValueError as error:
            raise EngineError(problem=f"WEIGHTCACHED_RANK, WEIGHTCACHED_WORLD: {error}") from None
        if not 0 <= rank < world:
            raise EngineError(problem=f"WEIGHTCACHED_RANK={rank} is no rank of WEIGHTCACHED_WORLD={world}")
        port = os.environ.get("MASTER_PORT")
        if world > 1 and not port:
            problem = f"{world} ranks need a free TCP port to meet at: set MASTER_PORT, and MASTER_ADDR across nodes"
            raise EngineError(problem=problem)
        address = f"tcp://{os.environ.get('MASTER_ADDR') or '127.0.0.1'}:{port}" if port else None
        return cls(name, rank, world, address)


def main(arguments: list[str]) -> int:
    """Exit status: 0 published, 1 refused or failed, 2 usage."""
    if len(arguments) < 2 or arguments[0] != "preload" or "--help" in arguments:
        print(USAGE, file=sys.stderr)  # noqa: T201 - this is a command line
        return 2
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    try:
        require_supported(vllm_version())
        place = Place.from_environment()
        return preload(engine_config(arguments[1:], place), place)
    except WeightCacheError as error:
        _log.error("%s", error)
        return error.exit_code


def engine_config(arguments: list[str], place: Place) -> Any:
    """vLLM's config for these arguments of `vllm serve`, with this loader, which may not do without the service."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    load_general_plugins()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    if not arguments[0].startswith("-"):
        arguments = ["--model", *arguments]
    options = {"publish": True, **({"model": place.name} if place.name else {})}
    # The last of two counts: whatever the engine's own arguments say of the loader is for the engine.
    loading = ["--load-format", LOAD_FORMAT, "--model-loader-extra-config", json.dumps(options)]
    if place.world > 1:  # vLLM's choice for one node, for which it wants to see the GPUs of all ranks
        arguments = ["--distributed-executor-backend", "mp", *arguments]
    args = parser.parse_args([*arguments, *loading])
    return EngineArgs.from_cli_args(args).create_engine_config()


def preload(vllm_config: Any, place: Place) -> int:
    """Loads and publishes this rank. The device is the process's first, or the rank's where several are visible."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import (
        destroy_distributed_environment,
        destroy_model_parallel,
        ensure_model_parallel_initialized,
        init_distributed_environment,
        set_custom_all_reduce,
    )
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port
    from vllm.v1.worker.workspace import init_workspace_manager

    parallel = vllm_config.parallel_config
    size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size * parallel.prefill_context_parallel_size
    if size != place.world or parallel.data_parallel_size != 1:
        problem = (
            f"tensor parallel {parallel.tensor_parallel_size} x pipeline parallel {parallel.pipeline_parallel_size} x "
            f"prefill context parallel {parallel.prefill_context_parallel_size}, "
            f"data parallel {parallel.data_parallel_size} is not the {place.world} ranks of the service's model"
        )
        raise EngineError(problem=problem)
    local_rank = place.rank if torch.accelerator.device_count() > 1 else 0
    kind = current_platform.device_type
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    # The module of the platform's worker adapts torch to the platform.
    importlib.import_module(parallel.worker_cls.rpartition(".")[0])
    if device.type != "cpu":
        torch.accelerator.set_device_index(local_rank)
    # Of a CPU, which is one device to torch, rank N looks in host-N; see `layout.device_of`.
    found = f"host-{place.rank}" if device.type == "cpu" else resolve(str(device)).name
    expected = os.environ.get("WEIGHTCACHED_DEVICE")
    if expected and expected != found:
        raise WrongDevice(wanted=expected, found=found)
    parallel.rank = place.rank
    set_custom_all_reduce(False)
    os.environ.update(dict.fromkeys(_REDUCING, "0"))
    rendezvous = place.rendezvous or get_distributed_init_method("127.0.0.1", get_open_port())
    if device.type == "cpu":  # whose ranks share memory by this name, as vLLM's worker for a CPU sets it
        os.environ["VLLM_DIST_IDENT"] = rendezvous.rpartition(":")[2]
    init_distributed_environment(
        world_size=place.world,
        rank=place.rank,
        distributed_init_method=rendezvous,
        local_rank=local_rank,
        backend=current_platform.dist_backend,
    )
    try:
        with set_current_vllm_config(vllm_config):
            ensure_model_parallel_initialized(
                parallel.tensor_parallel_size,
                parallel.pipeline_parallel_size,
                parallel.prefill_context_parallel_size,
                parallel.decode_context_parallel_size,
            )
            init_workspace_manager(device)  # attention layers may take some when they are constructed
            options = Options.parse(vllm_config.load_config.model_loader_extra_config)
            model = load_to_publish(vllm_config, vllm_config.model_config, vllm_config.load_config, options)
        weights = getattr(model, ATTRIBUTE)
        _log.info("%s generation %d is cached: %d bytes", weights.manifest.model, weights.generation, weights.nbytes)
        return 0
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()
