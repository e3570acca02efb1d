"""Tables of recorded measurements."""

from typing import Any

from docs.tables.source import BENCHMARKS, rows, table


def _benchmarks(name: str) -> list[dict[str, Any]]:
    return [row for row in rows(BENCHMARKS / "memory_cpu.jsonl") if row["benchmark"] == name]


def bench_memory() -> str:
    """The per-token rule compared with titans-pytorch, its bytes, and a long stream."""
    size, stream, imports = (_benchmarks(name)[0] for name in ("bytes", "stream", "import"))
    lines = []
    for speed in sorted(_benchmarks("speed"), key=lambda row: -row["devices"]):
        devices = "one CPU device for each core" if speed["devices"] > 1 else "one CPU device"
        lines += [
            (
                f"forward + backward, {speed['length']:,} tokens, the per-token rule, {devices}",
                f"{speed['ours_s']:.2f} s",
                f"titans-pytorch with one update per 64 tokens (its fastest mode): {speed['titans_chunk64_s']:.2f} s, "
                f"{speed['ratio_to_fastest_mode']:.2f} times as long",
            ),
            (
                f"the same function, 512 tokens, {devices}",
                f"{speed['ours_512_s']:.3f} s",
                f"titans-pytorch with `chunk_size=1`: {speed['titans_per_token_512_s']:.2f} s, "
                f"{speed['ratio_to_same_function']:.0f} times as long",
            ),
            (
                f"share of this machine's own matmul rate, {devices}",
                f"{speed['share_of_matmul_rate']:.0%}",
                f"{speed['mflop_per_token']:.1f} MFLOP per token, including recomputation; {speed['matmul_gflops']:.0f} GFLOP/s",
            ),
        ]
    lines += [
        (
            "temporary bytes of forward + backward at 8,192 / 32,768 tokens",
            f"{size['temporary_bytes_8192'] / 1e6:,.0f} / {size['temporary_bytes_32768'] / 1e6:,.0f} MB",
            f"one set of weights per token (computed): {size['per_token_over_ours_8192']:.0f} times as much",
        ),
        (
            f"a stream of {stream['tokens']:,} tokens in pieces of {stream['piece']:,}",
            f"{stream['first_tenth_s']:.3f} s per piece in the first tenth, {stream['last_tenth_s']:.3f} s in the last",
            f"resident memory {stream['resident_after_first_tenth'] / 1e6:,.0f} MB after the first tenth, "
            f"{stream['resident_at_end'] / 1e6:,.0f} MB at the end",
        ),
        (
            "`import atlasjax`",
            f"{imports['import_atlasjax_s']:.4f} s",
            f"`import jax`: {imports['import_jax_s']:.1f} s",
        ),
    ]
    return table(("`memory_cpu.py`", "atlasjax", "compared with"), lines)


def bench_blocks() -> str:
    """Block forms of linear and delta rules."""
    found = [row for row in rows(BENCHMARKS / "rules_cpu.jsonl") if row["command"] == "blocks"]
    ratio = lambda row, what: f"{row[what] / row['block_s']:.1f}" if row.get(what) else ""
    lines = [
        (
            f"`{row['rule']}`",
            f"{run['heads']} × {run['dim']}",
            f"{row['block_s']:.3f}",
            ratio(row, "step_s"),
            ratio(row, "definition_s"),
        )
        for run in found
        for row in run["rows"]
    ]
    return table(("rule", "heads × dim", "block form, s", "steps ÷ it", "definition ÷ it"), lines, right=(1, 2, 3, 4))


def bench_decoding() -> str:
    """Time to decode one token."""
    (run,) = [row for row in rows(BENCHMARKS / "rules_cpu.jsonl") if row["command"] == "decode"]
    line = lambda row: (
        f"`{row['rule']}`",
        f"{1e6 * row['short_s']:.0f}",
        f"{1e6 * row['long_s']:.0f}",
        f"{row['ratio']:.2f}",
    )
    head = ("rule", "µs after 1,000 tokens", "µs after 100,000", "ratio")
    return table(head, map(line, run["rows"]), right=(1, 2, 3))


