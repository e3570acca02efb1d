"""Calls of flash-linear-attention's functions as calls of `memory.scan`, and their states in both directions.

Its conventions (version 0.6.0): axes [batch, time, heads, dim]; decays as logarithms g = log α ≤ 0; queries multiplied by `scale`
inside, key_dim^{−1/2} unless given; optionally keys and queries normalized inside; states transposed, S = Wᵀ [key_dim, value_dim];
and with grouped heads, each head of queries and keys serves several heads of values.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from atlasjax import check, memory, rules
from atlasjax.memory import Gates, MemoryParams, MemoryRule, MemoryState
from atlasjax.memory.check import Arrays, check_floating, check_shape
from atlasjax.memory.products import wide_dtype
from atlasjax.names import lookup


class MemoryCall(NamedTuple):
    """The arguments of `memory.scan`, in its order: `y, state = memory.scan(*call)`.

    Attributes:
      rule: the rule without bounds, which is the peer's recurrence.
      params: M_0 = 0 for each head of values.
      state: the peer's `initial_state`, or None.
      q: queries, scaled and, if asked for, normalized; [batch, time, heads, key_dim], as many heads as v has.
      k: keys, like q.
      v: values, [batch, time, heads, value_dim].
      gates: decays as factors, step sizes; float32.
    """

    rule: MemoryRule
    params: MemoryParams
    state: MemoryState | None
    q: Float[Array, "batch time heads key_dim"]
    k: Float[Array, "batch time heads key_dim"]
    v: Float[Array, "batch time heads value_dim"]
    gates: Gates


_Given = dict[str, jax.Array]
_AXES = {"b": "batch", "t": "time", "h": "heads", "n": "value heads", "k": "key_dim", "v": "value_dim"}


@dataclasses.dataclass(frozen=True)
class _Peer:
    """One function.

    Attributes:
      axes: its arrays in its order, "name=axes", with the letters of `_AXES`. Behind them "-" marks a log decay, and "?" an array
        that may be missing.
      translate: its arrays, by its names → our rule, changed arrays by our names, and our gates.
      scale: its default; None is key_dim^{−1/2}.
      normalize: whether it divides by sums of scores unless told otherwise.
    """

    axes: str
    translate: Callable[[_Given], tuple[MemoryRule, _Given, Gates]]
    scale: float | None = None
    normalize: bool = False

    @property
    def arrays(self) -> dict[str, str]:
        return dict(part.split("=") for part in self.axes.split())


def _ones(given: _Given) -> jax.Array:
    return jnp.ones(given["v"].shape[:3], wide_dtype(given["v"].dtype))


def _head_decays(given: _Given, decays: jax.Array) -> jax.Array:
    """Decays [heads] for every token."""
    return jnp.broadcast_to(decays.astype(wide_dtype(given["v"].dtype)), given["v"].shape[:3])


def _linear_attention(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    return rules.linear_attention(), {}, Gates(step_size=_ones(given))


def _retention(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    decays = 1.0 - jnp.exp2(-5.0 - jnp.arange(given["v"].shape[2]))
    return rules.retnet(), {}, Gates(retention=_head_decays(given, decays), step_size=_ones(given))


def _simple_gla(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    decays = _ones(given)
    if "g" in given:
        decays = decays * jnp.exp(given["g"])
    if "g_gamma" in given:
        decays = decays * _head_decays(given, jnp.exp(given["g_gamma"]))
    return rules.retnet(), {}, Gates(retention=decays, step_size=_ones(given))


def _gla(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    return rules.gla(), {}, Gates(retention=jnp.exp(given["g"]), step_size=_ones(given))


def _recurrent_gla(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    _no_value_decays(given)
    decays = jnp.exp(given["gk"]) if "gk" in given else jnp.ones_like(given["k"], wide_dtype(given["k"].dtype))
    return rules.gla(), {}, Gates(retention=decays, step_size=_ones(given))


def _delta_rule(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    return rules.delta_rule(), {}, Gates(step_size=given.get("beta", _ones(given)))


def _gated_delta_rule(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    _no_value_decays(given)
    beta, decays = given.get("beta", _ones(given)), jnp.exp(given["g"]) if "g" in given else _ones(given)
    if "gk" not in given:
        return rules.gated_delta_rule(), {}, Gates(retention=decays, step_size=beta)
    return rules.kda(), {}, Gates(retention=decays[..., None] * jnp.exp(given["gk"]), step_size=beta)


def _kda(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    return rules.kda(), {}, Gates(retention=jnp.exp(given["g"]), step_size=given["beta"])


def _comba(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    beta = given.get("beta", _ones(given))
    return rules.comba(), {}, Gates(retention=jnp.exp(given["g"]), step_size=beta, removal_key=given["p"])


def _gdn2(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    v, read_key = (given["w"] * given["v"]).astype(given["v"].dtype), given["b"] * given["k"]
    return rules.gdn2(), {"v": v}, Gates(jnp.exp(given["g"]), step_size=_ones(given), removal_key=read_key)


def _no_value_decays(given: _Given) -> None:
    if "gv" in given:
        raise ValueError(
            "interop.from_fla: gv is given, but no rule has decays for each channel of the value; it should be None."
        )


def _rwkv7(given: _Given, decays: str = "") -> tuple[MemoryRule, _Given, Gates]:
    """W_t = W_{t−1}(Diag(α) + a bᵀ) + v kᵀ, with a = −κ̂ and b = κ̂ ⊙ rate; decays: the name of log α, if there is one."""
    first, second = given["a"], given["b"]
    unreachable = (first == 0) & (second != 0)
    if not isinstance(unreachable, jax.core.Tracer) and bool(unreachable.any()):
        raise ValueError(
            "interop.from_fla: b is not 0 where a is; in RWKV-7's rule it is a multiple of a, channel by channel."
        )
    # The inner `where` keeps 0 / 0 out of the gradient.
    rate = jnp.where(first == 0, 0.0, -second / jnp.where(first == 0, 1.0, first))
    alpha = jnp.exp(given[decays]) if decays else jnp.ones_like(rate)
    return rules.rwkv7(), {}, Gates(retention=alpha, removal_key=-first, removal=rate)


def _rwkv7_rates(given: _Given) -> tuple[MemoryRule, _Given, Gates]:
    return rules.rwkv7(), {}, Gates(retention=jnp.exp(given["w"]), removal_key=given["kk"], removal=given["a"])


_QKV = "q=bthk k=bthk v=bthv"
_GROUPED = "q=bthk k=bthk v=btnv"
_RWKV7 = "r=bthk w=bthk- k=bthk v=bthv"
_LINEAR = _Peer(_QKV, _linear_attention, normalize=True)
_RETENTION = _Peer(_QKV, _retention)
_SIMPLE_GLA = _Peer(f"{_QKV} g=bth-? g_gamma=h-?", _simple_gla)
_GLA = _Peer(f"{_QKV} g=bthk-", _gla)
_GATED = _Peer(f"{_GROUPED} g=btn- beta=btn", _gated_delta_rule)
_RECURRENT_GATED = _Peer(f"{_GROUPED} g=btn-? gk=btnk-? gv=btnv-? beta=btn?", _gated_delta_rule)
_KDA = _Peer(f"{_GROUPED} g=btnk- beta=btn", _kda)
_GDN2 = _Peer(f"{_QKV} g=bthk- b=bthk w=bthv", _gdn2)
_DPLR = _Peer(f"{_QKV} a=bthk b=bthk gk=bthk-", functools.partial(_rwkv7, decays="gk"))
_IPLR = _Peer(f"{_QKV} a=bthk b=bthk", _rwkv7)

PEERS: Mapping[str, _Peer] = {
    "chunk_linear_attn": _LINEAR,
    "fused_chunk_linear_attn": _LINEAR,
    "fused_recurrent_linear_attn": _Peer(_QKV, _linear_attention),
    "chunk_retention": _RETENTION,
    "fused_chunk_retention": _RETENTION,
    "fused_recurrent_retention": _RETENTION,
    "parallel_retention": _RETENTION,
    "chunk_simple_gla": _SIMPLE_GLA,
    "fused_chunk_simple_gla": _SIMPLE_GLA,
    "fused_recurrent_simple_gla": _SIMPLE_GLA,
    "parallel_simple_gla": _Peer(f"{_QKV} g=bth-?", _simple_gla),
    "chunk_gla": _GLA,
    "fused_recurrent_gla": _Peer(f"{_QKV} gk=bthk-? gv=bthv-?", _recurrent_gla),
    "chunk_delta_rule": _Peer(f"{_QKV} beta=bth", _delta_rule),
    "fused_recurrent_delta_rule": _Peer(f"{_QKV} beta=bth?", _delta_rule),
    "chunk_gated_delta_rule": _GATED,
    "chunk_gdn": _GATED,
    "fused_recurrent_gated_delta_rule": _RECURRENT_GATED,
    "fused_recurrent_gdn": _RECURRENT_GATED,
    "chunk_kda": _KDA,
    "fused_recurrent_kda": _KDA,
    "chunk_comba": _Peer(f"{_GROUPED} p=bthk g=btn- beta=btn?", _comba),
    "fused_recurrent_comba": _Peer("q=bthk k=bthk p=bthk v=btnv g=btn- beta=btn?", _comba),
    "chunk_gdn2": _GDN2,
    "fused_recurrent_gdn2": _GDN2,
    "chunk_rwkv7": _Peer(f"{_RWKV7} a=bthk b=bthk", functools.partial(_rwkv7, decays="w"), scale=1.0),
    "fused_recurrent_rwkv7": _Peer(f"{_RWKV7} a=bthk b=bthk", functools.partial(_rwkv7, decays="w")),
    "fused_mul_recurrent_rwkv7": _Peer(f"{_RWKV7} kk=bthk a=bthk", _rwkv7_rates, scale=1.0),
    "chunk_dplr_delta_rule": _DPLR,
    "fused_recurrent_dplr_delta_rule": _DPLR,
    "chunk_iplr_delta_rule": _IPLR,
    "fused_recurrent_iplr_delta_rule": _IPLR,
}

# Options that say how, not what, the peer computes.
_IGNORED = {
    "output_final_state", "output_attentions", "chunk_size", "chunk_indices", "cu_seqlens_cpu", "disable_recompute", "safe_gate",
    "lower_bound", "use_graph", "max_num_seqs",
}  # fmt: skip
# Options that change the result: what to give in their place.
_INSTEAD = {
    "normalize": "it should be False: a memory does not divide by sums of scores; a channel of ones in v gives them",
    "use_gate_in_kernel": "it should be False, with g = -exp(A_log) * softplus(g + dt_bias)",
    "use_beta_sigmoid_in_kernel": "it should be False, with beta = sigmoid(beta), or twice that with allow_neg_eigval",
    "allow_neg_eigval": "it should be False, with beta = 2 * sigmoid(beta)",
    "cu_seqlens": "give memory.scan segment_ids = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))[None]",
    "reverse": "it should be False: flip the time axis of the arguments and of the output",
    "head_first": "it has been removed: axes are [batch, time, heads, dim]",
    "return_intermediate_states": "it should be False: memory.scan returns the final state",
    "cp_context": "it should be None: memory.scan takes a partition",
}


def from_fla(name: str, *arguments: Arrays | None, **options: Any) -> MemoryCall:
    """A call of a function of flash-linear-attention as one of `memory.scan`, which gives its output and its final state.

        o, S = chunk_kda(q, k, v, g, beta, initial_state=S)                                      # PyTorch
        y, state = memory.scan(*from_fla("chunk_kda", q, k, v, g, beta, initial_state=S))        # JAX
        S = to_fla_state(state)

    The rule is `unbounded()`: the peer's recurrence, which can diverge where ours with bounds cannot. It is differentiable, and
    works under jit, where values are not checked.

    Args:
      name: the function, such as "chunk_gla" or "fused_recurrent_rwkv7"; `PEERS` has all names.
      *arguments: its arrays in its order, JAX or NumPy (`x.numpy()` of a tensor on a CPU), [batch, time, heads, …].
      **options: its other arguments, by its names: arrays, `scale`, `initial_state`, `use_qk_l2norm_in_kernel` and `state_v_first`.
        Those that say only how it computes have no effect.

    Raises:
      TypeError: an argument that the function does not have, or that is not an array of numbers.
      ValueError: an unknown name, a missing argument or a wrong shape; a log decay above 0, which decays or step sizes in the wrong
        place have (fla takes g before beta, its naive forms beta before g); or an option that a memory has in another form.
    """
    peer = lookup("function of flash-linear-attention", name, PEERS)
    where = f"interop.from_fla: {name}({', '.join(peer.arrays)})"
    given, others = _named(peer, arguments, {"normalize": peer.normalize, **options}, where)
    scale, start, normalized, value_first = (
        others.pop(option, default)
        for option, default in (
            ("scale", None), ("initial_state", None), ("use_qk_l2norm_in_kernel", False), ("state_v_first", False),
        )
    )  # fmt: skip
    _check_others(others, where)
    check.number(where, "scale", scale, above=0, optional=True)
    sizes, tokens = _checked(peer, given, where)
    tokens = {"q" if name == "r" else name: x for name, x in tokens.items()}  # RWKV's word for a query
    wide = wide_dtype(tokens["v"].dtype)
    for name, x in tokens.items():
        factor = (scale or peer.scale or sizes["k"] ** -0.5) if name == "q" else 1.0
        if name in ("q", "k", "p"):
            tokens[name] = _prepared(x, bool(normalized), factor)
        if name not in ("q", "k", "v"):
            tokens[name] = tokens[name].astype(wide)
    rule, changed, gates = peer.translate(tokens)
    q, k, v = ((tokens | changed)[name] for name in ("q", "k", "v"))
    rule = rule.unbounded()
    params = memory.init_params(rule, jax.random.key(0), num_heads=sizes["n"], key_dim=sizes["k"], value_dim=sizes["v"])
    state = None
    if start is not None:
        axes = "bnvk" if value_first else "bnkv"
        W = check_shape("initial_state", start, tuple(sizes[axis] for axis in axes), where)
        state = memory.init_state(rule, params, batch_size=sizes["b"])
        W = jnp.asarray(W, state.memory["W"].dtype)
        state = state._replace(memory={"W": W if value_first else W.mT})
    return MemoryCall(rule, params, state, q, k, v, gates)


def to_fla_state(state: MemoryState, *, state_v_first: bool = False) -> Float[Array, "batch heads key_dim value_dim"]:
    """The peer's `final_state` of our state: S = Wᵀ, [batch, heads, key_dim, value_dim]; with state_v_first W itself.

    Args:
      state: the state of a rule of `from_fla`.
      state_v_first: the layout that the peer's argument of this name chooses.
    """
    W = state.memory["W"]
    return W if state_v_first else W.mT


def _named(
    peer: _Peer, arguments: tuple[Arrays | None, ...], options: dict[str, Any], where: str
) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """Arrays by their names, and the options that are not among them."""
    names = list(peer.arrays)
    if len(arguments) > len(names):
        raise TypeError(f"{where}: got {len(arguments)} positional arguments, should be at most {len(names)}.")
    both = dict(zip(names, arguments))
    for name in names:
        if name in options:
            if name in both:
                raise TypeError(f"{where}: {name} is given twice.")
            both[name] = options.pop(name)
    given = {name: x for name, x in both.items() if x is not None}
    for name, axes in peer.arrays.items():
        if name not in given and "?" not in axes:
            raise ValueError(f"{where}: {name} is missing.")
    return given, options


def _check_others(options: dict[str, object], where: str) -> None:
    for option, value in options.items():
        if option not in _INSTEAD | dict.fromkeys(_IGNORED):
            raise TypeError(f"{where}: there is no argument {option!r}.")
        if option == "head_first" or (option in _INSTEAD and value is not None and value is not False):
            raise ValueError(f"{where}: {option} is {check.shown(value)}; {_INSTEAD[option]}.")


def _checked(peer: _Peer, given: dict[str, Arrays], where: str) -> tuple[dict[str, int], _Given]:
    """Sizes by axis, and the arrays, those with heads of keys repeated for all heads of values."""
    sizes: dict[str, int] = {}
    for name, axes in peer.arrays.items():
        if name in given:
            letters = axes.strip("-?")
            shape = tuple(sizes.get(axis, _AXES[axis]) for axis in letters)
            x = check_shape(name, given[name], shape, where)
            check_floating(name, x, where)
            sizes = dict(zip(letters, x.shape)) | sizes
            if sizes.get("n", sizes["h"]) % sizes["h"]:
                raise ValueError(
                    f"{where}: v has {sizes['n']} heads, should be a multiple of {sizes['h']}, as q and k have."
                )
    sizes.setdefault("n", sizes["h"])
    arrays = {}
    for name, value in given.items():
        axes, x = peer.arrays[name], jnp.asarray(value)
        if "-" in axes and not isinstance(x, jax.core.Tracer) and x.is_fully_addressable and bool((x > 0).any()):
            raise ValueError(f"{where}: {name} is {float(x.max()):g} at its largest; a log decay is at most 0.")
        arrays[name] = jnp.repeat(x, sizes["n"] // sizes["h"], axis=axes.index("h")) if "h" in axes else x
    return sizes, arrays


def _prepared(x: jax.Array, normalized: bool, factor: float) -> jax.Array:
    """Queries or keys, normalized as the peer does, and scaled, with one rounding to their dtype."""
    wide = x.astype(wide_dtype(x.dtype))
    if normalized:
        wide = wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide * factor).astype(x.dtype)
