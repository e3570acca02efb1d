"""Suggested step sizes (`memory.suggested`): no recurrence diverges at them, whatever the chunk, and the bound hardly acts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory, rules
from atlasjax.memory import MemoryRule, features, objectives, optimizers, retention, structures
from atlasjax.memory.suggested import initial_gates
from tests.marks import some_slow
from tests.memory.cases import assert_close

CHUNKS = (1, 2, 4, 8, 16)
DECAYS = (0.0, 0.5, 0.8, 0.9, 0.95, 0.99)
DIM, TIME, FEW = 4, 4096, 256
MOMENTUM = optimizers.Momentum()
GATED = structures.GatedMLP(expansion=2)
NORMED = structures.MLP(depth=1, norm=True)


def has_any_chunk(rule):
    """Whether a rule is defined for chunks of more than one token (`fast_weights.clashes`)."""
    return not (rule.retention.decay_first or rule.optimizer.is_implicit or rule.objective.own_keys)


CASES = {
    "matrix": MemoryRule(structures.Matrix()),
    "matrix_window": MemoryRule(structures.Matrix(), window=4),
    "mlp": MemoryRule(structures.MLP(expansion=2)),
    "omega": MemoryRule(structures.MLP(expansion=2), features=features.Polynomial(2), window=4),
    "gated": MemoryRule(GATED),
    "gated_omega": MemoryRule(GATED, features=features.Polynomial(2), window=4),
    "normed": MemoryRule(NORMED),
    "huber": MemoryRule(structures.MLP(expansion=2), objectives.Huber()),
    "moneta": dataclasses.replace(rules.moneta(), optimizer=MOMENTUM),
    "memora": dataclasses.replace(rules.memora(), optimizer=MOMENTUM),
    "channel": MemoryRule(structures.Matrix(), retention=retention.Channel()),
} | {
    f"{name} without momentum": rule
    for name, make in rules.REGISTRY.items()
    if isinstance(rule := make(), MemoryRule) and rule.step_bound is not None and not rule.optimizer.has_momentum
    and has_any_chunk(rule)
}  # fmt: skip
SLOW = set(CASES) - {"matrix_window", "omega", "gated"}


def rows_of_chunks(rule):
    """The rule with longer chunks, and its suggested gates, of batch row i for chunks of CHUNKS[i], of head j for θ = DECAYS[j]."""
    heads = len(DECAYS)
    channels = rule.gate_channels(DIM, DIM)
    start = initial_gates(rule, heads, DIM, DIM, None).values
    decays = np.asarray(DECAYS)
    gamma = start.get("window_weights", np.ones((heads, 1)))
    steps = [
        dataclasses.replace(rule, chunk_size=b).suggested_steps(
            DIM, DIM, 1.0 - start.get("retention", np.ones((heads, 1)))[:, 0], decays, gamma, False
        )[0]
        for b in CHUNKS
    ]
    values = {name: np.broadcast_to(x, (len(CHUNKS), *x.shape)) for name, x in start.items()}
    values["step_size"] = np.broadcast_to(np.asarray(steps)[..., None], (*np.shape(steps), channels["step_size"] or 1))
    if "momentum_decay" in values:
        values["momentum_decay"] = np.broadcast_to(decays[:, None], (len(CHUNKS), heads, 1))
    gates = {name: values[name] if n else values[name][..., 0] for name, n in channels.items()}
    return dataclasses.replace(rule, chunk_size=64), memory.Gates(
        **{n: jnp.asarray(x, jnp.float32) for n, x in gates.items()}
    )


@pytest.mark.parametrize("name", some_slow(CASES, SLOW))
def test_short_chunks(name):
    """Random unit keys and values, every chunk size with every θ: the papers' recurrence stays small, and the bound takes less than
    a tenth off the median step. With a gradient counted only to the end of its chunk, chunks of 1, 2 and 4 failed both."""
    rule, gates = rows_of_chunks(CASES[name])
    heads = len(DECAYS)
    params = memory.init_params(rule, jax.random.key(0), num_heads=heads, key_dim=DIM, value_dim=DIM)
    k, v = jax.random.normal(jax.random.key(1), (2, TIME, len(CHUNKS), heads, DIM))
    k, v = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (k, v))
    start = memory.init_state(rule, params, batch_size=len(CHUNKS))
    bounded = rule.within_horizon(gates)

    def write(rule, state, token, gates):
        """One token, each row at the position that its own chunk size gives it."""
        t, k, v = token
        one = jax.tree.map(lambda x: x[:, None], (k, k, v, gates))
        y, after = memory.reference(rule, params, state._replace(position=t % jnp.asarray(CHUNKS)), *one)
        return after, y

    def size(state, token):
        state, y = write(rule.unbounded(), state, token, gates)
        return state, jnp.abs(y).max()

    def ratio(state, token):
        """η'/η, from what the step changes in the memory."""
        full_and_none = jax.tree.map(lambda x: jnp.stack([x, x]), bounded)
        full_and_none = full_and_none._replace(step_size=full_and_none.step_size.at[1].set(0.0))
        after, changes = None, []
        for kind in (rule.unbounded(), rule):
            after, _ = jax.vmap(lambda gates, kind=kind: write(kind, state, token, gates))(full_and_none)
            changes.append(jax.tree.map(lambda x: x[0] - x[1], after.memory))
        inner = lambda a, b: sum(jnp.sum(a[n] * b[n], axis=(-2, -1)) for n in a)
        return jax.tree.map(lambda x: x[0], after), inner(*changes) / inner(changes[0], changes[0])

    @jax.jit
    def run(k, v):
        tokens = (jnp.arange(TIME), k, v)
        few = jax.tree.map(lambda x: x[:FEW], tokens)
        return jax.lax.scan(size, start, tokens)[1], jax.lax.scan(ratio, start, few)[1]

    sizes, ratios = run(k, v)
    assert sizes.max() < 10.0
    medians = np.median(np.asarray(ratios), axis=0)
    assert (medians > 0.9).all(), dict(zip(CHUNKS, np.round(medians, 2).tolist(), strict=True))


