"""The cases that `kernels_tpu.py` compiles, their programs, and the bytes that those must move.

jax is imported only where a program is built, so that a table or plot of finished rows does not need it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

BATCH, TIME, HEADS = 1, 4096, 16  # as in a 340M model at d = 64
MATRICES = 256  # matrices per call of newton_schulz
STEPS = 5
WINDOW = 4

VARIANTS = {
    "product": ("plain",),
    "newton_schulz": ("direct", "gram"),
    "delta_rule": ("plain", "gated"),
    "linear_rule": ("gla", "channel_delta", "rwkv7", "kda", "gdn2"),
    "chunk_memory": ("matrix", "matrix_write_gate", "mlp", "mlp_bounded", "gated_mlp", "mlp_window"),
}
DIRECTIONS = ("forward", "both")
ENGINES = ("pallas_tpu", "xla")


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
      operation: a key of VARIANTS. "product" is one plain bfloat16 product [2 d, d] × [d, d], to calibrate the others.
      variant: for newton_schulz its form, and "direct_three_passes" of bfloat16 (HIGH); for delta_rule with or without
        decay; for linear_rule, which has a decay for each channel, what it writes, for "kda" and "gdn2" at the decayed memory;
        for chunk_memory its structure with momentum and retention, or ("mlp_window") OmegaNet's rule: a two-layer memory with
        retention and a window of four tokens, no momentum. "matrix_write_gate" has a gate on how much of the momentum is
        written. "mlp_bounded" is Titans' rule with the library's bound (semantics 1.12), the others are the papers' recurrence.
      dim: d. For newton_schulz, matrices are d × 4 d; otherwise key_dim = value_dim = d.
      dtype: dtype of tokens, "float32" or "bfloat16", which determines the precision of products. For newton_schulz, whose matrices
        are float32, it is only that precision.
      direction: "forward", or "both": forward and backward, with the gradients of all inputs.
      engine: "pallas_tpu" or "xla".
      chunk: tokens per chunk.
    """

    operation: str
    variant: str
    dim: int
    dtype: str
    direction: str
    engine: str
    chunk: int = 64

    @property
    def kernel(self) -> str:
        """The name of the case without direction and engine."""
        chunk = f" chunk {self.chunk}" if self.chunk != 64 else ""
        return f"{self.operation} {self.variant} {self.dim} {self.dtype}{chunk}"

    @property
    def name(self) -> str:
        return f"{self.kernel} {self.direction} {self.engine}"

    @property
    def items(self) -> int:
        """Number of items per call to which costs refer: matrices, or tokens of one head."""
        return {"newton_schulz": MATRICES, "product": 1}.get(self.operation, BATCH * TIME * HEADS)

    @property
    def item(self) -> str:
        return {"newton_schulz": "matrix", "product": "product"}.get(self.operation, "token and head")


def all_cases() -> list[Case]:
    """Every case of the page, the most important first."""
    cases = [Case("product", "plain", 512, "bfloat16", "forward", engine) for engine in ENGINES]
    for operation, variant in ((o, v) for o, variants in VARIANTS.items() for v in variants if o != "product"):
        for dim in (64, 128, 32, 96, 256):
            # Exact products are Newton–Schulz's default; tokens of a model are bfloat16.
            exact = operation == "newton_schulz" or (variant in ("gated", "mlp_window") and dim == 64)
            for dtype in ("bfloat16", "float32") if exact else ("bfloat16",):
                for direction in DIRECTIONS if dim in (64, 128) else DIRECTIONS[:1]:
                    cases += [
                        Case(operation, variant, dim, dtype, direction, engine)
                        for engine in ENGINES
                        # XLA's direct form has only exact products.
                        if not (engine == "xla" and variant == "direct" and dtype == "bfloat16")
                    ]
    cases += [Case("chunk_memory", "mlp", 64, "bfloat16", way, engine, 128) for way in DIRECTIONS for engine in ENGINES]
    three = "direct_three_passes"
    cases += [Case("newton_schulz", three, d, "bfloat16", way, "pallas_tpu") for d in (64, 128) for way in DIRECTIONS]

    def rank(case: Case) -> int:
        if case.operation == "product":
            return 0
        group = {64: 0, 128: 0, 256: 2}.get(case.dim, 1)
        order = {"pallas_tpu": (1, 3, 5), "xla": (2, 6, 7)}[case.engine]
        return 4 if case.engine == "xla" and case.direction == "both" else order[group]

    return sorted(cases, key=rank)


def quick_cases() -> list[Case]:
    return [case for case in all_cases() if case.dim == 64 and case.direction == "forward" and case.chunk == 64]


