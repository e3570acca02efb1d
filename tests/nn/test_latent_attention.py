"""Multi-head latent attention against its definition: values, gradients, streams, segments, dtypes, divided heads and tokens."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.distributed import MeshConfig, make_mesh
from atlasjax.memory import Partition
from atlasjax.mixers import latent_attention as L
from atlasjax.nn import MLAConfig, ModelConfig, logical_axes
from atlasjax.nn.latent_attention import LatentAttentionMixer
from tests.comparisons import close
from tests.marks import if_slow
from tests.streams import check_rows_apart, streamed

# From nine tokens on a stream expands the keys and values.
BATCH, HEADS, LATENT, SHARED, OWN, VALUE, THETA = 2, 3, 16, 4, 5, 6, 100.0
IDS = np.repeat([[5, 0, 5, 2], [1, 2, 3, 4]], [6, 1, 3, 3], axis=1)  # an id may return: still another segment

pytestmark = pytest.mark.usefixtures("compile_fast")


def arrays(time, dtype=np.float32):
    shapes = {
        "q": (BATCH, time, HEADS, OWN + SHARED), "latent": (BATCH, time, LATENT), "key": (BATCH, time, SHARED),
        "up": (LATENT, HEADS, OWN + VALUE),
    }  # fmt: skip
    rng = np.random.default_rng(time)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def turned(x, position, theta):
    """Pairs (x_i, x_{i + n/2}) of the last axis as complex numbers; x [batch, time, heads, n]."""
    if theta is None:
        return x
    half = x.shape[-1] // 2
    angle = position[..., None, None] * theta ** (-np.arange(half) / half)
    z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return jnp.concatenate([z.real, z.imag], axis=-1)


def definition(q, latent, key, up, theta, ids=None):
    """Every token's keys and values of every head, all scores, one softmax."""
    time = q.shape[1]
    ids = np.zeros((BATCH, time), int) if ids is None else ids
    number = np.cumsum(np.diff(ids, axis=1, prepend=ids[:, :1]) != 0, axis=1)
    position = np.array([[t - np.flatnonzero(row == row[t])[0] for t in range(time)] for row in number])
    expanded = jnp.einsum("bsc,chd->bshd", latent, up)
    shared = jnp.tile(turned(key[:, :, None], position, theta), (1, 1, HEADS, 1))
    keys = jnp.concatenate([expanded[..., :OWN], shared], axis=-1)
    queries = jnp.concatenate([q[..., :OWN], turned(q[..., OWN:], position, theta)], axis=-1)
    visible = np.tri(time, dtype=bool) & (number[:, :, None] == number[:, None])
    scores = jnp.einsum("bthd,bshd->bhts", queries, keys) / (OWN + SHARED) ** 0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshv->bthv", weights, expanded[..., OWN:])


def graded(f, x):
    """(value, gradients) of a weighted sum of f's output, and the output."""
    weights = np.cos(np.arange(BATCH * x["q"].shape[1] * HEADS * VALUE)).reshape(BATCH, -1, HEADS, VALUE)
    total = lambda x: (lambda y: (jnp.sum(weights.astype(y.dtype) * y), y))(f(**x))
    (_, y), gradients = jax.value_and_grad(total, has_aux=True)(x)
    return y, gradients


@functools.cache
def exact(time, theta, packed):
    """The definition in float64: the output and the gradients."""
    with jax.enable_x64(True):
        ids = IDS if packed else None
        found = jax.jit(lambda x: graded(lambda **x: definition(**x, theta=theta, ids=ids), x))(
            arrays(time, np.float64)
        )
        return jax.tree.map(np.asarray, found)


