"""`atlasjax info`."""

import dataclasses
from collections.abc import Iterator

from atlasjax import table1
from atlasjax.cli.options.info import InfoCommand
from atlasjax.nn import ModelConfig, count_parameters
from atlasjax.nn.mixers import memory_calls
from atlasjax.plan import Plan, device_hours, forward_flops_per_token, plan_training, suggested_mesh
from atlasjax.plan.training import UTILIZATION, check_plan
from atlasjax.presets import ARCHITECTURES, SIZES, describe, has_memory, preset_names
from atlasjax.train.config import TrainConfig
from atlasjax.train.defaults import default_config
from atlasjax.train.errors import ConfigError, RunError


def run(command: InfoCommand) -> None:
    """Runs the command. `atlasjax.cli.main` turns its errors into exit codes."""
    if command.names:
        print("\n".join(ARCHITECTURES))
        print(f"\nEach with -{', -'.join(SIZES)}, e.g. atlas-tiny.")
        return
    if command.rules:
        print(table1.page(), end="")
        return
    try:
        presets = command.preset if command.size is None else tuple(preset_names(command.size))
        configs = {preset: _config(command, preset) for preset in presets}
        if command.plan is not None:
            for config in configs.values():
                check_plan(config, command.plan)
        rows = {preset: _sizes(config) for preset, config in _shown(configs, "Tracing", least=5)}
        plans = (
            {preset: plan_training(config, command.plan) for preset, config in _shown(configs, "Compiling", least=1)}
            if command.plan is not None
            else {}
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    except RuntimeError as error:
        raise RunError(f"planning for {command.plan}: {error}") from error
    entries = {preset: {**row, **_plan_rows(plans.get(preset), configs[preset])} for preset, row in rows.items()}
    _table(entries, as_rows=command.size is not None)


def _shown(configs: dict[str, TrainConfig], doing: str, *, least: int) -> Iterator[tuple[str, TrainConfig]]:
    """The presets, with a bar that shows which one is next, if there are at least so many.

    A size has more than a hundred, and a preset takes a second or two to trace, and a minute or more to compile.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=len(configs) < least) as progress:
        task = progress.add_task(doing, total=len(configs))
        for preset, config in configs.items():
            progress.update(task, description=f"{doing} {preset}")
            yield preset, config
            progress.advance(task)


def _config(command: InfoCommand, preset: str) -> TrainConfig:
    config = default_config(preset)
    if command.implementation is not None:
        if not memory_calls(config.model):
            raise ConfigError(
                f"implementation is {command.implementation!r}, but {preset} has no memory whose implementation it could choose."
            )
        memory = dataclasses.replace(config.model.memory, implementation=command.implementation)
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, memory=memory))
    data = dataclasses.replace(
        config.data,
        batch_size=_given(command.batch_size, config.data.batch_size),
        sequence_length=_given(command.sequence_length, config.data.sequence_length),
        packing=config.data.packing if command.packing is None else command.packing,
    )
    accumulation = _given(command.accumulation, config.accumulation)
    config = dataclasses.replace(config, data=data, accumulation=accumulation)
    if command.plan is not None:
        config = dataclasses.replace(config, mesh=command.mesh or suggested_mesh(config, command.plan))
    return config


def _given(value: int | None, default: int) -> int:
    return default if value is None else value


_FFNS = {"swiglu": "SwiGLU", "gelu": "GELU", "relu2": "squared ReLU", "channel_mixing": "channel mixing"}


def _sizes(config: TrainConfig) -> dict[str, str]:
    model, length = config.model, config.data.sequence_length
    numbers = describe(model, length=length)
    # The cache of a longer sequence shows whether the cache grows with the text.
    grows = describe(model, length=2 * length)["state_bytes_per_sequence"] != numbers["state_bytes_per_sequence"]
    return {
        "mixer": _mixer(model),
        "layers × width, heads": f"{model.num_layers} × {model.dim}, {model.num_heads}",
        "feed-forward": _network(model),
        "parameters": f"{numbers['parameters']:,}",
        **({"active for a token": f"{count_parameters(model, active=True):,}"} if model.has_experts else {}),
        "without embeddings": f"{numbers['non_embedding_parameters']:,}",
        "state per sequence": _size(numbers["state_bytes_per_sequence"]) + (f" at {length:,} tokens" if grows else ""),
        "forward FLOPs per token": f"{forward_flops_per_token(config):.3g}",
        "at sequence length": f"{length:,}",
        **(_against_attention(config) if has_memory(model) and model.memory.caching is not None else {}),
    }


def _network(model: ModelConfig) -> str:
    dense = [] if model.network == "none" else [f"{_FFNS[model.network]} {model.resolved_mlp_dim:,}"]
    given = model.experts
    experts = [f"{given.per_token} of {given.number} experts, {_FFNS[given.network]} {model.expert_width:,}"]
    return "; ".join(dense + (experts if model.has_experts else [])) or "none"


def _against_attention(config: TrainConfig) -> dict[str, str]:
    """The costs of the same model with full attention instead of its cached memories."""
    model = dataclasses.replace(config.model, mixer="attention")
    numbers = describe(model, length=config.data.sequence_length)
    return {
        "full attention instead: keys and values": _size(numbers["state_bytes_per_sequence"]),
        "full attention instead: FLOPs per token": f"{forward_flops_per_token(dataclasses.replace(config, model=model)):.3g}",
    }


def _mixer(model: ModelConfig) -> str:
    added = "" if (branch := model.branch_alone) is None else f"; beside each: {_mixer(branch)}"
    pattern = ", ".join(model.pattern)
    if not has_memory(model):
        return pattern + added
    caching = model.memory.caching
    cached = "" if caching is None else f", {caching.aggregation} every {caching.segment_size}"
    return f"{pattern} of {model.memory.rule}{cached}{added}"


def _plan_rows(plan: Plan | None, config: TrainConfig) -> dict[str, str]:
    if plan is None:
        return {}
    tokens = config.steps * config.data.batch_size * config.data.sequence_length
    hours = device_hours(config, plan.topology)
    return {
        "topology": f"{plan.topology}, {plan.devices} device{'s' if plan.devices > 1 else ''}",
        "mesh": ", ".join(f"{axis} {size}" for axis, size in plan.mesh.items()),
        "per device: state and batch": _size(plan.argument_bytes),
        "per device: temporary": _size(plan.temp_bytes),
        "per device: output": _size(plan.output_bytes),
        "per device: total": f"{_size(plan.total_bytes)} of {_size(plan.available_bytes)}",
        "fits": "yes"
        if plan.fits
        else "no: try more --accumulation, --mesh.tensor, --mesh.sequence or a shorter --sequence-length",
        "training FLOPs per step": f"{plan.flops:.3g}",
        f"device-hours at an MFU of {UTILIZATION:.0%}": (
            f"{f'{hours:,.0f}' if hours >= 10 else f'{hours:.2g}'} for {tokens:.3g} tokens"
        ),
        "collectives in the program": ", ".join(f"{kind} {n}" for kind, n in plan.collectives.items() if n) or "none",
        "replicated during resharding": f"{len(plan.rematerialized)} arrays" if plan.rematerialized else "nothing",
        "kernels in the program": str(plan.kernels),
        "compiled in": f"{plan.compile_seconds:.0f} s",
    }


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.2f} MiB"


def _table(entries: dict[str, dict[str, str]], *, as_rows: bool) -> None:
    """Prints the entries as columns, or as rows of a table that is as wide as necessary."""
    from rich.console import Console
    from rich.table import Table

    fields = list(dict.fromkeys(field for entry in entries.values() for field in entry))
    entries = {name: {field: entry.get(field, "") for field in fields} for name, entry in entries.items()}
    if as_rows:
        table = Table("", *fields)
        for name, entry in entries.items():
            table.add_row(name, *entry.values())
    else:
        table = Table("", *entries)
        for name in fields:
            table.add_row(name, *(entry[name] for entry in entries.values()))
    # Rich cuts columns to the width of the terminal; in a pipe or a file nothing should be cut.
    console = Console()
    needed = Console(width=10_000).measure(table).maximum
    Console(width=max(console.width, needed) if not console.is_terminal else None).print(table)
