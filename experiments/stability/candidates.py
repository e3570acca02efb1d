"""Compares ways to keep a memory from diverging, to show why the library bounds step sizes as it does.

    python -m experiments.stability.candidates                  # every missing row
    python -m experiments.stability.candidates --parts cost     # one part
    python -m experiments.stability.candidates --report         # only the table

    paper       no bound
    left_over   the library's: a step is scaled by the remaining error of its token (`atlasjax.memory.bounds`)
    triangular  η' = (I + diag(η) L)⁻¹ η with L_ti = 8 a_i (k_i·k_t)², where momentum adds gradient i a_i times by the chunk's end
    pivot       1/η'_t = 1/η_t + p_t, p_t the pivot of ρI − Σ η'_i ĝ_i ĝ_iᵀ at the chunk's tangent features ĝ: the sum stays below ρ
    share       η'_t = min(η_t, (1 − θ_t) a_t / (b ‖g_t‖²)): assumes the worst case, where all tokens of a chunk are alike
    norm        weights scaled back to ‖W‖_F ≤ 8 √rows at the start of every chunk, and nothing else

Each replaces `atlasjax.memory.fast_weights.step_sizes.dual_steps`, and everything else is the same. Parts: `train` (titans-tiny at
its defaults, two texts, three seeds; the runs of `paper` and `left_over` are those of `train.py`), `stream` (finite over 65,536
tokens, with random and adversarial keys), `cost` (time of forward and backward relative to the papers' recurrence), `capacity`
(pairs recalled).
"""

import contextlib
import dataclasses
import operator
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from atlasjax import memory, rules
from atlasjax.memory.blocks import capped
from atlasjax.memory.fast_weights import step_sizes
from experiments.rows import add_missing
from experiments.stability import settings
from experiments.stability.report import write_report
from experiments.stability.settings import CANDIDATES, IN_TRAIN
from experiments.stability.train import TEXTS_DIR, Case, run

PARTS = ("train", "stream", "cost", "capacity")


def _windowed_gram(factors: Any, gates: Any) -> jax.Array:
    return gates.gamma @ step_sizes._products(factors, factors) @ gates.gamma.T


def triangular(memory: Any, momentum: Any, origin: Any, factors: Any, gates: Any, decays: Any) -> jax.Array:
    """For windows of one token. The inputs of the first matrix are the keys' features."""
    keys = list(factors.values())[-1].inputs
    m = gates.step_size.shape[0]
    left = m - jnp.arange(m)
    theta = jnp.zeros(m) if gates.momentum_decay is None else gates.momentum_decay
    carried = jnp.where(theta < 1, (1 - theta**left) / jnp.where(theta < 1, 1 - theta, 1.0), left)
    lower = jnp.tril(8.0 * gates.step_size[:, None] * carried * (keys @ keys.T) ** 2, -1)
    return jax.scipy.linalg.solve_triangular(jnp.eye(m) + lower, gates.step_size, lower=True, unit_diagonal=True)


