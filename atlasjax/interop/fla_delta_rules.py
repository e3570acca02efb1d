"""Later recurrent models of flash-linear-attention: Kimi Delta Attention, Gated DeltaProduct, Comba, MesaNet."""

from collections.abc import Mapping
from typing import Any

from atlasjax.check import is_finite, shown
from atlasjax.interop.family import Family, Fields, Sizes
from atlasjax.interop.fla import (
    GENERATION,
    MATTERS,
    NEUTRAL,
    SOFTMAX,
    fla_frame,
    in_mixer,
    layer_fields,
    recurrent_rows,
    shared_fields,
)
from atlasjax.interop.layers import ALL, input_rows, of_type, ranges, rows_of
from atlasjax.interop.table import Row
from atlasjax.interop.unused import ROTARY
from atlasjax.nn import DeltaProductConfig, GatedDeltaNetConfig, HeadNormConfig, KDAConfig, MesaConfig, ModelConfig
from atlasjax.train.errors import ConfigError

_NORM = ("o_norm.weight",)


def _rates(mixer: str) -> list[Row]:
    """A_log and dt_bias of a decay of each head."""
    row = rows_of(in_mixer, (mixer,))
    return [row("A_log", "A_log", "h -> h"), row("dt_bias", "dt_bias", "h -> h")]


def _kda_rows(config: ModelConfig) -> list[Row]:
    groups = (config.kda.value_heads or config.num_heads) // config.num_heads
    row = rows_of(in_mixer, ("kda",))
    gates = [
        row("f_proj.0.weight", "decay.logits.down.kernel", "r d -> d r"),
        row("f_proj.1.weight", "decay.logits.up.kernel", "(h k) r -> r h k"),
        row("A_log", "decay.A_log", "h -> h"),
        row("dt_bias", "decay.dt_bias", "(h k) -> h k"),
        row("g_proj.0.weight", "gate.down.kernel", "r d -> d r"),
        row("g_proj.1.weight", "gate.up.kernel", "(h k) r -> r h k"),
        row("g_proj.1.bias", "gate.up.bias", "(h k) -> h k"),
        row("b_proj.weight", "beta.kernel", "h d -> d h"),
    ]
    return recurrent_rows(config, "kda", _NORM, input_rows(in_mixer, config, "kda", "qkv", groups=groups), gates)


def _sizes(fields: Fields, heads: int, head_dim: int, expand_v: float | None) -> dict[str, Any]:
    """Our fields for the sizes of a head, with the family's defaults. expand_v None: keys and values have the same size."""
    size = fields.integer("head_dim", head_dim)
    wide = 1
    if expand_v is not None:
        wide = fields.whole("expand_v", fields.number("expand_v", default=expand_v), "times the size of the keys")
    return {"num_heads": fields.integer("num_heads", heads), "head_dim": size, "value_expansion": wide}


def _scaled_norm(norm_eps: float, head_dim: int) -> HeadNormConfig:
    """The norm of the heads where the peer scales q by head_dim^{−1/2}."""
    return HeadNormConfig(shared=True, eps=norm_eps * head_dim)


def _lower_bound(given: dict[str, object]) -> float | None:
    """The lower bound of the logarithm of the decay, which decides by itself which gate the peer computes."""
    safe, bound = given.pop("safe_gate", False), given.pop("lower_bound", None)
    if safe not in (False, True):
        raise ConfigError(f"config.json of KDA: safe_gate is {shown(safe)}; it must be true or false.")
    if bound is None and not safe:
        return None
    if not is_finite(bound) or not -1e30 < bound < 0 or (safe and bound < -5):
        wanted = "a number from -5 to below 0, since safe_gate is true" if safe else "a negative number or null"
        raise ConfigError(f"config.json of KDA: lower_bound is {shown(bound)}; it must be {wanted}.")
    return float(bound)


