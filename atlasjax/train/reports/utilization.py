"""How much of the devices' arithmetic a training step uses (model FLOPs utilization, MFU)."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from atlasjax.flops import count_flops
from atlasjax.train import state as state_lib
from atlasjax.train.config import TrainConfig

# Dense bfloat16 FLOPs per second of one device (float16 for the T4), by prefix of its kind; from data sheets.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 1153.5e12,  # half a chip
    "Tesla T4": 65e12,
    "NVIDIA L4": 121e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(devices: Sequence[jax.Device]) -> float | None:
    """Peak FLOPs per second of all devices together, or None if that of one is unknown, as for CPUs."""
    total = 0.0
    for device in devices:
        known = [peak for kind, peak in PEAK_FLOPS.items() if device.device_kind.startswith(kind)]
        if not known:
            return None
        total += known[0]
    return total


def forward_flops_per_token(config: TrainConfig) -> float:
    """Matmul FLOPs of the forward pass per token, averaged over one sequence of the config's length.

    They are those of the XLA engine, whatever implementation the memory is to have: what kernels state of themselves, and which of
    them a call considers, depends on the devices of this machine and on what was measured on it.
    """
    memory = dataclasses.replace(config.model.memory, implementation="xla")
    graphdef, params = state_lib.model_shapes(dataclasses.replace(config.model, memory=memory))
    tokens = jax.ShapeDtypeStruct((1, config.data.sequence_length), jnp.int32)
    flops = count_flops(lambda params, tokens: state_lib.merge(graphdef, params)(tokens), params, tokens)
    return flops / config.data.sequence_length


def utilization_per_rate(config: TrainConfig, devices: Sequence[jax.Device]) -> float | None:
    """The MFU of a run at one token per second, to be multiplied by tokens per second. None if the peak is unknown.

    The backward pass counts as two forward passes. Recomputation (`model.remat`) does not count.
    """
    peak = peak_flops(devices)
    return None if peak is None else 3 * forward_flops_per_token(config) / peak
