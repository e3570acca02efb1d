"""Initial gate values, chosen so that a rule learns well and at a rate that its chunk tolerates.

`Bound` keeps a memory from diverging whatever the gates. At these values it rarely has an effect: for random keys of unit length
the median step keeps more than 0.9 of its size, for every chunk size and θ (`tests/memory/test_suggested.py`).

Retention: 1/(1 − α) is the time scale of the memory in tokens. Heads start at time scales spaced evenly in logarithm: 32 … 512
tokens (α around 0.99) if a write does not depend on what is already written, as for a matrix memory, or for Muon, whose steps have
a fixed size. A deep memory under gradient descent decays towards W = 0, where its gradient is zero and no write can bring it back,
so its heads start at 512 … 8192 tokens.

Step size (SEMANTICS 1.9). All gradients of a chunk are taken at its start, so a chunk acts as ONE step of gradient descent on the
sum of its losses. Under ℓ2 such steps contract while

    η · b · Γ/(1 − θ) · λ < 2.

- λ is the curvature of one token's loss, the largest squared singular value of ∂M(φ(k))/∂M: ‖φ(k)‖² for a matrix memory.
  Keys have unit length, so ‖φ(k)‖² ≤ Σ_i c_i² (features: φ(k)·φ(k) = Σ_i c_i² ‖k‖^{2i}). For a deep memory at its fan-in start,
  measurements give up to about 2 ‖φ‖². A LayerNorm inside divides by the variance of its input, which is about 1/value_dim at
  depth 1 and a quarter of that for each further layer (GELU halves a small input). The variance fluctuates, so λ is doubled.
  `tests/nn/test_gates.py` measures all of them.
- b tokens of a chunk may have equal keys, and each takes Γ = Σ_j γ_j gradients. A window that begins in the chunk before takes that
  chunk's gradients again at the new memory, so they are not counted twice.
- Momentum adds a gradient 1/(1 − θ) times, also after its chunk has ended. If the same keys follow at once, the next gradients see
  what it has added, and the limit is higher: for b = 1 ηλ < 2 (1 + θ) instead of 2 (1 − θ) (heavy ball, Polyak 1964). The limit
  above is that of keys which come back after momentum has faded, where each return multiplies the error by 1 − η b Γ λ/(1 − θ). It
  is the lowest of all keys that return every n-th chunk, n ≥ 1 (`tests/memory/test_suggested.py`).

`exact` = 1/(b Γ/(1 − θ) · λ) is the step size at which such a chunk, and the momentum after it, would land exactly on its target.
Heads start at half of it, a quarter of the limit, which leaves room for the weights of a deep memory to grow. `Bound` counts a
gradient of momentum H times, because θ may rise to 1 − 1/H, so a token may step by 1/(H Γ λ). With momentum, heads start at no more
than half of this, with a window a quarter: windows of neighbouring tokens overlap, and the bound takes off what is written already.
It is the lower of the two for b < H (1 − θ), up to b = 6 for θ = 0.8 and b = 3 for θ = 0.9 (with a window 12 and 6).

Real keys differ, so a chunk's largest eigenvalue is far below the worst case, and the gate may go up to
max_step = exact · min(4, √(b Γ)). With b = c = 1 and no momentum this is DeltaNet's β = sigmoid, starting at 1/2. MAC, MAG and MAL
write tokens averaged by attention (here or in earlier layers), so the keys of a chunk are similar and the worst case is close.
There (`similar_keys`) the gate goes only up to exact, and it shrinks as momentum grows, by (1 − θ)/(1 − θ at the start), so that
η/(1 − θ), the total step of one gradient, keeps its bound. (Without these two measures, a head of titans-mac-tiny reached weights
of 1e19 after 30 training steps, and one of titans-mal-tiny outputs of 1e30, when its θ rose from 0.92 to 0.99 and the largest
eigenvalue of a chunk's 64 keys from 28 to 58. The norms after the memory hide this from the loss until gradients overflow.)

A write gate β may rise to 1, so step sizes are those for β = 1. It starts at 0.9: close to the rule without it, but where its
sigmoid can still move.

The dot-product loss has no curvature. A matrix memory cannot diverge (A Table 1's linear attention has η = 1), so max_step = 1,
starting at 1/2. In a deep memory the loss has no minimum either: the weights grow by a factor of up to 1 + η ‖φ‖ ‖v‖ per token
(σ' ≤ 1.13), against retention's α. Each gradient counts Γ/(1 − θ) times. So η starts at half of (1 − α)(1 − θ) / (1.13 ‖φ‖ Γ) for
each head, where retention initially outweighs values of unit length, and may go up to 16 times the largest of these.

Muon: NS makes every singular value about 1 (at most 1.13) whatever the gradient, so there is no curvature bound. But each write
moves the weights by η, and a memory with retention α that is always pushed in one direction settles at spectral norm
η / (every · (1 − α)). η starts at half of every · (1 − α), so that this norm is half of that of the weights' fan-in start
(about 1), and may go up to 4 times the largest of these. With α < 1 such a memory is bounded for every η. Without retention, a
time scale of 128 tokens is assumed.

A user-defined optimizer that is not linear in the gradient is assumed to move each weight by about η per step, whatever the
gradient (like sign momentum and Adam). Weights that are always pushed in one direction settle at η / (every · (1 − α)), and η
starts where this is half of the size of an entry at a fan-in start, 1/√D. A user-defined loss is assumed to have at most the
curvature of ℓ2, ∂²ℓ/∂out² ≤ 1.

Longhorn's implicit step contracts for every β. It starts at 1, which corresponds to DeltaNet's 1/2 for keys of unit length, and
may go up to 4. Memora's step passes through the softmax, whose slope is the size of a weight, M ≤ 1: between 1 (all weight on one
entry, the limit above) and 1/D (evenly spread, the start). So λ is divided by √D. RWKV-7's removal rates start at 1/2 (like
DeltaNet's β), and its removal key is the projection itself, of unit length. A cached rule's connector u is the plain projection
(MC §3.1, Eq. 9). It is small at first, so all memories that a token reads start with about the same weight.

For softmax memories see `softmax.suggested`.
"""

