"""`MesaRule`: how a `MesaSpec` is initialized, scanned, stepped and read, by the modules of this package."""

from atlasjax.memory.mesa import init
from atlasjax.memory.mesa.reference import reference_scan
from atlasjax.memory.mesa.scan import read_cached, read_state, xla_scan, xla_step
from atlasjax.memory.mesa.spec import MesaSpec


class MesaRule(MesaSpec):
    """MesaNet (arXiv 2506.05233): the solution of a ridge regression over all tokens, anew at every token. Frozen and hashable.

        H_t = α_t H_{t−1} + β_t k_t k_tᵀ,  H_0 = 0              [key_dim, key_dim]
        G_t = α_t G_{t−1} + β_t v_t k_tᵀ,  G_0 = W_0 Diag(λ)    [value_dim, key_dim]
        y_t = G_t (H_t + Diag(λ))⁻¹ q_t                         λ = floor + softplus(λ̂) > 0, for each key channel

    α is the gate `retention`, β is `step_size`, both scalars per head. With α = 1 the matrix W = G_t (H_t + Diag(λ))⁻¹ minimizes
    Σ_i β_i ‖W k_i − v_i‖² + Σ_j λ_j ‖W_{·j} − W_{0,·j}‖²: over all tokens, where a delta rule takes one step on the last one. As
    published, W_0 = 0, λ starts at 1, and α, β are in [0, 1]. λ does not decay, so a memory that has forgotten all reads 0.

    Conjugate gradients after n steps leave a share of the error of at most 2 ((√κ − 1)/(√κ + 1))ⁿ, where κ is the condition number
    of H_t + Diag(λ): at most (‖H_t‖ + max λ) / min λ, with ‖H_t‖ ≤ Σ_i α_{i+1} … α_t β_i for keys of unit length. If its
    eigenvalues spread over all scales, 30 steps leave a residual ‖(H_t + Diag(λ)) x_t − q_t‖ / ‖q_t‖ at the rounding of float32 for
    κ = 10, of 1e-5 for 30, 3e-3 for 100 and 0.4 for 1,000. Random keys and keys in few directions are solved. Where α is near 1,
    keys have many scales and λ is far below 1, the steps do not converge, and nothing reports it. "exact" has no such error.

    In fla: chunk_mesa_net(q, k, v, g=log α, beta, lamb=λ), for W_0 = 0. There every quotient has + 1e-5 in its denominator, which
    ends the steps early, and decoding starts them elsewhere than `chunk_mesa_net`. Here both start at x = 0. Gradients are those of
    the solution, by one more solve, and not through the steps.

    Attributes:
      solver: "conjugate_gradient" forms no H_t of a token. "exact" forms and factorizes each, 16 tokens at a time, in
        O(key_dim³) operations for a token.
      steps: number of steps of conjugate gradients, ≥ 1, the same for every token, whole sequences and decoding.
      floor: > 0, the lower bound of λ.

    Raises:
      ValueError: an unknown solver, or a number out of range.
    """

    # The functions of this package, with the rule as their first argument.
    init_params, init_state, check_params = init.init_params, init.init_state, init.check_params
    scan_tokens, step_token, read, read_cached = xla_scan, xla_step, read_state, read_cached
    reference_tokens = reference_scan
