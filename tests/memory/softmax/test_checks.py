"""What is not offered or does not fit is named before anything is compiled."""

import jax
import jax.numpy as jnp
import pytest

from atlasjax import memory
from atlasjax.memory import objectives, optimizers, retention, structures
from atlasjax.memory.softmax import SoftmaxRule
from tests.memory.softmax.cases import MATRIX, RULES, make_inputs


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"window": 5, "cache_window": 4}, "window=5 is larger than the cache, cache_window=4"),
        ({"optimizer": optimizers.Muon()}, r"optimizer=Muon.*known for GradientDescent\(\) and Momentum\(\) only"),
        (
            {"structure": structures.GatedMLP()},
            r"structure=GatedMLP.*must be Matrix\(\), or have two matrices, one of which reads",
        ),
        ({"structure": structures.MLP}, r"Give an instance, MLP\(\.\.\.\), not the class"),
        ({"structure": structures.MLP(depth=3)}, r"must be Matrix\(\), or have two matrices"),
        ({"structure": structures.MLP(norm=True)}, "LayerNorm inside is not supported"),
        ({"retention": retention.Channel()}, r"retention=Channel.*known for Full\(\) and Scalar\(\) only"),
        ({"retention": retention.Scalar(decay_first=True)}, "decay_first is not supported"),
        ({"objective": objectives.Huber()}, r"objective=Huber.*needs a loss of M\(φ\*\(k\)\) and v alone"),
        ({"optimizer": optimizers.GradientDescent(per_channel=True)}, "per channel is not supported"),
        ({"cache_window": 0}, "cache_window must be an integer ≥ 1, got 0"),
        ({"chunk_size": 0}, "chunk_size must be an integer ≥ 1, got 0"),
        ({"normalized": 1}, "normalized must be True or False, got 1"),
    ],
)
def test_choices(choices, message):
    with pytest.raises(ValueError, match=message):
        SoftmaxRule(**choices)


def test_sizes_and_lengths():
    init = lambda rule, **sizes: memory.init_params(rule, jax.random.key(0), **sizes)
    with pytest.raises(ValueError, match="key_dim must equal value_dim, got key_dim=4, value_dim=5"):
        init(SoftmaxRule(), num_heads=1, key_dim=4, value_dim=5)
    assert init(SoftmaxRule(MATRIX), num_heads=1, key_dim=4, value_dim=5).weights == {}
    assert (init(SoftmaxRule(), num_heads=2, key_dim=4, value_dim=4).weights["W1"] != 0).all()
    params = init(SoftmaxRule(), num_heads=2, key_dim=4, value_dim=4)
    with pytest.raises(ValueError, match="max_length is None, but this softmax memory keeps every token"):
        memory.init_state(SoftmaxRule(), params, batch_size=1)
    with pytest.raises(ValueError, match="max_length must be an integer ≥ 1, got 0"):
        memory.init_state(SoftmaxRule(), params, batch_size=1, max_length=0)
    assert memory.init_state(RULES["swdt"], init(RULES["swdt"], num_heads=2, key_dim=4, value_dim=4), batch_size=1)


def test_arguments():
    rule = RULES["dot"]
    params, q, k, v, gates = make_inputs(rule)
    state = memory.init_state(rule, params, batch_size=2, max_length=30)
    other = memory.init_state(RULES["swdt"], params, batch_size=2)
    scan = lambda *args, **kwargs: memory.scan(rule, *args, **kwargs)
    with pytest.raises(
        ValueError, match=r"gates.momentum_decay is missing; this rule needs it with shape \[2, 23, 2\]"
    ):
        scan(params, None, q, k, v, gates._replace(momentum_decay=None))
    with pytest.raises(ValueError, match=r"gates\.threshold is given, but this rule has no such gate"):
        scan(params, None, q, k, v, gates._replace(threshold=gates.momentum_decay))
    with pytest.raises(ValueError, match=r"gates.window_weights has shape \(2, 23, 2\), must be \[2, 23, 2, 3\]"):
        scan(params, None, q, k, v, gates._replace(window_weights=gates.momentum_decay))
    with pytest.raises(ValueError, match="k has shape"):
        scan(params, None, q, k[:, 1:], v, gates)
    with pytest.raises(TypeError, match="q must be floating point"):
        scan(params, None, q.astype(int), k, v, gates)
    with pytest.raises(ValueError, match="the same dtype, got q float32 and v bfloat16"):
        scan(params, None, q, k, v.astype(jnp.bfloat16), gates)
    with pytest.raises(ValueError, match="state belongs to another rule"):
        scan(params, other, q, k, v, gates)
    with pytest.raises(ValueError, match=r"state.keys has shape \(2, 2, 30, 4\), must be \[1, 2, 30, 4\]"):
        scan(params, state, q[:1], k[:1], v[:1], jax.tree.map(lambda x: x[:1], gates))
    with pytest.raises(ValueError, match="has weights"):
        scan(make_inputs(RULES["attention"])[0], None, q, k, v, gates)
    with pytest.raises(ValueError, match=r"gates\.retention must be in"):
        scan(params, None, q, k, v, gates._replace(retention=gates.retention + 1), check_gates=True)
    with pytest.raises(ValueError, match=r"Unknown implementation 'xl'\. Did you mean 'xla'"):
        scan(params, None, q, k, v, gates, implementation="xl")
    with pytest.raises(ValueError, match="state is None"):
        memory.step(rule, params, None, q[:, 0], k[:, 0], v[:, 0], jax.tree.map(lambda x: x[:, 0], gates))
