"""The mixers that the tests of this folder stream and train, each in its own file. tests/test_models.py covers the others."""

from tests.nn import (
    baseline_formulas,
    delta_formulas,
    lact_formulas,
    mamba3_formula,
    momentum_formulas,
    self_modifying_formula,
)

_FILES = (baseline_formulas, delta_formulas, lact_formulas, mamba3_formula, momentum_formulas, self_modifying_formula)
FORMULAS = {name: formula for file in _FILES for name, formula in file.FORMULAS.items()}
FORMS = {name: form for file in _FILES for name, form in file.FORMS.items()}
BASELINES = list(FORMULAS)  # test_baselines
HYBRIDS = ("attention", "swa", "mag", "mal", "mac")  # test_hybrids
LATENT = ("mla",)  # test_latent_attention
BLOCK_MEMORIES = ("memorizing", "infini")  # test_block_memories
BLOCK_RECURRENCES = ("melodi", "block_recurrence")  # test_block_recurrent_baselines
