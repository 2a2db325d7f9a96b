"""Word lists of the story generator, and the small template language the plots are written in.

A template is plain text with ``{a|b|c}`` (one of the alternatives, may be nested) and ``$slot``
(a value fixed for the whole story: a name, a place, a thing).  ``render`` expands both, repairs
``a``/``an`` and capitalises sentences, so templates can be written without caring about either.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

GIRLS = [
    "Lily",
    "Mia",
    "Anna",
    "Rosa",
    "Ella",
    "Zoe",
    "Lucy",
    "Nora",
    "Ruby",
    "Ivy",
    "Clara",
    "Emma",
    "Sara",
    "Molly",
    "Daisy",
    "Amy",
    "Hana",
    "Tess",
    "Maya",
    "Jane",
    "Kate",
    "Sofia",
    "Nina",
    "Olive",
    "Pia",
    "Grace",
    "Alice",
    "Wendy",
    "Greta",
    "Leila",
]
BOYS = [
    "Tom",
    "Ben",
    "Max",
    "Sam",
    "Leo",
    "Jack",
    "Tim",
    "Oscar",
    "Finn",
    "Noah",
    "Hugo",
    "Adam",
    "Eli",
    "Theo",
    "Paul",
    "Peter",
    "Luke",
    "Omar",
    "Ravi",
    "Nick",
    "Will",
    "Henry",
    "Carl",
    "Dan",
    "George",
    "Ali",
    "Simon",
    "Felix",
    "Toby",
    "Victor",
]
ANIMAL_NAMES = [
    "Pip",
    "Rusty",
    "Bella",
    "Coco",
    "Nibbles",
    "Hazel",
    "Bruno",
    "Pepper",
    "Dot",
    "Fern",
    "Misty",
    "Tuck",
    "Biscuit",
    "Willow",
    "Honey",
    "Button",
    "Smoky",
    "Poppy",
    "Clover",
    "Scout",
    "Bramble",
    "Sunny",
    "Flick",
    "Momo",
]
ANIMALS = [
    "fox",
    "rabbit",
    "bear",
    "mouse",
    "cat",
    "dog",
    "duck",
    "frog",
    "hedgehog",
    "squirrel",
    "owl",
    "turtle",
    "lamb",
    "pony",
    "goat",
    "pig",
    "kitten",
    "puppy",
    "badger",
    "otter",
    "beaver",
    "deer",
    "hen",
    "monkey",
    "elephant",
    "lion",
    "penguin",
]
# What each animal does, eats, says and where it lives: used by stories and by questions.
FACTS: dict[str, tuple[str, str, str]] = {
    "dog": ("bones", "woof", "a kennel"),
    "cat": ("fish", "meow", "a warm house"),
    "cow": ("grass", "moo", "a barn"),
    "duck": ("bread and weeds", "quack", "a pond"),
    "frog": ("flies", "ribbit", "a pond"),
    "bee": ("nectar", "buzz", "a hive"),
    "sheep": ("grass", "baa", "a field"),
    "pig": ("corn and apples", "oink", "a pen"),
    "horse": ("hay", "neigh", "a stable"),
    "owl": ("mice", "hoo", "a hollow tree"),
    "lion": ("meat", "roar", "the grassland"),
    "mouse": ("cheese and seeds", "squeak", "a hole"),
    "bird": ("worms and seeds", "tweet", "a nest"),
    "hen": ("corn", "cluck", "a henhouse"),
    "snake": ("eggs and mice", "hiss", "a hole"),
    "wolf": ("meat", "howl", "a den"),
}
ADJ = [
    "little",
    "small",
    "young",
    "kind",
    "brave",
    "curious",
    "cheerful",
    "quiet",
    "clever",
    "gentle",
    "happy",
    "shy",
    "busy",
    "funny",
    "playful",
    "careful",
    "friendly",
    "lively",
]
COLORS = [
    "red",
    "blue",
    "green",
    "yellow",
    "orange",
    "purple",
    "pink",
    "white",
    "black",
    "brown",
    "silver",
    "golden",
]
THINGS = [
    "ball",
    "kite",
    "boat",
    "drum",
    "hat",
    "scarf",
    "bell",
    "book",
    "doll",
    "toy train",
    "balloon",
    "lantern",
    "whistle",
    "blanket",
    "bucket",
    "mirror",
    "basket",
    "puzzle",
    "paintbrush",
    "umbrella",
    "button",
    "toy car",
    "wooden horse",
    "music box",
    "spinning top",
    "paper crown",
    "marble",
    "teddy bear",
    "flute",
    "ribbon",
]
FOODS = [
    "apples",
    "pears",
    "berries",
    "cookies",
    "pancakes",
    "carrots",
    "cherries",
    "nuts",
    "plums",
    "sandwiches",
    "cakes",
    "muffins",
    "grapes",
    "peaches",
    "buns",
    "strawberries",
]
DISHES = [
    "apple pie",
    "carrot soup",
    "honey cake",
    "berry pie",
    "chocolate cake",
    "warm bread",
    "pumpkin soup",
    "lemon cake",
    "potato stew",
    "nut cookies",
]
PLACES = [
    "park",
    "garden",
    "forest",
    "meadow",
    "village",
    "beach",
    "valley",
    "farm",
    "orchard",
    "field",
    "playground",
    "woods",
]
HIDES = [
    "under the bed",
    "behind the big tree",
    "inside an old boot",
    "under a pile of leaves",
    "next to the well",
    "behind the door",
    "in the tall grass",
    "under the stairs",
    "on top of the shelf",
    "in the wheelbarrow",
    "beside the stream",
    "between two rocks",
    "inside a basket",
    "under the bridge",
]
SMALL = [
    "bird",
    "kitten",
    "puppy",
    "butterfly",
    "mouse",
    "duckling",
    "bee",
    "beetle",
    "lamb",
    "snail",
    "fawn",
]
SIGHTS = [
    "ducks",
    "frogs",
    "butterflies",
    "birds",
    "bees",
    "rabbits",
    "horses",
    "snails",
    "white clouds",
    "flowers",
    "dragonflies",
    "fish",
    "sheep",
    "tall trees",
    "boats",
]
NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
GROWNUPS = [
    ("Mom", "she", "her"),
    ("Dad", "he", "his"),
    ("Grandma", "she", "her"),
    ("Grandpa", "he", "his"),
    ("Aunt May", "she", "her"),
    ("Uncle Joe", "he", "his"),
]
OPPOSITES = [
    ("big", "small"),
    ("hot", "cold"),
    ("day", "night"),
    ("up", "down"),
    ("fast", "slow"),
    ("happy", "sad"),
    ("wet", "dry"),
    ("old", "young"),
    ("hard", "soft"),
    ("open", "closed"),
    ("full", "empty"),
    ("light", "dark"),
    ("loud", "quiet"),
    ("long", "short"),
    ("strong", "weak"),
    ("clean", "dirty"),
    ("high", "low"),
    ("early", "late"),
    ("good", "bad"),
    ("left", "right"),
    ("first", "last"),
    ("rich", "poor"),
]
COLOR_OF = [
    ("the sky", "blue"),
    ("grass", "green"),
    ("snow", "white"),
    ("a banana", "yellow"),
    ("a carrot", "orange"),
    ("the sun", "yellow"),
    ("a strawberry", "red"),
    ("coal", "black"),
    ("a frog", "green"),
    ("milk", "white"),
    ("a cherry", "red"),
    ("a pumpkin", "orange"),
    ("chocolate", "brown"),
    ("a lemon", "yellow"),
    ("the night sky", "black"),
    ("a plum", "purple"),
    ("a leaf", "green"),
    ("a flamingo", "pink"),
]
MIXES = [
    ("red", "blue", "purple"),
    ("red", "yellow", "orange"),
    ("blue", "yellow", "green"),
    ("red", "white", "pink"),
    ("black", "white", "gray"),
]

_ALT = re.compile(r"\{([^{}]*)\}")
_SLOT = re.compile(r"\$([A-Za-z_]+[0-9]?)")
_AN = re.compile(r"\b([Aa]) (?=[aeio]|umbrella|ugly|uncle|under|unu)", re.IGNORECASE)
_A = re.compile(r"\b([Aa])n (?=[bcdfgjklmnpqrstvwyz])")
_CAP = re.compile(r'(^"?|[.!?] "?|\." "?|, "|: "|\n"?)([a-z])')


def expand(template: str, rng: random.Random) -> str:
    """Resolve every ``{a|b}`` of a template, innermost first."""
    while True:
        out = _ALT.sub(lambda m: rng.choice(m.group(1).split("|")), template)
        if out == template:
            return out
        template = out


def polish(text: str) -> str:
    """Repair articles, spaces and sentence capitals."""
    text = re.sub(r" +(?=[ ?!.,])", "", text).strip()
    text = re.sub(r"([.!?]\")\.", r"\1", text)
    text = _A.sub(r"\1 ", _AN.sub(r"\1n ", text))
    return _CAP.sub(lambda m: m.group(1) + m.group(2).upper(), text)


def render(template: str, slots: Mapping[str, str], rng: random.Random) -> str:
    """Expand a template with the story's slots; slot values may themselves hold templates."""
    text = expand(template, rng)
    for _ in range(3):
        text = _SLOT.sub(lambda m: slots[m.group(1)], text)
        text = expand(text, rng)
    return polish(text)


def listing(items: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]
