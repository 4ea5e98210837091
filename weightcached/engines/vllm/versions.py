"""Which vLLM is installed, and what that version can do."""

from __future__ import annotations

import re

from ...errors import EngineError

OLDEST = (0, 30)  # the first with `weights_already_processed`


def vllm_version() -> str:
    """As vLLM itself says, without a local part such as "+cu130"."""
    import vllm.version

    return str(vllm.version.__version__).partition("+")[0]


def numbers(version: str) -> tuple[int, ...]:
    """(0, 33, 0) of "0.33.0rc1"; a version that does not begin with numbers, such as "dev", counts as the newest."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else (1 << 30,)


def require_supported(version: str) -> None:
    """`EngineError` for a vLLM that cannot take weights which are processed already."""
    if numbers(version) < OLDEST:
        problem = (
            f"vLLM {version} cannot take weights that are processed already; weightcached needs vLLM 0.30 or newer, "
            "or another --load-format"
        )
        raise EngineError(problem=problem)


def counts_external_weights(version: str) -> bool:
    """Whether the worker asks its loader for `get_external_weight_memory` before it sizes the KV cache."""
    return numbers(version) >= (0, 32)