def bench_decoding_models() -> str:
    """Decoding of whole tiny models beside their twins."""
    return _decoding("tiny")


def bench_decoding_large() -> str:
    """The same for models of 170M parameters."""
    return _decoding("170m")


def _decoding(size: str) -> str:
    """A line for each model and prompt of `decoding_cpu`. A row that was not measured has an empty cell."""
    found = {
        (row["model"], row["prompt"], row["batch"]): row
        for row in rows(BENCHMARKS / "decoding_cpu.jsonl")
        if row["size"] == size
    }
    lines = []
    for model, prompt in dict.fromkeys((model, prompt) for model, prompt, _ in found):
        one, many = (found.get((model, prompt, batch)) for batch in (1, 32))
        if one is None or "tokens_per_second" not in one or (many is None and size == "tiny"):
            continue
        cells = [
            f"`{model}`",
            f"{prompt:,}",
            f"{one['state_bytes'] / 1000:,.0f}",
            f"{one['twin_state_bytes'] / 1000:,.0f}",
        ]
        for row in (one, many):
            if row is None:
                cells += [""] * 3
            elif "needed_bytes" in row:
                cells += [f"needs {row['needed_bytes'] / 1e9:.1f} GB", "", ""]
            else:
                speed = row["tokens_per_second"]
                cells += [
                    f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}",
                    f"{speed / row['twin_tokens_per_second']:.2f}",
                    f"{100 * speed / row['bound_tokens_per_second']:.0f} %",
                ]
        lines.append(cells)
    head = ["architecture", "prompt", "state, KB", "twin's, KB"]
    head += [f"{name}{batch}" for batch in (", 1", ", 32") for name in ("tokens/s", "÷ twin", "of the bound")]
    return table(head, lines, right=range(1, 10))


def bench_decoding_tpu() -> str:
    """The sampling loop compiled for a TPU."""
    names = ("param_bytes", "state_bytes", "temp_bytes", "total_bytes", "available_bytes")
    found = rows(BENCHMARKS / "decoding_tpu.jsonl")
    lines = [
        (
            f"`{row['model']}`",
            row["chip"].partition(":")[0],
            *(f"{row[name] / 2**30:.2f}" if name in row else "" for name in names[:3]),
            "out of memory"
            if "error" in row
            else f"{row['total_bytes'] / 2**30:.2f} of {row['available_bytes'] / 2**30:.2f}",
        )
        for row in found
    ]
    return table(("model", "chip", "parameters", "state", "temporaries", "total"), lines, right=range(2, 6))


def devices_sequence() -> str:
    """Bytes of a linear memory whose tokens are divided over devices."""
    lines = [
        (
            row["devices"],
            f"{row['tokens']:,}",
            *(f"{row[name] / 1e6:,.1f}" for name in ("temporary_bytes", "exchanged_bytes")),
        )
        for row in rows(BENCHMARKS / "sequence_parallel.jsonl")
    ]
    return table(("devices", "tokens", "temporary MB of each", "MB that each receives"), lines, right=range(4))


def devices_longest() -> str:
    """The longest sequence of which a training step fits into 16 GB."""
    lines = []
    for row in rows(BENCHMARKS / "longest_sequence.jsonl"):
        # "next" is an error's text where the compiler refuses the doubled length.
        beyond = row.get("next")
        lines.append(
            (
                f"`{row['preset']}`",
                f"{row['tokens']:,}",
                f"{row['step_bytes'] / 1e9:.2f}",
                f"{beyond / 1e9:.2f}" if isinstance(beyond, int) else "" if beyond is None else "not compiled",
                f"{row['seconds']:.0f}" if "seconds" in row else row.get("error", ""),
                f"{row['peak_resident_bytes'] / 1e9:.2f}" if "peak_resident_bytes" in row else "",
            )
        )
    head = ("preset", "tokens", "GB, compiled", "GB of twice as many", "seconds of a step", "peak GB of the process")
    return table(head, lines, right=range(1, 6))


