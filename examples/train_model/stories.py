"""Self-made children's stories: a small planner over the plots of ``plots_a`` and ``plots_b``.

Every story has a hero, a friend, a grown-up, things and places that stay the same from the first to
the last sentence.  Stories are numbered: ``story(seed, i, held_out)`` always returns the same text.
A combination of plot, hero and friend belongs either to the training set or to the held-out set
(1 in 16), so held-out stories are never variations of a combination seen in training.

    python stories.py --count 3                       # print stories
    python stories.py --count 150 --held-out --out heldout.txt
"""

from __future__ import annotations

import argparse
import random
import zlib
from dataclasses import dataclass, field

import words as w
from plots_a import PLOTS_A
from plots_b import PLOTS_B

PLOTS: dict[str, list[str]] = {**PLOTS_A, **PLOTS_B}
STRANGER = {"newfriend", "lostway"}  # the friend is met in the story, not before it
SKILLS = [
    "ride a bike",
    "skate",
    "ski",
    "walk on a rope",
    "do a handstand",
    "jump over the stream",
    "ride a horse",
    "dance",
    "climb the big tree",
]
BIGS = ["bear", "dragon", "wolf", "giant dog", "lion", "monster", "tiger"]
EOT = "<|endoftext|>"

OPENERS = [
    "{Once upon a time, there was|There once was|Once there was|There was once} a $hadj $hk named $H.",
    "{Once upon a time, |Long ago, |In a land far away, |}a $hadj $hk named $H lived in a $homeadj $home near the $place.",
    "$H was a $hadj $hk. $He lived with $G in a $homeadj $home {near|by|next to} the $place.",
    "{In a small village|At the edge of the $place|Not far from the $place} lived a $hk named $H. $He was very $hadj.",
]
FRIENDS = [
    "$H's best friend was $F, a $fadj $fk.",
    "$He had a friend named $F, who was a $fadj $fk.",
    "$H and $F, a $fadj $fk, {played together every day|were best friends|did everything together}.",
    "$F, a $fadj $fk, lived {next door|just down the road|on the other side of the $place}.",
]
SCENES = [
    "{It was a sunny day, and|It was a fine spring morning, and|It was autumn, and|One summer day,} {the birds were singing|the sky was blue|the wind was soft and warm|everything smelled of flowers|there were $n $sights near the $home}.",
    "$H liked {to look at the $sights|to run and jump|to read books|to sing songs|to pick flowers|to help $G} {in the $place|every day|when the sun was out}.",
    "{Every morning|Every day after breakfast}, $he {walked to the $place|said hello to the $sights|looked out of the window and smiled}.",
]
ENDINGS = [
    "The end.",
    "And that is the end of the story.",
    "And they lived happily ever after.",
    "Good night.",
    "That was a day to remember.",
]


@dataclass
class Story:
    """A finished story and what was chosen for it."""

    text: str
    plot: str
    slots: dict[str, str]
    facts: dict[str, str] = field(default_factory=dict)


def is_held_out(plot: str, hero: str, friend: str) -> bool:
    """One combination in sixteen is kept for evaluation."""
    return zlib.crc32(f"{plot}/{hero}/{friend}".encode()) % 16 == 0


def person(rng: random.Random, kind: str | None = None) -> tuple[str, str, str]:
    """A name, a kind (``girl``, ``fox``) and a gender letter."""
    if kind == "girl" or (kind is None and rng.random() < 0.3):
        return rng.choice(w.GIRLS), "girl", "f"
    if kind == "boy" or (kind is None and rng.random() < 0.43):
        return rng.choice(w.BOYS), "boy", "m"
    return rng.choice(w.ANIMAL_NAMES), kind or rng.choice(w.ANIMALS), rng.choice("fm")


def pronouns(prefix: str, gender: str) -> dict[str, str]:
    """Slots for he/him/his/himself of one character, plain and capitalised."""
    he, him, his = ("she", "her", "her") if gender == "f" else ("he", "him", "his")
    out = {}
    for key, value in {"he": he, "him": him, "his": his, "himself": him + "self"}.items():
        out[prefix + key] = value
        out[(prefix + key).capitalize()] = value.capitalize()
    return out


