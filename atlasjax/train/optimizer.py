"""The outer optimizer (AdamW or any other of optax), its learning-rate schedule, and the parameters that decay."""

import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from atlasjax.names import call_with, in_one_line, resolve, takes
from atlasjax.nn import logical_axes
from atlasjax.train.config import OptimizerConfig, TrainConfig, optimizers
from atlasjax.train.state import pure
from atlasjax.train.trainable import select


def learning_rate(config: OptimizerConfig, steps: int) -> Callable[[jax.Array | int], jax.Array]:
    """Returns the schedule: step (0 is the first) → learning rate, float32.

    Linear warm-up to the peak over `warmup_steps` (the rate of the first step is already positive), then half a cosine or a line
    down to `final_fraction` of the peak at step `steps - 1`, and constant after it. "wsd" stays at the peak until `decay_fraction`
    of the steps is left, so that a run can go on from its stable part; "constant" stays there.

    Args:
      config: the optimizer's settings.
      steps: number of steps of the whole run.

    Raises:
      ValueError: a user's schedule does not take these arguments, or does not return a function from a traced step to a number.
    """
    if ":" in config.schedule:
        kind = "learning-rate schedule"
        own = call_with(kind, config.schedule, resolve(kind, config.schedule, {}), config, steps, options="{}")
        if not callable(own):
            raise ValueError(f"{kind} {config.schedule!r} gave {own!r}, must be a function step → learning rate.")
        rate = lambda step: jnp.asarray(own(step), jnp.float32)
        try:
            shape = jax.eval_shape(rate, jax.ShapeDtypeStruct((), jnp.int32)).shape
        except Exception as error:  # whatever a user's schedule raises
            raise ValueError(f"{kind} {config.schedule!r} fails for a traced step: {in_one_line(error)}") from error
        if shape:
            raise ValueError(f"{kind} {config.schedule!r} gave a rate of shape {shape}, must be a number.")
        return rate
    warmup = min(config.warmup_steps, steps)
    start = max(warmup, steps - round(config.decay_fraction * steps)) if config.schedule == "wsd" else warmup
    decay_steps = max(1, steps - 1 - start)
    shape = _SHAPES[config.schedule]

    def schedule(step: jax.Array | int) -> jax.Array:
        step = jnp.asarray(step, jnp.float32)
        rising = (step + 1) / max(1, warmup)
        progress = jnp.clip((step - start) / decay_steps, 0.0, 1.0)
        floor = 1.0 if config.schedule == "constant" else config.final_fraction
        falling = floor + (1 - floor) * shape(progress)
        return config.learning_rate * jnp.where(step < warmup, rising, falling)

    return schedule


# The rest of the decay, from 1 to 0, as a function of the progress.
_SHAPES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "cosine": lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - progress,
    "constant": jnp.ones_like,
}


# The axes of a matrix. All others ("layers", "conv", unnamed ones) only stack smaller parameters.
_MATRIX_AXES = {"vocab", "embed", "mlp", "heads", "rank", "memory_in", "memory_out"}


def decay_mask(logical_axes: PyTree) -> PyTree:
    """Which parameters decay: the matrices, which have two or more axes of `_MATRIX_AXES`.

    Embeddings, projections (including those of gates) and the memories' initial weights M_0 decay. Norms, biases, gate biases,
    feature coefficients and depthwise convolutions do not, because decay would pull them away from their neutral values.

    Args:
      logical_axes: the axis names of each parameter as a PartitionSpec (`nn.logical_axes`, as a nested dict).

    Returns:
      The same tree of bools.
    """
    return jax.tree.map(_is_matrix, logical_axes, is_leaf=lambda node: isinstance(node, PartitionSpec))


def _is_matrix(axes: PartitionSpec) -> bool:
    return len(_MATRIX_AXES.intersection(axes)) >= 2


def muon_axes(logical_axes: PyTree) -> PyTree:
    """Which axes of each parameter are those of the matrix that Muon orthogonalizes.

    A kernel is [in, out]: its first named axis is read; the second one, with what follows it (the channels of a head), is written.
    A memory's initial weight is [heads, out, in], a matrix per head. All axes that are neither ("layers", and unnamed ones in
    between, which stack projections) hold matrices that are orthogonalized each by itself.

    Args:
      logical_axes: as for `decay_mask`.

    Returns:
      The same tree of MuonDimensionNumbers. None, which leaves a parameter to Adam, for what is not a matrix, and for embeddings
      and output tables, as Muon's authors do.
    """

    def numbers(axes: PartitionSpec) -> optax.contrib.MuonDimensionNumbers | None:
        names = tuple(axes)
        if not _is_matrix(axes) or "vocab" in names:
            return None
        if "memory_out" in names or {"memory_in", "rank"} <= set(names):
            # A factor of a product of low rank has one of the two, and the rank in place of the other.
            axis = lambda name: names.index(name if name in names else "rank")
            return optax.contrib.MuonDimensionNumbers(axis("memory_in"), axis("memory_out"))
        first, second, *_ = (i for i, name in enumerate(names) if name in _MATRIX_AXES)
        return optax.contrib.MuonDimensionNumbers(first, tuple(range(second, len(names))))

    return jax.tree.map(numbers, logical_axes, is_leaf=lambda node: isinstance(node, PartitionSpec))