@pytest.mark.parametrize(("time", "theta", "packed"), [(13, THETA, True), (13, None, False), if_slow(300, None, False)])
def test_values_and_gradients(time, theta, packed):
    """Of whole sequences, and of a stream in two pieces, which share no code but the read."""
    x, ids = arrays(time), jnp.asarray(IDS) if packed else None

    def in_pieces(up, **x):
        empty = L.init_cache(BATCH, time, LATENT, SHARED, jnp.float32)
        extend = lambda x, cache: L.extend(**x, up=up, cache=cache, rope_theta=theta)
        return streamed(extend, x, empty, [0, time // 2, time])[0]

    whole = lambda **x: L.latent_attention(**x, rope_theta=theta, segment_ids=ids)
    forms = (whole,) if packed else (whole, in_pieces)
    for y, gradients in jax.jit(lambda x: [graded(form, x) for form in forms])(x):
        close(y, exact(time, theta, packed)[0])
        for name, gradient in gradients.items():
            close(gradient, exact(time, theta, packed)[1][name], 2e-5)


@functools.partial(jax.jit, static_argnames="layer")
def extend(x, cache, up, layer=None):
    return L.extend(**x, up=up, cache=cache, rope_theta=THETA, layer=layer)


def stream(x, cuts, cache, layer=None):
    of_tokens = {name: x[name] for name in ("q", "latent", "key")}
    return streamed(functools.partial(extend, up=x["up"], layer=layer), of_tokens, cache, cuts)


def test_every_split_of_a_stream():
    x, (expected, _) = arrays(13), exact(13, THETA, False)
    empty = L.init_cache(BATCH, 13, LATENT, SHARED, jnp.float32)
    for cut in range(1, 13):
        close(stream(x, [0, cut, 13], empty)[0], expected)
    by_token, cache = stream(x, range(14), empty)
    close(by_token, expected)
    assert cache.latents.shape == (BATCH, 13, LATENT + SHARED)
    # The second one of three layers, few and many queries at a time; the others' latents stay.
    layers = jax.tree.map(lambda a: jnp.stack([a, a, a]), empty)
    for cuts in (range(14), (0, 13)):
        y, after = stream(x, cuts, layers, 1)
        close(y, expected)
        close(after.latents[1], cache.latents)
        assert not after.latents[np.array([0, 2])].any()
        assert np.array_equal(after.position, [[0, 0], [13, 13], [0, 0]])


def test_tokens_beyond_a_full_cache_are_nan_and_rows_may_be_apart():
    x, (expected, _) = arrays(13), exact(13, THETA, False)
    full = L.init_cache(BATCH, 9, LATENT, SHARED, jnp.float32)
    y, _ = stream(x, [0, 4, 13], full)
    close(y[:, :9], expected[:, :9])
    assert np.all(np.isnan(y[:, 9:]))
    empty = L.init_cache(BATCH, 13, LATENT, SHARED, jnp.float32)
    check_rows_apart(functools.partial(extend, up=x.pop("up")), x, expected, empty, [3, 7], [[0, 1, 6]])


def test_bfloat16():
    """Both forms are about as far from float64 as rounded inputs are."""
    x = {name: jnp.asarray(value, jnp.bfloat16) for name, value in arrays(13).items()}
    empty = L.init_cache(BATCH, 13, LATENT, SHARED, jnp.bfloat16)
    whole = jax.jit(lambda x: L.latent_attention(**x, rope_theta=THETA))(x)
    with jax.enable_x64(True):
        rounded = {name: np.asarray(value, np.float64) for name, value in x.items()}
        expected = np.asarray(definition(**rounded, theta=THETA))
    for y in (whole, stream(x, [0, 6, 13], empty)[0]):
        assert y.dtype == jnp.bfloat16
        error = np.asarray(y, np.float64) - expected
        assert np.sqrt(np.mean(error**2)) < 0.01 * expected.std()


def test_tokens_divided_over_devices():
    sizes = {"data": 2, "sequence": 4}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    ids = jnp.asarray([[0] * 4 + [1] * 9 + [2] * 11, [0] * 12 + [1] * 12])
    run = jax.jit(
        lambda x, partition: graded(
            lambda **x: L.latent_attention(**x, rope_theta=THETA, segment_ids=ids, partition=partition), x
        ),
        static_argnums=1,
    )
    divided = run(arrays(24), Partition(mesh, ("data",), time=("sequence",)))
    jax.tree.map(close, divided, run(arrays(24), None))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": np.zeros((BATCH, 5, 3), np.float32)}, "shared_dim is 3, must be even for rotary positions"),
        ({"key": np.zeros((BATCH, 6, SHARED), np.float32)}, r"key has shape \(2, 6, 4\), must be .*time=5"),
        ({"up": np.zeros((LATENT, HEADS, OWN), np.float32)}, "q has 9 channels and key 4; up should have .* it has 5"),
        ({"latent": np.zeros((BATCH, 5, 7), np.float32)}, r"up has shape \(16, 3, 11\), must be .*latent_dim=7"),
    ],
)
def test_bad_input_is_named(changes, words):
    with pytest.raises(ValueError, match=words):
        L.latent_attention(**(arrays(5) | changes), rope_theta=THETA)


