"""The outer optimizer, AdamW or any other of optax; its learning-rate schedule; and which parameters decay."""

import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from atlasjax.names import call_with, resolve, takes
from atlasjax.train.config import OptimizerConfig

PyTree = Any


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[jax.Array | int], jax.Array]:
    """Returns the schedule: step (0 is the first) → learning rate, float32.

    Linear warm-up to the peak over `warmup_steps` (the first step already moves), then half a cosine or a line down to
    `final_fraction` of the peak at step `steps - 1`, where it stays; or the peak ("constant").

    Args:
      config: the optimizer's settings.
      steps: steps of the whole run.

    Raises:
      ValueError: a schedule of a user's own that does not take these arguments, or does not return a function.
    """
    if ":" in config.schedule:
        kind = "learning-rate schedule"
        own = call_with(kind, config.schedule, resolve(kind, config.schedule, {}), config, steps, options="{}")
        if not callable(own):
            raise ValueError(f"{kind} {config.schedule!r} gave {own!r}, should be a function step → learning rate.")
        return lambda step: jnp.asarray(own(step), jnp.float32)
    warmup = min(config.warmup_steps, steps)
    decay_steps = max(1, steps - 1 - warmup)
    shape = _SHAPES[config.schedule]

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rising = (step + 1) / max(1, warmup)
        progress = jnp.clip((step - warmup) / decay_steps, 0.0, 1.0)
        floor = 1.0 if config.schedule == "constant" else config.final_fraction
        falling = floor + (1 - floor) * shape(progress)
        return config.learning_rate * jnp.where(step < warmup, rising, falling)

    return schedule


# What is left to fall, 1 to 0, where a share of the way is done.
_SHAPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "cosine": lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": jnp.ones_like,
}


# Axes along which a parameter is a matrix; the others ("layers", "conv", unnamed ones) only stack smaller parameters.
_MATRIX_AXES = {"vocab", "embed", "mlp", "heads", "rank", "memory_in", "memory_out"}


def decay_mask(logical_axes: PyTree) -> PyTree:
    """Which parameters decay: matrices, those with two or more axes of `_MATRIX_AXES`.

    Embeddings, projections (those of the gates included) and the memories' initial weights M_0 decay. Norms, biases, gate
    biases, feature coefficients and depthwise convolutions do not: decay would pull them away from the values at which they
    do nothing.

    Args:
      logical_axes: the parameters' axis names, a PartitionSpec each (`nn.logical_axes`, as a nested dict).

    Returns:
      The same tree of bools.
    """
    return jax.tree.map(
        lambda axes: len(_MATRIX_AXES.intersection(axes)) >= 2,
        logical_axes,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )


def make_optimizer(config: OptimizerConfig, steps: int, mask: PyTree) -> optax.GradientTransformation:
    """Returns clipping followed by AdamW, or the optimizer that the config names, on the schedule.

    Args:
      config: the optimizer's settings.
      steps: steps of the whole run, for the schedule.
      mask: tree of bools, which parameters decay.

    Raises:
      ValueError: an optimizer that does not take its options, or is no optax transformation.
    """
    rate = learning_rate(config, steps)
    if ":" in config.name:
        make = resolve("optimizer", config.name, {})
        taken = [name for name in ("mask", "weight_decay_mask") if takes(make, name)]
        given = {} if not taken or taken[0] in json.loads(config.options) else {taken[0]: mask}
        update = call_with("optimizer", config.name, make, rate, options=config.options, **given)
        if not (callable(getattr(update, "init", None)) and callable(getattr(update, "update", None))):
            raise ValueError(f"optimizer {config.name!r} gave {update!r}, should be an optax.GradientTransformation.")
    else:
        update = optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=mask)
    # Without clipping the state has the same tree, so that a run can go on with or without it.
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, update)
