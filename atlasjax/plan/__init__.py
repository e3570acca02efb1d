"""Plans for hardware that is not available: memory, FLOPs and collectives of a training step, compiled ahead of time.

plan = plan_training(default_config("atlas-340m"), "v5e:16x16")
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from atlasjax.flops import count_flops
    from atlasjax.plan.compiled import Plan
    from atlasjax.plan.training import device_hours, plan_training, suggested_mesh
    from atlasjax.train.reports.utilization import forward_flops_per_token

# Loaded on first use: the environment of `libtpu` must be set before jax is imported.
_HOME = {
    "Plan": "atlasjax.plan.compiled",
    "count_flops": "atlasjax.flops",
    "device_hours": "atlasjax.plan.training",
    "forward_flops_per_token": "atlasjax.train.reports.utilization",
    "plan_training": "atlasjax.plan.training",
    "suggested_mesh": "atlasjax.plan.training",
}

__all__ = ["Plan", "count_flops", "device_hours", "forward_flops_per_token", "plan_training", "suggested_mesh"]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
