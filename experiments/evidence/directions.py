"""The directions that the papers claim. `lines.py` and `year.py` have the comparisons that decide them."""

from experiments.efficiency.measure import REFERENCE
from experiments.evidence import lines, year
from experiments.evidence.functions import function_order
from experiments.evidence.lines import Direction
from experiments.evidence.sources import language, mad, state_sizes, studies, trained, zoo
from experiments.evidence.speed import efficiency, gam_scaling, not_run
from experiments.stability.pairs import BASELINE, PAIRS

# Experiment → its command and its plot, or its table, seen from experiments/evidence/README.md.
EXPERIMENTS = {
    "capacity": ("python -m experiments.capacity.run", "../capacity/results/capacity_1024.png"),
    "mqar": ("python -m experiments.mqar.run", "../mqar/results/small.png"),
    "mad": ("python -m experiments.mad.run", "../mad/README.md"),
    "needles": ("python -m experiments.needles.run", "../needles/README.md"),
    "recall": ("python -m experiments.recall.run", "../recall/results/recall.png"),
    "zoo": ("python -m experiments.zoo.run", "../zoo/results/embedded.png"),
    "stability": ("python -m experiments.stability.train", "../stability/results/train.md"),
    "studies": ("python -m experiments.studies.run", "../studies/results/embedded.png"),
    "language": ("python -m experiments.language.run", "../language/results/books.png"),
    "efficiency": ("python -m experiments.efficiency.run", "../efficiency/results/cpu-tiny.png"),
    "ablation": ("python -m experiments.ablation.run", "../ablation/results/ablation.png"),
    "function_learning": ("python experiments/function_learning/run.py", "../function_learning/loss_d256.png"),
}


_OURS = "It is our own baseline, which no paper has, so its lines have no verdict."
_ROUNDS = "Seeds are rounds in which each model was timed in turn with Transformer++. A line holds for one device and XLA's engine."

