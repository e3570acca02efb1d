"""Every public function of the cores refuses an argument that is no array of its shape and dtype, wherever it lies in a pytree.

So too arrays that NumPy or JAX would silently read as others: masked ones, those of another byte order, and times. The refusal is
one line that names the argument, before anything is computed.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax import distributed, generate, memory, nn, rules
from atlasjax.data.tokenizers import ByteTokenizer
from atlasjax.evaluate.lm import evaluate as evaluate_batches
from atlasjax.evaluate.lm import evaluate_stream
from atlasjax.evaluate.scoring import Scorer
from atlasjax.mixers import (
    attention,
    block_recurrence,
    convolution,
    curvature,
    delta_product,
    gam,
    infini,
    log_linear,
    mamba,
    mamba2,
    mamba3,
    melodi,
    memorizing,
    rotary,
)  # fmt: skip
from atlasjax.mixers.elastic import attention as elastic
from atlasjax.mixers.elastic import banks, hippo, sampling
from atlasjax.mixers.log_linear import levels
from atlasjax.nn.mixers import make_mixer
from atlasjax.train.loss import cross_entropy_sum
from atlasjax.train.step import eval_sums, loss_sums

B, T, H, D, L, N = 2, 5, 3, 4, 2, 6  # batch, time, heads, channels, block, slots
F32, IDS = np.float32, np.zeros((B, T), np.int32)


def floats(*shape):
    return np.linspace(0.1, 0.9, int(np.prod(shape)), dtype=F32).reshape(shape)


X, ONE, FLAT, KEY = floats(B, T, H, D), floats(B, H, D), floats(B, T, D), jax.random.key(0)


def memory_calls(name, rule, **more):
    params = memory.init_params(rule, KEY, num_heads=H, key_dim=D, value_dim=D)
    state = memory.init_state(rule, params, batch_size=B, max_length=16)
    gates = memory.Gates(
        **{n: floats(B, T, H) if c is None else floats(B, T, H, c) for n, c in rule.gate_channels(D, D).items()}
    )
    given = {"params": params, "state": state, "q": X}
    tokens = {**given, "k": X, "v": X, "gates": gates}
    one = {**tokens, **{n: ONE for n in "qkv"}, "gates": jax.tree.map(lambda x: x[:, 0], gates)}
    yield f"{name} scan", memory.scan, {"rule": rule}, tokens | more
    yield f"{name} step", memory.step, {"rule": rule}, one
    yield f"{name} read", memory.read, {"rule": rule}, given
    yield f"{name} reference", memory.reference, {"rule": rule}, tokens


def elastic_calls():
    bank, r = banks.Bank(floats(3, 8, 8), floats(3, 8, L)), sampling.sampled_reconstruction(8, "uniform")
    state = elastic.init_state(B, 8, L, r, H, D, D, F32)
    given = {"q": X, "k": X, "v": X, "bank": bank, "reconstruction": r}
    yield "elastic.attention", elastic.attention, {}, given | {"segment_ids": IDS}
    yield "elastic.extend", elastic.extend, {}, given | {"state": state}
    yield "elastic.init_state", elastic.init_state, {
        "batch_size": B, "max_length": 8, "block_size": L, "heads": H, "key_dim": D, "value_dim": D, "dtype": F32,
    }, {"reconstruction": r}  # fmt: skip
    yield "hippo.compress", hippo.compress, {"order": 8, "start": 2}, {"signal": FLAT, "coefficients": floats(B, 8, D)}
    yield "hippo.reconstruct", hippo.reconstruct, {}, {"coefficients": floats(B, 8, D), "positions": floats(3)}
    yield "hippo.reconstruction", hippo.reconstruction, {"order": 8}, {"positions": floats(3)}


def block_calls():
    tokens = {"q": X, "k": X, "v": X}
    for module in (infini, memorizing):
        name, more = module.__name__.rpartition(".")[2], {} if module is infini else {"queue_length": 4}
        state = module.init_state(B, *more.values(), L, H, D, D, F32)
        yield f"{name}.attention", module.attention, {"block_size": L, **more}, tokens | {"gate": floats(H)}
        yield f"{name}.extend", module.extend, {}, tokens | {"gate": floats(H), "state": state}
    yield "infini.read", infini.read, {}, {"memory": infini.init_memory(B, H, D, D), "x": X}
    yield "infini.write", infini.write, {}, {"memory": infini.init_memory(B, H, D, D), "k": X, "v": X}
    state = block_recurrence.init_state(B, L, H, D, D, F32)
    yield "block_recurrence.attention", block_recurrence.attention, {"block_size": L}, tokens | {"segment_ids": IDS}
    yield "block_recurrence.extend", block_recurrence.extend, {}, tokens | {"state": state}
    weights = melodi.Weights(
        floats(D, H, 3 * D), floats(H * D, D), floats(2, D), floats(L + 2, 2), floats(2), *(floats(D),) * 3
    )
    yield "melodi.attention", melodi.attention, {}, {"x": FLAT, "weights": weights}
    yield "melodi.extend", melodi.extend, {}, {
        "x": FLAT, "weights": weights, "state": melodi.init_state(B, weights, F32)
    }  # fmt: skip


def mixer_calls():
    cache, window = attention.init_cache(B, 8, H, D, D, F32), attention.init_window(B, 3, H, D, D, F32)
    tokens = {"q": X, "k": X, "v": X}
    persistent = attention.Persistent(floats(2, H, D), floats(2, H, D))
    yield "attention", attention.attention, {}, tokens | {"persistent": persistent, "segment_ids": IDS}
    yield "attention.extend", attention.extend, {}, tokens | {"cache": cache, "persistent": persistent}
    yield "attention.extend, window", attention.extend, {}, tokens | {"cache": window}
    yield "convolution", convolution.causal_convolution, {}, {
        "x": FLAT, "kernel": floats(3, D), "state": floats(B, 2, D), "bias": floats(D), "segment_ids": IDS,
    }  # fmt: skip
    params = gam.Params(floats(3, D), floats(D), floats(N, D), floats(D, 2, D), floats(2, D))
    yield "gam.mix", gam.mix, {}, {"params": params, "x": FLAT, "state": floats(B, 2, D), "segment_ids": IDS}
    yield "gam.associative_read", gam.associative_read, {}, {"x": FLAT, "memory": floats(N, D)}
    ssm = {"x": FLAT, "delta": FLAT, "A": -floats(D, N), "B": floats(B, T, N), "C": floats(B, T, N), "D": floats(D)}
    yield "mamba", mamba.selective_scan, {}, ssm | {"state": floats(B, N, D), "resets": IDS > 0}
    yield "mamba.reference", mamba.reference, {}, ssm | {"state": floats(B, N, D), "resets": IDS > 0}
    groups = {"B": floats(B, T, 1, N), "C": floats(B, T, 1, N)}
    ssd = {"x": X, "delta": floats(B, T, H), "A": -floats(H), **groups, "D": floats(H)}
    yield "mamba2", mamba2.ssd, {}, ssd | {"state": mamba2.init_state(B, H, D, N)}
    yield "mamba2.reference", mamba2.reference, {}, ssd
    ranked = {"x": floats(B, T, 2, H, D), "B": floats(B, T, 2, H, N), "C": floats(B, T, 2, H, N)}
    trapezoids = ranked | {name: floats(B, T, H) for name in ("delta", "A", "blend")} | {"D": floats(H)}
    yield "mamba3", mamba3.trapezoidal_scan, {}, trapezoids | {"state": mamba3.init_state(B, H, D, N, 2)}
    yield "mamba3.reference", mamba3.reference, {}, trapezoids
    turning = {"rate": floats(B, T, 1), "delta": floats(B, T, H), "start": floats(B, H, 1), "segment_ids": IDS}
    yield "mamba3.rotations", mamba3.rotations, {}, turning
    yield "mamba3.rotate", mamba3.rotate, {}, {"x": ranked["B"], "turns": floats(B, T, H, 1)}
    weights, state = floats(B, T, H, levels.num_levels(T)), log_linear.init_state(B, H, D, D, 16)
    yield "log_linear", log_linear.attention, {}, tokens | {"weights": weights, "retention": floats(B, T, H)}
    stream = {"weights": floats(B, T, H, state.states.shape[2]), "state": state}
    yield "log_linear.extend", log_linear.extend, {}, tokens | stream
    yield "log_linear.segment_weights", log_linear.segment_weights, {}, {"connector": X, "keys": X, "segment_ids": IDS}
    sums = {"step_size": floats(B, T, H), "retention": floats(B, T, H), "center": floats(H)}
    yield "curvature", curvature.preconditioned_keys, {}, {"k": X, **sums, "segment_ids": IDS}
    yield "curvature", curvature.preconditioned_keys, {}, {"k": X, **sums, "state": floats(B, H, D)}
    writes = {"k": floats(B, T, 2, H, D), "v": floats(B, T, 2, H, D)}
    gates = memory.Gates(retention=floats(B, T, H), step_size=floats(B, T, 2, H))
    rows = {**tokens, **writes, "segment_ids": IDS}
    yield "delta_product.interleaved", delta_product.interleaved, {"gates": gates}, rows
    yield "delta_product.last_reads", delta_product.last_reads, {"writes": 5}, {"y": X}
    yield "rotary", rotary.rotate, {}, {"x": X, "position": IDS}


GROUPS = {
    "a memory": lambda: memory_calls("titans", rules.titans(chunk_size=4), segment_ids=IDS),
    "a softmax memory": lambda: memory_calls("dot", rules.dot(chunk_size=4)),
    "a cached memory": lambda: memory_calls(
        "cached", memory.CachedRule(rules.delta_rule(), "grm", segment_size=4, capacity=4)
    ),
    "levels of memories": lambda: memory_calls("levels", memory.LogLinearRule(rules.delta_rule(), segment_size=4)),
    "elastic memory": elastic_calls,
    "memories of blocks": block_calls,
    "mixers": mixer_calls,
}

SILENT = {
    "masked": lambda x: np.ma.MaskedArray(np.asarray(x), mask=np.zeros(x.shape, bool)),
    "big-endian": lambda x: np.asarray(x).astype(np.asarray(x).dtype.newbyteorder(">")),
    "durations": lambda x: np.asarray(x).astype(int).astype("timedelta64[s]"),
}
WRONG = {
    "missing": lambda x: None,
    "text": lambda x: "text",
    "list": lambda x: np.asarray(x).tolist(),
    "complex": lambda x: np.asarray(x).astype(np.complex64),
    "objects": lambda x: np.asarray(x).astype(object),
    "records": lambda x: np.zeros(x.shape, [("a", F32)]),
    "dates": lambda x: np.asarray(x).astype(int).astype("datetime64[s]"),
    "another rank": lambda x: np.asarray(x)[..., None],
    "keys": lambda x: jax.random.split(KEY, x.shape),
}
OPTIONAL = {"segment_ids", "persistent", "bias", "D", "resets", "retention", "reconstruction"}
TREES = {"None": None, "a dict": {}, "text": "text", "a number": 1.0, "an empty tuple": (), "an object": object()}


def refusal(function, fixed, arrays):
    """The message, None if the call is accepted."""
    try:
        function(**fixed, **arrays)
    except (TypeError, ValueError) as error:
        return str(error)
    return None


def spoilt(arrays, kinds):
    """The arguments with one array spoilt: (argument, what was done, arguments)."""
    for name, tree in arrays.items():
        leaves, structure = jax.tree.flatten(tree)
        for i, leaf in enumerate(leaves):
            for kind, make in kinds.items():
                if kind == "big-endian" and leaf.dtype.itemsize == 1:  # it has no order of bytes
                    continue
                changed = jax.tree.unflatten(structure, [*leaves[:i], make(leaf), *leaves[i + 1 :]])
                yield name, f"{name}[{i}] {kind}", arrays | {name: changed}
        for kind, other in TREES.items():
            yield name, f"{name} is {kind}", arrays | {name: other}


def may_be(name, what, arrays):
    """Whether that argument is one that a call accepts."""
    leaf = not isinstance(arrays[name], tuple)
    if name in OPTIONAL and (what.endswith("is None") or (leaf and what.endswith("missing"))):
        return True
    if name == "center" and what.endswith("a number"):
        return True
    return name in ("coefficients", "positions", "signal", "x") and what.endswith(
        ("another rank", "list")
    )  # any rank; numbers


def begins(call, what):
    """Whether a call without a state begins with a fresh one."""
    optional = call.endswith(("scan", "reference", "rotations", "mamba", "mamba2", "mamba3", "gam.mix", "curvature"))
    return optional and what.endswith(("None", "missing"))


@pytest.mark.parametrize("group", GROUPS)
def test_every_array_of_every_argument(group):
    wrong = []
    for call, function, fixed, arrays in GROUPS[group]():
        for name, what, changed in spoilt(arrays, SILENT | WRONG):
            if may_be(name, what, arrays) or (name in ("state", "start") and begins(call, what)):
                continue
            said = refusal(function, fixed, changed)
            fields = getattr(arrays[name], "_fields", ())
            if said is None or "\n" in said or not any(part in said for part in (name, *fields)):
                wrong.append((call, what, said))
    assert not wrong, wrong[:5]


@pytest.fixture(scope="module")
def model():
    config = nn.ModelConfig(vocab_size=16, dim=8, num_layers=1, num_heads=2, mlp_dim=8, mixer="attention")
    return nn.LanguageModel(config, rngs=nnx.Rngs(0))


BYTES = np.ones(16, np.int64)


def model_calls(model, spoil):
    """What → a call with one array spoilt."""
    tokens, weights = np.arange(10, dtype=np.int32).reshape(2, 5), np.ones((2, 5), F32)
    bad, cache = spoil(tokens), model.init_cache(2, 8)
    batch = {"inputs": tokens, "targets": tokens, "weights": weights}
    graphdef, params = nnx.split(model, nnx.Param)
    hidden = floats(2, 5, 8)
    yield "tokens", lambda: model(bad)
    yield "segment_ids", lambda: model(tokens, spoil(np.zeros_like(tokens)))
    yield "tokens", lambda: model.extend(bad, cache)
    yield "cache", lambda: model.extend(tokens, jax.tree.map(lambda x: spoil(np.asarray(x)), cache))
    yield "prompt", lambda: generate.generate(model, bad, 2)
    yield "prompt", lambda: generate.generate(model, list(bad), 2)
    yield "prompt", lambda: generate.read(model, [bad[0], bad[1, :2]])
    yield "index", lambda: generate.Context(cache, None, None, np.ones(2), 8).rows(spoil(np.arange(2)))
    yield "logits", lambda: generate.sample(spoil(floats(2, 16)), KEY, generate.SamplingConfig())
    yield "tokens", lambda: evaluate_stream(model, bad, BYTES)
    yield "bytes_per_token", lambda: evaluate_stream(model, tokens, spoil(BYTES))
    yield "context", lambda: Scorer(model).score([(bad[0], tokens[1])])
    yield "prompt", lambda: Scorer(model).read([bad[0]])
    yield "batch['inputs']", lambda: evaluate_batches(None, None, [batch | {"inputs": bad}])
    yield "batch['weights']", lambda: loss_sums(graphdef, params, batch | {"weights": spoil(weights)})
    yield "targets", lambda: cross_entropy_sum(model.logits, hidden, bad, weights)
    yield "bytes_per_token", lambda: eval_sums(graphdef, spoil(BYTES))
    yield "batch['targets']", lambda: distributed.global_batch(batch | {"targets": bad}, None)
    yield "x", lambda: nn.RMSNorm((8,), ("embed",), 1e-6)(spoil(hidden))
    yield "x", lambda: nn.Linear((8, 4), ("embed", "mlp"), rngs=nnx.Rngs(0))(spoil(hidden))
    yield "ids", lambda: ByteTokenizer().decode(bad[0])


@pytest.mark.parametrize("kind", SILENT)
def test_a_model_and_what_reads_text_with_it(model, kind):
    says = {
        "masked": "must be an ordinary array, got a masked one",
        "big-endian": "must be an array in this machine's byte order",
        "durations": "must be an array of numbers, got times (timedelta64[s])",
    }[kind]
    for argument, call in model_calls(model, SILENT[kind]):
        said = refusal(lambda call=call: call(), {}, {})
        assert said is not None, argument
        assert f"{argument.partition('[')[0]}" in said
        assert says in said
        assert "\n" not in said


def test_tokens_that_are_no_integers(model):
    tokens = np.ones((1, 3))
    for wrong in (
        tokens,
        tokens.astype(bool),
        tokens.astype(complex),
        tokens.astype(object),
        tokens.astype(str),
        tokens * np.nan,
    ):
        for call in (model, lambda x: generate.generate(model, x, 1), lambda x: evaluate_stream(model, x, BYTES)):
            assert "\n" not in (refusal(call, {}, {"tokens" if call is model else "x": wrong}) or "\n")
    for wrong in (tokens.astype(np.uint64) * 2**40, -tokens.astype(int), tokens.astype(int) * 16):
        for call in (model, lambda x: generate.generate(model, x, 1), lambda x: evaluate_stream(model, x, BYTES)):
            assert "vocab" in (refusal(call, {}, {"tokens" if call is model else "x": wrong}) or "")


def test_a_cache_of_another_model_or_none(model):
    tokens, cache = np.zeros((2, 1), np.int32), model.init_cache(2, 8)
    for wrong, says in (
        (None, "cache must be a KVCache, got NoneType"),
        ({}, "cache must be a KVCache, got dict"),
        (cache._replace(keys=None), "cache.keys must be an array, got NoneType"),
        (cache._replace(keys=cache.keys[..., None]), "cache.keys has shape"),
        (cache._replace(position=cache.position.astype(F32)), "cache.position must be int32, got float32"),
        (model.init_cache(3, 8), "batch size"),
        (jax.tree.map(lambda x: x[0], cache), "batch size"),
    ):
        said = refusal(model.extend, {}, {"tokens": tokens, "cache": wrong})
        assert said is not None
        assert says in said
        assert "\n" not in said


@pytest.mark.parametrize(
    "name", ["memory", "mac", "mag", "mal", "mamba2", "gated_deltanet", "elastic", "gam", "attention"]
)
def test_a_mixer_without_its_state(name):
    windows = nn.AttentionConfig(window=4, segment_size=64)
    config = nn.ModelConfig(vocab_size=16, dim=64, num_layers=1, num_heads=2, mlp_dim=8, mixer=name, attention=windows)
    graphdef, params = nnx.split(nnx.eval_shape(lambda: make_mixer(name, config, rngs=nnx.Rngs(0))))
    call = lambda params: nnx.merge(graphdef, params).extend(jnp.ones((2, 1, 64), config.dtype), None)
    said = refusal(lambda: jax.eval_shape(call, params), {}, {})
    assert said is not None
    assert "\n" not in said
    assert "state" in said or "cache" in said
