"""The TPU compiler, libtpu, on a machine without a TPU: its environment, topologies and options.

The environment must be set before anything imports jax, so functions here import jax locally.
"""

import importlib.util
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atlasjax.names import lookup

if TYPE_CHECKING:
    import jax

# The kinds that jax's devices of a generation have.
DEVICE_KIND = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "v5p": "TPU v5p", "tpu7x": "TPU7x"}
# GiB of memory per device available to programs, taken from libtpu's out-of-memory messages.
HBM_GIB = {"v5e": 15.75, "v6e": 31.25, "v5p": 95.74, "tpu7x": 94.75}


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


def topology_devices(topology: str) -> "Sequence[jax.Device]":
    """The devices of a TPU topology, as compilation targets.

    Args:
      topology: "v5e:16x16", "v5p:8x8x8", "v6e:16x16", "tpu7x:4x4x4", …; "2x v5e:16x16" for two slices.

    Raises:
      ValueError: libtpu is not installed, or the generation or topology is unknown.
    """
    check_topology(topology)
    slices, name = split_topology(topology)
    for variable, value in environment().items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(name, platform="tpu", num_slices=slices).devices
    except Exception as error:  # jax raises several types here
        raise ValueError(
            f"topology is {topology!r}, which libtpu does not know: {str(error).splitlines()[0]}"
        ) from None


def split_topology(topology: str) -> tuple[int, str]:
    """Returns (number of slices, topology of each): (2, "v5e:16x16") for "2x v5e:16x16"."""
    found = re.fullmatch(r"(\d{1,4})x\s*(\D.*)", topology)
    return (int(found[1]), found[2]) if found else (1, topology)


def check_topology(topology: str) -> None:
    """Checks a topology's name as far as possible without loading libtpu.

    Raises:
      ValueError: libtpu is not installed, the generation is unknown, or the shape is malformed.
    """
    slices, name = split_topology(topology)
    generation, _, shape = name.partition(":")
    try:
        lookup("TPU generation", generation, HBM_GIB)
    except ValueError as error:
        raise ValueError(f"{error} Plans are for TPUs only, not for GPUs.") from None
    if not re.fullmatch(r"\d+(x\d+){1,2}", shape) or slices < 1:
        raise ValueError(
            f"topology is {topology!r}; it should be like v5e:16x16, v5p:8x8x8, or 2x v5e:16x16 for two slices."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "Planning for a TPU needs its compiler, libtpu: pip install 'jax[tpu]', in the version that matches your jax."
        )


def low_effort() -> dict[str, Any]:
    """Compiler options for fast compilation. In practice the memory reported with them is an upper bound."""
    import jax

    if jax.__version_info__ >= (0, 11):
        return {"optimization_level": "O0"}
    return {"exec_time_optimization_effort": -1.0}
