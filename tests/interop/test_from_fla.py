"""Calls of flash-linear-attention's functions, against its slow functions in PyTorch: values, final states, gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from atlasjax import memory
from atlasjax.interop import from_fla, to_fla_state
from atlasjax.interop.fla_functions import PEERS, axes_of
from atlasjax.mixers.delta_product import last_reads

try:
    from tests.interop.fla_naive import close, heads_first, naive, torch

    HAS_FLA = True
except pytest.skip.Exception:  # most tests need it, the refusals do not
    HAS_FLA = False
needs_fla = pytest.mark.skipif(not HAS_FLA, reason="needs the extra 'oracle' (torch, fla-core)")
pytestmark = pytest.mark.usefixtures("compile_fast")

WRITES = 3  # for each token, where there are several
SIZES = {"b": 2, "t": 21, "r": 21 * WRITES, "h": 2, "n": 4, "k": 4, "v": 6}


def grouped(function):
    """For slow functions without groups: each head of q and k serves several of v."""

    def call(q, k, v, *gates, **options):
        repeat = lambda x: x.repeat_interleave(v.shape[2] // q.shape[2], dim=2)
        return function(repeat(q), repeat(k), v, *gates, **options)

    return call


def linear(q, k, v, **options):
    return naive("linear_attn").naive_recurrent_linear_attn(q, k, v, **options)


def retention(q, k, v, **options):
    g = torch.log(1 - 2.0 ** (-5.0 - torch.arange(q.shape[2]))).expand(q.shape[:3])
    y, S = simple_gla(q, k, v, g, **options)
    fresh = naive("retention").naive_retention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    torch.testing.assert_close(simple_gla(q, k, v, g)[0], fresh, rtol=1e-4, atol=1e-5)
    return y, S


def simple_gla(q, k, v, g, g_gamma=None, **options):
    g = g if g_gamma is None else g + g_gamma
    return naive("simple_gla").naive_recurrent_simple_gla(q, k, v, g, **options)


def gla(q, k, v, g, gv=None, **options):
    return naive("gla").naive_recurrent_gla(q, k, v, g, **options)


def delta_rule(q, k, v, beta, **options):
    return heads_first(naive("delta_rule").delta_rule_recurrence)(q, k, v, beta, **options)


def gated_delta_rule(q, k, v, g, beta, **options):
    return grouped(naive("gated_delta_rule").naive_recurrent_gated_delta_rule)(q, k, v, beta, g, **options)


def kda(q, k, v, g, beta, **options):
    return naive("kda").naive_recurrent_kda(q, k, v, g, beta, **options)


def both_decays(q, k, v, g, gk, beta, **options):
    return kda(q, k, v, g[..., None] + gk, beta, **options)


def comba(q, k, v, p, g, beta, **options):
    """The slow chunked form, which is what the kernels compute; the slow recurrence decays first, and is another function."""
    p = p.repeat_interleave(v.shape[2] // p.shape[2], dim=2)
    return grouped(naive("comba").naive_chunk_comba)(q, k, v, p, g, beta, chunk_size=8, **options)


def gdn2(q, k, v, g, b, w, **options):
    return naive("gdn2").naive_recurrent_gdn2(q, k, v, g, b, w, **options)


def pgdn(q, k, v, g_atk, g, beta_atk, beta, **options):
    """Its slow form normalizes q and k."""
    call = naive("precond_gated_delta_rule").naive_recurrent_precond_gated_delta_rule
    return call(q, k, v, g_atk, g, beta_atk, beta, **options)[:2]


def pgdn_by_kernel(q, k, v, g, beta, g_atk, beta_atk, **options):
    return pgdn(q, k, v, g_atk, g, beta_atk, beta, **options)


def pkda(*arrays, **options):
    return naive("precond_kda").naive_recurrent_precond_kda(*arrays, **options)[:2]


def delta_product(q, k, v, g, beta, **options):
    call = naive("gated_delta_product").naive_recurrent_gated_delta_product
    return call(q, k, v, g, beta, q.shape[-1] ** -0.5, num_householder=WRITES, **options)


def momentum(q, k, v, log_alpha, log_mu, beta, eta, initial_state, output_final_state):
    p = k * log_alpha.exp()[..., None]
    S, M = initial_state
    return naive("momentum_delta_rule").recurrent_momentum_delta_rule_ref(
        q, k, v, log_alpha, log_mu, p, beta, eta, initial_S=S, initial_M=M, output_final_state=True
    )


def mesa(q, k, v, g, beta, lamb, h_kk_init, h_kv_init, output_final_state):
    pieces = []  # of the values, which it has as many channels of as of keys
    for part in ([0, 1, 2, 3], [2, 3, 4, 5]):
        exact = naive("mesa_net").naive_mesa_net_exact
        pieces.append(exact(q, k, v[..., part], g, lamb, beta, h_kk_init, h_kv_init[..., part]))
    (y, h_kk, h_kv), (y_rest, _, h_rest) = pieces
    return torch.cat([y, y_rest[..., 2:]], -1), [h_kk, torch.cat([h_kv, h_rest[..., 2:]], -1)]


def dplr(q, k, v, a, b, gk, **options):
    return heads_first(naive("generalized_delta_rule/dplr").dplr_recurrence)(q, k, v, a, b, gk, **options)


def rwkv7(r, w, k, v, a, b, scale=None, **options):
    y, S = dplr(r, k, v, a, b, w, **options)
    return y * r.shape[-1] ** 0.5 if scale == 1 else y, S


def rwkv7_rates(r, w, k, v, kk, a, **options):
    return rwkv7(r, w, k, v, -kk, kk * a, scale=1, **options)


def iplr(q, k, v, a, b, **options):
    return heads_first(naive("generalized_delta_rule/iplr").iplr_recurrence)(q, k, v, a, b, **options)


# Ours → (theirs, options of ours); functions that only another kernel distinguishes are in SAME.
CASES = {
    "chunk_linear_attn": (linear, {"normalize": False}),
    "fused_recurrent_linear_attn": (linear, {}),
    "chunk_retention": (retention, {}),
    "chunk_simple_gla": (simple_gla, {}),
    "parallel_simple_gla": (simple_gla, {}),
    "chunk_gla": (gla, {}),
    "fused_recurrent_gla": (gla, {"gv": None}),
    "chunk_delta_rule": (delta_rule, {}),
    "fused_recurrent_delta_rule": (delta_rule, {}),
    "chunk_gated_delta_rule": (gated_delta_rule, {}),
    "fused_recurrent_gated_delta_rule": (both_decays, {"gv": None}),
    "chunk_kda": (kda, {}),
    "chunk_comba": (comba, {}),
    "fused_recurrent_comba": (lambda q, k, p, v, *gates, **options: comba(q, k, v, p, *gates, **options), {}),
    "chunk_gdn2": (gdn2, {}),
    "chunk_precond_gated_delta_rule": (pgdn, {}),
    "fused_recurrent_precond_gated_delta_rule": (pgdn_by_kernel, {"gk": None, "gv": None}),
    "fused_recurrent_precond_kda": (functools.partial(pkda, x=1.8), {"use_qk_l2norm_in_kernel": False, "x": 1.8}),
    "chunk_gated_delta_product": (delta_product, {"num_householder": WRITES}),
    "chunk_momentum_delta_rule": (momentum, {"p": None, "use_qk_l2norm_in_kernel": False}),
    "chunk_mesa_net": (mesa, {}),
    "chunk_rwkv7": (functools.partial(rwkv7, scale=1), {}),
    "fused_recurrent_rwkv7": (rwkv7, {}),
    "fused_mul_recurrent_rwkv7": (rwkv7_rates, {}),
    "chunk_dplr_delta_rule": (dplr, {}),
    "chunk_iplr_delta_rule": (iplr, {}),
}
WITH_GRADIENTS = ("chunk_kda", "chunk_momentum_delta_rule", "chunk_rwkv7", "chunk_precond_gated_delta_rule")
CURVATURE = ("initial_A_state", "log_atk_scale")  # options of the peer that are arrays here


def inputs(name, leave_out=()):
    """Arrays by the function's names, in its order. Unit keys, so that no recurrence diverges; a and b of an RWKV-7."""
    rng = np.random.default_rng(0)
    found = {}
    for array, axes in PEERS[name].arrays.items():
        shape = tuple(SIZES[axis] for axis in axes.strip("-?"))
        if array in leave_out:
            continue
        if "-" in axes:
            x = np.log(rng.uniform(0.6, 1.0, shape))
        elif array == "lamb":
            x = rng.uniform(0.5, 1.0, shape)
        elif array in ("beta", "beta_atk", "initial_A_state", "eta", "b", "w") or (array == "a" and "kk" in found):
            x = rng.uniform(0.1, 0.9, shape)
        else:
            x = rng.normal(size=shape)
        if array in ("k", "kk", "a", "p") and not (array == "a" and "kk" in found):
            x = x / np.linalg.norm(x, axis=-1, keepdims=True)
        if array == "b" and "a" in found:
            x = -x * found["a"]
        found[array] = x.astype(np.float32)
    return found


