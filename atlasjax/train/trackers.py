"""Trackers: where the metrics of a run go besides its metrics.jsonl, such as Weights & Biases.

A tracker is made by a function (or class) that is called with the run's config and the step that it goes on from, in the process
that writes metrics. Your own is named "package.module:function", or passed as the function.

    class Printed:
        def __init__(self, config, after_step): ...
        def log(self, step, kind, values): print(step, kind, dict(values))
        def commit(self): ...
        def close(self): ...

    train(dataclasses.replace(config, trackers=(Printed,)))
"""

import contextlib
import hashlib
import pathlib
import secrets
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from atlasjax import storage
from atlasjax.config_json import to_dict
from atlasjax.names import call_with, in_one_line, resolve
from atlasjax.storage.logs import naming
from atlasjax.train.errors import ConfigError, RunError


class RunConfig(Protocol):
    """The fields of a `TrainConfig` that are read here."""

    # Not the class itself, which looks up the names of its trackers in this module.
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def run_dir(self) -> str: ...
    @property
    def tensorboard(self) -> bool: ...
    @property
    def trackers(self) -> tuple[str, ...]: ...


class Tracker(Protocol):
    """Takes the metrics of a run."""

    def log(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Takes values after a number of steps. `kind` is that of a line of metrics.jsonl: "train", "timing", "evaluation", …"""
        ...

    def commit(self) -> None:
        """Called before each checkpoint: makes visible to others what was logged."""
        ...

    def close(self) -> None:
        """Called once, when the run ends, also with an error."""
        ...


class TensorBoard:
    """TensorBoard event files, in `tensorboard` in the run's folder. In a bucket, whose files
    cannot grow, they are copied whole from a temporary folder.

    Args:
      config: the config of the run.
      after_step: the step that the run goes on from. Events of later steps no longer count.
    """

    def __init__(self, config: RunConfig, after_step: int):
        from tensorboardX import SummaryWriter

        folder = storage.path(config.run_dir) / "tensorboard"
        self._bucket = folder if isinstance(folder, storage.StorePath) else None
        self._temporary = contextlib.ExitStack()
        local = folder if self._bucket is None else self._temporary.enter_context(storage.temporary_folder("events"))
        self._folder = str(local)
        self._writer = SummaryWriter(self._folder, purge_step=after_step + 1)

    def log(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)

    def commit(self) -> None:
        with naming(pathlib.Path(self._folder)):
            self._writer.flush()
        if self._bucket is not None:
            for file in pathlib.Path(self._folder).iterdir():
                storage.write_whole(self._bucket / file.name, file.read_bytes())

    def close(self) -> None:
        with self._temporary:
            with naming(pathlib.Path(self._folder)):
                self._writer.close()
            self.commit()


class WandB:
    """A run of Weights & Biases (the extra `wandb`), named after the run's folder; a resumed run goes on in it.

    Project, account and mode come from WANDB_PROJECT, WANDB_API_KEY, WANDB_MODE and the other variables of wandb.

    Args:
      config: the config of the run, which is shown beside the metrics.
      after_step: the step that the run goes on from.

    Raises:
      ConfigError: wandb is not installed.
    """

    def __init__(self, config: RunConfig, after_step: int):
        try:
            import wandb
        except ImportError:
            raise ConfigError("tracker 'wandb' needs the package wandb: pip install 'atlasjax[wandb]'.") from None
        folder = storage.path(config.run_dir)
        place = {} if isinstance(folder, storage.StorePath) else {"dir": str(folder)}
        self._run = wandb.init(
            name=folder.name,
            id=_wandb_id(folder, after_step),
            resume="allow",
            config=to_dict(config),
            **place,
        )
        # wandb's own counter never goes back, as a run does that resumes from an earlier checkpoint.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def commit(self) -> None:
        """Nothing: wandb sends as it goes."""

    def close(self) -> None:
        self._run.finish()


def _wandb_id(folder: storage.AnyPath, after_step: int) -> str:
    """The name by which the service knows the run in a folder: a random one, which is kept there."""
    # Not its path: another run may come to the same place, and a folder that was moved has the same run.
    file = folder / "wandb_id"
    if file.is_file() and (known := file.read_bytes().decode(errors="replace").strip()):
        return known
    made = secrets.token_hex(8)
    if after_step:  # runs of older versions were known by their place
        where = str(folder if isinstance(folder, storage.StorePath) else folder.absolute())
        made = hashlib.sha256(where.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    storage.write_whole(file, made.encode())
    return made


TRACKERS: dict[str, Callable[[Any, int], Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB}


class Trackers:
    """The trackers of a config. An error of one of them ends the run with a line that names it.

    Raises:
      ConfigError: one cannot be made.
    """

    def __init__(self, config: RunConfig, after_step: int):
        self._all: list[tuple[str, Tracker]] = []
        try:
            for name in dict.fromkeys((*(("tensorboard",) if config.tensorboard else ()), *config.trackers)):
                make = resolve("tracker", name, TRACKERS)
                but = (ConfigError, OSError)
                made = call_with("tracker", name, make, config, after_step, options="{}", but=but)
                self._all.append((name, made))
        except ValueError as error:
            self.close()
            raise ConfigError(str(error)) from error

    def log(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Gives values to all."""
        self._each(lambda tracker: tracker.log(step, kind, values))

    def commit(self) -> None:
        """Commits all."""
        self._each(lambda tracker: tracker.commit())

    def close(self) -> None:
        """Closes all."""
        left, self._all = self._all, []
        for name, tracker in left:
            self._called(name, tracker, lambda tracker: tracker.close())

    def _each(self, do: Callable[[Tracker], None]) -> None:
        for name, tracker in self._all:
            self._called(name, tracker, do)

    def _called(self, name: str, tracker: Tracker, do: Callable[[Tracker], None]) -> None:
        try:
            do(tracker)
        except OSError:  # a full disk, with the name of the file
            raise
        except Exception as error:  # whatever a service or a user's code raises
            raise RunError(
                f"tracker {name!r} raised {in_one_line(error, name.partition(':')[0])}. The run goes on from its newest "
                "checkpoint, also without it (--trackers)."
            ) from error
