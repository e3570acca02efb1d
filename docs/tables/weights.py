"""Tables of public weights."""

import collections
import re
from typing import Any

import jax

from atlasjax import interop, memory
from atlasjax.interop.family import Sizes
from atlasjax.interop.table import Row
from atlasjax.memory.backends import backend_of
from atlasjax.nn import ModelConfig
from atlasjax.nn.mixers import MIXERS, memory_calls
from atlasjax.presets.sizes import ALL_SIZES
from docs.tables.source import BENCHMARKS, ROOT, rows, table

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
    (
        "Qwen3-Next",
        "qwen3_next",
        {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "mlp_only_layers": [0]},
    ),
    ("Qwen3.5 with experts", "qwen3_5_moe", {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}),
    ("OLMo-Hybrid (7B)", "olmo_hybrid", {}),
    ("RWKV-7", "rwkv7", {"hidden_size": 2048, "head_dim": 64}),
    (
        "Granite 4.0",
        "granitemoehybrid",
        {
            "hidden_size": 768, "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 2, "num_local_experts": 0,
            "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 48, "mamba_d_state": 128,
            "shared_intermediate_size": 2048, "tie_word_embeddings": True,
        },
    ),
    (
        "Granite 4.0 with experts",
        "granitemoehybrid",
        {
            "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4, "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 48, "mamba_d_state": 128,
            "num_local_experts": 64, "num_experts_per_tok": 6, "intermediate_size": 512,
            "shared_intermediate_size": 1024, "tie_word_embeddings": True,
        },
    ),
    (
        "Falcon-H1",
        "falcon_h1",
        {"hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536,
         "mamba_n_heads": 24, "mamba_d_state": 128, "intermediate_size": 2048},
    ),
    (
        "Nemotron-H",
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"], "num_hidden_layers": 4},
    ),
    (
        "Nemotron-3 Nano",
        "nemotron_h",
        {"layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": 4, "hidden_size": 2688,
         "mamba_num_heads": 64, "num_key_value_heads": 2, "n_routed_experts": 128, "num_experts_per_tok": 6,
         "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712},
    ),
    ("Kimi-Linear (48B)", "kimi_linear", {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}),
    ("LFM2", "lfm2", {"hidden_size": 1024, "num_attention_heads": 16, "full_attn_idxs": [2], "num_hidden_layers": 3}),
    ("Bamba", "bamba", {"attn_layer_indices": [1], "num_hidden_layers": 2, "intermediate_size": 14336}),
    ("KDA", "kda", {}),
    ("Gated DeltaProduct, two writes", "gated_deltaproduct", {"num_householder": 2, "use_forget_gate": True}),
    ("Comba", "comba", {}),
    ("MesaNet", "mesa_net", {}),
    ("Mamba-3, rank 4", "mamba3", {"is_mimo": True}),
)  # fmt: skip


_MOST = 4  # rows of one tensor that are all shown


def _same(row: Row) -> str:
    """The tensors of a row, equal for all experts of a layer."""
    names = row.peer if isinstance(row.peer, str) else row.peer[0]
    return re.sub(r"\.experts\.\d+\.", ".experts.", names)


def weights_tensors() -> str:
    """Which tensor of a family is which parameter."""
    lines = []
    families = {family.name: family for family in interop.FAMILIES}
    for title, name, config in PUBLIC:
        family = families[name]
        model = family.to_ours(config, Sizes())
        table_rows = [row for row in family.rows(model) if row.network in (None, *model.ffns)]
        counts, shown = collections.Counter(map(_same, table_rows)), collections.Counter[str]()
        for row in table_rows:
            names = (row.peer,) if isinstance(row.peer, str) else row.peer
            shown[_same(row)] += 1
            if counts[_same(row)] > _MOST and shown[_same(row)] > 2:  # one for each expert or each head
                continue
            more = ", …" if counts[_same(row)] > _MOST and shown[_same(row)] == 2 else ""
            names = [name for name in names if not name.startswith("model.language_model.")]  # the page says it once
            part = "" if row.rows is None else f"[{row.rows[0]}:{row.rows[1]}]"
            tensor = " or ".join(f"`{name.format(n='N')}{part}`" for name in names)
            tensor += f", N ≥ {row.first}" if row.first else ""
            in_all = row.mixers is None or set(model.pattern) <= set(row.mixers)
            tensor += "" if in_all else f", layers with {' or '.join(row.mixers)}"
            dense = {"swiglu": "a dense network"}.get(row.network, row.network)
            tensor += "" if row.network is None or {*model.ffns} == {row.network} else f", layers with {dense}"
            index = ", ".join("…" if i is ... else _slice(i) for i in row.part)
            ours = f"`{row.ours}{f'[{index}]' if index else ''}`" + (" again" if row.copy else "")
            lines.append((title, tensor + more, ours, f"`{row.pattern}`"))
            title = ""
    return table(("family", "tensor", "parameter", "axes"), lines)


