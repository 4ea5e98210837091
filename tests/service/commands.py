"""The commands of publishers in tests: the script that most of them are, and running one with no worker anywhere."""

from __future__ import annotations

import asyncio
import json

from tests.running import ROOT
from weightcached.config import ModelConfig
from weightcached.errors import WeightCacheError
from weightcached.service.models import Model
from weightcached.service.publishers import Publishers
from weightcached.service.vault import Vault

PUBLISHING = str(ROOT / "tests" / "service" / "publishing.py")
TOLD = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR CUDA_VISIBLE_DEVICES"
PRINT = f"for name in {TOLD}; do eval echo \\$$name; done"  # for a shell: each on a line


def publisher(*words: str) -> str:
    """The line of a model's config that has it published by PUBLISHING, which says what the words mean."""
    return f"publisher = {json.dumps(['python', PUBLISHING, *words])}"


def run_command(devices: tuple[str, ...], *words: str, **options: object) -> tuple[Publishers, WeightCacheError | None]:
    """Runs the command for a model of so many ranks, with no worker anywhere."""
    config = ModelConfig.model_validate({"name": "m", "checkpoint": "/models/m", "publisher": list(words), **options})

    async def run() -> tuple[Publishers, WeightCacheError | None]:
        load = Publishers(Model(config, devices), Vault())
        return load, await load.run()

    return asyncio.run(run())