import dataclasses
import numbers

import jax.numpy as jnp
import numpy as np

from atlasjax import check
from atlasjax.memory.gates import Gates
from atlasjax.memory.rule import Rule, check_rule

_SHORT, _LONG = (32.0, 512.0), (512.0, 8192.0)  # time scales of retention, in tokens


def suggested_gates(
    rule: Rule,
    *,
    batch_size: int,
    time: int | None,
    num_heads: int,
    key_dim: int,
    value_dim: int | None = None,
) -> Gates:
    """Constant gates for keys of unit length and values of about unit length. The language models start from these values.

    Args:
      rule: any rule of `memory.scan`.
      batch_size, num_heads, key_dim: sizes ≥ 1.
      time: number of tokens ≥ 1. None gives the gates of one token, for `memory.step`.
      value_dim: size of a value. None means key_dim.

    Returns:
      float32 gates [batch, time, heads(, channels)], only those that the rule uses. RWKV-7's removal keys are random, and a cached
      rule's connector is zero, which weights all memories equally; in a model both are functions of the input. Its blend is 1.

    Raises:
      ValueError: a size is less than one.
    """
    value_dim = key_dim if value_dim is None else value_dim
    sizes = {"batch_size": batch_size, "time": time, "num_heads": num_heads, "key_dim": key_dim, "value_dim": value_dim}
    for name, value in sizes.items():
        if value is not None or name != "time":
            check.integer("memory.suggested_gates", name, value, kinds=numbers.Integral)
    check_rule(rule, "memory.suggested_gates")
    values = initial_gates(rule, num_heads, key_dim, value_dim, None).values
    lead = (batch_size, num_heads) if time is None else (batch_size, time, num_heads)
    gates = {}
    for name, channels in rule.gate_channels(key_dim, value_dim).items():
        shape = (*lead, channels) if channels else lead
        if name == "connector":
            gates[name] = jnp.zeros(shape, jnp.float32)
        elif name == "removal_key":
            drawn = np.random.default_rng(0).standard_normal(shape)
            gates[name] = jnp.asarray(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True), jnp.float32)
        else:
            constant = jnp.asarray(values[name] if channels else values[name][:, 0], jnp.float32)
            gates[name] = jnp.broadcast_to(constant, shape)
    return Gates(**gates)


