"""Whether packing, padding or streaming changes what a model computes: the largest difference of logits, for each tiny preset.

    JAX_PLATFORMS=cpu python -m experiments.packing.run                              # all tiny presets, made smaller
    JAX_PLATFORMS=cpu python -m experiments.packing.run --presets atlas-tiny gla-tiny

Every number is a difference of logits from those of the document alone, read in one parallel call, over the largest logit:

    chunked          read in uneven pieces
    decoded          read token by token
    packed           in a row with other documents: segments of one token, ids that are left out and ids that return
    padded           with padding before or after it
    unequal          decoded in a batch whose rows have read prompts of unequal length
    others changed   packed and padded, after all tokens of the neighbouring documents and of the padding have changed
    unseparated      packed without `segment_ids`: what the comparisons would show if nothing were separated

A token whose own logits move by more than `TOLERANCE` when the parameters are rounded differently (by one unit in the last place)
cannot be compared in float32, whichever way it is read. Where a difference is above `TOLERANCE`, all is compared again without such
tokens, and the row has their number, `ill_conditioned`.

Rows are lines of results/packing.jsonl. Finished rows are skipped, so the same command resumes a stopped run. The exit code is 1 if
a difference is above `TOLERANCE`.
"""

import argparse
import dataclasses
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from atlasjax.presets import preset_names
from atlasjax.train import state as state_lib
from experiments.packing import batch
from experiments.packing.models import VOCAB, small
from experiments.rows import Row, append_row, by_model, rows_of_recipe

HERE = pathlib.Path(__file__).parent
KINDS = ("chunked", "decoded", "packed", "padded", "unequal", "others changed")
PIECES = (17, 1, 17, 1, 17, 17)  # tokens of the pieces of a stream; each other size is compiled
TOLERANCE = 2e-5
ROUNDINGS = 8  # other roundings of the parameters


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The settings that all rows have in common.

    Attributes:
      seed: of parameters and tokens.
      more: tokens that are decoded after prompts of unequal length.
      max_segments: bound on the segments of a row, more than there are.
    """

    seed: int = 0
    more: int = 7
    max_segments: int = 9


class Model:
    """A small model and its compiled functions."""

    def __init__(self, preset: str, recipe: Recipe):
        config = small(preset)
        graphdef, _ = state_lib.model_shapes(config)
        merge = lambda params: state_lib.merge(graphdef, params)
        self.recipe = recipe
        self.params = jax.jit(lambda key: state_lib.init_params(config, key))(jax.random.key(recipe.seed))
        self.parallel = jax.jit(lambda params, tokens: merge(params)(tokens))
        self.rounded = jax.jit(lambda key: _rounded(self.params, key))
        self.separated = jax.jit(lambda params, tokens, ids: merge(params)(tokens, ids, recipe.max_segments))
        self.extend = jax.jit(lambda params, tokens, cache: merge(params).extend(tokens, cache))
        self.start = lambda rows: merge(self.params).init_cache(rows, batch.TIME)

    def streamed(self, tokens: np.ndarray, pieces: tuple[int, ...]) -> tuple[np.ndarray, dict[int, Any]]:
        """Logits of a stream in pieces, and the cache after each piece by the number of tokens read."""
        cache, found, caches, read = self.start(len(tokens)), [], {}, 0
        for size in pieces:
            logits, cache = self.extend(self.params, tokens[:, read : read + size], cache)
            read += size
            found.append(logits)
            caches[read] = cache
        return np.concatenate(found, axis=1), caches

    def sensitivity(self, tokens: np.ndarray, alone: np.ndarray) -> np.ndarray:
        """How far other roundings of the parameters move a token's logits at most, float32 [documents, TIME]."""
        keys = jax.random.split(jax.random.key(self.recipe.seed), ROUNDINGS)
        moved = [np.asarray(self.parallel(self.rounded(key), tokens)) - alone for key in keys]
        return np.max([np.abs(x).max(axis=-1) for x in moved], axis=0)

    def unequal(self, tokens: np.ndarray, caches: dict[int, Any]) -> tuple[np.ndarray, np.ndarray]:
        """Logits of tokens after prompts of unequal length, [rows, more, vocabulary], and each row's number of tokens read."""
        rows, more = np.arange(len(tokens)), self.recipe.more
        lengths = [length for length in caches if length + more <= batch.TIME]
        read = np.array([lengths[row % len(lengths)] for row in rows])
        pick = lambda *leaves: jnp.stack([leaves[lengths.index(read[row])][:, row] for row in rows], axis=1)
        cache = jax.tree.map(pick, *(caches[length] for length in lengths))
        found = []
        for i in range(more):
            logits, cache = self.extend(self.params, tokens[rows, read + i][:, None], cache)
            found.append(logits)
        return np.concatenate(found, axis=1), read


