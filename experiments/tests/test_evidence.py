"""experiments/evidence: the verdict of a direction, the signs of the comparisons, and the page's parts.

That the pages are what the rows give is in tests/test_site.py, with the other generated pages.
"""

import dataclasses

import numpy as np
import pytest

from experiments.evidence import conditions, counting, fresh, lines, page, sources, speed
from experiments.evidence.directions import DIRECTIONS, EXPERIMENTS, Direction
from experiments.evidence.sources import Line
from experiments.intervals import compare

BETTER, WORSE, OPEN = [1.0, 1.1, 0.9, 1.0], [-1.0, -1.1, -0.9, -1.0], [1.0, -1.0, 1.1, -1.2]


def line(differences, unit="accuracy", aside=""):
    return Line("a against b", compare(differences, [0.0] * len(differences)), unit, 1000, "capacity", aside)


@pytest.fixture(scope="module")
def recorded():
    """Direction → its lines, from the rows of the repository."""
    return {direction.name: direction.lines() for direction in DIRECTIONS}


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([], "not run"),
        ([OPEN, [5.0]], "undecided"),
        ([BETTER, [5.0]], "reproduced"),
        ([BETTER, OPEN], "reproduced in part"),
        ([WORSE, OPEN, WORSE], "refuted here in part"),
        ([BETTER, WORSE], "depends on the setting"),
    ],
)
def test_verdict_of_a_direction(found, verdict):
    assert page.verdict([line(x) for x in found]) == verdict


def test_one_seed_has_no_interval_and_a_borrowed_power(monkeypatch):
    monkeypatch.setattr(page, "language_spread", lambda: 0.01)
    direction = Direction("a is better", "A", lambda: [line([0.02], "bits per byte"), line(OPEN)], ("zoo",))
    text = page._section(3, direction)
    assert "| +0.020 bits per byte |  |  | 1 | 1,000 | undecided |" in text
    assert "by the spread of titans-tiny" in text
    assert "by their spread between seeds" in text
    assert "[zoo](../zoo/results/embedded.png)" in text


def test_a_lower_loss_is_better(monkeypatch):
    found = [
        {"model": model, "bits_per_byte": loss + seed, "tokens": 8, "recipe": {"seed": seed}}
        for model, loss in (("good", 2.0), ("bad", 2.5))
        for seed in range(3)
    ]
    monkeypatch.setattr(sources, "rows", lambda path: found)
    for compared in sources.ablation([("good", "bad"), ("good", "missing")]):
        assert compared.comparison.differences == (0.5, 0.5, 0.5)
        assert compared.comparison.verdict == "reproduced"
    assert len(sources.ablation([("good", "missing")])) == 0


def test_a_higher_speed_is_better(monkeypatch):
    found = [
        {"kind": kind, "model": name, "length": 512, "tokens": 1024, "seconds": seconds,
         "reference_seconds": [2.0, 4.0, 9.0], "device": "cpu: cpu", "recipe": {"rounds": 3, "size": "tiny"}}
        for kind, name, seconds in (("training", "good", [1.0, 2.0, 4.5]), ("training", "bad", [4.0, 8.0, 18.0]),
                                    ("training", "large", None), ("decoding", "good", [9.0, 9.0, 9.0]))
    ]  # fmt: skip
    monkeypatch.setattr(speed, "rows", lambda path: found)
    monkeypatch.setattr(speed, "texts", lambda name: ["cpu-tiny"])
    pairs = [("good", "bad"), ("good", "transformer++"), ("bad", "transformer++"), ("large", "bad")]
    compared = speed.efficiency(pairs)
    assert [line.comparison.differences for line in compared] == [(2.0,) * 3, (1.0,) * 3, (-1.0,) * 3]
    assert compared[0].tokens == 1024


def test_larger_curves_are_better(monkeypatch):
    found = [
        {"budget": 256, "passes": 1, "keys": "narrow", "memory": name, "floats": 256, "recalled": curves,
         "recipe": {"pairs": [2, 4, 8]}}
        for name, curves in (("good", [[1, 1, 1], [1, 1, 0.8]]), ("bad", [[1, 1, 0], [1, 1, 0]]))
    ]  # fmt: skip
    monkeypatch.setattr(sources, "rows", lambda path: found)
    (compared,) = sources.capacity([("good", "bad")])
    assert compared.comparison.differences == pytest.approx((0.5, 0.4))


