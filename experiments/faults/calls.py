"""Bad calls of the functional API: every argument in turn is what it cannot be. All must be refused."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from atlasjax import memory, rules
from atlasjax.memory import CachedRule, Gates
from experiments.faults import mixer_calls
from experiments.faults.run import Case, case, some

B, T, H, D = 2, 6, 2, 4
RULES = {
    "titans": lambda: rules.titans(chunk_size=4),
    "omeganet": lambda: rules.omeganet(chunk_size=4, window=3),
    "linear_attention": lambda: rules.linear_attention(chunk_size=4),
    "dot": lambda: rules.dot(chunk_size=4),
    "cached": lambda: CachedRule(rules.titans(chunk_size=4), segment_size=4),
}


class Duck:
    """Has a shape and a dtype, and nothing else."""

    def __init__(self, x: Any):
        self.shape, self.dtype, self.ndim = x.shape, x.dtype, x.ndim


OTHERS: dict[str, Callable[[Any], Any]] = {
    "float8": lambda x: np.asarray(x).astype(ml_dtypes.float8_e4m3fn),
    "big-endian": lambda x: np.asarray(x).astype(">f4"),
    "complex": lambda x: jnp.asarray(x, jnp.complex64),
    "boolean": lambda x: jnp.asarray(x, bool),
    "abstract": lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
    "duck": Duck,
    "list": lambda x: np.asarray(x).tolist(),
    "None": lambda x: None,
    "text": lambda x: "x",
    "a rank more": lambda x: x[None],
    "a rank less": lambda x: x[0],
    "an axis longer": lambda x: jnp.concatenate([x, x[..., :1]], axis=-1),
    "an axis shorter": lambda x: x[..., :-1],
    "empty": lambda x: x[:0],
}


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Every argument of every function, for rules of every kind."""
    every = [case for name, make in RULES.items() for case in _of_rule(name, make())]
    every += mixer_calls.cases(OTHERS, _taken)
    yield from some(every, most, random.Random(seed))


def _of_rule(name: str, rule: Any) -> Iterator[Case]:
    params = memory.init_params(rule, jax.random.key(0), num_heads=H, key_dim=D, value_dim=D)
    x = jax.random.normal(jax.random.key(1), (B, T, H, D))
    channels = rule.gate_channels(D, D)
    gates = Gates(**{n: jnp.full((B, T, H) if c is None else (B, T, H, c), 0.1) for n, c in channels.items()})
    state = memory.init_state(rule, params, batch_size=B, max_length=T)
    call = {"params": params, "state": state, "q": x, "k": x, "v": x, "gates": gates}
    one = jax.tree.map(lambda leaf: leaf[:, 0], {n: call[n] for n in ("q", "k", "v", "gates")})
    functions = {
        "scan": (functools.partial(memory.scan, rule), call),
        "step": (functools.partial(memory.step, rule), {"params": params, "state": state, **one}),
        "read": (functools.partial(memory.read, rule), {n: call[n] for n in ("params", "state", "q")}),
    }
    for function, (run, good) in functions.items():
        for path, leaf in _leaves(good):
            for kind, other in OTHERS.items():
                broadcasts = path[0] == "gates" and kind in ("a rank less", "an axis shorter")
                if broadcasts or (path[0] == "params" and name == "dot"):
                    continue  # what broadcasts is no fault, and this rule has no weights of its own
                yield case(f"{name} {function} {'.'.join(path)} {kind}", _refused, run, good, path, leaf, other)
    for size in (-1, 0, True, 1.5, None, "2"):
        heads = {"num_heads": size, "key_dim": D, "value_dim": D}
        yield case(f"{name} init_state {size!r}", _call, memory.init_state, rule, params, {"batch_size": size})
        yield case(f"{name} init_params {size!r}", _call, memory.init_params, rule, jax.random.key(0), heads)
    scan = functools.partial(_call, memory.scan, rule)
    for options in (
        {"implementation": ""},
        {"implementation": 3},
        {"max_segments": 2},
        {"segment_ids": x},
        {"segment_ids": [0]},
    ):
        yield case(f"{name} {options}", scan, *call.values(), options)
    ids = np.array([[0] * 3 + [2**32] * 3] * B)
    yield case(f"{name} segments", scan, *{**call, "state": None}.values(), {"segment_ids": ids})
    for gate in channels:
        for value in (np.nan, np.inf, -np.inf):
            bad = gates._replace(**{gate: jnp.full_like(getattr(gates, gate), value)})
            yield case(f"{name} {gate} {value}", scan, *{**call, "gates": bad}.values(), {"check_gates": True})


def _call(function: Callable[..., Any], *arguments: Any) -> str:
    """The outcome of a call; the last argument has the options."""
    return _taken(lambda: function(*arguments[:-1], **arguments[-1]))


def _leaves(arguments: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in arguments.items():
        if name == "gates":
            yield from (((name, gate), leaf) for gate, leaf in value._asdict().items() if leaf is not None)
        elif name == "params":
            weights = getattr(value, "weights", {})
            yield from (((name, "weights", weight), leaf) for weight, leaf in weights.items())
        elif name != "state":
            yield (name,), value


def _refused(
    run: Callable[..., Any], good: dict[str, Any], path: tuple[str, ...], leaf: Any, other: Callable[[Any], Any]
) -> str:
    bad = other(leaf)
    if len(path) == 1:
        arguments = {**good, path[0]: bad}
    elif path[0] == "gates":
        arguments = {**good, "gates": good["gates"]._replace(**{path[1]: bad})}
    else:
        arguments = {**good, "params": good["params"]._replace(weights={**good["params"].weights, path[2]: bad})}
    return _taken(lambda: run(*arguments.values()))


def _taken(
    call: Callable[[], Any], words: tuple[str, ...] = ("memory.", "params", "init_params", "implementation")
) -> str:
    """A foreseen error names its function or its argument, in one line."""
    try:
        jax.block_until_ready(call())
    except (TypeError, ValueError) as error:
        lines = str(error).splitlines()
        if len(lines) == 1 and any(word in lines[0] for word in words):
            return "refused"
        raise
    return "wrong"
