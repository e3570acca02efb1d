"""The training settings that belong to a preset's size."""

from atlasjax.data.config import DataConfig
from atlasjax.distributed.mesh import MeshConfig
from atlasjax.presets import get_preset
from atlasjax.train.config import OptimizerConfig, TrainConfig

_BATCH_TOKENS = 2**19  # 0.5M tokens a batch
_SEQUENCE_LENGTH = 4096
_TOKENS = {"170m": 15e9, "340m": 15e9, "760m": 30e9, "1.3b": 100e9}  # of training, as A Table 7


def default_config(preset: str) -> TrainConfig:
    """Returns the training configuration of a preset.

    Tiny presets train on the embedded text in a few minutes on two CPU cores. All others use sequences of 4,096 tokens, batches of
    0.5M tokens, and AdamW at 4e-4 with cosine decay and weight decay 0.1. They train on as many tokens as the papers (sizes that A
    Table 7 does not have: 20 tokens per parameter of the name). The user gives the text (`data.*`) and a mesh that fits the
    machine.

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
            mesh=MeshConfig(data=1),  # too small to be worth more than one device
            steps=300,
            run_dir=f"runs/{preset}",
            eval_every=100,
            eval_batches=None,
            checkpoint_every=100,
            log_every=10,
        )
    length = min(_SEQUENCE_LENGTH, model.max_positions or _SEQUENCE_LENGTH)
    tokens = _TOKENS[size] if size in _TOKENS else 20e6 * int(size.removesuffix("m"))
    return TrainConfig(
        model=model,
        data=DataConfig(sequence_length=length, batch_size=_BATCH_TOKENS // length),
        optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=2000),
        steps=round(tokens / _BATCH_TOKENS),
        accumulation=2,
        run_dir=f"runs/{preset}",
        eval_every=1000,
        eval_batches=16,
        checkpoint_every=1000,
        log_every=10,
    )
