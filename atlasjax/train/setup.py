"""Makes and checks everything that a run needs before its first step, before anything is compiled."""

import dataclasses
import json
import os
from collections.abc import Callable

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import PyTree

from atlasjax import storage
from atlasjax.config_json import to_dict
from atlasjax.data.pipeline import BatchIterator, Pipeline, Position, make_pipeline, merge_positions
from atlasjax.data.tokenizers import Tokenizer, load_tokenizer, make_tokenizer
from atlasjax.distributed.mesh import make_mesh
from atlasjax.distributed.sharding import row_reader
from atlasjax.machine import available_bytes, machine_memory
from atlasjax.nn.mixer_check import check_own_calls
from atlasjax.train import fits
from atlasjax.train import state as state_lib
from atlasjax.train.config import HELD_OUT, TrainConfig, changes_on_resume, run_folder, saved_config
from atlasjax.train.cores import mesh_of, usable_cpu_devices
from atlasjax.train.evaluations import evaluation_data
from atlasjax.train.initial import check_base
from atlasjax.train.optimizer import check_optimizer, learning_rate, run_optimizer
from atlasjax.train.saving.checkpoint import Checkpoints, complete_steps
from atlasjax.train.state import TrainState
from atlasjax.train.trainable import counted, select, trainable_mask


@dataclasses.dataclass(frozen=True)
class Setup:
    """The parts of a run before any parameter is made.

    Attributes:
      config: the run's configuration.
      mesh: the devices.
      tokenizer: text ↔ tokens.
      train_data: the batches of this process.
      evaluation_data: those of each evaluation, by name (`evaluations.evaluation_data`).
      graphdef: the model's definition.
      optimizer: clipping and AdamW.
      trainable: which parameters train (`trainable_mask`). None: all.
      schedule: step → learning rate.
      shardings: the shardings of the TrainState.
      skipped: one line for each mesh axis that a parameter could not be split over.
    """

    config: TrainConfig
    mesh: Mesh
    tokenizer: Tokenizer
    train_data: Pipeline
    evaluation_data: dict[str, Pipeline]
    graphdef: nnx.GraphDef
    optimizer: optax.GradientTransformation
    trainable: PyTree | None
    schedule: Callable[[jax.Array | int], jax.Array]
    shardings: TrainState
    skipped: list[str]

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the TrainState."""
        return state_lib.abstract_state(
            self.config.model, self.optimizer, self.shardings, self.trainable, ema=self.has_ema
        )

    @property
    def validation_data(self) -> Pipeline | None:
        """The batches of the held-out text. None if nothing is held out."""
        return self.evaluation_data.get(HELD_OUT)

    @property
    def has_ema(self) -> bool:
        """Whether the state has a moving average of the parameters."""
        return self.config.optimizer.ema_decay is not None

    def init_state(self) -> TrainState:
        """The initial TrainState from the config's seed. Every array is made on the devices that hold it."""
        init = jax.jit(
            lambda key: state_lib.init_state(self.config.model, self.optimizer, key, self.trainable, ema=self.has_ema),
            out_shardings=self.shardings,
        )
        return init(jax.random.key(self.config.seed))

    def state_from(self, params: PyTree) -> TrainState:
        """The initial TrainState with given parameters, which are donated."""
        init = jax.jit(
            lambda params, key: state_lib.state_from(params, self.optimizer, key, self.trainable, ema=self.has_ema),
            out_shardings=self.shardings,
            donate_argnums=0,
        )
        return init(params, jax.random.key(self.config.seed))


