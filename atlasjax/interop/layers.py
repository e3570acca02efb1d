"""Layers that several families have: their rows, and their fields in config.json.

`Names` gives the peer's names of a tensor from its name inside a layer, such as "mlp.up_proj.weight".
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from atlasjax.interop.table import Index, Row
from atlasjax.nn import ModelConfig

Names = Callable[[str], str | tuple[str, ...]]
ALL = slice(None)
HYBRID = {"linear_attention": "gated_deltanet", "full_attention": "attention"}
"""A kind of layer, as `layer_types` of a hybrid's config.json has it → our mixer."""
MATTERS = (
    "num_heads", "resolved_head_dim", "value_dim", "value_heads", "gated_deltanet.negative_eigenvalues", "dense_width",
    "expert_form", "head_norm", "conv_width",
)  # fmt: skip
"""`Family.matters` of such a hybrid."""


def in_layer(name: str) -> str:
    """The usual name of a tensor in a layer."""
    return f"model.layers.{{n}}.{name}"


def of_type(*kinds: str) -> Callable[[Mapping[str, object]], bool]:
    """`Family.is_mine` of a family that config.json names by its model_type."""
    return lambda given: given.get("model_type") in kinds


def head_row(config: ModelConfig) -> Row:
    """The head of the language model. If it is tied, files may lack it, or repeat the embedding."""
    if config.tie_embeddings:
        return Row("lm_head.weight", "embedding", "v d -> v d", copy=True)
    return Row("lm_head.weight", "head.kernel", "v d -> d v")


def mlp_rows(names: Names, peer: str = "mlp", ours: str = "mlp", network: str = "swiglu") -> list[Row]:
    """The feed-forward network "swiglu", whose gate and up projections are one array here.

    peer, ours: where it is in a layer. network: kind of the layer's network, "experts" for a shared one.
    """
    row = functools.partial(Row, network=network)
    named = lambda name: names(f"{peer}.{name}_proj.weight")
    return [
        row(named("gate"), f"layers.{ours}.gate_and_wide.kernel", "m d -> d m", part=(ALL, 0)),
        row(named("up"), f"layers.{ours}.gate_and_wide.kernel", "m d -> d m", part=(ALL, 1)),
        row(named("down"), f"layers.{ours}.out.kernel", "d m -> m d"),
    ]


def expert_rows(names: Names, config: ModelConfig) -> list[Row]:
    """The experts, each with tensors of its own. names: of their number, as {e}, and a projection, "gate", "up" or "down"."""
    row = functools.partial(Row, network="experts")
    found, wide = [], _WIDE[config.experts.network]
    for e in range(config.experts.number):
        for name, part in wide.items():
            found.append(row(_numbered(names(name), e), "layers.mlp.wide", "m d -> d m", part=(e, *part)))
        found.append(row(_numbered(names("down"), e), "layers.mlp.out", "d m -> m d", part=(e,)))
    return found


_WIDE: dict[str, dict[str, Index]] = {"swiglu": {"gate": (ALL, 0), "up": (ALL, 1)}, "relu2": {"up": ()}}


def router_rows(names: Names) -> list[Row]:
    """The router in the words of DeepSeek-V3, with the bias by which experts are chosen."""
    return [
        Row(names("gate.weight"), "layers.mlp.router.kernel", "e d -> d e", network="experts"),
        Row(names("gate.e_score_correction_bias"), "layers.mlp.correction", "e -> e", network="experts"),
    ]


def _numbered(names: str | tuple[str, ...], expert: int) -> str | tuple[str, ...]:
    number = lambda name: name.replace("{e}", str(expert))
    return number(names) if isinstance(names, str) else tuple(map(number, names))


def joined_expert_rows(wide: str | tuple[str, ...], out: str | tuple[str, ...]) -> list[Row]:
    """The experts of SwiGLU in two tensors: all gates and up projections [experts, 2 m, d], and all down projections."""
    return [
        Row(wide, "layers.mlp.wide", "e (p m) d -> e d p m", network="experts"),
        Row(out, "layers.mlp.out", "e d m -> e m d", network="experts"),
    ]


def joined_experts(names: Names) -> Callable[[list[Row], ModelConfig], list[Row]]:
    """`Family.older` of files where two tensors have the projections of all experts of a layer. names: of these."""

    def changed(rows: list[Row], config: ModelConfig) -> list[Row]:
        others = [row for row in rows if row.ours not in ("layers.mlp.wide", "layers.mlp.out")]
        return others + joined_expert_rows(names("mlp.experts.gate_up_proj"), names("mlp.experts.down_proj"))

    return changed


JOINED_EXPERTS = r"\.mlp\.experts\.gate_up_proj$"
"""Pattern of such a name."""


