"""SGLang: `sglang serve --model-path MODEL --load-format weightcached`, by SGLang's own plug-in entry point.

plugin   what the entry point runs: the load format, and what must not happen to shared weights
loader   the loader behind the format: a hit is mapped, a miss is loaded by SGLang itself and published
layout   what decides how SGLang's processed weights look: the key, and what is refused
state    what a load does to a model beside its parameters and buffers
api      every name of SGLang's that is used here, for scripts/check_engine_api
"""