def test_each_direction_has_a_command_and_a_name(recorded):
    assert len({direction.name for direction in DIRECTIONS}) == len(DIRECTIONS)
    for direction in DIRECTIONS:
        assert direction.experiments
        assert set(direction.experiments) <= set(EXPERIMENTS)
        assert {line.source for line in recorded[direction.name]} <= set(direction.experiments)


def test_verdicts_that_depend_on_the_setting_say_on_what(recorded):
    for direction in DIRECTIONS:
        assert bool(direction.depends) == (page.verdict(recorded[direction.name]) == page.DEPENDS), direction.name


def test_plots_of_experiments_are_there():
    assert all((sources.ROOT / "experiments/evidence" / plot).resolve().is_file() for _, plot in EXPERIMENTS.values())


def test_lines_test_the_claim_that_names_them(recorded):
    of = lambda words: [line for name, found in recorded.items() if words in name for line in found]
    assert not [line for line in of("GRM is better than Soup") if "residual" in line.setting]
    assert all("-age" in line.setting for line in of("should see the context"))
    assert not [line for line in of("Muon is the better") if "Muon 1," in line.setting]
    assert {line.aside for line in of("even without a gate") if "linear-residual" in line.setting} == {"control"}
    assert {line.unit for line in of("a larger memory is better")} == {"bits per byte"}


def test_lines_without_a_verdict_decide_nothing():
    aside = line(WORSE, aside="at chance")
    assert page.verdict([line(BETTER), aside]) == "reproduced in part"
    assert page.verdict([line(BETTER), line(WORSE, aside="control")]) == "reproduced"
    assert page.verdict([aside]) == "undecided"
    assert page._cells(aside)[-1] == "at chance"
    assert page._power([aside]) == ""


def test_equal_lines_count_once():
    other = Line("c against d", compare([0.5], [0.0]), "accuracy", 1000, "capacity")
    found = [line(BETTER), other, dataclasses.replace(line(BETTER), setting="a larger budget")]
    assert page.distinct(found) == found[:2]


def test_recall_at_chance_has_no_verdict(monkeypatch):
    recipe = {"vocab_size": 128, "length": 64, "pairs": [4, 8, 16], "steps": 1, "batch_size": 1}
    row = {"width": 16, "learning_rate": 0.01, "state_floats": 1, "recipe": recipe}
    found = [
        {**row, "model": name, "seed": seed, "accuracy": accuracy + seed / 1000}
        for name, accuracy in (("good", 0.5), ("poor", 0.13), ("worse", 0.1))
        for seed in range(3)
    ]
    monkeypatch.setattr(sources, "rows", lambda path: found if "small" in path else ())
    verdicts = [line.verdict for line in sources.mqar([("good", "poor"), ("poor", "worse")])]
    assert verdicts == ["reproduced", "at chance"]


@pytest.mark.parametrize(
    ("losses", "beats"),
    [
        ({0: 2.4, 1: 2.41, 2: 2.39}, True),
        ({0: 2.6, 1: 2.3, 2: 2.59}, False),  # by the mean, but not clearly
        ({0: 2.6, 1: 2.61, 2: 2.59}, False),
        ({0: 2.4}, True),  # one seed decides nothing in any case
        ({0: 2.6}, False),
        ({}, False),
    ],
)
def test_what_is_better_than_a_trigram(losses, beats):
    assert counting.beats(losses, 2.5) == beats


LEARNED, COUNTED, BEHIND = 2.0, 2.6, 2.9  # bits per byte, where a trigram has 2.5


def text_rows(names, **fields):
    """Three seeds of three models, of which the first alone is better than a trigram."""
    recipe = {"steps": 1, "batch_size": 1, "length": 1024, "bin": 64}
    return [
        {**fields, "model": name, "preset": name, "seed": seed, "bits_per_byte": loss + seed / 1000,
         "recipe": {**recipe, "seed": seed}}
        for name, loss in zip(names, (LEARNED, COUNTED, BEHIND), strict=True)
        for seed in range(3)
    ]  # fmt: skip


def read_texts(monkeypatch, rows):
    monkeypatch.setattr(sources, "rows", lambda path: tuple(rows))
    monkeypatch.setattr(sources, "texts", lambda name: ["embedded"])
    monkeypatch.setattr(counting, "level", lambda source, text: 2.5)


