"""Long-context tasks that are generated here: their prompts, scores, and how a model answers them.

prompt = TASKS["niah_1"].make(Setting(seed=0, length=4096, tokenizer=tokenizer, haystack=Haystack(text), depth=0.5))
"""

from atlasjax.evaluate.long_context import babilong, figures, needles, perplexity, recall, report, ruler
from atlasjax.evaluate.long_context.haystack import Haystack
from atlasjax.evaluate.long_context.setting import Plan, Prompt, Setting, Tokenizer
from atlasjax.evaluate.long_context.task import (
    TASKS,
    PromptTask,
    Reader,
    Result,
    Run,
    Sample,
    Task,
    TextTask,
    Value,
    add,
    find,
    fitted,
    joined,
    prompts,
)

__all__ = [
    "TASKS",
    "Haystack",
    "Plan",
    "Prompt",
    "PromptTask",
    "Reader",
    "Result",
    "Run",
    "Sample",
    "Setting",
    "Task",
    "TextTask",
    "Tokenizer",
    "Value",
    "add",
    "babilong",
    "figures",
    "find",
    "fitted",
    "joined",
    "needles",
    "perplexity",
    "prompts",
    "recall",
    "report",
    "ruler",
]