def cast(rng: random.Random, want: dict[str, str]) -> dict[str, str]:
    """Choose everything a story may refer to."""
    hero, hkind, hgen = person(rng, want.get("kind"))
    hero = want.get("hero", hero)
    friend, fkind, fgen = person(rng)
    while friend == hero or (fkind == hkind and fkind not in ("girl", "boy")):
        friend, fkind, fgen = person(rng)
    grown, ghe, ghis = rng.choice(w.GROWNUPS)
    thing, thing2, _thing3 = rng.sample(w.THINGS, 3)
    thing = want.get("thing", thing)
    color, color2 = rng.sample(w.COLORS, 2)
    hides = rng.sample(w.HIDES, 4)
    sights = rng.sample(w.SIGHTS, 2)
    number = rng.choice(w.NUMBERS)
    slots = {
        "H": hero,
        "hk": hkind,
        "hadj": rng.choice(w.ADJ),
        "F": friend,
        "fk": fkind,
        "fadj": rng.choice(w.ADJ),
        "G": grown,
        "ghe": ghe,
        "ghis": ghis,
        "wise": rng.choice([grown, grown, "the old owl", "the gardener"]),
        "t": thing,
        "t2": thing2,
        "t3": thing,
        "c": color,
        "c2": color2,
        "food": rng.choice(w.FOODS),
        "dish": rng.choice(w.DISHES),
        "place": rng.choice(w.PLACES),
        "hide": hides[0],
        "hide2": hides[1],
        "hide3": hides[2],
        "hide4": hides[3],
        "s": rng.choice(w.SMALL),
        "sights": sights[0],
        "sights2": sights[1],
        "n": number,
        "n_s": number,
        "pet": rng.choice(w.ANIMAL_NAMES),
        "skill": rng.choice(SKILLS),
        "big": rng.choice(BIGS),
        "home": rng.choice(["house", "cottage", "hut", "cabin"]),
        "homeadj": rng.choice(["small", "cozy", "little", "warm", "old", "tiny"]),
    }
    return {**slots, **pronouns("", hgen), **pronouns("f", fgen)}


def compose(plot: str, slots: dict[str, str], rng: random.Random) -> str:
    """Write the sentences of one story."""
    beats = [rng.choice(OPENERS)]
    if plot not in STRANGER and "$F" in "".join(PLOTS[plot]):
        beats.append(rng.choice(FRIENDS))
    if rng.random() < 0.6:
        beats.append(rng.choice(SCENES))
    intro = len(beats)
    for beat in PLOTS[plot]:
        if beat.startswith("?"):
            if rng.random() < 0.5:
                continue
            beat = beat[1:]
        beats.append(beat)
    if rng.random() < 0.3:
        beats.append(rng.choice(ENDINGS))
    met = plot not in STRANGER
    paragraphs: list[list[str]] = [[]]
    for i, beat in enumerate(beats):
        text = w.expand(beat, rng)
        if not met and "$F" in text:
            text, met = text.replace("$F", "a $fadj $fk named $F", 1), True
        if i == intro or (i > intro and len(paragraphs[-1]) >= 2 and rng.random() < 0.6):
            paragraphs.append([])
        paragraphs[-1].append(w.render(text, slots, rng))
    return "\n\n".join(" ".join(p) for p in paragraphs if p)


def make(rng: random.Random, held_out: bool = False, **want: str) -> Story:
    """One story; ``want`` may fix ``plot``, ``kind``, ``hero`` or ``thing``."""
    while True:
        plot = want.get("plot") or rng.choice(list(PLOTS))
        slots = cast(rng, want)
        if is_held_out(plot, slots["H"], slots["F"]) == held_out:
            break
    text = compose(plot, slots, rng)
    facts = {"hero": slots["H"], "kind": slots["hk"]}
    if slots["F"] in text:
        facts.update(friend=slots["F"], friend_kind=slots["fk"])
    if f"{slots['c']} {slots['t']}" in text:
        facts.update(color=slots["c"], thing=slots["t"])
    return Story(text, plot, slots, facts)


def story(seed: str, index: int, held_out: bool = False) -> Story:
    """Story number ``index`` of a series."""
    return make(random.Random(f"{seed}/{index}"), held_out)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--seed", default="train")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--out", help="file to write; default: print")
    args = parser.parse_args()
    seed = "heldout" if args.held_out else args.seed
    text = "\n\n\n".join(story(seed, i, args.held_out).text for i in range(args.count)) + "\n"
    if args.out:
        with open(args.out, "w", encoding="utf-8") as handle:
            handle.write(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
