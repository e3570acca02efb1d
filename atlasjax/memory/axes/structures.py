"""Structure of a memory: a map M from the features of a key to a value, whose weights are written at test time.

Every structure applies its weights only through `linear(name, h)`, one matrix at a time. The caller of `apply` chooses `linear`: a
plain product, a product that records its input (an inner gradient is an outer product with this input), or a product with a sum of
matrices that is never formed (the dual form, or a soup of cached memories).
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp

from atlasjax import check
from atlasjax.memory.axes.base import Axis
from atlasjax.names import lookup

Linear = Callable[[str, jax.Array], jax.Array]

_GELU_SCALE, _GELU_CUBE = 0.7978845608028654, 0.044715  # √(2/π) and the constant of the tanh form


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(_GELU_SCALE * x * (1.0 + _GELU_CUBE * x * x))


@jax.custom_jvp
def gelu(x: jax.Array) -> jax.Array:
    """GELU, tanh form. An inner gradient needs σ', and differentiating it needs σ''. Both are written out in few operations."""
    return 0.5 * x * (1.0 + _gelu_tanh(x))


@jax.custom_jvp
def _gelu_slope(x: jax.Array) -> jax.Array:
    t = _gelu_tanh(x)
    return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (_GELU_SCALE * (1.0 + 3.0 * _GELU_CUBE * x * x))


def _gelu_curvature(x: jax.Array) -> jax.Array:
    t = _gelu_tanh(x)
    inner = _GELU_SCALE * (1.0 + 3.0 * _GELU_CUBE * x * x)
    return (1.0 - t * t) * (inner * (1.0 - x * t * inner) + 3.0 * _GELU_SCALE * _GELU_CUBE * x * x)


gelu.defjvps(lambda dx, y, x: _gelu_slope(x) * dx)
_gelu_slope.defjvps(lambda dx, y, x: _gelu_curvature(x) * dx)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


def _fan_in_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.float32) / shape[-1] ** 0.5


def layer_norm(x: jax.Array, norm: Mapping[str, jax.Array]) -> jax.Array:
    """LayerNorm over the last axis with learned scale and bias."""
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    scale, bias = (jnp.broadcast_to(norm[name], x.shape) for name in ("scale", "bias"))
    return centred * jax.lax.rsqrt(variance + 1e-6) * scale + bias


