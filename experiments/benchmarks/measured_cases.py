"""The cases that `kernels_measured.py` times: their arrays, their programs in JAX, and the definition to check results against.

jax is imported only where a program is built, so that a table of finished rows does not need it.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from experiments.benchmarks.kernel_cases import DIRECTIONS, STEPS, WINDOW, with_gradients

CHUNK = 64
# Operation → its kernel, as named in `memory.fastest`; None if no choice depends on it. Those named "_bounded" are the rules as
# `atlasjax.rules` makes them and presets use them, the others are without a bound, as in the papers and in other libraries.
OPERATIONS: dict[str, str | None] = {
    "newton_schulz": None,
    "newton_schulz_gram": None,
    "delta_rule": "delta_rule",
    "gated_delta_rule": "delta_rule",
    "kda": "linear_rule",
    "gla": "linear_rule",
    "rwkv7": "linear_rule",
    "omeganet_bounded": "chunk_memory_bounded",
    "titans_bounded": "chunk_memory_bounded",
    "omeganet": "chunk_memory",
    "dla_bounded": "chunk_memory",  # no bounded steps, because its loss has no target
    "dla": "chunk_memory",
    "titans": "chunk_memory",
    "atlas": "chunk_memory_muon",
    "ttt_linear": None,
}
# Engine → the platform that it needs; None: any.
ENGINES: dict[str, str | None] = {
    "xla": None,
    "pallas_tpu": "tpu",
    "pallas_gpu": "cuda",
    "fla": "cuda",
    "titans_pytorch": None,
    "attention": None,
    "attention_cudnn": "cuda",
}
PLATFORM_NAMES = {"tpu": "a TPU", "cuda": "a CUDA GPU"}
OTHER_LIBRARIES = {
    "fla": ("delta_rule", "gated_delta_rule", "kda", "gla", "rwkv7", "ttt_linear"),
    "titans_pytorch": ("titans",),
}
# Rows of other functions with the same purpose and sizes: their numbers cannot be checked against ours.
OTHER_FUNCTIONS = {
    ("fla", "ttt_linear"): "also learns a bias, and adds the residual after reading",
    ("titans_pytorch", "titans"): "includes its projections and norms, and takes one step of momentum per chunk",
}
_MUON_SHARE = 16  # divisor of the number of tokens, because Newton–Schulz for every token is a hundred times the work


@dataclasses.dataclass(frozen=True)
class Case:
    """One function of one size, which several engines compute.

    Attributes:
      operation: a key of OPERATIONS.
      dim: for newton_schulz, matrices are dim × 4 dim; otherwise key_dim = value_dim = dim.
      dtype: dtype of tokens, "float32" or "bfloat16". For newton_schulz float32 with exact products, as Muon calls it.
      direction: "forward", or "both": forward and backward, with the gradients of all inputs and parameters.
      batch: batch size, or for newton_schulz the number of matrices.
      tokens, heads: 0 for newton_schulz.
    """

    operation: str
    dim: int
    dtype: str
    direction: str
    batch: int
    tokens: int
    heads: int

    @property
    def is_matrices(self) -> bool:
        return self.operation.startswith("newton_schulz")

    @property
    def name(self) -> str:
        size = f"{self.dim} × {4 * self.dim}" if self.is_matrices else f"d = {self.dim}"
        return f"{self.operation}, {size}, {self.dtype}, {self.direction}"

    @property
    def engines(self) -> list[str]:
        """All engines that compute the case, on any device, and softmax attention of the same width."""
        other = [name for name, operations in OTHER_LIBRARIES.items() if self.operation in operations]
        attention = [] if self.is_matrices else ["attention", "attention_cudnn"]
        return ["xla", "pallas_tpu", "pallas_gpu", *other, *attention]


def all_cases(
    operations: list[str],
    dims: list[int],
    dtype: str,
    *,
    tokens: int,
    batch: int,
    heads: int,
    matrices: int,
    directions: Sequence[str] = DIRECTIONS,
) -> list[Case]:
    cases = []
    for operation in operations:
        sizes = {"batch": batch, "tokens": tokens, "heads": heads}
        if operation == "atlas":
            sizes["tokens"] = max(2 * CHUNK, tokens // _MUON_SHARE)
        of = dtype
        if operation.startswith("newton_schulz"):
            sizes, of = {"batch": matrices, "tokens": 0, "heads": 0}, "float32"
        cases += [Case(operation, dim, of, direction, **sizes) for dim in dims for direction in directions]
    return cases


def small(case: Case) -> Case:
    """The case that is checked: two chunks and a remainder. Muon runs in float32, because it amplifies bfloat16 rounding to
    noise."""
    dtype = "float32" if case.operation == "atlas" else case.dtype
    sizes = {"batch": 4} if case.is_matrices else {"batch": 1, "tokens": 2 * CHUNK + 4, "heads": 2}
    return dataclasses.replace(case, direction="both", dtype=dtype, **sizes)


def tolerance(case: Case) -> float:
    """The largest error, relative to the size of the exact result, at which a result is accepted."""
    if case.dtype == "bfloat16":
        return 5e-2
    # Rounding errors in Newton–Schulz grow by the first coefficient in each step.
    return 1e-2 if case.is_matrices or case.operation == "atlas" else 1e-3


def rule(operation: str) -> Any:
    """The rule of an operation, with the library's bound if its name says so."""
    from atlasjax import rules
    from atlasjax.memory import features

    identity = features.Identity()
    name = operation.removesuffix("_bounded")
    made = {
        "delta_rule": rules.delta_rule,
        "gated_delta_rule": rules.gated_delta_rule,
        "kda": rules.kda,
        "gla": lambda: rules.gla(CHUNK),
        "rwkv7": rules.rwkv7,
        "omeganet": lambda: rules.omeganet(CHUNK, WINDOW, features=identity),
        "dla": lambda: rules.dla(CHUNK),
        "titans": lambda: rules.titans(CHUNK),
        "atlas": lambda: rules.atlas(CHUNK, WINDOW, features=identity, newton_schulz_steps=STEPS),
        "ttt_linear": rules.ttt_linear,
    }[name]()
    return made if name != operation else made.unbounded()


