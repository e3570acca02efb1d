"""G Table 2: time and bytes of one block, forward and backward, from 256 to 8,192 tokens, for GAM and attention.

    python -m experiments.gam.scaling                                 # 256 … 8,192 tokens, batch 1, float32
    python -m experiments.gam.scaling --bytes-only                    # compile only; bytes are exact on a busy machine as well
    python -m experiments.gam.scaling --batch-size 16 --dtype bfloat16    # the paper's batch, for a GPU or TPU
    python -m experiments.gam.scaling --report                        # only write the table and plot of existing rows

Blocks have the paper's size (width 512, 8 heads, 512 slots, GELU of 2,048, with LayerNorms and residuals), without dropout. The
gradient is that of a weighted sum of the outputs with respect to all parameters and the input.

- `gam`: the block of G §3.
- `attention`: the same block with this library's softmax attention, in blocks of 256 queries that are recomputed in the backward
  pass. Its bytes grow linearly with the length and its time quadratically.
- `attention-whole`: the paper's baseline, which stores the time × time weights of all heads.

Bytes are the compiler's count (`memory_analysis`), which needs no run: temporary memory plus inputs and outputs (parameters,
input, gradients). Together they correspond to the paper's peak memory. Times are the minimum over `--repeats` rounds, in each of
which every block runs once in turn. A block of more than `--most-bytes` is compiled but not run. Every length is a line of
`<out>/scaling-<device>.jsonl` (`bytes-…` with `--bytes-only`), and a finished one is skipped.
"""

import argparse
import dataclasses
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from experiments import pages, timing
from experiments.rows import append_row, read_rows

HERE = pathlib.Path(__file__).parent
BLOCKS = ("gam", "attention", "attention-whole")


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings shared by all rows of a table.

    Attributes:
      batch_size: number of sequences.
      dim: width of the block.
      dtype: dtype of activations and matmul inputs.
      bytes_only: whether times are left out.
    """

    batch_size: int = 1
    dim: int = 512
    dtype: str = "float32"
    bytes_only: bool = False


def block_config(name: str, settings: Settings) -> Any:
    """The named block as the layer of a model."""
    from experiments.gam.models import MODELS

    model = MODELS["gam" if name == "gam" else "transformer"]
    return dataclasses.replace(model, dim=settings.dim, dtype=settings.dtype, num_layers=1, dropout=0.0)


def compiled(name: str, length: int, settings: Settings) -> tuple[Any, tuple[Any, ...]]:
    """(compiled gradient of a block, shapes of its arguments: parameters, input, weights)."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from atlasjax.nn import AttentionMixer
    from atlasjax.nn.stack import Layer

    class WholeAttention(AttentionMixer):
        """Attention that keeps all weights, [batch, heads, time, time]."""

        def __call__(self, x, segment_ids=None, max_segments=None):
            q, k, v = self.attention.project(x)
            return self._output(jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla"))

    config = block_config(name, settings)

    def make() -> Layer:
        layer = Layer(config, 0, rngs=nnx.Rngs(0))
        if name == "attention-whole":
            layer.mixer = WholeAttention(config, rngs=nnx.Rngs(0))
        return layer

    graphdef, params = nnx.split(nnx.eval_shape(make), nnx.Param)
    shape = (settings.batch_size, length, settings.dim)

    def loss(params: Any, x: jax.Array, weights: jax.Array) -> jax.Array:
        y, _ = nnx.merge(graphdef, params).observe(x, None, None, None, None)
        return jnp.sum(y.astype(jnp.float32) * weights)

    shapes = (params, jax.ShapeDtypeStruct(shape, settings.dtype), jax.ShapeDtypeStruct(shape, jnp.float32))
    return jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*shapes).compile(), shapes


def runner(program: Any, shapes: tuple[Any, ...]) -> Callable[[], None]:
    """A function that runs a compiled block once, on random numbers, and waits."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    normal = lambda shape: rng.standard_normal(shape.shape, np.float32).astype(shape.dtype)
    scaled = lambda shape: normal(shape) * np.asarray(shape.shape[0] ** -0.5, shape.dtype)
    arguments = jax.device_put((jax.tree.map(scaled, shapes[0]), normal(shapes[1]), normal(shapes[2])))

    def run() -> None:
        jax.block_until_ready(program(*arguments))

    return run


def measure(length: int, settings: Settings, repeats: int, most_bytes: float) -> dict[str, Any]:
    """The row of one length: block → {bytes, of which temporary_bytes, seconds or None}."""
    blocks: dict[str, dict[str, Any]] = {}
    runs = {}
    for name in BLOCKS:
        program, shapes = compiled(name, length, settings)
        memory = program.memory_analysis()
        temporary = memory.temp_size_in_bytes
        total = temporary + memory.argument_size_in_bytes + memory.output_size_in_bytes
        blocks[name] = {"bytes": total, "temporary_bytes": temporary, "seconds": None}
        if not settings.bytes_only and total <= most_bytes:
            runs[name] = runner(program, shapes)
    for name, seconds in timing.in_turn(runs, repeats).items():
        blocks[name]["seconds"] = seconds
    return {"length": length, "settings": dataclasses.asdict(settings), "blocks": blocks}


def read(path: pathlib.Path, settings: Settings) -> dict[int, dict[str, Any]]:
    """Finished rows, by length; those of other settings are left out."""
    return {row["length"]: row for row in read_rows(path) if row["settings"] == dataclasses.asdict(settings)}


def growth(rows: list[dict[str, Any]], block: str, quantity: str) -> float | None:
    """A block's quantity at the longest length over that at the shortest; None where one was not measured."""
    first, last = (row["blocks"][block][quantity] for row in (rows[0], rows[-1]))
    return None if first is None or last is None else last / first


