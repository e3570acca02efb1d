"""The memories of the capacity experiment, each at the size that fills a budget of floats. A line of `MEMORIES` adds one."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from atlasjax import memory
from atlasjax.memory import (
    CachedRule,
    HierarchicalRule,
    LogLinearRule,
    MesaRule,
    Rule,
    features,
    objectives,
    optimizers,
    retention,
    structures,
)
from atlasjax.memory.fast_weights.rule import MemoryRule

VALUE_DIM = 16
SAME_KEYS = 16  # size of the keys where the budget is None
KEY_DIMS = (16, 32, 64)  # tried where the rest of the memory, and not the key, fills the budget
DEEP_FEATURE_KEYS = (4, 8, 16)  # the same for a deep memory on polynomial features


@dataclasses.dataclass(frozen=True)
class Deep(structures.Structure):
    """M(x) = W1 σ(W2 … σ(W_depth x)) with a hidden width of its own and no residual, so a key may have any size.

    M_0 reads zero, as a fresh `Matrix` does: W1 starts at zero and the others at their fan-in scale.
    """

    depth: int = 2
    hidden: int = 16

    def weight_shapes(self, feature_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
        widths = [value_dim, *[self.hidden] * (self.depth - 1), feature_dim]
        return {f"W{i + 1}": (widths[i], widths[i + 1]) for i in range(self.depth)}

    def init(self, key: jax.Array, feature_dim: int, value_dim: int) -> dict[str, jax.Array]:
        weights = super().init(key, feature_dim, value_dim)
        return weights | {"W1": jnp.zeros_like(weights["W1"])}

    def apply(self, linear: structures.Linear, x: jax.Array, skip: jax.Array | None, norm: object) -> jax.Array:
        for i in range(self.depth, 1, -1):
            x = structures.gelu(linear(f"W{i}", x))
        return linear("W1", x)


@dataclasses.dataclass(frozen=True)
class Gated(Deep):
    """M(x) = W1 (σ(W2 x) ⊙ W3 x) (A Eq. 43), with a hidden width of its own and no residual, as `Deep`."""

    def weight_shapes(self, feature_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
        return super().weight_shapes(feature_dim, value_dim) | {"W3": (self.hidden, feature_dim)}

    def apply(self, linear: structures.Linear, x: jax.Array, skip: jax.Array | None, norm: object) -> jax.Array:
        return linear("W1", structures.gelu(linear("W2", x)) * linear("W3", x))


@dataclasses.dataclass(frozen=True)
class Memory:
    """A memory without its size.

    Attributes:
      depth: matrices on the way from a key to a value; 1 is a matrix memory.
      gated: whether the hidden units have a gate of their own; a depth of 2.
      features: the feature map.
      degree: its degree.
      objective: the inner loss; "keys" is ℓ2 with a read key b · k, where b is an erasing rate of its own (GDN-2, Comba).
      window: c, the pairs on which a step descends.
      optimizer: "descent" (no momentum), "momentum" or "muon".
      steps: Newton–Schulz steps of Muon.
      free: whether the budget counts the weights of the memory that is written only, as the papers do, and not the window's pairs,
        the momentum and cached memories.
      caching: an aggregation of Memory Caching, "log-linear", or "" for one memory.
      segment: pairs after which a memory is cached.
      chunk: pairs whose gradients are taken at one memory.
      solver: of a regression on all pairs (MesaNet), in place of steps; "" for none.
      hierarchical: whether a memory with chunks of `chunk` pairs has a local one with chunks of one beside it (TNT).
      projected: whether the local one is read at queries projected on its keys.
    """

    depth: int = 1
    gated: bool = False
    features: Literal["identity", "powers", "polynomial", "sketch"] = "identity"
    degree: int = 1
    objective: Literal["l2", "dot", "keys"] = "l2"
    window: int = 1
    optimizer: Literal["descent", "momentum", "muon"] = "descent"
    steps: int = 5
    free: bool = False
    caching: Literal["", "residual", "grm", "soup", "ssc", "log-linear"] = ""
    segment: int = 16
    chunk: int = 1
    solver: Literal["", "conjugate_gradient", "exact"] = ""
    hierarchical: bool = False
    projected: bool = True


# Aggregation → sizes of the connector that are tried (`connector`).
CONNECTORS = {**dict.fromkeys(("grm", "soup", "ssc"), (4.0, 16.0, 64.0)), "log-linear": (0.7, 1.0, 1.4)}
_CACHING: dict[str, Literal["residual", "grm", "soup", "ssc", "log-linear"]] = {
    "Residual": "residual", "GRM": "grm", "Soup": "soup", "SSC": "ssc", "Log-Linear": "log-linear",
}  # fmt: skip
_WINDOWS = (2, 4, 8, 16)
_COARSE = 16  # pairs of a chunk of a global memory
_RESTART = 48  # pairs after which its local one restarts: two topics
_ERASING = (0.0, 0.5, 0.8, 1.0, 1.25, 2.0)  # b, in units of what the step writes
_GLOBAL_STEPS = (0.1, 1.0)  # steps of a global memory, whose chunks add up, in units of its local one's
MEMORIES: dict[str, Memory] = {
    "linear": Memory(),
    "deep 2": Memory(depth=2),
    "powers 2": Memory(features="powers", degree=2),
    "polynomial 2": Memory(features="polynomial", degree=2),
    **{f"linear, c={c}": Memory(window=c) for c in _WINDOWS},
    **{f"linear, c={c}, buffers free": Memory(window=c, free=True) for c in _WINDOWS},
    "deep 3": Memory(depth=3),
    "polynomial 3": Memory(features="polynomial", degree=3),
    "powers 3": Memory(features="powers", degree=3),
    "sketch 2": Memory(features="sketch", degree=2),
    "sketch 3": Memory(features="sketch", degree=3),
    "linear, dot product": Memory(objective="dot"),
    "linear, momentum": Memory(optimizer="momentum"),
    "linear, momentum, buffers free": Memory(optimizer="momentum", free=True),
    "linear, Muon": Memory(optimizer="muon"),
    "linear, Muon, buffers free": Memory(optimizer="muon", free=True),
    **{
        f"linear, Muon {steps}, buffers free": Memory(optimizer="muon", steps=steps, free=True)
        for steps in (1, 2, 3, 7)
    },
    "linear, Muon, c=4, buffers free": Memory(optimizer="muon", window=4, free=True),
    "deep 2, c=4": Memory(depth=2, window=4),
    "deep 2, c=4, buffers free": Memory(depth=2, window=4, free=True),
    "deep 2, c=16, buffers free": Memory(depth=2, window=16, free=True),
    "deep 2, momentum, buffers free": Memory(depth=2, optimizer="momentum", free=True),
    **{
        f"deep 2, Muon {steps}, buffers free": Memory(depth=2, optimizer="muon", steps=steps, free=True)
        for steps in (1, 2, 3, 5, 7)
    },
    "deep 2, Muon 5, c=4, buffers free": Memory(depth=2, optimizer="muon", window=4, free=True),
    "gated": Memory(depth=2, gated=True),
    "gated, momentum, buffers free": Memory(depth=2, gated=True, optimizer="momentum", free=True),
    "gated, Muon 5, buffers free": Memory(depth=2, gated=True, optimizer="muon", free=True),
    "gated, c=4, buffers free": Memory(depth=2, gated=True, window=4, free=True),
    "deep 2, polynomial 2": Memory(depth=2, features="polynomial", degree=2),
    "deep 2, polynomial 2, Muon 5, c=4, buffers free": Memory(
        depth=2, features="polynomial", degree=2, optimizer="muon", window=4, free=True
    ),
    **{  # a soup of matrices is a GRM
        f"linear, {name}": Memory(caching=way, free=True) for name, way in _CACHING.items() if way != "soup"
    },
    **{f"deep 2, {name}": Memory(depth=2, caching=way, free=True) for name, way in _CACHING.items()},
    **{f"linear, GRM, segments of {n}": Memory(caching="grm", segment=n, free=True) for n in (4, 8, 32)},
    "linear, own erasing rate": Memory(objective="keys"),
    "mesa": Memory(solver="conjugate_gradient"),
    "mesa, sums of keys free": Memory(solver="conjugate_gradient", free=True),
    "mesa, exact": Memory(solver="exact"),
    "mesa, exact, sums of keys free": Memory(solver="exact", free=True),
    "deep 2, momentum": Memory(depth=2, optimizer="momentum"),
    f"deep 2, momentum, chunks of {_COARSE}, buffers free": Memory(
        depth=2, optimizer="momentum", chunk=_COARSE, free=True
    ),
    "deep 2, momentum, TNT": Memory(depth=2, optimizer="momentum", chunk=_COARSE, hierarchical=True),
    **{
        f"deep 2, momentum, TNT{name}, buffers free": Memory(
            depth=2, optimizer="momentum", chunk=_COARSE, hierarchical=True, projected=projected, free=True
        )
        for name, projected in {"": True, " without projection": False}.items()
    },
}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A memory with its sizes: the rule and the size of a key."""

    written: MemoryRule | MesaRule
    key_dim: int
    caching: str = ""
    segment: int = 16
    hierarchical: bool = False
    projected: bool = True

    @property
    def rule(self) -> Rule:
        """`written`, or the rule that caches it or puts it into a hierarchy."""
        if self.hierarchical:
            return HierarchicalRule(self.written, self.written.chunk_size, (1,), _RESTART, self.projected)
        if not self.caching:
            return self.written
        if self.caching == "log-linear":
            return LogLinearRule(self.written, segment_size=self.segment)
        return CachedRule(self.written, aggregation=self.caching, segment_size=self.segment)

    @property
    def label(self) -> str:
        hidden = getattr(self.written.structure, "hidden", None)
        size = getattr(getattr(self.written, "features", None), "size", None)
        return f"keys {self.key_dim}" + (f", hidden {hidden}" if hidden else "") + (f", sketch {size}" if size else "")