def serving_load() -> str:
    """Load figures of the server: the newest run."""
    found = rows(BENCHMARKS / "serving_cpu.jsonl")
    newest = [{"shared": 0, "forget": False} | row for row in found if row["run"] == found[-1]["run"]]
    lines = [
        (
            f"`{row['preset']}`",
            f"{64 + row['shared']}{', none kept' if row['forget'] else ''}",
            row["slots"],
            row["conversations"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['first_seconds']:.2f} s",
            f"{row['first_seconds_longest']:.2f} s",
            f"{1000 * row['token_seconds']:.0f} ms",
        )
        for row in newest
    ]
    head = (
        "preset",
        "prompt",
        "slots",
        "conversations",
        "tokens/s",
        "first text, median",
        "longest",
        "each further token",
    )
    return table(head, lines, right=range(1, 8))


def bench_softmax_memories() -> str:
    """Softmax memories compared with softmax attention."""
    (run,) = rows(BENCHMARKS / "softmax_memories_cpu.jsonl")
    lengths = list(run)
    lines = [(name, *(f"{run[length][name]:.3f}" for length in lengths)) for name in run[lengths[0]]]
    return table(("memory", *(f"{int(n):,} tokens, s" for n in lengths)), lines, right=range(1, len(lengths) + 1))


def bench_caching() -> str:
    """Memory Caching compared with its rule and with softmax attention."""
    lines = [
        (f"{run['length']:,}", name, f"{seconds:.3f}", f"{run['bytes'][name] / 1e6:,.0f}")
        for run in rows(BENCHMARKS / "caching_cpu.jsonl")
        for name, seconds in run["seconds"].items()
    ]
    return table(("tokens", "memory", "s", "temporary MB"), lines, right=(0, 2, 3))


def bench_compile() -> str:
    """Time to the first result: before → now, and their ratio."""
    lines = []
    for row in _compiled("rules"):
        now, other = row["now"], row["other"]
        pair = lambda name, form, now=now, other=other: f"{other[name]:{form}} → {now[name]:{form}}"
        lines.append(
            (
                f"`{row['name']}`",
                *(f"{pair(name, '.1f')} ({now[name] / other[name]:.2f})" for name in ("trace_s", "compile_s")),
                f"{pair('hlo_lines', ',')} ({now['hlo_lines'] / other['hlo_lines']:.2f})",
                f"{now['temporary_bytes'] / other['temporary_bytes']:.2f}",
                f"{now['run_s'] / other['run_s']:.2f}",
            )
        )
    head = ("rule", "tracing, s", "compiling, s", "lines of HLO", "temporary bytes", "time of a run")
    return table(head, lines, right=range(1, 6))


def bench_commands() -> str:
    """Whole commands: before → now, and their ratio."""
    names = {"wall_s": "wall, s", "processor_s": "processor, s", "first_line_s": "first line of a step, s"}
    lines = [
        (
            f"`{row['name']}`",
            *(
                f"{row['other'][name]:.1f} → {row['now'][name]:.1f} ({row['now'][name] / row['other'][name]:.2f})"
                for name in names
            ),
        )
        for row in _compiled("commands")
    ]
    return table(("command", *names.values()), lines, right=range(1, 4))


def _compiled(kind: str) -> list[dict[str, Any]]:
    """The last row of each name."""
    return list({row["name"]: row for row in rows(BENCHMARKS / "compile_cpu.jsonl") if row["kind"] == kind}.values())


def bench_muon() -> str:
    """Atlas compared with its twin without Newton–Schulz, against `every`: now, and in the commit before."""
    lines = []
    for row in sorted(rows(BENCHMARKS / "muon_cpu.jsonl"), key=lambda row: (row["dim"], row["every"])):
        cells: list[object] = [f"{row['dim']}, {row['expansion']}×", row["every"]]
        for what in ("seconds", "flops"):
            for pass_ in ("forward", "gradient"):
                twin = row["now"][what][f"twin/{pass_}"]
                times = [row[tree][what][f"atlas/{pass_}"] / twin for tree in ("before", "now") if tree in row]
                cells.append(" → ".join(f"{x:.0f}" if x >= 20 else f"{x:.1f}" for x in times))
        lines.append(cells)
    head = (
        "heads of, expansion",
        "`every`",
        "time, forward",
        "time, with gradients",
        "FLOPs, forward",
        "FLOPs, with gradients",
    )
    return table(head, lines, right=range(1, 6))


