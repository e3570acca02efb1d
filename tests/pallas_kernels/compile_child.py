"""`python compile_child.py TOPOLOGIES [some | all | wide]`: compiles kernels, forward and backward, for one chip of each topology,
a comma between two; a line for each that compiled.

`some`: those of `SOME`, each for one of the topologies, in turn, with fewer heads. `all`: every kernel. `wide`: those of heads of
128 and 256 and the memories of the Atlas presets.

A process of its own, because a program that libtpu does not like can end the process.
"""

import os
import sys

from atlasjax.plan import libtpu

os.environ.update(libtpu.environment())  # before anything imports jax

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import Mesh, SingleDeviceSharding, use_abstract_mesh

from atlasjax import memory as memory_lib
from atlasjax import rules
from atlasjax.memory import features, objectives, structures
from atlasjax.memory.bounds import LimitedSlope
from pallas_kernels.arguments import Segments
from pallas_kernels.chunk_memory import chunk_memory
from pallas_kernels.delta_rule import delta_rule
from pallas_kernels.linear_rule import linear_rule
from pallas_kernels.newton_schulz import SCHEDULES, coefficients, newton_schulz

# A program on a TPU treats up to four heads, of which each takes as long to compile as the first: two show what several do.
BATCH, TIME, HEADS = 1, 256, 2 if "some" in sys.argv else 4


def tokens(dim, dtype):
    return [jax.ShapeDtypeStruct((BATCH, TIME, HEADS, dim), dtype)] * 3


def gates(count, *channels):
    return [jax.ShapeDtypeStruct((BATCH, TIME, HEADS, *channels), "float32")] * count


