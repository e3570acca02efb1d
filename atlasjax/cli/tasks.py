"""`atlasjax evaluate --tasks` with tasks of EleutherAI's lm-eval."""

import contextlib
import dataclasses
import datetime
import difflib
import hashlib
import importlib
import importlib.util
import json
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import atlasjax
from atlasjax import storage
from atlasjax.check import is_integer
from atlasjax.cli.kept import KeptResults
from atlasjax.cli.options.evaluate import TaskOptions
from atlasjax.config_json import to_dict
from atlasjax.data.tokenizers import Tokenizer
from atlasjax.evaluate.long_context import TASKS
from atlasjax.interop.text_ends import TextEnds, text_ends
from atlasjax.names import lookup
from atlasjax.nn import count_parameters
from atlasjax.serve.chat import PlainChat, TemplateChat, chat_of
from atlasjax.train.config import run_folder
from atlasjax.train.errors import ConfigError, user_errors
from atlasjax.train.load import LoadedRun

if TYPE_CHECKING:
    from atlasjax.evaluate.harness import HarnessModel


@dataclasses.dataclass(frozen=True)
class LoadedTasks:
    """Tasks of lm-eval with their data.

    Attributes:
      manager: knows their names.
      found: tasks and groups of tasks.
      generation: by task, its arguments for generation.
    """

    manager: Any
    found: list[Any]
    generation: dict[str, dict[str, Any]]


def load_tasks(options: TaskOptions, *, stream: bool) -> LoadedTasks:
    """The tasks with their data, for which no model is needed.

    Raises:
      ConfigError: lm-eval is not installed, a task is unknown, cannot be loaded or asks for what is not served, or an option does
        not go with --stream.
    """
    if stream and options.window is not None:
        raise ConfigError("--stream reads whole documents, so it takes no --window.")
    if importlib.util.find_spec("lm_eval") is None:
        close = difflib.get_close_matches(options.tasks[0], TASKS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"--tasks {options.tasks[0]} needs lm-eval: pip install 'atlasjax[eval]'.{hint}")
    for path in options.include_path:
        if not pathlib.Path(path).is_dir():
            raise ConfigError(f"include_path is {path!r}, which is not a folder.")
    for name in options.tasks:
        if _is_file(name) and not pathlib.Path(name).is_file():
            raise ConfigError(f"tasks has {name!r}, which is not a file.")
    manager = _manager(options)
    names: list[str] = []
    for name in options.tasks:
        matches = [] if _is_file(name) else manager.match_tasks([name])  # "*" and "?" stand for any characters
        if not matches and not _is_file(name):
            with user_errors():
                lookup("task", name, dict.fromkeys([*TASKS, *manager.all_tasks]))
        names += matches or [name]
    found: list[Any] = []
    generation: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(names):
        try:
            one = manager.load([name])
        except Exception as error:  # data sets that cannot be reached, or YAML that is wrong: of any class
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"the task {name!r} cannot be loaded: {said[:300]}") from error
        groups = one.get("groups", {})
        found += [groups[name]] if name in groups else list(one["tasks"].values())
        for label, task in one["tasks"].items():
            generation |= _checked(label, task)
    return LoadedTasks(manager, found, generation)


def _checked(name: str, task: Any) -> dict[str, dict[str, Any]]:
    """The arguments of a task for generation, by its name, if it generates. Raises ConfigError if something is not served."""
    for trait, what in (
        ("MULTIMODAL", "asks about images or sound"),
        ("UNSAFE_CODE", "runs code that the model writes"),
    ):
        if getattr(task, trait, False):
            raise ConfigError(f"the task {name!r} {what}, which is not done here.")
    if getattr(task, "OUTPUT_TYPE", None) != "generate_until":
        return {}
    options = dict(task.config.generation_kwargs or {})
    with _naming(name):
        _harness().generation(options)
    return {name: options}


@contextlib.contextmanager
def _naming(task: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"the task {task!r}: {error}") from None


def run_tasks(
    run_dir: str, loaded: LoadedRun, tasks: LoadedTasks, options: TaskOptions, *, stream: bool, ema: bool = False,
    chat: TemplateChat | None = None,
) -> None:  # fmt: skip
    """Runs tasks, prints their table and saves the results.

    The result of each request is kept as soon as it is known. If the command fails or is stopped, the same command, or one with
    other tasks, goes on from them.

    Args:
      run_dir, loaded, ema: the run, and which of its parameters were loaded.
      tasks: from `load_tasks`.
      options: as given to `load_tasks`.
      stream: reads each document of rolling perplexity as one stream.
      chat: the template that puts contexts into the form of a conversation. None: they stay as they are.

    Raises:
      ConfigError: an option is out of range for the model.
    """
    with user_errors():
        folder = run_folder(run_dir) / "evaluations"
        kept, model = _model(run_dir, folder, loaded, options, stream, ema, chat)
    for name, given in tasks.generation.items():
        with _naming(name):
            model.check_generation(given)
    if kept.found:
        print(f"going on after {kept.found:,} requests of an interrupted command, in {kept.file}")
    with contextlib.closing(kept):
        results = _evaluate(run_dir, loaded, tasks, options, model, chat)
        _print(results)
        for file in _save(folder, results):
            print(f"results: {file}")
        kept.remove()