def attention_rows(
    names: Names, config: ModelConfig, mixers: Sequence[str] = ("attention",), inside: str = ""
) -> list[Row]:
    """Layers of softmax attention. Consecutive heads of queries share keys and values, in our `inputs` too.

    With a gate, `q_proj` has the queries of each head followed by their gate, and so has our `inputs`. inside: as for `rows_of`.
    """
    given, sizes = config.attention, config.attention_sizes
    queries = sizes.heads // sizes.kv_heads * (sizes.key_dim + (sizes.value_dim if given.gate else 0))
    row = rows_of(names, mixers, inside)
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


def mamba2_rows(names: Names, config: ModelConfig, mixers: Sequence[str] = ("mamba2",), inside: str = "") -> list[Row]:
    """Layers of Mamba-2. The rows of `in_proj` are z, x, B, C, Δ; the channels of `conv1d` x, B, C. inside: as for `rows_of`."""
    inner, selection = config.ssm_inner, 2 * config.ssm.groups * config.ssm.state_dim
    widths = (0, inner, inner, selection, inner // config.ssm.head_dim)
    z, x, selected, step = itertools.pairwise(itertools.accumulate(widths))
    mixed, chosen = (0, inner), (inner, inner + selection)
    row = rows_of(names, mixers, inside)
    found = [
        row("in_proj.weight", "inputs.kernel", "i d -> d i", (ALL, 0), z),
        row("in_proj.weight", "inputs.kernel", "i d -> d i", (ALL, 1), x),
        row("in_proj.weight", "selection.kernel", "s d -> d s", rows=selected),
        row("in_proj.weight", "step.kernel", "h d -> d h", rows=step),
        row("conv1d.weight", "conv.kernel", "i (1) w -> w i", rows=mixed),
        row("conv1d.weight", "selection_conv.kernel", "s (1) w -> w s", rows=chosen),
        row("conv1d.bias", "conv_bias", "i -> i", rows=mixed),
        row("conv1d.bias", "selection_bias", "s -> s", rows=chosen),
        *(row(name, name, "h -> h") for name in ("dt_bias", "A_log", "D")),
        row("out_proj.weight", "out.kernel", "d i -> i d"),
    ]
    return found if config.ssm.output_norm == "none" else [*found, row("norm.weight", "norm.scale", "i -> i")]


MAMBA2_MATTERS = (
    "ssm.state_dim", "ssm.head_dim", "ssm.groups", "ssm_inner", "ssm.output_norm", "ssm.least_step", "ssm.largest_step",
    "conv_width",
)  # fmt: skip
"""`Family.matters` of Mamba-2."""


def step_limit(config: ModelConfig) -> list[object]:
    """The field time_step_limit of a model with Mamba-2, as transformers writes it."""
    largest = config.ssm.largest_step
    return [config.ssm.least_step, {"__float__": "Infinity"} if largest is None else largest]


def rows_of(names: Names, mixers: Sequence[str], inside: str = "") -> Callable[..., Row]:
    """Makes rows of layers with these mixers, from names inside the layer: the peer's, and ours inside the mixer.

    inside: path of a part of the mixer to which the rows belong, with a dot at its end.
    """

    def row(peer: str, ours: str, pattern: str, part: Index = (), rows: tuple[int, int] | None = None) -> Row:
        return Row(names(peer), f"layers.mixer.{inside}{ours}", pattern, rows, part, mixers=tuple(mixers))

    return row


def ranges(sizes: Mapping[str, int]) -> Iterator[tuple[str, slice]]:
    """Each name with its part of the last axis of our `inputs`, where these lie one after another."""
    start = 0
    for name, size in sizes.items():
        yield name, slice(start, start + size)
        start += size


def exact_fraction(part: int, whole: int) -> float:
    """part / whole, where a peer computes the part as int(whole · fraction): rounded up if that would be one less."""
    found = part / whole
    return found if int(whole * found) == part else math.nextafter(found, math.inf)


def peer_frame(config: ModelConfig, kind: str, architecture: str) -> dict[str, object]:
    """The fields that every config.json of transformers has."""
    return {
        "architectures": [architecture], "model_type": kind, "vocab_size": config.vocab_size, "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers, "tie_word_embeddings": config.tie_embeddings,
    }  # fmt: skip


def hybrid_fields(config: ModelConfig, kind: str, architecture: str) -> dict[str, object]:
    """The fields of config.json of a model with Gated DeltaNet and attention, in the words of Qwen3.5 and OLMo-Hybrid."""
    sizes = config.attention_sizes
    kinds = {mixer: name for name, mixer in HYBRID.items()}
    return peer_frame(config, kind, architecture) | {
        "intermediate_size": config.resolved_mlp_dim,
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
    }