def _input(command: str) -> list[dict[str, Any]]:
    return [row for row in rows(BENCHMARKS / "input_cpu.jsonl") if row["command"] == command]


def input_speed() -> str:
    """Rates of the input pipeline."""
    lines = [(name, f"{rate / 1e6:,.2f}") for name, rate in _input("speed")[-1]["tokens_per_second"].items()]
    return table(("what", "M tokens per second of one core"), lines, right=(1,))


def input_memory() -> str:
    """Peak resident memory of the input pipeline against the size of a text."""
    runs = sorted(_input("memory"), key=lambda run: (run["tokenizer"], run["megabytes"]))
    names = dict.fromkeys(name for run in runs for name in run["peak"])
    body = [
        (f"{run['megabytes']:,} MB", run["tokenizer"], *(run["peak"].get(name, ("", ""))[1] for name in names))
        for run in runs
    ]
    return table(("text", "tokenizer", *names), body, right=(0, *range(2, len(names) + 2)))


def bench_zoo() -> str:
    """The eight best models on each text, and three others for comparison."""
    lines = []
    for text in ("embedded", "tinyshakespeare"):
        found = sorted(rows(f"experiments/zoo/results/{text}.jsonl"), key=lambda row: row["bits_per_byte"])
        shown = [*found[:8], *(row for row in found[8:] if row["model"] in ("atlas", "atlas-mag", "transformer++"))]
        lines += [
            (text, f"`{row['model']}`", f"{row['bits_per_byte']:.3f}", f"{row['state_bytes']:,}") for row in shown
        ]
    return table(("text", "model", "held-out bits per byte", "state bytes"), lines, right=(2, 3))


PACKING = "experiments/packing/results/packing.jsonl"
FAILURES = ("wrong", "traceback", "gave up", "hang")


def reliability_faults() -> str:
    """The newest run of each class of the generated attack."""
    newest = {row["class"]: row for row in rows("experiments/faults/results/faults.jsonl")}
    kinds = ("right", "fell back", "refused")
    lines = [
        (
            name,
            f"{row['cases']:,}",
            *(f"{row['outcomes'].get(kind, 0):,}" for kind in kinds),
            ", ".join(f"{row['outcomes'][kind]} {kind}" for kind in FAILURES if kind in row["outcomes"]) or 0,
        )
        for name, row in newest.items()
    ]
    return table(("class", "cases", *kinds, "failures"), lines, right=range(1, 6))


def reliability_packing() -> str:
    """The largest difference of each comparison, over all models, and the model it is of."""
    found = rows(PACKING)
    lines = []
    for kind in found[0]["differences"]:
        compared = [row for row in found if kind in row["differences"]]
        worst = max(compared, key=lambda row: row["differences"][kind])
        lines.append((kind, len(compared), f"{worst['differences'][kind]:.1e}", f"`{worst['model']}`"))
    return table(("comparison", "models", "largest difference", "of"), lines, right=(1, 2))


def packing_models() -> str:
    """The differences of each model."""
    found = rows(PACKING)
    kinds = list(found[0]["differences"])
    lines = [
        (
            f"`{row['model']}`",
            *(f"{row['differences'][kind]:.1e}" if kind in row["differences"] else "refused" for kind in kinds),
            row.get("ill_conditioned", ""),
        )
        for row in sorted(found, key=lambda row: row["model"])
    ]
    return table(("model", *kinds, "left out"), lines, right=range(1, 2 + len(kinds)))


def mad() -> str:
    """The accuracies of the MAD experiment and the orders that papers report."""
    from experiments.mad.report import table as tables

    return tables(rows("experiments/mad/results/small.jsonl"))


def needles() -> str:
    """The accuracies of the needles experiment, changes at test time, and the orders that papers report."""
    from experiments.needles.report import table as tables

    return tables(rows("experiments/needles/results/small.jsonl"))
