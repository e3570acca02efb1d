"""Inspects a model's memories after reading a batch: the norms of their weights and the values of their gates."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp


def probe(model: Any, tokens: Any) -> dict[str, Any]:
    """Reads tokens [batch, time] and records every call of `memory.scan`.

    Returns:
      {"weight_norm": the largest memory at a sequence's end, None if none is measured; "gates": name → [smallest, largest] over all
      layers}.
    """
    from atlasjax import memory

    norms: list[float] = []
    gates: dict[str, list[float]] = {}
    scan = memory.scan

    def record(norm: Any, ends: dict[str, Any]) -> None:
        if norm is not None:
            norms.append(float(norm))
        for name, (least, largest) in ends.items():
            before = gates.get(name, [float("inf"), -float("inf")])
            gates[name] = [min(before[0], float(least)), max(before[1], float(largest))]

    def watched(rule: Any, params: Any, state: Any, q: Any, k: Any, v: Any, given: Any, **kwargs: Any) -> Any:
        y, after = scan(rule, params, state, q, k, v, given, **kwargs)
        norm = rule.weight_norm(after)
        norm = None if norm is None else jnp.max(norm)
        ends = {name: (jnp.min(gate), jnp.max(gate)) for name, gate in given._asdict().items() if gate is not None}
        jax.debug.callback(record, norm, ends)  # layers run in a scan
        return y, after

    jax.clear_caches()  # a model that was compiled before would not call `watched`
    with mock.patch.object(memory, "scan", watched):
        jax.block_until_ready(model(jnp.asarray(tokens)))
        jax.effects_barrier()
    jax.clear_caches()
    rounded = {name: [float(f"{x:.4g}") for x in ends] for name, ends in gates.items()}
    return {"weight_norm": round(max(norms), 2) if norms else None, "gates": rounded}
