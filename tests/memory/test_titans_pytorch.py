"""An independent oracle: titans-pytorch with one-token chunks is the c = 1 momentum rule on an MLP (and its Muon relative)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory
from atlasjax.memory import objectives, optimizers, retention, structures
from atlasjax.memory.fast_weights.rule import MemoryRule
from pallas_kernels import newton_schulz

torch = pytest.importorskip("torch", reason="needs the extra 'oracle' (torch, titans-pytorch)")
titans_pytorch = pytest.importorskip("titans_pytorch", reason="needs the extra 'oracle' (torch, titans-pytorch)")

HEADS, DIM, CHUNK, TIME = 2, 4, 5, 20


class ResidualMLP(torch.nn.Module):
    """The memory of A Eq. 42, in PyTorch."""

    def __init__(self):
        super().__init__()
        self.W1 = torch.nn.Parameter(torch.randn(DIM, 2 * DIM) / 3)
        self.W2 = torch.nn.Parameter(torch.randn(2 * DIM, DIM) / 2)

    def forward(self, x):
        return x + torch.nn.functional.gelu(x @ self.W2.mT, approximate="tanh") @ self.W1.mT


@pytest.mark.parametrize("momentum", [True, False])
def test_online_rule_equals_titans_pytorch(momentum, x64):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        theirs = titans_pytorch.NeuralMemory(
            dim=HEADS * DIM,
            dim_head=DIM,
            heads=HEADS,
            chunk_size=1,
            batch_size=CHUNK,
            model=ResidualMLP(),
            momentum=momentum,
            mem_model_norm_add_residual=False,
            default_step_transform_max_lr=0.1,
        )
        x = torch.randn(2, TIME, HEADS * DIM)
        with torch.no_grad():
            expected = theirs(x)[0].numpy()
            queried, stored = theirs.retrieve_norm(x), theirs.store_norm(x)
            heads = lambda y: y.reshape(2, TIME, HEADS, DIM).numpy()
            q, k, v = (
                heads(theirs.to_queries(queried)),
                heads(theirs.to_keys(stored)),
                heads(theirs.to_values(stored)),
            )
            gate = lambda linear: torch.sigmoid(linear[0](stored)).numpy()
            # Their loss is the mean of squares over the head; ours is half the sum.
            gates = memory.Gates(
                retention=1 - gate(theirs.to_decay_factor),
                step_size=gate(theirs.to_adaptive_step) * 0.1 * 2 / DIM,
                momentum_decay=gate(theirs.to_momentum) if momentum else None,
            )
            weights = {
                name: parameter.numpy()
                for name, parameter in zip(theirs.memory_model_parameter_names, theirs.memory_model_parameters)
            }
            read_gate = theirs.retrieve_gate(queried).numpy()
            combine = theirs.combine_heads.weight.numpy()
    finally:
        torch.set_default_dtype(torch.float32)

    rule = MemoryRule(
        structures.MLP(expansion=2),
        objectives.L2(),
        optimizer=optimizers.Momentum() if momentum else optimizers.GradientDescent(),
        retention=retention.Scalar(),
        chunk_size=CHUNK,
        bound=None,
    )
    params = memory.MemoryParams(jax.tree.map(jnp.asarray, weights), None, None)
    args = jax.tree.map(jnp.asarray, (q, k, v, gates))
    for run in (memory.scan, memory.reference):
        y, _ = run(rule, params, None, *args)
        gated = np.asarray(y) * np.moveaxis(read_gate, 1, 2)
        actual = gated.reshape(2, TIME, -1) @ combine.T
        assert np.abs(actual - expected).max() < 1e-13 * np.abs(expected).max()


@pytest.mark.parametrize("shape", [(4, 16), (16, 4), (7, 7)])
def test_newton_schulz_equals_titans_pytorch(shape, x64):
    from titans_pytorch.neural_memory import newtonschulz5

    s = np.random.default_rng(0).standard_normal((2, 3, *shape))  # theirs leaves fewer axes alone
    expected = newtonschulz5(torch.tensor(s)).numpy()
    np.testing.assert_allclose(newton_schulz.newton_schulz(jnp.asarray(s)), expected, rtol=1e-4, atol=1e-6)
