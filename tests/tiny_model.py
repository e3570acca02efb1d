"""A model with every kind of state, which several files decode: compiled programs are shared where their shapes agree."""

import functools

from flax import nnx

from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.nn import AttentionConfig, LanguageModel, MemoryConfig, ModelConfig

# A memory with a convolution; keys and values of all tokens; learned positions.
CONFIG = ModelConfig(
    vocab_size=256, dim=16, num_layers=2, num_heads=2, mlp_dim=32, dtype="float32", mixer=("memory", "attention"),
    memory=MemoryConfig(rule="linear_attention", chunk_size=4), attention=AttentionConfig(), positions="learned",
    max_positions=64, tie_embeddings=False,
)  # fmt: skip


@functools.cache
def model() -> LanguageModel:
    return LanguageModel(CONFIG, rngs=nnx.Rngs(0))


class Ascii(ByteTokenizer):
    """Every token is a character, so that a text has stop strings."""

    def decode(self, ids):
        return "".join(chr(32 + int(i) % 95) for i in ids)
