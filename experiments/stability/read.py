"""A million tokens through every rule: does any memory diverge, with random or adversarial keys?

    python -m experiments.stability.read                         # every rule and case without a row
    python -m experiments.stability.read --only titans --cases equal adversarial
    python -m experiments.stability.read --report                # only the table of existing rows

One head of 16 channels, the rule's default chunk, values of about unit length, and the gates of `memory.suggested_gates`. Cases:

    initial       random keys of unit length
    retention     the same, with α drawn from [0.9, 1] for each token (rules with a retention gate)
    equal         one key for all tokens
    huge          random keys of length 10,000
    adversarial   4,096 keys of unit length found by gradient ascent on the norm of the memory's weights, repeated
    bold          step size 1, momentum 0.99 and similar keys, as a user may try first
    momentum      θ = 1 and η = 10⁻⁶, but θ = 0.05 and η = 1 at a random 3% of tokens; similar keys, values of length 20
    bfloat16      4,096 random tokens in bfloat16 and float32: the largest difference of the outputs over their largest size

Each finished row is one line of JSON in `results/read.jsonl` and is skipped.
"""

import functools
import operator
import time
from typing import Any

from experiments.rows import add_missing
from experiments.stability import settings
from experiments.stability.report import write_report

DIM, PIECE, TOKENS, SHORT = 16, 8192, 1_007_616, 4096
CASES = ("initial", "retention", "equal", "huge", "adversarial", "bold", "momentum", "bfloat16")
# These rules keep every token and read it again for each later one, so a million tokens would take days.
WHOLE_CACHE = ("deep_transformer", "dot")


def rule_of(name: str) -> Any:
    from atlasjax import rules

    # One Newton–Schulz per eight tokens, as in the tiny presets.
    return rules.REGISTRY[name](**({"newton_schulz_every": 8} if name.startswith("atlas") else {}))


