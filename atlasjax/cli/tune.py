"""`atlasjax tune`."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence

import jax

from atlasjax import cache, storage
from atlasjax.cli.options.tune import SECONDS, TuneCommand
from atlasjax.memory import tuned
from atlasjax.memory.fast_weights.fastest import Measurement
from atlasjax.memory.fast_weights.kernels import PALLAS, kernel_of
from atlasjax.memory.tuned import Choice
from atlasjax.train.config import TrainConfig
from atlasjax.train.errors import RunError, user_errors
from atlasjax.tune import Result, Sizes, choice_of, is_open, sizes_of, tune


def run(command: TuneCommand) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    with user_errors():
        calls = sizes_of(command.config)
    shared, problems = [], []
    for sizes in calls:
        choice, results = _tune(sizes, command.seconds / len(calls), command.preset)
        if command.share is not None:
            shared.append(_measurement(sizes, choice, results, command.preset))
        problems += _saved(choice, results)
    if command.share is not None:
        _share(command.share, shared)
    if problems:
        raise RunError(problems[0])


def _tune(sizes: Sizes, seconds: float, preset: str) -> tuple[Choice, list[Result]]:
    """Measures one call of a model; saves nothing."""
    kind = jax.devices()[0].device_kind
    print(
        f"{kind}: batch {sizes.batch_size}, {sizes.time:,} tokens, {sizes.num_heads} heads, keys {sizes.key_dim}, values "
        f"{sizes.value_dim}, {sizes.dtype}, {preset}",
        flush=True,
    )
    try:
        return tune(sizes, seconds=seconds, save=False)
    except RuntimeError as error:
        raise RunError(str(error)) from error


def _saved(choice: Choice, results: Sequence[Result]) -> list[str]:
    """Saves a choice and says so. Returns why it could not be saved, if so."""
    if len(results) == 1:
        print(f"There is no other backend for this platform ({tuned.platform()}): nothing to choose.", flush=True)
        return []
    try:
        path = tuned.write(choice)
    except OSError as error:
        print(f"chosen: {choice.implementation}, but not saved", flush=True)
        return [f"the choice does not count: {cache.folder() / tuned.FILE} cannot be written ({error})."]
    print(f"chosen: {choice.implementation}; saved in {path}", flush=True)
    return []


def offer(config: TrainConfig, preset: str) -> None:
    """Before a run on an accelerator for which nothing was measured yet: asks once whether to do it, where somebody can answer.

    Only for a run of one process whose `implementation` is None. Elsewhere, one line names the command.
    """
    if config.processes.distributed or config.model.memory.implementation is not None:
        return
    try:
        calls = [sizes for sizes in sizes_of(config) if is_open(sizes)]
    except ValueError:  # nothing to choose; or the mesh does not fit, which the run itself will say
        return
    if not calls:
        return
    kind, command = jax.devices()[0].device_kind, f"atlasjax tune --preset {preset}"
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        print(
            f"No kernel was measured on this {kind} yet: training with XLA. `{command}` takes about two minutes.",
            flush=True,
        )
        return
    question = f"No kernel was measured on this {kind} yet. Check and time them now, in about two minutes? [Y/n] "
    try:
        answer = input(question).strip().lower()
    except EOFError:
        print("\nTraining with XLA.", flush=True)
        return
    yes = answer in ("", "y", "yes")
    try:
        for sizes in calls:
            choice = tune(sizes, seconds=SECONDS / len(calls), save=False)[0] if yes else choice_of(sizes, "xla", 0.0)
            tuned.write(choice)
            if yes:
                print(f"chosen: {choice.implementation}", flush=True)
    except (OSError, RuntimeError) as error:  # the run goes on without a choice
        print(f"No choice was saved: {error}. Training with XLA; `{command}` measures later.", flush=True)
    else:
        if not yes:
            print(f"Training with XLA; not asked again. `{command}` measures later.", flush=True)


def _measurement(sizes: Sizes, choice: Choice, results: Sequence[Result], preset: str) -> Measurement:
    """The row of the shipped table for what was measured.

    Raises:
      RunError: no kernel that it could hold was measured.
    """
    own = {backend.name for backend in PALLAS}
    kernels = [result for result in results if result.error is not None and result.name in own]
    xla = next(result.seconds for result in results if result.name == "xla")
    if not kernels or xla is None or sizes.key_dim != sizes.value_dim:
        raise RunError(
            "there is nothing to share: no kernel of atlasjax was measured at equal key and value dimensions."
        )
    kernel = kernels[0]
    ratio = 0.0 if kernel.problem or kernel.seconds is None else round(xla / kernel.seconds, 3)  # 0: never to be chosen
    return Measurement(
        tuned.platform(), kernel_of(sizes.rule), sizes.key_dim, sizes.dtype, kernel.name, ratio, choice.device,
        choice.jax, f"atlasjax tune --preset {preset} --share FILE",
    )  # fmt: skip


def _share(path: str, measured: Sequence[Measurement]) -> None:
    rows = [dataclasses.asdict(row) for row in measured]
    with user_errors():
        storage.write_whole(storage.path(path), (json.dumps(rows, indent=1) + "\n").encode())
    print(
        f"written to {pathlib.Path(path).name}: please send it as a change of atlasjax/memory/fast_weights/fastest.json"
    )
