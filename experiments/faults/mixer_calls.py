"""Bad calls of the mixers' functions and of the language model: every argument in turn is what it cannot be."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.mixers import attention, gam, infini, memorizing
from atlasjax.mixers.elastic import attention as elastic
from atlasjax.mixers.elastic import banks, hippo, sampling
from atlasjax.nn import MemoryConfig, ModelConfig, abstract_model
from experiments.faults.run import Case, case

B, T, H, D = 2, 6, 2, 4
NUMBERS = (-1, True, 1.5, None, "2", float("nan"), [1], np.zeros((2, 3)))

Other = Callable[[Any], Any]


def cases(others: dict[str, Other], taken: Callable[[Callable[[], Any], tuple[str, ...]], str]) -> Iterator[Case]:
    """Cases of every function below.

    Args:
      others: kind → what makes of a good array one that is not allowed.
      taken: the outcome of a call whose error should have one of some words.
    """
    for name, (function, good, allowed) in _functions().items():
        for argument, value in good.items():
            for kind, other in _kinds(value, others).items():
                if kind not in allowed.get(argument, ()):
                    call = functools.partial(_changed, function, good, argument, other)
                    words = argument.partition(".")[0], argument.rpartition(".")[2], name, f"{name.partition('.')[0]}: "
                    yield case(f"{name} {argument} {kind}", taken, call, words)


def _kinds(value: Any, others: dict[str, Other]) -> dict[str, Other]:
    if isinstance(value, int):
        return {repr(number)[:20]: lambda _, number=number: number for number in NUMBERS}
    kinds = dict(others)
    if jnp.issubdtype(value.dtype, jnp.integer):
        kinds["floating"] = lambda x: x.astype(np.float32)
        kinds["beyond int32"] = lambda x: np.asarray(x, np.int64) + 2**32
    return kinds


def _changed(function: Callable[..., Any], good: dict[str, Any], argument: str, other: Other) -> Any:
    return function(**{**good, argument: other(good[argument])})


def _functions() -> dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, tuple[str, ...]]]]:
    """Name → (function, good arguments, argument → kinds that are allowed). Arrays and integers are changed."""
    x = jax.random.normal(jax.random.key(0), (B, T, H, D))
    ids = np.array([[0, 0, 1, 1, 2, 2]] * B)
    heads = {"q": x, "k": x, "v": x}
    width = {"v": ("an axis longer", "an axis shorter")}  # values may be of another width than keys
    optional = {"segment_ids": ("None",)}
    blocks = {"block_size": 2, "rope_theta": None}
    gate = jnp.zeros(H)
    bank = banks.load(4, block_size=2, blocks=3, cache_dir=None)
    samples = sampling.sampled_reconstruction(4, "uniform", length=8)
    other_width = ("a rank more", "an axis longer", "an axis shorter")
    segments = {**heads, "segment_ids": ids}
    gated, allowed = {**heads, "gate": gate, "segment_ids": ids}, {**width, **optional}
    return {
        "hippo.compress": (hippo.compress, {"signal": x[0, 0], "order": 3}, {"signal": other_width}),
        "hippo.compress on": (
            lambda **c: hippo.compress(x[0, 0], **c), {"coefficients": jnp.zeros((3, D)), "order": 3, "start": 5}, {},
        ),
        "hippo.reconstruct": (
            lambda **c: hippo.reconstruct(**c, positions=[0.5]), {"coefficients": jnp.zeros((3, D))},
            {"coefficients": other_width},
        ),
        "hippo.kernel": (hippo.kernel, {"order": 3, "start": 2, "stop": 5}, {}),
        "gam.mix": (_gam, _gam_arguments(x), {"state": ("None",), "segment_ids": ("None",)}),
        "gam.associative_read": (
            gam.associative_read, {"x": x[0, 0], "memory": jnp.ones((5, D))}, {"x": ("a rank more", "a rank less", "empty")},
        ),
        "gam.init_state": (
            functools.partial(gam.init_state, dtype=jnp.float32), {"batch_size": 2, "width": 3, "dim": 4}, {},
        ),
        "attention.attention": (attention.attention, {**segments, "window": 3}, {**allowed, "window": ("None",)}),
        "infini.attention": (lambda **c: infini.attention(**c, **blocks), gated, allowed),
        "memorizing.attention": (lambda **c: memorizing.attention(**c, queue_length=4, **blocks), gated, allowed),
        "elastic.attention": (lambda **c: elastic.attention(**c, bank=bank, reconstruction=samples), segments, allowed),
        **_model(),
    }  # fmt: skip


def _gam_arguments(x: jax.Array) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(1), 2)
    params = gam.Params(
        jnp.ones((3, D)), jnp.zeros(D), jax.random.normal(keys[0], (5, D)), jnp.ones((D, 2, D)), jnp.zeros((2, D))
    )
    arrays = {f"params.{name}": value for name, value in params._asdict().items()}
    return {"x": x[:, :, 0], "state": jnp.zeros((B, 2, D)), "segment_ids": np.zeros((B, T), np.int64), **arrays}


def _gam(**arguments: Any) -> Any:
    params = {name.partition(".")[2]: value for name, value in arguments.items() if name.startswith("params.")}
    rest = {name: value for name, value in arguments.items() if not name.startswith("params.")}
    return gam.mix(gam.Params(**params), **rest)


def _model() -> dict[str, Any]:
    config = ModelConfig(
        vocab_size=8, dim=8, num_layers=1, num_heads=2, mlp_dim=8, memory=MemoryConfig("linear_attention")
    )
    model = abstract_model(config)  # nothing is computed: every call is refused before
    tokens, cache = np.zeros((B, T), np.int32), np.zeros((1, B))
    allowed = ("None", "an axis longer", "an axis shorter", "beyond int32")
    return {
        "LanguageModel": (
            model, {"tokens": tokens, "segment_ids": tokens}, {"tokens": allowed[3:], "segment_ids": ("None",)},
        ),
        "extend": (lambda **c: model.extend(**c, cache=cache), {"tokens": tokens}, {"tokens": allowed[1:]}),
        "init_cache": (model.init_cache, {"batch_size": 2, "max_length": 9}, {"max_length": ("None",)}),
    }  # fmt: skip
