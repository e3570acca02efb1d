"""`memory.scan` by kernels, in interpret mode, against the definition; and what they refuse."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from atlasjax import memory
from atlasjax.memory import Bound, Partition, objectives, optimizers, structures
from atlasjax.memory.fast_weights import kernels, linear_kernels, linear_pass
from atlasjax.memory.fast_weights.rule import MemoryRule
from tests.marks import if_slow
from tests.memory.cases import RULES, assert_close, make_inputs, objective
from tests.memory.test_bound import without_effect

SUPPORTED = {
    "linear_attention", "delta_rule", "delta_rule_chunk8", "retnet", "polysketch", "longhorn", "gated_delta_rule", "titans",
    "titans_matrix", "titans_no_momentum", "titans_deep", "dla", "swla", "omeganet", "omeganet_powers", "omeganet_sketch",
    "momentum_full_retention", "gated", "gated_small", "moneta_row", "atlas", "atlas_plus_plus", "titans_unbounded",
    "titans_at_its_limits", "own_features", "deep_small", "yaad", "ttt_linear", "ttt_mlp", "ttt_mlp_small", "gla", "rwkv7",
    "rwkv7_one_key", "delta_rule_decay", "gdn2", "comba", "pgdn", "read_key_decays_last",
    "titans_write_gate", "kda", "mamba3",
}  # fmt: skip


@pytest.fixture
def interpreted(monkeypatch):
    for module, name in (
        (kernels, "chunk_memory"), (linear_kernels, "delta_rule"), (linear_kernels, "linear_rule"), (linear_pass, "memory_pass"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, functools.partial(getattr(module, name), interpret=True))


def gradients(fn, rule):
    return jax.jit(jax.value_and_grad(functools.partial(objective, fn, rule), argnums=(0, 1, 2, 3, 4), has_aux=True))


PALLAS = functools.partial(memory.scan, implementation="pallas_tpu")


@pytest.mark.parametrize(
    "name",
    [
        if_slow("delta_rule"), "gated_delta_rule", "longhorn", "gla", "rwkv7", if_slow("rwkv7_one_key"), "gdn2",
        if_slow("comba"), if_slow("pgdn"), if_slow("read_key_decays_last"),
        if_slow("delta_rule_decay"),
        if_slow("titans_matrix"), if_slow("omeganet"), if_slow("titans"),
        if_slow("moneta_row"), if_slow("swla"), if_slow("polysketch"), if_slow("dla"), if_slow("gated"), if_slow("yaad"),
        "ttt_linear", if_slow("ttt_mlp"), if_slow("titans_write_gate"),
    ],
)  # fmt: skip
def test_outputs_state_and_gradients(name, interpreted):
    """37 tokens: chunks of 8, and five tokens that the XLA engine takes."""
    rule = RULES[name]
    params, *rest = make_inputs(rule, batch=1)
    found, expected = (gradients(fn, rule)(params, *rest) for fn in (PALLAS, memory.reference))
    assert_close(found, expected, 2e-5)


@pytest.mark.parametrize(
    "name",
    [
        "gated_delta_rule",
        if_slow("retnet"),
        if_slow("gla"),
        if_slow("rwkv7"),
        if_slow("delta_rule_decay"),
        if_slow("titans"),
    ],
)
def test_a_memory_that_keeps_everything(name, interpreted):
    """Decays of one, as of a gate that rounds to it."""
    rule = RULES[name]
    params, *rest = make_inputs(rule, batch=1, time=24, retention=1.0)
    found, expected = (gradients(fn, rule)(params, *rest) for fn in (PALLAS, memory.reference))
    assert_close(found, expected, 2e-5)


ACTIVE = Bound(step=0.8, slope=0.5, weight_norm=0.6)


def alike(rule, **options):
    """Inputs whose keys are alike, with steps of 0.5: a chunk would overshoot many times. A weight's norm is ~ 1."""
    params, q, k, v, gates = make_inputs(rule, batch=1, step_size=0.5, **options)
    same = k[:, :1] + 0.2 * (k - k[:, :1])
    return params, q, same / jnp.linalg.norm(same, axis=-1, keepdims=True), v, gates