def chat_template(run_dir: str) -> TemplateChat:
    """The chat template of a run. Raises ConfigError if it has none."""
    with user_errors():
        try:
            chat = chat_of(run_folder(run_dir))
        except ImportError as error:
            raise ConfigError(f"--apply-chat-template: pip install 'atlasjax[eval]' ({error}).") from None
    if isinstance(chat, PlainChat):
        raise ConfigError(
            f"--apply-chat-template: {run_dir!r} has no chat template. It comes with the tokenizer of imported weights "
            "(chat_template.jinja, or chat_template in tokenizer_config.json)."
        )
    return chat


def _harness() -> Any:
    """The module around lm-eval. It is imported here, because it cannot be where lm-eval is not installed."""
    return importlib.import_module("atlasjax.evaluate.harness")


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml"))


def _manager(options: TaskOptions) -> Any:
    """Knows the tasks of the given folders, and all of lm-eval only if one is asked for: reading them takes seconds."""
    from lm_eval.tasks import TaskManager

    folders = list(options.include_path)
    own = TaskManager(include_path=folders, include_defaults=False)
    return own if set(options.tasks) <= set(own.all_subtasks) else TaskManager(include_path=folders)


def _model(
    run_dir: str, folder: storage.AnyPath, loaded: LoadedRun, options: TaskOptions, stream: bool, ema: bool,
    chat: TemplateChat | None,
) -> tuple[KeptResults, "HarnessModel"]:  # fmt: skip
    """The model that lm-eval asks, and the results of an interrupted command that have the same model, tokenizer and settings."""
    config, tokenizer = loaded.config, loaded.tokenizer
    if chat is not None:
        chat.check(tokenizer)
    ends = text_ends(run_dir)
    prefix = _prefix(tokenizer, ends, options.prefix_token)
    window = None if stream else options.window or config.data.sequence_length
    asked = {
        "step": loaded.step, "ema": ema, "model": to_dict(config.model), "tokenizer": tokenizer.fingerprint, "prefix": prefix,
        "ends": [ends.begin, *ends.ends], "window": window, "chat": chat is not None, "atlasjax": atlasjax.__version__,
    }  # fmt: skip
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:12]
    kept = KeptResults(folder / f"lm_eval_unfinished_{digest}.jsonl")
    model = _harness().HarnessModel(
        loaded.model, tokenizer, prefix_token=prefix, begins_text=prefix in (ends.begin, *ends.ends), end_tokens=ends.ends,
        window=window, batch_size=options.batch_size, chat=None if chat is None else chat.rendered, kept=kept,
        about={"model_num_parameters": count_parameters(config.model), "model_dtype": config.model.dtype},
    )  # fmt: skip
    return kept, model


def _evaluate(
    run_dir: str, loaded: LoadedRun, tasks: LoadedTasks, options: TaskOptions, model: "HarnessModel", chat: TemplateChat | None
) -> dict[str, Any]:  # fmt: skip
    import lm_eval

    with user_errors():
        limit = options.limit if options.limit is None or options.limit < 1 else int(options.limit)
        # Without a manager it reads all its tasks once more; without a seed of torch it does not import torch.
        results = lm_eval.simple_evaluate(
            model, tasks=tasks.found, num_fewshot=options.num_fewshot, limit=limit, batch_size=options.batch_size,
            log_samples=options.log_samples, apply_chat_template=chat is not None, task_manager=tasks.manager,
            torch_random_seed=None,
        )  # fmt: skip
    assert results is not None  # it is None in the other processes of a job
    results["config"] |= {
        "model": "atlasjax",
        "model_args": {"run_dir": run_dir, "step": loaded.step},
        "apply_chat_template": chat is not None,
    }
    return results


def _prefix(tokenizer: Tokenizer, ends: TextEnds, given: int | None) -> int:
    """The token before documents. Texts of a run that was not imported have no token for their beginning."""
    if given is not None:
        if not is_integer(given, 0) or given >= tokenizer.vocab_size:
            raise ConfigError(f"prefix_token is {given}; it must be in [0, {tokenizer.vocab_size}).")
        return given
    own = [token for token in (ends.begin, *ends.ends) if token is not None]
    if own:
        return own[0]
    line_end = tokenizer.encode("\n")
    if not len(line_end):
        raise ConfigError("the tokenizer has no token for a line end; give --prefix-token.")
    return int(line_end[-1])


def _print(results: dict[str, Any]) -> None:
    from lm_eval.utils import make_table

    config = results["config"]
    arguments = config["model_args"]
    print(
        f"{arguments['run_dir']}, step {arguments['step']}; limit: {config['limit']}, window: {config['window']}, "
        f"prefix_token: {config['prefix_token']}, batch_size: {config['batch_size']}"
    )
    if config["truncated_contexts"]:
        print(f"contexts that lost their beginning: {config['truncated_contexts']}")
    print(make_table(results))
    if results.get("groups"):
        print(make_table(results, "groups"))


def _save(folder: storage.AnyPath, results: dict[str, Any]) -> list[storage.AnyPath]:
    """Writes results_<time>.json, and samples_<task>_<time>.jsonl if there are samples, as lm-eval names and writes them."""
    from lm_eval.utils import handle_non_serializable

    dump = lambda value, indent: json.dumps(value, indent=indent, default=handle_non_serializable, ensure_ascii=False)
    time = datetime.datetime.now().isoformat().replace(":", "-")
    files = {f"results_{time}.json": dump({k: v for k, v in results.items() if k != "samples"}, 2)}
    for task, samples in results.get("samples", {}).items():
        files[f"samples_{task}_{time}.jsonl"] = "".join(dump(sample, None) + "\n" for sample in samples)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        storage.write_whole(folder / name, text.encode())
    return [folder / name for name in files]
