"""A memory M that takes one gradient step per token on ‖M(i_j) − o_j‖² / ‖o_j‖² (ATLAS §6.4)."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import optax

from atlasjax.memory.axes.structures import MLP
from atlasjax.names import lookup
from pallas_kernels.newton_schulz import newton_schulz

Weights = dict[str, jax.Array]

MOMENTUM = 0.95


def muon(learning_rate: float | jax.Array, momentum: float = MOMENTUM, steps: int = 5) -> optax.GradientTransformation:
    """Muon on a pytree of matrices [out, in]: S ← θ S + ∇, W ← W − η √max(1, out/in) NewtonSchulz(S).

    S is the momentum of ATLAS Eq. 33. The factor, as in Muon's own code, gives wide and narrow layers updates of the same size.
    """

    def init(weights):
        return jax.tree.map(jnp.zeros_like, weights)

    def update(gradients, state, weights=None):
        del weights
        state = jax.tree.map(lambda s, g: momentum * s + g, state, gradients)
        size = lambda s: max(1.0, s.shape[-2] / s.shape[-1]) ** 0.5
        return jax.tree.map(lambda s: -learning_rate * size(s) * newton_schulz(s, steps), state), state

    return optax.GradientTransformation(init, update)


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "sgd": optax.sgd,
    "rmsprop": optax.rmsprop,
    "adam": optax.adam,
    "muon": muon,
}


def memory(hidden_layers: int, expansion: int) -> MLP:
    """An MLP with `hidden_layers` hidden layers of width expansion · d; no biases, no LayerNorm."""
    return MLP(depth=hidden_layers + 1, expansion=expansion)


def relative_error(structure: MLP, weights: Weights, i: jax.Array, o: jax.Array) -> jax.Array:
    """‖M(i) − o‖² / ‖o‖² for one pair of vectors [d]. No residual, because the mapping is not close to the identity."""
    out = structure.apply(lambda name, h: weights[name] @ h, i, jnp.zeros_like(o), None)
    return jnp.sum((out - o) ** 2) / jnp.sum(o * o)


def inner_step(structure: MLP, optimizer: optax.GradientTransformation, carry, pair):
    """One token: the loss of the weights before the token, then one optimizer step on that loss."""
    weights, state = carry
    loss, gradients = jax.value_and_grad(lambda w: relative_error(structure, w, *pair))(weights)
    updates, state = optimizer.update(gradients, state, weights)
    return (optax.apply_updates(weights, updates), state), loss


def learn(
    structure: MLP,
    optimizer: str,
    learning_rates: jax.Array,
    seeds: jax.Array,
    inputs: jax.Array,
    outputs: jax.Array,
    piece: int = 256,
) -> Iterator[jax.Array]:
    """Runs n memories in parallel, token by token.

    Args:
      structure: the memory.
      optimizer: a name in `OPTIMIZERS`.
      learning_rates: [n], one per memory.
      seeds: [n] integers, seeds of the memories' initial weights.
      inputs, outputs: [n, t, d].
      piece: tokens between two yields.

    Yields:
      Losses [n, ≤ piece], each before its token's step, until all t tokens are read.
    """
    make = lookup("optimizer", optimizer, OPTIMIZERS)
    dim = inputs.shape[-1]

    def start(seed, rate):
        # Must differ from the mapping's key, which `sample` splits from the seed's own key.
        weights = structure.init(jax.random.fold_in(jax.random.key(seed), 1), dim, dim)
        return weights, make(rate).init(weights)

    def advance(carry, rate, i, o):
        return jax.lax.scan(lambda c, pair: inner_step(structure, make(rate), c, pair), carry, (i, o))

    carry = jax.jit(jax.vmap(start))(seeds, learning_rates)
    advance = jax.jit(jax.vmap(advance), donate_argnums=0)
    for begin in range(0, inputs.shape[1], piece):
        tokens = slice(begin, begin + piece)
        carry, losses = advance(carry, learning_rates, inputs[:, tokens], outputs[:, tokens])
        yield jax.block_until_ready(losses)
