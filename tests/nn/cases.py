"""The mixers that the tests of this folder stream and train, each in its own file. tests/test_models.py covers the others."""

from tests.nn import baseline_formulas, delta_formulas

FORMULAS = baseline_formulas.FORMULAS | delta_formulas.FORMULAS
FORMS = baseline_formulas.FORMS | delta_formulas.FORMS

BASELINES = list(FORMULAS)  # test_baselines
HYBRIDS = ("attention", "swa", "mag", "mal", "mac")  # test_hybrids
BLOCK_MEMORIES = ("memorizing", "infini")  # test_block_memories
BLOCK_RECURRENCES = ("melodi", "block_recurrence")  # test_block_recurrent_baselines
