"""These tests use the client's worker, and no progress bars."""

from __future__ import annotations

import pytest

from tests.client.conftest import start_worker, worker

__all__ = ["start_worker", "worker"]


@pytest.fixture(autouse=True)
def quiet() -> None:
    """No progress bars, and no connection to a model hub."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
