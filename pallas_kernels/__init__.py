"""Pallas kernels and the reference implementations they are tested against. Imports only jax."""
