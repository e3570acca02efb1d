"""Truncated backpropagation through time: gradients flow back through a memory over a bounded number of tokens.

A memory that Muon writes is chaotic: Newton–Schulz enlarges the small singular values of a momentum, so that a small change of the
memory grows with every write, and the gradient of a late output with respect to an early token grows exponentially with their
distance (`experiments.stability.gradients`). Outputs and states are not affected. Other rules forget instead.
"""

import jax
import jax.numpy as jnp

from atlasjax.check import integer
from atlasjax.memory import meshes
from atlasjax.memory.grid import Tree
from atlasjax.memory.rule import Params, Rule, State, TokensCall
from atlasjax.memory.tokens import Tokens


def check_truncation(rule: Rule[Params, State], truncation: int, where: str) -> None:
    """Raises ValueError if `truncation` is not a positive multiple of the rule's chunk size."""
    integer(where, "truncation", truncation)
    if not rule.has_constant_gradient and truncation % rule.chunk_size:
        raise ValueError(
            f"{where}: truncation is {truncation}; it must be a multiple of the rule's chunk size, {rule.chunk_size}."
        )


def cut(state: Tree, where: jax.Array) -> Tree:
    """The same state, without gradient where `where` [] is true."""
    return jax.tree.map(lambda x: jnp.where(where, jax.lax.stop_gradient(x), x), state)


def truncated(rule: Rule[Params, State], call: TokensCall[Params, State], length: int) -> TokensCall[Params, State]:
    """A scan in pieces of `length` tokens, counted from the start of the call. No gradient flows from a piece into an earlier one.

    Args:
      rule: the rule.
      call: a scan of a piece, from a state.
      length: number of tokens of a piece, less than those of the call.
    """

    def run(params: Params, state: State | None, tokens: Tokens) -> tuple[jax.Array, State]:
        batch, time = tokens.q.shape[:2]
        count = time // length
        start: State = rule.init_state(params, batch_size=batch, max_length=time) if state is None else state

        def pieces(x: jax.Array) -> jax.Array:
            return jnp.swapaxes(x[:, : count * length].reshape(batch, count, length, *x.shape[2:]), 0, 1)

        whole = jax.tree.map(pieces, tokens)
        # A state may be narrower than the one after it, as that of float32 parameters is with float64 tokens.
        after = jax.eval_shape(call, params, start, jax.tree.map(lambda x: x[0], whole))[1]
        start = jax.tree.map(lambda x, y: x.astype(y.dtype), start, after)

        def piece(state: State, xs: tuple[jax.Array, Tokens]) -> tuple[State, jax.Array]:
            number, own = xs
            # The gradient of the first piece reaches the state that the call was given.
            y, state = call(params, cut(state, number > 0), own)
            return meshes.vary_like(state, xs), y

        end, y = meshes.scan(piece, start, (jnp.arange(count), whole))
        y = jnp.swapaxes(y, 0, 1).reshape(batch, count * length, *y.shape[3:])
        if count * length == time:
            return y, end
        rest = jax.tree.map(lambda x: x[:, count * length :], tokens)
        last, end = call(params, jax.tree.map(jax.lax.stop_gradient, end), rest)
        return jnp.concatenate([y, last], axis=1), end

    return run
