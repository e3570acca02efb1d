"""Explicit partitioning of a call over the devices of a mesh: batch elements and heads, which are independent, and tokens.

XLA partitions the code that it compiles, but not kernels, which are opaque to it, and not the tokens of a recurrence.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from atlasjax.memory.rule import Params, Rule, State, TokensCall
from atlasjax.memory.tokens import Tokens


@dataclasses.dataclass(frozen=True)
class Partition:
    """The mesh axes that split the batch, the heads and the sequence. Hashable, static under jit.

    Attributes:
      mesh: the mesh of the arrays. The call is replicated over axes that are not named.
      batch: mesh axes over which the batch is split.
      heads: mesh axes over which the heads are split.
      time: mesh axes over which the tokens are split, in parts of equal length; the last ones may be padded. For rules whose state
        passes linearly from token to token, linear attention and delta rules, for Memory Caching with fresh segments, and for
        `LargeChunkRule`, whose tokens the parts divide without padding.

    Raises:
      TypeError: the axes are a string, not a tuple of names.
      ValueError: an axis is not in the mesh, or is named twice.
    """

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    time: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "time"):
            axes = getattr(self, name)
            if isinstance(axes, str):
                raise TypeError(
                    f"Partition: {name} is {axes!r}; it must be a tuple of axis names, such as ({axes!r},)."
                )
            object.__setattr__(self, name, tuple(axes))  # a list cannot be hashed
        named = (*self.batch, *self.heads, *self.time)
        unknown = sorted(set(named) - set(self.mesh.axis_names))
        if unknown or len(set(named)) < len(named):
            raise ValueError(
                f"Partition: batch={self.batch}, heads={self.heads} and time={self.time} should name different axes of the mesh, "
                f"which has {tuple(self.mesh.axis_names)}."
            )

    def check(self, batch: int, heads: int) -> None:
        """Raises ValueError if the batch or the number of heads is not divisible by the size of its axes."""
        for name, size, axes in (("batch", batch, self.batch), ("heads", heads, self.heads)):
            parts = math.prod(self.mesh.shape[axis] for axis in axes)
            if size % parts:
                raise ValueError(
                    f"Partition: {name}={size} must be divisible by {parts}, the size of the mesh axes {axes}."
                )


def partitioned(
    partition: Partition, rule: Rule[Params, State], run: TokensCall[Params, State]
) -> TokensCall[Params, State]:
    """Wraps `run(params, state, tokens)` → (y, state): each device runs its own part of the call.

    Raises (by the call):
      ValueError: sizes are not divisible, or the tokens of the rule or of the call cannot be divided.
    """
    batch, time, heads = (axes or None for axes in (partition.batch, partition.time, partition.heads))
    of_tokens = lambda x: PartitionSpec(*(batch, time, heads)[: x.ndim])
    of_state = lambda x: PartitionSpec(batch) if x.ndim == 1 else PartitionSpec(batch, heads)

    def part(params: Params, state: State | None, tokens: Tokens) -> tuple[jax.Array, State]:
        if time is None:
            return run(params, state, tokens)
        of_device = lambda params, state, *given: run(params, state, Tokens(*given))
        return rule.scan_part(time, of_device, params, state, *tokens)

    def call(params: Params, state: State | None, tokens: Tokens) -> tuple[jax.Array, State]:
        (rows, length), ids = tokens.q.shape[:2], tokens.segment_ids
        partition.check(rows, tokens.q.shape[2])
        if time is not None:
            parts = math.prod(partition.mesh.shape[axis] for axis in time)
            check_divided(rule, f"Partition: time={time}", length, parts, packed=ids is not None)
            tokens = _padded(tokens, parts)
        specs = (
            jax.tree.map(lambda _: PartitionSpec(heads), params),
            jax.tree.map(of_state, state),
            jax.tree.map(of_tokens, tokens),
        )
        after = jax.eval_shape(
            lambda params: rule.init_state(params, batch_size=rows, max_length=tokens.q.shape[1]), params
        )
        outputs = (PartitionSpec(batch, time, heads), jax.tree.map(of_state, after))
        mapped = jax.shard_map(part, mesh=_mesh(partition), in_specs=specs, out_specs=outputs, check_vma=False)
        y, state = mapped(params, state, tokens)
        return y[:, :length], state

    return call


def _mesh(partition: Partition) -> Mesh | AbstractMesh:
    """The partition's mesh, as the context has it if it has one: there some axes may be left to the compiler or be manual."""
    context = jax.sharding.get_abstract_mesh()
    return context if context.shape == partition.mesh.shape else partition.mesh


def check_divided(rule: Rule, where: str, length: int, parts: int, *, packed: bool) -> None:
    """Raises ValueError if `length` tokens of a rule, packed documents or not, cannot be divided into `parts`. The message begins
    with `where`."""
    if rule.undivided is not None:
        raise ValueError(f"{where} cannot divide the tokens of {rule!r}: {rule.undivided}.")
    if packed and rule.undivided_documents is not None:
        raise ValueError(
            f"{where} cannot divide packed documents for {type(rule).__name__}: {rule.undivided_documents}."
        )
    if rule.part_multiple is not None and length % (parts * rule.part_multiple):
        of_segments = f", which is the segment size of {type(rule).__name__}" * (rule.part_multiple > 1)
        raise ValueError(
            f"{where}: {length} tokens in {parts} parts; the tokens of each must be a multiple of {rule.part_multiple}"
            f"{of_segments}."
        )


def _padded(tokens: Tokens, parts: int) -> Tokens:
    """The tokens with others after them that change nothing, so that `parts` divides their number."""
    missing = -tokens.q.shape[1] % parts
    pad = lambda x, value=0.0: jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)), constant_values=value)
    alpha, ids = tokens.gates.retention, tokens.segment_ids
    padded = jax.tree.map(pad, tokens._replace(segment_ids=None))
    return padded._replace(
        gates=padded.gates._replace(retention=None if alpha is None else pad(alpha, 1.0)),
        segment_ids=None if ids is None else jnp.pad(ids, ((0, 0), (0, missing)), mode="edge"),  # no new segment
    )
