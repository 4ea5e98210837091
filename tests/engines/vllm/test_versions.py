"""Which vLLM can do what."""

from __future__ import annotations

import pytest

from weightcached.engines.vllm.versions import counts_external_weights, numbers, require_supported
from weightcached.errors import EngineError


def test_which_versions_count() -> None:
    """`get_external_weight_memory` came with 0.32."""
    assert [counts_external_weights(version) for version in ("0.30.0", "0.31.0", "0.32.0", "0.33.0rc1", "dev")] == [
        False, False, True, True, True,
    ]  # fmt: skip
    assert numbers("0.33.0rc1") == (0, 33, 0)


def test_oldest_version() -> None:
    """0.30 is the first with a pre-processed mode."""
    require_supported("0.30.0")
    with pytest.raises(EngineError, match=r"0\.29\.0 cannot take"):
        require_supported("0.29.0")