def states_of(name):
    """States before a call, by the names of the function's arguments."""
    heads = "n" if any("n" in axes for axes in PEERS[name].arrays.values()) else "h"
    found = {}
    for argument, axes in axes_of(PEERS[name].states.axes).items():
        x = np.random.default_rng(1).normal(
            size=[2 if axis == "2" else SIZES[axis] for axis in axes.replace("n", heads)]
        )
        found[argument] = (x @ x.mT if "kk" in axes else x).astype(np.float32)
    return found


@needs_fla
@pytest.mark.parametrize("name", CASES)
def test_values_states_and_gradients(name):
    theirs, options = CASES[name]
    arrays, start, differentiated = inputs(name, options), states_of(name), name in WITH_GRADIENTS
    tensors = {key: torch.tensor(x, requires_grad=differentiated) for key, x in (arrays | start).items()}
    given = [tensors[key] for key in arrays if key not in CURVATURE]
    named = {key: tensors[key] for key in (*start, *CURVATURE) if key in tensors}
    expected, final = theirs(*given, **named, output_final_state=True)

    def ours(arrays):
        y, state = memory.scan(*from_fla(name, **arrays, **options))
        if "num_householder" in options:
            y = last_reads(y, WRITES)
        S = to_fla_state(name, state)
        return jnp.sum(y**2) + sum(jnp.sum(x**2) for x in jax.tree.leaves(S)), (y, S)

    if not differentiated:
        _, (y, S) = jax.jit(ours)(arrays | start)
    else:
        gradients, (y, S) = jax.jit(jax.grad(ours, has_aux=True))(arrays | start)
        ((expected**2).sum() + (final**2).sum()).backward()
        for key, gradient in gradients.items():
            close(gradient, tensors[key].grad, 2e-5, f"gradient of {key}")
    close(y, expected, 2e-5, "values")
    jax.tree.map(lambda got, want: close(got, want, 2e-5, "final state"), list(S) if isinstance(S, tuple) else S, final)


