"""Kernels that are compiled for another platform than their own: one line, where jax has none that names the argument.

For which platform a call is compiled is only known when it is lowered, and it is often not that of this machine: a plan for TPUs is
compiled on a CPU. So this is an operation that changes nothing, and that cannot be lowered for another platform.
"""

import functools
from typing import Any

import jax
from jax._src import config  # jax has no public name for whether pltpu.force_tpu_interpret_mode is in effect
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

# Implementation → jax's name of the platform on which it runs, and the name of its devices.
_OWN = {"pallas_tpu": ("tpu", "TPUs"), "pallas_gpu": ("cuda", "NVIDIA's GPUs")}

_own_platform = Primitive("own_platform")
_own_platform.def_impl(lambda x, **_: x)
_own_platform.def_abstract_eval(lambda x, **_: x)
batching.defvectorized(_own_platform)
mlir.register_lowering(_own_platform, lambda _, x, **__: [x])


def _lowered(_: mlir.LoweringRuleContext, x: Any, *, implementation: str, platform: str) -> list[Any]:
    own, devices = _OWN[implementation]
    if own != platform:
        here = ", ".join(f'"{name}"' for name in (*(name for name in _OWN if _OWN[name][0] == platform), "xla"))
        raise ValueError(
            f'implementation="{implementation}" runs on {devices}, and this call is compiled for {platform}; give {here} or '
            '"reference", which run there.'
        )
    return [x]


for _platform in ("cpu", "tpu", "cuda"):
    mlir.register_lowering(_own_platform, functools.partial(_lowered, platform=_platform), platform=_platform)


def only_on_own_platform(x: jax.Array, implementation: str) -> jax.Array:
    """x itself; compiled for another platform than that of `implementation`, "pallas_tpu" or "pallas_gpu", a ValueError.

    Under `pltpu.force_tpu_interpret_mode` a kernel runs on every platform.
    """
    forced = getattr(config, "pallas_tpu_interpret_mode_context_manager", None)
    if forced is not None and forced.value is not None:
        return x
    return _own_platform.bind(x, implementation=implementation)
