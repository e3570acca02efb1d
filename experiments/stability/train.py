"""Complete training runs at a preset's own defaults, checked for divergence.

    python -m experiments.stability.train                        # every missing row, the most informative first
    python -m experiments.stability.train --only titans --texts embedded --seeds 0 1
    python -m experiments.stability.train --report               # only the table and plot of existing rows

Each run is `atlasjax train --preset <preset>` on one of three texts, with the same model, data, optimizer and steps. A finished
run is one line of JSON in `results/train.jsonl` and is skipped, so the command resumes where it was stopped. `report.py` writes
tables and plot. Texts other than the embedded one are files in `--texts-dir`; missing ones are left out.
"""

import dataclasses
import math
import pathlib
import time
from typing import Any

from experiments.rows import add_missing, append_row
from experiments.stability import pairs, settings
from experiments.stability.report import write_report

ROWS = "train.jsonl"
TEXTS_DIR = pathlib.Path(__file__).parents[3] / "shared" / "data"
TEXTS = {
    "embedded": None,
    "tinyshakespeare": "tinyshakespeare/input.txt",
    "moby_dick": "gutenberg_moby_dick/2701-0.txt",
}
SEEDS = 3  # for the models of `pairs.py` and the softmax memory with a window; one for the others
SEVERAL_SEEDS = (*pairs.models(), "swdt")
COMPARED = ("atlas", "titans", "omeganet", "dla", "yaad", "ttt-mlp", "ttt-linear", "titans-no-momentum")


@dataclasses.dataclass(frozen=True)
class Case:
    """One run: a preset, a text, a seed, and whether the memory is bounded (False: the papers' recurrence)."""

    preset: str
    text: str
    seed: int
    bounded: bool = True


def cases() -> list[Case]:
    """All runs, the most informative first."""
    from atlasjax.presets import preset_names

    presets = [name.removesuffix("-tiny") for name in preset_names("tiny")]
    alone = [name for name in presets if name in SEVERAL_SEEDS]
    compared = ("embedded", "tinyshakespeare")
    order = [Case("titans", text, seed) for seed in range(SEEDS) for text in TEXTS]
    order += [Case(name, "embedded", 0, bounded) for name in COMPARED for bounded in (True, False)]
    order += [
        Case(f"{name}-{backbone}", "embedded", 0) for name in ("titans", "atlas") for backbone in ("mac", "mag", "mal")
    ]
    # Each model of a pair on its three seeds: a pair decides nothing with fewer.
    order += [Case(name, text, seed) for text in TEXTS for name in pairs.models() for seed in range(SEEDS)]
    order += [Case(name, text, 0) for name in alone for text in TEXTS]
    order += [Case(name, text, seed, bounded) for seed in range(SEEDS) for name in COMPARED for text in compared
              for bounded in (True, False)]  # fmt: skip
    order += [Case(name, "embedded", 0) for name in presets]
    order += [Case(name, text, seed) for seed in range(SEEDS) for name in alone for text in TEXTS]
    order += [Case(name, text, 0) for text in TEXTS for name in presets]
    return list(dict.fromkeys(order))


def config_of(case: Case, texts_dir: pathlib.Path) -> Any:
    """The run as in `atlasjax train`, except for where checkpoints and evaluations are."""
    config = pairs.default_config(case.preset)
    source: dict[str, Any] = {}
    if TEXTS[case.text] is not None:
        source = {"source": "text", "paths": (str(texts_dir / str(TEXTS[case.text])),)}
    memory = dataclasses.replace(config.model.memory, bounded=case.bounded)
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, memory=memory, remat=False),  # the activations of a tiny model fit
        data=dataclasses.replace(config.data, seed=case.seed, **source),
        seed=case.seed,
    )


def run(case: Case, texts_dir: pathlib.Path) -> dict[str, Any]:
    """The row of one run."""
    return {**dataclasses.asdict(case), **watch(config_of(case, texts_dir))}


