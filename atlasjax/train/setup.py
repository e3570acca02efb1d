"""Makes and checks everything that a run needs before its first step, before anything is compiled."""

import dataclasses
import json

from atlasjax import storage
from atlasjax.config_json import to_dict
from atlasjax.data.pipeline import Pipeline, make_pipeline
from atlasjax.data.tokenizers import NAMING, Tokenizer, load_tokenizer, make_tokenizer
from atlasjax.distributed.mesh import make_mesh
from atlasjax.distributed.sharding import row_reader
from atlasjax.machine import available_bytes, machine_memory
from atlasjax.nn.mixer_check import check_own_calls
from atlasjax.train import fits
from atlasjax.train.config import HELD_OUT, TrainConfig, run_folder
from atlasjax.train.cores import mesh_of, usable_cpu_devices
from atlasjax.train.evaluations import evaluation_data
from atlasjax.train.initial import check_base
from atlasjax.train.learner import Learner, make_learner
from atlasjax.train.saving.checkpoint import Checkpoints
from atlasjax.train.saving.step_folders import complete_steps
from atlasjax.train.trainable import counted


@dataclasses.dataclass(frozen=True)
class Setup(Learner):
    """The parts of a run before any parameter is made.

    Attributes:
      tokenizer: text ↔ tokens.
      train_data: the batches of this process.
      evaluation_data: those of each evaluation, by name (`evaluations.evaluation_data`).
    """

    tokenizer: Tokenizer
    train_data: Pipeline
    evaluation_data: dict[str, Pipeline]

    @property
    def validation_data(self) -> Pipeline | None:
        """The batches of the held-out text. None if nothing is held out."""
        return self.evaluation_data.get(HELD_OUT)


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
            f"data.sequence_length is {config.data.sequence_length}; it must be at most model.max_positions, which is {longest}."
        )
    if config.model.inner_loop is not None:
        config.model.inner_loop.check_length(config.data.sequence_length, "data.sequence_length")
    check_own_calls(config.model, config.data.sequence_length, packed=config.data.packing == "documents")
    tokenizer = run_tokenizer(config)
    if config.model.vocab_size < tokenizer.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}; it must be at least {tokenizer.vocab_size}, the vocabulary of "
            f"the tokenizer {config.data.tokenizer!r}."
        )
    where = row_reader(mesh)
    train_data = make_pipeline(config.data, tokenizer, "train", *where)
    validation = evaluation_data(config.data, config.evaluation_sets, tokenizer, *where)
    learner = make_learner(config, mesh)
    some, every = counted(learner.shapes, learner.trainable)
    fits.check_fits(config, mesh.shape, every, memory, trainable=some)
    return Setup(**vars(learner), tokenizer=tokenizer, train_data=train_data, evaluation_data=validation)


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
    """The tokenizer of a run with checkpoints. Checkpoints of older versions name none, and are believed."""
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


# Files of imported weights, and files beside their tokenizer, that say how texts begin and end. `interop` and `serve` read them.
_TEXT_ENDS = {
    "peer": ("config.json", "generation_config.json", "tokenizer.json", "tokenizer.model", *NAMING),
    "tokenizer": NAMING,
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
