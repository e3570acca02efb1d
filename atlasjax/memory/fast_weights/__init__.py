"""Memories of weights: matrices and networks that are written by gradients. The main family; its rule is `MemoryRule`."""
