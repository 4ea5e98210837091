"""Starts of a real vLLM by `real`, each in a fork of one process that has imported it; what they report, compared."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.running import ROOT, import_path
from weightcached.engines.parity import Description, compare

PYTHON = os.environ.get("WEIGHTCACHED_VLLM_PYTHON")
# Pre-processed mode has these in host memory, as their names say; a load from disk has them on the device, where vLLM
# constructs them, or, on a CPU, in the memory of others.
ANYWHERE = ("._k_scale_cpu", "._v_scale_cpu")


class Vllm:
    """A process that has imported vLLM, and forks for each start: the import takes most of one."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [str(PYTHON), "-m", "tests.engines.vllm.real", "serve"],
            env={**os.environ, "PYTHONPATH": import_path()},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        while self._line() != "ready":
            pass  # what vLLM prints before

    def run(self, path: Path, *arguments: str) -> str:
        """What a start has written, standard output last. It must end well."""
        files = {"output": f"{path}.out", "error": f"{path}.err"}
        names = ("WEIGHTCACHED_", "VLLM_", "XDG_CACHE_HOME")
        environment = {name: value for name, value in os.environ.items() if name.startswith(names)}
        assert self.process.stdin is not None
        order = {"arguments": arguments, "environment": environment, **files}
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        code = self._line()
        text = "\n".join(Path(files[kind]).read_text() for kind in ("error", "output"))
        assert code == "0", f"{arguments}: {code}\n{text[-12000:]}"
        return text

    def stop(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(60)

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"vLLM ended with {self.process.wait()}"
        return line.strip()


class Started:
    """What one start of the engine reported, and a description of each model that it loaded if it is to be described.

    `options` are those of the loader.
    """

    def __init__(
        self, vllm: Vllm, folder: Path, path: Path, *arguments: str, described: bool = True, **options: Any
    ) -> None:
        extra = [] if not options else ["--extra", json.dumps(options)]
        extra += ["--describe", str(path)] if described else []
        self.log = vllm.run(path, str(folder), "--generate", *extra, *arguments)
        report = json.loads(self.log.splitlines()[-1])
        self.loads, self.tokens, self.reloaded = report["loads"], report["tokens"], report["reloaded"]
        self.spoilt = report["spoilt"]
        self.platform = report["platform"]
        self.external_seconds = float(report["external_seconds"])
        self.repeated, self.external, self.kv_tokens = report["repeated"], report["external"], report["kv_tokens"]
        names = [path, *(path.with_name(f"{path.name}.{number}") for number in range(1, len(self.loads)))]
        self.models = [Description.load(name) for name in names if described]

    def generations(self) -> list[int | None]:
        return [load["generation"] for load in self.loads]


def same(first: Started, second: Started) -> None:
    """Every tensor, in plain objects too, every scalar, and every token."""
    for one, other in zip(first.models, second.models, strict=True):
        elsewhere = ("device", "memory")
        found = [item for item in compare(one, other) if item.what not in elsewhere or not item.name.endswith(ANYWHERE)]
        assert not found, "\n".join(map(str, found))
    assert first.tokens == second.tokens
    assert len({tuple(tokens) for tokens in first.tokens}) > 1
