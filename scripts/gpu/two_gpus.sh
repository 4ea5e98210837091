#!/usr/bin/env bash
# Everything that needs two GPUs of one host, in one run, with one table at the end. No network, no systemd, no download.
#     scripts/gpu/two_gpus.sh                       the first two GPUs, a model of 30 GB in $TMPDIR
#     scripts/gpu/two_gpus.sh --device host         a dry run on two host devices, with a tiny model
#     scripts/gpu/two_gpus.sh --json FILE           writes the results as well
#     scripts/gpu/two_gpus.sh --help                the other options
# $TWO_GPUS_PYTHON is the interpreter, which needs weightcached's packages and torch; default: the project's environment,
# else python3. NVLink multicast stays off: NCCL is told so.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${TWO_GPUS_PYTHON:-}
if [ -z "$python" ]; then
    if [ -x "$root/.venv/bin/python" ]; then python=$root/.venv/bin/python; else python=python3; fi
fi
export NCCL_NVLS_ENABLE=0
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" "$root/scripts/gpu/two_gpus.py" "$@"
