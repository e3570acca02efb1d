"""Shapes in signatures: every array of the functional API has one, in axes of the legend, and they are true."""

import ast
import dataclasses
import inspect
import pathlib
import re
import types
import typing

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import Array, Float, jaxtyped

from atlasjax import memory, rules
from atlasjax.mixers import (
    attention,
    block_recurrence,
    convolution,
    elastic,
    gam,
    infini,
    mamba,
    mamba2,
    mamba3,
    melodi,
    memorizing,
    rotary,
)
from atlasjax.mixers.elastic import banks, hippo, sampling
from atlasjax.mixers.log_linear import parallel

ROOT = pathlib.Path(__file__).parent.parent
LEGEND = ROOT / "docs/api/shapes.md"
# The functional API: files in which every array of a public function's signature has a shape.
PUBLIC = [
    "atlasjax/memory/api.py",
    "atlasjax/memory/gates.py",
    "atlasjax/memory/rule.py",
    "atlasjax/memory/*/rule.py",
    "atlasjax/memory/*/state.py",
    "atlasjax/mixers/**/*.py",
    "atlasjax/nn/model.py",
    "atlasjax/nn/mixers.py",
    "atlasjax/generate/sampling.py",
    "pallas_kernels/*/api.py",
]


def annotations(tree):
    """(function or field, annotation) of all public functions, methods and fields of a module."""
    for node in tree.body:
        if getattr(node, "name", "_").startswith("_") and isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.ClassDef):
            yield from annotations(node)
        elif isinstance(node, ast.AnnAssign):
            yield ast.unparse(node.target), node.annotation
        elif isinstance(node, ast.FunctionDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            for argument in arguments:
                if argument.annotation is not None:
                    yield f"{node.name}({argument.arg})", argument.annotation
            if node.returns is not None:
                yield f"{node.name}(…)", node.returns


def bare(annotation):
    """Whether an annotation names an array without its shape."""
    shaped = {id(x) for node in ast.walk(annotation) if isinstance(node, ast.Subscript) for x in _arrays_of(node)}
    return any(id(node) not in shaped and ast.unparse(node) in ("jax.Array", "Array") for node in ast.walk(annotation))


def _arrays_of(node):
    return node.slice.elts[:1] if is_shape(node) else []


def is_shape(node):
    return (
        isinstance(node.slice, ast.Tuple)
        and ast.unparse(node.slice.elts[0]) in ("Array", "np.ndarray")
        and isinstance(node.slice.elts[-1], ast.Constant)
    )


def used_axes():
    """Axis → a file whose annotations use it."""
    found = {}
    for path in sorted([*ROOT.glob("atlasjax/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]):
        text = path.read_text()
        if "jaxtyping" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Subscript) and is_shape(node):
                for name in re.findall(r"[a-z][a-z_]*", node.slice.elts[1].value):
                    found.setdefault(name, path.relative_to(ROOT))
    return found


def test_every_array_of_the_functional_api_has_a_shape():
    paths = [path for pattern in PUBLIC for path in sorted(ROOT.glob(pattern))]
    assert len(paths) >= len(PUBLIC)
    without = [
        f"{path.relative_to(ROOT)}: {name}: {ast.unparse(annotation)}"
        for path in paths
        for name, annotation in annotations(ast.parse(path.read_text()))
        if bare(annotation)
    ]
    assert not without, "\n".join(without)


def test_a_missing_shape_is_seen():
    tree = ast.parse('def f(x: jax.Array | None, y: Float[Array, "batch"]) -> tuple[Array, int]: ...')
    assert [name for name, annotation in annotations(tree) if bare(annotation)] == ["f(x)", "f(…)"]


def test_every_axis_is_in_the_legend():
    rows = re.findall(r"^\| (`.*?`) \|", LEGEND.read_text(), re.MULTILINE)
    legend = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    used = used_axes()
    assert {name: str(path) for name, path in used.items() if name not in legend} == {}
    assert legend - set(used) == set()


def holds(value, annotation):
    """Whether a value has the annotated type, with the axes bound so far."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(holds(value, choice) for choice in arguments)
    if origin is dict:
        return isinstance(value, dict) and all(holds(x, arguments[1]) for x in value.values())
    if origin is tuple:
        return len(value) == len(arguments) and all(holds(x, a) for x, a in zip(value, arguments, strict=True))
    if isinstance(annotation, typing.TypeVar) or annotation is typing.Any:
        return value is None or annotation is typing.Any or fields_hold(value)
    if annotation in (None, type(None)):
        return value is None
    if hasattr(annotation, "dim_str"):
        return isinstance(value, annotation)
    kind = origin or annotation
    if hasattr(kind, "_fields") or (dataclasses.is_dataclass(kind) and "State" in kind.__name__):
        return isinstance(value, kind) and fields_hold(value)
    return True  # an object without arrays


def fields_hold(value):
    """Whether all fields of a named tuple or dataclass have their annotated types."""
    hints = typing.get_type_hints(type(value))
    names = getattr(value, "_fields", None) or [field.name for field in dataclasses.fields(value)]
    wrong = [name for name in names if not holds(getattr(value, name), hints[name])]
    assert not wrong, (type(value).__name__, wrong)
    return True


def call(function, *arguments, **options):
    """The result of a call, after checks that arguments and result have the annotated shapes."""
    hints = typing.get_type_hints(function)
    bound = inspect.signature(function).bind(*arguments, **options)
    with jaxtyped("context"):
        for name, value in bound.arguments.items():
            assert holds(value, hints[name]), (function.__name__, name, hints[name])
        result = function(*arguments, **options)
        assert holds(result, hints["return"]), (function.__name__, "result", hints["return"])
    return result


RULES = {
    "atlas": lambda: rules.atlas(chunk_size=2, window=2),
    "rwkv7": lambda: rules.rwkv7(),
    "swdt": lambda: rules.REGISTRY["swdt"](cache_window=4, chunk_size=2),
    "cached": lambda: memory.CachedRule(rules.gated_delta_rule(), segment_size=2, capacity=2),
}


@pytest.mark.parametrize("name", RULES)
def test_shapes_are_true(name):
    rule = RULES[name]()
    sizes = {"num_heads": 2, "key_dim": 4, "value_dim": 4}
    q = jnp.ones((3, 5, 2, 4)) / 2
    segment_ids = jnp.zeros((3, 5), jnp.int32)
    gates = memory.suggested_gates(rule, batch_size=3, time=5, **sizes)

    def run(key):
        params = call(memory.init_params, rule, key, **sizes)
        state = call(memory.init_state, rule, params, batch_size=3, max_length=8)
        assert fields_hold(gates)
        y, _ = call(memory.scan, rule, params, None, q, q, q, gates, segment_ids=segment_ids, max_segments=1)
        one = jax.tree.map(lambda x: x[:, 0], gates)
        call(memory.step, rule, params, state, q[:, 0], q[:, 0], q[:, 0], one)
        call(memory.read, rule, params, state, q)
        return y

    jax.eval_shape(run, jax.random.key(0))


def _mixers():
    """Name → a call with annotated arguments and results."""
    q, k, v = (jnp.ones((3, 8, 2, d)) for d in (4, 4, 6))
    x, ids, per_head, per_token = jnp.ones((3, 8, 4)), jnp.zeros((3, 8), jnp.int32), jnp.ones(2), jnp.ones((3, 8, 2))
    documents = {"segment_ids": ids, "max_segments": 1}
    bank = banks.load(3, block_size=4, blocks=2)
    R = sampling.sampled_reconstruction(3, "uniform", 5, length=8)
    gam_params = gam.Params(jnp.ones((3, 4)), jnp.ones(4), jnp.ones((5, 4)), jnp.ones((4, 2, 4)), jnp.ones((2, 4)))
    weights = melodi.Weights(
        jnp.ones((4, 2, 12)), jnp.ones((8, 4)), jnp.ones((3, 4)), jnp.ones((7, 3)), jnp.ones(3), *[jnp.ones(4)] * 3
    )

    def elastic_stream():
        state = call(elastic.attention.init_state, 3, 8, 4, R, 2, 4, 6, jnp.float32)
        call(elastic.attention.extend, q, k, v, state, bank, R)

    def infini_stream():
        state = call(infini.init_state, 3, 4, 2, 4, 6, jnp.float32)
        call(infini.extend, q, k, v, per_head, state)

    def mamba3_layer():
        turns = call(mamba3.rotations, jnp.ones((3, 8, 1)), per_token, jnp.ones((3, 2, 1)), ids)
        keys = call(mamba3.rotate, jnp.ones((3, 8, 2, 2, 4)), turns)
        call(mamba3.trapezoidal_scan, jnp.ones((3, 8, 2, 2, 5)), *[per_token] * 3, keys, keys, per_head, **documents)

    return {
        "attention": lambda: call(attention.attention, q, k, v, segment_ids=ids),
        "rotary": lambda: call(rotary.rotate, q, ids),
        "gam": lambda: call(gam.mix, gam_params, x, call(gam.init_state, 3, 3, 4, jnp.float32), segment_ids=ids),
        "gam read": lambda: call(gam.associative_read, x, jnp.ones((5, 4))),
        "convolution": lambda: call(
            convolution.causal_convolution, q, jnp.ones((3, 2, 4)), q[:, :2], jnp.ones((2, 4)), segment_ids=ids
        ),
        "mamba": lambda: call(mamba.selective_scan, x, x, -jnp.ones((4, 5)), *[jnp.ones((3, 8, 5))] * 2, jnp.ones(4)),
        "mamba2": lambda: call(mamba2.ssd, q, per_token, -per_head, *[jnp.ones((3, 8, 1, 5))] * 2, per_head),
        "mamba3": mamba3_layer,
        "elastic": lambda: call(elastic.attention.attention, q, k, v, bank, R, **documents),
        "elastic stream": elastic_stream,
        "hippo": lambda: call(hippo.reconstruct, call(hippo.compress, x, 3), [0.5, 1.0]),
        "infini": lambda: call(infini.attention, q, k, v, per_head, block_size=4, **documents),
        "infini stream": infini_stream,
        "memorizing": lambda: call(memorizing.attention, q, k, v, per_head, block_size=4, queue_length=4, **documents),
        "block recurrence": lambda: call(block_recurrence.attention, q, k, v, block_size=4, **documents),
        "melodi": lambda: call(melodi.attention, x, weights, **documents),
        "log-linear": lambda: call(parallel.attention, q, k, v, jnp.ones((3, 8, 2, 5)), per_token, ids),
    }


def test_shapes_of_mixers_are_true():
    for run in _mixers().values():
        jax.eval_shape(run)


def test_a_wrong_shape_is_seen():
    def f(x: Float[Array, "batch time"], y: Float[Array, " batch"]) -> Float[Array, " time"]:
        return y

    with pytest.raises(AssertionError, match="result"):
        call(f, jnp.ones((2, 3)), jnp.ones(2))