def table(rows: list[dict[str, Any]], settings: Settings, command: str, device: str) -> str:
    """The results as a page of Markdown."""
    columns = [(name, "bytes", "MiB", 2**-20) for name in BLOCKS]
    if not settings.bytes_only:
        columns = [(name, "seconds", "ms", 1e3) for name in BLOCKS] + columns
    number = lambda value: "–" if value is None else f"{value:,.1f}"
    lines = [
        f"Generated by `{command}` on {device}: one block of width {settings.dim}, batch {settings.batch_size}, "
        f"{settings.dtype}, forward and backward. MiB: temporary, in and out, as the compiler counts them.",
        "",
        "| tokens | " + " | ".join(f"{name} {unit}" for name, _, unit, _ in columns) + " |",
        "|---:|" + "---:|" * len(columns),
    ]
    for row in rows:
        values = [(row["blocks"][name][quantity], scale) for name, quantity, _, scale in columns]
        cells = [number(None if value is None else scale * value) for value, scale in values]
        lines.append(f"| {row['length']:,} | " + " | ".join(cells) + " |")
    ratios = [number(growth(rows, name, quantity)) for name, quantity, _, _ in columns]
    lines.append(f"| × {rows[-1]['length'] / rows[0]['length']:g} | " + " | ".join(ratios) + " |")
    return "\n".join([*lines, "", "The last row: the longest over the shortest. –: not run."]) + "\n"


def plot(rows: list[dict[str, Any]], path: pathlib.Path, title: str) -> None:
    """Plots time, if measured, and bytes against length on logarithmic axes."""
    panels = [("seconds", 1e3, "milliseconds, forward and backward"), ("bytes", 2**-20, "MiB")]
    if all(block["seconds"] is None for row in rows for block in row["blocks"].values()):
        panels = panels[1:]
    figure = pages.figure(5.5 * len(panels), 4.5)
    for axes, (quantity, unit, label) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name, color in zip(BLOCKS, ("tab:blue", "tab:orange", "tab:red"), strict=True):
            points = [(row["length"], row["blocks"][name][quantity]) for row in rows]
            points = [(x, unit * y) for x, y in points if y is not None]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name, color=color)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        lengths = [row["length"] for row in rows]
        axes.set_xticks(lengths, [f"{length:,}" for length in lengths])
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3, which="both")
        axes.legend(fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)


def main() -> None:
    """The command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--batch-size", type=int, default=Settings.batch_size)
    parser.add_argument("--dim", type=int, default=Settings.dim, help="width of the block")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=Settings.dtype)
    parser.add_argument("--bytes-only", action="store_true", help="compile, run nothing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--most-bytes", type=float, default=7e9, help="largest memory of a block that is run")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--report", action="store_true", help="measure nothing, only write table and plot")
    options = parser.parse_args()
    import jax

    settings = Settings(options.batch_size, options.dim, options.dtype, options.bytes_only)
    device = jax.devices()[0].device_kind
    kind = "bytes" if options.bytes_only else "scaling"
    path = options.out / f"{kind}-{device.replace(' ', '-').lower()}.jsonl"
    rows = read(path, settings)
    for length in [] if options.report else [n for n in options.lengths if n not in rows]:
        rows[length] = measure(length, settings, options.repeats, options.most_bytes)
        append_row(path, rows[length])
        print(f"{length:,} tokens: {rows[length]['blocks']}", flush=True)
    if not rows:
        sys.exit(f"{path} has no rows of these settings yet.")
    ordered = [rows[length] for length in sorted(rows)]
    command = " ".join(["python -m experiments.gam.scaling", *sys.argv[1:]]).replace(" --report", "")
    page = table(ordered, settings, command, device)
    path.with_suffix(".md").write_text(page)
    plot(
        ordered,
        path.with_suffix(".png"),
        f"One block of width {settings.dim}, batch {settings.batch_size}, on {device}",
    )
    print(page)


if __name__ == "__main__":
    main()
