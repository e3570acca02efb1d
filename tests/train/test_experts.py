"""Training mixtures of experts: balance, its metric, and experts that are divided over devices."""

import dataclasses

import chex
import jax
import numpy as np
import pytest

from atlasjax.distributed import MeshConfig
from atlasjax.nn import ExpertsConfig, ModelConfig
from atlasjax.train import accumulated_gradients, fits, loss_sums, train
from atlasjax.train import state as state_lib
from atlasjax.train.balance import balance_loss
from atlasjax.train.reports import metrics as metrics_lib
from tests.train.test_sequence_axis import make_batch, one_step
from tests.train.tiny import config

pytestmark = pytest.mark.usefixtures("compile_fast")

MODEL = ModelConfig(
    dim=32, num_layers=2, num_heads=2, mlp_dim=32, mixer=("attention", "attention"), ffn=("swiglu", "experts"),
    dtype="float32",
    experts=ExpertsConfig(
        8, 2, 16, scores="sigmoid", correction_bias=True, bias_update=0.01, groups=4, top_groups=3, shared_width=16,
        shared_gate=True, balance_loss=0.1,
    ),
)  # fmt: skip


def model(**changes) -> ModelConfig:
    return dataclasses.replace(MODEL, experts=dataclasses.replace(MODEL.experts, **changes))


@pytest.mark.parametrize(
    ("mesh", "microbatches"),
    [
        (MeshConfig(1, expert=4), 1),
        # The tokens, the experts and their widths are divided.
        pytest.param(MeshConfig(1, expert=2, tensor=2, sequence=2), 2, marks=pytest.mark.slow),
        pytest.param(MeshConfig(1, fsdp=2, expert=2), 1, marks=pytest.mark.slow),
    ],
)
def test_a_step_with_divided_experts_is_that_of_one_device(mesh, microbatches):
    metrics, gradients, params = one_step(MODEL, MeshConfig(1), True, microbatches)
    found, found_gradients, found_params = one_step(MODEL, mesh, True, microbatches)
    np.testing.assert_allclose(found["loss"], metrics["loss"], rtol=1e-5)
    chex.assert_trees_all_close(found["expert_share"], metrics["expert_share"], rtol=1e-6)
    chex.assert_trees_all_close(found_gradients, gradients, rtol=1e-3, atol=2e-6)
    chex.assert_trees_all_close(found_params, params, rtol=1e-3, atol=2e-5)
    correction = found_params["layers"]["layer_1"]["mlp"]["correction"]
    np.testing.assert_allclose(np.unique(correction), [-0.01, 0.01], rtol=1e-6)


def test_the_balance_loss_reaches_the_gradient_and_not_the_evaluation():
    graphdef, _ = state_lib.model_shapes(MODEL)
    plain_def, _ = state_lib.model_shapes(model(balance_loss=0.0))
    params = jax.jit(lambda key: state_lib.init_params(MODEL, key))(jax.random.key(0))
    batch = make_batch(False)
    step = jax.jit(accumulated_gradients, static_argnums=(0, 3))
    loss, grads, weight = step(graphdef, params, batch, 1)
    plain, plain_grads, _ = step(plain_def, params, batch, 1)
    assert weight == batch["weights"].sum()
    loads = state_lib.merge(graphdef, params).measure(batch["inputs"], counted=batch["weights"] > 0)[2]
    np.testing.assert_allclose(loss - plain, balance_loss(MODEL, loads), rtol=1e-3)
    assert 0.2 <= loss - plain < 0.4  # 0.1 times 2 experts per token, and what they lack in balance
    router = lambda grads: grads["layers"]["layer_1"]["mlp"]["router"]["kernel"]
    assert np.any(np.abs(router(grads) - router(plain_grads)) > 1e-5)
    total, _ = loss_sums(graphdef, params, batch)
    np.testing.assert_allclose(total / weight, plain, rtol=1e-5)


def test_a_run_records_the_share_of_the_busiest_expert(tmp_path):
    small = model(bias_update=0.0, balance_loss=0.01)
    train(config(tmp_path, model=small, steps=1, data_changes={"validation_fraction": 0.0}))
    (record,) = (r for r in metrics_lib.read(tmp_path / "run/metrics.jsonl") if r["kind"] == "train")
    assert 2 / 8 <= record["expert_share/1"] <= 1
    assert "expert_share/0" not in record


@pytest.mark.parametrize(
    ("changes", "mesh", "message"),
    [
        ({}, {"expert": 3}, "mesh.expert is 3; it should divide model.experts.number, which is 8."),
        ({"ffn": "swiglu"}, {"expert": 2}, "mesh.expert is 2, but the model has no experts."),
    ],
)
def test_a_mesh_that_does_not_fit_the_experts_is_refused(tmp_path, changes, mesh, message):
    run = config(tmp_path, model=dataclasses.replace(MODEL, **changes), data_changes={"batch_size": 12})
    with pytest.raises(ValueError, match=message):
        fits.check_divisible(run, {"data": 1, "fsdp": 1, "tensor": 1, **mesh})
