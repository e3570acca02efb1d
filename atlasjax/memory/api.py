"""The functional API: `init_params`, `init_state`, `scan`, `step`, `read`, `soup`, `reference`.

Each function checks its arguments once and calls the rule's method of the same name. A rule is a `MemoryRule`, a `SoftmaxRule` (its
memory is a cache of tokens), a `LargeChunkRule` (it writes once per chunk), a `MesaRule` (its memory is the solution of a
regression), a `CachedRule` (it also keeps the memories of earlier segments), a `LogLinearRule`, a `HierarchicalRule` (both have
several memories of one rule), or a user-defined `Rule`.
"""

import functools
import numbers
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from atlasjax.check import integer
from atlasjax.memory import backends, call_checks, check
from atlasjax.memory.fast_weights.kernels import PALLAS
from atlasjax.memory.gates import Gates
from atlasjax.memory.layerwise import step_layer, take_layer
from atlasjax.memory.meshes import fresh_on_any_mesh, on_any_mesh, read_on_any_mesh
from atlasjax.memory.partition import Partition, partitioned
from atlasjax.memory.rule import Params, Rule, State, TokensCall, check_rule
from atlasjax.memory.tokens import Tokens
from atlasjax.memory.truncation import check_truncation, truncated

for _backend in PALLAS:
    backends.register_backend(_backend)


def init_params(
    rule: Rule[Params, State], key: PRNGKeyArray, *, num_heads: int, key_dim: int, value_dim: int
) -> Params:
    """Initial learned parameters of a rule, `MemoryParams` or `SoftmaxParams`. The first axis of every leaf is heads.

    Args:
      rule: the rule.
      key: a PRNG key.
      num_heads: number of heads, ≥ 1.
      key_dim: size of a query or key.
      value_dim: size of a value.

    Raises:
      TypeError: key is not a PRNG key.
      ValueError: a size is less than one, key is several keys, or key_dim ≠ value_dim for a memory with a residual.
    """
    where = "memory.init_params"
    check_rule(rule, where)
    check.check_key(where, key)
    for name, value in {"num_heads": num_heads, "key_dim": key_dim, "value_dim": value_dim}.items():
        integer(where, name, value, kinds=numbers.Integral)
    return rule.init_params(key, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)


def init_state(rule: Rule[Params, State], params: Params, *, batch_size: int, max_length: int | None = None) -> State:
    """A fresh memory for every batch element: a `MemoryState`, `SoftmaxState` or `CachedState`.

    Args:
      rule: the rule.
      params: parameters from `init_params`, possibly trained.
      batch_size: number of batch elements.
      max_length: maximum number of tokens that will be read. Required if the memory keeps every token or segment: a softmax
        memory with a full cache, or a cached rule without a capacity.

    Raises:
      ValueError: a size is not an integer ≥ 1, the parameters belong to another rule, or max_length is missing where it is
        required.
    """
    check_rule(rule, "memory.init_state")
    sizes = {"batch_size": batch_size} | ({} if max_length is None else {"max_length": max_length})
    check.check_sizes("memory.init_state", **sizes)
    rule.check_params(params, "memory.init_state")
    return fresh_on_any_mesh(
        lambda params: rule.init_state(params, batch_size=batch_size, max_length=max_length), params
    )