def floats(shape: Shape, free: bool = False, pairs: int = 192) -> int:
    """Numbers that the memory carries from token to token. free: of the weights of the memory that is written.

    pairs: a state that grows with them is counted after so many.
    """
    rule = shape.written if free else shape.rule

    def carried() -> Any:
        sizes = {"num_heads": 1, "key_dim": shape.key_dim, "value_dim": VALUE_DIM}
        params = memory.init_params(rule, jax.random.key(0), **sizes)
        return params.weights if free else memory.init_state(rule, params, batch_size=1, max_length=pairs)

    leaves = jax.tree.leaves(jax.eval_shape(carried))
    return sum(math.prod(x.shape) for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))


def _shape(memory: Memory, key_dim: int, hidden: int = 0, size: int = 0) -> Shape:
    """The paper's recurrence: no bound, chunks of one token if it is not told otherwise, and no decay: every pair is to be kept."""
    if memory.solver:
        return Shape(MesaRule(memory.solver), key_dim)
    maps: dict[str, Callable[[], features.Features]] = {
        "identity": features.Identity,
        "powers": lambda: features.Powers(memory.degree),
        "polynomial": lambda: features.Polynomial(memory.degree),
        "sketch": lambda: features.TensorSketch(memory.degree, size),
    }
    inner: dict[str, optimizers.Optimizer] = {
        "descent": optimizers.GradientDescent(),
        "momentum": optimizers.Momentum(),
        "muon": optimizers.Muon(memory.steps),
    }
    losses = {"l2": objectives.L2, "dot": objectives.DotProduct, "keys": objectives.DeltaKeys}
    deep = Gated if memory.gated else Deep
    written = MemoryRule(
        structures.Matrix() if memory.depth == 1 else deep(memory.depth, hidden),
        losses[memory.objective](),
        maps[memory.features](), inner[memory.optimizer], retention.Full(), window=memory.window, chunk_size=memory.chunk,
        bound=None,
    )  # fmt: skip
    return Shape(written, key_dim, memory.caching, memory.segment, memory.hierarchical, memory.projected)


