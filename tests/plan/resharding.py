"""`python -m tests.plan.resharding REQUEST`: a program whose arrays cannot go from one sharding to the next but whole."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from atlasjax.distributed import MeshConfig, make_mesh
from atlasjax.plan import Plan, child, compiled
from atlasjax.plan.topology import Topology


def main(request):
    mesh = make_mesh(MeshConfig(**request["mesh"]), Topology.parse(request["topology"]).devices())
    constrain = lambda x, *axes: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))
    program = lambda x: constrain(jnp.sin(constrain(2 * x, "data", None, "tensor")), None, ("tensor", "data"), None)
    text = jax.jit(program).lower(jax.ShapeDtypeStruct((8, 16, 24), jnp.float32)).compile().as_text()
    sizes = dict.fromkeys(("argument_bytes", "temp_bytes", "output_bytes", "alias_bytes", "code_bytes", "flops"), 0)
    child.print_plan(
        Plan(
            request["topology"], mesh.size, dict(mesh.shape), **sizes, collectives=compiled.collective_counts(text),
            kernels=compiled.kernel_count(text), gathers=compiled.gathers(text), compile_seconds=0.0,
        )
    )  # fmt: skip


if __name__ == "__main__":
    main(child.read_request())
