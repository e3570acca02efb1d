"""What the benchmarks of one machine share: inputs of a rule, a program with its gradients, times in turn, children, and rows."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from experiments.rows import Row, append_row

# Gates in the middle of what they are in a model.
RANGES = {
    "retention": (0.95, 1.0), "momentum_decay": (0.5, 0.9), "window_weights": (0.2, 1.0), "connector": (-1.0, 1.0),
    "removal_key": (-1.0, 1.0), "removal": (0.2, 0.8), "step_size": (0.2, 0.8),
}  # fmt: skip
SMALL_STEPS = {"step_size": (1e-4, 1e-3)}  # for rules whose steps are no share of an error


def inputs(
    rule: Any, length: int, heads: int, dim: int, ranges: Mapping[str, tuple[float, float]] = SMALL_STEPS
) -> tuple[Any, ...]:
    """(params, q, k, v, gates) of one sequence in float32, with queries and keys of unit length.

    Args:
      rule: of `memory.scan`.
      length, heads, dim: tokens, and heads with keys and values of this size.
      ranges: gate → the ends of its range, where they are not those of `RANGES`; others are between 0.2 and 0.8.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from atlasjax import memory

    rng = np.random.default_rng(0)
    normal = lambda: rng.standard_normal((1, length, heads, dim)).astype("float32")
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    gates = {}
    for name, channels in rule.gate_channels(dim, dim).items():
        shape = (1, length, heads) if channels is None else (1, length, heads, channels)
        gates[name] = rng.uniform(*{**RANGES, **ranges}.get(name, (0.2, 0.8)), shape).astype("float32")
    if "removal_key" in gates:
        gates["removal_key"] = unit(gates["removal_key"])
    params = memory.init_params(rule, jax.random.key(0), num_heads=heads, key_dim=dim, value_dim=dim)
    return jax.tree.map(jnp.asarray, (params, unit(normal()), unit(normal()), normal(), memory.Gates(**gates)))


def squares(rule: Any, **options: Any) -> Callable[..., Any]:
    """The loss of a rule: the sum of the squares of its outputs, of (params, q, k, v, gates)."""
    from atlasjax import memory

    return lambda params, *arrays: (memory.scan(rule, params, None, *arrays, **options)[0] ** 2).sum()


def compiled(loss: Callable[..., Any], *arguments: Any) -> tuple[Callable[[], Any], int]:
    """(what runs a loss forward and backward, with the gradients of all arguments, and waits; its temporary bytes)."""
    import jax

    program = jax.jit(jax.grad(loss, argnums=tuple(range(len(arguments))))).lower(*arguments).compile()
    return lambda: jax.block_until_ready(program(*arguments)), program.memory_analysis().temp_size_in_bytes


def in_turn(
    runs: Mapping[Any, Callable[[], Any]],
    repeats: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    rest: float = 0.0,
) -> dict[Any, float]:
    """The least seconds of each, after one that is not counted. They take turns: slow moments of a shared machine meet all.

    Args:
      runs: what is timed.
      repeats: counted rounds.
      clock: `time.process_time` counts the seconds of processors.
      rest: seconds between two runs, in which threads of other libraries become idle.
    """
    least = dict.fromkeys(runs, float("inf"))
    for number in range(repeats + 1):
        for name, run in runs.items():
            started = clock()
            run()
            if number:
                least[name] = min(least[name], clock() - started)
            time.sleep(rest)
    return least


def child(
    module: str, *arguments: object, minutes: float | None = None, **more: Any
) -> subprocess.CompletedProcess[str]:
    """A module that runs in a process of its own, which a compiler may end, or its memory."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    timeout = None if minutes is None else 60 * minutes
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **more)


def last_line(done: subprocess.CompletedProcess[str]) -> Any:
    """The last line that a child printed, which is JSON."""
    return json.loads(done.stdout.splitlines()[-1])


def program_bytes(compiled: Any) -> int:
    """Bytes of a compiled program: arguments, temporaries and results, each memory once."""
    found = compiled.memory_analysis()
    sizes = found.argument_size_in_bytes, found.temp_size_in_bytes, found.output_size_in_bytes
    return sum(sizes) - found.alias_size_in_bytes


def keep(path: Any, row: Row) -> None:
    """Appends a row to the file of --out, if there is one."""
    if path:
        append_row(path, row)
