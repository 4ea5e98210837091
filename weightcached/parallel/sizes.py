"""The numbers of a model that decide where it can be cut, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .cuts import Misfit

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")


class Sizes:
    """Numbers of config.json, in `text_config` first where a model has one, else what the model class supplies.

    Each raises `Misfit` naming the key when it is not there or is no positive whole number: a size is never guessed.
    """

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, int | str] | None = None) -> None:
        text = config.get("text_config")
        self._levels = [text, config] if isinstance(text, dict) else [config]
        self._defaults = defaults or {}

    def __getitem__(self, key: str) -> int:
        value = self.find(key)
        if value is None:
            raise Misfit(f"config.json does not say {key}")
        return value

    def find(self, key: str) -> int | None:
        """The number, or None when neither config.json (null counts as absent) nor the model class has it."""
        value = next((level[key] for level in self._levels if level.get(key) is not None), None)
        if value is None:
            default = self._defaults.get(key)
            return self.find(default) if isinstance(default, str) else default
        if type(value) is not int or value < 1:
            raise Misfit(f"{key} of config.json must be a whole number of at least 1, found {value!r}")
        return value

    @property
    def heads(self) -> int:
        """Query heads."""
        return self["num_attention_heads"]

    @property
    def kv_heads(self) -> int:
        return self["num_key_value_heads"]

    @property
    def head_dim(self) -> int:
        """head_dim, else hidden_size / heads."""
        found = self.find("head_dim")
        if found is not None:
            return found
        hidden, heads = self["hidden_size"], self.heads
        if hidden % heads:
            raise Misfit(f"config.json has no head_dim, and hidden_size {hidden} is no multiple of {heads} heads")
        return hidden // heads

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Sizes that a head may have: head_dim, and v_head_dim where values have their own. () when nothing says them.

        Latent attention (`kv_lora_rank`) has others, which depend on the projection: () too.
        """
        says_nothing = self.find("head_dim") is None and self.find("hidden_size") is None
        if says_nothing or self.find("kv_lora_rank") is not None:
            return ()
        values = self.find("v_head_dim")
        return (self.head_dim,) if values in (None, self.head_dim) else (self.head_dim, values)

    @property
    def layers(self) -> int:
        return self["num_hidden_layers"]

    @property
    def experts(self) -> int:
        """Routed experts of one layer."""
        found = self.find_experts()
        if found is None:
            raise Misfit(f"config.json says none of {', '.join(_EXPERTS)}")
        return found

    def find_experts(self) -> int | None:
        """`experts`, or None when neither config.json nor the model class says it."""
        return next((found for key in _EXPERTS if (found := self.find(key)) is not None), None)
