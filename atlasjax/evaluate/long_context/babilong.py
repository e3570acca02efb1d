"""Facts about people and things among sentences of a text, as in BABILong (arXiv 2406.10149).

The facts are written here by a simulation of bAbI's world (arXiv 1502.05698), and stand in order at random ends of sentences. The
prompts are shorter than BABILong's own, so that they fit into 1,000 tokens of any tokenizer: compare models with them, not with
published numbers.
"""

import dataclasses

import numpy as np

from atlasjax.evaluate.long_context.scoring import one_label
from atlasjax.evaluate.long_context.setting import Prompt, Setting
from atlasjax.evaluate.long_context.task import fitted, prompts

PEOPLE = ("Daniel", "John", "Mary", "Sandra")
PLACES = ("bathroom", "bedroom", "garden", "hallway", "kitchen", "office")
THINGS = ("apple", "football", "milk")
_MOVES = ("moved to", "went to", "journeyed to", "travelled to", "went back to")
_TAKES = ("took", "got", "grabbed", "picked up")
_DROPS = ("dropped", "left", "discarded", "put down")
_GENERATED = 20
_STORY = "John moved to the office. John took the milk. John went to the garden."
_PROMPT = (
    "Facts are hidden in a text. Answer the question with one word, from the facts alone.\n\nExample: {example}\n\n<context>\n"
    "{context}\n</context>\nQuestion: {question}\nAnswer:"
)


@prompts(_GENERATED, one_label, has_depth=False, about="where a person is: one fact in a text (BABILong qa1)")
def babilong_1(setting: Setting) -> Prompt:
    """Where is a person? 2 to 10 facts: people move."""
    rng = setting.rng("babilong_1")
    while True:
        world = _World(rng)
        for _ in range(rng.integers(2, 11)):
            world.move()
        person = _one(rng, tuple(world.places))
        example = "Daniel went to the office. Mary moved to the garden. Question: Where is Daniel? Answer: office."
        return _prompt(setting, "babilong_1", rng, world, f"Where is {person}?", world.places[person], example)


@prompts(_GENERATED, one_label, has_depth=False, about="where a thing is: two facts in a text (BABILong qa2)")
def babilong_2(setting: Setting) -> Prompt:
    """Where is a thing? 4 to 16 facts: people move, take things and drop them."""
    rng = setting.rng("babilong_2")
    while True:
        world = _World(rng)
        for _ in range(rng.integers(4, 17)):
            world.act()
        if not world.been:
            continue
        thing = _one(rng, tuple(world.been))
        example = f"{_STORY} Question: Where is the milk? Answer: garden."
        return _prompt(setting, "babilong_2", rng, world, f"Where is the {thing}?", world.been[thing][-1], example)


@prompts(_GENERATED, one_label, has_depth=False, about="where a thing was before: three facts in a text (BABILong qa3)")
def babilong_3(setting: Setting) -> Prompt:
    """Where was a thing before it was in its last place? 8 to 24 facts: people move, take things and drop them."""
    rng = setting.rng("babilong_3")
    while True:
        world = _World(rng)
        for _ in range(rng.integers(8, 25)):
            world.act()
        # If a thing was in a place twice, "before the kitchen" has two answers.
        known = {thing: been for thing, been in world.been.items() if been.count(been[-1]) == 1 and len(been) > 1}
        if not known:
            continue
        thing = _one(rng, tuple(known))
        before, last = known[thing][-2:]
        question = f"Where was the {thing} before the {last}?"
        example = f"{_STORY} Question: Where was the milk before the garden? Answer: office."
        return _prompt(setting, "babilong_3", rng, world, question, before, example)


def _prompt(
    setting: Setting, task: str, rng: np.random.Generator, world: "_World", question: str, answer: str, example: str
) -> Prompt:
    haystack, depths = setting.haystack, np.sort(rng.random(len(world.facts)))
    start = haystack.start(rng)
    needles = list(zip(map(float, depths), world.facts))

    def text(n: int) -> str:
        return _PROMPT.format(example=example, context=haystack.around(needles, start, n), question=question)

    return Prompt(*fitted(setting, task, _GENERATED, text), (answer,), PLACES, question)


def _one(rng: np.random.Generator, choices: tuple[str, ...]) -> str:
    return choices[rng.integers(len(choices))]


@dataclasses.dataclass
class _World:
    """People who move, take things and drop them.

    Attributes:
      rng: chooses what happens.
      facts: what happened, one sentence each.
      places: person → place, of those who have moved.
      holders: thing → person who has it.
      been: thing → the places where it was, in order, since somebody took it first.
    """

    rng: np.random.Generator
    facts: list[str] = dataclasses.field(default_factory=list)
    places: dict[str, str] = dataclasses.field(default_factory=dict)
    holders: dict[str, str] = dataclasses.field(default_factory=dict)
    been: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def move(self) -> None:
        """One person goes to another place, with all that the person has."""
        person = _one(self.rng, PEOPLE)
        place = _one(self.rng, tuple(place for place in PLACES if place != self.places.get(person)))
        self.places[person] = place
        for thing, holder in self.holders.items():
            if holder == person:
                self.been[thing].append(place)
        self.facts.append(f"{person} {_one(self.rng, _MOVES)} the {place}.")

    def act(self) -> None:
        """A move as often as not; otherwise somebody takes or drops a thing, if that is possible."""
        possible = [
            (person, thing)
            for person, place in self.places.items()
            for thing in THINGS
            if self.holders.get(thing) == person
            or (thing not in self.holders and (thing not in self.been or self.been[thing][-1] == place))
        ]
        if not possible or self.rng.random() < 0.5:
            return self.move()
        person, thing = possible[self.rng.integers(len(possible))]
        if self.holders.get(thing) == person:
            del self.holders[thing]
            self.facts.append(f"{person} {_one(self.rng, _DROPS)} the {thing}.")
        else:
            self.holders[thing] = person
            self.been.setdefault(thing, [self.places[person]])
            self.facts.append(f"{person} {_one(self.rng, _TAKES)} the {thing}.")
