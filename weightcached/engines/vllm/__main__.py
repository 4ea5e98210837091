"""`python -m weightcached.engines.vllm preload MODEL ...`."""

from __future__ import annotations

import sys

from .preload import main

sys.exit(main(sys.argv[1:]))
