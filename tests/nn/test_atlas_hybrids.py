"""MAC, MAG and MAL around Atlas: the layers of test_hybrids.py with the memory, too, written out in NumPy.

A deep memory (A Eq. 42) on elementwise powers, the Omega rule's window, momentum and Newton–Schulz (A Eq. 32, 33, 57 and 58), with
the gradients of a chunk at its start. Nothing of `atlasjax.memory` runs except the gates.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from atlasjax.nn import MemoryConfig
from atlasjax.nn.mixers import MIXERS
from atlasjax.nn.parameters import values
from tests.memory.test_published_equations import branch, deep_gradient, newton_schulz
from tests.nn import test_hybrids as hybrids

CHUNK, WINDOW = 2, 3
ATLAS = MemoryConfig(
    "atlas", chunk_size=CHUNK, window=WINDOW, features="elementwise", degree=2, expansion=1, newton_schulz_steps=3,
    newton_schulz_every=1, truncation=None, max_step=0.1,
)  # fmt: skip


class AtlasByToken(hybrids.MemoryByToken):
    """Its state: for each head the weights, their momentum and the weights at the chunk's start; and the tokens so far."""

    def __init__(self, heads):
        super().__init__(heads)
        plain = jax.tree.map(lambda x: np.asarray(x, np.float64), values(heads.memory))
        self.coefficients, self.tokens = plain.coefficients, []
        weights = [{name: w[h] for name, w in plain.weights.items()} for h in range(hybrids.HEADS)]
        self.state = [(W, dict.fromkeys(W, 0.0), W) for W in weights]

    def read(self, state, q, u=None):
        out = [c[0] * x + branch(W, self.features(c, x)) for (W, _, _), c, x in zip(state, self.coefficients, q)]
        return np.stack(out)

    def features(self, c, x):
        return np.concatenate([c[0] * x, c[1] * x * x])

    def step(self, q, k, v, gates):
        self.tokens.append((np.asarray(k, np.float64), np.asarray(v, np.float64)))
        t, after = len(self.tokens) - 1, []
        alpha, theta, eta, gamma = (
            np.asarray(g, np.float64)[0]
            for g in (gates.retention, gates.momentum_decay, gates.step_size, gates.window_weights)
        )
        for h, ((W, S, origin), c) in enumerate(zip(self.state, self.coefficients, strict=True)):
            origin = W if t % CHUNK == 0 else origin
            S = {name: theta[h] * S[name] for name in W}
            for j in range(min(WINDOW, t + 1)):
                k, v = (x[h] for x in self.tokens[t - j])
                phi = self.features(c, k)
                slope = deep_gradient(origin, phi, c[0] * k + branch(origin, phi) - v)
                S = {name: S[name] - gamma[h, j] * slope[name] for name in W}
            after.append(({n: alpha[h] * W[n] + eta[h] * newton_schulz(S[n], 3) for n in W}, S, origin))
        self.state = after
        return self.read(self.state, np.asarray(q, np.float64))


@pytest.mark.usefixtures("compile_fast")
@pytest.mark.parametrize("name", ["mac", "mag", "mal"])
def test_layer_is_written_out(name, monkeypatch):
    config = hybrids.make_config("titans", memory=ATLAS)
    graphdef, params = nnx.split(MIXERS[name](config, rngs=nnx.Rngs(0)), nnx.Param)
    rng = np.random.default_rng(7)
    params = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), params)
    x = hybrids.inputs()[:, :9]
    got = jax.jit(lambda p, x: nnx.merge(graphdef, p)(x))(params, x)
    monkeypatch.setattr(hybrids, "MemoryByToken", AtlasByToken)
    hybrids.close(got[1], getattr(hybrids, name)(nnx.merge(graphdef, params), x[1]))