@dataclasses.dataclass(frozen=True)
class InitialGates:
    """Gate values at zero input, and the upper bound of the step size.

    Attributes:
      values: gate → float64 [heads, channels] (1 channel for a gate without a channel axis).
      max_step: the largest η.
      max_steps: η = max_steps · sigmoid(logit), one for each channel of the step size.
      start_scale: initial scale of the memory's weights relative to their fan-in scale, [heads].
    """

    values: dict[str, np.ndarray]
    max_step: float
    max_steps: tuple[float, ...]
    start_scale: np.ndarray


def initial_gates(
    rule: Rule, num_heads: int, key_dim: int, value_dim: int, max_step: float | None, *, similar_keys: bool = False
) -> InitialGates:
    """Initial gate values for each head, derived in the module docstring.

    Args:
      rule: the memory rule.
      num_heads: number of heads.
      key_dim: size of a key.
      value_dim: size of a value.
      max_step: upper bound of the step size. None uses the derived one. Initial step sizes are at most half of it.
      similar_keys: whether the keys of a chunk are expected to be nearly equal.

    Raises:
      ValueError: a user-defined rule has step sizes but no `suggested_steps`.
    """
    sets = [_initial_gates(one, num_heads, key_dim, value_dim, max_step, similar_keys) for one in rule.gate_sets]
    beside = lambda name: np.concatenate([one.values[name] for one in sets], axis=1)
    tops = sum((one.max_steps for one in sets), ())
    return InitialGates({name: beside(name) for name in sets[0].values}, max(tops), tops, sets[0].start_scale)


def _initial_gates(
    rule: Rule, num_heads: int, key_dim: int, value_dim: int, max_step: float | None, similar_keys: bool
) -> InitialGates:
    """`initial_gates` of a rule with one set of gates."""
    channels = rule.gate_channels(key_dim, value_dim)
    scales = np.geomspace(*(_SHORT if rule.forgets_fast else _LONG), num_heads)
    forgetting = 1.0 / scales if "retention" in channels else np.full(num_heads, 1.0 / 128)
    momentum_decay = np.linspace(0.8, 0.9, num_heads)
    # The newest token of the window counts most: γ from about 0.88 to 0.12, Σ γ = c/2.
    size = channels.get("window_weights") or 1
    window_weights = 1.0 / (1.0 + np.exp(-np.linspace(2.0, -2.0, size)))
    window_weights = np.tile(window_weights if size > 1 else 1.0, (num_heads, 1))
    step, derived = rule.suggested_steps(key_dim, value_dim, forgetting, momentum_decay, window_weights, similar_keys)
    top = float(derived if max_step is None else max_step)

    values = {
        "retention": 1.0 - forgetting,
        "step_size": np.minimum(step, 0.5 * top),
        "momentum_decay": momentum_decay,
        "write_size": np.full(num_heads, 0.9),
        "window_weights": window_weights,
        "threshold": np.ones(num_heads),
        "removal_key": np.zeros(num_heads),
        "removal": np.full(num_heads, 0.5),
        "connector": np.zeros(num_heads),
        "blend": np.ones(num_heads),
    }
    shapes = {name: (num_heads, channels[name] or 1) for name in channels}
    return InitialGates(
        {name: np.broadcast_to(np.reshape(values[name], (num_heads, -1)), shape) for name, shape in shapes.items()},
        top,
        (top,) * (channels.get("step_size") or 1),
        rule.start_scale(values["step_size"]),
    )
