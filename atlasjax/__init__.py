"""atlasjax: sequence models that learn at test time, in JAX."""

__version__ = "0.1.0"