def measure(preset: str, recipe: Recipe = Recipe()) -> Row:
    """The row of a model: its differences, or {"refused": the reason} if the model refuses packed documents."""
    model, started, batches = Model(preset, recipe), time.perf_counter(), _random(recipe)
    alone = np.asarray(model.parallel(model.params, batches[0]))
    largest = float(np.abs(alone).max())
    row: Row = {"model": preset, "recipe": dataclasses.asdict(recipe), **compared(model, batches, alone, largest)}
    if leaks(row):
        ill_conditioned = model.sensitivity(batches[0], alone) > TOLERANCE * largest
        rest = np.where(ill_conditioned[..., None], np.nan, alone)
        row |= {"ill_conditioned": int(ill_conditioned.sum()), **compared(model, batches, rest, largest)}
    return {**row, "largest_logit": largest, "seconds": round(time.perf_counter() - started, 1)}


def _random(recipe: Recipe) -> tuple[np.ndarray, ...]:
    """(documents, what takes the place of neighbours, padding, other padding), int32 [documents or rows, TIME]."""
    rng = np.random.default_rng(recipe.seed)
    tokens, others = rng.integers(0, VOCAB, (2, len(batch.documents()), batch.TIME), dtype=np.int32)
    padding, other_padding = rng.integers(0, VOCAB, (2, len(batch.ROWS), batch.TIME), dtype=np.int32)
    return tokens, others, padding, other_padding


def compared(model: Model, batches: tuple[np.ndarray, ...], alone: np.ndarray, largest: float) -> Row:
    """The differences of a row, over the largest logit.

    Args:
      batches: of `_random`.
      alone: the logits of the documents, [documents, TIME, vocabulary]; NaN where a token is left out.
      largest: the largest of them.
    """
    recipe, documents = model.recipe, batch.documents()
    tokens, others, padding, other_padding = batches
    off = lambda found, expected: _largest(found, expected) / largest
    chunked, caches = model.streamed(tokens, PIECES)
    decoded, _ = model.streamed(tokens, (1,) * batch.TIME)
    after, read = model.unequal(tokens, caches)
    expected = np.stack([alone[i, n : n + recipe.more] for i, n in enumerate(read)])
    differences = {"chunked": off(chunked, alone), "decoded": off(decoded, alone), "unequal": off(after, expected)}

    rows, ids = batch.packed(tokens, padding)
    try:
        jax.eval_shape(model.separated, model.params, rows, ids)
    except (TypeError, ValueError) as error:  # before anything is compiled
        return {"differences": differences, "refused": str(error)}
    of = lambda found, document: found[document.row, document.start : document.start + document.length]
    worst = lambda found, of_which: max(off(of(found, d), alone[d.number, : d.length]) for d in of_which)
    together = np.asarray(model.separated(model.params, rows, ids))
    differences["packed"] = worst(together, [d for d in documents if not batch.is_padded(d)])
    differences["padded"] = worst(together, [d for d in documents if batch.is_padded(d)])
    differences["others changed"] = 0.0
    for parity in (0, 1):  # the neighbours of a document have the other parity
        changed = np.where((np.arange(len(documents)) % 2 == parity)[:, None], others, tokens)
        found = np.asarray(model.separated(model.params, *batch.packed(changed, other_padding)))
        same = [d for d in documents if d.number % 2 != parity]
        worst_change = max(off(of(found, d), of(together, d)) for d in same)
        differences["others changed"] = max(differences["others changed"], worst_change)
    whole = np.concatenate([rows, tokens[len(rows) :]])  # as many rows as there are documents: compiled already
    unseparated = worst(np.asarray(model.parallel(model.params, whole)), documents)
    return {"differences": {kind: differences[kind] for kind in KINDS}, "unseparated": unseparated}


def _largest(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference where something is expected (NaN: a token is left out); infinite if it is not finite."""
    difference = np.where(np.isnan(expected), 0.0, found - expected)
    return float(np.max(np.where(np.isfinite(difference), np.abs(difference), np.inf)))


def _rounded(params: Any, key: jax.Array) -> Any:
    """The parameters, each of them one unit in the last place further up or down, at random."""
    leaves, structure = jax.tree.flatten(params)
    ends = [
        jnp.where(jax.random.bernoulli(k, shape=x.shape), jnp.inf, -jnp.inf)
        for k, x in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
    ]
    return structure.unflatten([jnp.nextafter(x, end.astype(x.dtype)) for x, end in zip(leaves, ends, strict=True)])


def leaks(row: Row) -> list[str]:
    """The kinds in which a difference is above the tolerance."""
    return [kind for kind, difference in row["differences"].items() if not difference <= TOLERANCE]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="+", default=preset_names("tiny"))
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    jax.config.update("jax_disable_most_optimizations", True)  # compilation is what a row costs
    path, recipe = options.out / "packing.jsonl", Recipe()
    done = rows_of_recipe(path, recipe, by_model)
    for preset in options.presets:
        if preset not in done:
            done[preset] = measure(preset, recipe)
            append_row(path, done[preset])
            jax.clear_caches()
            row = done[preset]
            print(f"{preset}: {row.get('refused') or ''}", *(f"{k} {v:.1e}" for k, v in row["differences"].items()))
    leaking = {preset: found for preset in options.presets if (found := leaks(done[preset]))}
    for preset, found in leaking.items():
        print(f"{preset}: above {TOLERANCE:g}: {', '.join(found)}")
    return int(bool(leaking))


if __name__ == "__main__":
    raise SystemExit(main())
