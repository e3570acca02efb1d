"""The loss, the training step and the evaluation step: pure functions, and their jitted, sharded form."""

from collections.abc import Callable
from typing import ParamSpec, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from atlasjax import check
from atlasjax.distributed.sharding import batch_sharding, replicated
from atlasjax.nn.experts import Load
from atlasjax.nn.partition import time_parts
from atlasjax.train.balance import balance_loss, balanced, expert_shares
from atlasjax.train.loss import LossConfig, cross_entropy_sum
from atlasjax.train.optimizer import updated
from atlasjax.train.state import TrainState, merge
from atlasjax.train.trainable import replaced, select

Batch = dict[str, jax.Array]
EvalStep = Callable[[PyTree, Batch], tuple[jax.Array, jax.Array, jax.Array]]  # (params, batch) → (nats, tokens, bytes)
MemoryNorms = dict[int, jax.Array]  # layer → float32 [heads]
Loads = tuple[Load | None, ...]  # of the layers of the pattern, [repetitions, …]
P = ParamSpec("P")
R = TypeVar("R")


class Metrics(TypedDict):
    """The numbers that `train_step` returns with the state: float32 scalars, and those of layers."""

    loss: jax.Array
    gradient_norm: jax.Array
    learning_rate: jax.Array
    tokens: jax.Array
    memory_norm: MemoryNorms
    expert_share: dict[int, jax.Array]


