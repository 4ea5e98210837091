"""``weightcached`` for a chaos run: workers that are killed again and again are started again at once.

The pauses between two starts are there for workers that die of themselves; here they would be most of the time.
"""

from __future__ import annotations

import sys

from weightcached.cli.main import main
from weightcached.service import workers

if __name__ == "__main__":
    workers.RESTART_DELAYS = (0.0,)
    sys.exit(main())