def scan(
    rule: Rule[Params, State],
    params: Params,
    state: State | None,
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gates: Gates,
    *,
    segment_ids: Int[Array, "batch time"] | None = None,
    max_segments: int | None = None,
    implementation: str | None = None,
    partition: Partition | None = None,
    at_chunk_start: bool = False,
    truncation: int | None = None,
    check_gates: bool = False,
) -> tuple[Float[Array, "batch time heads value_dim"], State]:
    """Writes and reads a sequence: for every token, one step of the rule, then y_t = M_t(φ(q_t)).

    A sequence may be split into calls at any token: the outputs and the final state are those of a single call. Batch elements and
    heads are independent. Works under jit, grad, vmap and shard_map, and on meshes with explicit axes. Outside jit, a
    call and its gradient are compiled once for each rule and shape. The backward pass stores one memory per chunk. Forward-mode
    derivatives (jvp, jacfwd) exist for a `MemoryRule`, not for a `SoftmaxRule`.

    Args:
      rule: the memory rule, static under jit: a `MemoryRule`, `SoftmaxRule`, `CachedRule` or user-defined `Rule`.
      params: its learned parameters (`init_params`).
      state: the current memory. None starts from a fresh one (`init_state`) and is faster, because chunks are aligned statically. A
        memory that keeps every token or segment then has room for this call's tokens only. A call that a state has no room for is
        an error, or under jit, where that is not known, has outputs of NaN.
      q: queries, [batch, time, heads, key_dim], floating point and finite, time ≥ 1. Of a NaN the outputs of earlier tokens in the
        same chunk or block may be NaN too.
      k: keys, like q.
      v: values, [batch, time, heads, value_dim], in q's dtype.
      gates: the gates that the rule uses (`MemoryRule.gate_channels`): numbers or float32 arrays that broadcast to
        [batch, time, heads(, channels)]. `suggested_gates` gives initial values.
      segment_ids: optional integers ≥ 0, [batch, time]. Where the id changes, a new segment starts with a fresh memory and a new
        chunk, as if it were alone. The first segment continues from `state` if its id is that of the state's last token.
      max_segments: static bound on the number of segments per row, required under jit. More segments in a row are an error; under
        jit, where the ids are not known, its state and the outputs that do not fit are NaN.
      implementation: "xla"; "pallas_tpu" or "pallas_gpu" (kernels of `pallas_kernels`, without forward-mode derivatives);
        "reference" (the definition, slow); or a backend registered with `register_backend`. None takes a kernel if `atlasjax tune`
        measured it as faster on this device, or one is recorded as faster (`memory.fastest`), if it supports the call and XLA need
        not partition it over devices. Otherwise it takes "xla".
      partition: splits batch elements and heads over the devices of a mesh; for a `MemoryRule`, and for other rules whose tokens it
        divides. Kernels require it if arrays
        are sharded and the call is not inside a `shard_map`. XLA partitions its own code without it.
      at_chunk_start: a promise that `state` is at the start of a chunk in every row, as after whole chunks. Chunks are then
        aligned statically, as from a fresh memory. Not with segment_ids.
      truncation: a multiple of the chunk size. The call is divided into pieces of this many tokens, and gradients do not flow from
        a piece into earlier ones (truncated backpropagation through time). Values are not affected. None: exact gradients. Those
        of Muon memories grow exponentially with the distance (see `atlasjax.memory.truncation`).
      check_gates: checks the values of gates: raises an error outside jit, and is a `checkify.check` under jit.

    Returns:
      y [batch, time, heads, value_dim], in q's dtype, and the new state, float32 (float64 for float64 inputs).

    Raises:
      TypeError, ValueError: an invalid argument, detected before tracing.
    """
    where = "memory.scan"
    check_rule(rule, where)
    if partition is not None and not isinstance(partition, Partition):
        raise TypeError(f"{where}: partition must be a memory.Partition or None, got {partition!r}.")
    if partition is not None and not rule.has_kernels and not partition.time:
        raise ValueError(f"{where}: partition is for a MemoryRule, rule is a {type(rule).__name__}.")
    if implementation is not None and not isinstance(implementation, str):
        raise TypeError(f"{where}: implementation must be a name or None, got {implementation!r}.")
    tokens = _checked(rule, params, state, Tokens(q, k, v, gates), where)
    segment_ids, max_segments = check.whole_segments(segment_ids, max_segments, q, where)
    if segment_ids is not None and not rule.segments_continue:
        kind = type(rule).__name__
        if state is not None:
            raise ValueError(
                f"{where}: segment_ids with a {kind} require state=None: its segments cannot continue from a state."
            )
        if truncation is not None and truncation < q.shape[1]:
            raise ValueError(
                f"{where}: truncation is {truncation} with segment_ids and {q.shape[1]} tokens; segments of a {kind} cannot go on "
                "from one piece to the next. Use truncation=None, or one call for each segment without segment_ids."
            )
    if check_gates:
        call_checks.check_gate_ranges(tokens.gates, where)
    if state is not None and segment_ids is None:
        call_checks.check_room(rule, state, q.shape[1], where)
    if at_chunk_start and state is not None and segment_ids is not None:
        raise ValueError(f"{where}: at_chunk_start is given with segment_ids, whose segments have their own chunks.")
    if truncation is not None:
        check_truncation(rule, truncation, where)
        if partition is not None and partition.time:
            raise ValueError(f"{where}: truncation is given, but partition.time divides the tokens over devices.")
        if q.shape[1] <= truncation:  # one piece
            truncation = None
    run = _scan if truncation is None and partition is None else _jitted_scan
    return run(
        rule, rule.for_heads(params, q.shape[2]), state, tokens._replace(segment_ids=segment_ids), max_segments=max_segments,
        implementation=implementation, partition=partition, at_chunk_start=bool(at_chunk_start), truncation=truncation,
    )  # fmt: skip


