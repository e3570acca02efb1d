"""Generates the tables of the pages from the repository: from recorded measurements, tests, and the rules themselves.

    python docs/generate.py        # updates the tables between the marks of all pages

A test fails if a page is not up to date. A table is a function in this file. Its page names it by the marks
`<!-- table: NAME -->` before the table and `<!-- end -->` after it.
"""

import ast
import functools
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from atlasjax import interop, memory, rules
from atlasjax.plan import forward_flops_per_token
from atlasjax.presets import describe, get_preset, has_memory, rule_name
from atlasjax.train.config import TrainConfig
from atlasjax.train.defaults import default_config

DOCS = pathlib.Path(__file__).resolve().parent
ROOT = DOCS.parent
BENCHMARKS = ROOT / "experiments/benchmarks"
sys.path.insert(0, str(ROOT))  # for the tables that `experiments` makes
KERNELS = ("delta_rule", "chunk_memory", "newton_schulz")
PLATFORMS = {"pallas_tpu": "TPU", "pallas_gpu": "GPU"}
# Families of public weights: title, name, and the config.json of a size that is published.
PUBLIC: tuple[tuple[str, str, dict[str, Any]], ...] = (
    (
        "Mamba-2 (130m)",
        "mamba2",
        {
            "hidden_size": 768,
            "num_hidden_layers": 24,
            "num_heads": 24,
            "vocab_size": 50288,
            "n_groups": 1,
            "tie_word_embeddings": True,
        },
    ),
    ("Mamba (130m)", "mamba", {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280}),
    (
        "Gated DeltaNet, attention in some layers",
        "gated_deltanet",
        {
            "hidden_size": 2048,
            "num_heads": 6,
            "head_dim": 256,
            "attn": {"layers": [6, 13, 20], "num_heads": 16, "num_kv_heads": 4},
        },
    ),
    ("DeltaNet (1.3B)", "delta_net", {"hidden_size": 2048, "num_heads": 16}),
    ("GLA (1.3B)", "gla", {"hidden_size": 2048, "num_heads": 4}),
    (
        "Qwen3.5 (0.8B)",
        "qwen3_5",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "intermediate_size": 3584,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "linear_num_value_heads": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": True,
            "dtype": "bfloat16",
        },
    ),
    ("OLMo-Hybrid (7B)", "olmo_hybrid", {}),
    ("RWKV-7", "rwkv7", {"hidden_size": 2048, "head_dim": 64}),
)