def watch(config: Any, steps: pathlib.Path | None = None) -> dict[str, Any]:
    """The result of a run. If it diverges, this has the step at which its loss or gradient was not finite.

    steps: a file that gets a line of JSON for every step: loss, gradient norm, and the largest memory of each layer.
    """
    import jax
    import numpy as np

    from atlasjax.cli.report import baselines
    from atlasjax.distributed.sharding import global_batch
    from atlasjax.evaluate.lm import evaluate
    from atlasjax.train.setup import prepare
    from atlasjax.train.state import merge
    from atlasjax.train.step import eval_sums, jit_train_step
    from experiments.stability.probe import probe

    started = time.perf_counter()
    setup = prepare(config)
    state, data = setup.init_state(), iter(setup.train_data)
    step = jit_train_step(setup.graphdef, setup.optimizer, setup.schedule, setup.shardings, setup.mesh)
    losses, norms, diverged = [], [], None
    for number in range(1, config.steps + 1):
        batch = global_batch(next(data), setup.mesh)
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["gradient_norm"]))
        if steps is not None:
            largest = {layer: float(norm.max()) for layer, norm in metrics["memory_norm"].items()}
            line = {"step": number, "loss": losses[-1], "gradient_norm": norms[-1], "memory_norm": largest}
            append_row(steps, line)
        if not (math.isfinite(losses[-1]) and math.isfinite(norms[-1])):
            diverged = number
            break
    unigram = baselines(config.data)["unigram of bytes"]
    row: dict[str, Any] = {
        "steps": config.steps,
        "diverged_at": diverged,
        "unigram": round(unigram, 4),
        # From training losses after step 50, in nats per byte.
        "above_unigram": int(np.sum(np.asarray(losses[50:]) > unigram * math.log(2))),
        "largest_gradient_norm_over_median": round(float(np.nanmax(norms) / np.nanmedian(norms)), 1)
        if np.isfinite(norms).all()
        else None,
        "spikes": int(np.sum(np.asarray(norms[50:]) > 10 * np.nanmedian(norms))),
        "bits_per_byte": None,
        "seconds": None,
    }
    if diverged is None:
        evaluation = jax.jit(eval_sums(setup.graphdef, setup.tokenizer.bytes_per_token))
        assert setup.validation_data is not None
        row["bits_per_byte"] = round(evaluate(evaluation, state.params, setup.validation_data).bits_per_byte, 4)
        row |= probe(merge(setup.graphdef, state.params), np.asarray(batch["inputs"]))
    row["seconds"] = round(time.perf_counter() - started)
    return row


def keep_compiled_programs() -> None:
    """In the user's cache folder: a model's seeds and texts share their programs, and so does a command that goes on."""
    import jax

    from atlasjax import cache

    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(cache.folder() / "experiments"))


def main() -> None:
    parser = settings.options(__doc__, ROWS)
    parser.add_argument("--only", nargs="*", help="names of tiny presets, without -tiny")
    parser.add_argument("--texts", nargs="*", choices=TEXTS, help="some of the texts")
    parser.add_argument("--seeds", nargs="*", type=int, help="some of the seeds")
    parser.add_argument("--texts-dir", type=pathlib.Path, default=TEXTS_DIR)
    options = parser.parse_args()
    if not options.report:
        keep_compiled_programs()
        there = [text for text, file in TEXTS.items() if file is None or (options.texts_dir / file).exists()]
        chosen = (
            case
            for case in cases()
            if (options.only is None or case.preset in options.only)
            and case.text in (there if options.texts is None else set(there) & set(options.texts))
            and (options.seeds is None or case.seed in options.seeds)
        )
        key = lambda row: Case(*(row[field.name] for field in dataclasses.fields(Case)))
        add_missing(options.rows, key, chosen, lambda case: run(case, options.texts_dir))
    write_report(options.rows)


if __name__ == "__main__":
    main()
