"""Long-context tasks that are generated here: their prompts, scores, and how a model answers them.

prompt = TASKS["niah_1"].make(Setting(seed=0, length=4096, tokenizer=tokenizer, haystack=Haystack(text), depth=0.5))
"""

from atlasjax.evaluate.long_context import babilong, needles, recall, ruler
from atlasjax.evaluate.long_context.haystack import Haystack
from atlasjax.evaluate.long_context.run import Plan, Reading, Sample, check_fit, mean_scores, model_answers, run_task
from atlasjax.evaluate.long_context.task import TASKS, Prompt, Setting, Task, find, fitted, register

__all__ = [
    "TASKS",
    "Haystack",
    "Plan",
    "Prompt",
    "Reading",
    "Sample",
    "Setting",
    "Task",
    "babilong",
    "check_fit",
    "find",
    "fitted",
    "mean_scores",
    "model_answers",
    "needles",
    "recall",
    "register",
    "ruler",
    "run_task",
]
