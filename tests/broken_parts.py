"""A user's own file in which everything is wrong, for the messages."""

import jax.numpy as jnp
import optax


def no_documents():
    return []


def raises_at_once():
    raise KeyError("no key")


class RaisesLater:
    def __len__(self):
        return 64

    def __getitem__(self, index):
        raise RuntimeError("the disk is gone\nand more")


def refuses(rate):
    raise ValueError("decay must be\nin [0, 1)")


def needs_function(rate):
    return optax.lbfgs(rate)


def vector(config, steps):
    return lambda step: jnp.ones(2)


def branches(config, steps):
    return lambda step: 1e-3 if step < 2 else 1e-4


def _with_state(before, after):
    return lambda rate: optax.GradientTransformation(
        lambda params: {"n": before}, lambda updates, state, params=None: (updates, after)
    )


other_dtype = _with_state(jnp.zeros((), jnp.int32), {"n": jnp.zeros((), jnp.float32)})
other_shape = _with_state(jnp.zeros(()), {"n": jnp.zeros(2)})
more_state = _with_state(jnp.zeros(()), {"n": jnp.zeros(()), "m": jnp.zeros(())})
