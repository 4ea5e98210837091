"""``python -m weightcached.safetensors SCRIPT ...`` and ``python -m weightcached.safetensors -m MODULE ...``."""

from __future__ import annotations

import sys

from .hook import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
