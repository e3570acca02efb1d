"""Estimates whether a run fits in the machine's memory, before anything large is made or compiled.

The estimate counts what is needed with any compiler: parameters, gradients, the optimizer's state, logits, and the input of each
layer. A run that passes may still need more.
"""

import math
from collections.abc import Mapping

from atlasjax.check import is_integer
from atlasjax.machine import GIB
from atlasjax.mesh_axes import BATCH_AXES
from atlasjax.nn import ModelConfig, check_divided
from atlasjax.train.config import TrainConfig

_WITH_HEADS = (
    "memory",
    "mac",
    "mag",
    "mal",
    "attention",
    "swa",
)  # mixers with a projection [dim, num_heads · head_dim]


def parameters_at_least(model: ModelConfig) -> int:
    """A lower bound of the number of parameters from the config alone, because even making their shapes takes time and memory."""
    heads = model.dim if model.head_dim is None else model.num_heads * model.head_dim
    # A mixer of the user's may have none; of the others, those that are not in `_WITH_HEADS` may ignore the size of heads.
    widths = [0 if ":" in m else heads if m in _WITH_HEADS else min(heads, model.dim) for m in model.pattern]
    mixers = model.num_layers // len(widths) * model.dim * sum(widths)
    dense = model.num_networks - model.num_expert_layers
    columns = dense * model.resolved_mlp_dim + model.num_expert_layers * model.experts.number * model.expert_width
    network = 2 * model.dim * columns
    return model.vocab_size * model.dim * (1 if model.tie_embeddings else 2) + mixers + network


def check_divisible(config: TrainConfig, mesh: Mapping[str, int]) -> None:
    """Raises ValueError if the batch or its sequences cannot be divided over a mesh (axis → size). The message says why."""
    batch = [axis for axis in BATCH_AXES if axis in mesh]
    microbatch, shards = config.data.batch_size // config.accumulation, _batch_shards(mesh)
    if microbatch % shards:
        raise ValueError(
            f"data.batch_size / accumulation is {config.data.batch_size} / {config.accumulation} = {microbatch} sequences; it "
            f"must be divisible by mesh {' × '.join(batch)} = {' × '.join(str(mesh[axis]) for axis in batch)} = {shards}."
        )
    experts, parts = config.model.experts.number, mesh.get("expert", 1)
    if parts > 1 and not config.model.has_experts:
        raise ValueError(
            f"mesh.expert is {parts}, but the model has no experts. Give mesh.expert 1 and a larger mesh.fsdp."
        )
    if experts % parts:
        raise ValueError(f"mesh.expert is {parts}; it should divide model.experts.number, which is {experts}.")
    parts = mesh.get("sequence", 1)
    if config.data.sequence_length % parts:
        raise ValueError(
            f"data.sequence_length is {config.data.sequence_length}; it must be divisible by mesh.sequence, which is {parts}."
        )
    packed = config.data.packing == "documents"
    check_divided(config.model, parts, config.data.sequence_length, packed=packed)


def _batch_shards(mesh: Mapping[str, int]) -> int:
    return math.prod(mesh.get(axis, 1) for axis in BATCH_AXES)


def check_fits(
    config: TrainConfig,
    mesh: Mapping[str, int],
    parameters: int,
    available: int | None,
    *,
    trainable: int | None = None,
    batch: bool = True,
) -> None:
    """Raises ValueError if a run needs more memory than is available. The message says how much, and how to make it fit.

    Args:
      config: the run.
      mesh: axis → size.
      parameters: number of the model's parameters, or a lower bound of it.
      trainable: number of those that train. None: all.
      batch: whether to count the batch too.
      available: bytes of memory of a device. None means unknown, and nothing is checked.
    """
    if available is None:
        return
    model, data = config.model, config.data
    moments = 2 if config.optimizer.name == "adamw" else 0  # the state of other optimizers is unknown
    trainable = parameters if trainable is None else trainable
    average = config.optimizer.ema_decay is not None
    shards, tensor, sequence = _batch_shards(mesh), mesh["tensor"], mesh.get("sequence", 1)
    # float32 parameters and gradients, whatever the dtype of the activations. `data` splits neither.
    state = 4 * (parameters + trainable * (1 + moments + average)) // (shards // mesh["data"] * tensor * sequence)
    length = data.sequence_length // sequence  # on each device
    itemsize = 2 if model.dtype == "bfloat16" else 4
    logits = min(length, config.loss.chunk or length) * (model.vocab_size // tensor)
    row = itemsize * (logits + length * model.num_layers * model.dim)
    rows = math.ceil(data.batch_size / config.accumulation / shards) if batch else 0
    needed = state + rows * row
    if needed <= available:
        return
    raise ValueError(
        f"The run needs at least {needed / GIB:,.1f} GiB of a device's memory: {state / GIB:,.1f} for {parameters:,} parameters "
        f"with their gradients and optimizer, {rows * row / GIB:,.1f} for {rows:,} sequences of {data.sequence_length:,} tokens "
        f"at a time. Only {available / GIB:,.1f} GiB is available. {_what_it_takes(config, shards, state, row, available)}"
    )


def _what_it_takes(config: TrainConfig, shards: int, state: int, row: int, available: int) -> str:
    if state > available:
        devices = math.ceil(state / available)
        axes = "mesh.fsdp, mesh.tensor, mesh.sequence"
        return (
            f"Use a smaller model (its largest sizes are {_largest_sizes(config.model)}), or at least {devices:,} such devices to "
            f"split it over ({axes})."
        )
    rows, size = (available - state) // row, config.data.batch_size
    if not rows:
        length = config.data.sequence_length * (available - state) // row
        accumulation = max(1, size // shards)
        return (
            f"Use a data.sequence_length of at most {length:,}, with an accumulation of {accumulation:,}; or a larger "
            "mesh.sequence."
        )
    if size > 10**6:
        return f"Use a data.batch_size of at most {rows * shards * config.accumulation:,}."
    for accumulation in range(config.accumulation, size + 1):
        if size % accumulation == 0 and size // accumulation <= rows * shards and size // accumulation % shards == 0:
            return f"Use an accumulation of at least {accumulation:,}."
    return f"Use a data.batch_size of at most {rows * shards * config.accumulation:,}."


def _largest_sizes(model: ModelConfig) -> str:
    """The names and values of the model's three largest integers: one of them may be a slip of the pen."""
    sizes = {name: size for name, size in vars(model).items() if is_integer(size)}
    return ", ".join(f"model.{name} {sizes[name]:,}" for name in sorted(sizes, key=sizes.__getitem__)[:-4:-1])
