"""`atlasjax train`."""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Annotated

import tyro

from atlasjax import storage
from atlasjax.cli.parsing import parse, pop_option
from atlasjax.cli.report import baselines, sample_text
from atlasjax.cli.tune import offer
from atlasjax.data.tokenizers import vocabulary
from atlasjax.train.config import TrainConfig
from atlasjax.train.cores import use_cores
from atlasjax.train.defaults import default_config
from atlasjax.train.errors import user_errors
from atlasjax.train.load import run_config
from atlasjax.train.loop import TrainResult, train
from atlasjax.train.plot import plot_loss
from atlasjax.train.state import merge

_DESCRIPTION = """Trains a language model, or continues training the one in --run-dir.

Without arguments: preset atlas-tiny, on the Python language reference that comes with Python, a few minutes on a CPU. --preset
chooses the model and the defaults of all other options; --help after it shows them. Without --preset, a --run-dir that holds a run
gives the defaults: what that run was saved with."""


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Options of `atlasjax train`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str = "atlas-tiny"
    """Model and training defaults, "<rule>-<size>"."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    given, rest = pop_option(arguments, "preset")
    run_dir, _ = pop_option(arguments, "run-dir")
    saved = run_config(run_dir) if run_dir is not None and given is None else None
    preset = given or TrainCommand.preset
    with user_errors():
        default = default_config(preset) if saved is None else saved
    command = parse(TrainCommand, "train", _DESCRIPTION, rest, TrainCommand(default, preset))
    config = command.config
    if saved is None and pop_option(rest, "model.vocab-size")[0] is None:
        config = _with_vocabulary(config)
    name = preset if saved is None else "the model"

    def announce(done: int) -> None:
        what = f"Training {name} in {config.run_dir}, {config.steps} steps"
        if done >= config.steps:
            print(f"{what}: {done} are already done.", flush=True)
        else:
            print(f"{what}; the first one takes a while to compile.", flush=True)

    use_cores(config)
    offer(config, preset)
    result = train(config, on_start=announce)
    _report(name if saved is None else storage.path(config.run_dir).name, config, result)


def _with_vocabulary(config: TrainConfig) -> TrainConfig:
    """The model with the tokenizer's vocabulary, where that is the larger one."""
    with user_errors():
        size = vocabulary(config.data)
    if size <= config.model.vocab_size:
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))


def _report(name: str, config: TrainConfig, result: TrainResult) -> None:
    print()
    references = baselines(config.data)
    if result.evaluation is not None:
        print("held-out bits per byte")
        rows = {f"this model, {result.step} steps": result.evaluation.bits_per_byte, **references}
        for name, value in rows.items():
            print(f"  {name:<28}{value:6.3f}")
    if references and result.step > result.resumed_from:
        plot_loss(config.run_dir, title=f"{name}, {result.step} steps", references=references)
    print("\nsample:")
    model = merge(result.setup.graphdef, result.state.params)
    print(sample_text(model, result.setup.tokenizer, seed=config.seed))
    run_dir = storage.path(config.run_dir)
    quoted = shlex.quote(str(run_dir))
    where = "" if run_dir == storage.path(default_config("atlas-tiny").run_dir) else f" --run-dir {quoted}"
    print(f"\ncheckpoint:   {result.checkpoint}")
    print(f"loss curve:   {run_dir / 'loss_curve.png'}")
    print(f"continue:     atlasjax train --run-dir {quoted} --steps {2 * max(config.steps, result.step)}")
    print(f"sample more:  atlasjax generate{where} --prompt 'The statement'")
    print(f"measure:      atlasjax evaluate{where}", flush=True)
