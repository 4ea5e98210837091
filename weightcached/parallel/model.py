"""A checkpoint as the slice plan sees it, whatever the ranks: tensors by module, its family, its config.json."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .casts import Casts
from .rules import Family, Patterns, split_name
from .scales import Quantization
from .sizes import Sizes

if TYPE_CHECKING:
    from ..checkpoint.header import TensorRange

Leaves = dict[str, "TensorRange"]  # the tensors of one module, by what they are there: "weight", "bias", ...


def architecture(config: dict[str, Any]) -> str:
    """The model class that config.json names first."""
    found = config.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else "a model whose config.json names no architecture"


class Model:
    """`tensors` are those of the checkpoint, in its order."""

    def __init__(self, tensors: Sequence[TensorRange], config: dict[str, Any], family: Family, casts: Casts) -> None:
        self.tensors = tensors
        self.config = config
        self.family = family
        self.sizes = Sizes(config, family.defaults)
        self.quantization = Quantization.of(config)
        self.rules = Patterns([rule.pattern for rule in family.rules])
        self._casts = casts
        # What two modules may differ in and still be treated alike: numbers, unless a pattern spells one.
        self._key = Patterns([*(rule.pattern for rule in family.rules), *family.uncast]).key

    @cached_property
    def places(self) -> list[tuple[str, str]]:
        """Module and leaf of each of `tensors`."""
        return [split_name(tensor.name) for tensor in self.tensors]

    @cached_property
    def modules(self) -> dict[str, Leaves]:
        """The same tensors by module."""
        found: dict[str, Leaves] = {}
        for tensor, (module, leaf) in zip(self.tensors, self.places, strict=True):
            found.setdefault(module, {})[leaf] = tensor
        return found

    @property
    def tied(self) -> bool:
        """Whether head and embedding are one, by config.json or else by what the model class does."""
        text = self.config.get("text_config")
        for level in (self.config, text if isinstance(text, dict) else {}):
            stated = level.get("tie_word_embeddings")
            if isinstance(stated, bool):
                return stated
        return self.family.tied

    def holds(self, parameter: str) -> bool:
        """Whether the checkpoint has the module of `parameter`, quantized or not."""
        module = split_name(parameter)[0]
        # By names: a whole load of tens of thousands of tensors takes half the time without `modules`.
        return any(tensor.name.startswith(module) and split_name(tensor.name)[0] == module for tensor in self.tensors)

    @property
    def casts(self) -> bool:
        """Whether a tensor may have another element type in the shard."""
        return self._casts.target is not None

    def dtype(self, module: str, leaf: str) -> str:
        """The safetensors name of the tensor's element type in the shard."""
        leaves = self.modules[module]
        return self._casts.dtype(leaf, leaves[leaf], leaves)

    def signature(self, module: str) -> tuple[object, ...]:
        """Equal for modules that are cut alike."""
        leaves = self.modules[module].items()
        return (self._key(module), *((leaf, tensor.dtype, tensor.shape) for leaf, tensor in leaves))

    def sample(self) -> Model:
        """The same model with one module of each signature."""
        kept = {self.signature(module): leaves for module, leaves in self.modules.items()}
        tensors = [tensor for leaves in kept.values() for tensor in leaves.values()]
        return Model(tensors, self.config, self.family, self._casts)
