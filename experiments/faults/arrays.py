"""Arrays that are not what they seem: masked, big-endian, of objects, of text, of times, read-only, not contiguous, of a subclass,
with no rows. Each is refused in one line that names the argument, or gives what the plain array of the same values gives."""

import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from atlasjax import memory, rules
from atlasjax.generate import generate
from atlasjax.memory import Gates
from atlasjax.mixers import attention, gam, infini
from atlasjax.mixers.elastic import hippo
from atlasjax.nn import LanguageModel
from experiments.faults import small
from experiments.faults.run import Case, case, some

B, T, H, D = 2, 6, 2, 4


class Sub(np.ndarray):
    """A subclass without anything of its own."""


def _masked(x: np.ndarray) -> np.ndarray:
    return np.ma.masked_array(x, mask=np.arange(x.size).reshape(x.shape) % 3 == 0)


KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "masked": _masked,
    "masked nowhere": lambda x: np.ma.masked_array(x, mask=False),
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
    "objects": lambda x: x.astype(object),
    "text": lambda x: x.astype(str),
    "bytes": lambda x: x.astype(bytes),
    "times": lambda x: x.astype(np.int64).astype("datetime64[s]"),
    "durations": lambda x: x.astype(np.int64).astype("timedelta64[s]"),
    "fields": lambda x: x.astype([("a", x.dtype)]),
    "complex": lambda x: x.astype(np.complex64),
    "booleans": lambda x: x.astype(bool),
    "backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "columns first": np.asfortranarray,
    "read-only": lambda x: _read_only(x.copy()),
    "a matrix": lambda x: np.asmatrix(x.reshape(x.shape[0], -1)),
    "a subclass": lambda x: x.view(Sub),
    "a view of bytes": lambda x: memoryview(np.ascontiguousarray(x)),
    "no rows": lambda x: x[:0],
    "a number": lambda x: x.reshape(-1)[0],
    "unsigned": lambda x: x.astype(np.uint64) if x.dtype.kind == "i" else x,
    "float64": lambda x: x.astype(np.float64),
    "longdouble": lambda x: x.astype(np.longdouble),
    "a generator": lambda x: (row for row in x),
    "a string": lambda _: "3",
    "a dictionary": lambda x: {"x": x},
}


def cases(seed: int, most: int | None = None) -> Iterator[Case]:
    """Every array of every function below, of every kind."""
    every: list[Case] = []
    for function, (call, good) in _functions(seed).items():
        plain = functools.cache(functools.partial(_result, call, good))
        for argument in good:
            for kind, make in KINDS.items():
                every.append(case(f"{function} {argument} {kind}", _given, call, good, argument, make, plain, function))
    yield from some(every, most, random.Random(seed))


def _result(call: Callable[..., Any], arguments: dict[str, Any]) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.tree.leaves(jax.block_until_ready(call(**arguments)))]


def _given(
    call: Callable[..., Any], good: dict[str, Any], argument: str, make: Callable[[np.ndarray], Any],
    plain: Callable[[], list[np.ndarray]], function: str,
) -> str:  # fmt: skip
    bad = make(good[argument])
    words = (argument, argument.partition("_")[0], function.partition(" ")[0])
    read_by_rows = (function, argument) == ("gam.associative_read", "x")
    expected = lambda: [y[:0] for y in plain()] if read_by_rows and np.shape(bad)[:1] == (0,) else plain()
    alike = lambda found: len(found) == len(expected()) and all(map(_close, found, expected()))
    values_are_meant = type(bad) is not np.ma.MaskedArray or not bad.mask.any()
    return small.refused(
        lambda: _result(call, {**good, argument: bad}), words, right=lambda found: values_are_meant and alike(found)
    )


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    """Equal up to rounding: some kinds have more digits."""
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=1e-5, atol=1e-6))


def _functions(seed: int) -> dict[str, tuple[Callable[..., Any], dict[str, np.ndarray]]]:
    """Name → (function, good arrays)."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((B, T, H, D)).astype(np.float32)
    ids, tokens = np.array([[0, 0, 1, 1, 2, 2]] * B, np.int32), rng.integers(0, 300, (B, T)).astype(np.int32)
    rule = rules.titans(chunk_size=4)
    params = memory.init_params(rule, jax.random.key(0), num_heads=H, key_dim=D, value_dim=D)
    gate = np.full((B, T, H), 0.1, np.float32)
    names = rule.gate_channels(D, D)

    def scan(q: Any, k: Any, v: Any, segment_ids: Any, **gates: Any) -> Any:
        return memory.scan(rule, params, None, q, k, v, Gates(**gates), segment_ids=segment_ids)

    from flax import nnx

    model = LanguageModel(small.MODEL, rngs=nnx.Rngs(0))
    return {
        "memory.scan": (scan, {"q": x, "k": x, "v": x, "segment_ids": ids, **dict.fromkeys(names, gate)}),
        "LanguageModel": (lambda **c: model(**c), {"tokens": tokens, "segment_ids": ids}),
        "extend": (lambda tokens: model.extend(tokens, model.init_cache(B, T))[0], {"tokens": tokens}),
        "generate": (lambda prompt: generate(model, prompt, 3), {"prompt": tokens}),
        "hippo.compress": (functools.partial(hippo.compress, order=3), {"signal": x[0, 0]}),
        "attention.attention": (attention.attention, {"q": x, "k": x, "v": x, "segment_ids": ids}),
        "infini.attention": (
            functools.partial(infini.attention, block_size=2, rope_theta=None),
            {"q": x, "k": x, "v": x, "gate": np.zeros(H, np.float32)},
        ),
        "gam.associative_read": (gam.associative_read, {"x": x[0, 0], "memory": np.ones((5, D), np.float32)}),
    }


def _read_only(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x