def pivot(memory: Any, momentum: Any, origin: Any, factors: Any, gates: Any, decays: Any) -> jax.Array:
    """Computes row by row the factor L of H = L diag(1/η) Lᵀ, whose off-diagonal entries are those of −Gram/ρ."""
    n = gates.gamma @ origin.losses.scale
    there = n > 0
    root = jnp.where(there, jax.lax.rsqrt(jnp.where(there, n, 1.0)), 0.0)
    m = n.shape[0]
    left = m - jnp.arange(m)
    theta = jnp.zeros(m) if gates.momentum_decay is None else gates.momentum_decay
    carried = jnp.sqrt(jnp.where(theta < 1, (1 - theta**left) / jnp.where(theta < 1, 1 - theta, 1.0), left))
    # With momentum, a gradient counts as often as it is added by the chunk's end.
    scale = root * carried
    gram = scale[:, None] * _windowed_gram(factors, gates) * scale

    # p is one over what is left of ρ in the token's direction. With alike keys each token squares it, and it overflows.
    # Where less than a millionth is left, a token does not write.
    def row(carry: tuple[jax.Array, jax.Array], t: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        L, eta = carry
        inverse = jnp.where(eta > 0, 1.0, 0.0) / jnp.where(eta > 0, eta, 1.0)

        def entry(j: jax.Array, values: jax.Array) -> jax.Array:
            known = jnp.sum(jnp.where(jnp.arange(m) < j, values * L[j] * inverse, 0.0))
            return values.at[j].set(jnp.where(j < t, eta[j] * (-gram[t, j] - known), 0.0))

        values = jax.lax.fori_loop(0, m, entry, jnp.zeros(m))
        p = gram[t, t] + jnp.sum(values**2 * inverse)
        step = jnp.where(p < 1e6, eta[t], 0.0)
        return (L.at[t].set(values), eta.at[t].set(step)), step / (1 + step * jnp.where(p < 1e6, p, 0.0))

    return jax.lax.scan(row, (jnp.zeros((m, m)), gates.step_size), jnp.arange(m))[1]


def share(memory: Any, momentum: Any, origin: Any, factors: Any, gates: Any, decays: Any) -> jax.Array:
    decrease = gates.gamma @ origin.losses.decrease / gates.step_size.shape[0]
    square = jnp.diagonal(_windowed_gram(factors, gates))
    return capped(1.0 / origin.horizon, gates.step_size, decrease, square)


def unchanged(memory: Any, momentum: Any, origin: Any, factors: Any, gates: Any, decays: Any) -> jax.Array:
    return gates.step_size


_BOUNDS: dict[str, tuple[memory.Bound | None, Callable | None]] = {
    "paper": (None, None),
    "left_over": (memory.Bound(), None),
    "triangular": (memory.Bound(weight_norm=None), triangular),
    "pivot": (memory.Bound(weight_norm=None), pivot),
    "share": (memory.Bound(weight_norm=None), share),
    "norm": (memory.Bound(weight_norm=8.0), unchanged),
}


@contextlib.contextmanager
def candidate(name: str) -> Iterator[Callable[[Any], Any]]:
    """Context in which rules are bounded in this way. Yields a function that puts the matching `Bound` into a rule."""
    bound, function = _BOUNDS[name]
    patch = mock.patch.object(step_sizes, "dual_steps", function) if function else contextlib.nullcontext()
    jax.clear_caches()
    with patch:
        yield lambda rule: dataclasses.replace(rule, bound=bound)
    jax.clear_caches()


def train_row(name: str, text: str, seed: int) -> dict[str, Any]:
    with candidate(name) as bounded, mock.patch.object(rules, "REGISTRY", dict(rules.REGISTRY)):
        plain = rules.titans

        def titans(chunk_size: int = 64, structure: Any = memory.MemoryRule().structure) -> Any:
            return bounded(plain(chunk_size, structure))

        rules.REGISTRY["titans"] = titans
        row = run(Case("titans", text, seed), TEXTS_DIR)
    return {k: row[k] for k in ("diverged_at", "bits_per_byte", "weight_norm", "spikes") if k in row}


def _inputs(keys: str, tokens: int, dim: int) -> tuple[Any, Any, Any]:
    k, v = jax.random.normal(jax.random.key(3), (2, 1, tokens, 1, dim))
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    k = unit(k)
    if keys == "similar":
        k = unit(k[:, :1] + 0.3 * k)
    elif keys == "equal":
        k = jnp.broadcast_to(k[:, :1], k.shape)
    elif keys == "huge":
        k = 1e4 * k
    return k, k, v / dim**0.5


def stream_row(name: str, keys: str, step_size: float, theta: float) -> dict[str, Any]:
    dim, tokens = 16, 65_536
    with candidate(name) as bounded:
        rule = bounded(rules.titans())
        params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=dim, value_dim=dim)
        full = lambda value: jnp.full((1, tokens, 1), value)
        gates = memory.Gates(retention=full(1.0), step_size=full(step_size), momentum_decay=full(theta))
        y, state = jax.jit(lambda *x: memory.scan(rule, params, None, *x))(*_inputs(keys, tokens, dim), gates)
        norm = max(float(jnp.linalg.norm(w)) for w in state.memory.values())
        finite = bool(jnp.isfinite(y).all()) and norm < float("inf")
    return {
        "finite": finite,
        "norm": round(norm, 2) if finite else None,
        "largest_output": float(f"{jnp.abs(y).max():.3g}") if finite else None,
    }


