"""The tables of the page of evidence, of the comparisons beside the experiments, and of what they say to somebody who chooses."""

from experiments.evidence import held, page


def evidence_summary() -> str:
    """The directions that the papers claim, with their verdicts."""
    return page.summary()


def evidence_settings() -> str:
    """On what the verdicts depend that are not the same in all settings."""
    return page.settings()


def evidence_commands() -> str:
    """The commands of the experiments that have comparisons."""
    return page.commands()


def evidence_fresh() -> str:
    """The predictions of the conditions, and what fresh seeds said of them."""
    return held.fresh()


def evidence_model() -> str:
    """The effects of the settings on the directions with a condition."""
    return held.model()


def evidence_details() -> str:
    """The comparisons of each direction."""
    return page.details()


def choosing_memories() -> str:
    """The best memory for each kind of keys."""
    return held.choices()
