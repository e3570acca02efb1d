"""Fast-weight memories: matrices and networks written by gradient steps. The main family; its rule is `MemoryRule`."""
