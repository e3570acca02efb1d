"""Where peers go another way than a port would expect (docs/peers.md), and no other test holds what is so here."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import LanguageModel, ModelConfig
from atlasjax.storage import tensors
from pallas_kernels import newton_schulz

pytestmark = pytest.mark.usefixtures("compile_fast")


ROOT = pathlib.Path(__file__).parents[2]


def test_what_the_page_names_is_there():
    """Every test of its last column, and every script."""
    page = (ROOT / "docs/peers.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(named) > 20
    missing = [(file, name) for file, name in named if f"def {name}" not in (ROOT / file).read_text() and name]
    assert not missing
    scripts = set(re.findall(r"`findings/(\w+\.sh)`", page))
    assert scripts == {path.name for path in (ROOT / "findings").glob("*.sh")}


@pytest.mark.parametrize("shape", [(32, 32), (24, 64)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_newton_schulz_adds_no_directions(shape, dtype):
    """A matrix of rank one keeps its rank, in bfloat16 as far as the matrix itself has it; torch's Muon rounds every input."""
    u, v = (jax.random.normal(jax.random.key(i), (size,)).astype(dtype) for i, size in enumerate(shape))
    s = jnp.sign(jnp.outer(u, v)).astype(dtype)  # exact in both dtypes
    values = np.linalg.svd(np.asarray(newton_schulz.newton_schulz(s), np.float64), compute_uv=False)
    assert values[0] > 0.5
    assert values[1] < 1e-3


def test_views_of_arrays_are_saved_as_they_read(tmp_path):
    """safetensors' NumPy half writes the memory behind a view, in its order there."""
    whole = np.arange(24.0, dtype=np.float32).reshape(4, 6)
    views = {
        "transposed": whole.T,
        "strided": whole[:, ::2],
        "reversed": whole[::-1],
        "fortran": np.asfortranarray(whole),
    }
    tensors.save(tmp_path / "views", "arrays", views, {})
    loaded, _ = tensors.load(tmp_path / "views", "arrays")
    assert all(np.array_equal(loaded[name], view) for name, view in views.items())


@pytest.mark.parametrize("mixer", ["mamba", "mamba2", "gated_deltanet", "gla", "rwkv7"])
def test_recurrent_states_are_float32(mixer):
    """Of a bfloat16 model; what a convolution or a shift of tokens keeps are inputs, in the dtype of the model."""
    sizes = {"dim": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    config = ModelConfig(**sizes, mixer=mixer, ffn="none" if mixer.startswith("mamba") else "swiglu", dtype="bfloat16")
    cache = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)).init_cache(1, 8))
    states = jax.tree.leaves(cache, is_leaf=lambda x: hasattr(x, "recurrence"))
    found = [x for x in states if hasattr(x, "recurrence")]
    assert found
    for state in found:
        recurrent = [x.dtype for x in jax.tree.leaves(state.recurrence) if jnp.issubdtype(x.dtype, jnp.floating)]
        inputs = [x.dtype for x in jax.tree.leaves(state.inputs) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert set(recurrent) == {jnp.dtype("float32")}
        assert set(inputs) <= {jnp.dtype("bfloat16")}