@pytest.mark.parametrize(
    ("name", "gates"),
    [
        ("titans", {"momentum_decay": 1.0}),  # 1 − θ has a least size
        if_slow("titans_no_momentum", {"retention": 0.0}),
        if_slow("omeganet", {}),  # features: the output's residual is not in the kernel
        if_slow("titans", {}),
        if_slow("gated", {}),
        if_slow("delta_rule_chunk8", {}),
        if_slow("moneta_row", {}),
        if_slow("dla", {}),
        if_slow("yaad", {}),
    ],
)
def test_active_bound(name, gates, interpreted):
    """Of steps, and of norms at the starts of chunks."""
    rule = dataclasses.replace(RULES[name], bound=ACTIVE)
    arrays = alike(rule, time=24, **gates)
    found, expected = (gradients(fn, rule)(*arrays) for fn in (PALLAS, memory.reference))
    assert_close(found, expected, 2e-5)
    free = memory.scan(rule.unbounded(), arrays[0], None, *arrays[1:])[0]
    assert jnp.abs(free - found[0][1][0]).max() > 0.1 * jnp.abs(free).max()


@pytest.mark.parametrize(
    "rule",
    [
        MemoryRule(
            structures.Matrix(), objectives.L2(), optimizer=optimizers.GradientDescent(), window=2, chunk_size=8
        ),
        if_slow(
            MemoryRule(structures.Matrix(), objectives.L2(), optimizer=optimizers.Momentum(), window=3, chunk_size=8)
        ),
    ],
)
def test_the_derivative_of_a_step_that_is_zero(rule, interpreted):
    arrays = without_effect(rule, dtype=jnp.float32, time=16)
    found, expected = (gradients(fn, rule)(*arrays) for fn in (PALLAS, memory.reference))
    assert_close(found, expected, 2e-5)


def test_active_bound_in_bfloat16(interpreted):
    rule = dataclasses.replace(RULES["omeganet"], bound=ACTIVE)
    params, q, k, v, gates = alike(rule, time=16)
    narrow = tuple(x.astype(jnp.bfloat16) for x in (q, k, v))
    expected, _ = memory.reference(rule, params, None, *(x.astype(jnp.float32) for x in narrow), gates)
    y, _ = PALLAS(rule, params, None, *narrow, gates)
    assert_close(y.astype(jnp.float32), expected, 4e-2)


def test_bfloat16(interpreted):
    rule = RULES["omeganet"]
    params, q, k, v, gates = make_inputs(rule, batch=1, time=16)
    expected, _ = memory.reference(rule, params, None, q, k, v, gates)
    narrow = (x.astype(jnp.bfloat16) for x in (q, k, v))
    y, state = PALLAS(rule, params, None, *narrow, gates)
    assert y.dtype == jnp.bfloat16
    assert state.memory["W1"].dtype == jnp.float32
    assert_close(y.astype(jnp.float32), expected, 4e-2)


@pytest.mark.parametrize(
    ("implementation", "structure", "norm", "time"),
    [
        if_slow("pallas_tpu", structures.Matrix(), 0.1, 32),  # test_chunk_memory.py has Muon
        *(
            if_slow(name, structures.MLP(expansion=2), norm, 35)
            for name in ("pallas_tpu", "pallas_gpu")
            for norm in (1024.0, 0.6)
        ),
    ],
    ids=str,
)
def test_muon(implementation, structure, norm, time, interpreted):
    """At its norm and far from it. Rounding in Newton–Schulz grows by 3.4 a step (SEMANTICS 1.7)."""
    rule = dataclasses.replace(
        RULES["atlas"], structure=structure, bound=Bound(slope=0.5, weight_norm=norm), chunk_size=16
    )
    params, *rest = make_inputs(rule, batch=1, time=time)
    scan = functools.partial(memory.scan, implementation=implementation)
    found, expected = (gradients(fn, rule)(params, *rest) for fn in (scan, memory.reference))
    assert_close(found, expected, 2e-3)


@pytest.mark.parametrize("name", ["gated_delta_rule", "linear_attention", "rwkv7"])
def test_goes_on_from_a_state(name, interpreted):
    """Where chunks have no effect, a state has no place inside one."""
    rule = RULES[name]
    params, q, k, v, gates = make_inputs(rule, batch=2)
    cut = lambda which: jax.tree.map(lambda x: x[:, which], (q, k, v, gates))
    first, state = memory.scan(rule, params, None, *cut(slice(13)))
    second, state = PALLAS(rule, params, state, *cut(slice(13, None)))
    found = jnp.concatenate([first, second], axis=1), state
    assert_close(found, memory.reference(rule, params, None, q, k, v, gates), 2e-5)