def test_every_function_has_a_case():
    same = lambda peer: (peer.axes, peer.translate, peer.defaults.get("scale"))
    covered = [same(PEERS[name]) for name in CASES]
    names = [name for name, peer in PEERS.items() if same(peer) not in covered]
    assert names == []


@needs_fla
def test_normalized_and_scaled():
    name = "fused_recurrent_kda"
    arrays, (start,) = inputs(name), states_of(name).values()
    call = from_fla(
        name, **arrays, scale=0.3, use_qk_l2norm_in_kernel=True, initial_state=start.swapaxes(2, 3), state_v_first=True
    )
    y, state = memory.scan(*call)
    unit = lambda x: x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    q, k, *rest = map(torch.tensor, arrays.values())
    given = {"scale": 0.3, "initial_state": torch.tensor(start), "output_final_state": True}
    expected, final = kda(unit(q), unit(k), *rest, **given)
    close(y, expected, 2e-5, "values")
    close(to_fla_state(name, state, state_v_first=True).swapaxes(2, 3), final, 2e-5, "final state")


def test_positional_arguments_are_in_their_order():
    arrays = inputs("chunk_rwkv7")
    by_name, by_place = from_fla("chunk_rwkv7", **arrays), from_fla("chunk_rwkv7", *arrays.values())
    jax.tree.map(np.testing.assert_array_equal, by_name[3:], by_place[3:])
    assert by_place.q.dtype == np.float32
    half = {key: jnp.asarray(x, jnp.bfloat16) for key, x in arrays.items()}
    call = from_fla("chunk_rwkv7", **half)
    assert (call.q.dtype, call.gates.retention.dtype) == (jnp.bfloat16, jnp.float32)