def test_a_wrong_cache_is_named():
    x = arrays(5)
    with pytest.raises(TypeError, match=r"latent_attention\.extend: cache must be a LatentCache, got NoneType"):
        L.extend(**x, cache=None)
    with pytest.raises(ValueError, match=r"cache.latents has shape \(2, 5, 11\), must be .*latent_dim\+shared_dim=20"):
        L.extend(**x, cache=L.init_cache(BATCH, 5, 7, SHARED, jnp.float32))


# ---- the layer ----

DIM = 12


def layer(dtype="float32", **changes):
    sizes = dict(kv_lora_rank=LATENT, qk_nope_head_dim=OWN, qk_rope_head_dim=SHARED, v_head_dim=VALUE, rope_theta=THETA)
    config = ModelConfig(dim=DIM, num_heads=4, num_layers=2, dtype=dtype, mixer="mla", mla=MLAConfig(**sizes | changes))
    graphdef, params = nnx.split(LatentAttentionMixer(config, rngs=nnx.Rngs(0)), nnx.Param)
    rng = np.random.default_rng(7)
    return graphdef, jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), params)


@pytest.mark.parametrize("rank", [None, 7])
def test_layer_is_the_published_formula(rank):
    graphdef, params = layer(q_lora_rank=rank, num_heads=HEADS, norm_eps=1e-3)
    x, p = np.random.default_rng(1).normal(size=(BATCH, 13, DIM)), nnx.to_pure_dict(params)
    rms = lambda z, scale: z / np.sqrt((z * z).mean(-1, keepdims=True) + 1e-3) * scale
    low = x if rank is None else rms(x @ p["q_down"]["kernel"], p["q_norm"]["scale"])
    latent, key = np.split(x @ p["down"]["kernel"], [LATENT], axis=-1)
    arguments = np.tensordot(low, p["q"]["kernel"], 1), rms(latent, p["latent_norm"]["scale"]), key, p["up"]["kernel"]

    @jax.jit
    def run(params, x):
        mixer = nnx.merge(graphdef, params)
        loss = lambda params: jnp.sum(jnp.sin(nnx.merge(graphdef, params)(x, jnp.asarray(IDS))))
        return (
            mixer(x, jnp.asarray(IDS)),
            mixer(x),
            mixer.extend(x, mixer.init_state(BATCH, 13)),
            jax.grad(loss)(params),
        )

    packed, whole, (streamed, _), gradients = run(params, jnp.asarray(x, jnp.float32))
    with jax.enable_x64(True):
        for y, ids in ((packed, IDS), (whole, None), (streamed, None)):
            expected = np.asarray(definition(*arguments, THETA, ids)).reshape(BATCH, 13, -1) @ p["out"]["kernel"]
            close(y, expected, 2e-5)
    axes = logical_axes(nnx.merge(graphdef, params))
    for names, gradient in zip(jax.tree.leaves(axes), jax.tree.leaves(gradients), strict=True):
        assert len(names) == gradient.ndim
        assert np.abs(gradient).max() > 1e-6


def test_heads_divided_over_devices():
    """Training and decoding on a mesh that divides batch and heads, against no mesh."""
    graphdef, params = layer()
    x = jnp.asarray(np.random.default_rng(2).normal(size=(4, 5, DIM)), jnp.float32)

    def run(params, x):
        mixer = nnx.merge(graphdef, params)
        y, cache = mixer.extend(x[:, :4], mixer.init_state(4, 5))
        z, _ = mixer.extend(x[:, 4:], cache)
        return mixer(x), jnp.concatenate([y, z], axis=1)

    expected = jax.jit(run)(params, x)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, fsdp=1, tensor=4))):
        found = jax.jit(run)(params, x)
    jax.tree.map(close, found, expected)
    close(expected[1], expected[0])


def test_the_layer_refuses_what_it_cannot_do():
    mixer = nnx.merge(*layer())
    with pytest.raises(ValueError, match="mixer 'mla' keeps the latents of every token: max_length is None"):
        mixer.init_state(BATCH)
    with pytest.raises(ValueError, match="qk_rope_head_dim=3 must be even"):
        MLAConfig(qk_rope_head_dim=3)
    with pytest.raises(ValueError, match="the shared key has 1 channels; give an even"):
        LatentAttentionMixer(ModelConfig(dim=12, num_heads=4), rngs=nnx.Rngs(0))