@pytest.mark.parametrize(
    ("name", "structure"),
    [
        ("gated_delta_rule", structures.Matrix()),
        ("rwkv7", structures.Matrix()),
        ("gla", structures.Matrix()),
        *(if_slow(name, structures.Matrix()) for name in ("gdn2", "comba", "rwkv7_one_key", "read_key_decays_last")),
        if_slow("omeganet", structures.Matrix()),  # test_chunk_memory_gpu.py has both
        if_slow("omeganet", structures.MLP()),
        if_slow("yaad", structures.Matrix()),
    ],
    ids=str,
)
def test_on_gpus(name, structure, interpreted):
    """37 tokens: two chunks of 16, and five tokens that the XLA engine takes; steps and norms are bounded, and act."""
    rule = RULES[name]
    if not rule.is_linear:
        bound = Bound(slope=0.5, weight_norm=0.6)
        rule = dataclasses.replace(rule, structure=structure, chunk_size=16, bound=bound)
    params, *rest = make_inputs(rule, batch=1, key_dim=8, value_dim=8)
    scan = functools.partial(memory.scan, implementation="pallas_gpu")
    found, expected = (gradients(fn, rule)(params, *rest) for fn in (scan, memory.reference))
    assert_close(found, expected, 2e-5)


def test_vmap_and_remat_and_scan_over_layers(interpreted):
    rule = RULES["titans_matrix"]
    params, q, k, v, gates = make_inputs(rule, batch=1, time=16)
    layers = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)

    def deep(fn, layers, q):
        layer = lambda x, params: (x + fn(rule, params, None, x, k, v, gates)[0], None)
        return jax.lax.scan(jax.checkpoint(layer), q, layers)[0]

    rows = jnp.stack([q, 2 * q])
    run = lambda fn: jax.vmap(jax.value_and_grad(lambda q: jnp.sum(deep(fn, layers, q) ** 2)))(rows)
    assert_close(run(PALLAS), run(memory.scan), 2e-5)


def test_what_is_supported():
    """Every rule of the table is either supported, or the reason names what the kernels lack."""
    reasons = {}
    for name, rule in RULES.items():
        params, q, *_ = jax.eval_shape(lambda rule=rule: make_inputs(rule, time=300))
        reasons[name] = kernels.unsupported("pallas_tpu", rule, params, None, q, False)
    assert {name for name, reason in reasons.items() if reason is None} == SUPPORTED
    assert "Channel" in reasons["muon_matrix_channel"]
    assert "chunk_size=12" in reasons["atlas_every"]
    assert "KL" in reasons["memora"]
    assert "Huber" in reasons["yaad_window"]
    assert "chunk_size=4, must be one of" in reasons["omeganet_window_over_chunk"]


def test_what_gpus_refuse():
    reasons = {}
    for name, rule in RULES.items():
        params, q, *_ = jax.eval_shape(lambda rule=rule: make_inputs(rule, time=300))
        reasons[name] = kernels.unsupported("pallas_gpu", rule, params, None, q, False)
    assert {name for name, reason in reasons.items() if reason is None} < SUPPORTED
    assert reasons["atlas"] is None
    rule = RULES["atlas"]
    wide, q, *_ = jax.eval_shape(lambda: make_inputs(rule, key_dim=272, value_dim=272, time=16))
    assert "Newton–Schulz supports matrices up to 256 × 1,024" in kernels.unsupported(
        "pallas_gpu", rule, wide, None, q, False
    )
    assert "LayerNorm" in reasons["ttt_mlp"]
    assert "chunk_size=8, must be at least 16" in reasons["titans"]
    assert reasons["gated_delta_rule"] is None
    assert reasons["gla"] is reasons["rwkv7"] is reasons["gdn2"] is None
    assert reasons["swla"] is None
    assert reasons["titans_matrix"] is None  # whose steps are bounded
    long = dataclasses.replace(RULES["titans_matrix"], chunk_size=128)
    params, q, *_ = jax.eval_shape(lambda: make_inputs(long, time=300))
    assert "chunk_size=128 with bounded steps" in kernels.unsupported("pallas_gpu", long, params, None, q, False)


def test_gpus_that_are_too_old(monkeypatch):
    rule = RULES["gated_delta_rule"]
    params, q, *_ = jax.eval_shape(lambda: make_inputs(rule, time=300))
    for capability, reason in (
        ("7.5", "the GPU, a Tesla T4, has compute capability 7.5, and Triton needs 8.0"),
        ("8.0", None),
    ):
        device = types.SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda device=device: [device])
        assert kernels.unsupported("pallas_gpu", rule, params, None, q, False) == reason
        assert kernels.unsupported("pallas_tpu", rule, params, None, q, False) is None


