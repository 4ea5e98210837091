"""The engines' tests use the client's worker."""

from tests.client.conftest import start_worker, worker

__all__ = ["start_worker", "worker"]
