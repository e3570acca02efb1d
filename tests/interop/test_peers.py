"""Imported models against the peers' own PyTorch models with random weights: logits, pieces, packed rows, decoding, bfloat16.

`pytest tests/interop/test_peers.py -n 0 -rP -m "slow or not slow"` prints the differences, which docs/weights.md has.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.generate import SamplingConfig, generate
from atlasjax.interop import export_weights, import_weights
from atlasjax.train.load import load_run
from tests.interop.peer_models import MODELS
from tests.marks import some_slow
from tests.streams import streamed

MODULES = {"transformers": ("torch", "transformers"), "fla.models": ("torch", "transformers", "fla", "triton")}
ROOT = pathlib.Path(__file__).parents[2]


pytestmark = pytest.mark.usefixtures("compile_fast")


# By default one of each of the peers' code paths: a state space, Triton's kernels, a delta rule beside attention. A model takes
# about a minute of one core, most of it compilation and the peer itself.
BY_DEFAULT = ("mamba2, four groups", "gated_deltanet, large eps", "olmo_hybrid, rotated, other heads")


@pytest.fixture(scope="module", params=some_slow(MODELS, MODELS.keys() - set(BY_DEFAULT)))
def peer(request, tmp_path_factory):
    """(the imported run, the peer's folder, what the peer computed)."""
    missing = [x for x in MODULES[MODELS[request.param][0]] if importlib.util.find_spec(x) is None]
    if missing:
        pytest.skip(f"needs the extra 'interop' ({', '.join(missing)})")
    folder = tmp_path_factory.mktemp("peer")
    command = [sys.executable, "-m", "tests.interop.peer_models", str(folder), request.param]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    source = folder / request.param
    reference = dict(np.load(source / "reference.npz"))
    (source / "reference.npz").unlink()
    import_weights(source, folder / "run", tokenizer="byte")
    return load_run(folder / "run"), source, reference


def difference(got, expected):
    """The largest difference relative to the largest number."""
    found = np.abs(np.asarray(got) - expected).max() / np.abs(expected).max()
    print(f"largest difference / largest logit: {found:.1e}")
    return found


def test_logits_of_whole_sequences(peer):
    loaded, _, reference = peer
    assert difference(loaded.model(jnp.asarray(reference["tokens"])), reference["logits"]) < 1e-5


def test_logits_of_prefill_and_decoding(peer):
    """As the peer decodes: the first half at once, then token by token; the peer's own two ways differ by as much."""
    loaded, _, reference = peer
    tokens = jnp.asarray(reference["tokens"])
    first = (tokens.shape[1] + 1) // 2
    model = loaded.model
    graphdef, params = nnx.split(model, nnx.Param)

    @jax.jit
    def decode(params, tokens):
        model = nnx.merge(graphdef, params)
        logits, cache = model.extend(tokens[:, :first], model.init_cache(*tokens.shape))

        def step(cache, token):
            logits, cache = model.extend(token[:, None], cache)
            return cache, logits[:, 0]

        _, after = jax.lax.scan(step, cache, tokens[:, first:].T)
        return jnp.concatenate([logits, jnp.swapaxes(after, 0, 1)], axis=1)

    got = decode(params, tokens)
    assert difference(got, reference["decoded"]) < 1e-5
    assert difference(got, reference["logits"]) < 1e-5


def test_logits_of_pieces(peer):
    """Of several tokens each, against the peer's whole pass: some peers forget their state in such pieces (docs/peers.md)."""
    loaded, _, reference = peer
    tokens = jnp.asarray(reference["tokens"])
    cuts = [0, tokens.shape[1] // 3, 2 * tokens.shape[1] // 3, tokens.shape[1]]

    @nnx.jit
    def read(model, tokens):
        return streamed(model.extend, tokens, model.init_cache(*tokens.shape), cuts)[0]

    assert difference(read(loaded.model, tokens), reference["logits"]) < 1e-5


def test_logits_of_packed_documents(peer):
    """Two documents in a row, against two calls of the peer: their own packed rows leak through recurrent layers."""
    loaded, _, reference = peer
    tokens, cut = jnp.asarray(reference["tokens"]), int(reference["cut"])
    ids = jnp.broadcast_to(jnp.arange(tokens.shape[1]) >= cut, tokens.shape).astype(jnp.int32)
    got = loaded.model(tokens, ids, max_segments=2)
    assert difference(got, reference["documents"]) < 1e-5
    assert (
        np.abs(reference["documents"] - reference["logits"])[:, cut:].max() > 0.01 * np.abs(reference["logits"]).max()
    )


def test_greedy_tokens(peer):
    loaded, _, reference = peer
    got = generate(
        loaded.model, reference["tokens"], reference["greedy"].shape[1], config=SamplingConfig(temperature=0)
    )
    assert np.array_equal(got, reference["greedy"])


def test_bfloat16(peer):
    """Both round activations to 8 bits, at different places: they differ about as much from each other as from float32."""
    _, source, reference = peer
    half_run = source.parent / "half"
    import_weights(source, half_run, tokenizer="byte", dtype="bfloat16")
    half = load_run(half_run)
    got, expected = half.model(jnp.asarray(reference["tokens"])), np.asarray(reference["logits"], np.float64)
    rms = lambda x, axis=None: np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis=axis))
    # Rounding sends single tokens to other experts, which is a jump of the function: there, the median over tokens.
    size = (lambda x: np.median(rms(x, -1))) if half.model.config.has_experts else rms
    ours, theirs = (size(x - expected) / rms(expected) for x in (got, reference["bfloat16"]))
    print(f"root mean square difference from float32 / that of the logits: {ours:.1e}; the peer's own: {theirs:.1e}")
    assert ours < max(0.02, 1.5 * theirs)


def test_export_is_the_peers_folder(peer):
    loaded, source, _ = peer
    out = source.parent / "out"
    export_weights(loaded.config.run_dir, out)
    assert {x.name: x.read_bytes() for x in out.iterdir()} == {x.name: x.read_bytes() for x in source.iterdir()}