@functools.lru_cache(maxsize=2)  # of all engines, operations and directions of one size, and of what it is checked with
def _tokens(shape: tuple[int, ...], dtype: str) -> tuple[Any, ...]:
    """q, k, v and the cotangent [*shape], queries and keys of unit length."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    q, k, v, dy = (rng.standard_normal(shape, np.float32) for _ in range(4))
    return tuple(x.astype(jnp.dtype(dtype)) for x in (_unit(q), _unit(k), v, dy))


def _unit(x: Any) -> Any:
    import numpy as np

    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def inputs(case: Case) -> tuple[Any, ...]:
    """NumPy arrays of a case: (s,), or (params, q, k, v, gates) with unit-length queries and keys, and last the cotangent."""
    import jax
    import numpy as np

    from atlasjax import memory

    rng = np.random.default_rng(1)
    if case.is_matrices:
        shape = case.batch, case.dim, 4 * case.dim
        return rng.standard_normal(shape, np.float32), rng.standard_normal(shape, np.float32)
    shape = case.batch, case.tokens, case.heads
    q, k, v, dy = _tokens((*shape, case.dim), case.dtype)
    of = rule(case.operation)
    ranges = {"retention": (0.95, 1.0), "momentum_decay": (0.5, 0.9), "window_weights": (0.2, 1.0)}
    ranges |= {"removal": (0.0, 1.0), "removal_key": (-1.0, 1.0)}
    ranges["step_size"] = (0.2, 0.8) if of.is_linear else (0.0, 0.1)
    gates = {}
    for name, channels in of.gate_channels(case.dim, case.dim).items():
        gates[name] = rng.uniform(*ranges[name], shape if channels is None else (*shape, channels)).astype(np.float32)
        gates[name] = _unit(gates[name]) if name == "removal_key" else gates[name]
    params = memory.init_params(of, jax.random.key(0), num_heads=case.heads, key_dim=case.dim, value_dim=case.dim)
    return jax.tree.map(np.asarray, params), q, k, v, memory.Gates(**gates), dy


def shapes(case: Case) -> tuple[Any, ...]:
    """Shapes and dtypes of `inputs`."""
    import jax
    import jax.numpy as jnp

    from atlasjax import memory

    if case.is_matrices:
        return (jax.ShapeDtypeStruct((case.batch, case.dim, 4 * case.dim), jnp.float32),) * 2
    of, shape = rule(case.operation), (case.batch, case.tokens, case.heads)
    sizes = {"num_heads": case.heads, "key_dim": case.dim, "value_dim": case.dim}
    params = jax.eval_shape(lambda: memory.init_params(of, jax.random.key(0), **sizes))
    tokens = jax.ShapeDtypeStruct((*shape, case.dim), jnp.dtype(case.dtype))
    channels = of.gate_channels(case.dim, case.dim)
    gates = {name: jax.ShapeDtypeStruct((*shape, *([n] if n else [])), jnp.float32) for name, n in channels.items()}
    return params, tokens, tokens, tokens, memory.Gates(**gates), tokens


def function(case: Case, engine: str) -> Callable[..., Any]:
    """A case's forward pass with a JAX engine, as a function of the arrays of `inputs` except the cotangent."""
    import jax

    if engine.startswith("attention"):
        backend = {"attention": "xla", "attention_cudnn": "cudnn"}[engine]
        # The rule's parameters and gates have no part in it.
        return lambda params, q, k, v, gates: jax.nn.dot_product_attention(
            q, k, v, is_causal=True, implementation=backend
        )
    if case.is_matrices:
        from pallas_kernels.newton_schulz import newton_schulz

        form = "gram" if case.operation.endswith("gram") else "direct"
        return lambda s: newton_schulz(s, STEPS, form=form, implementation=engine)

    from atlasjax import memory

    of = rule(case.operation)
    return lambda params, q, k, v, gates: memory.scan(of, params, None, q, k, v, gates, implementation=engine)[0]


