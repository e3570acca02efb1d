"""flash-linear-attention's functions (0.6.0) in terms of our rules, one line of a table for each.

Its decays are logarithms g = log α ≤ 0, and its states are transposed, S = Wᵀ [key_dim, value_dim].
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from atlasjax import rules
from atlasjax.memory import Gates
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Rule
from atlasjax.mixers.curvature import CENTER, preconditioned_keys
from atlasjax.mixers.delta_product import interleaved

AXES = {
    "b": "batch", "t": "time", "r": "time * num_householder", "h": "heads", "n": "value heads", "k": "key_dim", "v": "value_dim",
}  # fmt: skip
Given = dict[str, jax.Array]


class Ours(NamedTuple):
    """A call in our terms. changed: those of q, k and v that are not the peer's. params: given fields of the parameters."""

    rule: Rule
    gates: Gates
    changed: Mapping[str, jax.Array] = {}
    params: Mapping[str, jax.Array] = {}


class States(NamedTuple):
    """The peer's states. axes: its arguments with them. ours: (a fresh state, these arguments) → a state. theirs: the way back."""

    axes: str
    ours: Callable[[Any, Given], Any]
    theirs: Callable[[Any], Any]


_MATRIX = States(
    "initial_state=bnkv",
    lambda fresh, given: fresh._replace(memory={"W": given["initial_state"].mT}),
    lambda state: state.memory["W"].mT,
)
# The peer's momentum is that of the gradient, ours that of the step.
_MOMENTUM = States(
    "initial_state=2bnkv",
    lambda fresh, given: fresh._replace(
        memory={"W": given["initial_state"][0].mT}, momentum={"W": -given["initial_state"][1].mT}
    ),
    lambda state: jnp.stack([state.memory["W"].mT, -state.momentum["W"].mT]),
)
_SUMS = States(
    "h_kk_init=bhkk h_kv_init=bhkv",
    lambda fresh, given: fresh._replace(
        key_sums=given.get("h_kk_init", fresh.key_sums), value_sums=given.get("h_kv_init", fresh.value_sums.mT).mT
    ),
    lambda state: (state.key_sums, state.value_sums.mT),
)


def axes_of(text: str) -> dict[str, str]:
    return dict(part.split("=") for part in text.split())


@dataclasses.dataclass(frozen=True)
class Peer:
    """One function.

    Attributes:
      axes: its arrays in its order, "name=axes", with the letters of `AXES`. Behind them "-" marks a log decay, and "?" an array
        that may be missing.
      translate: its arrays, by its names → the call in our terms.
      defaults: its options whose defaults are not those of most functions; a scale of None is key_dim^{−1/2}.
      states: its states.
      numbers: its options that `translate` takes as keywords, with the peer's defaults.
    """

    axes: str
    translate: Callable[..., Ours]
    defaults: Mapping[str, object] = dataclasses.field(default_factory=dict)
    states: States = _MATRIX
    numbers: tuple[str, ...] = ()

    @property
    def arrays(self) -> dict[str, str]:
        return axes_of(self.axes)


def _ones(given: Given) -> jax.Array:
    return jnp.ones(given["v"].shape[:3], wide_dtype(given["v"].dtype))


def _head_decays(given: Given, decays: jax.Array) -> jax.Array:
    """Decays [heads] for every token."""
    return jnp.broadcast_to(decays.astype(wide_dtype(given["v"].dtype)), given["v"].shape[:3])


def _linear_attention(given: Given) -> Ours:
    return Ours(rules.linear_attention(), Gates(step_size=_ones(given)))


def _retention(given: Given) -> Ours:
    decays = 1.0 - jnp.exp2(-5.0 - jnp.arange(given["v"].shape[2]))
    return Ours(rules.retnet(), Gates(retention=_head_decays(given, decays), step_size=_ones(given)))


def _simple_gla(given: Given) -> Ours:
    decays = _ones(given)
    if "g" in given:
        decays = decays * jnp.exp(given["g"])
    if "g_gamma" in given:
        decays = decays * _head_decays(given, jnp.exp(given["g_gamma"]))
    return Ours(rules.retnet(), Gates(retention=decays, step_size=_ones(given)))


def _gla(given: Given) -> Ours:
    return Ours(rules.gla(), Gates(retention=jnp.exp(given["g"]), step_size=_ones(given)))


def _recurrent_gla(given: Given) -> Ours:
    _no_value_decays(given)
    decays = jnp.exp(given["gk"]) if "gk" in given else jnp.ones_like(given["k"], wide_dtype(given["k"].dtype))
    return Ours(rules.gla(), Gates(retention=decays, step_size=_ones(given)))


def _delta_rule(given: Given) -> Ours:
    return Ours(rules.delta_rule(), Gates(step_size=given.get("beta", _ones(given))))


