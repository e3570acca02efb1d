"""The loss of counting bytes on the held-out text of each experiment, the one that a language model has to beat.

    python -m experiments.evidence.counting      # writes results/counting.jsonl in seconds; needs the texts of --texts-dir

An interpolated trigram of bytes (`atlasjax.evaluate.ngram`) is fitted to the training text that the models read, and tested on the
bytes that they are tested on. It sees two bytes of context, so a model that does not beat it shows nothing about a memory.
"""

import argparse
import functools
import itertools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments.intervals import LEAST_SEEDS, clearly_above
from experiments.rows import Row, read_rows

ROWS = pathlib.Path(__file__).parent / "results" / "counting.jsonl"
NO_BETTER = "no better than a trigram"  # in place of a verdict: neither model has learned more than counting


def measure(config: Any, batches: int | None) -> Row:
    """The baselines of one run.

    Args:
      config: its `DataConfig`, of bytes.
      batches: of the held-out text that the run reads; None for all.

    Returns:
      bytes: of the held-out text that are predicted. unigram, trigram: bits per byte.
    """
    from atlasjax.data import make_pipeline
    from atlasjax.data.sources import load_text
    from atlasjax.data.tokenizers import ByteTokenizer
    from atlasjax.evaluate.ngram import fit_ngram

    read = itertools.islice(make_pipeline(config, ByteTokenizer(), "validation"), batches)
    targets = [np.asarray(b["targets"])[np.asarray(b["weights"]) > 0] for b in read]  # row by row, without padding
    held_out = np.concatenate(targets).astype(np.uint8).tobytes()
    train = load_text(config, "train").encode()
    scores = {name: fit_ngram(train, n).bits_per_byte(held_out) for name, n in (("unigram", 1), ("trigram", 3))}
    return {"bytes": len(held_out), **{name: round(x, 4) for name, x in scores.items()}}


def runs(texts_dir: pathlib.Path) -> dict[tuple[str, str], tuple[Any, int | None]]:
    """(experiment, text) → the data of its runs, and the batches of held-out text that they read."""
    from atlasjax.presets import get_preset
    from experiments.language.measure import BOOKS, run_config
    from experiments.language.measure import Recipe as Language
    from experiments.stability.train import TEXTS, Case, config_of
    from experiments.studies.measure import Recipe as Studies
    from experiments.zoo.corpora import CORPORA
    from experiments.zoo.training import Recipe, train_config

    model = get_preset("titans-tiny")
    found: dict[tuple[str, str], tuple[Any, int | None]] = {}
    for text in ("embedded", "tinyshakespeare"):
        path = None if TEXTS[text] is None else str(texts_dir / str(TEXTS[text]))
        zoo = Recipe(text=path)
        found["zoo", text] = train_config(model, zoo).data, zoo.eval_batches
    for text in CORPORA:
        zoo = Recipe(text=text)
        found["zoo", text] = train_config(model, zoo).data, zoo.eval_batches
    found["ablation", "embedded"] = found["zoo", "embedded"]
    for text in TEXTS:
        found["stability", text] = config_of(Case("titans", text, 0), texts_dir).data, None
    studies = Studies()
    found["studies", "embedded"] = train_config(model, studies.run(0, None)).data, studies.eval_batches
    language, books = Language(), tuple(str(texts_dir / name) for name in BOOKS)
    run = run_config(model, language, books, seed=0, rate=1e-3, steps=language.steps)
    found["language", "books"] = run.data, None
    return found


@functools.cache
def _levels() -> Mapping[tuple[str, str], float]:
    return {(row["experiment"], row["text"]): row["trigram"] for row in read_rows(ROWS)}


def level(experiment: str, text: str) -> float:
    """Bits per byte of the trigram on the held-out text of an experiment.

    Raises:
      ValueError: it has not been measured.
    """
    found = _levels().get((experiment, text))
    if found is None:
        raise ValueError(
            f"counting: {experiment} on {text} has no trigram; run `python -m experiments.evidence.counting`."
        )
    return found


def beats(losses: Mapping[int, float], trigram: float) -> bool:
    """Whether a model has learned more than counting.

    Args:
      losses: seed → bits per byte.
      trigram: bits per byte.

    Returns:
      Whether the losses are clearly below, as `clearly_above` has it. Too few seeds for that decide nothing in any case: there
      it is whether their mean is below.
    """
    if len(losses) < LEAST_SEEDS:
        return bool(losses) and float(np.mean(list(losses.values()))) < trigram
    return clearly_above({seed: -loss for seed, loss in losses.items()}, -trigram)


def main(argv: list[str] | None = None) -> None:
    from experiments.stability.train import TEXTS_DIR

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts-dir", type=pathlib.Path, default=TEXTS_DIR)
    parser.add_argument("--out", type=pathlib.Path, default=ROWS)
    options = parser.parse_args(argv)
    found = [
        {"experiment": experiment, "text": text, **measure(*run)}
        for (experiment, text), run in runs(options.texts_dir).items()
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row) + "\n" for row in found))
    print(options.out.read_text(), end="")


if __name__ == "__main__":
    main()
