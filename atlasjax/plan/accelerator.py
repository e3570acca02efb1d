"""The facts of a device that a plan uses."""

from typing import NamedTuple


class Accelerator(NamedTuple):
    """A kind of device.

    Attributes:
      kind: how the kind that jax's devices have begins; a key of `train.reports.utilization.PEAK_FLOPS`.
      memory_gib: GiB of memory per device that programs can use by default.
    """

    kind: str
    memory_gib: float
