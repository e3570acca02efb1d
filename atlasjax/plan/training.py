"""The full training step, compiled ahead of time for TPUs or GPUs. `plan_training` runs this module in its child process."""

import functools
import math
import time

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from atlasjax.config_json import from_dict, to_dict
from atlasjax.distributed.mesh import MeshConfig, crossing_axis, make_mesh
from atlasjax.distributed.sharding import batch_sharding
from atlasjax.flops import count_flops
from atlasjax.plan import child, compiled
from atlasjax.plan.compiled import Plan
from atlasjax.plan.topology import Topology, check_topology
from atlasjax.train.config import TrainConfig
from atlasjax.train.fits import check_divisible
from atlasjax.train.learner import make_learner
from atlasjax.train.reports.utilization import PEAK_FLOPS, forward_flops_per_token
from atlasjax.train.step import train_step

UTILIZATION = 0.4  # of the devices' peak, where a plan has to assume one


def plan_training(config: TrainConfig, topology: str) -> Plan:
    """Compiles the whole training step (forward, backward, AdamW, collectives) for a topology, in a child process.

    Args:
      config: the run. Its mesh must fit the topology, and its batch must fit the mesh.
      topology: e.g. "v5e:16x16", "2x v5e:16x16" (two slices), "h100:8", "2x h100:8" (two hosts).

    Raises:
      ValueError: the topology is unknown, its compiler is missing, a memory's implementation is for other devices, or mesh and
        batch do not fit.
      RuntimeError: the compilation failed, e.g. because the step does not fit into a device's memory.
    """
    check_plan(config, topology)
    return child.run_in_child(__name__, {"config": to_dict(config), "topology": topology})


def check_plan(config: TrainConfig, topology: str) -> None:
    """Raises the ValueErrors of `plan_training`, before anything is compiled."""
    check_topology(topology)
    target = Topology.parse(topology)
    _check_implementations(config, target)
    available = target.num_devices
    shape = config.mesh.resolve(available)
    if (needed := math.prod(shape.values())) < available:
        raise ValueError(f"mesh {shape} uses {needed} devices; {topology} has {available}. Set one size to -1.")
    if target.compiler.PLATFORM == "tpu":  # hosts with GPUs are no slices
        crossing_axis(shape, target.groups)
    check_divisible(config, shape)


def _check_implementations(config: TrainConfig, target: Topology) -> None:
    for name, memory in config.model.memories.items():
        if memory.platform not in (None, target.compiler.PLATFORM):
            raise ValueError(
                f"{name}.implementation is {memory.implementation!r}, which runs on {memory.platform} only; {target.name} is "
                f"{target.compiler.PLATFORM}."
            )


def device_hours(config: TrainConfig, topology: str, utilization: float = UTILIZATION) -> float:
    """Hours of all devices together for all steps of a run, at a model FLOPs utilization that is assumed, not measured.

    Args:
      config: the run.
      topology: e.g. "v5e:16x16". Only its generation matters.
      utilization: the fraction of the devices' peak in bfloat16.
    """
    peak = PEAK_FLOPS[Topology.parse(topology).accelerator.kind]
    tokens = config.steps * config.data.batch_size * config.data.sequence_length
    return 3 * forward_flops_per_token(config) * tokens / (utilization * peak) / 3600


def suggested_mesh(config: TrainConfig, topology: str) -> MeshConfig:
    """A mesh for a topology: equally many sequences of a microbatch on each data × fsdp × expert device, and as few devices as
    that takes on `tensor`. Experts, if the model has some, are split over as many of the fsdp devices as divide their number.

    Args:
      config: the run. Its microbatch and its numbers of heads and experts determine the mesh.
      topology: e.g. "v5e:16x16".

    Raises:
      ValueError: no such mesh divides the microbatch. The message gives a batch size that one divides.
    """
    target = Topology.parse(topology)
    devices, groups = target.num_devices, target.groups
    batch, accumulation = config.data.batch_size, config.accumulation
    sizes = (n for n in _tensor_sizes(config, target) if batch % (accumulation * devices // n) == 0)
    tensor = next(sizes, None)
    if tensor is None:
        raise ValueError(
            f"data.batch_size is {batch} with an accumulation of {accumulation}, which no mesh of {topology} divides; it must be "
            f"a multiple of {_least_batch(config, target)}, e.g. {larger_batch(config, topology)}."
        )
    fsdp = 1
    while fsdp < 16 and (devices // tensor) % (2 * fsdp * groups) == 0:  # `data` crosses the slices or hosts
        fsdp *= 2
    expert = math.gcd(config.model.experts.number, fsdp) if config.model.num_expert_layers else 1
    return MeshConfig(data=-1, fsdp=fsdp // expert, tensor=tensor, expert=expert)


def larger_batch(config: TrainConfig, topology: str) -> int:
    """The smallest data.batch_size, not below the run's, that a mesh of the topology divides (`suggested_mesh`)."""
    least = _least_batch(config, Topology.parse(topology))
    return -(-config.data.batch_size // least) * least


def _tensor_sizes(config: TrainConfig, target: Topology) -> list[int]:
    """Sizes of `tensor`, which divides the heads and stays in a slice or host."""
    most = math.gcd(target.num_devices // target.groups, config.model.num_heads)
    return [n for n in range(1, most + 1) if most % n == 0]


def _least_batch(config: TrainConfig, target: Topology) -> int:
    return config.accumulation * target.num_devices // _tensor_sizes(config, target)[-1]


def compile_training(config: TrainConfig, topology: str) -> Plan:
    """Like `plan_training`, but in this process."""
    target = Topology.parse(topology)
    mesh = make_mesh(config.mesh, target.devices())
    learner = make_learner(config, mesh)
    state, batch = learner.abstract_state(), abstract_batch(config, mesh)
    max_segments = config.data.max_segments if "segment_ids" in batch else None
    step = learner.jit_step(max_segments)
    started = time.perf_counter()
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # tells kernels for which device
        program = step.lower(state, batch).compile(compiler_options=target.compiler.options())
    seconds = time.perf_counter() - started
    flops = count_flops(functools.partial(train_step, **learner.step_arguments(max_segments)), state, batch)
    memory, text = program.memory_analysis(), program.as_text()
    assert memory is not None
    assert text is not None
    return Plan(
        topology=topology,
        devices=mesh.size,
        mesh=dict(mesh.shape),
        argument_bytes=memory.argument_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        flops=flops,
        collectives=compiled.collective_counts(text),
        kernels=compiled.kernel_count(text),
        gathers=compiled.gathers(text),
        compile_seconds=round(seconds, 1),
    )


def abstract_batch(config: TrainConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a batch of the run's text."""
    shape, where = (config.data.batch_size, config.data.sequence_length), batch_sharding(mesh)
    dtypes = {"inputs": jnp.int32, "targets": jnp.int32, "weights": jnp.float32}
    if config.data.packing == "documents":
        dtypes["segment_ids"] = jnp.int32
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=where) for name, dtype in dtypes.items()}


if __name__ == "__main__":
    _request = child.read_request()
    child.print_plan(compile_training(from_dict(TrainConfig, _request["config"], file=None), _request["topology"]))
