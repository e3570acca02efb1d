"""`Tokens`: the tokens of a call, as one value."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int

from atlasjax.memory.gates import Gates


class Tokens(NamedTuple):
    """The tokens of a call, [batch, time, heads, …] (without the time axis in `step`), and their gates and segment ids.

    The fields are the arguments of `Rule.scan` in their order. So any rule is called as `rule.scan(params, state, *tokens)`, and
    for one token as `rule.step(params, state, *tokens[:4])`.
    """

    q: Float[Array, "*tokens heads key_dim"]
    k: Float[Array, "*tokens heads key_dim"]
    v: Float[Array, "*tokens heads value_dim"]
    gates: Gates
    segment_ids: Int[Array, "batch time"] | None = None
