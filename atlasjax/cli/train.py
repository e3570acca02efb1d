"""`atlasjax train`."""

import dataclasses
import shlex
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from atlasjax import storage
from atlasjax.cli.generate import GenerateCommand
from atlasjax.cli.parsing import admit_given, parse, pop_option
from atlasjax.cli.report import baselines, beginning, sample_text, tokens_that_fit
from atlasjax.cli.tune import offer
from atlasjax.config_json import to_dict
from atlasjax.data.tokenizers import vocabulary
from atlasjax.nn import AttentionConfig, BranchConfig, CachingConfig, MemoryConfig
from atlasjax.nn.mixers import check_caching
from atlasjax.presets import TRUNCATION
from atlasjax.train.config import HELD_OUT, TrainConfig
from atlasjax.train.cores import use_cores
from atlasjax.train.defaults import default_config
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.loop import TrainResult, train
from atlasjax.train.plot import plot_loss
from atlasjax.train.runs import run_config
from atlasjax.train.state import merge
from atlasjax.trusted import own_modules

_DESCRIPTION = """Trains a language model, or continues training the one in --run-dir.

Without arguments: preset atlas-tiny, on the Python language reference that comes with Python, a few minutes on a CPU. --preset
chooses the model and the defaults of all other options; --help after it shows them. Without --preset, a --run-dir that holds a run
gives the defaults: what that run was saved with. --init-from RUN starts a new run from the parameters of another one, which then
gives the defaults."""


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Options of `atlasjax train`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str = "atlas-tiny"
    """Model and training defaults, "<rule>-<size>"."""
    add_caching: Literal["residual", "grm", "soup", "ssc"] | None = None
    """Adds Memory Caching with this aggregation to the model of --init-from, which starts with the same outputs."""
    segment_size: int = 256
    """Tokens after which --add-caching caches a memory."""
    add_memory: str | None = None
    """Adds a memory with this rule ("titans", "atlas", …), beside the mixer of every layer, to the model of --init-from. The new
    model starts with the same outputs."""
    add_window: int | None = None
    """Adds softmax attention over a window of this many tokens in the same way."""
    trust: tuple[str, ...] = ()
    """Modules of your own parts that files of a run may name, such as my_parts. Parts that this command names need none."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    admit_given(arguments)
    given, rest = pop_option(arguments, "preset")
    run_dir, _ = pop_option(arguments, "run-dir")
    saved = run_config(run_dir) if run_dir is not None and given is None else None
    init_from, _ = pop_option(arguments, "init-from")
    if saved is None and init_from is not None:
        saved = _base(init_from, run_dir, given)
    preset = TrainCommand.preset if given is None else given
    with user_errors():
        default = default_config(preset) if saved is None else saved
    command = parse(TrainCommand, "train", _DESCRIPTION, rest, TrainCommand(default, preset))
    config = _with_branch(command, _with_caching(command))
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


def _base(init_from: str, run_dir: str | None, preset: str | None) -> TrainConfig:
    """The defaults of a new run that starts from the parameters of another."""
    if preset is not None:
        raise ConfigError(f"--preset {preset} and --init-from {init_from} both give the model; leave --preset out.")
    if run_dir is None:
        raise ConfigError(f"--init-from {init_from} needs --run-dir, the folder of the new run.")
    base = run_config(init_from)
    if base is None:
        raise ConfigError(f"init_from is {init_from!r}; there is no run in it.")
    return dataclasses.replace(base, run_dir=run_dir, init_from=None)


def _with_caching(command: TrainCommand) -> TrainConfig:
    """The config with the Memory Caching of --add-caching."""
    config = command.config
    if command.add_caching is None:
        if command.segment_size != TrainCommand.segment_size:
            raise ConfigError(
                f"--segment-size {command.segment_size} is for --add-caching, which is not given. A new model takes model.caching."
            )
        return config
    if config.init_from is None:
        raise ConfigError(
            "--add-caching is for a trained model: give --init-from, the folder of its run. A new model takes model.caching."
        )
    added = CachingConfig.added(command.add_caching, command.segment_size)
    if config.model.caching not in (None, added):
        raise ConfigError(
            f"--add-caching {command.add_caching}: the model has Memory Caching already ({config.model.caching})."
        )
    with user_errors():
        model = dataclasses.replace(config.model, caching=added)
        check_caching(model)
    return dataclasses.replace(config, model=model)


def _with_branch(command: TrainCommand, config: TrainConfig) -> TrainConfig:
    """The config with the branch of --add-memory or --add-window."""
    given = {"--add-memory": command.add_memory, "--add-window": command.add_window}
    options = [f"{option} {value}" for option, value in given.items() if value is not None]
    if not options:
        return config
    if len(options) > 1:
        raise ConfigError(f"{' and '.join(options)}: a layer has one branch; leave one of them out.")
    if config.init_from is None:
        raise ConfigError(
            f"{options[0]} is for a trained model: give --init-from, the folder of its run. A new model takes model.branch."
        )
    with user_errors():
        if command.add_memory is not None:
            rule = command.add_memory
            memory = MemoryConfig(rule, truncation=TRUNCATION.get(rule))
            # A memory with a residual has values as wide as its keys, whatever the model has.
            wide = config.model.value_expansion > 1 and memory.build().has_residual
            branch = BranchConfig("memory", memory=memory, value_expansion=1 if wide else None)
        else:
            branch = BranchConfig("swa", attention=AttentionConfig(command.add_window))
        if config.model.branch not in (None, branch):
            raise ConfigError(f"{options[0]}: the model has a branch already ({config.model.branch.mixer}).")
        return dataclasses.replace(config, model=dataclasses.replace(config.model, branch=branch))


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
        tokens = "" if config.eval_batches is None else f", {result.evaluation.tokens:,} tokens"
        rows = {f"this model, {result.step} steps{tokens}": result.evaluation.bits_per_byte, **references}
        if HELD_OUT in result.ema_evaluations:
            rows["its moving average"] = result.ema_evaluations[HELD_OUT].bits_per_byte
        for what, value in rows.items():
            print(f"  {what:<28}{value:6.3f}")
    if references and result.step > result.resumed_from:
        plot_loss(config.run_dir, title=f"{name}, {result.step} steps", references=references)
    model, tokenizer = merge(result.setup.graphdef, result.state.params), result.setup.tokenizer
    prompt = beginning(result.setup.train_data, tokenizer)
    if (sample := sample_text(model, tokenizer, prompt=prompt, seed=config.seed)) is not None:
        print(f"\nsample:\n{sample}")
    run_dir = storage.path(config.run_dir)
    quoted = shlex.quote(str(run_dir))
    modules = own_modules(to_dict(config))
    own = f" --trust {' '.join(modules)}" if modules else ""
    where = "" if run_dir == storage.path(default_config("atlas-tiny").run_dir) else f" --run-dir {quoted}"
    where += own
    print(f"\ncheckpoint:   {run_dir / 'checkpoints' / result.checkpoint.name}")
    print(f"loss curve:   {run_dir / 'loss_curve.png'}")
    print(f"continue:     atlasjax train --run-dir {quoted}{own} --steps {2 * max(config.steps, result.step)}")
    most = GenerateCommand.max_tokens
    if fitting := tokens_that_fit(config.model, tokenizer.encode(prompt), most):
        limit = "" if fitting == most else f" --max-tokens {fitting}"
        print(f"sample more:  atlasjax generate{where} --prompt {shlex.quote(prompt)}{limit}")
    text = "" if result.evaluation is not None or config.evaluation_sets else " --text FILE"  # nothing was held out
    print(f"measure:      atlasjax evaluate{where}{text}", flush=True)
