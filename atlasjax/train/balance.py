"""What keeps a model's experts equally busy: the balance loss, and the update of the bias by which they are chosen."""

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from atlasjax.nn import ModelConfig
from atlasjax.nn.experts import Load, balance

# Of the layers of the pattern, arrays [repetitions, …], as `LanguageModel.measure` returns them.
Loads = tuple[Load | None, ...]


def balance_loss(config: ModelConfig, loads: Loads) -> jax.Array | None:
    """`experts.balance_loss` times the mean `nn.experts.balance` of the layers with experts. None where that is 0."""
    if not config.has_experts or not config.experts.balance_loss:
        return None
    losses = [balance(load) for load in loads if load is not None]
    return config.experts.balance_loss * jnp.mean(jnp.stack(losses))


def expert_shares(loads: Loads) -> dict[int, jax.Array]:
    """Layer → the share of the tokens that go to its busiest expert, float32. If all are equally busy it is per_token / number."""
    return {
        repetition * len(loads) + i: jnp.max(load.chosen[repetition]) / jnp.maximum(load.tokens[repetition], 1.0)
        for i, load in enumerate(loads)
        if load is not None
        for repetition in range(len(load.tokens))
    }


def balanced(params: PyTree, before: PyTree, loads: Loads, config: ModelConfig) -> PyTree:
    """The parameters after a step with the correction biases that follow from its loads.

    b ← b + rate · sign(mean − n) with the number of tokens n of each expert (arXiv:2408.15664, algorithm 1), whatever the optimizer
    made of b, which has no gradient.

    Args:
      params: those that train after the optimizer's step, a nested dict.
      before: the same before it.
      loads: of the step's batch.
      config: the model's, with `experts.bias_update`.
    """
    rate = config.experts.bias_update if config.has_experts else 0.0
    if not rate:
        return params

    def update(path: jax.tree_util.KeyPath, after: jax.Array, was: jax.Array) -> jax.Array:
        names = [str(key.key) for key in path]
        if names[0] != "layers" or names[-2:] != ["mlp", "correction"]:
            return after
        load = loads[int(names[1].removeprefix("layer_")) if len(loads) > 1 else 0]
        assert load is not None
        return was + rate * jnp.sign(jnp.mean(load.chosen, axis=-1, keepdims=True) - load.chosen)

    return jax.tree_util.tree_map_with_path(update, params, before)