def _scan(
    rule: Rule[Params, State], params: Params, state: State | None, tokens: Tokens, *, max_segments: int | None,
    implementation: str | None, partition: Partition | None, at_chunk_start: bool, truncation: int | None,
) -> tuple[jax.Array, State]:  # fmt: skip
    """`scan` after its checks."""
    call: TokensCall[Params, State] = functools.partial(backends.run, implementation, rule, max_segments=max_segments)
    started = _from_chunk_start(rule, call)
    first = started if at_chunk_start and state is not None else call
    if truncation is not None:
        aligned = tokens.segment_ids is None and (at_chunk_start or state is None)
        first = truncated(rule, started if aligned else call, truncation)
    if partition is not None:
        first = partitioned(partition, rule, first)
    return _on_any_mesh(rule, first, tokens.q.shape[1])(params, state, tokens)


# The engines are jitted themselves. A call that runs them in pieces or in parts is not, and would be compiled again by every call.
_jitted_scan = jax.jit(
    _scan,
    static_argnames=("rule", "max_segments", "implementation", "partition", "at_chunk_start", "truncation"),
)


def _from_chunk_start(rule: Rule[Params, State], call: TokensCall[Params, State]) -> TokensCall[Params, State]:
    def run(params: Params, state: State | None, tokens: Tokens) -> tuple[jax.Array, State]:
        assert state is not None
        y, after = call(params, rule.known_chunk_start(state), tokens)
        return y, rule.after_known_start(after, state, tokens.q.shape[1])

    return run


def _on_any_mesh(
    rule: Rule[Params, State], call: Callable[..., tuple[jax.Array, State]], time: int
) -> TokensCall[Params, State]:
    def run(params: Params, state: State | None, tokens: Tokens) -> tuple[jax.Array, State]:
        fresh = lambda params: rule.init_state(params, batch_size=tokens.q.shape[0], max_length=time)
        return on_any_mesh(call, fresh)(params, state, tokens)

    return run


def step(
    rule: Rule[Params, State],
    params: Params,
    state: State,
    q: Float[Array, "batch heads key_dim"],
    k: Float[Array, "batch heads key_dim"],
    v: Float[Array, "batch heads value_dim"],
    gates: Gates,
    *,
    layer: Int[Array, ""] | int | None = None,
    check_gates: bool = False,
) -> tuple[Float[Array, "batch heads value_dim"], State]:
    """Writes and reads one token, for decoding: `scan` without the time axis.

    The cost does not depend on the number of tokens read. A softmax memory reads its cache once, and a cached rule reads its
    memories; both sizes are fixed when the state is created.

    Args:
      rule, params, state: as in `scan`. The state is required.
      q, k: [batch, heads, key_dim]; v: [batch, heads, value_dim].
      gates: [batch, heads(, channels)].
      layer: the state is that of all layers of a model, [layers, batch, …], of which this one's is read and written: where it lies
        if the rule can (`Rule.step_layer`), otherwise it is taken out and put back whole.
      check_gates: as in `scan`.

    Returns:
      y [batch, heads, value_dim], in q's dtype, and the new state.

    Raises:
      TypeError, ValueError: an invalid argument, detected before tracing.
    """
    if state is None:
        raise ValueError("memory.step: state is None; start with memory.init_state.")
    where = "memory.step"
    check_rule(rule, where)
    tokens = Tokens(q, k, v, gates)
    tokens = tokens._replace(gates=call_checks.whole_gates(rule, tokens, where))
    if layer is not None:
        layer = check.whole_layer(layer, state, where)
    own = take_layer(state, layer)
    rule.check_call(params, own, *tokens[:4], time=False, where=where)
    _check_arrays(params, state, tokens, where)
    if check_gates:
        call_checks.check_gate_ranges(tokens.gates, where)
    call_checks.check_room(rule, own, 1, where)
    params = rule.for_heads(params, q.shape[1])
    if layer is None:
        run = lambda params, state, tokens: rule.step(params, state, *tokens[:4])
        return _on_any_mesh(rule, run, 1)(params, state, tokens)
    in_layer = lambda params, states, tokens, layer: step_layer(rule, params, states, layer, tokens)
    return on_any_mesh(in_layer, None, layers=True)(params, state, tokens, layer)


def _checked(rule: Rule[Params, State], params: Params, state: State | None, tokens: Tokens, where: str) -> Tokens:
    """The tokens of a sequence with whole gates, after the checks of a call. Segment ids are not checked here."""
    tokens = tokens._replace(gates=call_checks.whole_gates(rule, tokens, where))
    rule.check_call(params, state, *tokens[:4], time=True, where=where)
    _check_arrays(params, state, tokens, where)
    return tokens


def _check_arrays(params: Params, state: State | None, tokens: Tokens, where: str) -> None:
    q, k, v, gates, _ = tokens
    check.check_arrays(where, params=params, state=state, q=q, k=k, v=v, gates=gates)