def rows(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file."""
    return [json.loads(line) for line in (ROOT / path).read_text().splitlines() if line]


def table(head: Iterable[str], body: Iterable[Iterable[object]], right: Iterable[int] = ()) -> str:
    """A Markdown table; right: columns of numbers."""
    head, right = list(head), set(right)
    lines = [head, ["---:" if i in right else "---" for i in range(len(head))], *body]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


# Rules.


@functools.cache
def supported(name: str, implementation: str) -> str:
    """Whether `memory.scan` runs a rule by that name, as the memory of its 340M model: heads of 64, bfloat16."""
    rule = _model_rule(name)
    if _runs(rule, implementation):
        return "yes"
    return "without the bound" if hasattr(rule, "unbounded") and _runs(rule.unbounded(), implementation) else "no"


def _runs(rule: Any, implementation: str) -> bool:
    sizes = {"num_heads": 1, "key_dim": 64, "value_dim": 64}

    def call(key: jax.Array) -> Any:
        params = memory.init_params(rule, key, **sizes)
        q = jnp.zeros((1, 64, 1, 64), jnp.bfloat16)
        gates = memory.suggested_gates(rule, batch_size=1, time=64, **sizes)
        return memory.scan(rule, params, None, q, q, q, gates, implementation=implementation)

    try:
        jax.eval_shape(call, jax.random.key(0))
    except ValueError:  # an implementation that does not support the call raises before anything is traced
        return False
    return True


def _preset(name: str) -> TrainConfig:
    return default_config(f"{rule_name(name)}-340m")


def _model_rule(name: str) -> Any:
    """The rule as in its 340M model, or with its defaults if that model is a published baseline with its own layer."""
    model = _preset(name).model
    return model.memory.build() if has_memory(model) else rules.REGISTRY[name]()


def choosing_rules() -> str:
    """The costs of each rule as the memory of its 340M model."""

    def line(name: str) -> Iterable[object]:
        config = _preset(name)
        rule, length = _model_rule(name), config.data.sequence_length
        state, longer = (describe(config.model, length=n)["state_bytes_per_sequence"] for n in (length, 2 * length))
        return (
            f"`{name}`",
            ", ".join(f"`{gate}`" for gate in rule.gate_channels(64)),
            rule.chunk_size,
            f"{state / 2**20:,.1f}" + ("\\*" if state != longer else ""),
            f"{forward_flops_per_token(config) / 1e9:,.2f}",
            *(supported(name, implementation) for implementation in PLATFORMS),
        )

    head = (
        "rule",
        "gates",
        "chunk",
        "state, MiB",
        "GFLOPs per token",
        *(f"{label} kernel" for label in PLATFORMS.values()),
    )
    return table(head, map(line, rules.REGISTRY), right=(2, 3, 4))


def choosing_sizes() -> str:
    """The presets of Atlas."""

    def line(name: str) -> Iterable[object]:
        model = get_preset(name)
        sizes = describe(model)
        state = sizes["state_bytes_per_sequence"]
        return (
            f"`{name}`",
            f"{model.num_layers} × {model.dim}, {model.num_heads}",
            f"{sizes['parameters']:,}",
            f"{state / 2**30:.2f} GiB" if state >= 2**30 else f"{state / 2**20:,.0f} MiB",
        )

    names = [f"atlas-{size}" for size in ("tiny", "170m", "340m", "760m", "1.3b")]
    return table(
        ("preset", "layers × width, heads", "parameters", "state per sequence"), map(line, names), right=(2, 3)
    )


# Benchmarks.


def _benchmark(name: str) -> dict[str, Any]:
    return next(row for row in rows(BENCHMARKS / "memory_cpu.jsonl") if row["benchmark"] == name)


def bench_memory() -> str:
    """The per-token rule compared with titans-pytorch, its bytes, and a long stream."""
    speed, size, stream, imports = map(_benchmark, ("speed", "bytes", "stream", "import"))
    lines = [
        (
            f"forward + backward, {speed['length']:,} tokens, the per-token rule",
            f"{speed['ours_s']:.2f} s",
            f"titans-pytorch with one update per 64 tokens (its fastest mode): {speed['titans_chunk64_s']:.2f} s",
        ),
        (
            "the same function, 512 tokens",
            f"{speed['ours_512_s']:.3f} s",
            f"titans-pytorch with `chunk_size=1`: {speed['titans_per_token_512_s']:.2f} s, "
            f"{speed['ratio_to_same_function']:.0f} times as long",
        ),
        (
            "share of this machine's own matmul rate",
            f"{speed['share_of_matmul_rate']:.0%}",
            f"{speed['mflop_per_token']:.1f} MFLOP per token, including recomputation; {speed['matmul_gflops']:.0f} GFLOP/s",
        ),
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
    """Decoding of tiny models compared with the same models with softmax attention."""
    found = {(row["model"], row["prompt"], row["batch"]): row for row in rows(BENCHMARKS / "decoding_cpu.jsonl")}
    lines = []
    for model, prompt in dict.fromkeys((model, prompt) for model, prompt, _ in found):
        one, many = (found.get((model, prompt, batch)) for batch in (1, 32))
        if one is None or many is None:
            continue
        cells = [
            f"`{model}`",
            f"{prompt:,}",
            f"{one['state_bytes'] / 1000:,.0f}",
            f"{one['twin_state_bytes'] / 1000:,.0f}",
        ]
        for row in (one, many):
            speed = row["tokens_per_second"]
            cells += [
                f"{speed:,.0f}",
                f"{speed / row['twin_tokens_per_second']:.2f}",
                f"{100 * speed / row['bound_tokens_per_second']:.0f} %",
            ]
        lines.append(cells)
    head = ["architecture", "prompt", "state, KB", "twin's, KB"]
    head += [f"{name}{batch}" for batch in (", 1", ", 32") for name in ("tokens/s", "÷ twin", "of the bound")]
    return table(head, lines, right=range(1, 10))


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


def serving_load() -> str:
    """Load figures of the server: the newest run."""
    found = rows(BENCHMARKS / "serving_cpu.jsonl")
    newest = [row for row in found if row["run"] == found[-1]["run"]]
    lines = [
        (
            row["slots"],
            row["conversations"],
            f"{row['tokens_per_second']:.0f}",
            f"{row['first_seconds']:.2f} s",
            f"{row['first_seconds_longest']:.2f} s",
            f"{1000 * row['token_seconds']:.0f} ms",
        )
        for row in newest
    ]
    head = ("slots", "conversations", "tokens/s", "first text, median", "longest", "each further token")
    return table(head, lines, right=range(6))


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


# Reliability.

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


# Status.


def tests_in(path: str) -> dict[str, list[ast.FunctionDef]]:
    """File → its test functions, of a file or of a folder of tests/."""
    place = ROOT / "tests" / path
    files = sorted(place.rglob("test_*.py")) if place.is_dir() else [place]
    found = {}
    for file in files:
        functions = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
        found[file.relative_to(ROOT).as_posix()] = [f for f in functions if f.name.startswith("test_")]
    return found


def _over(name: str, path: str) -> list[str]:
    """Test functions of tests/PATH that run over every case of the table NAME."""
    found = []
    for file, functions in tests_in(path).items():
        for function in functions:
            for decorator in function.decorator_list:
                arguments = decorator.args if isinstance(decorator, ast.Call) else []
                if any(isinstance(argument, ast.Name) and argument.id == name for argument in arguments):
                    found.append(f"`{file}::{function.name}`")
    return found


def _cases(path: str, table_name: str) -> dict[str, ast.expr]:
    """Case → its expression, of a table of rules in a module of tests."""
    found: dict[str, ast.expr] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else getattr(node, "targets", [])
        value = getattr(node, "value", None)
        if any(isinstance(t, ast.Name) and t.id == table_name for t in targets) and isinstance(value, ast.Dict):
            found |= {key.value: v for key, v in zip(value.keys, value.values) if isinstance(key, ast.Constant)}
    return found


def _names(node: ast.AST) -> set[str]:
    return {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)} | {
        n.id for n in ast.walk(node) if isinstance(n, ast.Name)
    }


def status_devices() -> str:
    """All devices named in the rows, and whether any of them is an accelerator."""
    devices = accelerators()
    sources = {"kernels_measured.jsonl": rows(BENCHMARKS / "kernels_measured.jsonl")}
    recorded = json.loads((ROOT / "atlasjax/memory/fast_weights/fastest.json").read_text())
    lines = sorted(
        {
            (row["device"], row["platform"], f"`experiments/benchmarks/{name}`")
            for name, found in sources.items()
            for row in found
        }
        | {(row["device"], row["platform"], "`atlasjax/memory/fast_weights/fastest.json`") for row in recorded}
    )
    if devices:
        said = f"**Accelerators with measured times: {', '.join(devices)}.**"
    else:
        said = (
            "**No accelerator has run anything yet.** All measured times in the repository are from CPUs, and the table that can "
            f"select kernels by default (`atlasjax/memory/fast_weights/fastest.json`) has {len(recorded)} rows. All statements "
            "about TPUs and GPUs below come from their compilers and from interpret mode on a CPU."
        )
    return said + "\n\n" + table(("device", "platform", "rows"), lines)


def accelerators() -> list[str]:
    """Devices other than CPUs that the rows of measured time name."""
    found = rows(BENCHMARKS / "kernels_measured.jsonl") + json.loads(
        (ROOT / "atlasjax/memory/fast_weights/fastest.json").read_text()
    )
    return sorted({row["device"] for row in found if row["platform"] != "cpu"})


def status_rules() -> str:
    """Each named rule: whether it is tested against the definition, and which kernels support it and which models were trained."""
    plain, softmax = _cases("tests/memory/cases.py", "RULES"), _cases("tests/memory/softmax/cases.py", "RULES")
    texts = ("embedded", "tinyshakespeare")
    trained = {text: {row["model"] for row in rows(f"experiments/zoo/results/{text}.jsonl")} for text in texts}

    def line(name: str) -> Iterable[object]:
        cases = softmax if isinstance(rules.REGISTRY[name](), memory.SoftmaxRule) else plain
        proven = any(case == name or name in _names(value) for case, value in cases.items())
        models = [text for text in texts if rule_name(name) in trained[text]]
        kernels = [supported(name, implementation) for implementation in PLATFORMS]
        return (f"`{name}`", "yes" if proven else "no", *kernels, ", ".join(models) or "no")

    head = ("rule", "proven", *(f"{label} kernel" for label in PLATFORMS.values()), "tiny model trained on")
    return table(head, map(line, rules.REGISTRY))


def status_proofs() -> str:
    """The tests that run over the tables of cases."""
    caching = "tests/memory/caching/test_caching.py"
    lines = [
        ("memory rules", "tests/memory/cases.py", _over("RULES", "memory")),
        (
            "softmax memories",
            "tests/memory/softmax/cases.py",
            _over("GRADED", "memory/softmax") + _over("STREAMED", "memory/softmax"),
        ),
        ("cached memories", caching, _over("CASES", "memory/caching")),
    ]
    return table(("family", "cases", "tests over them"), [(a, f"`{b}`", "<br>".join(c)) for a, b, c in lines])


def weights_tensors() -> str:
    """Which tensor of a family is which parameter."""
    lines = []
    families = {family.name: family for family in interop.FAMILIES}
    for title, name, config in PUBLIC:
        family = families[name]
        for row in family.rows(family.to_ours(config)):
            names = (row.peer,) if isinstance(row.peer, str) else row.peer
            names = [name for name in names if not name.startswith("model.language_model.")]  # the page says it once
            part = "" if row.rows is None else f"[{row.rows[0]}:{row.rows[1]}]"
            tensor = " or ".join(f"`{name.format(n='N')}{part}`" for name in names)
            tensor += f", N ≥ {row.first}" if row.first else ""
            tensor += "" if row.mixers is None else f", layers with {' or '.join(row.mixers)}"
            index = ", ".join("…" if i is ... else _slice(i) for i in row.part)
            ours = f"`{row.ours}{f'[{index}]' if index else ''}`" + (" again" if row.copy else "")
            lines.append((title, tensor, ours, f"`{row.pattern}`"))
            title = ""
    return table(("family", "tensor", "parameter", "axes"), lines)


def _slice(part: int | slice) -> str:
    if isinstance(part, int):
        return str(part)
    return ":" if part == slice(None) else f"{part.start}:{part.stop}"


def status_kernels() -> str:
    """Each kernel on each platform: whether it was interpreted, compiled, run, and is chosen by default."""
    static = rows(BENCHMARKS / "kernels_tpu.jsonl")
    measured = rows(BENCHMARKS / "kernels_measured.jsonl")
    recorded = json.loads((ROOT / "atlasjax/memory/fast_weights/fastest.json").read_text())
    lines = []
    for kernel, (implementation, label) in itertools.product(KERNELS, PLATFORMS.items()):
        compiled, in_tests = _compiled(kernel, label, static)
        ran = sorted(
            {
                row["device"]
                for row in measured
                if _kernel_of(row["case"]["operation"]) == kernel
                and "seconds" in row["engines"].get(implementation, {})
            }
        )
        chosen = sorted(
            {
                row["device"]
                for row in recorded
                if _kernel_of(row["kernel"]) == kernel and row["implementation"] == implementation
            }
        )
        lines.append(
            (
                f"`{kernel}`",
                label,
                _interpreted(kernel, implementation),
                in_tests,
                compiled,
                ", ".join(ran) or "not run",
                ", ".join(chosen) or "nowhere",
            )
        )
    head = (
        "kernel",
        "on",
        "proven, interpreted",
        "compiled by tests for",
        "rows of the compiler",
        "run on",
        "chosen by default on",
    )
    return table(head, lines)


def _kernel_of(operation: str) -> str:
    """The kernel behind an operation of the rows: rules of the memory core run in chunk_memory."""
    for kernel in KERNELS:
        if kernel in operation:
            return kernel
    return "chunk_memory"


def _interpreted(kernel: str, implementation: str) -> str:
    """The tests that run the kernel of that platform in interpret mode."""
    own, shared = (f"tests/pallas_kernels/test_{kernel}{end}.py" for end in ("_gpu", ""))
    path = own if implementation == "pallas_gpu" and (ROOT / own).exists() else shared
    text = (ROOT / path).read_text()
    found = "interpret" in text and (path == own or implementation == "pallas_tpu" or implementation in text)
    return f"`{path}`" if found else "no"


def _compiled(kernel: str, label: str, static: list[dict[str, Any]]) -> tuple[str, str]:
    """(targets of the rows, targets of the tests)."""
    if label == "GPU":
        wide = [
            row
            for row in rows(BENCHMARKS / "kernels_gpu.jsonl")
            if _kernel_of(row["case"][0]) == kernel and row["kernels"]
        ]
        child = (ROOT / "tests/pallas_kernels/compile_gpu_child.py").read_text()
        return (f"H200 ({len(wide)})" if wide else "none"), ("H200" if kernel in child else "none")
    found = [row for row in static if row["case"]["operation"] == kernel and row["kernels"]]
    topologies = sorted({row["topology"] for row in found})
    targets = [f"{name} ({sum(row['topology'] == name for row in found)})" for name in topologies]
    child = (ROOT / "tests/pallas_kernels/compile_child.py").read_text()
    tests = re.search(r'"topology", \[([^\]]*)\]', (ROOT / "tests/pallas_kernels/test_compile.py").read_text())
    chips = [name.strip('" ').partition(":")[0] for name in tests[1].split(",")] if tests and kernel in child else []
    return ", ".join(targets) or "none", ", ".join(chips) or "none"


def _no_plan(error: str) -> str:
    reason = error.rpartition("Error: ")[2].removesuffix(".")
    return "no plan: " + ("not supported by the kernels" if "implementation=" in error else reason)


def status_plans() -> str:
    """Training steps compiled for pods and GPUs."""
    lines = [
        (
            f"`{row['preset']}`",
            row["topology"],
            row["implementation"],
            _no_plan(row["error"]) if row.get("plan") is None else "yes" if row["fits"] else "no",
            "" if row.get("plan") is None else f"{row['total_bytes'] / 2**30:.2f}",
        )
        for row in sorted(
            rows(BENCHMARKS / "plans.jsonl"), key=lambda row: (row["preset"], row["topology"], row["implementation"])
        )
    ]
    return table(("preset", "devices", "memories by", "fits", "GiB per device"), lines, right=(4,))


def status_experiments() -> str:
    """Rows of each experiment."""
    lines = []
    for folder in sorted(path for path in (ROOT / "experiments").iterdir() if (path / "README.md").is_file()):
        for file in sorted(folder.rglob("*.jsonl")):
            found = rows(file)
            devices = sorted({str(row["device"]) for row in found if "device" in row})
            name = file.relative_to(ROOT / "experiments").as_posix()
            lines.append(
                (
                    f"[{folder.name}](../experiments/{folder.name}/README.md)",
                    f"`{name}`",
                    len(found),
                    ", ".join(devices),
                )
            )
    return table(("experiment", "file", "rows", "device named in the rows"), lines, right=(2,))


# System → its code and its tests.
SYSTEMS = {
    "memory rules": ("atlasjax/memory", ("tests/memory",)),
    "softmax memories": ("atlasjax/memory/softmax", ("tests/memory/softmax",)),
    "Memory Caching": ("atlasjax/memory/caching", ("tests/memory/caching",)),
    "Elastic Memory": ("atlasjax/mixers/elastic", ("tests/mixers/elastic", "tests/nn/test_elastic.py")),
    "Gated Associative Memory": ("atlasjax/mixers/gam.py", ("tests/mixers/test_gam.py", "tests/nn/test_gam.py")),
    "attention and state spaces": ("atlasjax/mixers", ("tests/mixers", "tests/nn/test_attention.py")),
    "language models, every architecture": ("atlasjax/nn", ("tests/test_models.py", "tests/nn")),
    "data": ("atlasjax/data", ("tests/data",)),
    "training, checkpoints, resume": ("atlasjax/train", ("tests/train",)),
    "several devices and processes": ("atlasjax/distributed", ("tests/distributed",)),
    "evaluation and generation": (
        "atlasjax/evaluate",
        ("tests/evaluate", "tests/test_generate.py", "tests/test_contexts.py"),
    ),
}


def status_systems() -> str:
    """Each part of the library and its tests."""
    for code, tests in SYSTEMS.values():
        for path in (code, *tests):
            if not (ROOT / path).exists():
                raise FileNotFoundError(f"docs/generate.py: SYSTEMS names {path}, which is not there.")
    lines = [(name, f"`{code}`", ", ".join(f"`{path}`" for path in tests)) for name, (code, tests) in SYSTEMS.items()]
    return table(("system", "code", "tests, on a CPU"), lines)


def mad() -> str:
    """The accuracies of the MAD experiment and the orders that papers report."""
    from experiments.mad.report import table as tables

    return tables(rows("experiments/mad/results/small.jsonl"))


def evidence_summary() -> str:
    """The directions that the papers claim, with their verdicts."""
    from experiments.evidence import page

    return page.summary()


def evidence_details() -> str:
    """The comparisons of each direction."""
    from experiments.evidence import page

    return page.details()


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        choosing_rules, choosing_sizes,
        bench_memory, bench_blocks, bench_decoding, bench_decoding_models, bench_softmax_memories, bench_caching, bench_zoo,
        serving_load, devices_sequence,
        weights_tensors,
        reliability_faults, reliability_packing, packing_models,
        input_speed, input_memory,
        mad, evidence_summary, evidence_details,
        status_devices, status_rules, status_proofs, status_kernels, status_plans, status_experiments, status_systems,
    )
}  # fmt: skip
_MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """A page with up-to-date tables."""
    return _MARKED.sub(lambda match: f"{match[1]}\n{TABLES[match[2]]()}\n{match[3]}", text)


def pages() -> list[pathlib.Path]:
    """The pages that have tables."""
    files = [*sorted(DOCS.glob("*.md")), *sorted((ROOT / "experiments").glob("*/README.md"))]
    return [path for path in files if _MARKED.search(path.read_text())]


def main() -> None:
    for page in pages():
        page.write_text(filled(page.read_text()))


if __name__ == "__main__":
    main()