def cost_row() -> dict[str, Any]:
    """Forward and backward, 4 heads of 64, 4,096 tokens, chunks of 64. Candidates are timed in turn; medians of ratios to
    "paper"."""
    dim, tokens, repeats = 64, 4096, 7
    q, k, v = jax.random.normal(jax.random.key(0), (3, 1, tokens, 4, dim))
    k = k / jnp.linalg.norm(k, axis=-1, keepdims=True)
    calls = {}
    for name in CANDIDATES:
        with candidate(name) as bounded:
            rule = bounded(rules.titans())
            params = memory.init_params(rule, jax.random.key(1), num_heads=4, key_dim=dim, value_dim=dim)
            gates = memory.suggested_gates(rule, batch_size=1, time=tokens, num_heads=4, key_dim=dim)
            loss = lambda p, q, k, v, g, rule=rule: memory.scan(rule, p, None, q, k, v, g)[0].sum()
            calls[name] = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).lower(params, q, k, v, gates).compile()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            before = time.perf_counter()
            jax.block_until_ready(call(params, q, k, v, gates))
            times[name].append(time.perf_counter() - before)
    paper = statistics.median(times["paper"])
    return {name: round(statistics.median(values) / paper, 3) for name, values in times.items()}


def capacity_row(name: str, step: float) -> dict[str, Any]:
    """128 pairs of random keys and values, written twice, in chunks of 64, then read.

    Recalled is the share of pairs whose value is nearest to the read, for the better of no momentum and 0.9.
    """
    dim, pairs = 32, 128
    best = 0.0
    with candidate(name) as bounded:
        for theta in (0.0, 0.9):
            rule = bounded(rules.titans())
            params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=dim, value_dim=dim)
            _, k, v = _inputs("random", pairs, dim)
            v = v / jnp.linalg.norm(v, axis=-1, keepdims=True)
            twice = lambda x: jnp.concatenate([x, x], axis=1)
            full = lambda value: jnp.full((1, 2 * pairs, 1), value)
            gates = memory.Gates(retention=full(1.0), step_size=full(step * (1 - theta)), momentum_decay=full(theta))
            write = jax.jit(lambda *x, rule=rule, params=params: memory.scan(rule, params, None, *x)[1])
            y = memory.read(rule, params, write(twice(k), twice(k), twice(v), gates), k)[0, :, 0]
            scores = y @ v[0, :, 0].T / jnp.linalg.norm(y, axis=-1, keepdims=True)
            right = jnp.argmax(scores, axis=-1) == jnp.arange(pairs)
            best = max(best, float(jnp.where(jnp.isfinite(y).all(), right.mean(), 0.0)))
    return {"recalled": round(best, 3)}


def tasks() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = [
        {"part": "stream", "candidate": name, "keys": keys, "step_size": eta, "momentum_decay": theta}
        for name in CANDIDATES for keys in ("random", "similar", "equal", "huge") for eta in (0.01, 0.4) for theta in (0.9, 0.99)
    ]  # fmt: skip
    rows += [
        {"part": "capacity", "candidate": name, "step_size": eta}
        for name in CANDIDATES
        for eta in (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
    ]
    rows += [{"part": "cost", "candidate": "all"}]
    rows += [
        {"part": "train", "candidate": name, "text": text, "seed": seed}
        for seed in range(3) for text in ("embedded", "tinyshakespeare") for name in CANDIDATES if name not in IN_TRAIN
    ]  # fmt: skip
    return rows


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    name = task["candidate"]
    if task["part"] == "train":
        return train_row(name, task["text"], task["seed"])
    if task["part"] == "stream":
        return stream_row(name, task["keys"], task["step_size"], task["momentum_decay"])
    return cost_row() if task["part"] == "cost" else capacity_row(name, task["step_size"])


def main() -> None:
    parser = settings.options(__doc__, "candidates.jsonl")
    parser.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    wanted = [task for task in tasks() if not options.report and task["part"] in options.parts]
    add_missing(options.rows, operator.itemgetter("task"), wanted, lambda task: {"task": task, **run_task(task)})
    write_report(options.rows)


if __name__ == "__main__":
    main()
