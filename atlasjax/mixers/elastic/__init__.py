"""Elastic Memory (arXiv 2602.11212): the history is compressed to Legendre coefficients, which attention reads.

`hippo` has the HiPPO matrices and the functions `compress` and `reconstruct`, `banks` the matrices of all blocks of a context,
`sampling` the positions at which the memory is read, and `attention` the layer. All are pure functions and work on their own.

    from atlasjax.mixers.elastic import attention, banks, hippo, sampling

    c = hippo.compress(signal, order=64)                      # [..., time, channels] → [..., 64, channels]
    x = hippo.reconstruct(c, positions, length=time)          # [samples] of [0, time] → [..., samples, channels]

    R = sampling.sampled_reconstruction(540, "exponential", length=8192)
    bank = banks.load(540, block_size=1024, blocks=attention.blocks_needed(8192, 1024))
    y = attention.attention(q, k, v, bank, R)                 # [batch, time ≤ 8192, heads, dim]
"""

from atlasjax.mixers.elastic import attention, banks, hippo, sampling
from atlasjax.mixers.elastic.banks import Bank
from atlasjax.mixers.elastic.config import BlockAttentionConfig, ElasticConfig

__all__ = ["Bank", "BlockAttentionConfig", "ElasticConfig", "attention", "banks", "hippo", "sampling"]