def test_a_chunk_lands_halfway_also_by_the_momentum_after_it():
    """16 tokens with one key, then others: in the end the memory has gone half of the way, whatever θ is."""
    heads, dim, chunk, time = 2, 8, 16, 320
    rule = MemoryRule(structures.Matrix(), retention=retention.Full(), chunk_size=chunk).unbounded()
    sizes = {"num_heads": heads, "key_dim": dim, "value_dim": dim}
    params = memory.init_params(rule, jax.random.key(0), **sizes)
    gates = memory.suggested_gates(rule, batch_size=1, time=time, **sizes)
    k = jnp.eye(dim)[jnp.where(jnp.arange(time) < chunk, 0, 1 + jnp.arange(time) % (dim - 1))]
    k = jnp.broadcast_to(k[None, :, None], (1, time, heads, dim))
    _, state = memory.scan(rule, params, None, k, k, k, gates)
    assert_close(memory.read(rule, params, state, k[:, :1])[..., 0], jnp.full((1, 1, heads), 0.5), 1e-5)


def returns(x, chunk, decay, every):
    """Spectral radius of (M, S) over `every` chunks, the first with one key and η b λ/(1 − θ) = x, the others without it."""
    step = x * (1.0 - decay) / chunk
    radius = np.eye(2)
    for first in [True] + [False] * (every - 1):
        state = np.asarray([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])  # M, S, M at the chunk's start
        eta = step if first else 0.0
        token = np.asarray([[1.0, decay, -eta], [0.0, decay, -eta], [0.0, 0.0, 1.0]])
        radius = (np.linalg.matrix_power(token, chunk) @ state)[:2] @ radius
    return np.abs(np.linalg.eigvals(radius)).max()


@pytest.mark.parametrize("chunk", [1, 2, 4, 16, 64])
def test_the_limit_of_a_key_that_returns(chunk):
    """Below η b λ/(1 − θ) = 2 it converges whenever it returns; above, it diverges if it returns after momentum has faded."""
    for decay in (0.0, 0.5, 0.8, 0.9, 0.97):
        faded = 1 + int(np.ceil(40 / (chunk * (1.0 - decay))))
        for every in {1, 2, 3, 5, 10, faded}:
            for x in (0.1, 0.5, 1.0, 1.9):
                assert returns(x, chunk, decay, every) < 1.0, (decay, every, x)
        assert returns(2.1, chunk, decay, faded) > 1.0
    assert (
        returns(2 * 1.9 / 0.1 * 0.99, 1, 0.9, 1) < 1.0 < returns(2 * 1.9 / 0.1 * 1.01, 1, 0.9, 1)
    )  # Polyak: 2 (1 + θ)
