"""Pure functions that mix tokens: attention and state-space models. No Flax, no configuration."""
