"""`KernelRule`: the rule of a memory with the infinite feature map of the exponential kernel."""

import dataclasses
from collections.abc import Iterator

from atlasjax.memory import objectives, optimizers, structures
from atlasjax.memory import retention as retention_lib


@dataclasses.dataclass(frozen=True)
class KernelRule:
    """DeepTransformer, SWDT, DOT and variants (A §4, Eq. 17–31; SEMANTICS 2). Frozen and hashable, static under `jax.jit`.

    The recurrence is that of `memory.MemoryRule` with φ*, the feature map of κ(k, x) = exp(k·x / √key_dim). The matrix that reads
    φ* is a sum over the tokens written, h_t(x) = Σ_i a_i(t) κ(k_i, x). It is never formed, but stored as a cache of keys k_i and
    coefficients a_i. With `normalized`, the sum is divided by Z_t(x) = Σ_i ρ_i(t) κ(k_i, x), where ρ_i(t) = α_{i+1} … α_t. An empty
    cache reads 0/0 = 0.

        matrix memory   y_t = h_t(q_t)                            a_i: [value_dim]
        MLP memory      y_t = q_t + W1 σ(h_t(q_t))                a_i: [expansion · value_dim]; W1 starts at a learned value

    Token t descends on the window's losses at the memory of its chunk's start t'. A step on token i's loss changes only a_i:

        s_i ← θ_t s_i − η_t γ_{t,t−i} ∂ℓ_i/∂h_{t'}(k_i)           (no 1/Z in the write)
        a_i ← α_t a_i + s_i                                       W1 is updated like any weight matrix

    With α = η = γ = 1, a matrix memory and the dot-product loss, the normalized memory is softmax attention.

    Attributes:
      structure: `Matrix()`, or `MLP(depth=2)` without a norm. An MLP's residual is x itself, so its key_dim = value_dim.
      objective: `DotProduct()` (DeepTransformer, SWDT) or `L2()` (DOT).
      optimizer: `GradientDescent()` or `Momentum()`.
      retention: `Full()` or `Scalar()`.
      window: c ≥ 1, the number of tokens on whose loss every step descends; 1 is the online rule.
      cache_window: w ≥ c, the number of most recent tokens that the cache holds (SWDT). None means all. W1 is not windowed.
      normalized: whether to divide by Z.
      chunk_size: b ≥ 1, as in `MemoryRule`. No effect for a matrix memory with the dot-product loss.

    Raises:
      ValueError: an unsupported choice, which the message names, or a window larger than the cache.
    """

    structure: structures.Matrix | structures.MLP = structures.MLP()
    objective: objectives.DotProduct | objectives.L2 = objectives.DotProduct()
    optimizer: optimizers.GradientDescent | optimizers.Momentum = optimizers.GradientDescent()
    retention: retention_lib.Full | retention_lib.Scalar = retention_lib.Scalar()
    window: int = 1
    cache_window: int | None = None
    normalized: bool = True
    chunk_size: int = 64

    def __post_init__(self) -> None:
        for name, offered in _OFFERED.items():
            value = getattr(self, name)
            if not isinstance(value, offered):
                hint = " Give an instance, not the class." if isinstance(value, type) else ""
                raise ValueError(
                    f"KernelRule: {name} must be one of {', '.join(o.__name__ + '()' for o in offered)} for a kernel memory, "
                    f"got {value!r}.{hint}"
                )
        for name in ("window", "chunk_size", "cache_window"):
            value = getattr(self, name)
            if name == "cache_window" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"KernelRule: {name} must be an integer ≥ 1, got {value!r}.")
        if not isinstance(self.normalized, bool):
            raise ValueError(f"KernelRule: normalized must be True or False, got {self.normalized!r}.")
        for message in _clashes(self):
            raise ValueError(f"KernelRule: {message}")

    @property
    def has_constant_gradient(self) -> bool:
        """Whether ∇ℓ does not depend on the memory, so that the chunk size has no effect (SEMANTICS 1.4)."""
        return isinstance(self.structure, structures.Matrix) and isinstance(self.objective, objectives.DotProduct)

    @property
    def inner(self) -> str:
        """Name of the matrix that reads φ*, which is never formed."""
        return list(self.structure.weight_shapes(1, 1))[-1]

    def width(self, value_dim: int) -> int:
        """Size of a coefficient a_i: value_dim for a matrix memory, the hidden width for an MLP."""
        return self.structure.weight_shapes(1, value_dim)[self.inner][0]

    @property
    def pending(self) -> int:
        """Maximum number of tokens of an unfinished chunk in a state: b − 1, or 0 if the chunk size has no effect."""
        return 0 if self.has_constant_gradient else self.chunk_size - 1

    def gate_channels(self, key_dim: int, value_dim: int | None = None) -> dict[str, int | None]:
        """The gates of this rule: name → number of channels, or None for one scalar per token and head. The sizes are ignored."""
        gates: dict[str, int | None] = {}
        if isinstance(self.retention, retention_lib.Scalar):
            gates["retention"] = None
        gates["step_size"] = None
        if self.optimizer.has_momentum:
            gates["momentum"] = None
        if self.window > 1:
            gates["window"] = self.window
        return gates


_OFFERED: dict[str, tuple[type, ...]] = {
    "structure": (structures.Matrix, structures.MLP),
    "objective": (objectives.DotProduct, objectives.L2),
    "optimizer": (optimizers.GradientDescent, optimizers.Momentum),
    "retention": (retention_lib.Full, retention_lib.Scalar),
}


def _clashes(rule: KernelRule) -> Iterator[str]:
    structure = rule.structure
    if isinstance(structure, structures.MLP) and structure.depth != 2:
        yield f"structure={structure!r}: the depth of a kernel memory must be 2 (one layer reads φ*, W1 the other)."
    if isinstance(structure, structures.MLP) and structure.norm:
        yield f"structure={structure!r}: a LayerNorm inside is not supported for kernel memories; use norm=False."
    if rule.optimizer.per_channel:
        yield f"optimizer={rule.optimizer!r}: a step size per channel is not supported for kernel memories."
    if rule.retention.decay_first:
        yield f"retention={rule.retention!r}: decay_first is not supported for kernel memories."
    if rule.cache_window is not None and rule.window > rule.cache_window:
        yield (
            f"window={rule.window} is larger than the cache, cache_window={rule.cache_window}: a token that left the cache "
            "cannot be written. Use a window of at most cache_window."
        )