def test_missing_gates_are_ones():
    arrays = inputs("chunk_simple_gla", ("g", "g_gamma"))
    found = from_fla("chunk_simple_gla", **arrays).gates
    assert float(found.retention.min()) == float(found.step_size.max()) == 1.0
    assert float(from_fla("fused_recurrent_delta_rule", **arrays).gates.step_size.min()) == 1.0


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("chunk_kdaa", {}, "Did you mean 'chunk_kda'"),
        ("chunk_kda", {"g": np.zeros((2, 21, 4), np.float32)}, r"\(q, k, v, g, beta\): g has shape \(2, 21, 4\), must be"),
        ("chunk_kda", {"beta": None}, "beta is missing"),
        ("chunk_kda", {"k": np.zeros((2, 20, 2, 4), np.float32)}, r"k has shape .*, must be \[2, 21, 2, 4\]"),
        ("chunk_kda", {"v": np.zeros((2, 21, 3, 6), np.float32)}, "v has 3 heads, must be a multiple of 2"),
        ("chunk_gated_delta_rule", {"g": np.ones((2, 21, 4), np.float32)}, "g is 1 at its largest; a log decay is at most 0"),
        ("chunk_gla", {"head_first": False}, "head_first is False; it has been removed"),
        ("chunk_linear_attn", {}, "normalize is True; it must be False"),
        ("chunk_kda", {"use_gate_in_kernel": True}, "softplus"),
        ("chunk_kda", {"cu_seqlens": np.array([0, 21])}, "segment_ids"),
        ("chunk_kda", {"initial_state": np.zeros((2, 4, 6, 4), np.float32)}, r"must be \[2, 4, 4, 6\]"),
        ("chunk_kda", {"scale": 0}, "scale must be a number > 0"),
        ("fused_recurrent_gla", {"gv": np.zeros((2, 21, 2, 6), np.float32)}, "gv is given"),
        ("chunk_momentum_delta_rule", {"p": np.zeros((2, 21, 2, 4), np.float32)}, "p is given; it must be None"),
        ("chunk_momentum_delta_rule", {"use_p_times_alpha": False}, "use_p_times_alpha is False; it must be True"),
        ("chunk_precond_kda", {"eps": 1e-3}, "eps is 0.001; it must be 1e-6"),
        ("chunk_precond_kda", {"x": 3.0}, "largest"),
        ("chunk_gated_delta_product", {"num_householder": 2}, "q has 21 tokens and k has 63, must be num_householder=2 times"),
        ("chunk_rwkv7", {"a": np.zeros((2, 21, 2, 4), np.float32)}, "b is not 0 where a is"),
    ],
)  # fmt: skip
def test_refused(name, change, message):
    arrays = inputs(name, ("gk", "gv", "p")) if name in PEERS else {}
    with pytest.raises(ValueError, match=message) as refused:
        from_fla(name, **{**arrays, **change})
    assert "\n" not in str(refused.value)


def test_arguments_that_are_none_of_theirs():
    arrays = inputs("chunk_kda")
    with pytest.raises(TypeError, match=re.escape("there is no argument 'gk'")):
        from_fla("chunk_kda", **arrays, gk=arrays["g"])
    with pytest.raises(TypeError, match="got 6 positional arguments, must be at most 5"):
        from_fla("chunk_kda", *arrays.values(), 1.0)
    with pytest.raises(TypeError, match="q is given twice"):
        from_fla("chunk_kda", arrays["q"], **arrays)
    with pytest.raises(TypeError, match="beta must be an array"):
        from_fla("chunk_kda", **{**arrays, "beta": "high"})
