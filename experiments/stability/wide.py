"""Two layers as wide as those of the 340M models, in bfloat16, at their learning rate and at three times that.

    python -m experiments.stability.wide                 # every missing row
    python -m experiments.stability.wide --only titans
    python -m experiments.stability.wide --report        # only the table

A Table 7: width 1024, 16 heads, peak learning rate 1.5e-3. Training takes 200 steps of one sequence of 512 bytes of the embedded
text, so that a run takes minutes on a CPU. A step has far fewer tokens than in the paper (0.5M, A App. E), so gradients are
noisier and divergence is more likely. Atlas writes once every 16 tokens.
"""

import dataclasses
import operator
import pathlib
from typing import Any

from experiments.rows import add_missing
from experiments.stability import settings
from experiments.stability.report import write_report
from experiments.stability.settings import EVERY, STEPS, TABLE_7_RATE, TOKENS
from experiments.stability.train import keep_compiled_programs, watch

CONTROL = "transformer++"  # no memory: what attention does at these rates
MODELS = ("titans", "omeganet", "atlas", "dla", "yaad", "ttt-mlp", "titans-mac", "gated-deltanet", CONTROL)


def config_of(name: str, factor: int) -> Any:
    from atlasjax.data.config import DataConfig
    from atlasjax.distributed.mesh import MeshConfig
    from atlasjax.presets import get_preset
    from atlasjax.train.config import OptimizerConfig, TrainConfig

    model = get_preset(f"{name}-340m")
    model = dataclasses.replace(model, num_layers=2, vocab_size=256, dtype="bfloat16", remat=False)
    if every := EVERY.get(name):
        model = dataclasses.replace(model, memory=dataclasses.replace(model.memory, newton_schulz_every=every))
    return TrainConfig(
        model=model,
        data=DataConfig(sequence_length=TOKENS, batch_size=1),
        optimizer=OptimizerConfig(learning_rate=factor * TABLE_7_RATE, warmup_steps=STEPS // 10),
        mesh=MeshConfig(data=1),
        steps=STEPS,
    )


def main() -> None:
    parser = settings.options(__doc__, "wide.jsonl")
    parser.add_argument("--only", nargs="*", help="names of architectures")
    parser.add_argument(
        "--steps", type=pathlib.Path, help="a file for a line of JSON for every step, with the largest memories"
    )
    options = parser.parse_args()
    keep_compiled_programs()
    of = lambda name, factor: {
        "preset": name,
        "times_the_rate": factor,
        **watch(config_of(name, factor), options.steps),
    }
    wanted = [] if options.report else [(name, factor) for factor in (1, 3) for name in options.only or MODELS]
    add_missing(options.rows, operator.itemgetter("preset", "times_the_rate"), wanted, lambda key: of(*key))
    write_report(options.rows)


if __name__ == "__main__":
    main()
