"""Feature maps φ of keys and queries (A §3.1, Eq. 5; SEMANTICS 1.8).

Every map with coefficients c_0 … c_p (learned per head) has φ(q)·φ(k) = Σ_i c_i² (q·k)^i, exactly (`Polynomial`), per coordinate
(`Powers`) or in expectation (`TensorSketch`). Initially c_i² = 1/i!, as in the expansion of exp.
"""

import dataclasses
import functools
import itertools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax import check
from atlasjax.memory.axes.base import Axis
from atlasjax.memory.products import wide_dtype


class Features(Axis):
    """Base class of feature maps. Subclasses implement `dim` and `apply`.

    Attributes:
      is_identity: claim: φ(x) = x.
      is_positive: claim: φ(q)·φ(k) ≥ 0 for all q and k, as `NormalizedRule` requires.
    """

    claims: ClassVar = {"is_identity": False, "is_positive": False}
    is_identity: bool
    is_positive: bool

    def dim(self, key_dim: int) -> int:
        """D, the size of φ(x), for every key_dim ≥ 1: the size of a key is found from D."""
        raise NotImplementedError(f"{type(self).__name__}.dim")

    def init(self) -> np.ndarray | None:
        """Initial learned coefficients of one head, float32 of any shape. None if there are none."""
        return None

    def apply(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        """φ(x) in x's dtype: [..., key_dim] → [..., D]. `coefficients` are those of the head."""
        raise NotImplementedError(f"{type(self).__name__}.apply")

    def degree_one(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        """r(x), the residual of a memory: [..., key_dim] → [..., key_dim]. By default x itself."""
        return x

    def key_dim(self, feature_dim: int) -> int:
        """The size of a key with D features.

        Raises:
          ValueError: no size has D features, or several have. A map whose D does not determine the size overrides this method.
        """
        # By bisection, since D grows with the key in all but strange maps; those are searched from the smallest size on.
        low, high = 0, feature_dim  # the smallest size with enough features is in (low, high]
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.dim(middle) >= feature_dim else (middle, high)
        found: int | None = high
        if self.dim(high) != feature_dim:
            found = next((size for size in range(1, feature_dim + 1) if self.dim(size) == feature_dim), None)
        if found is None:
            raise ValueError(f"{self!r} has no key size with {feature_dim} features.")
        if self.dim(found + 1) == feature_dim:
            raise ValueError(
                f"{self!r} has {feature_dim} features for several key sizes. Implement its method `key_dim`."
            )
        return found

    def square_norm(self, key_dim: int) -> float:
        """Upper bound of ‖φ(x)‖² for ‖x‖ = 1 at the initial coefficients, for suggested step sizes. By default it is measured."""
        with jax.ensure_compile_time_eval():
            x = jax.random.normal(jax.random.key(0), (256, key_dim))
            x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
            initial = self.init()
            features = self.apply(None if initial is None else jnp.asarray(initial), x)
            return float(jnp.max(jnp.sum(features * features, axis=-1)))


class _Weighed(Features):
    """Maps with coefficients c_i for which φ(x)·φ(x) is at most Σ_i c_i² ‖x‖^{2i}, in expectation for a sketch."""

    def square_norm(self, key_dim: int) -> float:
        coefficients = self.init()
        assert coefficients is not None
        return float(np.sum(np.square(coefficients, dtype=np.float64)))


def _initial_coefficients(degrees: range) -> np.ndarray:
    return np.asarray([math.factorial(i) ** -0.5 for i in degrees], np.float32)


@functools.lru_cache
def _monomials(dim: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices [n, degree] of all monomials of one degree in lexicographic order, and √(multinomial) weights [n]."""
    index = np.asarray(list(itertools.combinations_with_replacement(range(dim), degree)), np.int32).reshape(-1, degree)
    weight = []
    for row in index:
        repeats = math.prod(math.factorial(n) for n in np.unique(row, return_counts=True)[1].tolist())
        weight.append(math.sqrt(math.factorial(degree) / repeats))
    return index, np.asarray(weight)


@dataclasses.dataclass(frozen=True)
class Identity(Features):
    """φ(x) = x."""

    is_identity = True

    def dim(self, key_dim: int) -> int:
        return key_dim

    def apply(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        return x

    def square_norm(self, key_dim: int) -> float:
        return 1.0

    def summary(self) -> str:
        return "D = d"


@dataclasses.dataclass(frozen=True)
class EluPlusOne(Features):
    """φ(x) = elu(x) + 1: x + 1 for x > 0 and exp(x) below, positive in every channel (Katharopoulos et al. 2020). D = key_dim."""

    is_positive = True

    def dim(self, key_dim: int) -> int:
        return key_dim

    def apply(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        return jax.nn.elu(x) + 1

    def summary(self) -> str:
        return "D = d"


@dataclasses.dataclass(frozen=True)
class Homogeneous(Features):
    """All monomials of total degree `degree` alone, in lexicographic order: φ(q)·φ(k) = (q·k)^degree, exactly (A Table 1,
    PolySketchFormer). Nothing is learned. D = C(key_dim + degree − 1, degree)."""

    degree: int = 2

    def __post_init__(self) -> None:
        check.integers(self, {"degree": 1})

    @property
    def is_positive(self) -> bool:  # type: ignore[override]
        return self.degree % 2 == 0

    def dim(self, key_dim: int) -> int:
        return math.comb(key_dim + self.degree - 1, self.degree)

    def apply(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        index, weight = _monomials(x.shape[-1], self.degree)
        block = math.prod((x[..., index[:, j]] for j in range(1, self.degree)), start=x[..., index[:, 0]])
        return jnp.asarray(weight, x.dtype) * block

    def square_norm(self, key_dim: int) -> float:
        return 1.0

    def summary(self) -> str:
        return f"D = C(d + {self.degree - 1}, {self.degree})"


@dataclasses.dataclass(frozen=True)
class Polynomial(_Weighed):
    """All monomials of total degree ≤ `degree`, ordered by degree, then lexicographically. D = C(key_dim + degree, degree)."""

    degree: int = 2

    def __post_init__(self) -> None:
        check.integers(self, {"degree": 1})

    def dim(self, key_dim: int) -> int:
        return math.comb(key_dim + self.degree, self.degree)

    def init(self) -> np.ndarray | None:
        return _initial_coefficients(range(self.degree + 1))

    def apply(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        assert coefficients is not None
        blocks = [jnp.broadcast_to(coefficients[0].astype(x.dtype), (*x.shape[:-1], 1))]
        for degree in range(1, self.degree + 1):
            index, weight = _monomials(x.shape[-1], degree)
            block = math.prod((x[..., index[:, j]] for j in range(1, degree)), start=x[..., index[:, 0]])
            weights = jnp.broadcast_to(jnp.asarray(weight, x.dtype), block.shape)
            blocks.append(coefficients[degree].astype(x.dtype) * weights * block)
        return jnp.concatenate(blocks, axis=-1)

    def degree_one(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        assert coefficients is not None
        return coefficients[1].astype(x.dtype) * x

    def summary(self) -> str:
        return f"D = C(d + {self.degree}, {self.degree})"


@dataclasses.dataclass(frozen=True)
class Powers(_Weighed):
    """Elementwise powers [c_1 x, c_2 x², …]: `Polynomial` without cross terms, and cheaper. D = degree · key_dim."""

    degree: int = 2

    def __post_init__(self) -> None:
        check.integers(self, {"degree": 1})

    def dim(self, key_dim: int) -> int:
        return self.degree * key_dim

    def init(self) -> np.ndarray | None:
        return _initial_coefficients(range(1, self.degree + 1))

    def apply(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        assert coefficients is not None
        powers = [x]
        for _ in range(1, self.degree):
            powers.append(powers[-1] * x)
        return jnp.concatenate([coefficients[i].astype(x.dtype) * p for i, p in enumerate(powers)], axis=-1)

    def degree_one(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        assert coefficients is not None
        return coefficients[0].astype(x.dtype) * x

    def summary(self) -> str:
        return f"D = {self.degree}d"


@functools.lru_cache
def _count_sketches(dim: int, degree: int, size: int, seed: int) -> np.ndarray:
    """`degree` independent count-sketch matrices [degree, dim, size], with one ±1 in every row."""
    rng = np.random.default_rng((seed, degree))
    sketches = np.zeros((degree, dim, size), np.float32)
    for j in range(degree):
        sketches[j, np.arange(dim), rng.integers(0, size, dim)] = rng.choice((-1.0, 1.0), dim)
    return sketches


@functools.lru_cache
def _spectra(dim: int, degree: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Count sketches followed by a Fourier transform, and the inverse transform, as real matrices.

    Returns real and imaginary parts of the `degree` maps [degree, dim, frequencies], and of the inverse [frequencies, size]. XLA
    computes products with them efficiently everywhere. Its own Fourier transform does not support bfloat16, nor some layouts on
    CPUs.
    """
    spectra = np.fft.rfft(_count_sketches(dim, degree, size, seed).astype(np.float64), axis=-1)
    back = (
        np.fft.irfft(np.eye(spectra.shape[-1]), n=size, axis=-1),
        np.fft.irfft(1j * np.eye(spectra.shape[-1]), n=size, axis=-1),
    )
    return spectra.real, spectra.imag, *back


@dataclasses.dataclass(frozen=True)
class TensorSketch(_Weighed):
    """A random sketch of `Polynomial` (Pham & Pagh 2013): degrees 0 and 1 are exact, each higher one is sketched in `size` numbers.

    D = 1 + key_dim + (degree − 1) · size, and E[φ(q)·φ(k)] = Σ_i c_i² (q·k)^i over the random `seed`.
    """

    degree: int = 2
    size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check.integers(self, {"degree": 1, "size": 1, "seed": 0})

    def dim(self, key_dim: int) -> int:
        return 1 + key_dim + (self.degree - 1) * self.size

    def init(self) -> np.ndarray | None:
        return _initial_coefficients(range(self.degree + 1))

    def apply(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        assert coefficients is not None
        c = coefficients.astype(x.dtype)
        blocks = [jnp.broadcast_to(c[0], (*x.shape[:-1], 1)), c[1] * x]
        wide = x.astype(wide_dtype(x.dtype))
        product = functools.partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        for degree in range(2, self.degree + 1):
            spectra = _spectra(x.shape[-1], degree, self.size, self.seed)
            to_real, to_imag, from_real, from_imag = (jnp.asarray(matrix, wide.dtype) for matrix in spectra)
            # Σ over the circular convolution of the sketches = the product of their spectra.
            real, imag = product(wide, to_real[0]), product(wide, to_imag[0])
            for j in range(1, degree):
                other_real, other_imag = product(wide, to_real[j]), product(wide, to_imag[j])
                real, imag = real * other_real - imag * other_imag, real * other_imag + imag * other_real
            sketch = product(real, from_real) + product(imag, from_imag)
            blocks.append(c[degree] * sketch.astype(x.dtype))
        return jnp.concatenate(blocks, axis=-1)

    def degree_one(self, coefficients: jax.Array | None, x: jax.Array) -> jax.Array:
        assert coefficients is not None
        return coefficients[1].astype(x.dtype) * x

    def summary(self) -> str:
        return f"D = 1 + d + {(self.degree - 1) * self.size}"