def _gated_delta_rule(given: Given) -> Ours:
    _no_value_decays(given)
    beta, decays = given.get("beta", _ones(given)), jnp.exp(given["g"]) if "g" in given else _ones(given)
    if "gk" not in given:
        return Ours(rules.gated_delta_rule(), Gates(retention=decays, step_size=beta))
    return Ours(rules.kda(), Gates(retention=decays[..., None] * jnp.exp(given["gk"]), step_size=beta))


def _kda(given: Given) -> Ours:
    return Ours(rules.kda(), Gates(retention=jnp.exp(given["g"]), step_size=given["beta"]))


def _comba(given: Given) -> Ours:
    beta = given.get("beta", _ones(given))
    return Ours(rules.comba(), Gates(retention=jnp.exp(given["g"]), step_size=beta, removal_key=given["p"]))


def _gdn2(given: Given) -> Ours:
    v, read_key = (given["w"] * given["v"]).astype(given["v"].dtype), given["b"] * given["k"]
    return Ours(rules.gdn2(), Gates(jnp.exp(given["g"]), step_size=_ones(given), removal_key=read_key), {"v": v})


def _preconditioned(given: Given, x: float = 1.5, eps: float = 1e-6) -> Ours:
    """PGDN, or PKDA with decays for each channel: both read at k, and write at keys that the curvature scales."""
    _no_value_decays(given)
    if eps != 1e-6:
        raise ValueError(f"interop.from_fla: eps is {eps}; it must be 1e-6.")
    keys, _ = preconditioned_keys(
        given["k"], given["beta_atk"], jnp.exp(given["g_atk"]), given.get("log_atk_scale", CENTER),
        state=given.get("initial_A_state"), largest=x,
    )  # fmt: skip
    plain, read_key = _gated_delta_rule(given), given["k"].astype(wide_dtype(given["k"].dtype))
    has_channels = "gk" in given or given["g"].ndim == 4
    rule = rules.pkda() if has_channels else rules.pgdn()
    return Ours(rule, plain.gates._replace(removal_key=read_key), {"k": keys})


def _delta_product(given: Given, num_householder: int | None = None) -> Ours:
    tokens, (batch, rows) = given["q"].shape[1], given["k"].shape[:2]
    writes = rows // tokens if num_householder is None else num_householder
    if rows != tokens * writes or not writes:
        should = "a multiple of it" if num_householder is None else f"num_householder={writes} times as many"
        raise ValueError(f"interop.from_fla: q has {tokens} tokens and k has {rows}, must be {should}.")
    of_writes = lambda x: x.reshape(batch, tokens, writes, *x.shape[2:])
    gates = Gates(jnp.exp(given["g"]) if "g" in given else None, of_writes(given["beta"]))
    q, k, v, gates, _ = interleaved(given["q"], of_writes(given["k"]), of_writes(given["v"]), gates)
    rule = rules.gated_delta_rule() if "g" in given else rules.delta_rule()
    return Ours(rule, gates, {"q": q, "k": k, "v": v})


def _momentum_delta(given: Given) -> Ours:
    if "p" in given:
        raise ValueError("interop.from_fla: p is given; it must be None: the rule takes its errors at k.")
    eta, beta = given.get("eta", _ones(given)), given.get("beta", _ones(given))
    gates = Gates(jnp.exp(given["log_alpha"]), eta, momentum_decay=jnp.exp(given["log_mu"]), write_size=beta)
    return Ours(rules.momentum_delta(), gates)


def _mesa(given: Given) -> Ours:
    rule = rules.mesa(floor=1e-3)  # below any λ of a model; λ = floor + softplus(ridge)
    excess = given["lamb"] - rule.floor
    ridge = excess + jnp.log(-jnp.expm1(-excess))  # the inverse of softplus
    return Ours(rule, Gates(jnp.exp(given["g"]), given["beta"]), params={"ridge": ridge})


def _no_value_decays(given: Given) -> None:
    if "gv" in given:
        raise ValueError(
            "interop.from_fla: gv is given, but no rule has decays for each channel of the value; it must be None."
        )


def _rwkv7(given: Given, decays: str = "") -> Ours:
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
    return Ours(rules.rwkv7(), Gates(retention=alpha, removal_key=-first, removal=rate))


def _rwkv7_rates(given: Given) -> Ours:
    return Ours(rules.rwkv7(), Gates(retention=jnp.exp(given["w"]), removal_key=given["kk"], removal=given["a"]))