def program(forward: Callable[..., Any], direction: str) -> Callable[..., Any]:
    """A function of all arrays of `inputs` that returns y, and for "both" also the gradients of all except the cotangent."""
    return with_gradients(forward) if direction == "both" else lambda *arguments: forward(*arguments[:-1])


def definition(case: Case, engine: str) -> Callable[..., Any]:
    """A slow definition of what `function` should compute."""
    import jax
    import jax.numpy as jnp

    from atlasjax import memory
    from pallas_kernels.newton_schulz.reference import newton_schulz

    if case.is_matrices:
        return lambda s: newton_schulz(s, STEPS)
    if engine.startswith("attention"):

        def attention(params: Any, q: Any, k: Any, v: Any, gates: Any) -> Any:
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / case.dim**0.5
            allowed = jnp.tril(jnp.ones(scores.shape[-2:], bool))
            return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(jnp.where(allowed, scores, -jnp.inf)), v)

        return attention
    of = rule(case.operation)

    def scan(params: Any, *tokens: Any) -> Any:
        """In pieces whose weights, one set per token, are recomputed in the backward pass."""
        pieces = next(n for n in range(round(case.tokens**0.5), 0, -1) if case.tokens % n == 0)
        cut = lambda x: jnp.moveaxis(x.reshape(x.shape[0], pieces, -1, *x.shape[2:]), 1, 0)

        @jax.checkpoint
        def piece(state: Any, x: Any) -> Any:
            y, state = memory.reference(of, params, state, *x)
            return state, y

        state = memory.init_state(of, params, batch_size=case.batch)
        _, y = jax.lax.scan(piece, state, jax.tree.map(cut, tokens))
        return jnp.moveaxis(y, 0, 1).reshape(case.batch, case.tokens, case.heads, -1)

    return scan


@functools.cache
def exact(case: Case, engine: str) -> Any:
    """y and gradients from the definition, in float64 on the CPU, or in float32 with exact products if jax has no CPU."""
    import jax
    import numpy as np

    run = program(definition(case, engine), "both")
    arrays = inputs(case)
    try:
        cpu = jax.devices("cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names accelerators only
        with jax.default_matmul_precision("highest"):
            found = jax.jit(run)(*jax.tree.map(lambda x: x.astype(np.float32), arrays))
            return jax.tree.map(np.asarray, found)
    with jax.enable_x64(True), jax.default_device(cpu):
        return jax.tree.map(np.asarray, jax.jit(run)(*jax.tree.map(lambda x: x.astype(np.float64), arrays)))


def errors(found: Any, case: Case, engine: str) -> dict[str, float]:
    """The largest error of y and of any gradient, relative to the largest entry of the exact array. NaN if there is one.

    Args:
      found: (y, gradients) from `program` for `small(case)`, or gradients of only the last arguments.
    """
    import jax
    import numpy as np

    def of(found: Any, expected: Any) -> float:
        found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
        largest = 0.0
        for a, b in zip(found, expected[-len(found) :], strict=True):
            if a.shape != b.shape:
                raise RuntimeError(f"a result has shape {a.shape}, must be {b.shape}.")
            size = np.abs(b).max() or 1.0
            largest = np.maximum(largest, np.abs(np.asarray(a, np.float64) - b).max() / size)  # keeps a NaN
        return float(largest)

    exactly = exact(small(case), "attention" if engine.startswith("attention") else "xla")
    return {name: of(*both) for name, *both in zip(("values", "gradients"), found, exactly, strict=True)}