def test_none_takes_what_is_recorded_as_fastest(monkeypatch):
    """On the platform that a call is compiled for, where the kernel supports it and XLA need not split it."""
    rule = RULES["gated_delta_rule"]
    params, *rest = make_inputs(rule, batch=1, time=16, key_dim=8, value_dim=8)
    f = jax.jit(lambda params, *rest: memory.scan(rule, params, None, *rest))
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    compiled_for = lambda platform: f.trace(params, *rest).lower(lowering_platforms=(platform,)).as_text()
    assert "tpu_custom_call" not in compiled_for("tpu")  # nothing is recorded
    asked = []
    recorded = lambda kernel, dim, dtype: asked.append((kernel, dim, dtype)) or {"tpu": "pallas_tpu"}
    monkeypatch.setattr(kernels, "fastest", recorded)
    jax.clear_caches()
    assert "tpu_custom_call" in compiled_for("tpu")
    assert set(asked) == {("delta_rule", 8, jnp.dtype("float32"))}
    assert_close(f(params, *rest), memory.reference(rule, params, None, *rest), 2e-5)
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    jax.clear_caches()
    assert "tpu_custom_call" not in compiled_for("tpu")


def test_refused():
    rule = RULES["titans"]
    params, q, k, v, gates = make_inputs(rule, time=16)
    cut = lambda which: jax.tree.map(lambda x: x[:, which], (q, k, v, gates))
    with pytest.raises(ValueError, match="7 tokens are less than one chunk of 8"):
        PALLAS(rule, params, None, *cut(slice(7)))
    with pytest.raises(ValueError, match="float16, must be float32 or bfloat16"):
        PALLAS(rule, params, None, *(x.astype(jnp.float16) for x in (q, k, v)), gates)
    wide = jax.eval_shape(lambda: make_inputs(rule, key_dim=512, value_dim=512, time=16))
    with pytest.raises(ValueError, match=r"'W1': \(512, 2048\).*more than"):
        jax.eval_shape(lambda params, *rest: PALLAS(rule, params, None, *rest), *wide)
    wide, q, *_ = jax.eval_shape(lambda: make_inputs(rule, key_dim=256, value_dim=256, time=16))
    reason = lambda rule, dtype: kernels.unsupported("pallas_tpu", rule, wide, None, q.update(dtype=dtype), False)
    assert "1,048,576 numbers per head, more than 655,360" in reason(rule, jnp.dtype("float32"))
    assert "1,048,576 numbers per head, more than 655,360" in reason(rule.unbounded(), jnp.dtype("float32"))
    assert reason(rule, jnp.dtype("bfloat16")) is None
    assert "more than 655,360" in reason(dataclasses.replace(rule, chunk_size=256), jnp.dtype("bfloat16"))


@pytest.mark.parametrize(
    ("implementation", "name"),
    [
        ("xla", "delta_rule"),
        if_slow("pallas_tpu", "delta_rule_chunk8"),  # test_kernel_step.py has a whole step
        if_slow("xla", "titans_matrix"),
        if_slow("xla", "titans"),
        if_slow("pallas_tpu", "titans"),
    ],
)
def test_partitioned_over_a_mesh(implementation, name, interpreted):
    """Each device takes its batch elements and heads; parameters' gradients are summed over the batch's devices."""
    rule = RULES[name]
    params, *rest = make_inputs(rule, batch=4, time=11)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    partition = Partition(mesh, ("data",), ("tensor",))
    place = lambda spec, x: jax.device_put(x, NamedSharding(mesh, spec))
    sharded = place(PartitionSpec("tensor"), params), *place(PartitionSpec("data", None, "tensor"), tuple(rest))
    scan = functools.partial(memory.scan, implementation=implementation, partition=partition)
    found = gradients(scan, rule)(*sharded)
    assert_close(jax.device_get(found), gradients(memory.scan, rule)(params, *rest), 2e-5)
    assert found[0][1][0].sharding.spec == PartitionSpec("data", None, "tensor")


def test_bad_partitions():
    rule = RULES["titans"]
    params, *rest = make_inputs(rule, batch=3, time=8)
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"batch=3 must be divisible by 4, the size of the mesh axes \('data',\)"):
        memory.scan(rule, params, None, *rest, partition=Partition(mesh, ("data",)))
    with pytest.raises(ValueError, match=r"should name different axes of the mesh, which has \('data', 'tensor'\)"):
        Partition(mesh, ("batch",))
    with pytest.raises(
        TypeError, match=r"Partition: batch is 'data'; it must be a tuple of axis names, such as \('data',\)"
    ):
        Partition(mesh, "data")
    assert Partition(mesh, ["data"]) == Partition(mesh, ("data",))
