"""`memory.scan` under `jax.shard_map` as it is, and on meshes with explicit axes: values, state and gradients of one device."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from atlasjax import memory, rules
from atlasjax.memory import Partition, structures
from atlasjax.memory.fast_weights import kernels, linear_kernels
from atlasjax.plan.compiled import collective_counts
from tests.marks import if_slow, some_slow
from tests.memory.cases import RULES, assert_close, make_inputs
from tests.memory.own_ideas import IDEAS
from tests.memory.softmax import cases as softmax

CASES = {
    "titans": RULES["titans"],
    "ttt_linear": RULES["ttt_linear"],
    "delta_rule": RULES["delta_rule"],
    "omeganet": RULES["omeganet"],
    "yaad_window": RULES["yaad_window"],
    "atlas_every": RULES["atlas_every"],
    "memora_matrix": RULES["memora_matrix"],
    "own_adam": IDEAS["own_adam"],
    "own_loss_matrix": IDEAS["own_loss_matrix"],
    "deep_transformer": rules.deep_transformer(8),
    "dot": rules.dot(8, 3),
    "dot_matrix": softmax.RULES["dot_matrix"],
    "dot_delta": softmax.RULES["dot_delta"],
    "cached": memory.CachedRule(RULES["titans"], "grm", segment_size=16),
    "cached_linear": memory.CachedRule(RULES["delta_rule"], "grm", segment_size=16),
}
TOKENS = PartitionSpec("data", None, "model")


def inputs(rule, dtype=jnp.float64):
    if isinstance(rule, memory.MemoryRule):
        return make_inputs(rule, dtype=dtype)
    params, q, k, v, _ = make_inputs(RULES["titans"], dtype=dtype)
    params = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    gates = memory.suggested_gates(rule, batch_size=2, time=37, num_heads=2, key_dim=4)
    wide = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)
    return wide(params), q, k, v, wide(gates)


def of_state(state):
    """How the leaves of a state are split: [batch], or [batch, heads, …]."""
    return jax.tree.map(lambda x: PartitionSpec("data") if x.ndim == 1 else PartitionSpec("data", "model"), state)


def total(rule, y_and_state):
    y, state = y_and_state
    floating = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.sum(jnp.sin(y)) + sum(jnp.sum(jnp.square(x)) for x in floating)


def each_case(*names):
    """One case for each engine by default: the closed form, the general one, softmax memories, cached ones."""
    default = ("delta_rule", "own_loss_matrix", "dot_delta", "cached_linear")
    return pytest.mark.parametrize("name", some_slow(names, set(names) - set(default)))


def graded(fn, *arguments):
    """(outputs and state, gradients of every argument) of a function with a scalar and those."""
    (_, found), gradients = jax.jit(jax.value_and_grad(fn, argnums=range(5), has_aux=True))(*arguments)
    return found, gradients


@each_case(*CASES)
def test_under_shard_map(name, x64):
    """Gradients too: where a rule differentiates inside, nothing may be summed over the devices."""
    rule = CASES[name]
    params, *tokens = inputs(rule)
    run = lambda params, *tokens: memory.scan(rule, params, None, *tokens)
    summed = lambda *arguments: (total(rule, found := run(*arguments)), found)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def local(*arguments):
        scalar, found = summed(*arguments)
        return jax.lax.psum(scalar, ("data", "model")), found

    _, state = jax.eval_shape(run, params, *tokens)
    specs = (PartitionSpec("model"), *(TOKENS,) * 4), (PartitionSpec(), (TOKENS, of_state(state)))
    have = graded(jax.shard_map(local, mesh=mesh, in_specs=specs[0], out_specs=specs[1]), params, *tokens)
    for a, b in zip(have, graded(summed, params, *tokens), strict=True):
        assert_close(a, b, 1e-9)


@pytest.mark.parametrize("kind", some_slow(["truncation", "state", "step"], ["state"]))
def test_heads_of_a_softmax_memory_without_parameters(kind):
    """`SoftmaxParams.num_heads` says how many heads there are on all devices."""
    rule = memory.SoftmaxRule(structures.Matrix())
    if kind != "truncation":
        rule = memory.CachedRule(rule, "grm", segment_size=2, connector="query")
    params = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    tokens = (
        *jax.random.normal(jax.random.key(1), (3, 1, 5, 2, 4)),
        memory.Gates(jnp.full((1, 5, 2), 0.9), jnp.ones((1, 5, 2))),
    )
    state = None if kind == "truncation" else memory.init_state(rule, params, batch_size=1, max_length=8)

    def run(state, tokens):
        if kind != "step":
            return memory.scan(rule, params, state, *tokens, truncation=2 if state is None else None)[0]
        for t in range(3):
            y, state = memory.step(rule, params, state, *jax.tree.map(lambda x, t=t: x[:, t], tokens))
        return y[:, None]

    mesh, heads = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,)), PartitionSpec(None, None, "model")
    of_state = jax.tree.map(lambda x: PartitionSpec() if x.ndim == 1 else PartitionSpec(None, "model"), state)
    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(of_state, heads), out_specs=heads))(state, tokens)
    assert_close(found, jax.jit(run)(state, tokens), 1e-5)


def each_on_explicit_axes(*names):
    """The general engine and softmax memories by default."""
    return pytest.mark.parametrize("name", some_slow(names, set(names) - {"own_loss_matrix", "dot_delta"}))


@each_on_explicit_axes(
    "titans",
    "ttt_linear",
    "own_loss_matrix",
    "dot",
    "dot_matrix",
    "dot_delta",
    "omeganet",
    "memora_matrix",
    "atlas_every",
)
def test_on_explicit_axes(name, x64):
    """With the mesh in the context, and without: the arrays have it."""
    rule = CASES[name]
    params, *tokens = inputs(rule)
    summed = lambda *arguments: (total(rule, found := memory.scan(rule, arguments[0], None, *arguments[1:])), found)
    expected, want = graded(summed, params, *tokens)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    split = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, TOKENS)), tokens)
    for context in (jax.set_mesh(mesh), contextlib.nullcontext()):
        with context:
            (y, state), have = graded(summed, params, *split)
            assert jax.typeof(y).sharding.spec == PartitionSpec("data", None, "model", None)
            assert all(jax.typeof(x).sharding.spec[0] == "data" for x in jax.tree.leaves(state))
        assert_close((y, state), expected, 1e-9)
        assert_close(have, want, 1e-9)


def test_the_definition_on_explicit_axes(x64):
    rule = CASES["delta_rule"]
    params, *tokens = inputs(rule)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    split = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, TOKENS)), tokens)
    found = memory.reference(rule, params, None, *split)
    assert jax.typeof(found[0]).sharding.spec == PartitionSpec("data", None, "model", None)
    assert_close(found, memory.reference(rule, params, None, *tokens), 1e-9)


@pytest.mark.parametrize("context", [False, if_slow(True)])
def test_a_partition_on_explicit_axes(context, x64):
    rule = CASES["delta_rule"]
    params, *tokens = inputs(rule)

    def summed(partition):
        def run(*arguments):
            found = memory.scan(rule, arguments[0], None, *arguments[1:], partition=partition)
            return total(rule, found), found

        return run

    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    split = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, TOKENS)), tokens)
    with jax.set_mesh(mesh) if context else contextlib.nullcontext():
        found = graded(summed(Partition(mesh, ("data",), ("model",))), params, *split)
    assert_close(found, graded(summed(None), params, *tokens), 1e-9)


def test_a_partition_of_tokens_where_another_axis_is_manual(x64):
    """Its mesh is that of the devices, in which no axis is manual."""
    rule = CASES["delta_rule"]
    params, *tokens = inputs(rule)
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2)
    run = lambda *arguments: memory.scan(
        rule, arguments[0], None, *arguments[1:], partition=Partition(mesh, time=("sequence",))
    )
    rows = PartitionSpec("data")
    specs = (PartitionSpec(), *(rows,) * 4)
    found = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=rows, axis_names={"data"}))(params, *tokens)
    assert_close(found, memory.scan(rule, params, None, *tokens), 1e-9)


def shared_by_rows(rule, implementation, mesh):
    """The gradients, and their function, of a sum over devices that share the parameters and each have rows of the batch."""

    def local(*arguments):
        found = memory.scan(rule, arguments[0], None, *arguments[1:], implementation=implementation)
        return jax.lax.psum(total(rule, found), "data")

    rows = PartitionSpec("data")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=(PartitionSpec(), *(rows,) * 4), out_specs=PartitionSpec(), check_vma=True
    )
    return jax.value_and_grad(mapped, argnums=range(5))


def test_a_kernel_under_shard_map(monkeypatch):
    """Values and gradients, in the interpreter of TPU kernels, which can run there (`interpret=True` cannot)."""
    monkeypatch.setattr(
        linear_kernels, "delta_rule", functools.partial(linear_kernels.delta_rule, interpret=pltpu.InterpretParams())
    )
    monkeypatch.setattr(kernels, "_FREE_CHUNK", 8)
    rule = RULES["delta_rule"]
    arguments = make_inputs(rule, time=9, heads=1)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    found = jax.jit(shared_by_rows(rule, "pallas_tpu", mesh))(*arguments)
    assert_close(found, jax.jit(shared_by_rows(rule, "xla", mesh))(*arguments), 2e-5)


@pytest.mark.parametrize(
    ("rule", "implementation"),
    [
        (rules.linear_attention(), "pallas_gpu"),
        (rules.delta_rule().unbounded(), "pallas_gpu"),
        pytest.param(rules.titans(16).unbounded(), "pallas_gpu", marks=pytest.mark.slow),
        (rules.titans(8), "pallas_tpu"),
        (rules.gla(), "pallas_tpu"),
        pytest.param(rules.atlas(8), "pallas_tpu", marks=pytest.mark.slow),
    ],
    ids=["linear_attention_gpu", "delta_rule_gpu", "titans_gpu", "titans", "gla", "atlas"],
)
def test_kernels_are_traced_under_shard_map(rule, implementation):
    """Sums over devices are those of the scalar and, backward, of the parameters; the derivatives inside a kernel have none."""
    arguments = make_inputs(rule, time=32, key_dim=16, value_dim=16)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    program = str(jax.make_jaxpr(shared_by_rows(rule, implementation, mesh))(*arguments))
    assert "pallas_call" in program
    assert program.count("psum") == 1 + len(jax.tree.leaves(arguments[0]))


@each_on_explicit_axes("titans", "omeganet", "own_adam", "own_loss_matrix", "dot", "dot_delta", "cached")
def test_fresh_states_and_reads_on_explicit_axes(name, x64):
    """Without a mesh in the context: parameters and queries have it."""
    rule = CASES[name]
    params, *tokens = inputs(rule)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    put = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
    sharded, split = put(params, "model"), put(tokens, "data", None, "model")
    start = lambda params: memory.init_state(rule, params, batch_size=2, max_length=64)
    state, fresh = start(params), start(sharded)
    if jax.tree.leaves(params):  # parameters without arrays have no mesh
        assert all(jax.typeof(x).sharding.spec[:2] == (None, "model") for x in jax.tree.leaves(fresh) if x.ndim > 1)
    assert_close(fresh, state, 0)
    assert jax.tree.structure(jax.jit(start)(sharded)) == jax.tree.structure(state)
    _, state = memory.scan(rule, params, state, *tokens)
    state_on = jax.tree.map(lambda x, spec: put(x, *spec), state, of_state(state))
    y = memory.read(rule, sharded, state_on, split[0])
    assert jax.typeof(y).sharding.spec == PartitionSpec("data", None, "model", None)
    assert_close(y, memory.read(rule, params, state, tokens[0]), 1e-9)


@each_on_explicit_axes("titans", "ttt_linear", "own_adam", "own_loss_matrix")
def test_a_step_on_explicit_axes(name, x64):
    rule = CASES[name]
    params, *tokens = inputs(rule)
    now = jax.tree.map(lambda x: x[:, 0], tokens)
    state = memory.init_state(rule, params, batch_size=2)
    expected = memory.step(rule, params, state, *now)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, PartitionSpec("data", "model"))
        split = jax.tree.map(lambda x: jax.device_put(x, sharding), now)
        after = jax.jit(lambda *arguments: memory.step(rule, *arguments))(params, state, *split)
    assert_close(after, expected, 1e-9)


def test_a_step_of_a_log_linear_memory_on_explicit_axes(x64):
    rule = memory.LogLinearRule(RULES["delta_rule"], segment_size=2, levels=3)
    params, *tokens = make_inputs(RULES["delta_rule"], dtype=jnp.float64)
    *now, gates = jax.tree.map(lambda x: x[:, 0], tokens)
    now = (*now, gates._replace(connector=jnp.ones((2, 2, 4))))
    state = memory.init_state(rule, params, batch_size=2)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    split = jax.device_put(now, NamedSharding(mesh, PartitionSpec("data", "model")))
    assert_close(memory.step(rule, params, state, *split), memory.step(rule, params, state, *now), 1e-9)


@pytest.mark.parametrize(
    "name", some_slow(("titans", "omeganet", "atlas_every", "delta_rule", "memora_matrix"), {"omeganet", "titans"})
)
def test_devices_of_a_cpu_divide_heads_without_communication(name):
    rule = CASES[name]
    params, *tokens = inputs(rule, dtype=jnp.float32)
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Auto,))
    put = lambda tree, *spec: jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
    params, tokens = put(params, "model"), put(tokens, None, None, "model")
    gradient = jax.grad(lambda *args: memory.scan(rule, args[0], None, *args[1:])[0].sum(), argnums=range(5))
    program = jax.jit(gradient).lower(params, *tokens).compile().as_text()
    found = [n for n in ("all-reduce", "all-gather", "all-to-all", "collective-permute") if f" {n}(" in program]
    assert not found


DIVIDED = {
    "titans": RULES["titans"],
    "delta_rule": RULES["delta_rule"],
    "deep_transformer": rules.deep_transformer(8),
    "grm": CASES["cached"],
    "ssc": memory.CachedRule(RULES["titans"], "ssc", segment_size=16),
    "soup": memory.CachedRule(RULES["titans"], "soup", segment_size=16),
    "log_linear": memory.LogLinearRule(RULES["titans"], segment_size=16),
}


BY_DEFAULT = [("delta_rule", False), ("delta_rule", True), ("grm", False), ("ssc", True)]


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        (name, packed) if (name, packed) in BY_DEFAULT else if_slow(name, packed)
        for name in DIVIDED
        for packed in (False, True)
    ],
)
def test_devices_keep_their_own_sequences(name, packed):
    """A batch divided over devices, which XLA partitions: nothing but the parameters' gradients goes from one to another."""
    rule, params, tokens, (rows, whole) = divided(name)
    ids = jnp.repeat(jnp.arange(2), jnp.array([5, 32]))[None].repeat(8, 0) if packed else None

    def loss(params, q, k, v, gates, ids):
        y, _ = memory.scan(rule, params, None, q, k, v, gates, segment_ids=ids, max_segments=2 if packed else None)
        return jnp.sum(jnp.sin(y))

    shardings = (whole, rows, rows, rows, rows)
    run = jax.jit(jax.grad(loss, argnums=range(5)), in_shardings=(*shardings, rows), out_shardings=shardings)
    counts = collective_counts(run.lower(params, *tokens, ids).compile().as_text())
    assert counts.pop("all-reduce") > 0
    assert set(counts.values()) == {0}


@pytest.mark.parametrize("name", some_slow(DIVIDED, set(DIVIDED) - {"delta_rule", "grm"}))
def test_devices_keep_their_own_streams(name):
    rule, params, tokens, (rows, whole) = divided(name)
    state = memory.init_state(rule, params, batch_size=8, max_length=64)
    run = jax.jit(
        lambda params, state, *tokens: memory.scan(rule, params, state, *tokens),
        in_shardings=(whole, rows, *(rows,) * 4), out_shardings=rows,
    )  # fmt: skip
    assert set(collective_counts(run.lower(params, state, *tokens).compile().as_text()).values()) == {0}


def divided(name):
    """A rule of `DIVIDED`, its parameters, tokens and gates, and the shardings of a batch over four devices and of parameters."""
    rule, mesh = DIVIDED[name], jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    params = memory.init_params(rule, jax.random.key(0), num_heads=2, key_dim=4, value_dim=4)
    gates = memory.suggested_gates(rule, batch_size=8, time=37, num_heads=2, key_dim=4)
    token = jnp.zeros((8, 37, 2, 4))
    rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    return rule, params, (token, token, token, gates), (rows, whole)
