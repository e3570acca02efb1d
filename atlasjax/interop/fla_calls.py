"""Calls of flash-linear-attention's functions as calls of `memory.scan`, and their states in both directions.

Besides the rules (`fla_functions`) this differs: queries are multiplied by `scale` inside, key_dim^{−1/2} unless given; queries and
keys may be normalized inside; and with grouped heads, each head of queries and keys serves several heads of values.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from atlasjax import check, memory
from atlasjax.interop.fla_functions import AXES, PEERS, Given, Peer, axes_of
from atlasjax.memory import Gates
from atlasjax.memory.check import Arrays, check_floating, check_shape
from atlasjax.memory.products import wide_dtype
from atlasjax.memory.rule import Rule, State
from atlasjax.names import lookup


class MemoryCall(NamedTuple):
    """The arguments of `memory.scan`, in its order: `y, state = memory.scan(*call)`.

    Attributes:
      rule: the rule without bounds, which is the peer's recurrence.
      params: M_0 = 0 for each head of values; the ridge of MesaNet.
      state: the peer's `initial_state`, or None.
      q: queries, scaled and, if asked for, normalized; [batch, time, heads, key_dim], as many heads as v has. Where a token has
        several writes (`chunk_gated_delta_product`), time is that of the writes, and `mixers.delta_product.last_reads(y, n)` are
        the outputs of tokens.
      k: keys, like q.
      v: values, [batch, time, heads, value_dim].
      gates: decays as factors, step sizes; float32.
    """

    rule: Rule
    params: PyTree
    state: PyTree | None
    q: Float[Array, "batch time heads key_dim"]
    k: Float[Array, "batch time heads key_dim"]
    v: Float[Array, "batch time heads value_dim"]
    gates: Gates


# Options that say how, not what, the peer computes.
_IGNORED = {
    "output_final_state", "output_attentions", "chunk_size", "chunk_indices", "cu_seqlens_cpu", "disable_recompute", "safe_gate",
    "lower_bound", "use_graph", "max_num_seqs", "max_CG_iteration", "solve_tril_precision",
}  # fmt: skip
# Options that change the result: what to give in their place.
_INSTEAD = {
    "normalize": "it must be False: a memory does not divide by sums of scores; a channel of ones in v gives them",
    "use_p_times_alpha": "it must be True, as published",
    "use_gate_in_kernel": "it must be False, with g = -exp(A_log) * softplus(g + dt_bias)",
    "use_beta_sigmoid_in_kernel": "it must be False, with beta = sigmoid(beta), or twice that with allow_neg_eigval",
    "allow_neg_eigval": "it must be False, with beta = 2 * sigmoid(beta)",
    "cu_seqlens": "give memory.scan segment_ids = np.repeat(np.arange(len(cu_seqlens) - 1), np.diff(cu_seqlens))[None]",
    "reverse": "it must be False: flip the time axis of the arguments and of the output",
    "head_first": "it has been removed: axes are [batch, time, heads, dim]",
    "return_intermediate_states": "it must be False: memory.scan returns the final state",
    "cp_context": "it must be None: memory.scan takes a partition",
}


def from_fla(name: str, *arguments: Arrays | None, **options: Any) -> MemoryCall:
    """A call of a function of flash-linear-attention as one of `memory.scan`, which gives its output and its final state.

        o, S = chunk_kda(q, k, v, g, beta, initial_state=S)                                      # PyTorch
        y, state = memory.scan(*from_fla("chunk_kda", q, k, v, g, beta, initial_state=S))        # JAX
        S = to_fla_state("chunk_kda", state)

    The rule is `unbounded()`: the peer's recurrence, which can diverge where ours with bounds cannot. It is differentiable, and
    works under jit, where values are not checked.

    Args:
      name: the function, such as "chunk_gla" or "fused_recurrent_rwkv7"; `PEERS` has all names.
      *arguments: its arrays in its order, JAX or NumPy (`x.numpy()` of a tensor on a CPU), [batch, time, heads, …].
      **options: its other arguments, by its names: arrays, `scale`, `initial_state`, `use_qk_l2norm_in_kernel`, `state_v_first`.
        Those that say only how it computes have no effect.

    Raises:
      TypeError: an argument that the function does not have, or that is not an array of numbers.
      ValueError: an unknown name, a missing argument or a wrong shape; a log decay above 0, which decays or step sizes in the wrong
        place have (fla takes g before beta, its naive forms beta before g); or an option that a memory has in another form.
    """
    peer = lookup("function of flash-linear-attention", name, PEERS)
    where = f"interop.from_fla: {name}({', '.join(peer.arrays)})"
    given, others = _named(peer, arguments, {**peer.defaults, **options}, where)
    start = {name: others.pop(name) for name in axes_of(peer.states.axes) if others.get(name) is not None}
    scale, normalized, value_first, transposed = (
        others.pop(option, None)
        for option in ("scale", "use_qk_l2norm_in_kernel", "state_v_first", "transpose_state_layout")
    )
    numbers = {name: others.pop(name) for name in peer.numbers if name in others}
    _check_others(others, where)
    check.number(where, "scale", scale, above=0, optional=True)
    sizes, tokens = _checked(peer, given, where)
    tokens = {"q" if name == "r" else name: x for name, x in tokens.items()}  # RWKV's word for a query
    wide = wide_dtype(tokens["v"].dtype)
    for name, x in tokens.items():
        if name in ("q", "k", "p"):
            factor = (scale or sizes["k"] ** -0.5) if name == "q" else 1.0
            tokens[name] = _prepared(x, bool(normalized), factor)
        if name not in ("q", "k", "v"):
            tokens[name] = tokens[name].astype(wide)
    ours = peer.translate(tokens, **numbers)
    rule = ours.rule.unbounded()
    sized = {"num_heads": sizes["n"], "key_dim": sizes["k"], "value_dim": sizes["v"]}
    params = memory.init_params(rule, jax.random.key(0), **sized)._replace(**ours.params)
    state = None
    if start:
        state = memory.init_state(rule, params, batch_size=sizes["b"])
        state = peer.states.ours(state, _checked_start(peer, start, sizes, bool(value_first or transposed), where))
    q, k, v = ({**tokens, **ours.changed}[name] for name in ("q", "k", "v"))
    return MemoryCall(rule, params, state, q, k, v, ours.gates)


def to_fla_state(name: str, state: State, *, state_v_first: bool = False) -> PyTree:
    """The peer's final state of our state: S = Wᵀ, [batch, heads, key_dim, value_dim].

    With momentum it is [2, …], S and the momentum. Of MesaNet it is the pair h_kk, h_kv. The curvature of preconditioned rules is
    not in the state: `mixers.curvature.preconditioned_keys` gives it.

    Args:
      name: the function, as in `from_fla`.
      state: the state of such a call, before or after it.
      state_v_first: the layout that the peer's argument of this name chooses: W itself.

    Raises:
      ValueError: an unknown name.
    """
    state = lookup("function of flash-linear-attention", name, PEERS).states.theirs(state)
    return jax.tree.map(lambda x: x.mT, state) if state_v_first else state


def _named(
    peer: Peer, arguments: tuple[Arrays | None, ...], options: dict[str, Any], where: str
) -> tuple[dict[str, Arrays], dict[str, Any]]:
    """Arrays by their names, and the options that are not among them."""
    names = list(peer.arrays)
    if len(arguments) > len(names):
        raise TypeError(f"{where}: got {len(arguments)} positional arguments, must be at most {len(names)}.")
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
        neutral = value is None or value is (option == "use_p_times_alpha")
        if option == "head_first" or (option in _INSTEAD and not neutral):
            raise ValueError(f"{where}: {option} is {check.shown(value)}; {_INSTEAD[option]}.")


def _checked_start(peer: Peer, start: dict[str, Arrays], sizes: dict[str, int], value_first: bool, where: str) -> Given:
    """The peer's states before a call, [key_dim, value_dim], in float32 as ours."""
    arrays = {}
    for name, axes in axes_of(peer.states.axes).items():
        if name in start:
            letters = axes[:-2] + axes[:-3:-1] if value_first else axes
            x = check_shape(name, start[name], tuple(sizes.get(axis, 2) for axis in letters), where)
            arrays[name] = jnp.asarray(x, wide_dtype(jnp.float32))
            arrays[name] = arrays[name].mT if value_first else arrays[name]
    return arrays


def _checked(peer: Peer, given: dict[str, Arrays], where: str) -> tuple[dict[str, int], Given]:
    """Sizes by axis, and the arrays, those with heads of keys repeated for all heads of values."""
    sizes: dict[str, int] = {}
    for name, axes in peer.arrays.items():
        if name in given:
            letters = axes.strip("-?")
            shape = tuple(sizes.get(axis, AXES[axis]) for axis in letters)
            x = check_shape(name, given[name], shape, where)
            check_floating(name, x, where)
            sizes = dict(zip(letters, x.shape)) | sizes
            if sizes.get("n", sizes["h"]) % sizes["h"]:
                raise ValueError(
                    f"{where}: v has {sizes['n']} heads, must be a multiple of {sizes['h']}, as q and k have."
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
