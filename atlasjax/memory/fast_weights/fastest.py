"""The table of kernels that were measured as faster than the XLA engine, used by `memory.scan(implementation=None)`.

Its rows in `fastest.json` are measured on the named device and written by
`python experiments/benchmarks/kernels_measured.py --record`. Compiler estimates are not recorded.
"""

import dataclasses
import functools
import json
import math
import pathlib

import jax.numpy as jnp
from jax.typing import DTypeLike

from atlasjax import check
from atlasjax.names import lookup

PATH = pathlib.Path(__file__).with_name("fastest.json")
LEAST_RATIO = 1.1  # above measurement noise
# Implementation → platform, as named by `jax.lax.platform_dependent`.
PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "cuda"}
# "chunk_memory_bounded": that with bounded steps (`Bound.step`); "chunk_memory_muon": with Muon. These are separate kernels.
KERNELS = ("chunk_memory", "chunk_memory_bounded", "chunk_memory_muon", "delta_rule", "linear_rule")
DTYPES = ("float32", "bfloat16")
_Key = tuple[str, str, int, str, str, str]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of the table.

    Attributes:
      platform: a value of PLATFORMS.
      kernel: one of KERNELS.
      head_dim: key_dim = value_dim.
      dtype: dtype of tokens, one of DTYPES.
      implementation: the measured implementation, a key of PLATFORMS.
      ratio_to_xla: the XLA engine's time / the kernel's time, forward and backward, minimum over the measured rules. 0 if a result
        was wrong.
      device: kind of device, such as "NVIDIA H200".
      jax: version of jax.
      command: the command that was run.
    """

    platform: str
    kernel: str
    head_dim: int
    dtype: str
    implementation: str
    ratio_to_xla: float
    device: str
    jax: str
    command: str

    def __post_init__(self) -> None:
        allowed = {"platform": tuple(dict.fromkeys(PLATFORMS.values())), "kernel": KERNELS, "dtype": DTYPES}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}={getattr(self, name)!r}, must be one of {values}.")
        if PLATFORMS.get(self.implementation) != self.platform:
            wanted = " or ".join(repr(name) for name, platform in PLATFORMS.items() if platform == self.platform)
            raise ValueError(f"implementation={self.implementation!r}, must be {wanted} on {self.platform!r}.")
        if not check.is_integer(self.head_dim, 1):
            raise ValueError(f"head_dim={self.head_dim!r}, must be an integer ≥ 1.")
        ratio = self.ratio_to_xla
        if not (check.is_finite(ratio) and ratio >= 0):
            raise ValueError(f"ratio_to_xla={ratio!r}, must be a finite number ≥ 0.")
        for name in ("device", "jax", "command"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r}, must be a string.")

    @property
    def key(self) -> _Key:
        """The fields that identify a row; no two rows have the same key."""
        return self.platform, self.kernel, self.head_dim, self.dtype, self.implementation, self.device


def read(path: pathlib.Path = PATH) -> tuple[Measurement, ...]:
    """The rows of a table.

    Raises:
      ValueError: a malformed file. The message names the row and the problem.
    """
    try:
        rows = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}.") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path.name} holds {type(rows).__name__}, must be a list of rows.")
    names = {field.name for field in dataclasses.fields(Measurement)}
    found: dict[_Key, Measurement] = {}
    for number, row in enumerate(rows, 1):
        where = f"{path.name}, row {number}"
        if not isinstance(row, dict) or set(row) != names:
            has = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(f"{where} has {has}, should have {sorted(names)}.")
        try:
            measurement = Measurement(**row)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if measurement.key in found:
            raise ValueError(f"{where} repeats the row of {measurement.key}.")
        found[measurement.key] = measurement
    return tuple(found.values())


_read_once = functools.cache(read)


def fastest(kernel: str, head_dim: int, dtype: DTypeLike, path: pathlib.Path = PATH) -> dict[str, str]:
    """The platforms on which a kernel is recorded as faster than the XLA engine.

    A traced program does not know its device. So a platform is included only if, on each of its devices measured with this head
    dimension and dtype, results were correct and the XLA engine took more than `LEAST_RATIO` times as long, forward and backward.
    Measurements of other head dimensions are not used.

    Args:
      kernel: one of KERNELS.
      head_dim: key_dim and value_dim.
      dtype: dtype of tokens.
      path: the table, which is read once.

    Returns:
      Platform ("tpu", "cuda") → implementation ("pallas_tpu", "pallas_gpu"). {} if no faster kernel is recorded.

    Raises:
      ValueError: an unknown kernel, or a malformed table.
    """
    lookup("kernel", kernel, dict.fromkeys(KERNELS))
    dtype = jnp.dtype(dtype).name
    ratios: dict[str, float] = {}
    for row in _read_once(path):
        if (row.kernel, row.head_dim, row.dtype) == (kernel, head_dim, dtype):
            ratios[row.implementation] = min(row.ratio_to_xla, ratios.get(row.implementation, math.inf))
    faster = sorted((name for name, ratio in ratios.items() if ratio > LEAST_RATIO), key=lambda name: ratios[name])
    return {PLATFORMS[name]: name for name in faster}  # the last one, the fastest, wins for each platform
