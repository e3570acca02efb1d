"""The compiler for NVIDIA GPUs on a machine without a GPU: its environment, targets and options.

The environment must be set before anything imports jax, so functions here import jax locally. No driver is needed.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from atlasjax.plan.accelerator import Accelerator

if TYPE_CHECKING:
    import jax

SHAPE = r"[1-9]\d*"
PLATFORM = "cuda"
EXAMPLES = "h100:8, or 2x h100:8 for two hosts"


class Target(NamedTuple):
    """The public figures of a GPU that the compiler reads. Clock, bandwidth and cache enter its cost model.

    Attributes:
      kind: how jax's devices name it.
      capability: CUDA compute capability.
      multiprocessors: number of streaming multiprocessors.
      lanes: float32 lanes per multiprocessor.
      threads: most threads of a multiprocessor.
      shared_kib: shared memory of a multiprocessor in KiB.
      block_kib: shared memory that one block can ask for.
      memory_gib: device memory that CUDA reports, in GiB, rounded down.
      bandwidth: bytes per second.
      cache: bytes of the L2 cache.
      clock: GHz, boosted.
      arch_specific: whether instructions of exactly this capability are used (wgmma and TMA, on 9.0a).
    """

    kind: str
    capability: tuple[int, int]
    multiprocessors: int
    lanes: int
    threads: int
    shared_kib: int
    block_kib: int
    memory_gib: int
    bandwidth: int
    cache: int
    clock: float
    arch_specific: bool = False

    @property
    def architecture(self) -> str:
        """Its name for ptxas."""
        return f"sm_{self.capability[0]}{self.capability[1]}" + "a" * self.arch_specific


_HOPPER = ((9, 0), 132, 128, 2048, 228, 227)
TARGETS = {
    "t4": Target("Tesla T4", (7, 5), 40, 64, 1024, 64, 64, 14, 320 * 10**9, 4 * 2**20, 1.59),
    "l4": Target("NVIDIA L4", (8, 9), 58, 128, 1536, 100, 99, 22, 300 * 10**9, 48 * 2**20, 2.04),
    "a100": Target("NVIDIA A100", (8, 0), 108, 64, 2048, 164, 163, 78, 2_039 * 10**9, 40 * 2**20, 1.41),
    "h100": Target("NVIDIA H100", *_HOPPER, 78, 3_350 * 10**9, 50 * 2**20, 1.98, arch_specific=True),
    "h200": Target("NVIDIA H200", *_HOPPER, 139, 4_800 * 10**9, 50 * 2**20, 1.98, arch_specific=True),
}
# jax lets programs use this part of a GPU's memory, unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
MEMORY_FRACTION = 0.75
ACCELERATORS = {name: Accelerator(target.kind, MEMORY_FRACTION * target.memory_gib) for name, target in TARGETS.items()}


def check_installed() -> None:
    """Checks that jax's CUDA plugin is there.

    Raises:
      ValueError: it is not installed.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise ValueError(
            "Planning for a GPU needs jax's CUDA plugin and its compiler, but neither a GPU nor a driver: "
            "pip install 'atlasjax[cuda-compile]'."
        )


def environment() -> dict[str, str]:
    """Environment variables that keep jax on the CPU, so that the plugin does not look for a GPU, and silence it."""
    return {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}


def devices(generation: str, shape: Sequence[int], groups: int = 1) -> "Sequence[jax.Device]":
    """GPUs as compilation targets.

    Args:
      generation: a name in `TARGETS`.
      shape: the number of GPUs of a host.
      groups: number of hosts.

    Raises:
      ValueError: the CUDA plugin is missing or does not know the target.
    """
    for variable, value in environment().items():
        os.environ.setdefault(variable, value)
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=generation,
            topology=f"{groups}x1x{shape[0]}",
            target_config=target_config(generation),
        ).devices
    except Exception as error:  # jax raises several types here
        raise ValueError(
            f"topology is {generation}, which jax's CUDA plugin refuses: {error}".splitlines()[0]
        ) from None


def options() -> dict[str, Any]:
    """Compiler options: matrix products by cuBLAS.

    The compiler's own products have tile sizes that are found by timing them on a GPU. Without one it gives up on some ("Couldn't
    find output tile sizes").
    """
    return {"xla_gpu_enable_triton_gemm": False}


def target_config(generation: str) -> str:
    """A GPU's description for XLA (GpuTargetConfigProto as text), from public figures; no driver is asked.

    Args:
      generation: a name in `TARGETS`.
    """
    gpu, name = TARGETS[generation], TARGETS[generation].kind
    major, minor = gpu.capability
    suffix, feature = ("a", " feature_extension: ACCELERATED_FEATURES") if gpu.arch_specific else ("", "")
    return f"""
platform_name: "CUDA"
device_description_str: "{name}"
gpu_device_info {{
  name: "{name}"
  cuda_compute_capability {{ major: {major} minor: {minor}{feature} }}
  platform_version: "Compute Capability {major}.{minor}{suffix}"
  core_count: {gpu.multiprocessors}
  fpus_per_core: {gpu.lanes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: {gpu.shared_kib * 1024}
  shared_memory_per_block_optin: {gpu.block_kib * 1024}
  shared_memory_per_block: 49152
  threads_per_warp: 32
  threads_per_core_limit: {gpu.threads}
  threads_per_block_limit: 1024
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_memory_size: {gpu.memory_gib * 2**30}
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.cache}
  clock_rate_ghz: {gpu.clock}
  runtime_version: "13.0.0"
  driver_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.12.0"
}}
runtime_version {{ major: 13 }}
dnn_version_info {{ major: 9 minor: 12 }}
"""