def prepare(config: TrainConfig) -> Setup:
    """Makes mesh, tokenizer, data and shardings of a run; compiles nothing.

    A run that has checkpoints keeps the tokenizer in its folder.

    Raises:
      ValueError: something in the config does not fit something else, or the data; the message names both.
      FileNotFoundError: the data or the tokenizer is not there.
    """
    mesh = make_mesh(mesh_of(config, usable_cpu_devices(), machine_memory()))
    check_base(config)
    memory = available_bytes()
    packs = config.data.packing == "documents"  # rows of any length; contiguous ones are as long as the text at most
    some = None if config.optimizer.trainable is None else 0
    fits.check_fits(config, mesh.shape, fits.parameters_at_least(config.model), memory, trainable=some, batch=packs)
    platform = mesh.devices.flat[0].platform
    for field, memory_config in config.model.memories.items():
        implementation = memory_config.implementation
        wanted = {"pallas_tpu": "tpu", "pallas_gpu": "gpu"}.get(implementation or "", platform)
        if platform == wanted:
            continue
        raise ValueError(
            f'model.{field}.implementation is "{implementation}", whose kernels run on {wanted.upper()}s; the devices here are '
            f'{platform}. Give "xla" or None: the numbers are the same, and so are the parameters.'
        )
    fits.check_divisible(config, mesh.shape)
    longest = config.model.max_positions
    if longest is not None and config.data.sequence_length > longest:
        raise ValueError(
            f"data.sequence_length is {config.data.sequence_length}; it should be at most model.max_positions, which is {longest}."
        )
    check_own_calls(config.model, config.data.sequence_length, packed=config.data.packing == "documents")
    tokenizer = run_tokenizer(config)
    if config.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}; it should be at least {tokenizer.vocab_size}, the vocabulary of "
            f"the tokenizer {config.data.tokenizer!r}."
        )
    where = row_reader(mesh)
    train_data = make_pipeline(config.data, tokenizer, "train", *where)
    validation = evaluation_data(config.data, config.evaluation_sets, tokenizer, *where)
    graphdef, shapes = state_lib.model_shapes(config.model)
    trainable = trainable_mask(config.optimizer.trainable, shapes)
    some, every = counted(shapes, trainable)
    fits.check_fits(config, mesh.shape, every, memory, trainable=some)
    optimizer = run_optimizer(config, trainable)
    check_optimizer(config.optimizer, optimizer, select(shapes, trainable))
    ema = config.optimizer.ema_decay is not None
    shardings, skipped = state_lib.state_shardings(config.model, optimizer, mesh, trainable, ema=ema)
    return Setup(
        config, mesh, tokenizer, train_data, validation, graphdef, optimizer, trainable,
        learning_rate(config.optimizer, config.steps), shardings, skipped,
    )  # fmt: skip


