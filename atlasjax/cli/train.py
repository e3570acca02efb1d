"""`atlasjax train`."""

import dataclasses
import shlex

from atlasjax import storage
from atlasjax.cli.options.generate import GenerateCommand
from atlasjax.cli.options.train import Request, TrainCommand
from atlasjax.cli.report import baselines, begin_sample, beginning, sample_text, tokens_that_fit
from atlasjax.cli.tune import offer
from atlasjax.config_json import to_dict
from atlasjax.data.tokenizers import vocabulary
from atlasjax.nn import AttentionConfig, BranchConfig, CachingConfig, MemoryConfig
from atlasjax.nn.mixers import check_caching
from atlasjax.presets import TRUNCATION
from atlasjax.train.ahead import Ahead
from atlasjax.train.config import HELD_OUT, TrainConfig
from atlasjax.train.cores import use_cores
from atlasjax.train.defaults import default_config
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.loop import TrainResult, train
from atlasjax.train.reports.plot import import_matplotlib, plot_loss
from atlasjax.train.setup import Setup
from atlasjax.train.state import merge
from atlasjax.trusted import own_modules


def run(request: Request) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    command = request.command
    config = _with_branch(command, _with_caching(command))
    if not request.own_vocabulary:
        config = _with_vocabulary(config)
    name = request.preset or "the model"

    def announce(done: int) -> None:
        what = f"Training {name} in {config.run_dir}, {config.steps} steps"
        if done >= config.steps:
            print(f"{what}: {done} are already done.", flush=True)
        else:
            print(f"{what}; the first one takes a while to compile.", flush=True)

    prompt: str | None = None  # of the report's sample

    def meanwhile(setup: Setup, compiling: Ahead) -> None:
        """Begins what the report at the end needs."""
        nonlocal prompt
        prompt = beginning(setup.train_data, setup.tokenizer)
        model = merge(setup.graphdef, setup.abstract_state().params)
        begin_sample(compiling.begin, model, setup.tokenizer, prompt=prompt, seed=config.seed)
        import_matplotlib()

    use_cores(config)  # first, before anything asks jax for its devices
    offer(config, command.preset)
    result = train(config, on_start=announce, meanwhile=meanwhile)
    _report(request.preset or storage.path(config.run_dir).name, config, result, prompt)


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


def _report(name: str, config: TrainConfig, result: TrainResult, prompt: str | None = None) -> None:
    """Prints the report of a run. prompt: of the sample. None: the beginning of the text."""
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
    if prompt is None:  # no step was left
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
