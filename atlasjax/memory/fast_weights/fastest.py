"""Where a kernel is recorded as faster than the XLA engine: the table by which `memory.scan(implementation=None)` may choose.

Its rows, `fastest.json`, are measured on the device that they name and written by
`python experiments/benchmarks/kernels_measured.py --record`; a compiler's estimate is no row.
"""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax.numpy as jnp

from atlasjax import check
from atlasjax.names import lookup

PATH = pathlib.Path(__file__).with_name("fastest.json")
LEAST_RATIO = 1.1  # what noise on a clock does not explain
# What runs kernels, and on which platform, as `jax.lax.platform_dependent` calls it.
PLATFORMS = {"pallas_tpu": "tpu", "pallas_gpu": "cuda"}
# "chunk_memory_muon": chunk_memory with per-token Muon, a program of its own.
KERNELS = ("chunk_memory", "chunk_memory_muon", "delta_rule")
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One row of the table.

    Attributes:
      platform: a value of PLATFORMS.
      kernel: one of KERNELS.
      head_dim: key_dim = value_dim.
      dtype: of tokens, one of DTYPES.
      implementation: what was measured, a key of PLATFORMS.
      ratio_to_xla: the XLA engine's time over the kernel's, forward and backward, the least of the rules measured; 0 where a result
        was wrong.
      device: the device's kind, "NVIDIA H200".
      jax: the version of jax.
      command: what was run.
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
                raise ValueError(f"{name}={getattr(self, name)!r}, should be one of {values}.")
        if PLATFORMS.get(self.implementation) != self.platform:
            wanted = " or ".join(repr(name) for name, platform in PLATFORMS.items() if platform == self.platform)
            raise ValueError(f"implementation={self.implementation!r}, should be {wanted} on {self.platform!r}.")
        if not check.is_integer(self.head_dim, 1):
            raise ValueError(f"head_dim={self.head_dim!r}, should be an integer ≥ 1.")
        ratio = self.ratio_to_xla
        if not check.is_number(ratio) or not (math.isfinite(ratio) and ratio >= 0):
            raise ValueError(f"ratio_to_xla={ratio!r}, should be a finite number ≥ 0.")
        for name in ("device", "jax", "command"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise ValueError(f"{name}={getattr(self, name)!r}, should be a text.")

    @property
    def key(self) -> tuple[Any, ...]:
        """What there is one row of."""
        return self.platform, self.kernel, self.head_dim, self.dtype, self.implementation, self.device


def read(path: pathlib.Path = PATH) -> tuple[Measurement, ...]:
    """The rows of a table.

    Raises:
      ValueError: what is wrong with the file, and in which row.
    """
    try:
        rows = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}.") from None
    if not isinstance(rows, list):
        raise ValueError(f"{path.name} holds {type(rows).__name__}, should be a list of rows.")
    names = {field.name for field in dataclasses.fields(Measurement)}
    found: dict[tuple[Any, ...], Measurement] = {}
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


def fastest(kernel: str, head_dim: int, dtype: Any, path: pathlib.Path = PATH) -> dict[str, str]:
    """On which platforms a kernel is recorded as faster than the XLA engine.

    A platform is in the result where on every device of it that was measured with this head dimension and dtype the XLA engine took
    more than `LEAST_RATIO` times as long, forward and backward, and results were right: a traced program does not know its
    device. Other head dimensions say nothing about this one.

    Args:
      kernel: one of KERNELS.
      head_dim: key_dim and value_dim.
      dtype: of tokens.
      path: the table; it is read once.

    Returns:
      Platform ("tpu", "cuda") → implementation ("pallas_tpu", "pallas_gpu"); {} where nothing is recorded, or nothing faster.

    Raises:
      ValueError: a kernel that does not exist, or a malformed table.
    """
    lookup("kernel", kernel, dict.fromkeys(KERNELS))
    dtype = jnp.dtype(dtype).name
    ratios: dict[str, float] = {}
    for row in _read_once(path):
        if (row.kernel, row.head_dim, row.dtype) == (kernel, head_dim, dtype):
            ratios[row.implementation] = min(row.ratio_to_xla, ratios.get(row.implementation, math.inf))
    faster = sorted((name for name, ratio in ratios.items() if ratio > LEAST_RATIO), key=lambda name: ratios[name])
    return {PLATFORMS[name]: name for name in faster}  # the fastest of a platform last, which stays
