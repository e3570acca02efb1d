"""`HierarchicalRule`: how a `HierarchicalSpec` is initialized, scanned, stepped and read, by the modules of this package."""

from atlasjax.memory.check import check_range
from atlasjax.memory.hierarchical import init
from atlasjax.memory.hierarchical.reference import reference_scan
from atlasjax.memory.hierarchical.scan import xla_scan
from atlasjax.memory.hierarchical.spec import HierarchicalSpec
from atlasjax.memory.hierarchical.state import HierarchicalParams, HierarchicalState
from atlasjax.memory.hierarchical.step import read_state, xla_step


class HierarchicalRule(HierarchicalSpec):
    """TNT's hierarchical memory (arXiv 2511.07343; SEMANTICS 4.9) around a rule with chunks. Frozen and hashable, static under jit.

    One global memory V is written with chunks of C_G tokens. Local memories W^(i) are written with chunks of C_L^(i) tokens and
    restart from a learned W_init every S tokens, counted from the start of the document. Token t reads

        y_t = M_V(q_t) + Σ_i M_{W^(i)}(P_t q_t),    P_t = Σ_τ k_τ k_τᵀ / ‖k_τ‖²  over the tokens from the restart to t (Eq. 7, 15)

    Every memory is the one after token t's write, as in all rules, and adds its own residual if it has one. A zero key adds nothing
    to P. The S tokens between two restarts (a shard) do not depend on other shards, so `scan` computes the local memories of all
    shards of a sequence at once, as rows of the batch; packed documents, whose shards begin anywhere, are read in order.

    All memories have the same keys, queries and values, and a set of gates each, because a step size that is right for a chunk of
    8 tokens is too large for one of 2,048: gates have a last axis for the memories, the global one first (`gate_channels`). Gates
    that are the same for all are given as `gate[..., None]`.

    Attributes:
      rule: the rule that writes every memory, with chunk sizes of its own instead of `rule.chunk_size`.
      global_chunk: C_G ≥ 1, tokens in a chunk of the global memory.
      local_chunks: C_L ≥ 1 of each local memory, at most C_G.
      restart: S_L, tokens after which local memories restart; a multiple of each of `local_chunks`.
      projected: whether local memories are read at P_t q_t. False: at q_t.
      fine_chunks: C_L' of each local memory in the paper's second stage, in which a trained model goes on with smaller chunks.
        Parameters and gates stay as they were: step sizes are suggested for `local_chunks`. None: `local_chunks`.

    Raises:
      TypeError: `rule` is not a `memory.Rule`.
      ValueError: a rule without chunks or with a state that grows, or a number that is out of range or not a multiple.
    """

    # The functions of this package, with the rule as their first argument.
    init_params, init_state, check_params = init.init_params, init.init_state, init.check_params
    scan_tokens, step_token, read, reference_tokens = xla_scan, xla_step, read_state, reference_scan

    def check_state(
        self, params: HierarchicalParams, state: HierarchicalState, batch: int, heads: int, where: str
    ) -> None:
        super().check_state(params, state, batch, heads, where)
        check_range("state.position", state.position, 0, self.restart, where)
        # States of another number of tokens in a chunk, such as those before the second stage, have the same shapes.
        first, *local = self.members
        first.check_state(params.global_memory, state.global_memory, batch, heads, f"{where}: state.global_memory")
        for i, (rule, own, memory) in enumerate(zip(local, params.local_memories, state.local_memories, strict=True)):
            rule.check_state(own, memory, batch, heads, f"{where}: state.local_memories[{i}]")