def segments(start):
    """Packed segments in chunks of 64, from an initial memory."""
    marks = jax.ShapeDtypeStruct((BATCH, TIME // 64), "int32")
    return Segments(marks, start, jax.ShapeDtypeStruct((BATCH, TIME), "float32"))


def memory(structure, dim, window, dtype, bound="steps", packed=False, loss=None, write_gate=False, **options):
    """A chunk memory with all gates, and its arguments; bound: of "steps", norms and slopes, of "norms" and slopes, or None.

    write_gate: whether the write size is a gate.
    loss: an objective with thresholds, which take the place of the window's weights. None means L2.
    """
    shapes = structure.weight_shapes(dim, dim).items()
    weights = {name: jax.ShapeDtypeStruct((BATCH, HEADS, *shape), "float32") for name, shape in shapes}
    norms = [{name: jax.ShapeDtypeStruct((HEADS, dim), "float32") for name in ("scale", "bias")}] * structure.norm
    restarts = [segments({name: jax.ShapeDtypeStruct((HEADS, *shape), "float32") for name, shape in shapes})] * packed

    def call(weights, momenta, q, k, v, step_size, retention, theta, floor, gamma, *others):
        given = {"step_size": step_size, "retention": retention, "momentum_decay": theta}
        given |= {"window_weights": gamma} if loss is None else {"threshold": gamma[..., 0]}
        if write_gate:
            given["write_size"] = retention
        if bound is not None:
            given["norm_bound"] = 1024.0
        if bound == "steps":
            given |= {"step_bound": 1.0, "horizon": 64.0, "floor": floor}
        given |= dict(zip(["norm"] * len(norms) + ["segments"] * len(restarts), others))
        objective = objectives.L2() if loss is None else loss
        objective = objective if bound is None else LimitedSlope(objective, 1024.0)
        return chunk_memory(structure, objective, weights, momenta, q, k, v, **given, **options)[0]

    return call, [weights, weights, *tokens(dim, dtype), *gates(4), *gates(1, window), *norms, *restarts]


def kernels():
    """Name → (function, its arguments' shapes)."""
    matrix = lambda *shape: [jax.ShapeDtypeStruct((4, *shape), "float32")]
    for form in ("direct", "gram"):
        yield (
            f"newton_schulz {form}",
            lambda s, form=form: newton_schulz(s, form=form, implementation="pallas_tpu"),
            matrix(64, 256),
        )
    yield (
        "newton_schulz 96x384",
        lambda s: newton_schulz(s, 3, form="gram", implementation="pallas_tpu"),
        matrix(96, 384),
    )
    for dim in (32, 64, 96, 128):
        dtype = "float32" if dim == 96 else "bfloat16"
        yield f"delta_rule {dim}", lambda *x: delta_rule(*x)[0], [*tokens(dim, dtype), *gates(2)]
    restarts = segments(jax.ShapeDtypeStruct((HEADS, 64, 64), "float32"))
    call = lambda restarts, *x: delta_rule(*x, segments=restarts)[0]
    yield "delta_rule packed", call, [restarts, *tokens(64, "bfloat16"), *gates(2)]
    yield "delta_rule without decay", lambda *x: delta_rule(*x)[0], [*tokens(64, "bfloat16"), *gates(1)]
    for name, removes in (("linear_rule gla", False), ("linear_rule delta", False), ("linear_rule rwkv7", True)):
        call = lambda q, k, v, decay, beta, *removal, delta=name.endswith("delta"): linear_rule(
            q, k, v, decay, beta, removal or None, delta=delta
        )[0]
        yield name, call, [*tokens(64, "bfloat16"), *gates(1, 64), *gates(1), *gates(2 if removes else 0, 64)]
    yield "chunk_memory mlp", *memory(structures.MLP(), 64, 4, "bfloat16")
    yield "chunk_memory gated_mlp 32", *memory(structures.GatedMLP(), 32, 1, "bfloat16", write_gate=True)
    yield "chunk_memory matrix 96", *memory(structures.Matrix(), 96, 12, "float32")
    yield "chunk_memory mlp, unbounded", *memory(structures.MLP(), 64, 4, "bfloat16", bound=None)
    yield "chunk_memory mlp with LayerNorm", *memory(structures.MLP(norm=True), 64, 1, "bfloat16")
    yield "chunk_memory huber", *memory(structures.Matrix(), 64, 1, "bfloat16", loss=objectives.Huber())
    yield "chunk_memory packed", *memory(structures.MLP(), 64, 4, "bfloat16", packed=True)
    # Few steps and a write in eight tokens: what is written out for each matrix is what takes long to compile.
    muon = {"newton_schulz": coefficients(SCHEDULES["standard"], 2), "every": 8, "chunk_size": 16, "bound": "norms"}
    yield "chunk_memory muon", *memory(structures.MLP(), 32, 4, "bfloat16", **muon)


def atlas(dim, dtype):
    """The memory of Atlas' presets: five steps for each token, features of twice the head's dimension."""
    rule = rules.atlas(features=features.Powers(2))
    sizes = {"num_heads": HEADS, "key_dim": dim, "value_dim": dim}
    params = jax.eval_shape(lambda: memory_lib.init_params(rule, jax.random.key(0), **sizes))

    def call(params, q, k, v, step_size, retention, theta, gamma):
        given = memory_lib.Gates(retention=retention, step_size=step_size, momentum_decay=theta, window_weights=gamma)
        return memory_lib.scan(rule, params, None, q, k, v, given, implementation="pallas_tpu")[0]

    return call, [params, *tokens(dim, dtype), *gates(3), *gates(1, rule.window)]


def wide_kernels():
    """As `kernels`: what takes longer to compile."""
    for dtype in ("float32", "bfloat16"):
        call = lambda q, k, v, decay, beta, r, s: linear_rule(q, k, v, decay, beta, (r, s))[0]
        yield f"linear_rule 256 {dtype}", call, [*tokens(256, dtype), *gates(1, 256), *gates(1), *gates(2, 256)]
    yield "delta_rule 256", lambda *x: delta_rule(*x)[0], [*tokens(256, "bfloat16"), *gates(2)]
    for dim in (128, 256):
        yield f"chunk_memory mlp {dim}", *memory(structures.MLP(), dim, 4, "bfloat16")
        yield f"chunk_memory packed {dim}", *memory(structures.MLP(), dim, 4, "bfloat16", packed=True)
    yield "chunk_memory gated_mlp 128", *memory(structures.GatedMLP(), 128, 1, "bfloat16")
    for dim in (64, 128):  # long chunks leave space for fewer heads in a program
        yield f"chunk_memory mlp {dim}, chunks of 256", *memory(structures.MLP(), dim, 1, "bfloat16", chunk_size=256)
    for dim, dtype in ((64, "bfloat16"), (96, "bfloat16"), (128, "bfloat16"), (128, "float32")):
        yield f"chunk_memory muon, atlas {dim} {dtype}", *atlas(dim, dtype)


# Of each kind what has the most parts, and what differs from it most. They take turns in this order, so that each kind meets
# several topologies.
SOME = (
    "newton_schulz gram", "delta_rule 96", "delta_rule packed", "linear_rule gla", "linear_rule rwkv7",
    "chunk_memory mlp with LayerNorm", "chunk_memory huber", "chunk_memory packed", "chunk_memory muon",
)  # fmt: skip


def main(topology_names, which="all"):
    place_of = lambda name: topologies.get_topology_desc(name, platform="tpu").devices[0]
    devices = [place_of(name) for name in topology_names.split(",")]
    for name, function, shapes in {"wide": wide_kernels}.get(which, kernels)():
        if which == "some" and name not in SOME:
            continue
        # Marks are integers, which have no gradient.
        loss = lambda arguments, function=function: jnp.sum(function(*arguments).astype(jnp.float32) ** 2)
        for device in [devices[SOME.index(name) % len(devices)]] if which == "some" else devices:
            sharding = SingleDeviceSharding(device)
            place = lambda x, sharding=sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
            with use_abstract_mesh(Mesh([device], ("chip",)).abstract_mesh):  # tells kernels for which device
                compiled = (
                    jax.jit(jax.value_and_grad(loss, allow_int=True)).lower(jax.tree.map(place, shapes)).compile()
                )
            count = compiled.as_text().count('custom_call_target="tpu_custom_call"')
            print(f"{name}: {count} kernels, {compiled.memory_analysis().temp_size_in_bytes} bytes", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
