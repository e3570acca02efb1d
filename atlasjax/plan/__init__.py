"""Plans for hardware that is not available: memory, FLOPs and collectives of a training step, compiled ahead of time.

plan = plan_training(default_config("atlas-340m"), "v5e:16x16")
"""

from typing import TYPE_CHECKING

from atlasjax.names import lazily

if TYPE_CHECKING:
    from atlasjax.flops import count_flops
    from atlasjax.plan.compiled import Plan
    from atlasjax.plan.training import device_hours, plan_training, suggested_mesh
    from atlasjax.train.reports.utilization import forward_flops_per_token

__all__ = ["Plan", "count_flops", "device_hours", "forward_flops_per_token", "plan_training", "suggested_mesh"]

# Loaded on first use: the environment of `libtpu` must be set before jax is imported.
__getattr__ = lazily(
    __name__,
    {
        "compiled": "Plan",
        "training": "device_hours plan_training suggested_mesh",
        ".flops": "count_flops",
        ".train.reports.utilization": "forward_flops_per_token",
    },
)
