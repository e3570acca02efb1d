"""Hard inputs of every rule: zeros, huge and tiny numbers, equal keys, alternating signs, one token, gates at their ends, a memory
that forgets nothing. In float32, bfloat16 and float16, with `jax_debug_nans`. What comes out is finite, and is what
`memory.reference` makes of the same numbers in float64, up to rounding."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax import memory, rules
from atlasjax.memory import Gates
from atlasjax.names import takes
from experiments.faults.run import Case, Slow, WrongError, some

B, T, H = 1, 24, 2
DTYPES = ("float32", "bfloat16", "float16")
# From `tests/memory/test_engine.py`: relative to the largest output, without and with Newton–Schulz, which multiplies rounding.
_TOLERANCE = {"float32": (2e-5, 2e-3), "bfloat16": (4e-2, 1e-1), "float16": (4e-2, 1e-1)}

# Switched off, as for the tests: nearly all the time goes to LLVM's optimizations.
QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

Arrays = dict[str, np.ndarray]


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Every rule on every input in every dtype."""
    every = [(rule, dtype, hard) for rule in rules.REGISTRY for dtype in DTYPES for hard in HARD]
    for rule, dtype, hard in some(every, most, random.Random(seed)):
        yield f"{rule} {dtype} {hard}", Slow(functools.partial(_compared, rule, dtype, hard, seed))


def _compared(name: str, dtype: str, hard: str, seed: int) -> str:
    rule = rule_of(name)
    params, tokens, gates = _inputs(rule, dtype, hard, seed)
    with jax.debug_nans(True):
        y, state = _compiled(name, False)(params, *tokens, gates)
    if not _finite(y) or not all(map(_finite, jax.tree.leaves(state))):
        return "wrong"
    with jax.enable_x64(True):
        wide = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)
        expected, _ = _compiled(name, True)(wide(params), *map(_full, wide(tokens)), jax.tree.map(_full, wide(gates)))
        expected = np.asarray(expected)[:, : y.shape[1]]
    if not np.isfinite(expected).all():
        return "right"  # the definition overflows too; the rule's result is finite
    tolerance = _TOLERANCE[dtype][getattr(rule, "uses_muon", False)]
    error = np.abs(np.asarray(y, np.float64) - expected).max(initial=0)
    if error <= tolerance * max(np.abs(expected).max(initial=0), np.finfo(np.float32).tiny):
        return "right"
    # Inputs that multiply rounding, such as values of 1,000 under a cubic loss: no float32 code can do better than the definition.
    same_precision, _ = _compiled(name, True)(params, *map(_full, tokens), jax.tree.map(_full, gates))
    of_definition = np.abs(np.asarray(same_precision, np.float64)[:, : y.shape[1]] - expected).max(initial=0)
    if dtype == "float32" and error <= of_definition:
        return "right"
    raise WrongError(
        f"error {error:.3g} of {np.abs(expected).max():.3g}; of the definition in {dtype}: {of_definition:.3g}"
    )


@functools.cache
def rule_of(name: str, chunk_size: int = 8) -> Any:
    """A rule of the library, with this chunk size if it has any."""
    make = rules.REGISTRY[name]
    return make(**({"chunk_size": chunk_size} if takes(make, "chunk_size") else {}))


def dim_of(rule: Any) -> int:
    """Channels of a head: the variance of few may be near zero."""
    return 16 if getattr(getattr(rule, "structure", None), "norm", False) else 8


@functools.cache
def _compiled(name: str, reference: bool) -> Callable[..., Any]:
    run = memory.reference if reference else memory.scan
    rule = rule_of(name)
    return jax.jit(lambda *given: run(rule, given[0], None, *given[1:]), compiler_options=QUICKLY)


def _inputs(rule: Any, dtype: str, hard: str, seed: int) -> tuple[Any, tuple[jax.Array, ...], Gates]:
    """Parameters, (q, k, v) in the dtype, and gates in float32."""
    rng = np.random.default_rng(seed)
    dim = dim_of(rule)
    params = memory.init_params(rule, jax.random.key(seed), num_heads=H, key_dim=dim, value_dim=dim)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    given = {name: rng.standard_normal((B, T, H, dim)) for name in "qkv"}
    given["q"], given["k"] = unit(given["q"]), unit(given["k"])
    suggested = memory.suggested_gates(rule, batch_size=B, time=T, num_heads=H, key_dim=dim)
    gates = {name: np.asarray(gate) for name, gate in suggested._asdict().items() if gate is not None}
    tokens, gates = HARD[hard](given, gates, float(jnp.finfo(dtype).max))
    cast = tuple(jnp.asarray(tokens[name]).astype(dtype) for name in "qkv")
    return params, cast, Gates(**{name: jnp.asarray(gate, jnp.float32) for name, gate in gates.items()})


def _full(x: np.ndarray) -> np.ndarray:
    """Inputs made as long as the others, for the same program: later tokens change nothing before them."""
    return np.pad(x, [(0, 0), (0, T - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def _finite(x: Any) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.floating) or bool(np.isfinite(np.asarray(x, np.float32)).all())


def _ends(**values: float) -> Callable[[Arrays, Arrays, float], tuple[Arrays, Arrays]]:
    """Gates at one of their ends."""
    return lambda x, gates, largest: (
        x,
        {n: np.full_like(g, values[n]) if n in values else g for n, g in gates.items()},
    )


def _along(x: np.ndarray) -> np.ndarray:
    """The places of the tokens, for arrays [batch, time, heads, dim]."""
    return np.arange(x.shape[1])[None, :, None, None]


# Tokens, gates and the largest number of the dtype → tokens and gates.
HARD: dict[str, Callable[[Arrays, Arrays, float], tuple[Arrays, Arrays]]] = {
    "zeros": lambda x, gates, largest: ({name: 0 * array for name, array in x.items()}, gates),
    "huge values": lambda x, gates, largest: ({**x, "v": x["v"] * min(1e3, largest / 64)}, gates),
    "tiny": lambda x, gates, largest: ({**x, "k": x["k"] * 1e-20, "v": x["v"] * 1e-30}, gates),
    "equal keys": lambda x, gates, largest: (
        {**x, **dict.fromkeys("kq", np.broadcast_to(x["k"][:, :1], x["k"].shape))}, gates
    ),
    "alternating signs": lambda x, gates, largest: (
        {**x, **{name: x[name][:, :1] * (-1.0) ** _along(x["k"]) for name in "kv"}}, gates
    ),
    "zero keys": lambda x, gates, largest: ({**x, "k": x["k"] * (_along(x["k"]) % 2)}, gates),
    "one token": lambda x, gates, largest: tuple({n: array[:, :1] for n, array in part.items()} for part in (x, gates)),
    "forgets all": _ends(retention=0.0, momentum_decay=0.0),
    "forgets nothing": _ends(retention=1.0, momentum_decay=1.0 - 2.0**-20),  # a momentum that decays very slowly
}  # fmt: skip