def run_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of a run: that of its folder if it has checkpoints, else that of the run it starts from, else a new one.

    Without a checkpoint, the folder may have the tokenizer of an earlier start with other settings. Errors of a new one are those
    of `data.make_tokenizer`.

    Raises:
      FileNotFoundError: the folder has checkpoints and no tokenizer; one that is trained again may be another one.
      ValueError: the tokenizer in the folder is not the one that its checkpoints were trained with.
    """
    run_dir = run_folder(config.run_dir)
    if complete_steps(run_dir / "checkpoints"):
        return _saved_tokenizer(run_dir)
    if config.init_from is not None:
        return _saved_tokenizer(run_folder(config.init_from))
    return make_tokenizer(config.data)


def _saved_tokenizer(run_dir: storage.AnyPath) -> Tokenizer:
    """The tokenizer of a run with checkpoints. What older versions have saved names none, and is believed."""
    tokenizer = load_tokenizer(run_dir / "tokenizer")
    with Checkpoints(run_dir / "checkpoints", clean=False) as checkpoints:
        found = checkpoints.newest_tokenizer()
    step, wanted = found or (0, None)
    if wanted is not None and wanted != tokenizer.fingerprint:
        raise ValueError(
            f"{str(run_dir / 'tokenizer')!r} is not the tokenizer of the run in {str(run_dir)!r}: its fingerprint is "
            f"{tokenizer.fingerprint[:12]}…, and that of the checkpoint of step {step} is {wanted[:12]}…. Put the run's own back."
        )
    return tokenizer


# What the files of imported weights, and those beside their tokenizer, say about texts: read by `interop` and `serve`.
_NAMING = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
_TEXT_ENDS = {
    "peer": ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", *_NAMING),
    "tokenizer": _NAMING,
}
_TEMPLATES = "additional_chat_templates"


def write_run_files(setup: Setup) -> None:
    """Makes the run's folder with config.json, the tokenizer, and what says how texts and conversations begin and end.

    The last are files that came with imported weights, of the run that this one starts from.

    Raises:
      OSError: the folder cannot be made or written.
    """
    run_dir = run_folder(setup.config.run_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    storage.write_whole(run_dir / "config.json", (json.dumps(to_dict(setup.config), indent=2) + "\n").encode())
    setup.tokenizer.save(run_dir / "tokenizer")
    if setup.config.init_from is None:
        return
    first = run_folder(setup.config.init_from)
    more = first / "peer" / _TEMPLATES
    named = [f"peer/{_TEMPLATES}/{file.name}" for file in more.iterdir()] if more.is_dir() else []
    for name in [*(f"{folder}/{name}" for folder, names in _TEXT_ENDS.items() for name in names), *named]:
        given, own = first / name, run_dir / name
        if given.is_file() and not own.is_file():
            own.parent.mkdir(parents=True, exist_ok=True)
            storage.write_whole(own, given.read_bytes())


def check_resumable(config: TrainConfig) -> list[str]:
    """Checks that the checkpoints in the run's folder, if any, are of the run that `config` describes.

    A run without steps has seen no data, so only its architecture is fixed.

    Returns:
      A line "field: old → new" for each difference that is allowed when a run is resumed. Empty without checkpoints.

    Raises:
      ValueError: the architecture or the data is another one; the message names the fields.
    """
    folder = run_folder(config.run_dir) / "checkpoints"
    if not lexists(folder):
        return []
    if not folder.is_dir():
        raise ValueError(
            f"run_dir is {config.run_dir!r}; 'checkpoints' in it is not a folder. Move it away, or give another run_dir."
        )
    with Checkpoints(folder, config.keep) as checkpoints:
        saved, started = checkpoints.newest_config(), checkpoints.steps() != [0]
    if saved is None:
        return []
    before = saved_config(saved, config.run_dir)
    architecture, fixed, free = changes_on_resume(to_dict(before), to_dict(config))
    options = [line for line in free if line.startswith("optimizer.options:")]
    if options and started and not (architecture or fixed) and not _same_optimizer_state(before, config):
        fixed = options
    if architecture or (fixed and started):
        what = (
            "a checkpoint of another architecture"
            if architecture
            else "a run with other settings, which must not change"
        )
        raise ValueError(
            f"{config.run_dir} holds {what} ({', '.join(architecture + fixed)}). Use another run_dir for a new run, or the "
            f"same settings to resume; init_from={config.run_dir} starts a new run from its parameters."
        )
    return free


def _same_optimizer_state(before: TrainConfig, after: TrainConfig) -> bool:
    """Whether the optimizers of two configs of the same model and trainable parameters have states of the same form."""
    _, shapes = state_lib.model_shapes(after.model)
    trainable = trainable_mask(after.optimizer.trainable, shapes)
    try:
        states = [
            jax.eval_shape(run_optimizer(config, trainable).init, select(shapes, trainable))
            for config in (before, after)
        ]
    except Exception:  # whatever a user's optimizer raises; `prepare` reports it
        return True
    return jax.tree.flatten(states[0]) == jax.tree.flatten(states[1])


def lexists(path: storage.AnyPath) -> bool:
    """Whether something is there, if only a link to nothing."""
    return path.exists() if isinstance(path, storage.StorePath) else os.path.lexists(path)


def set_position(iterator: BatchIterator, positions: list[Position | None]) -> None:
    """Puts this process's iterator where the checkpoint of any number of processes left it.

    Raises:
      ValueError: the positions do not belong together, or are of other data.
    """
    iterator.set_state(merge_positions(positions))


def all_positions(iterator: BatchIterator) -> list[Position]:
    """The data positions of all processes, known to each."""
    position = iterator.get_state()
    if jax.process_count() == 1:
        return [position]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(position).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(text.size))
    padded = np.zeros(int(np.max(sizes)), np.uint8)
    padded[: text.size] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(bytes(row[: int(size)])) for row, size in zip(rows, sizes)]
