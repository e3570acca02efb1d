"""The second mixer of a layer, in a config."""

import dataclasses

from atlasjax import check
from atlasjax.names import check_options, name_of, options_text
from atlasjax.nn.attention_config import AttentionConfig
from atlasjax.nn.memory_config import MemoryConfig


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
      ValueError: a field is out of range. `ModelConfig` says what is wrong with the mixer's name.
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
        check_options("BranchConfig", (self.mixer,), self.mixer_options, self.mixer)
        check.instance("BranchConfig", "memory", self.memory, MemoryConfig)
        check.instance("BranchConfig", "attention", self.attention, AttentionConfig)
        optional = ("num_heads", "head_dim", "value_expansion")
        check.integers(self, dict.fromkeys(optional, 1), optional)