class Structure(Axis):
    """Base class of structures. Subclasses implement `weight_shapes` and `apply`, and may override `init`.

    Attributes:
      residual: whether M adds the residual r(x), so that key_dim must equal value_dim. `apply` receives it as `skip`.
      norm: whether the branch goes through a LayerNorm with learned scale and bias, which `apply` receives as `norm`.
      is_matrix: claim: M(x) = W x with one matrix "W". The closed forms of linear attention and the delta rules then apply.
    """

    claims: ClassVar = {"is_matrix": False}
    residual: bool = False
    norm: bool = False
    is_matrix: bool

    def weight_shapes(self, feature_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
        """Name → (out, in). The first matrix is the outermost, with out = value_dim. The last one reads the features.

        Sizes are integers ≥ 1. Names and their order do not depend on the arguments: it is called with 1 and 1 where only names
        are needed.
        """
        raise NotImplementedError(f"{type(self).__name__}.weight_shapes")

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of the matrices that read the features."""
        return tuple(self.weight_shapes(1, 1))[-1:]

    def init(self, key: jax.Array, feature_dim: int, value_dim: int) -> dict[str, jax.Array]:
        """M_0 of one head, name → float32 [out, in]. By default normal with variance 1 / in."""
        shapes = self.weight_shapes(feature_dim, value_dim)
        keys = jax.random.split(key, len(shapes))
        return {name: _fan_in_normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    def apply(self, linear: Linear, x: jax.Array, skip: jax.Array | None, norm: Mapping | None) -> jax.Array:
        """M(x), with every weight applied exactly once by `linear(name, h)`.

        Args:
          linear: W h for a named matrix W: [..., in] → [..., out].
          x: features, [..., feature_dim].
          skip: the residual r(x), None without one.
          norm: {"scale", "bias"} of the LayerNorm, None without one.

        Returns:
          [..., value_dim].
        """
        raise NotImplementedError(f"{type(self).__name__}.apply")

    def curvature(self, value_dim: int) -> float:
        """Estimate of the largest squared singular value of ∂M(x)/∂M at M_0 for ‖x‖ = 1, for suggested step sizes.

        The default 2 holds for residual and gated MLPs at a fan-in start.
        """
        return 2.0


@dataclasses.dataclass(frozen=True)
class Matrix(Structure):
    """M(x) = W x with W [value_dim, feature_dim], initially zero. Linear attention, the delta rule, SWLA."""

    is_matrix = True

    def weight_shapes(self, feature_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
        return {"W": (value_dim, feature_dim)}

    def init(self, key: jax.Array, feature_dim: int, value_dim: int) -> dict[str, jax.Array]:
        return {"W": jnp.zeros((value_dim, feature_dim), jnp.float32)}

    def apply(self, linear: Linear, x: jax.Array, skip: jax.Array | None, norm: Mapping | None) -> jax.Array:
        return linear("W", x)

    def curvature(self, value_dim: int) -> float:
        return 1.0  # exact

    def summary(self) -> str:
        return "matrix"


@dataclasses.dataclass(frozen=True)
class MLP(Structure):
    """M(x) = r(x) + W1 σ(W2 σ(… x)): a residual MLP of any depth without biases (A Eq. 42 at depth 2).

    `W1` is the outermost matrix, as in the paper. r(x) is x for the identity feature map and the degree-one block for any other map
    (SEMANTICS 1.6), so key_dim must equal value_dim.

    Attributes:
      depth: number of matrices, ≥ 1 (1: M(x) = r(x) + W1 x).
      expansion: hidden width / value_dim.
      activation: a name in `ACTIVATIONS`.
      norm: whether the branch goes through a LayerNorm before the residual is added, as in TTT. Its scale and bias are learned, and
        not written at test time.
    """

    depth: int = 2
    expansion: int = 4
    activation: str = "gelu"
    norm: bool = False
    residual = True

    def __post_init__(self) -> None:
        check.integers(self, {"depth": 1, "expansion": 1})
        check.boolean("MLP", "norm", self.norm)
        lookup("activation", self.activation, ACTIVATIONS)

    def weight_shapes(self, feature_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
        hidden = self.expansion * value_dim
        widths = [value_dim, *[hidden] * (self.depth - 1), feature_dim]
        return {f"W{i + 1}": (widths[i], widths[i + 1]) for i in range(self.depth)}

    def apply(self, linear: Linear, x: jax.Array, skip: jax.Array | None, norm: Mapping | None) -> jax.Array:
        assert skip is not None
        return skip + self._branch(linear, x, norm)

    def _branch(self, linear: Linear, x: jax.Array, norm: Mapping | None) -> jax.Array:
        activation = ACTIVATIONS[self.activation]
        h = x
        for i in range(self.depth, 1, -1):
            h = activation(linear(f"W{i}", h))
        out = linear("W1", h)
        return layer_norm(out, norm) if norm is not None else out

    def curvature(self, value_dim: int) -> float:
        # A LayerNorm divides by the variance of its input: about 1/value_dim at depth 1, and a quarter of that for each further
        # layer. The variance fluctuates, so the estimate is doubled.
        return 2.0 * (2.0 * value_dim * 4.0 ** (self.depth - 1) if self.norm else 1.0)

    def summary(self) -> str:
        return (f"residual MLP, {self.depth} matrices, {self.expansion}×" if self.depth > 1 else "residual matrix") + (
            ", LayerNorm" if self.norm else ""
        )


@dataclasses.dataclass(frozen=True)
class PlainMLP(MLP):
    """M(x) = W1 σ(W2 σ(… x)): `MLP` without the residual, for values of another size than keys, such as one number (value_dim = 1).

    Attributes:
      expansion: hidden width / feature_dim: a value may be too small to set the width.
    """

    residual = False

    def weight_shapes(self, feature_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
        hidden = self.expansion * feature_dim
        widths = [value_dim, *[hidden] * (self.depth - 1), feature_dim]
        return {f"W{i + 1}": (widths[i], widths[i + 1]) for i in range(self.depth)}

    def apply(self, linear: Linear, x: jax.Array, skip: jax.Array | None, norm: Mapping | None) -> jax.Array:
        return self._branch(linear, x, norm)

    def summary(self) -> str:
        return f"MLP, {self.depth} matrices, {self.expansion}×" + (", LayerNorm" if self.norm else "")


@dataclasses.dataclass(frozen=True)
class GatedMLP(Structure):
    """M(x) = r(x) + W1 (σ(W2 x) ⊙ W3 x): the gated memory (A Eq. 43). Shapes and r(x) as in `MLP`."""

    expansion: int = 4
    activation: str = "gelu"
    residual = True

    def __post_init__(self) -> None:
        check.integers(self, {"expansion": 1})
        lookup("activation", self.activation, ACTIVATIONS)

    def weight_shapes(self, feature_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
        hidden = self.expansion * value_dim
        return {"W1": (value_dim, hidden), "W2": (hidden, feature_dim), "W3": (hidden, feature_dim)}

    @property
    def readers(self) -> tuple[str, ...]:
        return "W2", "W3"

    def apply(self, linear: Linear, x: jax.Array, skip: jax.Array | None, norm: Mapping | None) -> jax.Array:
        assert skip is not None
        return skip + linear("W1", ACTIVATIONS[self.activation](linear("W2", x)) * linear("W3", x))

    def summary(self) -> str:
        return f"gated residual MLP, {self.expansion}×"


@dataclasses.dataclass(frozen=True)
class SwiGLU(Structure):
    """M(x) = W1 (SiLU(W2 x) ⊙ W3 x): the memory of LaCT (arXiv 2505.23884), without a residual, for values of any size.

    The names and their order are those of `GatedMLP`. The paper's W_1, W_0 and W_2 are W1, W2 and W3 here, in this order.

    Attributes:
      expansion: hidden width / feature_dim, as in `PlainMLP`.
    """

    expansion: int = 1

    def __post_init__(self) -> None:
        check.integers(self, {"expansion": 1})

    def weight_shapes(self, feature_dim: int, value_dim: int) -> dict[str, tuple[int, int]]:
        hidden = self.expansion * feature_dim
        return {"W1": (value_dim, hidden), "W2": (hidden, feature_dim), "W3": (hidden, feature_dim)}

    @property
    def readers(self) -> tuple[str, ...]:
        return "W2", "W3"

    def apply(self, linear: Linear, x: jax.Array, skip: jax.Array | None, norm: Mapping | None) -> jax.Array:
        return linear("W1", jax.nn.silu(linear("W2", x)) * linear("W3", x))

    def summary(self) -> str:
        return f"SwiGLU, {self.expansion}×"
