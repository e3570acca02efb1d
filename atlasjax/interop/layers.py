"""Layers that several families have: their rows, and their fields in config.json.

`Names` gives the peer's names of a tensor from its name inside a layer, such as "mlp.up_proj.weight".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from atlasjax.interop.table import Index, Row
from atlasjax.nn import ModelConfig

Names = Callable[[str], str | tuple[str, ...]]
ALL = slice(None)
HYBRID = {"linear_attention": "gated_deltanet", "full_attention": "attention"}
"""A kind of layer, as `layer_types` of a hybrid's config.json has it → our mixer."""
MATTERS = (
    "num_heads", "resolved_head_dim", "value_dim", "value_heads", "gated_deltanet.negative_eigenvalues", "resolved_mlp_dim",
    "head_norm", "conv_width",
)  # fmt: skip
"""`Family.matters` of such a hybrid."""


def of_type(*kinds: str) -> Callable[[Mapping[str, object]], bool]:
    """`Family.is_mine` of a family that config.json names by its model_type."""
    return lambda given: given.get("model_type") in kinds


def head_row(config: ModelConfig) -> Row:
    """The head of the language model. If it is tied, files may lack it, or repeat the embedding."""
    if config.tie_embeddings:
        return Row("lm_head.weight", "embedding", "v d -> v d", copy=True)
    return Row("lm_head.weight", "head.kernel", "v d -> d v")


def mlp_rows(names: Names) -> list[Row]:
    """The feed-forward layer, whose gate and up projections are one array here."""
    return [
        Row(names("mlp.gate_proj.weight"), "layers.mlp.gate_and_wide.kernel", "m d -> d m", part=(ALL, 0)),
        Row(names("mlp.up_proj.weight"), "layers.mlp.gate_and_wide.kernel", "m d -> d m", part=(ALL, 1)),
        Row(names("mlp.down_proj.weight"), "layers.mlp.out.kernel", "d m -> m d"),
    ]


def attention_rows(names: Names, config: ModelConfig, mixers: Sequence[str] = ("attention",)) -> list[Row]:
    """Layers of softmax attention. Consecutive heads of queries share keys and values, in our `inputs` too.

    With a gate, `q_proj` has the queries of each head followed by their gate, and so has our `inputs`.
    """
    given, sizes = config.attention, config.attention_sizes
    queries = sizes.heads // sizes.kv_heads * (sizes.key_dim + (sizes.value_dim if given.gate else 0))
    row = rows_of(names, mixers)
    found = []
    for name, part in ranges({"q": queries, "k": sizes.key_dim, "v": sizes.value_dim}):
        found.append(row(f"{name}_proj.weight", "attention.inputs.kernel", "(h k) d -> d h k", (..., part)))
        if given.bias:
            found.append(row(f"{name}_proj.bias", "attention.inputs.bias", "(h k) -> h k", (..., part)))
    if given.qk_norm != "none":
        found += [row(f"{name}_norm.weight", f"attention.{name}_norm.scale", "k -> k") for name in "qk"]
    found.append(row("o_proj.weight", "out.kernel", "d i -> i d"))
    return [*found, *([row("o_proj.bias", "out.bias", "d -> d")] if given.bias and given.output_bias else [])]


def input_rows(
    names: Names, config: ModelConfig, mixer: str, inputs: str, *, groups: int = 1, convolved: bool = True
) -> list[Row]:
    """The projections of a recurrent layer, `inputs` of the letters "qkvg", and their convolutions, which a gate has not.

    groups: heads of values of a head of keys.
    """
    key, values = config.resolved_head_dim, groups * config.value_dim
    sizes = {"q": key, "k": key, "v": values, "g": values}
    row = rows_of(names, (mixer,))
    found = []
    for name, part in ranges({name: sizes[name] for name in inputs}):
        found.append(row(f"{name}_proj.weight", "inputs.linear.kernel", "(h k) d -> d h k", (..., part)))
        if convolved and name != "g":
            found.append(row(f"{name}_conv1d.weight", "inputs.conv.kernel", "(h k) (1) w -> w h k", (..., part)))
    return found


def gate_rows(names: Names, projection: str = "{}_proj") -> list[Row]:
    """The write and the decay of Gated DeltaNet. projection: name of the module that gives "b" or "a"."""
    row = rows_of(names, ("gated_deltanet",))
    return [
        row(f"{projection.format('b')}.weight", "gates.kernel", "h d -> d h", (ALL, 0)),
        row(f"{projection.format('a')}.weight", "gates.kernel", "h d -> d h", (ALL, 1)),
        row("A_log", "A_log", "h -> h"),
        row("dt_bias", "dt_bias", "h -> h"),
    ]


def rows_of(names: Names, mixers: Sequence[str]) -> Callable[..., Row]:
    """Makes rows of layers with these mixers, from names inside the layer: the peer's, and ours inside the mixer."""

    def row(peer: str, ours: str, pattern: str, part: Index = (), rows: tuple[int, int] | None = None) -> Row:
        return Row(names(peer), f"layers.mixer.{ours}", pattern, rows, part, mixers=tuple(mixers))

    return row


def ranges(sizes: Mapping[str, int]) -> Iterator[tuple[str, slice]]:
    """Each name with its part of the last axis of our `inputs`, where these lie one after another."""
    start = 0
    for name, size in sizes.items():
        yield name, slice(start, start + size)
        start += size


def hybrid_fields(config: ModelConfig) -> dict[str, object]:
    """The fields of config.json of a model with Gated DeltaNet and attention, in the words of Qwen3.5 and OLMo-Hybrid."""
    sizes = config.attention_sizes
    kinds = {mixer: kind for kind, mixer in HYBRID.items()}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "intermediate_size": config.resolved_mlp_dim,
        "num_hidden_layers": config.num_layers,
        "layer_types": [kinds[config.pattern[n % len(config.pattern)]] for n in range(config.num_layers)],
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "attention_bias": config.attention.bias,
        "linear_num_key_heads": config.num_heads,
        "linear_num_value_heads": config.value_heads,
        "linear_key_head_dim": config.resolved_head_dim,
        "linear_value_head_dim": config.value_dim,
        "linear_conv_kernel_dim": config.conv_width,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tie_embeddings,
    }
