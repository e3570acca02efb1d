"""A second mixer in every layer, beside the first one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import AttentionConfig, BranchConfig, CachingConfig, MemoryConfig, ModelConfig, RWKV7Config, SSMConfig
from atlasjax.nn.stack import Layer
from atlasjax.storage.tensors import named
from atlasjax.train import state as state_lib
from atlasjax.train.reports.watch import MemoryWatch, what_helps
from atlasjax.train.trainable import marked, replaced, select
from tests.marks import some_slow
from tests.memory.cases import assert_close
from tests.streams import streamed

pytestmark = pytest.mark.usefixtures("compile_fast")

TIME = 13
SMALL = ModelConfig(
    vocab_size=11, dim=8, num_layers=2, num_heads=2, mlp_dim=8, ssm=SSMConfig(state_dim=4, head_dim=8),
    rwkv7=RWKV7Config(value_residual=True, decay_rank=2, rate_rank=2, gate_rank=2, value_rank=2), dtype="float32", remat=False,
)  # fmt: skip
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, TIME)), jnp.int32)
SEGMENTS = jnp.asarray([[0] * 5 + [1] * 8, [0] * 13], jnp.int32)
WINDOW = BranchConfig("swa", attention=AttentionConfig(4))
DEEP = BranchConfig(memory=MemoryConfig("titans", chunk_size=4), num_heads=1, head_dim=4)
CASES = {
    "a deep memory beside Gated DeltaNet": ({"mixer": "gated_deltanet", "num_layers": 1}, DEEP),
    "a window beside Mamba-2": ({"mixer": "mamba2", "ffn": "none", "num_layers": 1}, WINDOW),
    "RWKV-7, whose network has a state": ({"mixer": "rwkv7", "ffn": "channel_mixing", "norm": "layer"}, WINDOW),
    "a pattern with norms after it": ({"mixer": ("gla", "attention"), "block": "post_norm"}, WINDOW),
    "a deep memory beside a matrix": ({"mixer": "memory", "memory": MemoryConfig("omeganet", chunk_size=2)}, DEEP),
    "beside cached memories": ({"mixer": "gla", "caching": CachingConfig.added("grm", 4)}, DEEP),
    "RWKV-7 as the branch": ({"mixer": "rwkv7"}, BranchConfig("rwkv7")),
}


def built(model):
    graphdef, _ = state_lib.model_shapes(model)
    params = state_lib.init_params(model, jax.random.key(1))
    return lambda params: state_lib.merge(graphdef, params), params


@pytest.mark.parametrize("name", some_slow(CASES, set(CASES) - {"RWKV-7, whose network has a state"}))
def test_a_trained_model_starts_as_itself_and_learns_what_was_added(name):
    """With the old parameters and any new ones: equal logits; λ has a gradient at once, and the branch once λ is not 0. Then a
    stream gives the logits of the whole sequence, and a segment sees nothing before it."""
    changes, branch = CASES[name]
    plain = dataclasses.replace(SMALL, **changes)
    (old_model, old), (new_model, new) = built(plain), built(dataclasses.replace(plain, branch=branch))
    new = replaced(new, old)
    added = marked(new, lambda path: path not in named(old))
    assert all(".branch." in path for path in named(select(new, added)))
    is_scale = lambda path: path.endswith(".branch.scale")

    @jax.jit
    def run(old, new):
        def loss(part, new):
            logits = new_model(replaced(new, part))(TOKENS)
            return -jnp.mean(jax.nn.log_softmax(logits[:, :-1])[..., 3]), logits

        start = select(new, added)
        moved = jax.tree.map(lambda x: x + 0.5, select(new, marked(new, is_scale)))
        part = replaced(start, moved)
        both = jax.tree.map(lambda *x: jnp.stack(x), start, part)
        (_, both_logits), slopes = jax.lax.map(lambda part: jax.value_and_grad(loss, has_aux=True)(part, new), both)
        (logits, whole), (at_start, later) = both_logits, (jax.tree.map(lambda x, i=i: x[i], slopes) for i in (0, 1))
        model = new_model(replaced(new, part))
        packed = model(TOKENS, segment_ids=SEGMENTS, max_segments=2)
        pieces, _ = streamed(model.extend, TOKENS, model.init_cache(2, TIME), (0, 6, TIME - 1, TIME))
        after = model(TOKENS[:1, 5:])
        return old_model(old)(TOKENS), logits, at_start, whole, later, packed, after, pieces

    want, logits, at_start, whole, later, packed, after, pieces = run(old, new)
    assert_close(logits, want, 1e-6)
    for path, slope in named(at_start).items():
        assert (np.abs(slope).max() > 0) == is_scale(path), path
    for path, slope in named(later).items():
        assert np.abs(slope).max() > 0, path
    assert np.abs(whole - want).max() > 1e-3
    assert_close(pieces, whole, 1e-5)
    assert_close(packed[1], whole[1], 1e-5)
    assert_close(packed[0, 5:], after[0], 1e-5)


def test_the_sum_is_that_of_both_mixers():
    """One layer without a network, against the two mixers by hand."""
    with_branch = dataclasses.replace(SMALL, num_layers=1, mixer="gla", ffn="none", branch=WINDOW)
    x = jax.random.normal(jax.random.key(2), (1, 6, 8))
    layer = Layer(with_branch, 0, rngs=nnx.Rngs(0))
    layer.branch.scale.set_value(jnp.linspace(-1.0, 1.0, 8))
    y, _ = layer.observe(x, None, None, None, None)
    z = layer.mixer_norm(x)
    assert_close(y, x + layer.mixer(z) + jnp.linspace(-1.0, 1.0, 8) * layer.branch.mixer(z), 1e-6)


def test_memories_of_a_branch_are_followed():
    """Their heads come after those of the layer's own memory, and the advice names their options."""
    model = dataclasses.replace(SMALL, memory=MemoryConfig("titans", chunk_size=4), branch=DEEP)
    new_model, params = built(model)
    sizes = jax.jit(lambda params: new_model(params).observe(TOKENS)[1])(params)
    assert {layer: norm.shape for layer, norm in sizes.items()} == {0: (3,), 1: (3,)}
    beside = dataclasses.replace(model, mixer="gla")
    new_model, params = built(beside)
    sizes = jax.jit(lambda params: new_model(params).observe(TOKENS)[1])(params)
    assert {layer: norm.shape for layer, norm in sizes.items()} == {0: (1,), 1: (1,)}
    assert MemoryWatch(beside, 1.0).helps.startswith("a lower --model.branch.memory.max-step")
    assert "--model.memory.max-step" in MemoryWatch(model, 1.0).helps
    assert "--model.branch.memory.max-step" in MemoryWatch(model, 1.0).helps
    assert MemoryWatch(dataclasses.replace(model, branch=None), 1.0).helps == what_helps(model)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: BranchConfig("swb"), "Unknown mixer 'swb'. Did you mean 'swa'?"),
        (lambda: BranchConfig(num_heads=0), "num_heads"),
        (lambda: BranchConfig("swa"), "mixer 'swa' needs a window"),
        (lambda: BranchConfig(mixer_options={"a": 1}), "are for a mixer of your own"),
        (lambda: "swa", "BranchConfig"),
    ],
)
def test_rejected(make, words):
    with pytest.raises((ValueError, TypeError), match=words.replace("?", r"\?").replace(".", r"\.")):
        state_lib.model_shapes(dataclasses.replace(SMALL, branch=make()))
