"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes, also with other formats."""

from __future__ import annotations

import logging

from .api import LOAD_FORMAT
from .loader import loader_class
from .memory import advise_on_memory
from .versions import counts_external_weights, vllm_version


def register() -> None:
    """Makes `--load-format weightcached` known. May be called again. The cache is not touched before a model is loaded.

    A vLLM that the plug-in does not support gets a loader that says so when it is made.
    """
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    if LOAD_FORMAT in _LOAD_FORMAT_TO_MODEL_LOADER:
        return
    _log_with_vllm()
    register_model_loader(LOAD_FORMAT)(loader_class())
    if not counts_external_weights(vllm_version()):
        advise_on_memory()


def _log_with_vllm() -> None:
    """Our lines go where vLLM's go: its processes configure no other logger. What a user has set up is left alone."""
    ours, theirs = logging.getLogger("weightcached"), logging.getLogger("vllm")
    if theirs.handlers and not ours.handlers and not logging.getLogger().handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