def run_optimizer(config: TrainConfig, trainable: PyTree | None = None) -> optax.GradientTransformation:
    """The optimizer of a run: `make_optimizer` for its model's parameters.

    Args:
      config: the run.
      trainable: tree of bools that says which parameters are trained (`trainable_mask`). None: all.

    Raises:
      ValueError: as for `make_optimizer`.
    """
    axes = select(pure(logical_axes(config.model)), trainable)
    return make_optimizer(config.optimizer, config.steps, decay_mask(axes), muon_axes(axes))


def make_optimizer(
    config: OptimizerConfig, steps: int, mask: PyTree, dimension_numbers: PyTree | None = None
) -> optax.GradientTransformation:
    """Returns clipping followed by AdamW or the optimizer that the config names, with its schedule.

    Args:
      config: the optimizer's settings.
      steps: number of steps of the whole run, for the schedule.
      mask: tree of bools that says which parameters decay.
      dimension_numbers: the parameters' matrices (`muon_axes`), for an optimizer with a parameter
        `muon_weight_dimension_numbers`. None: what that optimizer does by default.

    Raises:
      ValueError: the optimizer does not take its options, or is not an optax transformation.
    """
    rate = learning_rate(config, steps)
    if ":" in config.name:
        make = resolve("optimizer", config.name, optimizers(config.name))
        taken = [name for name in ("mask", "weight_decay_mask") if takes(make, name)]
        given = {taken[0]: mask} if taken else {}
        if dimension_numbers is not None and takes(make, "muon_weight_dimension_numbers"):
            given["muon_weight_dimension_numbers"] = dimension_numbers
        given = {name: value for name, value in given.items() if name not in json.loads(config.options)}
        update = call_with("optimizer", config.name, make, rate, options=config.options, **given)
        if not (callable(getattr(update, "init", None)) and callable(getattr(update, "update", None))):
            raise ValueError(f"optimizer {config.name!r} gave {update!r}, must be an optax.GradientTransformation.")
    else:
        update = optax.adamw(rate, config.b1, config.b2, config.eps, weight_decay=config.weight_decay, mask=mask)
    # The state has the same tree without clipping, so a run can be resumed with or without it.
    clip = optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, update)


def updated(
    optimizer: optax.GradientTransformation, grads: PyTree, state: PyTree, params: PyTree, loss: jax.Array
) -> tuple[PyTree, PyTree]:
    """The updates and the next state. An optimizer that takes more than gradients gets the loss, as `value`, and `grad`."""
    return optax.with_extra_args_support(optimizer).update(grads, state, params, value=loss, grad=grads)


def check_optimizer(config: OptimizerConfig, optimizer: optax.GradientTransformation, shapes: PyTree) -> None:
    """Takes a step in the abstract: the optimizer of another package may be no optimizer.

    Args:
      config: the optimizer's settings.
      optimizer: from `make_optimizer`.
      shapes: the parameters' shapes.

    Raises:
      ValueError: the step fails, its updates are not like the parameters, or it changes the shapes or dtypes of its state, which
        is saved and restored as it is at first.
    """

    def step(params: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        first = optimizer.init(params)
        updates, state = updated(optimizer, params, first, params, jnp.zeros((), jnp.float32))
        return jax.tree.map(lambda x, update: jnp.zeros_like(x) + update, params, updates), first, state

    name, options = config.name, "" if config.options == "{}" else f" with the options {config.options}"
    try:
        after, first, state = jax.eval_shape(step, shapes)
    except Exception as error:  # whatever a user's optimizer raises
        raise ValueError(f"optimizer.name is {name!r}{options}, whose update fails: {in_one_line(error)}") from error
    before, now = ({jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(x)} for x in (first, state))
    shown = lambda x: "missing" if x is None else f"{x.dtype} {x.shape}"
    for where in dict.fromkeys([*before, *now]):
        if (was := shown(before.get(where))) != (becomes := shown(now.get(where))):
            raise ValueError(
                f"optimizer.name is {name!r}, whose state{where} is {was} at first and {becomes} after a step."
            )
    for (path, x), y in zip(jax.tree.leaves_with_path(shapes), jax.tree.leaves(after)):
        if x.shape != y.shape:
            where = jax.tree_util.keystr(path)
            raise ValueError(f"optimizer.name is {name!r}, whose update of {where} {x.shape} has the shape {y.shape}.")
