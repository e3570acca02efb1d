"""The training settings that belong to a preset's size."""

import dataclasses

from atlasjax.data.config import DataConfig
from atlasjax.distributed.mesh import MeshConfig
from atlasjax.presets import get_preset
from atlasjax.train.config import OptimizerConfig, TrainConfig

_BATCH_TOKENS = 2**19  # 0.5M tokens a batch
# Tokens of training: as A Table 7, and 20 for each parameter of Qwen3.5.
_TOKENS = {"170m": 15e9, "340m": 15e9, "760m": 30e9, "1.3b": 100e9, "0.8b": 15e9}


@dataclasses.dataclass(frozen=True)
class _Recipe:
    """How the presets of a size are trained. The defaults are those of A App. E and M §4."""

    optimizer: OptimizerConfig = OptimizerConfig(learning_rate=4e-4)
    tokens: float | None = None  # None: `_TOKENS`, or 20 for each parameter of the name
    batch_size: int | None = None  # sequences; None: 0.5M tokens
    warmup_steps: int | None = 2000
    warmup_fraction: float = 0.01  # of the steps, where warmup_steps is None
    accumulation: int = 2
    sequence_length: int = 4096


# E Table 9: 16 samples of 32,768 tokens.
_ELASTIC = _Recipe(
    OptimizerConfig(learning_rate=2e-3, eps=1e-7),
    tokens=40e9,
    warmup_steps=None,
    accumulation=1,
    sequence_length=32_768,
)
# G §4.3: batches of 32 sequences of its 256 tokens, 20 tokens for each parameter here (5 epochs there).
_GAM = _Recipe(OptimizerConfig(learning_rate=3e-4), batch_size=32, warmup_steps=100, accumulation=1)
_RECIPES = {"98m": _ELASTIC, "205m": _ELASTIC, "345m": _ELASTIC, "22m": _GAM}


def default_config(preset: str) -> TrainConfig:
    """Returns the training configuration of a preset.

    Tiny presets train on the embedded text in a few minutes on two CPU cores. The sizes of A and M (170m to 1.3b) use sequences of
    4,096 tokens, batches of 0.5M tokens, and AdamW at 4e-4 with cosine decay and weight decay 0.1, on as many tokens as the papers.
    The sizes of E (98m to 345m) use E Table 9: sequences of 32,768 tokens, a learning rate of 2e-3, ε of 1e-7, warm-up of 1% and
    40B tokens. The size of G (22m) uses the batches of 32 and the rate of 3e-4 of G §4.3. Where no paper gives the number of
    tokens, it is 20 for each parameter of the name. The user gives the text (`data.*`) and a mesh that fits the machine.
    docs/deviations.md lists what differs from the papers.

    Raises:
      ValueError: there is no such preset. The message suggests the nearest name.
    """
    model = get_preset(preset)
    size = preset.rpartition("-")[2]
    if size == "tiny":
        return TrainConfig(
            model=model,
            data=DataConfig(sequence_length=256, batch_size=4),
            optimizer=OptimizerConfig(learning_rate=4e-3, warmup_steps=30, weight_decay=0.1),
            mesh=MeshConfig(data=0),  # too small for several accelerators
            steps=300,
            run_dir=f"runs/{preset}",
            eval_every=100,
            eval_batches=None,
            checkpoint_every=100,
            log_every=10,
        )
    recipe = _RECIPES.get(size, _Recipe())
    length = min(recipe.sequence_length, model.max_positions or recipe.sequence_length)
    batch_size = recipe.batch_size or _BATCH_TOKENS // length
    steps = round((recipe.tokens or _TOKENS.get(size) or 20e6 * int(size.removesuffix("m"))) / (batch_size * length))
    optimizer = dataclasses.replace(
        recipe.optimizer, warmup_steps=recipe.warmup_steps or round(recipe.warmup_fraction * steps)
    )
    return TrainConfig(
        model=model,
        data=DataConfig(sequence_length=length, batch_size=batch_size),
        optimizer=optimizer,
        steps=steps,
        accumulation=recipe.accumulation,
        run_dir=f"runs/{preset}",
        eval_every=1000,
        eval_batches=16,
        checkpoint_every=1000,
        log_every=10,
    )
