"""A second mixer in every layer, whose share starts at 0: how a trained model is given a memory or a window."""

import dataclasses
from typing import TYPE_CHECKING

from atlasjax import check
from atlasjax.names import name_of, options_text, resolve
from atlasjax.nn.attention_config import AttentionConfig
from atlasjax.nn.memory_config import MemoryConfig

if TYPE_CHECKING:
    from atlasjax.nn.config import ModelConfig


def resolve_mixer(name: str) -> object:
    """The class that the name of a mixer refers to. Raises ValueError as `names.resolve`."""
    from atlasjax.nn.mixers import MIXERS  # they take the configs that have such a name

    return resolve("mixer", name, MIXERS)


@dataclasses.dataclass(frozen=True)
class BranchConfig:
    """A second mixer in every layer, beside the first one: the layer adds mixer(x) + λ ⊙ branch(x), with a learned λ [dim] that is
    initially 0 (ReZero, Bachlechner et al. 2021). A trained model to which it is added starts with the same outputs.

    Attributes:
      mixer: a name in `atlasjax.nn.mixers.MIXERS`, or "package.module:Class", or the class.
      mixer_options: keyword arguments for your own mixer, a JSON object as text. A dictionary is converted to text.
      memory: the memory of a branch "memory", "mac", "mag" or "mal".
      attention: the attention of a branch that has it, such as "swa". Nothing is taken over from the model's.
      num_heads: number of heads. None: the model's.
      head_dim: size of the queries and keys of a head. None: the model's.
      value_expansion: how many times as wide as the keys the values are. None: as the model's.

    Other settings, such as `conv_width` and `norm_eps`, are the model's.

    Raises:
      ValueError: a field is out of range.
    """

    mixer: str = "memory"
    mixer_options: str = "{}"
    memory: MemoryConfig = MemoryConfig()
    attention: AttentionConfig = AttentionConfig()
    num_heads: int | None = None
    head_dim: int | None = None
    value_expansion: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "mixer", name_of("BranchConfig: mixer", self.mixer))
        object.__setattr__(self, "mixer_options", options_text("BranchConfig", "mixer_options", self.mixer_options))
        if ":" in self.mixer:
            resolve_mixer(self.mixer)
        elif self.mixer_options != "{}":
            raise ValueError(
                f"BranchConfig: mixer_options={self.mixer_options} are for a mixer of your own, named 'package.module:Class'; "
                f"mixer is {self.mixer!r}."
            )
        check.instance("BranchConfig", "memory", self.memory, MemoryConfig)
        check.instance("BranchConfig", "attention", self.attention, AttentionConfig)
        optional = ("num_heads", "head_dim", "value_expansion")
        check.integers(self, dict.fromkeys(optional, 1), optional)

    def alone(self, model: "ModelConfig") -> "ModelConfig":
        """The model with this mixer in place of its own."""
        return dataclasses.replace(
            model,
            mixer=self.mixer,
            mixer_options=self.mixer_options,
            block="pre_norm",
            memory=self.memory,
            attention=self.attention,
            num_heads=model.num_heads if self.num_heads is None else self.num_heads,
            head_dim=model.resolved_head_dim if self.head_dim is None else self.head_dim,
            value_expansion=model.value_expansion if self.value_expansion is None else self.value_expansion,
            rwkv7=dataclasses.replace(model.rwkv7, value_residual=False),
            caching=None,
            branch=None,
        )
