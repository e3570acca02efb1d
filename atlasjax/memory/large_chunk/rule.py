"""`LargeChunkRule`: how a `LargeChunkSpec` is initialized, scanned, stepped and read, by the modules of this package."""

from atlasjax.memory.check import check_range
from atlasjax.memory.fast_weights import init as parameters
from atlasjax.memory.fast_weights.state import MemoryParams
from atlasjax.memory.large_chunk import init
from atlasjax.memory.large_chunk.reference import reference_scan
from atlasjax.memory.large_chunk.scan import xla_scan
from atlasjax.memory.large_chunk.sequence_parallel import scan_part
from atlasjax.memory.large_chunk.spec import LargeChunkSpec
from atlasjax.memory.large_chunk.state import LargeChunkState
from atlasjax.memory.large_chunk.step import read_state, xla_step, xla_step_layer
from atlasjax.memory.rule import Sizes


class LargeChunkRule(LargeChunkSpec):
    """A memory that is written once per chunk of thousands of tokens; SEMANTICS 3.6. Frozen and hashable, static under jit.

    Every token of a chunk reads the memory at the chunk's start, M_{t'}, without the chunk's own writes. These are left to
    attention over at least a chunk, beside the memory (`nn.LaCTMixer`). For every weight W_i, at the end of the chunk:

        y_t = M_{t'}(q_t)
        G_i = Σ_t η_{i,t} (−∇_{W_i} ℓ(M_{t'}; k_t, v_t))         over the chunk's tokens, a step size for each weight
        G_i ← G_i + mean_t(θ_t) G_i of the chunk before           with `momentum`
        W_i ← W_i + NS(G_i)                                       NS only with a `schedule`, once per chunk
        W_i ← each row r of W_i: r / (‖r‖ + 1e-5) · ‖its row in M_0‖     with `row_norm`

    The defaults are those of LaCT (Test-Time Training Done Right, arXiv 2505.23884), whose published models have momentum and
    `schedule="lact"` as well. The core of In-Place TTT (arXiv 2604.06169), a down projection that learns at test time, is

        LargeChunkRule(structures.Matrix(), objectives.DotProduct(), chunk_size=4096, row_norm=False)

    with q = k = h, v = P u, a constant η and M_0 = W_down (`rules.in_place_ttt`).

    The gate `step_size` is [batch, time, heads, weights], in the order of `structure.weight_shapes`. `momentum_decay` is θ.

    An incomplete last chunk is only read, and its sums are in the state, so that the next call completes it. A chunk is written
    as soon as its last token is read. LaCT's code does not write a sequence's last chunk, even if it is complete; no output shows
    this. Packed segments begin chunks of their own.

    A chunk is a few large products, in the dtype of the tokens, and no gradient of one token is formed. Sums, states, row lengths
    and Newton–Schulz are float32 (LaCT's code has Newton–Schulz in bfloat16).

    Attributes:
      structure: the memory M: `SwiGLU`, `Matrix` or another structure, also your own.
      objective: the inner loss ℓ, without keys of its own.
      chunk_size: b ≥ 1, tokens per write. Part of the model.
      momentum: whether a part of the last chunk's G is added, by the gate θ.
      schedule: a name in `pallas_kernels.newton_schulz.SCHEDULES`, of whose coefficients five steps are taken. None: no
        orthogonalization.
      row_norm: whether rows keep the lengths that they have in M_0. A row of zeros, as in a fresh `Matrix`, remains zero.

    Raises:
      ValueError: a choice is out of range, or an objective has keys of its own.
    """

    # The functions of this package, with the rule as their first argument. Parameters are as of a `MemoryRule`: M_0 of each head.
    init_params, init_state, check_params = parameters.init_params, init.init_state, parameters.check_params
    scan_tokens, scan_tokens_part, step_token, step_token_in_layer = xla_scan, scan_part, xla_step, xla_step_layer
    read, reference_tokens = read_state, reference_scan

    def check_state(self, params: MemoryParams, state: LargeChunkState, batch: int, heads: int, where: str) -> None:
        super().check_state(params, state, batch, heads, where)
        # The state of a rule with longer chunks has the same shapes, and would never be written.
        check_range("state.position", state.position, 0, self.chunk_size - 1, where)

    def sizes(self, params: MemoryParams) -> Sizes:
        num_heads, value_dim, _ = params.weights[self.names[0]].shape
        return Sizes(num_heads, parameters.infer_key_dim(self, params), value_dim)