DIRECTIONS = (
    Direction(
        "The Omega rule is better than the online rule", "A §3.2, Table 6", lines.omega,
        ("capacity", "mqar", "needles", "zoo", "stability", "language", "ablation"),
        note=lambda: "A window's pairs are part of the state. Unless a line says that buffers are free, they are counted. "
        "SWLA differs from RetNet's rule in the window alone, OmegaNet from Titans without momentum also in its features.",
        depends="On the keys, the passes and whether the window's pairs count: in one pass a matrix with a window recalls "
        "more if keys are correlated or come in topics and fewer if they are independent, after 30 passes it "
        "recalls fewer, and a deep memory recalls more only with free buffers.",
    ),
    Direction(
        "Polynomial features are better than none", "A Prop. 2, Table 6", lines.polynomial,
        ("capacity", "mqar", "stability", "ablation"),
        note=lambda: "Lines with equal floats give the linear memory keys as wide as the features. Lines with keys of 16 numbers "
        "are those of Proposition 2: the features may then have any number of floats.",
        depends="On the floats and the passes: with as many floats, features recall fewer pairs but for some keys in 16 "
        "dimensions; with free floats they recall more after 30 passes, and after one pass only powers do.",
    ),
    Direction(
        "A deep memory is better than a matrix", "A Theorem 1, Table 6", lines.deep,
        ("capacity", "mqar", "needles", "zoo", "stability", "language", "ablation"),
        note=lambda: "n floats cannot store more than n/16 independent random values of 16 numbers exactly, whatever the depth. "
        "A matrix with wide enough independent keys reaches that limit. TTT-Linear is TTT-MLP with a matrix, and RetNet's rule DLA "
        "with one. Linear attention also has no decay, and the gated delta rule takes its gradients at each token.",
        depends="On the floats and the task: with as many floats it recalls fewer pairs but for keys in 16 dimensions after "
        "30 passes; with free floats it recalls more but for independent keys (also in 16 dimensions) in one pass, "
        "and in whole runs on texts it has the lower loss.",
    ),
    Direction(
        "A gated memory is better than an MLP", "A Table 6, Atlas++", lines.gated,
        ("capacity", "mqar", "zoo", "stability", "ablation"),
        note=lambda: "In A Table 2 at 760M it is not: Atlas has a perplexity of 18.92 on WikiText and Atlas++ 19.04. At 1.3B it "
        f"is, with 14.97 and 14.40, and in Table 6 with 19.97 and 19.53. Tiny Atlas++ has an expansion of 4 "
        f"and tiny Atlas of 2. {state_sizes('atlas', 'atlas++')}",
        depends="On the size of the memory and the passes: with 256 floats every decided line is against it; with 1,024 it "
        "recalls more after 30 passes or with Muon, and fewer in one pass without Muon.",
    ),
    Direction(
        "A wider window is better", "A Fig. 5", lines.windows, ("capacity", "mqar", "ablation"),
        note=lambda: "Each line compares a window with the next smaller one.",
        depends="On the keys and whether the window's pairs count: with free buffers the wider window is ahead in every "
        "decided line, where keys are correlated or come in topics; if they count, it recalls fewer independent "
        "keys.",
    ),
    Direction(
        "Muon is the better inner optimizer", "A §5", lines.muon,
        ("capacity", "function_learning", "mqar", "needles", "zoo", "stability", "language", "ablation"),
        note=lambda: "The paper's own Table 6 has a lower perplexity without Muon (19.65 against 19.97). The tiny presets differ "
        "in more: Atlas has half of OmegaNet's hidden units, and Newton–Schulz every 32 tokens.",
        depends="On the task: Muon is ahead in every decided line of capacity and in function learning but for three lines "
        "of mappings 1 and 2; in language Atlas is behind OmegaNet in the one decided line.",
    ),
    Direction(
        "DOT is better than DeepTransformer, and that better than Transformer++", "A §4, Table 2", lines.dot,
        ("mqar", "needles", "zoo", "stability"),
        note=lambda: "In the tiny presets the softmax memories have short convolutions before their keys, as every memory, and "
        "Transformer++ has none. attention-lmm is softmax attention with these convolutions and the output gate of a memory "
        f"layer: it shows how much of the difference from Transformer++ is theirs. {_OURS}",
    ),
    Direction(
        "Function learning: 1 is easiest, 4 easier than 2, 3 and 5 hardest, 3 easier than 5", "A §6.4, Fig. 6",
        lambda: function_order(
            [("low_rank", "attention_as_input"), ("low_rank", "mlp"), ("attention_as_input", "mlp"), ("mlp", "attention_mlp"),
             ("mlp", "window_attention_mlp"), ("attention_mlp", "window_attention_mlp")]
        ),
        ("function_learning",),
        depends="On the pair: 4 is easier than 1 in every decided line, against the paper; the orders with 2 are the "
        "paper's, and that of 3 and 5 depends on the learner.",
    ),
    Direction(
        "Memory caching: GRM is better than Soup, and that than SSC", "M §4, Tables 1–4", lines.caching_order,
        ("capacity", "mqar", "needles", "zoo", "stability"),
        note=lambda: "For a linear memory GRM and Soup are the same function. M's text puts SSC second. That they are better than "
        "the memory alone is direction 32.",
        depends="On the keys and the memory: every pair has small differences of both signs.",
    ),
    Direction(
        "The gate of caching should see the context", "M Fig. 5", lines.context, ("mqar", "studies"),
        note=lambda: '"age": the gate is a projection of the input alone, one for each age of a memory. In the paper the '
        "perplexity of GRM changes by 1% (13.3 against 13.4), and the accuracy of retrieval by 7.5 points.",
    ),
    Direction(
        "Attention is still ahead in recall", "M §4.3, Table 3; A §6.5, Table 5", lines.gap,
        ("mqar", "recall", "needles"),
        note=lambda: "These are tasks of recall. No paper claims it of language: in A Table 2 memories are ahead of Transformer++ "
        "in perplexity (directions 24 and 31). Whether caching helps recall is in direction 32.",
    ),
    Direction(
        "Elastic Memory: exponential sampling is better than uniform", "E Tables 2, 3",
        lambda: zoo(PAIRS["sampling"]) + trained(PAIRS["sampling"]) + studies("sampling") + language("sampling"),
        ("zoo", "stability", "studies", "language"),
    ),
    Direction(
        "Elastic Memory: trained uniform and tested exponential is better than uniform", "E §3.5",
        lambda: studies("swap"), ("studies",),
    ),
    Direction(
        "Elastic Memory: a larger memory is better", "E §3.3, Tables 3, 13", lambda: studies("size"), ("studies",),
        note=lambda: "1x has as many coefficients for each token of a block as the paper's. What they lose of the keys and "
        "values is a direction of its own, 22.",
    ),
    Direction(
        "Elastic Memory is more robust than its baselines to corruption of the local context", "E §3.6",
        lambda: studies("robust"), ("studies",),
        note=lambda: "This is the sentence of the text. A better model has a lower loss with and without noise, so robustness is "
        "measured by the rise of the loss. The paper's own table has another order for noise in the memory layer: the perplexity "
        "of Elastic Memory rises more than Memorizing Transformer's at every rate (at 75% from 2.915 to 3.316, against 3.305 to "
        "3.316). Direction 23 compares with that table.",
        depends="On the baseline and the place of the noise: its loss rises less than that of attention within blocks; with "
        "noise in the memory layer it rises more than with a queue of as many numbers, and with noise in all layers "
        "less.",
    ),
    Direction(
        "GAM: both pathways are better than the global one, that than their sum, that than the local one; linear scaling",
        "G Tables 2, 3", lambda: lines.whole_runs(PAIRS["gam"]), ("zoo", "stability"),
        note=lambda: "Linear scaling has no lines, only powers of the length with which the cost of a block grows. G Table 2 "
        "compares with attention that stores all its weights, attention-whole; attention is this library's, which stores none. "
        f"{gam_scaling()}.",
        depends="On the pair: both pathways are better than the global one on every text, and their sum is better than the "
        "global one, against the paper.",
    ),
    Direction(
        "MAD: Atlas is better than every baseline", "A Table 4", mad, ("mad",),
        note=lambda: "Tasks on which the paper has equal numbers are left out: in-context recall, and copying against OmegaNet. "
        "At chance: neither model is clearly above a guess and above two convolutions and SwiGLU without a mixer.",
    ),
    Direction(
        "More Newton–Schulz steps in the test memorize better", "A §5",
        lines.newton_schulz_steps, ("capacity", "needles"),
        note=lambda: "The paper calls the number of steps a test-time compute parameter that can potentially improve memorization. "
        "Each line compares a number of steps with the next smaller one. Memories of the capacity experiment are not trained, and "
        "their step sizes are chosen for each number of steps; Atlas in the needles is trained with 5 steps.",
        depends="On the memory and the keys: up to three steps help a deep memory, and a matrix if keys are correlated or "
        "come in topics, but not a matrix with independent keys; more than three decide nothing.",
    ),
    Direction(
        "Memory caching is better than Log-Linear memories", "M §4.2, Tables 1–4", lines.log_linear,
        ("capacity", "mqar", "stability"),
        note=lambda: "Both keep several memories of a sequence. Log-Linear ones grow with the distance, and their number with the "
        "logarithm of the length. In M's Tables 2 to 4 GRM, Soup and SSC are ahead with both memories in almost every column. In "
        "the capacity experiment the weights of the levels are the same for all tokens; a trained model chooses them for each.",
    ),
    Direction(
        "Memory caching: even without a gate (Residual) it is better than the memory alone", "M §3.1, §4.6", lines.residual,
        ("capacity", "mqar", "zoo", "stability"),
        note=lambda: "A linear memory with Residual that writes by the dot product, as in MQAR, is "
        "the same memory (M §3.1), except that its trained initial value, which starts at zero, counts once for each segment. "
        "So that line is a control: it measures what training alone makes of two forms of one memory, and decides nothing. "
        "Memories of the capacity experiment write by the squared error, so a fresh start changes what a segment writes. M's "
        "Tables 1 to 4 have no Residual.",
    ),
    Direction(
        "Memory caching: a gate is better than none (GRM than Residual)", "M §4.6, Fig. 5", lines.gating,
        ("capacity", "mqar", "zoo", "stability", "studies"),
        note=lambda: '"ones": GRM whose gate is 1. In the paper the perplexity of GRM changes by 1.5% (13.3 against 13.5), and the '
        "accuracy of retrieval by 8 points.",
    ),
    Direction(
        "Elastic Memory: a larger memory loses less of the keys and values", "E App. B, Table 13", lambda: studies("lost"),
        ("studies",),
        note=lambda: "The paper has the mean squared error. Its unit is the model's, and models of other sizes have other keys and "
        "values, so its share of their mean square is compared too.",
        depends="On the unit: the mean squared error falls with the size in every decided line; the share that is lost "
        "falls too if the sampling is exponential and the memory at least 2x, and rises from 1x to 2x, and to 4x "
        "with uniform sampling.",
    ),
    Direction(
        "Elastic Memory under corruption of the local context: the orders of the table", "E Table 7",
        lambda: studies("orders"), ("studies",),
        note=lambda: "Each line has the sign of the paper's own numbers, for the loss under noise and for its rise from the loss "
        "without noise; the equal numbers (75% in the memory layer) are left out. E does not say which noise it is.",
        depends="On the measure: the rise of the loss has the paper's order in every decided line; the loss has it with "
        "noise in all layers, and not with noise in the memory layer.",
    ),
    Direction(
        "Language: Atlas and OmegaNet are better than Titans, Transformer++ and the gated delta rule", "A §6.1, Table 2",
        lambda: lines.whole_runs(PAIRS["language"]) + language("language"), ("zoo", "stability", "language"),
        note=lambda: f"attention-lmm is softmax attention in the layer of a memory (direction 7). {_OURS} "
        "gated-delta-rule is the rule in that layer, and gated-deltanet the block of its paper.",
        depends="On the rival and the position: both are ahead of Transformer++ and the gated delta rule, and of Gated "
        "DeltaNet in whole runs; they are behind Gated DeltaNet after position 1,024, and Atlas behind Titans in "
        "the one decided line.",
    ),
    Direction(
        "GAM is better than a Transformer", "G Table 1",
        lambda: lines.gam("transformer++", BASELINE, "gam-transformer"), ("zoo", "stability"),
        note=lambda: "gam-transformer is G's baseline; Transformer++ is newer. Where gam-transformer is no better than a "
        "trigram (below), a line says that GAM learns faster, and nothing of what that Transformer reaches. "
        f"attention-lmm is attention with short convolutions and the output gate of a memory layer. {_OURS} GAM has a convolution "
        "too, so attention-lmm is the closer comparison, and its lines belong beside the verdict.",
    ),
    Direction(
        "Elastic Memory is better than no memory and than other memories", "E §3.2, Table 2", lines.elastic_memory,
        ("zoo", "stability", "studies", "language"),
        note=lambda: "block, block-attention: attention within blocks, no memory. memorizing-1x is a queue of as many numbers as "
        "the elastic memory, memorizing-all one of all earlier tokens.",
    ),
    Direction(
        "A hybrid with attention (MAG) is better than the memory alone and than MAL", "A §6.6, Table 6", lines.hybrid,
        ("zoo", "stability", "language"),
        note=lambda: "In A's Table 6 MAL is behind Atlas alone, so these two are not compared. That table has no hybrid of Titans, "
        "so the lines of titans-mag are not a claim of the paper and have no verdict.",
        depends="On the rival: MAG is better than MAL and worse than the memory alone, in every decided line.",
    ),
    Direction(
        "Speed of training: Memory Caching is between its memory alone and Transformer++, and SSC costs least", "M §4.7, Fig. 4",
        lines.caching_speed, ("efficiency",),
        note=lambda: f"{_ROUNDS} M's figure is a plot without numbers. M says that the longer the context, the more "
        "efficient is caching, compared with attention. Segments of the tiny presets have 64 tokens at every length. "
        f"{not_run(('titans-ssc', 'titans-grm', 'titans-soup'))}",
        depends="On the length: SSC is slower than GRM at 512 tokens and faster at longer texts, and faster than "
        "Transformer++ only at 8,192; GRM and Soup are slower than Transformer++ in every line.",
    ),
    Direction(
        "Speed of training: Elastic Memory is faster than Transformer++, Infini-Transformer and Melodi", "E §3.7, Table 8",
        lambda: efficiency([("elastic-exp", other) for other in (REFERENCE, "infini", "melodi")] + [("memorizing", "elastic-exp")]),
        ("efficiency",),
        note=lambda: f"{_ROUNDS} E has 1.06 times the speed of Transformer++, 1.66 times that of Infini-Transformer and 1.93 times "
        "that of Melodi; Memorizing Transformer is 1.02 times as fast as Elastic Memory, and the last lines have that order.",
        depends="On the rival: it is faster than Transformer++ and Melodi at every length, and slower than "
        "Infini-Transformer in the one decided line, at 512 tokens.",
    ),
    Direction(
        "Speed of training: GAM is faster than a Transformer and than Mamba", "G §5.1",
        lambda: efficiency([("gam", "gam-transformer"), ("gam", "mamba")]), ("efficiency",),
        note=lambda: f"{_ROUNDS} gam-transformer is G's baseline. G has epochs of 117.2, 131.9 and 127.1 s, with "
        "texts of 256 tokens. Mamba has a fused kernel there and none here.",
    ),
    Direction(
        "Language: the order of the baselines, Titans, Gated DeltaNet, Mamba-2, DeltaNet, Transformer++, RetNet", "A Table 2",
        lambda: lines.whole_runs(PAIRS["baselines"]) + language("baselines"), ("zoo", "stability", "language"),
        note=lambda: "The order of the perplexities of WikiText, without pairs that the two sizes order differently. Gated "
        "DeltaNet-H2 is before Gated DeltaNet, and DLA (760M) between Gated DeltaNet and DeltaNet. Here Transformer++ and "
        "RetNet have no short convolutions, and the others have. M Table 1 has DeltaNet behind Transformer++ at both sizes, 24.52 "
        "and 24.18 at 760M and 18.62 and 17.92 at 1.3B.",
        depends="On the pair and the position: Mamba-2 is ahead of Gated DeltaNet on every text, against the paper; Titans "
        "is ahead of Gated DeltaNet in whole runs and behind it after position 1,024; the other decided orders are "
        "the paper's.",
    ),
    Direction(
        "Memory caching with a gate (GRM, Soup, SSC) is better than the memory alone", "M §4, Tables 1–4", lines.caching,
        ("capacity", "mqar", "recall", "needles", "zoo", "stability", "studies", "language"),
        note=lambda: "Memories of the capacity experiment are not trained and have as many weights on both sides; the caches come "
        "on top, as in the paper. The size of the gate's scores is chosen as the step size is. Their order is direction 9.",
    ),
    Direction(
        "GAM is better than Mamba", "G Table 1", lambda: lines.gam("mamba"), ("zoo", "stability"),
        note=lambda: "G has it on WikiText-2. Its Mamba has no norm and no residual around its layers; ours is the block of "
        "Mamba's paper.",
    ),
    *year.DIRECTIONS,
)  # fmt: skip