def inputs(rule: Any, case: str, key: Any, keys: Any, time: int) -> tuple[Any, ...]:
    """q, k, v and gates of a piece, [1, time, 1, …]. `keys` [SHORT, DIM] are those of the adversarial case."""
    import jax
    import jax.numpy as jnp

    from atlasjax import memory

    shape = (1, time, 1, DIM)
    query, noise, value, decay = jax.random.split(key, 4)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    q, k = unit(jax.random.normal(query, shape)), unit(jax.random.normal(noise, shape))
    v = jax.random.normal(value, shape) / DIM**0.5
    first = jnp.zeros(DIM).at[0].set(1.0)
    if case == "equal":
        k = jnp.broadcast_to(first, shape)
    elif case == "huge":
        k = 1e4 * k
    elif case in ("bold", "momentum"):
        k = unit(first + 0.3 * k)
    elif case == "adversarial":
        k = jnp.tile(unit(keys), (-(-time // SHORT), 1))[:time].reshape(shape)
    gates = memory.suggested_gates(rule, batch_size=1, time=time, num_heads=1, key_dim=DIM, value_dim=DIM)
    if case == "retention":
        gates = gates._replace(retention=jax.random.uniform(decay, gates.retention.shape, minval=0.9, maxval=1.0))
    if case == "bold":
        full = lambda x, value: None if x is None else jnp.full_like(x, value)
        gates = gates._replace(step_size=full(gates.step_size, 1.0), momentum_decay=full(gates.momentum_decay, 0.99))
    if case == "momentum":
        v = 20.0 * unit(v)
        rare = jax.random.uniform(decay, gates.momentum_decay.shape) < 0.03
        gates = gates._replace(step_size=jnp.where(rare, 1.0, 1e-6), momentum_decay=jnp.where(rare, 0.05, 1.0))
    return q, k, v, gates


def sizes(rule: Any, state: Any) -> Any:
    """The largest ‖W‖_F / √rows of the weights that are read; of a softmax memory also the largest coefficient ‖a_i‖."""
    import jax.numpy as jnp

    from atlasjax import memory

    softmax = isinstance(rule, memory.SoftmaxRule)
    weights = dict(state.weights) if softmax else rule.weights(state.memory)
    if softmax:
        weights["coefficients"] = jnp.linalg.norm(state.coefficients, axis=-1)[..., None, None]
    norms = [jnp.linalg.norm(w, axis=(-2, -1)).max() / w.shape[-2] ** 0.5 for w in weights.values()]
    return jnp.stack(norms).max()


def ascended(rule: Any, params: Any, steps: int = 30, rate: float = 0.03) -> Any:
    """Keys [SHORT, DIM] that make the memory's weights large: directions found by Adam from random ones."""
    import jax
    import jax.numpy as jnp
    import optax

    from atlasjax import memory

    def norm(keys: Any) -> Any:
        q, k, v, gates = inputs(rule, "adversarial", jax.random.key(5), keys, SHORT)
        state = memory.scan(rule, params, None, q, k, v, gates)[1]
        weights = rule.weights(state.memory)
        return jnp.log(sum(jnp.sum(w * w) for w in weights.values()) + 1e-12)

    optimizer = optax.adam(rate)
    keys = jax.random.normal(jax.random.key(6), (SHORT, DIM)) / DIM**0.5
    state = optimizer.init(keys)
    ascend = jax.jit(jax.value_and_grad(lambda keys: -norm(keys)))
    best, best_keys = jnp.inf, keys
    for _ in range(steps):
        loss, gradient = ascend(keys)
        if not jnp.isfinite(gradient).all():
            break
        if loss < best:
            best, best_keys = loss, keys
        updates, state = optimizer.update(gradient, state)
        keys = optax.apply_updates(keys, updates)
    return best_keys


def run(name: str, case: str) -> dict[str, Any] | None:
    """The row of a rule and a case, or None if the case does not apply to the rule."""
    import jax
    import jax.numpy as jnp

    from atlasjax import memory

    rule = rule_of(name)
    started = time.perf_counter()
    softmax = isinstance(rule, memory.SoftmaxRule)
    gates = rule.gate_channels(DIM, DIM)
    if (
        (case == "retention" and "retention" not in gates)
        or (case in ("bold", "momentum") and "step_size" not in gates)
        or (case == "momentum" and "momentum_decay" not in gates)
        or (case == "adversarial" and softmax)
    ):
        return None
    params = memory.init_params(rule, jax.random.key(0), num_heads=1, key_dim=DIM, value_dim=DIM)
    row: dict[str, Any] = {"rule": name, "case": case}
    if case == "bfloat16":
        q, k, v, gates = inputs(rule, case, jax.random.key(1), None, SHORT)
        wide = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v)]
        read = jax.jit(lambda q, k, v: memory.scan(rule, params, None, q, k, v, gates)[0])
        y, narrow = read(*wide), read(*(x.astype(jnp.bfloat16) for x in wide))
        difference = jnp.abs(narrow.astype(jnp.float32) - y).max() / jnp.abs(y).max()
        return {
            **row,
            "tokens": SHORT,
            "difference": round(float(difference), 5),
            "finite": bool(jnp.isfinite(y).all()),
        }
    keys = ascended(rule, params) if case == "adversarial" else None
    tokens = 2 * PIECE if name in WHOLE_CACHE else TOKENS

    @functools.partial(jax.jit, donate_argnums=0)
    def piece(state: Any, key: Any) -> tuple[Any, Any, Any]:
        y, state = memory.scan(rule, params, state, *inputs(rule, case, key, keys, PIECE))
        return state, sizes(rule, state), jnp.abs(y).max()

    state = memory.init_state(rule, params, batch_size=1, max_length=tokens)
    largest, output = [float(sizes(rule, state))], []
    for number in range(tokens // PIECE):
        state, size, y = piece(state, jax.random.fold_in(jax.random.key(2), number))
        largest.append(float(size))
        output.append(float(y))
    finite = bool(jnp.isfinite(jnp.asarray(largest + output)).all())
    return {
        **row,
        "tokens": tokens,
        "finite": finite,
        "weight_norm_at_start": round(largest[0], 3),
        "largest_weight_norm": round(max(largest), 3) if finite else None,
        "last_weight_norm": round(largest[-1], 3) if finite else None,
        "largest_output": float(f"{max(output):.4g}") if finite else None,
        "seconds": round(time.perf_counter() - started),
    }


def main() -> None:
    from atlasjax import rules

    parser = settings.options(__doc__, "read.jsonl")
    parser.add_argument("--only", nargs="*", choices=rules.REGISTRY, help="some of the rules")
    parser.add_argument("--cases", nargs="*", choices=CASES, help="some of the cases")
    options = parser.parse_args()
    wanted = (
        [] if options.report else [(n, case) for case in options.cases or CASES for n in options.only or rules.REGISTRY]
    )
    add_missing(options.rows, operator.itemgetter("rule", "case"), wanted, lambda key: run(*key))
    write_report(options.rows)


if __name__ == "__main__":
    main()
