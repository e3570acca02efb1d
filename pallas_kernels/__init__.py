"""Operations with their reference forms; imports jax only."""
