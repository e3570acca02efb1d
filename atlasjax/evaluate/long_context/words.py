"""Random keys and values."""

import uuid
from collections.abc import Callable

import numpy as np

_ADJECTIVES = """
able ancient angry autumn basic bitter black blue bold brave brief bright broad broken bronze calm careful cheap clean
clear clever cold common cool crisp curly daily damp dark dear deep dense dry dull eager early easy empty even fair
famous fancy fast fierce final fine firm flat fond frank free fresh frozen full gentle giant glad golden grand grave
great green grey happy hard hasty heavy hidden hollow holy honest huge humble icy idle inner jolly keen kind large
late lazy lean light little lively lonely long loud loyal lucky merry mild misty modern narrow neat new nimble noble
noisy odd old open orange outer pale patient plain polite proud pure purple quick quiet rapid rare raw red rich ripe
rough round royal rusty sad salty secret sharp shiny short silent silver simple sleepy slim slow small smooth snowy
soft solid sour spare steady steep stern still stormy strong sudden sunny sweet swift tall tame thick thin tidy tiny
tough vague vast vivid warm weary wet white wide wild windy wise witty wooden yellow young
""".split()  # noqa: SIM905
_NOUNS = """
acorn anchor apple arrow badge bakery banana barn basket beach beacon bell bench bird blanket boat book bottle bowl
box branch bread brick bridge broom brush bucket butter button cabin cable camera candle canoe canyon carpet castle
cattle cellar chain chair cherry circle cliff clock cloud coast coat coffee comet copper coral corner cotton cradle
crayon creek crown cup curtain desert desk diamond dinner dolphin door dragon drum eagle engine falcon farmer feather
fence fiddle field finger fire flag flame flute forest fork fossil fountain fox garden gate glass glove goose grape
grass guitar hammer harbor hat hawk helmet hill honey horse hotel house island jacket jar jewel journey jungle kettle
key kitten ladder lake lamp lantern lemon letter library lion lizard locket magnet map marble market meadow medal
melon mirror monkey moon morning mountain museum needle nest notebook oak ocean olive onion orchard otter owl oyster
paddle painter palace paper parrot pebble pencil pepper piano pillow pilot planet pocket pond potato puzzle rabbit
radio raven ribbon river road robin rocket roof rope rose sailor salmon school shell ship shovel signal sister snow
spider spoon station stone stove straw street sugar sunset table teacher temple tiger tower train tree trumpet tunnel
turtle valley village violin wagon wall water whale wheel willow window winter wizard wolf wool yarn zebra
""".split()  # noqa: SIM905
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"
_FIRST = """
Ada Alan Alice Amy Anna Arthur Ben Beth Carl Carol Clara Daniel David Diana Edith Emma Eric Eva Felix Fiona Frank
George Grace Hannah Harold Helen Henry Ida Irene Isaac Jack Jane Jason Joan John Julia Karen Kevin Laura Leo Linda
Louis Lucy Mark Martin Mary Max Mia Nancy Nina Nora Oliver Oscar Paul Peter Rachel Ralph Rita Robert Rosa Ruth Sam
Sarah Simon Sofia Stella Susan Theo Thomas Tina Victor Walter
""".split()  # noqa: SIM905
_LAST = """
Adams Allen Baker Barnes Bell Bennett Brooks Brown Butler Campbell Carter Clark Collins Cook Cooper Cox Davis Edwards
Ellis Evans Fisher Foster Fox Gibson Graham Grant Gray Green Hall Harris Hayes Henderson Hill Holmes Howard Hughes
Hunt Jackson James Jenkins Johnson Jones Kelly Kennedy King Knight Lee Lewis Long Marshall Martin Mason Mills Mitchell
Moore Morgan Morris Murphy Murray Myers Nelson Owens Palmer Parker Perry Peterson Phillips Porter Powell Price Reed
Reynolds Rice Roberts Robinson Rogers Rose Ross Russell Sanders Scott Shaw Simpson Smith Stevens Stewart Stone Taylor
Thompson Turner Walker Wallace Ward Watson Webb Wells West White Williams Wilson Wood Wright Young
""".split()  # noqa: SIM905
NUM_NAMES = len(_FIRST) * 26 * len(_LAST)


def word(rng: np.random.Generator) -> str:
    """An adjective and a noun, such as "quiet-harbor"."""
    return f"{_ADJECTIVES[rng.integers(len(_ADJECTIVES))]}-{_NOUNS[rng.integers(len(_NOUNS))]}"


def number(rng: np.random.Generator) -> str:
    """Seven digits, the first of which is not 0."""
    return str(rng.integers(10**6, 10**7))


def uuid4(rng: np.random.Generator) -> str:
    """A random UUID of version 4."""
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def letters(rng: np.random.Generator, count: int, alphabet: str) -> str:
    """`count` letters of an alphabet."""
    return "".join(alphabet[i] for i in rng.integers(len(alphabet), size=count))


def syllables(index: int) -> str:
    """The word of a number below 343,000: three syllables, such as "bavoki"."""
    found = ""
    for _ in range(3):
        index, syllable = divmod(index, len(_CONSONANTS) * len(_VOWELS))
        found += _CONSONANTS[syllable // len(_VOWELS)] + _VOWELS[syllable % len(_VOWELS)]
    return found


NUM_SYLLABLE_WORDS = (len(_CONSONANTS) * len(_VOWELS)) ** 3


def name(index: int) -> str:
    """The name of a number below `NUM_NAMES`, such as "Ada B. Collins"."""
    rest, first = divmod(index, len(_FIRST))
    last, middle = divmod(rest, 26)
    return f"{_FIRST[first]} {chr(ord('A') + middle)}. {_LAST[last]}"


def different(rng: np.random.Generator, draw: Callable[[np.random.Generator], str], count: int) -> list[str]:
    """`count` different results of draw(rng)."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[draw(rng)] = None
    return list(found)