def _kda(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    known = dict(given)
    bound = _lower_bound(known)
    fields = Fields(known, "KDA", sizes)
    fields.fixed(use_short_conv=True)
    dim, of_head = fields.integer("hidden_size", 2048), _sizes(fields, 16, 128, 1.0)
    shared = shared_fields(fields, dim)
    config = ModelConfig(
        **layer_fields(fields, "KDA", "kda", dim, fields.layers("num_hidden_layers", 24)),
        kda=KDAConfig(
            value_heads=fields.optional_integer("num_v_heads"),
            negative_eigenvalues=fields.boolean("allow_neg_eigval", False),
            lower_bound=bound,
            gate_bias=True,
        ),
        conv_width=fields.integer("conv_size", 4),
        head_norm=_scaled_norm(shared["norm_eps"], of_head["head_dim"]),
        **of_head,
        **shared,
    )
    fields.done(NEUTRAL)
    return config


def _peer_kda(config: ModelConfig) -> dict[str, object]:
    bound = config.kda.lower_bound
    return fla_frame(config, "kda", "KDAForCausalLM") | {
        "head_dim": config.resolved_head_dim,
        "expand_v": config.value_expansion,
        "num_v_heads": config.kda.value_heads,
        "allow_neg_eigval": config.kda.negative_eigenvalues,
        "safe_gate": bound is not None and bound >= -5,
        "lower_bound": bound,
        "conv_size": config.conv_width,
    }


KDA = Family(
    "kda", ("kda", *SOFTMAX), of_type("kda"), _kda, _peer_kda, _kda_rows, (*MATTERS, "kda", "conv_width"), unused=(ROTARY,),
    generation=GENERATION,
)  # fmt: skip


def _deltaproduct_rows(config: ModelConfig) -> list[Row]:
    """The peer's rows of k and v are those of the first write, then of the second one; ours are those of the first head."""
    mixer, writes = "gated_deltaproduct", config.gated_deltaproduct.writes
    row, inputs = rows_of(in_mixer, (mixer,)), []
    key, value = config.resolved_head_dim, config.value_dim
    sizes = {"q": key, "k": writes * key, "v": writes * value, "g": value}
    for name, part in ranges(sizes):
        count = writes if name in "kv" else 1
        size = sizes[name] // count
        for n in range(count):
            here = (..., slice(part.start + n * size, part.start + (n + 1) * size))
            theirs = (n * config.num_heads * size, (n + 1) * config.num_heads * size) if count > 1 else None
            inputs.append(row(f"{name}_proj.weight", "inputs.linear.kernel", "(h k) d -> d h k", here, theirs))
            if name != "g":
                inputs.append(row(f"{name}_conv1d.weight", "inputs.conv.kernel", "(h k) (1) w -> w h k", here, theirs))
    gates = [row("b_proj.weight", "gates.kernel", "(n h) d -> d n h", (ALL, slice(0, writes)))]
    if config.gated_deltaproduct.forget_gate:
        gates += [row("a_proj.weight", "gates.kernel", "h d -> d h", (ALL, writes)), *_rates(mixer)]
    return recurrent_rows(config, mixer, _NORM, inputs, gates)


def _deltaproduct(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    name = "Gated DeltaProduct"
    fields = Fields(given, name, sizes)
    fields.fixed(use_output_gate=True, use_short_conv=True)
    dim, of_head = fields.integer("hidden_size", 2048), _sizes(fields, 6, 256, 2.0)
    shared = shared_fields(fields, dim)
    config = ModelConfig(
        **layer_fields(fields, name, "gated_deltaproduct", dim, fields.layers("num_hidden_layers", 21)),
        gated_deltaproduct=DeltaProductConfig(
            writes=fields.integer("num_householder", 1),
            negative_eigenvalues=fields.boolean("allow_neg_eigval", False),
            forget_gate=fields.boolean("use_forget_gate", False),
        ),
        conv_width=fields.integer("conv_size", 4),
        head_norm=_scaled_norm(shared["norm_eps"], of_head["head_dim"]),
        **of_head,
        **shared,
    )
    fields.done(NEUTRAL)
    return config


def _peer_deltaproduct(config: ModelConfig) -> dict[str, object]:
    given = config.gated_deltaproduct
    return fla_frame(config, "gated_deltaproduct", "GatedDeltaProductForCausalLM") | {
        "head_dim": config.resolved_head_dim,
        "expand_v": config.value_expansion,
        "num_householder": given.writes,
        "allow_neg_eigval": given.negative_eigenvalues,
        "use_forget_gate": given.forget_gate,
        "conv_size": config.conv_width,
    }


GATED_DELTAPRODUCT = Family(
    "gated_deltaproduct", ("gated_deltaproduct", *SOFTMAX), of_type("gated_deltaproduct"), _deltaproduct, _peer_deltaproduct,
    _deltaproduct_rows, (*MATTERS, "gated_deltaproduct", "conv_width"), unused=(ROTARY,), generation=GENERATION,
)  # fmt: skip


def _comba_rows(config: ModelConfig) -> list[Row]:
    row = rows_of(in_mixer, ("comba",))
    inputs = input_rows(in_mixer, config, "comba", "qkvg", groups=config.value_heads // config.num_heads)
    gates = [
        row("b_proj.weight", "gates.kernel", "h d -> d h", (ALL, 0)),
        row("a_proj.weight", "gates.kernel", "h d -> d h", (ALL, 1)),
        *_rates("comba"),
        row("decay", "inner_decay", "h -> h"),
        row("D", "correction", "h -> h"),
    ]
    return recurrent_rows(config, "comba", _NORM, inputs, gates)


def _comba(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, "Comba", sizes)
    # The peer's model has both whatever these two fields say.
    fields.fixed(use_output_gate=True, use_short_conv=True, use_output_correction=True, use_inner_decay=True)
    dim, of_head = fields.integer("hidden_size", 2048), _sizes(fields, 6, 256, 2.0)
    shared = shared_fields(fields, dim)
    config = ModelConfig(
        **layer_fields(fields, "Comba", "comba", dim, fields.layers("num_hidden_layers", 21)),
        gated_deltanet=GatedDeltaNetConfig(value_heads=fields.optional_integer("num_v_heads")),
        conv_width=fields.integer("conv_size", 4),
        head_norm=_scaled_norm(shared["norm_eps"], of_head["head_dim"]),
        **of_head,
        **shared,
    )
    fields.done((*NEUTRAL, "correction_factor"))  # an initial value
    return config


def _peer_comba(config: ModelConfig) -> dict[str, object]:
    return fla_frame(config, "comba", "CombaForCausalLM") | {
        "head_dim": config.resolved_head_dim,
        "expand_v": config.value_expansion,
        "num_v_heads": config.gated_deltanet.value_heads,
        "conv_size": config.conv_width,
    }


COMBA = Family(
    "comba", ("comba", *SOFTMAX), of_type("comba"), _comba, _peer_comba, _comba_rows, (*MATTERS, "value_heads", "conv_width"),
    unused=(ROTARY,), generation=GENERATION,
)  # fmt: skip


def _mesa_rows(config: ModelConfig) -> list[Row]:
    row, key = rows_of(in_mixer, ("mesa",)), config.resolved_head_dim
    inputs = []
    for name, part in ranges(dict.fromkeys("qkvg" if config.mesa.output_gate else "qkv", key)):
        inputs.append(row(f"{name}_proj.weight", "inputs.linear.kernel", "(h k) d -> d h k", (..., part)))
        if name in "qk":
            inputs.append(row(f"{name}_conv1d.weight", "inputs.conv.kernel", "(h k) (1) w -> w h k", (..., part)))
    gates = [
        *(row(f"{x}_proj.weight", "gates.kernel", "h d -> d h", (ALL, n)) for n, x in enumerate("ab")),
        *(row(f"{x}_proj.bias", "gate_bias", "h -> h", (n,)) for n, x in enumerate("ab")),
        row("lambda_params", "ridge", "(h k) -> h k"),
    ]
    return recurrent_rows(config, "mesa", _NORM, inputs, gates)


def _mesa(given: Mapping[str, object], sizes: Sizes) -> ModelConfig:
    fields = Fields(given, "MesaNet", sizes)
    fields.fixed(use_short_conv=True, lambda_lower_bound=0.25)
    steps = fields.integer("max_cg_step_training", 30, is_axis=False)
    decoding = fields.integer("max_cg_step_decoding", 30, is_axis=False)
    if decoding != steps:
        raise ConfigError(
            f"config.json of MesaNet: max_cg_step_decoding is {decoding}; it must be {steps}, as max_cg_step_training."
        )
    dim, of_head = fields.integer("hidden_size", 2048), _sizes(fields, 16, 128, None)
    shared = shared_fields(fields, dim)
    config = ModelConfig(
        **layer_fields(fields, "MesaNet", "mesa", dim, fields.layers("num_hidden_layers", 24)),
        mesa=MesaConfig(output_gate=fields.boolean("use_output_gate", False), steps=steps),
        conv_width=fields.integer("conv_size", 4),
        head_norm=HeadNormConfig(shared=True),
        **of_head,
        **shared,
    )
    fields.done(NEUTRAL)
    return config


def _peer_mesa(config: ModelConfig) -> dict[str, object]:
    return fla_frame(config, "mesa_net", "MesaNetForCausalLM") | {
        "head_dim": config.resolved_head_dim,
        "use_output_gate": config.mesa.output_gate,
        "max_cg_step_training": config.mesa.steps,
        "max_cg_step_decoding": config.mesa.steps,
        "conv_size": config.conv_width,
    }


MESA_NET = Family(
    "mesa_net", ("mesa", *SOFTMAX), of_type("mesa_net"), _mesa, _peer_mesa, _mesa_rows, (*MATTERS, "mesa", "conv_width"),
    unused=(ROTARY,), generation=GENERATION,
)  # fmt: skip