def loss_sums(
    graphdef: nnx.GraphDef,
    params: PyTree,
    batch: Batch,
    max_segments: int | None = None,
    loss: LossConfig = LossConfig(),
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of weighted cross entropies and the sum of weights, float32 scalars. The loss is their ratio.

    Args:
      graphdef: the model's definition.
      params: its parameters.
      batch: inputs int32 [batch, time], targets int32 [batch, time], weights float32 [batch, time] and, for packed
        documents, segment_ids int32 [batch, time]; for dropout, dropout_keys, typed PRNG keys [batch].
      max_segments: bound on the number of segments per row. Required with segment_ids.
      loss: how the cross entropies are computed.
    """
    return _observed_sums(graphdef, params, batch, max_segments, loss)[:2]


def _observed_sums(
    graphdef: nnx.GraphDef, params: PyTree, batch: Batch, max_segments: int | None, loss: LossConfig
) -> tuple[jax.Array, jax.Array, MemoryNorms, Loads]:
    """`loss_sums`, and the memory norms and loads of `LanguageModel.measure`."""
    check.plain_array("loss_sums", "batch", batch)
    model = merge(graphdef, params)
    hidden, norms, loads = model.measure(
        batch["inputs"], batch.get("segment_ids"), max_segments, dropout_keys=batch.get("dropout_keys"),
        counted=batch["weights"] > 0,
    )  # fmt: skip
    weights = batch["weights"].astype(jnp.float32)
    total = cross_entropy_sum(
        model.logits, hidden, batch["targets"], weights, chunk=loss.chunk, z_loss=loss.z_loss,
        parts=time_parts(weights.shape[1]),
    )  # fmt: skip
    return total, jnp.sum(weights), norms, loads


def accumulated_gradients(
    graphdef: nnx.GraphDef, params: PyTree, batch: Batch, microbatches: int, max_segments: int | None = None,
    constrain: Callable[[Batch], Batch] = lambda batch: batch, loss: LossConfig = LossConfig(),
) -> tuple[jax.Array, PyTree, jax.Array]:  # fmt: skip
    """Returns the loss of a batch, its gradient and the sum of weights, computed in microbatches.

    Sums instead of means are added over the microbatches, and divided once by the weight of the whole batch. So the result equals
    that of the whole batch at once, for any number of weighted tokens in each microbatch.

    Args:
      graphdef, params, batch, max_segments: as in `loss_sums`.
      microbatches: number of microbatches, which must divide the batch size.
      constrain: sets the sharding of a microbatch, [batch / microbatches, ...].
      loss: how the cross entropies are computed.
    """
    return _observed_gradients(graphdef, params, batch, microbatches, max_segments, constrain, loss)[:3]


def _observed_gradients(
    graphdef: nnx.GraphDef, params: PyTree, batch: Batch, microbatches: int, max_segments: int | None,
    constrain: Callable[[Batch], Batch], loss_config: LossConfig, whole: Callable[[PyTree], PyTree] = lambda params: params,
) -> tuple[jax.Array, PyTree, jax.Array, MemoryNorms, Loads]:  # fmt: skip
    """`accumulated_gradients`, and the largest memory norms and the loads of the batch. `whole` makes all parameters of those that
    train."""

    def sums(params: PyTree, batch: Batch) -> tuple[jax.Array, tuple[jax.Array, MemoryNorms, Loads]]:
        loss, weight, norms, loads = _observed_sums(graphdef, whole(params), batch, max_segments, loss_config)
        more = balance_loss(merge(graphdef, whole(params)).config, loads)
        return loss if more is None else loss + weight * more, (weight, norms, loads)

    gradient = jax.value_and_grad(sums, has_aux=True)
    if microbatches == 1:
        (loss, (weight, norms, loads)), grads = gradient(params, batch)
    else:
        # Microbatch i has rows i, i + n, i + 2n, …, so every device keeps the rows that it already holds.
        split = jax.tree.map(lambda x: x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(carry: PyTree, microbatch: Batch) -> tuple[PyTree, tuple[MemoryNorms, Loads]]:
            (loss, (weight, *seen)), grads = gradient(params, constrain(microbatch))
            return jax.tree.map(jnp.add, carry, ((loss, weight), grads)), tuple(seen)

        zero = jnp.zeros((), jnp.float32)
        carry = (zero, zero), jax.tree.map(jnp.zeros_like, params)
        ((loss, weight), grads), (norms, loads) = jax.lax.scan(add, carry, split)
        norms = jax.tree.map(lambda x: jnp.max(x, axis=0), norms)
        loads = jax.tree.map(lambda x: jnp.sum(x, axis=0), loads)
    scale = jnp.where(weight > 0, 1.0 / jnp.where(weight > 0, weight, 1.0), 0.0)  # a batch with only padding has loss 0
    return loss * scale, jax.tree.map(lambda g: g * scale, grads), weight, norms, loads


def train_step(
    state: TrainState, batch: Batch, *, graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation,
    schedule: Callable[[jax.Array], jax.Array], microbatches: int = 1, max_segments: int | None = None,
    constrain: Callable[[Batch], Batch] = lambda batch: batch, loss: LossConfig = LossConfig(),
    trainable: PyTree | None = None, ema_decay: float | None = None,
) -> tuple[TrainState, Metrics]:  # fmt: skip
    """One optimizer step.

    If the model has dropout, row r of step n uses the key `split(fold_in(state.key, n), batch)[r]`: the same in a resumed run, on
    any mesh, and for any number of microbatches.

    Args:
      state: the state before the step.
      batch: as in `loss_sums`, without dropout_keys.
      graphdef: the model's definition.
      optimizer: the outer optimizer.
      schedule: step → learning rate. It is only reported, since the optimizer has its own.
      microbatches: number of microbatches for gradient accumulation.
      max_segments: bound on the number of segments per row.
      constrain: sets the sharding of a microbatch.
      loss: how the cross entropies are computed.
      trainable: which parameters train (`trainable_mask`); there is a gradient of these alone. None: all.
      ema_decay: decay of the moving average `state.ema` (`OptimizerConfig.ema_decay`). None: there is none.

    Returns:
      (state after the step, float32 scalars: loss in nats per token, gradient_norm before clipping, learning_rate, tokens; and
      memory_norm: layer → float32 [heads], the size of the memories after the batch, see `LanguageModel.observe`; expert_share:
      layer → the share of the tokens that go to its busiest expert).
    """
    config = merge(graphdef, state.params).config
    if config.dropout:
        keys = jax.random.split(jax.random.fold_in(state.key, state.step), batch["inputs"].shape[0])
        batch = {**batch, "dropout_keys": keys}
    params = select(state.params, trainable)
    whole = lambda params: replaced(state.params, params)
    value, grads, tokens, norms, loads = _observed_gradients(
        graphdef, params, batch, microbatches, max_segments, constrain, loss, whole
    )
    # The optimizer sees the parameters that train, and no others: its state has no entries for frozen ones.
    updates, optimizer_state = updated(optimizer, grads, state.optimizer, params, value)
    params = balanced(optax.apply_updates(params, updates), params, loads, config)
    ema = None if ema_decay is None else averaged(state.ema, params, ema_decay, state.step)
    metrics: Metrics = {
        "loss": value,
        "gradient_norm": optax.tree.norm(grads),
        "learning_rate": schedule(state.step),
        "tokens": tokens,
        "memory_norm": norms,
        "expert_share": expert_shares(loads),
    }
    return TrainState(whole(params), optimizer_state, state.key, state.step + 1, ema), metrics


def averaged(ema: PyTree, params: PyTree, decay: float, step: jax.Array) -> PyTree:
    """The moving average d ema + (1 − d) params after step n ≥ 0, which gave `params`, with d = min(decay, (1 + n) / (10 + n))."""
    d = jnp.minimum(decay, (1.0 + step) / (10.0 + step))
    return jax.tree.map(lambda average, new: average + (1 - d) * (new - average), ema, params)


def jit_train_step(
    graphdef: nnx.GraphDef, optimizer: optax.GradientTransformation, schedule: Callable[[jax.Array], jax.Array],
    shardings: TrainState, mesh: Mesh, *, microbatches: int = 1, max_segments: int | None = None,
    loss: LossConfig = LossConfig(), trainable: PyTree | None = None, ema_decay: float | None = None,
) -> jax.stages.Wrapped:  # fmt: skip
    """Returns the jitted (state, batch) → (state, metrics) on a mesh. The input state is donated.

    The batch is split over data, fsdp and sequence, parameters and moments according to `shardings`. Metrics are on every device.
    """
    whole = batch_sharding(mesh).spec

    def constrain(batch: Batch) -> Batch:
        split = lambda x: NamedSharding(mesh, PartitionSpec(*whole[: x.ndim]))  # dropout keys are [batch]
        return jax.lax.with_sharding_constraint(batch, jax.tree.map(split, batch))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return train_step(
            state, batch, graphdef=graphdef, optimizer=optimizer, schedule=schedule, microbatches=microbatches,
            max_segments=max_segments, constrain=constrain, loss=loss, trainable=trainable,
            ema_decay=ema_decay,
        )  # fmt: skip

    return jax.jit(
        _on(mesh, step),
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,  # or there would be two states in memory
    )


def _on(mesh: Mesh, step: Callable[P, R]) -> Callable[P, R]:
    """`step`, traced within the mesh. Kernels need the mesh, because XLA cannot split them (`nn.partition`)."""

    def traced(*arguments: P.args, **keywords: P.kwargs) -> R:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return step(*arguments, **keywords)

    return traced


def eval_sums(graphdef: nnx.GraphDef, bytes_per_token: np.ndarray, *, max_segments: int | None = None) -> EvalStep:
    """Returns the evaluation step: (params, batch) → (nats, tokens, bytes).

    nats is the float32 sum of the cross entropies of the tokens with weight > 0, tokens is their number, and bytes is the length of
    the text that they represent, int32.

    Args:
      graphdef: the model's definition.
      bytes_per_token: int [vocabulary], from the tokenizer. A batch may have the bytes of each target itself, int [batch, time].
      max_segments: bound on the segments per row.
    """
    check.plain_array("eval_sums", "bytes_per_token", bytes_per_token)
    table = np.asarray(bytes_per_token, np.int32)

    def step(params: PyTree, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        counted = batch["weights"] > 0
        nats, _ = loss_sums(graphdef, params, {**batch, "weights": counted}, max_segments)
        sizes = batch["bytes"] if "bytes" in batch else jnp.asarray(table)[batch["targets"]]
        return nats, jnp.sum(counted, dtype=jnp.int32), jnp.sum(jnp.where(counted, sizes, 0))

    return step


def jit_eval_step(
    graphdef: nnx.GraphDef,
    shardings: PyTree,
    mesh: Mesh,
    bytes_per_token: np.ndarray,
    *,
    max_segments: int | None = None,
) -> jax.stages.Wrapped:
    """Returns `eval_sums` jitted on a mesh; its sums are over the batch of all processes."""
    return jax.jit(
        _on(mesh, eval_sums(graphdef, bytes_per_token, max_segments=max_segments)),
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=replicated(mesh),
    )
