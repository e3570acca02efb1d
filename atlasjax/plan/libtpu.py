"""The TPU compiler, libtpu, on a machine without a TPU: its environment, topologies and options.

The environment must be set before anything imports jax, so functions here import jax locally.
"""

import importlib.util
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atlasjax.plan.accelerator import Accelerator

if TYPE_CHECKING:
    import jax

SHAPE = r"[1-9]\d*(x[1-9]\d*){1,2}"
PLATFORM = "tpu"
EXAMPLES = "v5e:16x16, v5p:8x8x8, or 2x v5e:16x16 for two slices"
# The memory is taken from libtpu's out-of-memory messages.
ACCELERATORS = {
    "v5e": Accelerator("TPU v5 lite", 15.75),
    "v6e": Accelerator("TPU v6 lite", 31.25),
    "v5p": Accelerator("TPU v5p", 95.74),
    "tpu7x": Accelerator("TPU7x", 94.75),
}


def environment(accelerator: str = "v5litepod-4") -> dict[str, str]:
    """Environment variables that libtpu reads when it is loaded.

    They silence libtpu, let several processes load it, and keep jax on the CPU.

    Args:
      accelerator: the accelerator type that libtpu assumes.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_ACCELERATOR_TYPE": accelerator,
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LOG_DIR": "disabled",
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def check_installed() -> None:
    """Checks that libtpu is there.

    Raises:
      ValueError: it is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("Planning for a TPU needs its compiler, libtpu: pip install 'atlasjax[tpu]'.")


def devices(generation: str, shape: Sequence[int], groups: int = 1) -> "Sequence[jax.Device]":
    """The devices of TPU slices, as compilation targets.

    Args:
      generation: a name in `ACCELERATORS`.
      shape: the torus of a slice, e.g. (16, 16).
      groups: number of slices.

    Raises:
      ValueError: libtpu is not installed, or it does not know the topology.
    """
    check_installed()
    for variable, value in environment().items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    name = f"{generation}:{'x'.join(map(str, shape))}"
    # A host has four chips, except that a chip may be had alone.
    host = {"chips_per_host_bounds": (1, 1, 1)} if math.prod(shape) == 1 else {}
    try:
        return topologies.get_topology_desc(name, platform="tpu", num_slices=groups, **host).devices
    except Exception as error:  # jax raises several types here
        raise ValueError(f"topology is {name!r}, which libtpu does not know: {str(error).splitlines()[0]}") from None


def options() -> dict[str, Any]:
    """Compiler options for fast compilation. In practice the memory reported with them is an upper bound."""
    import jax

    if jax.__version_info__ >= (0, 11):
        return {"optimization_level": "O0"}
    return {"exec_time_optimization_effort": -1.0}
