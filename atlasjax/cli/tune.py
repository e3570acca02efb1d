"""`atlasjax tune`."""

import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Annotated

import jax
import tyro

from atlasjax import cache, storage
from atlasjax.check import number
from atlasjax.cli.parsing import parse, pop_option
from atlasjax.memory import tuned
from atlasjax.memory.fast_weights.fastest import Measurement
from atlasjax.memory.fast_weights.kernels import PALLAS, kernel_of
from atlasjax.memory.tuned import Choice
from atlasjax.train.config import TrainConfig
from atlasjax.train.defaults import default_config
from atlasjax.train.errors import RunError, user_errors
from atlasjax.tune import Result, Sizes, is_open, sizes_of, tune

_DESCRIPTION = """Checks and times the kernels of a model's memory on this machine's device, and remembers the fastest.

The options are those of `atlasjax train`; model, batch, sequence length and mesh decide what is measured. A kernel that does not
give the numbers of the definition is reported and never chosen. Training and `memory.scan` follow the choice wherever
`implementation` is None."""

_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class TuneCommand:
    """Options of `atlasjax tune`."""

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    preset: str = "atlas-340m"
    """Model and sizes, "<rule>-<size>"."""
    seconds: float = _SECONDS
    """About how long to time, compilation not counted."""
    share: str | None = None
    """A file to write the measurement to, in the form of the table that is shipped with atlasjax."""


def run(arguments: Sequence[str]) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    given, rest = pop_option(arguments, "preset")
    preset = TuneCommand.preset if given is None else given
    with user_errors():
        default = default_config(preset)
    command = parse(TuneCommand, "tune", _DESCRIPTION, rest, TuneCommand(default, preset))
    with user_errors():
        number("tune", "seconds", command.seconds, least=0)
        calls = sizes_of(command.config)
    shared = []
    for sizes in calls:
        choice, results = _tune(sizes, command.seconds / len(calls), preset)
        if command.share is not None:
            shared.append(_measurement(sizes, choice, results, preset))
    if command.share is not None:
        _share(command.share, shared)


def _tune(sizes: Sizes, seconds: float, preset: str) -> tuple[Choice, list[Result]]:
    """Measures one call of a model, and says what was chosen."""
    kind = jax.devices()[0].device_kind
    print(
        f"{kind}: batch {sizes.batch_size}, {sizes.time:,} tokens, {sizes.num_heads} heads, keys {sizes.key_dim}, values "
        f"{sizes.value_dim}, {sizes.dtype}, {preset}",
        flush=True,
    )
    try:
        choice, results = tune(sizes, seconds=seconds)
    except RuntimeError as error:
        raise RunError(str(error)) from error
    if len(results) == 1:
        print(f"There is no other backend for this platform ({tuned.platform()}): nothing to choose.", flush=True)
    else:
        print(f"chosen: {choice.implementation}; saved in {cache.folder() / tuned.FILE}", flush=True)
    return choice, results


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
    answer = input(f"No kernel was measured on this {kind} yet. Check and time them now, in about two minutes? [Y/n] ")
    if answer.strip().lower() in ("", "y", "yes"):
        for sizes in calls:
            choice, _ = tune(sizes, seconds=_SECONDS / len(calls))
            print(f"chosen: {choice.implementation}", flush=True)
    else:
        for sizes in calls:
            key = tuned.key_of(sizes.rule, sizes.key_dim, sizes.value_dim, sizes.dtype)
            tuned.write(Choice(*key, "xla", 0.0))
        print(f"Training with XLA; not asked again. `{command}` measures later.", flush=True)


def _measurement(sizes: Sizes, choice: Choice, results: Sequence[Result], preset: str) -> Measurement:
    """The row of the shipped table for what was measured.

    Raises:
      RunError: no kernel that it could hold was measured.
    """
    measured = [result.name for result in results if result.error is not None]
    kernels = [name for name in measured if name in {backend.name for backend in PALLAS}]
    if not kernels or sizes.key_dim != sizes.value_dim:
        raise RunError(
            "there is nothing to share: no kernel of atlasjax was measured at equal key and value dimensions."
        )
    return Measurement(
        tuned.platform(), kernel_of(sizes.rule), sizes.key_dim, sizes.dtype, kernels[0], choice.ratio_to_xla, choice.device,
        choice.jax, f"atlasjax tune --preset {preset} --share FILE",
    )  # fmt: skip


def _share(path: str, measured: Sequence[Measurement]) -> None:
    rows = [dataclasses.asdict(row) for row in measured]
    with user_errors():
        storage.write_whole(storage.path(path), (json.dumps(rows, indent=1) + "\n").encode())
    print(
        f"written to {pathlib.Path(path).name}: please send it as a change of atlasjax/memory/fast_weights/fastest.json"
    )