# Families whose layers have presets here: the family's title or name → the preset's, without a size.
_PRESETS = {
    "mamba2": "mamba2", "mamba": "mamba", "gated_deltanet": "gated-deltanet", "delta_net": "deltanet", "gla": "gla",
    "qwen3_5": "qwen3.5", "rwkv7": "rwkv7", "granitemoehybrid": "granite-h", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron-h",
    "lfm2": "lfm2", "kda": "kda", "gated_deltaproduct": "gated-deltaproduct", "comba": "comba", "mesa_net": "mesa",
    "mamba3": "mamba3", "qwen3_next": "qwen3-next", "Granite 4.0 with experts": "granite-h-experts",
    "kimi_linear": "kimi-linear",
}  # fmt: skip


def weights_families() -> str:
    """What each family can be used for, from its form of a published size."""
    families = {family.name: family for family in interop.FAMILIES}
    plans = {row["preset"] for row in rows(BENCHMARKS / "plans.jsonl") if row["topology"].startswith("v5e")}
    lines = []
    for title, name, config in PUBLIC:
        model = families[name].to_ours(config, Sizes())
        preset = _PRESETS.get(title) or _PRESETS.get(name)
        planned = [size for size in ALL_SIZES if f"{preset}-{size}" in plans]
        added = "memory, window" + (
            ", caching" if any(getattr(MIXERS[x], "takes_caching", False) for x in model.mixers) else ""
        )
        lines.append((title, "both", "yes", _kernels(model), ", ".join(planned) or "none", added))
    return table(("family", "import, export", "decode", "TPU kernel", "plan for v5e", "add"), lines)


def weights_import() -> str:
    """Memory and time of importing public weights, of each size beside `from_pretrained`."""
    from experiments.benchmarks.import_cpu import TOLD

    found = {(row["layers"], row["loader"]): row for row in rows(BENCHMARKS / "import_cpu.jsonl")}
    lines = [
        (
            f"{row['bytes'] / 1e6:,.0f} MB", TOLD[loader], f"{row['anonymous'] / row['bytes']:.2f}",
            f"{row['resident'] / row['bytes']:.2f}", f"{row['seconds']:.1f}", f"{row['cpu_seconds']:.1f}",
        )
        for (_, loader), row in sorted(found.items(), key=lambda item: item[0][0])
    ]  # fmt: skip
    head = ("weights", "reader", "peak without files / weights", "with mapped files", "seconds", "of a core")
    return table(head, lines, right=range(2, 6))


def weights_added() -> str:
    """What additions to a trained hybrid gain, from the rows there are."""
    from experiments.added_memory.report import summary

    path = ROOT / "experiments/added_memory/results/library.jsonl"
    return summary(rows(path)) if path.exists() else "No rows yet.\n"


def _kernels(model: ModelConfig) -> str:
    """Whether a Pallas kernel takes the recurrence; attention and convolutions have none of this library's."""
    found = []
    for rule, heads, key, value in memory_calls(model):
        init = lambda rule=rule, heads=heads, key=key, value=value: memory.init_params(
            rule, jax.random.key(0), num_heads=heads, key_dim=key, value_dim=value
        )
        q = jax.ShapeDtypeStruct((1, 2048, heads, key), model.dtype)
        backend = backend_of("pallas_tpu")
        found.append(rule.has_kernels and backend.unsupported(rule, jax.eval_shape(init), None, q, False) is None)
    return "yes" if found and all(found) else "no"


def _slice(part: int | slice) -> str:
    if isinstance(part, int):
        return str(part)
    return ":" if part == slice(None) else f"{part.start}:{part.stop}"
