"""Memories that are written once per large chunk: LaCT and In-Place TTT."""

from atlasjax.memory import LargeChunkRule, objectives, structures


def lact(
    chunk_size: int = 2048, expansion: int = 1, momentum: bool = True, schedule: str | None = "lact"
) -> LargeChunkRule:
    """LaCT (Test-Time Training Done Right, arXiv 2505.23884): a SwiGLU memory, written once per chunk, as in its published models.

    W_i ← W_i + NS(G_i), G_i = Σ_t η_{i,t} (−∇_{W_i} ℓ_t)(M_{t'}) + mean_t(θ_t) G_i of the chunk before, with ℓ = −⟨M(k), v⟩ and
    rows that keep their length. Reads are at the chunk's start, y_t = M_{t'}(q_t), so attention over a chunk belongs beside it
    (`nn.LaCTMixer`). LaCT: block_causal_lact_swiglu(w0, w1, w2, q, k, v, lr0, lr1, lr2, chunk_size, use_muon, momentum), where w1,
    w0, w2 and lr1, lr0, lr2 are our W1, W2, W3 and the channels of `step_size`.
    """
    return LargeChunkRule(
        structures.SwiGLU(expansion), objectives.DotProduct(), chunk_size, momentum=momentum, schedule=schedule
    )


def in_place_ttt(chunk_size: int = 4096) -> LargeChunkRule:
    """The core of In-Place TTT (arXiv 2604.06169): the down projection of an MLP learns at test time.

    W_{c+1} = W_c + η Σ_t (P u_t) h_tᵀ over the tokens of chunk c, y_t = W_c h_t, W_0 = W_down. Call it with q = k = h, the MLP's
    hidden layer, v = P u, the projected targets, one head, `MemoryParams({"W": W_down[None]}, None, None)` and a constant
    step size η: 3 in the published models. Their u is a convolution of the MLP's input over two tokens before and after, within
    the chunk; so only whole chunks can be prepared.
    """
    return LargeChunkRule(structures.Matrix(), objectives.DotProduct(), chunk_size, row_norm=False)
