"""A Table 1 as data: for every rule what it descends on, how, what it forgets, and what its memory is.

`row` reads a rule's choices, so the table cannot say what the code does not do; only the write operation is spelled out here.
`python -m atlasjax.table1` prints the page `docs/rules.md`.
"""

import dataclasses

from atlasjax import memory, rules
from atlasjax.memory import features, objectives, optimizers, retention, structures
from atlasjax.names import lookup

# How the memory is written, in the paper's symbols; W a matrix memory, M any memory, ∇ its inner gradient at M_{t'}.
WRITES: dict[str, str] = {
    "linear_attention": "W_t = W_{t−1} + η v kᵀ",
    "retnet": "W_t = α W_{t−1} + η v kᵀ",
    "gla": "W_t = W_{t−1} Diag(α) + η v kᵀ",
    "polysketch": "W_t = W_{t−1} + η v φ(k)ᵀ",
    "ttt_linear": "M_t = M_{t−1} − η ∇",
    "ttt_mlp": "M_t = M_{t−1} − η ∇",
    "delta_rule": "W_t = W_{t−1}(I − η k kᵀ) + η v kᵀ",
    "longhorn": "W_t = W_{t−1}(I − δ k kᵀ) + δ v kᵀ, δ = β/(1 + β‖k‖²)",
    "longhorn_channel": "W_t = W_{t−1} − Diag(δ)(W_{t−1} k − v) kᵀ, δ = β/(1 + β‖k‖²)",
    "gated_delta_rule": "W_t = α W_{t−1}(I − η k kᵀ) + η v kᵀ",
    "rwkv7": "W_t = W_{t−1}(Diag(α) − κ̂ (a ⊙ κ̂)ᵀ) + v kᵀ",
    "rwkv7_one_key": "W_t = W_{t−1}(Diag(α) − η k kᵀ) + η v kᵀ",
    "titans": "M_t = α M_{t−1} + S_t, S_t = θ S_{t−1} − η ∇",
    "titans_no_momentum": "M_t = α M_{t−1} − η ∇",
    "moneta": "A_t = α A_{t−1} − η ∇, M_t = sign(A_t) |A_t|^{q−1} / ‖A_t‖_q^{q−2}",
    "yaad": "M_t = α M_{t−1} − η ∇",
    "memora": "M_t = softmax(α log M_{t−1} − η ∇)",
    "dla": "M_t = α M_{t−1} − η ∇",
    "swla": "W_t = α W_{t−1} + η Σ_{j<c} γ_j v_{t−j} k_{t−j}ᵀ",
    "omeganet": "M_t = α M_{t−1} − η Σ_{j<c} γ_j ∇_{t−j}",
    "atlas": "M_t = α M_{t−1} + η NS(S_t), S_t = θ S_{t−1} − Σ_{j<c} γ_j ∇_{t−j}",
    "atlas_plus_plus": "M_t = α M_{t−1} + η NS(S_t), S_t = θ S_{t−1} − Σ_{j<c} γ_j ∇_{t−j}",
    "deep_transformer": "M_t = α M_{t−1} − η ∇, first layer Σ_i a_i κ(k_i, ·)",
    "swdt": "M_t = α M_{t−1} − η ∇, first layer Σ_{i>t−w} a_i κ(k_i, ·)",
    "dot": "M_t = α M_{t−1} − η Σ_{j<c} γ_j ∇_{t−j}, first layer Σ_i a_i κ(k_i, ·)",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One rule in the characteristics of A Table 1.

    Attributes:
      name: of `rules.REGISTRY`.
      objective: the inner loss ℓ.
      optimizer: how it is descended on.
      decay: dynamic decay: what forgets, if anything.
      depth: the memory: its matrices.
      capacity: what a key is mapped to before the first matrix: D features bound the pairs that one matrix can hold exactly.
      optimality: what is known of the curvature when a step is taken (A: local optimality).
      context: the tokens that one step optimizes for (A: flexible context).
      write: the write operation.
    """

    name: str
    objective: str
    optimizer: str
    decay: str
    depth: str
    capacity: str
    optimality: str
    context: str
    write: str


def _objective(objective: objectives.Objective) -> str:
    match objective:
        case objectives.L2():
            return "½‖M(φ(k)) − v‖²"
        case objectives.DotProduct():
            return "−⟨M(φ(k)), v⟩"
        case objectives.Lp(p):
            return f"(1/p)‖M(φ(k)) − v‖_p^p, p = {p:g}"
        case objectives.Huber():
            return "Huber_δ(‖M(φ(k)) − v‖)"
        case objectives.RemoveAndReplace():
            return "remove at κ̂, put in at k"


def _optimizer(optimizer: optimizers.Optimizer) -> str:
    channel = ", η per channel" if optimizer.per_channel else ""
    match optimizer:
        case optimizers.GradientDescent():
            return "gradient descent" + channel
        case optimizers.Implicit():
            return "implicit step" + channel
        case optimizers.Momentum():
            return "momentum"
        case optimizers.Muon(steps):
            return f"Muon, {steps} Newton–Schulz steps"


def _decay(decay: retention.Retention) -> str:
    first = ", before the gradient" if decay.decay_first else ""
    match decay:
        case retention.Full():
            return "no"
        case retention.Scalar():
            return "per head" + first
        case retention.Channel():
            return "per channel" + first
        case retention.KL():
            return "per head, of log M"
        case retention.Lq(q):
            return f"per head, of A; ℓq norm, q = {q:g}"


def _depth(structure: structures.Structure) -> str:
    match structure:
        case structures.Matrix():
            return "matrix"
        case structures.MLP(depth, expansion):
            norm = ", LayerNorm" if structure.norm else ""
            return f"residual MLP, {depth} matrices, {expansion}×{norm}" if depth > 1 else f"residual matrix{norm}"
        case structures.GatedMLP(expansion):
            return f"gated residual MLP, {expansion}×"


def _capacity(feature_map: features.Features) -> str:
    match feature_map:
        case features.Identity():
            return "D = d"
        case features.Polynomial(degree):
            return f"D = C(d + {degree}, {degree})"
        case features.Powers(degree):
            return f"D = {degree}d"
        case features.TensorSketch(degree, size):
            return f"D = 1 + d + {(degree - 1) * size}"


def _optimality(optimizer: optimizers.Optimizer) -> str:
    match optimizer:
        case optimizers.Muon():
            return "approximate second order"
        case optimizers.Implicit():
            return "the step's exact minimizer"
        case _:
            return "first order"


def _context(rule: memory.Rule) -> str:
    context = "one token" if rule.window == 1 else f"last c = {rule.window} tokens"
    if isinstance(rule, memory.KernelRule):
        cached = "all tokens" if rule.cache_window is None else f"the last w = {rule.cache_window} tokens"
        context += f"; {cached} cached"
    return context


def row(name: str, rule: memory.Rule | None = None) -> Row:
    """The row of a rule.

    Args:
      name: of `rules.REGISTRY`.
      rule: what to describe under that name; None: the rule with its default choices.

    Raises:
      ValueError: no such rule; the message suggests the nearest name.
    """
    factory = lookup("memory rule", name, rules.REGISTRY)
    rule = factory() if rule is None else rule
    return Row(
        name=name,
        objective=_objective(rule.objective),
        optimizer=_optimizer(rule.optimizer),
        decay=_decay(rule.retention),
        depth=_depth(rule.structure),
        capacity=_capacity(rule.features) if isinstance(rule, memory.MemoryRule) else "D = ∞ (exp)",
        optimality=_optimality(rule.optimizer),
        context=_context(rule),
        write=WRITES[name],
    )


_HEAD = """# The rules of A Table 1

Generated by `python -m atlasjax.table1`; every entry but the last column is read from the rule's own choices at their defaults
(`atlasjax.rules`). Signs, η and the place where gradients are taken are those of [the specification](semantics.md). A rule is a
value: any of these choices can be changed (`dataclasses.replace`), and every test of the memory core runs over all of them.
"""


def page() -> str:
    """The table as a page of Markdown."""
    rows = [row(name) for name in rules.REGISTRY]
    names = [field.name for field in dataclasses.fields(Row)]
    lines = ["| " + " | ".join(["rule", *names[1:]]) + " |", "|" + " --- |" * len(names)]
    for entry in rows:
        cells = [f"`{entry.name}`", *(getattr(entry, name).replace("|", "\\|") for name in names[1:])]
        lines.append("| " + " | ".join(cells) + " |")
    return _HEAD + "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
