"""The options of commands, one module each, with all checks that need no model.

These modules import neither Flax, Optax, Orbax and Grain nor a tokenizer, so that an error is answered in about the time that jax
takes to be imported. The modules beside this package, which do what a command says, are imported when its options are sound.
"""