def program(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    """The function of a case and the shapes of its arguments. With direction "both" the outputs' cotangents come last."""
    import jax

    forward, shapes = {
        "product": _plain_product,
        "newton_schulz": _newton_schulz,
        "delta_rule": _delta_rule,
        "linear_rule": _linear_rule,
        "chunk_memory": _chunk_memory,
    }[case.operation](case)
    if case.direction == "forward":
        return forward, shapes
    return with_gradients(forward), [*shapes, jax.eval_shape(forward, *shapes)]


def with_gradients(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the arguments and the outputs' cotangents: the outputs, and the gradients of all arguments."""
    import jax

    def both(*arguments: Any) -> Any:
        *arguments, dy = arguments
        y, pullback = jax.vjp(forward, *arguments)
        return y, pullback(dy)

    return both


def _shape(*shape: int, dtype: str = "float32") -> Any:
    import jax

    return jax.ShapeDtypeStruct(shape, dtype)


def _plain_product(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    multiply = lambda x, y: jnp.dot(x, y, preferred_element_type=jnp.float32)

    def kernel(x: Any, y: Any, out: Any) -> None:
        out[...] = multiply(x[...], y[...])

    shapes = [_shape(2 * case.dim, case.dim, dtype=case.dtype), _shape(case.dim, case.dim, dtype=case.dtype)]
    if case.engine == "xla":
        return multiply, shapes
    return pl.pallas_call(kernel, out_shape=_shape(2 * case.dim, case.dim), name="product"), shapes


def _newton_schulz(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    import jax

    from pallas_kernels.newton_schulz import newton_schulz

    form, _, three = case.variant.partition("_")
    one_or_three = jax.lax.Precision.HIGH if three else jax.lax.Precision.DEFAULT
    precision = jax.lax.Precision.HIGHEST if case.dtype == "float32" else one_or_three

    def call(s: Any) -> Any:
        return newton_schulz(s, STEPS, form=form, implementation=case.engine, precision=precision)

    return call, [_shape(MATRICES, case.dim, 4 * case.dim)]


def _tokens(case: Case) -> list[Any]:
    """q, k, v as projections write them."""
    return [_shape(BATCH, TIME, HEADS * case.dim, dtype=case.dtype)] * 3


def _by_heads(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of weights, q, k, v and gates with heads as one of q, k, v [batch, time, heads · dim], and so its result.

    So are gates for each channel [batch, time, heads · dim].
    """

    def flat(weights: Any, *arrays: Any) -> Any:
        y = call(
            weights, *(x.reshape(*x.shape[:2], HEADS, -1) if x.ndim == 3 and x.shape[2] > HEADS else x for x in arrays)
        )
        return y.reshape(*y.shape[:2], -1)

    return flat


def _tokens_by_heads(call: Callable[..., Any]) -> Callable[..., Any]:
    """`_by_heads` of a function without weights."""
    flat = _by_heads(lambda _, *arrays: call(*arrays))
    return lambda *arrays: flat(None, *arrays)


def _gate(*channels: int) -> Any:
    return _shape(BATCH, TIME, HEADS, *channels)


def _delta_rule(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    gated = case.variant == "gated"
    shapes = [*_tokens(case), *[_gate()] * (2 if gated else 1)]
    if case.engine == "pallas_tpu":
        from pallas_kernels.delta_rule import delta_rule

        return _tokens_by_heads(lambda *x: delta_rule(*x, chunk_size=case.chunk)[0]), shapes

    from atlasjax import rules

    rule = rules.gated_delta_rule() if gated else rules.delta_rule()
    names = ("step_size", "retention") if gated else ("step_size",)
    return _scan_from_zero(case, rule.unbounded(), names), shapes  # the kernel's call has no bound either


def _scan(case: Case, rule: Any, names: Sequence[str]) -> tuple[Callable[..., Any], Any]:
    """XLA's engine, as a function of parameters, q, k, v and the gates with these names; and the shapes of the parameters."""
    import jax

    from atlasjax import memory

    sizes = {"num_heads": HEADS, "key_dim": case.dim, "value_dim": case.dim}
    params = jax.eval_shape(lambda: memory.init_params(rule, jax.random.key(0), **sizes))

    def scan(params: Any, q: Any, k: Any, v: Any, *given: Any) -> Any:
        gates = memory.Gates(**dict(zip(names, given, strict=True)))
        return memory.scan(rule, params, None, q, k, v, gates, implementation="xla")[0]

    return scan, params


def _scan_from_zero(case: Case, rule: Any, names: Sequence[str]) -> Callable[..., Any]:
    """`_scan` without parameters, because the kernel's memory also starts at zero."""
    import jax

    scan, params = _scan(case, rule, names)
    zeros = lambda: jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), params)
    return _tokens_by_heads(lambda *x: scan(zeros(), *x))


def _linear_rule(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    import jax

    channels = _shape(BATCH, TIME, HEADS * case.dim)
    keys, has_beta = {"rwkv7": 2, "gdn2": 1}.get(case.variant, 0), case.variant != "rwkv7"
    shapes = [*_tokens(case), channels, *[channels] * keys, *[_gate()] * has_beta]
    if case.engine == "pallas_tpu":
        from pallas_kernels.linear_rule import linear_rule

        def kernel(q: Any, k: Any, v: Any, decay: Any, *given: Any) -> Any:
            own = given[:keys]
            beta = given[keys] if has_beta else jax.numpy.ones(q.shape[:3])
            removal = None if not own else (own[0], beta[..., None] * k if has_beta else own[1] * own[0])
            return linear_rule(
                q, k, v, decay, beta, removal, delta=case.variant in ("channel_delta", "kda"),
                decay_first=case.variant in ("kda", "gdn2"), chunk_size=case.chunk,
            )[0]  # fmt: skip

        return _tokens_by_heads(kernel), shapes

    from atlasjax import rules
    from atlasjax.memory import retention

    delta = dataclasses.replace(rules.delta_rule(), retention=retention.Channel())
    rule = {**rules.REGISTRY, "channel_delta": lambda: delta}[case.variant]().unbounded()
    names = ("retention", *("removal_key", "removal")[:keys], *("step_size",) * has_beta)
    return _scan_from_zero(case, rule, names), shapes


def _chunk_memory(case: Case) -> tuple[Callable[..., Any], list[Any]]:
    import jax

    from atlasjax import memory
    from atlasjax.memory import objectives, optimizers, structures
    from atlasjax.memory.bounds import Bound, LimitedSlope

    write_gate = case.variant.endswith("_write_gate")
    kind = case.variant.removesuffix("_window").removesuffix("_bounded").removesuffix("_write_gate")
    window = WINDOW if case.variant.endswith("_window") else 1
    bound = Bound() if case.variant.endswith("_bounded") else None
    structure: Any = {"matrix": structures.Matrix, "mlp": structures.MLP, "gated_mlp": structures.GatedMLP}[kind]()
    momentum = window == 1
    floor = bound is not None and case.engine == "pallas_tpu"  # XLA's engine computes it
    gates = (
        [_gate()] * (3 if momentum else 2) + ([_gate(WINDOW)] if window > 1 else []) + [_gate()] * (write_gate + floor)
    )
    names = ["retention", "step_size", "momentum_decay" if momentum else "window_weights"]
    names += ["write_size"] * write_gate + ["floor"] * floor

    if case.engine == "pallas_tpu":
        from pallas_kernels.chunk_memory import chunk_memory

        shapes = structure.weight_shapes(case.dim, case.dim).items()
        weights = {name: _shape(BATCH, HEADS, *shape) for name, shape in shapes}

        def kernel(weights: Any, q: Any, k: Any, v: Any, *given: Any) -> Any:
            momenta = jax.tree.map(jax.numpy.zeros_like, weights) if momentum else None
            objective, limits = objectives.L2(), {}
            if bound is not None:
                objective = LimitedSlope(objective, bound.slope)
                limits = {"step_bound": bound.step, "norm_bound": bound.weight_norm}
                limits |= {"horizon": bound.horizon} if momentum else {}
            limits |= dict(zip(names, given, strict=True))
            return chunk_memory(structure, objective, weights, momenta, q, k, v, **limits, chunk_size=case.chunk)[0]

        return _by_heads(kernel), [weights, *_tokens(case), *gates]

    rule = memory.MemoryRule(
        structure, objectives.L2(), window=window, chunk_size=case.chunk,
        optimizer=optimizers.Momentum(write_gate=write_gate) if momentum else optimizers.GradientDescent(), bound=bound,
    )  # fmt: skip
    scan, params = _scan(case, rule, names)
    return _by_heads(scan), [params, *_tokens(case), *gates]


def ideal_bytes(case: Case) -> int:
    """Bytes that the forward pass of a memory must move: its inputs, its outputs and, if a backward pass
    follows, the state before each chunk; each once, in its own type.
    """
    import jax

    size = lambda tree: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
    forward, shapes = program(dataclasses.replace(case, direction="forward", engine="pallas_tpu"))
    total = size(shapes) + size(jax.eval_shape(forward, *shapes))
    if case.operation in ("newton_schulz", "product"):
        return total
    if case.operation in ("delta_rule", "linear_rule"):
        state = BATCH * HEADS * 4 * case.dim**2
        total += state  # the last one
    else:
        weights = size(shapes[0])
        momentum = not case.variant.endswith("_window")
        tokens = 0 if momentum else BATCH * HEADS * 4 * (WINDOW - 1) * 2 * case.dim
        state = (2 if momentum else 1) * weights + tokens
        total += state  # the last one; the first weights are among the inputs, and momenta start at zero
    return total + (TIME // case.chunk * state if case.direction == "both" else 0)