@pytest.mark.parametrize("read", [sources.zoo, sources.ablation, sources.trained])
def test_models_that_only_count_have_no_verdict(monkeypatch, read):
    names = ("learned", "counted", "behind")
    read_texts(monkeypatch, text_rows(names, tokens=1, text="embedded", steps=1, bounded=True))
    found = read([("learned", "behind"), ("counted", "behind")])
    assert {line.verdict for line in found if "learned" in line.setting} == {"reproduced"}
    assert {line.verdict for line in found if "counted" in line.setting} == {"no better than a trigram"}
    assert found[0].counted[1] == ("behind 2.901",)
    assert found[-1].counted[1] == ("counted 2.601", "behind 2.901")


def test_studies_of_models_that_only_count_have_no_verdict(monkeypatch):
    read_texts(monkeypatch, text_rows(("titans-grm", "titans-ssc", "titans")))
    verdicts = {line.setting: line.verdict for line in sources.studies("caching")}
    assert verdicts == {
        "titans-grm against titans: embedded": "reproduced",
        "titans-ssc against titans: embedded": "no better than a trigram",
    }


def test_positions_of_models_that_only_count_have_no_verdict(monkeypatch):
    names = ("titans", "gated-deltanet", "transformer++")
    runs = text_rows(names, kind="run", learning_rate=0.01)
    for row in runs:
        row["by_position"] = {str(n): [row["bits_per_byte"]] * (n // 64) for n in (1024, 4096)}
    rates = [{**row, "kind": "rate", "loss": 1.0} for row in runs]
    read_texts(monkeypatch, rates + runs)
    found = {line.setting: line for line in sources.language("baselines")}
    assert found["titans against gated-deltanet: context of 1,024, embedded"].verdict == "reproduced"
    counted = found["gated-deltanet against transformer++: positions 1,024 to 4,096, embedded"]
    assert counted.verdict == "no better than a trigram"
    assert len(found) == 8


def test_a_text_without_a_trigram_is_an_error():
    with pytest.raises(ValueError, match=r"^counting: zoo on a_book has no trigram; run `python -m"):
        counting.level("zoo", "a_book")


def test_a_trigram_of_the_text_that_a_run_reads(tmp_path):
    from atlasjax.data.config import DataConfig

    text = tmp_path / "text.txt"
    text.write_text("abcabcabd" * 3000)
    data = DataConfig(source="text", paths=(str(text),), sequence_length=64, batch_size=2, held_out="tail")
    part, whole = counting.measure(data, 3), counting.measure(data, None)
    assert part["bytes"] == 3 * 2 * 64
    assert 1000 < whole["bytes"] < 27000 // 20 + 1
    # After "ab" comes "c" twice as often as "d", and every other byte follows from two.
    assert whole["trigram"] == pytest.approx(0.918 / 3, abs=0.03)
    assert whole["unigram"] > 1.8


def test_recorded_trigrams_are_those_of_the_runs(tmp_path):
    found = counting.runs(tmp_path)
    stored = {(row["experiment"], row["text"]): row for row in counting.read_rows(counting.ROWS)}
    assert stored.keys() == found.keys()
    for key in (("zoo", "embedded"), ("studies", "embedded")):  # the text that needs no file
        measured = counting.measure(*found[key])
        assert {name: stored[key][name] for name in measured} == measured


def test_the_page_names_models_that_only_count():
    one = dataclasses.replace(line(BETTER), counted=("a text (trigram 2.500)", ("behind 2.901",)))
    two = dataclasses.replace(line(OPEN), counted=("a text (trigram 2.500)", ("counted 2.601", "behind 2.901")))
    none = dataclasses.replace(line(OPEN), counted=("another text (trigram 2.500)", ()))
    assert page._counted([one, two, none]).endswith(": a text (trigram 2.500): behind 2.901, counted 2.601.")
    assert page._counted([line(OPEN), none]) == ""
    direction = Direction("a is better", "A", lambda: [one, two], ("zoo",))
    assert "**Not clearly better than a trigram**" in page._section(1, direction)


def test_models_that_no_paper_has_decide_nothing(recorded):
    found = [line for each in recorded.values() for line in each]
    ours = [line for line in found if "attention-lmm" in line.setting or "titans-mag" in line.setting]
    assert ours
    assert {line.verdict for line in ours} <= {lines.NOT_CLAIMED, counting.NO_BETTER}


def test_recall_is_decided_by_tasks_of_recall(recorded):
    assert {line.unit for line in recorded["Attention is still ahead in recall"]} == {"accuracy"}


def test_gam_is_compared_with_transformers_and_with_mamba_apart(recorded):
    of = {name: {line.setting.split(":")[0] for line in found} for name, found in recorded.items()}
    assert of["GAM is better than Mamba"] == {"gam against mamba"}
    transformers = ("transformer++", "gam-transformer", "attention-lmm")
    assert of["GAM is better than a Transformer"] == {f"gam against {name}" for name in transformers}


def test_models_that_were_not_timed_are_told(monkeypatch):
    row = {"kind": "training", "model": "large", "length": 8192, "seconds": None, "temporary_bytes": 12 * 2**30,
           "recipe": {"most_gib": 8.0}}  # fmt: skip
    found = [row, {**row, "length": 512, "seconds": [1.0]}, {**row, "model": "other"}, {**row, "kind": "decoding"}]
    monkeypatch.setattr(speed, "rows", lambda path: found)
    monkeypatch.setattr(speed, "texts", lambda name: ["cpu-tiny"])
    told = "large has no line at 8,192 tokens: a step needs 12.0 GiB, and steps of more than 8 GiB were not run."
    assert speed.not_run(("large", "missing")) == told


def test_the_growth_of_a_block_ends_where_it_was_run(monkeypatch):
    block = lambda seconds, size: {"seconds": seconds, "temporary_bytes": size}
    found = [
        {"length": n, "blocks": {"gam": block(n, n), "attention": block(n**1.5, n),
                                 "attention-whole": block(n**2 if n < 1024 else None, n**2)}}
        for n in (256, 512, 1024)
    ]  # fmt: skip
    monkeypatch.setattr(speed, "rows", lambda path: found)
    told = speed.gam_scaling().split("; ")
    assert "attention-whole, time from 256 to 512 tokens: 2.00" in told
    assert "attention-whole, temporary memory from 256 to 1,024 tokens: 2.00" in told
    assert "gam, time from 256 to 1,024 tokens: 1.00" in told


def test_the_stability_page_names_the_runs_with_spikes():
    readme = (sources.ROOT / "experiments" / "stability" / "README.md").read_text()
    told = readme[readme.index("The gradient norm had one spike in") : readme.index("and the runs recovered")]
    spikes = {}
    for row in sources.rows("stability/results/train.jsonl"):
        if row["bounded"] and row["spikes"]:
            spikes[row["preset"]] = spikes.get(row["preset"], 0) + row["spikes"]
    one, _, rest = told.partition(", two in ")
    two, _, three = rest.partition(" and three in ")
    names = lambda part: set(part.replace(" and ", " ").replace(",", " ").split())
    assert {name for name, count in spikes.items() if count == 2} == names(two)
    assert {name for name, count in spikes.items() if count == 3} == names(three)
    assert {name for name, count in spikes.items() if count == 1} <= names(one)
    assert max(spikes.values()) == 3


def test_conditions_predict_by_the_first_branch_that_holds():
    case = lambda **changed: sources.Case(
        **{"better": "linear, c=4", "worse": "linear", "keys": "topics", "budget": 1024, "passes": 1} | changed
    )
    predicts = lambda number, **changed: conditions.branch_of(number, case(**changed)).predicts
    assert predicts(1) == conditions.AHEAD
    assert predicts(1, passes=30) == predicts(1, keys="independent") == conditions.BEHIND
    assert predicts(1, keys="independent", better="linear, c=4, buffers free") == conditions.NEITHER
    assert conditions.branch_of(5, case(better="linear, c=8", worse="linear, c=4")) is None


@pytest.mark.parametrize(
    ("predicts", "found", "outcome"),
    [("ahead", BETTER, "right"), ("behind", BETTER, "wrong"), ("ahead", OPEN, "undecided"), ("alike", BETTER, "wrong"),
     ("alike", [0.05, 0.06, 0.05, 0.06], "right"), ("alike", [1.0, -0.5, 1.1, -0.2], "undecided")],
)  # fmt: skip
def test_outcome_of_a_prediction(predicts, found, outcome):
    assert conditions.outcome(conditions.Branch("", predicts, lambda c: True), line(found)) == outcome


def test_fresh_rows_repeat_a_row_on_its_own_seeds():
    """The gates of a row, on the seeds of that row, give its numbers but for the gates' third digit."""
    row = next(r for r in sources.rows(sources.CAPACITY) if fresh.key_of(r) == ("narrow", 256, 1, "linear"))
    assert np.abs(np.asarray(fresh.replay(row, range(2))) - row["recalled"][:2]).max() < 0.1
