"""The engines' tests use the client's worker."""

from tests.client.conftest import start_worker, worker
from tests.engines.situations import folder

__all__ = ["folder", "start_worker", "worker"]
