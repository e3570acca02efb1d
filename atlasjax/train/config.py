"""The configuration of a training run, and the differences between two of them."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping

from atlasjax import check, storage
from atlasjax.config_json import from_dict
from atlasjax.data.config import DataConfig
from atlasjax.distributed.mesh import MeshConfig
from atlasjax.distributed.processes import ProcessConfig
from atlasjax.names import name_of, options_text, resolve, signature_of
from atlasjax.nn.config import ModelConfig
from atlasjax.train.loss import LossConfig
from atlasjax.train.trackers import TRACKERS

SCHEDULES = ("cosine", "linear", "wsd", "constant")
HELD_OUT = "held-out"  # the name of the evaluation on the held-out text of the data


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up and cosine decay, and clipping of the gradient's global norm (A App. E: AdamW, cosine, decay 0.1).

    Attributes:
      name: "adamw", or "package.module:function" for any function that returns an optax transformation: "optax:lion",
        "optax.contrib:muon", or one of your own. It is called with the schedule, `options`, the mask of the parameters that decay
        if it has a parameter `mask` or `weight_decay_mask`, and the axes of the matrices if it has a parameter
        `muon_weight_dimension_numbers`. The function itself is also accepted, and stored as that name.
      options: keyword arguments of that function, as a JSON object. A dictionary is also accepted, and stored as text. b1, b2, eps
        and weight_decay below belong to AdamW.
      schedule: "cosine", "linear", "wsd" (warm-up, stable, decay), "constant", or "package.module:function", which is called with
        this config and the number of steps of the whole run, and returns a function step (0 is the first) → learning rate.
      learning_rate: the peak learning rate, reached at the end of the warm-up.
      warmup_steps: number of steps of linear warm-up.
      final_fraction: the learning rate at the last step, as a fraction of the peak ("cosine", "linear" and "wsd").
      decay_fraction: the part of the run, at its end, in which "wsd" decays; before it the rate is the peak.
      b1, b2, eps: AdamW's decay rates of the two moments, and the term that prevents a division by zero.
      weight_decay: decoupled decay, applied to matrices only (see `optimizer.decay_mask`).
      clip_norm: gradients with a larger global norm are scaled down to this norm. None means no clipping.
      trainable: a regular expression that is searched for in the dotted paths of the parameters, such as
        "layers.mixer.cache.connector.kernel"; only those in which it is found train, and the others stay as they are. None: all.
      ema_decay: decay in (0, 1) of an exponential moving average of the parameters, which is kept and evaluated beside them. In
        step n ≥ 0 it is min(ema_decay, (1 + n) / (10 + n)), so that the first steps are soon forgotten. None: no average.
    """

    name: str = "adamw"
    options: str = "{}"
    schedule: str = "cosine"
    learning_rate: float = 4e-4
    warmup_steps: int = 1000
    final_fraction: float = 0.1
    decay_fraction: float = 0.2
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = 1.0
    trainable: str | None = None
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        for field in ("name", "schedule"):
            object.__setattr__(self, field, name_of(f"optimizer.{field}", getattr(self, field)))
        object.__setattr__(self, "options", options_text("optimizer", "options", self.options))
        resolve("optimizer", self.name, optimizers(self.name))
        resolve("learning-rate schedule", self.schedule, dict.fromkeys(SCHEDULES))
        if self.options != "{}" and self.name == "adamw":
            raise ValueError(
                f"optimizer.options is {self.options}; 'adamw' has fields of its own (b1, b2, eps, weight_decay). Options are for "
                "another optimizer, such as 'optax:lion'."
            )
        for name, (holds, what) in _NUMBERS.items():
            value = getattr(self, name)
            if name in ("clip_norm", "ema_decay") and value is None:
                continue
            inside = check.is_finite(value) and holds(value)
            check.require(inside, f"optimizer.{name}", value, what)
        if self.trainable is not None:
            try:
                re.compile(self.trainable)
            except (re.error, TypeError) as error:
                raise ValueError(
                    f"optimizer.trainable is {self.trainable!r}, must be a regular expression ({error})."
                ) from None
        inside = check.is_integer(self.warmup_steps, 0) and self.warmup_steps < _MOST_STEPS
        check.require(inside, "optimizer.warmup_steps", self.warmup_steps, "0 or more, and below 2^31")


def optimizers(name: str) -> dict[str, object]:
    """AdamW, and for the name of one of optax's also all functions of optax that say that they return a transformation.

    A file may name these: they are as well known as the library's own, and are called with numbers and text only.
    """
    known: dict[str, object] = {"adamw": None}
    module = name.partition(":")[0]
    if module in ("optax", "optax.contrib"):
        for function, value in vars(importlib.import_module(module)).items():
            signature = signature_of(value) if inspect.isfunction(value) else None
            if signature is not None and "GradientTransformation" in str(signature.return_annotation):
                known[f"{module}:{function}"] = value
    return known


_NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "learning_rate": (lambda value: value > 0, "positive and finite"),
    "final_fraction": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "decay_fraction": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "b1": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "b2": (lambda value: 0 <= value < 1, "in [0, 1)"),
    "eps": (lambda value: value > 0, "positive and finite"),
    "weight_decay": (lambda value: value >= 0, "0 or more, and finite"),
    "clip_norm": (lambda value: value > 0, "positive and finite, or None"),
    "ema_decay": (lambda value: 0 < value < 1, "in (0, 1), or None"),
}
_MOST_STEPS = 2**31  # they are counted in int32


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run. Batch size and sequence length are those of `data`.

    Attributes:
      model: the architecture.
      data: what to read, in which sequences and batches.
      optimizer: the outer optimizer and its schedule.
      loss: how the training loss is computed.
      mesh: how the work is divided over devices.
      processes: the other processes of a multi-host run.
      steps: number of optimizer steps of the whole run.
      accumulation: number n of microbatches per step. Gradients are summed over them, so activations need 1/n of the memory.
      seed: seed of the parameters and of everything random in a run, except the order of the data (`data.seed`).
      run_dir: folder of checkpoints, metrics and plots; a path, or a URL on gs://.
      init_from: folder of another run, whose newest parameters and tokenizer a new run starts from. The model is that of the other
        run; Memory Caching may be added (`CachingConfig.added`), and `HierarchyConfig.fine_chunks` may change. No effect once the
        run has checkpoints.
      eval_every: number of steps between evaluations on held-out text. 0 evaluates only at the end, where every run does.
      eval_batches: number of batches per evaluation of a text. None means all.
      evaluation_sets: further texts of each evaluation, "name=path" or "name=path,path": files (text, .jsonl, .parquet), folders
        or URLs, as in `DataConfig.paths`. Results are recorded and printed under the name.
      checkpoint_every: number of steps between checkpoints. 0 saves only at the end, where every run does.
      keep: number of checkpoints to keep, at least 2, so that one remains if the newest is damaged. The oldest are deleted.
      log_every: number of steps between two lines of progress and metrics.
      tensorboard: whether to write TensorBoard event files too.
      trackers: where metrics go besides: "wandb", or "package.module:function" for your own (`atlasjax.train.trackers`). The
        function or class itself is also accepted, and stored as that name.
      profile: "first:last", the steps of which a profiler trace is written to `profile` in the run's folder. None writes none.
      memory_norm_limit: a memory is reported when the root mean square of its rows' norms exceeds this.
      compilation_cache: whether compiled programs are kept in `compiled` in the run's folder, so that a second start does not
        compile them again. Programs are code, so whoever can write to the folder can run code in the job. None: no.
    """

    model: ModelConfig
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    loss: LossConfig = dataclasses.field(default_factory=LossConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    processes: ProcessConfig = dataclasses.field(default_factory=ProcessConfig)
    steps: int = 1000
    accumulation: int = 1
    seed: int = 0
    run_dir: str = "runs/default"
    init_from: str | None = None
    eval_every: int = 100
    eval_batches: int | None = 8
    evaluation_sets: tuple[str, ...] = ()
    checkpoint_every: int = 100
    keep: int = 3
    log_every: int = 10
    tensorboard: bool = True
    trackers: tuple[str, ...] = ()
    profile: str | None = None
    memory_norm_limit: float = 32.0
    compilation_cache: bool | None = None

    def __post_init__(self) -> None:
        few = not isinstance(self.steps, int) or self.steps < _MOST_STEPS
        check.require(few, "steps", self.steps, "below 2^31")
        for name, least in (
            ("steps", 1), ("accumulation", 1), ("eval_every", 0), ("checkpoint_every", 0), ("keep", 2), ("log_every", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            what = f"at least {least}" if check.is_integer(value) else f"an integer of at least {least}"
            check.require(check.is_integer(value, least), name, value, what)
        check.require(check.is_integer(self.seed, 0) and self.seed < 2**32, "seed", self.seed, "in [0, 2^32)")
        inside = self.eval_batches is None or check.is_integer(self.eval_batches, 1)
        check.require(inside, "eval_batches", self.eval_batches, "at least 1, or None for all")
        if isinstance(self.evaluation_sets, str):
            raise ValueError(f"evaluation_sets is {self.evaluation_sets!r}; it must be a tuple of strings.")
        object.__setattr__(self, "evaluation_sets", tuple(self.evaluation_sets))  # JSON has lists
        parse_sets(self.evaluation_sets)
        if isinstance(self.trackers, str):
            raise ValueError(f"trackers is {self.trackers!r}; it must be a tuple of names.")
        object.__setattr__(self, "trackers", tuple(name_of("trackers", tracker) for tracker in self.trackers))
        for tracker in self.trackers:
            resolve("tracker", tracker, TRACKERS)
        inside = check.is_number(self.memory_norm_limit) and self.memory_norm_limit > 0
        check.require(inside, "memory_norm_limit", self.memory_norm_limit, "positive")
        if self.profile is not None:
            found = re.fullmatch(r"(\d{1,9}):(\d{1,9})", self.profile)
            inside = found is not None and 1 <= int(found[1]) <= int(found[2]) <= self.steps
            check.require(inside, "profile", self.profile, f'"first:last", steps from 1 to {self.steps}')
        if self.init_from is not None and run_folder(self.init_from, "init_from") == run_folder(self.run_dir):
            raise ValueError(
                f"init_from is {self.init_from!r}, the run's own folder; give another run_dir for the new run."
            )
        run_folder(self.run_dir)
        if self.data.batch_size % self.accumulation:
            raise ValueError(
                f"accumulation is {self.accumulation}; it should divide data.batch_size, which is {self.data.batch_size}."
            )


def parse_sets(sets: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """ "name=path" or "name=path,path,…" for each set, as name → paths.

    Raises:
      ValueError: one has another form, or two have the same name.
    """
    found: dict[str, tuple[str, ...]] = {}
    for one in sets:
        name, _, paths = one.partition("=") if isinstance(one, str) else ("", "", "")
        listed = tuple(path for path in paths.split(",") if path)
        if not name.replace("-", "").replace("_", "").isalnum() or not listed:
            raise ValueError(
                f'evaluation_sets has {one!r}, must be "name=path" or "name=path,path"; names have letters, digits, - and _.'
            )
        if name in found or name == HELD_OUT:
            raise ValueError(f"evaluation_sets has two sets named {name!r}; each needs a name of its own.")
        found[name] = listed
    return found


def run_folder(run_dir: "str | storage.AnyPath", field: str = "run_dir") -> storage.AnyPath:
    """The folder that a run_dir names. Touches neither disk nor bucket. `field` is its name in messages.

    Raises:
      ValueError: it is empty, or a URL that a run cannot be in.
    """
    check.require(bool(run_dir), field, run_dir, "the path of a folder")
    try:
        folder = storage.path(run_dir)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    if isinstance(folder, storage.StorePath) and folder.scheme != "gs":
        raise ValueError(
            f"{field} is {run_dir!r}; checkpoints are written to gs:// or to a folder of this machine, as which "
            "other stores can be mounted."
        )
    return folder


def saved_config(saved: Mapping[str, object], run_dir: object = "a folder") -> TrainConfig:
    """The config of a run's folder or checkpoint. Fields that did not exist yet get their defaults.

    Args:
      saved: its JSON.
      run_dir: the run's folder, for messages.

    Raises:
      ValueError: a field is unknown, wrong or out of its range; it names a part of the user's own that is not trusted
        (`atlasjax.trust`); or a mixer's sizes are missing, because an older version saved them elsewhere and the defaults would be
        another model.
    """
    where = f"the config of the run in {run_dir}"
    try:
        config = from_dict(TrainConfig, saved, where)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    sizes, model = {field.name for field in dataclasses.fields(ModelConfig)}, saved["model"]
    assert isinstance(model, Mapping)
    for mixer in config.model.mixers:
        if mixer in sizes and mixer not in model:
            raise ValueError(
                f"{where} has no model.{mixer}, the sizes of its mixer {mixer!r}: it was saved by an older atlasjax, "
                "which had them in model.elastic. Use that version, or train it again."
            )
    return config


def differences(
    old: Mapping[str, object], new: Mapping[str, object], prefix: str = ""
) -> Iterator[tuple[str, object, object]]:
    """Yields (dotted field, old value, new value) for each field in which two JSON forms differ."""
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after, f"{prefix}{name}.")
        elif before != after:
            yield f"{prefix}{name}", before, after


# Fields that may change when a run is resumed: how long, how fast and where it trains, and what it writes. All others determine
# the meaning of the saved state (architecture) or of the saved position (data). Bounds on a memory's steps do not change the
# meaning of its state, and may have to be lowered after its memories have grown. Truncation changes gradients only, and the
# implementation nothing.
_FREE = ("steps", "optimizer.", "loss.", "mesh.", "processes.", "run_dir", "eval_every", "eval_batches", "evaluation_sets",
         "checkpoint_every", "keep", "log_every", "tensorboard", "trackers", "accumulation", "init_from", "data.num_threads",
         "model.remat", "model.dtype", "profile", "memory_norm_limit", "compilation_cache",
         "model.memory.bounded", "model.memory.max_step", "model.memory.truncation", "model.memory.implementation",
         "model.branch.memory.implementation", "model.branch.memory.bounded",
         "model.branch.memory.max_step", "model.branch.memory.truncation", "model.branch.attention.fused",
         "model.attention.fused")  # fmt: skip


_STATE = ("optimizer.name", "optimizer.trainable")  # with another one the optimizer's state is another tree


def changes_on_resume(old: Mapping[str, object], new: Mapping[str, object]) -> tuple[list[str], list[str], list[str]]:
    """Sorts the differences between a saved run's config and the requested one.

    Returns:
      Lines "field: old → new" of three kinds: the architecture (`model.*`), other fields that must not change, and
      fields that may.
    """
    architecture, fixed, free = [], [], []
    for name, before, after in differences(old, new):
        line = f"{name}: {before!r} → {after!r}"
        begins = name == "optimizer.ema_decay" and before is None  # the saved state has no average
        if name.startswith(_FREE) and name not in _STATE and not begins:
            free.append(line)
        elif name.startswith("model"):
            architecture.append(line)
        else:
            fixed.append(line)
    return architecture, fixed, free
