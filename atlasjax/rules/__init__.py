"""Named memory rules: the rows of A Table 1 and related ones.

Each function takes settings (`chunk_size`, `window`, …) and returns a `MemoryRule` or a `SoftmaxRule`. `register` makes it
available by name to language models, presets, tables and experiments. A rule of your own can be registered in the same way.
`lact` and `in_place_ttt` return a `LargeChunkRule` and have no such name: a model cannot have one of them as its only memory, for
no token reads the tokens of its own chunk. The mixer "lact" has attention beside it, and so has "mag" with
`MemoryConfig(rules.lact)`. `normalized_linear_attention` has no row in A Table 1; in a model it is named by its address.

The docstrings give the recurrences of the papers. By default a rule also has bounds, which keep its memory from diverging
(`memory.Bound`, docs/semantics.md 1.12): they make steps smaller and limit weights. `rule.unbounded()` has none.
"""

# The tables list the rules in the order of these imports.
# isort: off
from atlasjax.rules.linear import gla, linear_attention, normalized_linear_attention, polysketch, retnet, mamba3
from atlasjax.rules.delta import delta_rule, longhorn, longhorn_channel, gated_delta_rule, kda, rwkv7, rwkv7_one_key
from atlasjax.rules.delta import comba, gdn2, pgdn, pkda, momentum_delta
from atlasjax.rules.deep import dgd, memora, moneta, titans, titans_no_momentum, ttt_linear, ttt_mlp, yaad
from atlasjax.rules.atlas import atlas, atlas_plus_plus, deep_transformer, dla, dot, omeganet, swdt, swla
from atlasjax.rules.regression import mesa
from atlasjax.rules.large_chunk import in_place_ttt, lact
from atlasjax.rules.registry import REGISTRY, WRITES, Rule, register

# isort: on

__all__ = [
    "REGISTRY",
    "WRITES",
    "Rule",
    "atlas",
    "atlas_plus_plus",
    "comba",
    "deep_transformer",
    "delta_rule",
    "dgd",
    "dla",
    "dot",
    "gated_delta_rule",
    "gdn2",
    "gla",
    "in_place_ttt",
    "kda",
    "lact",
    "linear_attention",
    "longhorn",
    "longhorn_channel",
    "mamba3",
    "memora",
    "mesa",
    "momentum_delta",
    "moneta",
    "normalized_linear_attention",
    "omeganet",
    "pgdn",
    "pkda",
    "polysketch",
    "register",
    "retnet",
    "rwkv7",
    "rwkv7_one_key",
    "swdt",
    "swla",
    "titans",
    "titans_no_momentum",
    "ttt_linear",
    "ttt_mlp",
    "yaad",
]
