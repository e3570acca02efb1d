"""The baseline mixers: the published formulas, streamed = parallel, causal, segments, gradients, dtypes, initial values."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.memory.fast_weights import kernels, linear_kernels
from atlasjax.nn import (
    CachingConfig,
    KDAConfig,
    Mamba3Config,
    ModelConfig,
    SelfModifyingConfig,
    SSMConfig,
    logical_axes,
)
from atlasjax.nn.mixers import MIXERS
from atlasjax.train.optimizer import decay_mask
from tests import comparisons
from tests.marks import if_slow, some_slow
from tests.nn.cases import BASELINES, FORMS, FORMULAS
from tests.streams import streamed

DIM, HEADS, KEY, BATCH, TIME = 12, 2, 4, 2, 14
EACH = list(dict.fromkeys([*BASELINES, *FORMS]))


pytestmark = pytest.mark.usefixtures("compile_fast")


def make_config(dtype="float32", name=""):
    config = ModelConfig(
        dim=DIM, num_layers=2, num_heads=HEADS, head_dim=KEY, value_expansion=2, dtype=dtype,
        ssm=SSMConfig(state_dim=3, expand=2, head_dim=8),
    )  # fmt: skip
    return dataclasses.replace(config, **FORMS.get(name, (name, {}))[1])


def abstract(name, config):
    return nnx.eval_shape(lambda: MIXERS[name](config, rngs=nnx.Rngs(0)))


@functools.cache
def initial(name, config):
    return jax.jit(lambda: nnx.split(MIXERS[name](config, rngs=nnx.Rngs(0)), nnx.Param)[1])()


@functools.cache
def make(name):
    """(graphdef, params, jitted parallel pass), every parameter moved off its initial value: zeros and ones hide mistakes."""
    config, name = make_config(name=name), FORMS.get(name, (name, {}))[0]
    graphdef = nnx.split(abstract(name, config), nnx.Param)[0]
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), initial(name, config))
    return graphdef, params, jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))


def inputs(time=TIME, seed=0):
    return jax.random.normal(jax.random.key(seed), (BATCH, time, DIM))


close = functools.partial(comparisons.close, tolerance=2e-5)


# One norm for all heads is one code in the three mixers; test_convert.py and test_formulas.py have models with it.
@pytest.mark.parametrize("name", some_slow(EACH, ["deltanet, one norm", "gated_deltanet, one norm", "gla, one norm"]))
def test_layer_is_the_published_formula(name):
    _, params, parallel = make(name)
    got = parallel(params, inputs())
    assert got.shape == (BATCH, TIME, DIM)
    values = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(params))
    for row in range(BATCH):
        formula = FORMULAS[FORMS.get(name, (name, {}))[0]]
        close(got[row], formula(values, np.asarray(inputs()[row], np.float64), make_config(name=name)))


@pytest.mark.parametrize("name", some_slow(EACH, set(FORMS) - {*BASELINES, "mamba2, three groups"}))
def test_streamed_is_parallel(name):
    graphdef, params, parallel = make(name)
    expected = parallel(params, inputs())
    extend = jax.jit(lambda p, x, state: nnx.merge(graphdef, p).extend(x, state))

    def stream(cuts):
        empty = nnx.merge(graphdef, params).init_state(BATCH)
        assert all(leaf.shape[0] == BATCH for leaf in jax.tree.leaves(empty))
        y, state = streamed(functools.partial(extend, params), inputs(), empty, cuts)
        close(y, expected)
        return state

    by_token, by_piece = stream(range(TIME + 1)), stream([0, 6, 7, 13, 14])
    for a, b in zip(jax.tree.leaves(by_piece), jax.tree.leaves(by_token), strict=True):
        close(a, b)


@pytest.mark.parametrize("name", BASELINES)
def test_causal_and_rows_independent(name):
    _, params, parallel = make(name)
    reach = make_config().conv_width if name == "short_conv" else TIME  # a convolution alone sees so many tokens
    before = np.asarray(parallel(params, inputs()))
    for t in (0, 6, TIME - 1):
        after = np.asarray(parallel(params, inputs().at[1, t].add(1.0)))
        assert np.array_equal(after[0], before[0])
        assert np.array_equal(after[1, :t], before[1, :t])
        seen = slice(t, t + reach)
        assert np.abs(after[1, seen] - before[1, seen]).max(axis=1).min() > 1e-6  # by all later tokens in reach


@pytest.mark.parametrize("name", BASELINES)
def test_packed_row_is_its_segments(name):
    graphdef, params, parallel = make(name)
    ids = jnp.array([[0] * 5 + [1] * 4 + [0] * 5, [3] * 5 + [4] * 8 + [7]])  # an id may return: still another segment
    packed = jax.jit(lambda p, x, ids: nnx.merge(graphdef, p)(x, ids, 3))(params, inputs(), ids)
    for row, cuts in enumerate([(0, 5, 9, 14), (0, 5, 13, 14)]):
        for start, stop in itertools.pairwise(cuts):
            alone = parallel(params, jnp.roll(inputs(), -start, axis=1))[row, : stop - start]
            close(packed[row, start:stop], alone)


@pytest.mark.parametrize("name", BASELINES)
def test_every_parameter_learns_and_names_its_axes(name):
    graphdef, params, _ = make(name)
    weights = jax.random.normal(jax.random.key(3), (BATCH, TIME, DIM))
    gradients = jax.jit(jax.grad(lambda p: jnp.sum(weights * nnx.merge(graphdef, p)(inputs()))))(params)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        assert np.all(np.isfinite(gradient)), path
        assert np.all(np.abs(gradient).max() > 1e-6), path
    axes = logical_axes(abstract(name, make_config(name=name)))
    for names, value in zip(jax.tree.leaves(axes), jax.tree.leaves(params), strict=True):
        assert len(names) == value.ndim
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "name", some_slow(BASELINES, set(BASELINES) - {"gla", "gated_deltanet", "mamba", "log_linear"})
)
def test_long_random_input_in_bfloat16(name):
    """2,048 tokens at the initial values: finite, and the first ones are those of float32."""
    half = nnx.split(abstract(name, make_config("bfloat16", name)), nnx.Param)[0]
    # With this seed no token reads next to nothing, where a norm makes much of little (y_0 = ⟨q_0, k_0⟩ v_0).
    params, x = initial(name, make_config(name=name)), inputs(2048, seed=6)
    y = jax.jit(lambda p, x: nnx.merge(half, p)(x.astype(jnp.bfloat16)))(params, x)
    assert y.dtype == jnp.bfloat16
    assert np.all(np.isfinite(np.asarray(y, np.float32)))
    expected = np.asarray(make(name)[2](params, x[:, :TIME]))
    error = np.asarray(y[:, :TIME], np.float32) - expected
    assert np.sqrt(np.mean(error**2)) < 0.02 * expected.std()
    # Far along the sequence outputs are of the size that they start with.
    assert np.asarray(y[:, -TIME:], np.float32).std() < 20 * expected.std()


def parameters(name, dim=64, **changes):
    config = ModelConfig(dim=dim, num_heads=4, ssm=SSMConfig(state_dim=3, head_dim=2), **changes)
    return nnx.to_pure_dict(initial(name, config))


def test_initial_values_are_the_published_ones():
    mamba, mamba2, delta = parameters("mamba"), parameters("mamba2"), parameters("gated_deltanet")
    np.testing.assert_allclose(np.exp(mamba["A_log"]), np.tile([1.0, 2.0, 3.0], (128, 1)), rtol=1e-6)
    for bias in (mamba["step_bias"], mamba2["dt_bias"], delta["dt_bias"], parameters("gdn2")["decay"]["dt_bias"]):
        step = np.log1p(np.exp(bias))
        assert np.all((step > 0.9e-3) & (step < 0.11))
    spread = np.sort(np.log(np.log1p(np.exp(mamba["step_bias"]))))
    np.testing.assert_allclose(spread[[12, 64, 115]], np.log(1e-3) + np.log(100) * np.array([0.1, 0.5, 0.9]), atol=0.7)
    assert np.all((np.exp(mamba2["A_log"]) >= 1) & (np.exp(mamba2["A_log"]) <= 16))
    assert np.exp(mamba2["A_log"]).std() > 2
    assert np.all((np.exp(delta["A_log"]) > 0) & (np.exp(delta["A_log"]) <= 16))
    kda, bounded = parameters("kda")["decay"], parameters("kda", kda=KDAConfig(lower_bound=-5.0))["decay"]
    assert np.all((np.exp(kda["A_log"]) >= 1) & (np.exp(kda["A_log"]) <= 16))
    assert not bounded["A_log"].any()
    assert np.array_equal(kda["dt_bias"].shape, (4, 16))  # of each channel, and those of a head differ
    assert np.log1p(np.exp(kda["dt_bias"])).std(axis=1).min() > 0.01
    assert np.all(parameters("longhorn")["step_bias"] == 0)  # β = 1/2
    mamba3 = nnx.to_pure_dict(initial("mamba3", ModelConfig(dim=8, ssm=SSMConfig(head_dim=4), mamba3=Mamba3Config(4))))
    values = {
        name: np.unique(mamba3[name]).tolist() for name in ("B_bias", "C_bias", "D", "mimo_x", "mimo_z", "mimo_o")
    }
    assert values == {"B_bias": [1], "C_bias": [1], "D": [1], "mimo_x": [0.25], "mimo_z": [1], "mimo_o": [0.25]}
    momentum = parameters("momentum_deltanet")
    np.testing.assert_array_equal(momentum["mu_bias"], momentum["dt_bias"])
    for name, most in {"A_log": 16, "Mu_log": 16, "log_factor": 4, "D_log": 1}.items():
        assert np.all((np.exp(momentum[name]) > 0) & (np.exp(momentum[name]) <= most))
    rwkv = parameters("rwkv7")
    assert np.exp(-np.exp(-0.5) / (1 + np.exp(-rwkv["w"]["bias"]))).max() > 0.995  # some channels remember for long
    assert rwkv["shift"].min() >= 0
    assert rwkv["shift"].max() <= 1


def test_parameter_count_of_the_published_mamba_block():
    """d = 512, expand 3: of 2,542,080 numbers, as in the Mamba baseline of GAM (20,504,576 with embeddings and norm)."""
    config = ModelConfig(dim=512, num_heads=8, ssm=SSMConfig(state_dim=16, expand=3))
    params = nnx.split(abstract("mamba", config), nnx.Param)[1]
    count = sum(int(np.prod(x.shape)) for x in jax.tree.leaves(params))
    assert count == 2_542_080
    assert 6 * count + 10_000 * 512 + 256 * 512 + 2 * 512 == 20_504_576


def test_refuses_sizes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"mixer 'mamba2': ssm.head_dim=7 must divide .* = 24"):
        MIXERS["mamba2"](ModelConfig(dim=12, num_heads=2, ssm=SSMConfig(head_dim=7)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"mixer 'mamba2': ssm.groups=4 must divide the 6 heads"):
        MIXERS["mamba2"](ModelConfig(dim=12, num_heads=2, ssm=SSMConfig(head_dim=4, groups=4)), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"KDAConfig: value_heads=5 must be a multiple of num_heads=2"):
        MIXERS["gdn2"](ModelConfig(dim=12, num_heads=2, kda=KDAConfig(value_heads=5)), rngs=nnx.Rngs(0))
    mamba3 = lambda **fields: MIXERS["mamba3"](ModelConfig(dim=12, num_heads=2, **fields), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"mixer 'mamba3': ssm.head_dim=7 must divide .* = 24"):
        mamba3(ssm=SSMConfig(head_dim=7))
    with pytest.raises(ValueError, match=r"mixer 'mamba3': ssm.groups=4 must divide the 6 heads"):
        mamba3(ssm=SSMConfig(head_dim=4, groups=4))
    with pytest.raises(ValueError, match=r"mixer 'mamba3': ssm.state_dim=2 must be even and at least 4, to be rotated"):
        mamba3(ssm=SSMConfig(2, head_dim=4))
    with pytest.raises(ValueError, match=r"mixer 'mamba3': caching is given, but mamba3.rank is 2; must be 1"):
        mamba3(ssm=SSMConfig(head_dim=4), mamba3=Mamba3Config(2), caching=CachingConfig())
    with pytest.raises(
        ValueError, match=r"mixer 'self_modifying_titans': its heads share out dim=12; num_heads=2, head_dim=8"
    ):
        MIXERS["self_modifying_titans"](ModelConfig(dim=12, num_heads=2, head_dim=8), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="chunk_size=4 and generator_chunk=6 must be such that one is a multiple"):
        SelfModifyingConfig(4, generator_chunk=6)
    with pytest.raises(ValueError, match="mixer 'retnet': head_dim=3 must be even"):
        MIXERS["retnet"](ModelConfig(dim=12, num_heads=4), rngs=nnx.Rngs(0))


def test_weight_decay_leaves_rates_and_steps_alone():
    decayed = {
        name: {
            jax.tree_util.keystr(path)
            for path, yes in jax.tree_util.tree_leaves_with_path(
                decay_mask(logical_axes(abstract(name, make_config(name=name))))
            )
            if yes
        }
        for name in ("mamba", "mamba2", "mamba3", "rwkv7", "kda")
    }
    kernels = lambda *names: {f"['{name}']['kernel'].value" for name in names}
    assert decayed["mamba"] == kernels("inputs", "selection", "step", "out")
    assert decayed["mamba2"] == kernels("inputs", "selection", "step", "out")
    assert decayed["mamba3"] == kernels("inputs", "selection", "gates", "rates", "out")
    assert decayed["rwkv7"] == kernels("r", "k", "v", "out")
    products = ("decay']['logits']['down", "decay']['logits']['up", "gate']['down", "gate']['up")
    assert decayed["kda"] == kernels("inputs']['linear", "beta", *products, "out")


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "name",
    ["gated_deltanet", *map(if_slow, ("mamba2", "mamba3", "rwkv7", "gla", "kda", "gdn2"))],
)
def test_kernels(name, packed, monkeypatch):
    """One matrix per head by the kernels that read it, named in the config; pieces of a stream are read without them."""
    for module, kernel in ((kernels, "chunk_memory"), (linear_kernels, "delta_rule"), (linear_kernels, "linear_rule")):
        monkeypatch.setattr(module, kernel, functools.partial(getattr(module, kernel), interpret=True))
    config = make_config(name=name)
    named = dataclasses.replace(config, memory=dataclasses.replace(config.memory, implementation="pallas_tpu"))
    params, x = make(name)[1], inputs()
    ids = {"segment_ids": jnp.repeat(jnp.arange(2), TIME // 2)[None].repeat(BATCH, 0), "max_segments": 2}
    results = []
    for given in (config, named):
        graphdef = nnx.split(abstract(name, given), nnx.Param)[0]
        run = lambda p, x, graphdef=graphdef: nnx.merge(graphdef, p)(x, **(ids if packed else {}))
        summed = lambda p, x, run=run: (jnp.sum(jnp.sin(y := run(p, x))), y)
        graded = jax.jit(jax.value_and_grad(summed, argnums=(0, 1), has_aux=True))
        assert ("pallas_call" in str(graded.trace(params, x).jaxpr)) == (given is named)
        results.append(graded(params, x))
    jax.tree.map(close, results[1], results[0])
    layer = nnx.merge(graphdef, params)
    extend = lambda x: layer.extend(x, layer.init_state(BATCH))[0]
    assert "pallas_call" not in str(jax.make_jaxpr(extend)(x))


def test_a_baseline_without_a_kernel_refuses_one():
    config = make_config(name="momentum_deltanet")
    named = dataclasses.replace(config, memory=dataclasses.replace(config.memory, implementation="pallas_gpu"))
    layer = MIXERS["momentum_deltanet"](named, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="cannot run this call: chunk_size=1, must be one of"):
        layer(inputs())