_QKV = "q=bthk k=bthk v=bthv"
_GROUPED = "q=bthk k=bthk v=btnv"
_RWKV7 = "r=bthk w=bthk- k=bthk v=bthv"
_LINEAR = Peer(_QKV, _linear_attention, {"normalize": True})
_RETENTION = Peer(_QKV, _retention)
_SIMPLE_GLA = Peer(f"{_QKV} g=bth-? g_gamma=h-?", _simple_gla)
_GLA = Peer(f"{_QKV} g=bthk-", _gla)
_GATED = Peer(f"{_GROUPED} g=btn- beta=btn", _gated_delta_rule)
_RECURRENT_GATED = Peer(f"{_GROUPED} g=btn-? gk=btnk-? gv=btnv-? beta=btn?", _gated_delta_rule)
_KDA = Peer(f"{_GROUPED} g=btnk- beta=btn", _kda)
_GDN2 = Peer(f"{_QKV} g=bthk- b=bthk w=bthv", _gdn2)
# The curvature of keys is no state of the rule: `preconditioned_keys` gives the last one, the peer's third result.
_CURVATURE = "initial_A_state=bhk? log_atk_scale=h?"
_preconditioned_peer = lambda axes: Peer(
    f"{axes} {_CURVATURE}", _preconditioned, {"use_qk_l2norm_in_kernel": True}, numbers=("x", "eps")
)
_PKDA = _preconditioned_peer(f"{_QKV} g=bthk- g_atk=bth- beta_atk=bth beta=bth")
_MOMENTUM_DELTA = Peer(
    f"{_QKV} log_alpha=bth- log_mu=bth- p=bthk? beta=bth? eta=bth?", _momentum_delta,
    {"use_qk_l2norm_in_kernel": True, "use_p_times_alpha": True}, _MOMENTUM,
)  # fmt: skip
_DPLR = Peer(f"{_QKV} a=bthk b=bthk gk=bthk-", functools.partial(_rwkv7, decays="gk"))
_IPLR = Peer(f"{_QKV} a=bthk b=bthk", _rwkv7)

PEERS: Mapping[str, Peer] = {
    "chunk_linear_attn": _LINEAR,
    "fused_chunk_linear_attn": _LINEAR,
    "fused_recurrent_linear_attn": Peer(_QKV, _linear_attention),
    "chunk_retention": _RETENTION,
    "fused_chunk_retention": _RETENTION,
    "fused_recurrent_retention": _RETENTION,
    "parallel_retention": _RETENTION,
    "chunk_simple_gla": _SIMPLE_GLA,
    "fused_chunk_simple_gla": _SIMPLE_GLA,
    "fused_recurrent_simple_gla": _SIMPLE_GLA,
    "parallel_simple_gla": Peer(f"{_QKV} g=bth-?", _simple_gla),
    "chunk_gla": _GLA,
    "fused_recurrent_gla": Peer(f"{_QKV} gk=bthk-? gv=bthv-?", _recurrent_gla),
    "chunk_delta_rule": Peer(f"{_QKV} beta=bth", _delta_rule),
    "fused_recurrent_delta_rule": Peer(f"{_QKV} beta=bth?", _delta_rule),
    "chunk_gated_delta_rule": _GATED,
    "chunk_gdn": _GATED,
    "fused_recurrent_gated_delta_rule": _RECURRENT_GATED,
    "fused_recurrent_gdn": _RECURRENT_GATED,
    "chunk_kda": _KDA,
    "fused_recurrent_kda": _KDA,
    "chunk_comba": Peer(f"{_GROUPED} p=bthk g=btn- beta=btn?", _comba),
    "fused_recurrent_comba": Peer("q=bthk k=bthk p=bthk v=btnv g=btn- beta=btn?", _comba),
    "chunk_gdn2": _GDN2,
    "fused_recurrent_gdn2": _GDN2,
    "chunk_precond_gated_delta_rule": _preconditioned_peer(f"{_GROUPED} g_atk=bth- g=btn- beta_atk=bth beta=btn"),
    "fused_recurrent_precond_gated_delta_rule": _preconditioned_peer(
        f"{_GROUPED} g=btn-? gk=btnk-? gv=btnv-? beta=btn? g_atk=bth- beta_atk=bth"
    ),
    "chunk_precond_kda": _PKDA,
    "fused_recurrent_precond_kda": _PKDA,
    "chunk_gated_delta_product": Peer(
        "q=bthk k=brhk v=brhv g=bth-? beta=brh", _delta_product, numbers=("num_householder",)
    ),
    "chunk_momentum_delta_rule": _MOMENTUM_DELTA,
    "fused_recurrent_momentum_delta_rule": _MOMENTUM_DELTA,
    "chunk_mesa_net": Peer(f"{_QKV} g=bth- beta=bth lamb=hk", _mesa, {"scale": 1.0}, _SUMS),
    "chunk_rwkv7": Peer(f"{_RWKV7} a=bthk b=bthk", functools.partial(_rwkv7, decays="w"), {"scale": 1.0}),
    "fused_recurrent_rwkv7": Peer(f"{_RWKV7} a=bthk b=bthk", functools.partial(_rwkv7, decays="w")),
    "fused_mul_recurrent_rwkv7": Peer(f"{_RWKV7} kk=bthk a=bthk", _rwkv7_rates, {"scale": 1.0}),
    "chunk_dplr_delta_rule": _DPLR,
    "fused_recurrent_dplr_delta_rule": _DPLR,
    "chunk_iplr_delta_rule": _IPLR,
    "fused_recurrent_iplr_delta_rule": _IPLR,
}
