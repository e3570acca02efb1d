"""What the compiled program of a decoded token moves: a cache is read where it lies, and written where it changes."""

import math
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from atlasjax.nn import CachingConfig, LanguageModel, MemoryConfig, ModelConfig

CACHES = {
    "grm": MemoryConfig("titans", chunk_size=8, expansion=2, caching=CachingConfig(segment_size=8)),
    "ssc": MemoryConfig("titans", chunk_size=8, expansion=2, caching=CachingConfig("ssc", segment_size=8)),
    "dot": MemoryConfig("dot", chunk_size=8, expansion=2),
}
MOVES_NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call"}


def every_token(compiled):
    """(name, operation, number of elements) of each array that the program forms at every token.

    Computations are followed from the entry through loops and calls. Not into fusions, of which only the result is formed, nor into
    the branches of conditions, of which those that write a cache run where a segment or chunk ends.
    """
    bodies, body = {}, None
    for line in compiled.splitlines():
        if found := re.match(r"(ENTRY )?%?(\S+) .*\{$", line):
            body = bodies.setdefault("ENTRY" if found[1] else found[2], [])
        elif body is not None:
            body.append(line)
    waiting, seen = ["ENTRY"], set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in bodies:
            continue
        seen.add(name)
        for line in bodies[name]:
            found = re.match(r"\s*(?:ROOT )?%?(\S+) = (\(.*?\)|\w+\[([\d,]*)\]\S*) ([\w-]+)\(", line)
            if not found:
                continue
            if found[4] in ("while", "call"):
                waiting += re.findall(r"(?:body|to_apply)=%?([\w.-]+)", line)
            if found[4] not in MOVES_NOTHING and found[3]:
                yield found[1], found[4], math.prod(map(int, found[3].split(",")))


@pytest.mark.parametrize("name", CACHES)
def test_a_decoded_token_does_not_move_a_layers_cache(name):
    """Neither that of all layers, nor that of one."""
    config = ModelConfig(dim=32, num_layers=3, num_heads=2, ffn="none", vocab_size=64, memory=CACHES[name])
    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    cache = jax.eval_shape(lambda params: nnx.merge(graphdef, params).init_cache(2, 800), params)
    token = jnp.zeros((2, 1), jnp.int32)
    step = jax.jit(lambda params, cache: nnx.merge(graphdef, params).extend(token, cache), donate_argnums=1)
    compiled = step.lower(params, cache).compile().as_text()
    largest = max(jax.tree.leaves(cache), key=lambda leaf: leaf.size)
    formed = list(every_token(compiled))
    assert len(formed) > 20
    assert [one for one in formed if one[2] >= largest.size // config.num_layers] == []
    shape = ",".join(map(str, largest.shape))
    assert f"f32[{shape}]" in compiled
    assert not re.search(rf"= f32\[{shape}\]\S* copy\(", compiled)