def _largest(make: Callable[[int], Shape], budget: int, free: bool) -> Shape | None:
    """`make` of the largest size whose floats are at most the budget; None if there is none."""
    fits = lambda size: floats(make(size), free) <= budget
    if not fits(1):
        return None
    low = 1  # fits; doubled, then halved to the last that fits
    while fits(2 * low):
        low *= 2
    step = low
    while step := step // 2:
        low += step if fits(low + step) else 0
    return make(low)


@functools.cache
def shapes(name: str, budget: int | None) -> tuple[Shape, ...]:
    """The sizes of a memory that are tried within a budget of floats; () if none fits.

    A budget of None means keys of `SAME_KEYS` numbers, and a memory as large as that makes it.
    """
    return tuple(shape for shape in _tried(MEMORIES[name], budget) if shape is not None)


def _tried(spec: Memory, budget: int | None) -> Iterator[Shape | None]:
    if budget is None:
        yield _shape(spec, SAME_KEYS, 4 * VALUE_DIM, 4 * SAME_KEYS)
    elif spec.features == "sketch":
        for key_dim in KEY_DIMS:
            yield _largest(lambda size, d=key_dim: _shape(spec, d, size=size), budget, spec.free)
    elif spec.depth == 1:
        yield _largest(lambda size: _shape(spec, size), budget, spec.free)
    else:
        for key_dim in KEY_DIMS if spec.features == "identity" else DEEP_FEATURE_KEYS:
            yield _largest(lambda size, d=key_dim: _shape(spec, d, size), budget, spec.free)


