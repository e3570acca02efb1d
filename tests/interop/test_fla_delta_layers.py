"""The mixers of delta rules against flash-linear-attention's own layers with random weights, in Triton's interpreter."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import DeltaProductConfig, GatedDeltaNetConfig, HeadNormConfig, KDAConfig, ModelConfig
from atlasjax.nn.mixers import make_mixer

ROOT = pathlib.Path(__file__).parents[2]
HEADS, KEY = 2, 8
# name → (mixer, value_expansion, what its config changes)
OURS = {
    "gated_deltaproduct": (
        "gated_deltaproduct", 2, {"gated_deltaproduct": DeltaProductConfig(writes=3, value_heads=4)},
    ),
    "gated_deltaproduct, without a forget gate": (
        "gated_deltaproduct", 1, {"gated_deltaproduct": DeltaProductConfig(negative_eigenvalues=False, forget_gate=False)},
    ),
    "comba": ("comba", 2, {}),
    "pgdn": ("pgdn", 1, {"gated_deltanet": GatedDeltaNetConfig(value_heads=4)}),
    "pkda": ("pkda", 2, {"kda": KDAConfig(value_heads=4, gate_bias=True)}),
}  # fmt: skip

pytestmark = pytest.mark.usefixtures("compile_fast")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """Name → x, y and weights of their layer."""
    missing = [x for x in ("torch", "transformers", "fla", "triton", "einops") if importlib.util.find_spec(x) is None]
    if missing:
        pytest.skip(f"needs the extra 'interop' ({', '.join(missing)})")
    folder = tmp_path_factory.mktemp("layers")
    command = [sys.executable, "-m", "tests.interop.fla_delta_layers", str(folder)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return lambda name: dict(np.load(folder / f"{name}.npz"))


def inputs(w, writes):
    """Kernels of projection and convolution, [dim, heads, size] and [width, heads, size]."""

    def joined(names, kind):
        parts = []
        for name in names:
            if f"{name}_{kind}.weight" not in w:
                continue
            x = w[f"{name}_{kind}.weight"]
            n = writes if name in "kv" else 1
            x = x.reshape(n, HEADS, -1, x.shape[-1])
            parts.append(x.transpose(3, 1, 0, 2).reshape(x.shape[-1], HEADS, -1))
        return np.concatenate(parts, -1)

    return {"linear": {"kernel": joined("qkvg", "proj")}, "conv": {"kernel": joined("qkv", "conv1d")}}


def low_rank(w, name, heads):
    """Two matrices, [rank, dim] and [heads · size, rank], perhaps with a bias."""
    up = w[f"{name}.1.weight"]
    wide = {"kernel": up.T.reshape(up.shape[1], heads, -1)}
    if f"{name}.1.bias" in w:
        wide["bias"] = w[f"{name}.1.bias"].reshape(heads, -1)
    return {"down": {"kernel": w[f"{name}.0.weight"].T}, "up": wide}


def curvature(w, step_size, retention):
    return {
        "gates": {"kernel": np.moveaxis(np.stack([w[step_size], w[retention]]), 2, 0)}, "A_log": w["A_log_atk"],
        "dt_bias": w["dt_bias_atk"], "center": w["log_atk_scale"],
    }  # fmt: skip


def preconditioned_kda(w, heads):
    rates = {"A_log": w["A_log"], "dt_bias": w["dt_bias"].reshape(heads, -1)}
    return {
        "inputs": inputs(w, 1),
        "decay": {"logits": low_rank(w, "f_proj", heads), **rates},
        "gate": low_rank(w, "g_proj", heads),
        "beta": {"kernel": w["b_proj.weight"].T},
        "norm": {"scale": w["o_norm.weight"]},
        "out": {"kernel": w["o_proj.weight"].T},
        "curvature": curvature(w, "b_atk_proj.weight", "a_proj.weight"),
    }


def ours(w, heads, writes):
    """Our parameters from their tensors."""
    if "f_proj.0.weight" in w:
        return preconditioned_kda(w, heads)
    both = (w["b_proj.weight"], *([w["a_proj.weight"]] if "a_proj.weight" in w else []))
    kernel = np.concatenate(both).reshape(-1, heads, both[0].shape[1])
    params = {
        "inputs": inputs(w, writes),
        "gates": {"kernel": np.moveaxis(kernel, 2, 0)},
        "norm": {"scale": w["o_norm.weight"]},
        "out": {"kernel": w["o_proj.weight"].T},
    }
    names = {"A_log": "A_log", "dt_bias": "dt_bias", "decay": "inner_decay", "D": "correction"}
    params |= {to: w[name] for name, to in names.items() if name in w}
    if "log_atk_scale" in w:
        params["curvature"] = curvature(w, "b_atk_proj.weight", "a_atk_proj.weight")
    return params


@pytest.mark.parametrize("name", OURS)
def test_layer(theirs, name):
    saved = theirs(name)
    w = {tensor.removeprefix("weights/"): x for tensor, x in saved.items() if tensor.startswith("weights/")}
    kind, expansion, changes = OURS[name]
    # Their queries are scaled by key_dim^{−1/2}.
    norm = HeadNormConfig(shared=True, eps=1e-3 * KEY)
    config = ModelConfig(
        dim=24, num_heads=HEADS, head_dim=KEY, value_expansion=expansion, dtype="float32", head_norm=norm, **changes
    )
    graphdef, params = nnx.split(nnx.eval_shape(lambda: make_mixer(kind, config, rngs=nnx.Rngs(0))), nnx.Param)
    heads = w["o_proj.weight"].shape[1] // config.value_dim
    writes = w["k_proj.weight"].shape[0] // w["q_proj.weight"].shape[0]
    given = ours(w, heads, writes)
    shapes = lambda tree: jax.tree.map(lambda x: x.shape, tree)
    assert shapes(given) == shapes(nnx.to_pure_dict(params))
    nnx.replace_by_pure_dict(params, given)
    got = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))(params, saved["x"])
    np.testing.assert_allclose(got, saved["y"], rtol=0, atol=2e-6 * np.abs(saved["y"]).max())
