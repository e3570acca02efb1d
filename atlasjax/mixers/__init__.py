"""Pure functions that mix tokens: attention, state spaces. No Flax, no configuration."""