def rates(spec: Memory, shape: Shape) -> list[dict[str, float]]:
    """The gates that are tried: step size, decay of the momentum, γ_j = decay^j of the window, and `connector` of caching.

    Without Muon, a step size is given as a multiple of 1/(‖φ‖² Σ γ), where one step of a matrix memory lands on its target.
    """
    momenta = (0.0,) if spec.optimizer == "descent" else (0.0, 0.9) if spec.optimizer == "muon" else (0.5, 0.9)
    decays = (1.0,) if spec.window == 1 else (0.5, 1.0)
    more: dict[str, tuple[float, ...]] = {}  # of the memories that have more to choose
    if spec.caching:
        more["connector"] = CONNECTORS.get(spec.caching, (0.0,))
    if spec.objective == "keys":
        more["erasing"] = _ERASING
    if spec.hierarchical:
        more["global_step"] = _GLOBAL_STEPS
    found = []
    for theta, decay, *chosen in itertools.product(momenta, decays, *more.values()):
        total = sum(decay**j for j in range(spec.window))
        others = {"momentum_decay": theta, "window_decay": decay, **dict(zip(more, chosen, strict=True))}
        if spec.optimizer == "muon":
            sizes = [0.003, 0.01, 0.03, 0.1, 0.3]
        else:
            unit = (1 - theta) / (_square_norm(shape) * total)
            sizes = [unit * m for m in (0.01, 0.03, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5, 4.0)]
        found += [{"step_size": s, **others} for s in sizes]
    return found


def _square_norm(shape: Shape) -> float:
    """‖φ(k)‖² of a key; 1 for a regression, in which a step size is a weight beside a ridge of 1."""
    written = shape.written
    return written.features.square_norm(shape.key_dim) if isinstance(written, MemoryRule) else 1.0


def gates_of(shape: Shape, k: jax.Array, chosen: dict[str, jax.Array]) -> memory.Gates:
    """The gates of one write, [1, 1(, channels)], from one of `rates`. k: [1, 1, key_dim]."""
    window = getattr(shape.written, "window", 1)
    constants = {
        "retention": jnp.ones(()),
        "step_size": chosen["step_size"],
        "momentum_decay": chosen["momentum_decay"],
        "window_weights": chosen["window_decay"] ** jnp.arange(window),
    }
    channels = shape.rule.gate_channels(shape.key_dim, VALUE_DIM)
    values = {name: gate[None, None] for name, gate in constants.items() if name in channels}
    if shape.hierarchical:  # a set for each memory, the global one first
        values = {name: jnp.stack([gate, gate], -1).reshape(1, 1, -1) for name, gate in values.items()}
        values["step_size"] = values["step_size"] * jnp.stack([chosen["global_step"], jnp.ones(())])
    if "removal_key" in channels:
        values["removal_key"] = chosen["erasing"] * k
    if "connector" in channels:  # of the reads that come with writes, which nobody uses
        values["connector"] = jnp.zeros((1, 1, channels["connector"] or 0))
    return memory.Gates(**values)


def connector(shape: Shape, q: jax.Array, size: jax.Array) -> jax.Array | None:
    """The features by which the caching of a memory weighs its memories, where it does. q: [..., key_dim] → [..., channels].

    Memory Caching: u = size · q, so that a gate depends on the inner product of the query and a segment's mean key. Log-Linear
    memories: the weight of level j is size^j.
    """
    channels = shape.rule.gate_channels(shape.key_dim, VALUE_DIM).get("connector")
    if channels is None:
        return None
    if shape.caching == "log-linear":
        weights = size ** jnp.maximum(jnp.arange(channels) - 1, 0)
        return jnp.broadcast_to(jnp.log(jnp.expm1(weights)), (*q.shape[:-1], channels))
    return size * q