def read(
    rule: Rule[Params, State],
    params: Params,
    state: State,
    q: Float[Array, "batch time heads key_dim"],
    connector: Float[Array, "batch time heads connector_dim"] | None = None,
    blend: Float[Array, "batch time heads"] | None = None,
) -> Float[Array, "batch time heads value_dim"]:
    """Reads without writing: M_t(φ(q)) for any number of queries.

    Args:
      rule, params, state: as in `scan`. The state is required.
      q: [batch, time, heads, key_dim], floating point.
      connector: u of a cached rule, like q. None means the queries. With connector="age" it is required, and has 1 + capacity
        channels.
      blend: λ of a cached rule with `blended`, [batch, time, heads]. None means 1.

    Returns:
      [batch, time, heads, value_dim], in q's dtype.

    Raises:
      TypeError, ValueError: an invalid argument, detected before tracing.
    """
    where = "memory.read"
    check_rule(rule, where)
    if connector is not None and not rule.has_connector:
        raise ValueError(f"{where}: connector is given, but a {type(rule).__name__} does not use it.")
    call_checks.check_read(rule, params, state, q, where)
    if blend is not None and not getattr(rule, "blended", False):
        raise ValueError(f"{where}: blend is given, but only a CachedRule with blended=True uses it.")
    check.check_arrays(where, params=params, state=state, q=q, connector=connector, blend=blend)
    for name, x in (("connector", connector), ("blend", blend)):
        if x is not None:
            check.check_floating(name, x, where)
    if connector is not None:
        channels = rule.connector_channels(q.shape[-1]) or q.shape[-1]
        check.check_shape("connector", connector, (*q.shape[:-1], channels), where)
    if blend is not None:
        check.check_shape("blend", blend, tuple(q.shape[:-1]), where)
    given = {name: x for name, x in (("connector", connector), ("blend", blend)) if x is not None}
    run = lambda params, state, q, given: rule.read(params, state, q, **given)
    return read_on_any_mesh(run, q)(params, state, q, given)


def soup(
    rule: Rule[Params, State],
    params: Params,
    states: Sequence[State],
    weights: Float[Array, " states"] | Sequence[float] | None = None,
) -> State:
    """One memory from several that the same parameters wrote: M = Σ_i w_i M^(i) (state soup, arXiv 2406.08423).

    For a matrix memory its reads are the weighted sums of the reads; for a deep one it is a model soup, as in Memory Caching (MC
    §3.2). Momenta are summed in the same way. What follows starts a new chunk, with an empty window; the segment is that of the
    first state.

    Args:
      rule, params: those that wrote the states.
      states: n ≥ 1 states of the same batch size.
      weights: w, [states]. None: 1/n, the mean. They need not sum to one.

    Returns:
      The state.

    Raises:
      TypeError, ValueError: a soup has no meaning for the rule (the message says why), a state does not belong to it, or there is
        not one finite weight for each state.
    """
    where = "memory.soup"
    check_rule(rule, where)
    rule.check_params(params, where)
    if rule.soup_limit is not None:
        raise ValueError(f"{where}: a {type(rule).__name__} has no soup: {rule.soup_limit}.")
    if not isinstance(states, list | tuple) or hasattr(states, "_fields") or not states:
        raise TypeError(f"{where}: states must be a list of at least one state, got {type(states).__name__}.")
    check.check_arrays(where, **{f"states[{i}]": state for i, state in enumerate(states)})
    batch, heads = call_checks.batch_and_heads(rule, params, states[0], f"{where}: states[0]")
    for i, state in enumerate(states):
        rule.check_state(params, state, batch, heads, f"{where}: states[{i}]")
    if weights is None:
        weights = jnp.full(len(states), 1 / len(states))
    weights = check.whole_weights(weights, len(states), where)
    if not isinstance(weights, jax.core.Tracer) and not bool(jnp.isfinite(weights).all()):
        raise ValueError(f"{where}: weights are {weights.tolist()}; they must be finite.")
    return rule.soup(states, weights)


def reference(
    rule: Rule[Params, State],
    params: Params,
    state: State | None,
    q: Float[Array, "batch time heads key_dim"],
    k: Float[Array, "batch time heads key_dim"],
    v: Float[Array, "batch time heads value_dim"],
    gates: Gates,
    *,
    segment_ids: Int[Array, "batch time"] | None = None,
) -> tuple[Float[Array, "batch time heads value_dim"], State]:
    """The definition: token by token, with inner gradients from `jax.grad`. Slow. Arguments and results as in `scan`."""
    where = "memory.reference"
    check_rule(rule, where)
    tokens = _checked(rule, params, state, Tokens(q, k, v, gates), where)
    if segment_ids is not None:
        segment_ids, _ = check.whole_segments(segment_ids, q.shape[1], q, where)
        tokens = tokens._replace(segment_ids=segment_ids)
    run = lambda params, state, tokens: rule.reference(params, state, *tokens)
    return _on_any_mesh(rule, run, q.shape[1])(params, state, tokens)
