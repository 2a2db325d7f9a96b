"""Self-made conversations in the chat format of the bundled model.

A conversation has one to four exchanges: requests for stories, questions about a story that was just
told, greetings and names, animals, colours, opposites, counting and small sums, riddles, feelings.
``conversation(seed, i, held_out)`` is deterministic, like ``stories.story``.
"""

from __future__ import annotations

import random

import stories
import words as w

Turn = tuple[str, str]
NUM = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
SEASONS = ["spring", "summer", "autumn", "winter"]
SIZES = [
    "an ant",
    "a bee",
    "a mouse",
    "a cat",
    "a dog",
    "a sheep",
    "a horse",
    "an elephant",
    "a whale",
]
SYSTEMS = [
    "You are a helpful assistant.",
    "You are a friendly storyteller for children.",
    "You are a kind assistant who answers in simple words.",
]
SUMMARY = {
    "lost": "who lost a $t",
    "share": "who did not want to share",
    "bake": "who made $dish",
    "plant": "who planted a seed",
    "gift": "who made a gift for a friend",
    "kite": "whose kite got stuck in a tree",
    "purse": "who found a purse",
    "broken": "who broke a vase",
    "build": "who learned to work with a friend",
    "paint": "who liked to paint",
    "map": "who found a treasure map",
    "bird": "who helped a bird",
    "dark": "who was afraid of the dark",
    "newfriend": "who made a new friend",
    "learn": "who learned to $skill",
    "race": "who won a race",
    "lostway": "who got lost in the woods",
    "snow": "who made a snowman",
    "sick": "who had a sick friend",
    "show": "who was shy and sang in a show",
    "scary": "who met a $big",
    "storm": "who was out in a storm",
    "moon": "who wanted to touch the moon",
    "clean": "who had a messy room",
}
LESSON = {
    "lost": "Good friends help each other.",
    "share": "Sharing makes everything better.",
    "bake": "It is fun to make things together.",
    "plant": "Good things take time.",
    "gift": "The best gifts come from the heart.",
    "kite": "Two heads are better than one.",
    "purse": "It is right to be honest.",
    "broken": "It is good to tell the truth.",
    "build": "It is better to work together.",
    "paint": "You can make new things from what you have.",
    "map": "A friend is the real treasure.",
    "bird": "Be kind to animals.",
    "dark": "You can be brave even when you are afraid.",
    "newfriend": "Say hello, and you may find a friend.",
    "learn": "Do not give up.",
    "race": "Slow and steady wins the race.",
    "lostway": "Stay on the path.",
    "snow": "Winter comes back every year.",
    "sick": "A friend is the best medicine.",
    "show": "You can do it even if you are shy.",
    "scary": "Do not judge others by how they look.",
    "storm": "After the rain comes the rainbow.",
    "moon": "The moon belongs to everyone.",
    "clean": "Put things back where they belong.",
}


def say(rng: random.Random, template: str, **slots: str) -> str:
    """Render a template without capitalising more than the start."""
    return w.render(template, slots, rng)


def greet(rng: random.Random) -> list[Turn]:
    """Hello, how are you, names."""
    first = say(rng, "{Hello|Hi|Hello there|Good morning|Good evening|Hey}{!|.|}")
    answer = "{Hello|Hi|Hello there}! {How can I help you|What can I do for you|How are you today|Would you like to hear a story}?"
    turns = [(first, say(rng, answer))]
    if rng.random() < 0.4:
        turns.append(
            (
                say(rng, "How are you?"),
                say(rng, "I am {fine|very well|well}, thank you. {How are you|And you}?"),
            )
        )
    if rng.random() < 0.4:
        name = rng.choice(w.GIRLS + w.BOYS)
        turns.append(
            (
                say(rng, "{My name is $n|I am $n}.", n=name),
                say(rng, "{Nice to meet you|Hello|It is nice to meet you}, $n!", n=name),
            )
        )
        if rng.random() < 0.6:
            turns.append(
                (
                    "What is my name?",
                    say(
                        rng,
                        "{Your name is $n.|You are $n.|You told me that your name is $n.}",
                        n=name,
                    ),
                )
            )
    return turns


def about(rng: random.Random) -> list[Turn]:
    """Who the assistant is."""
    return [
        rng.choice(
            [
                (
                    say(rng, "{Who are you|What are you|What is your name}?"),
                    say(
                        rng,
                        "I am a {small|tiny} language model. {I can tell stories|I like to tell stories and answer simple questions}.",
                    ),
                ),
                (
                    say(rng, "What can you do?"),
                    "I can tell stories, count, and answer simple questions about animals and colors.",
                ),
                (
                    say(rng, "{Thank you|Thanks|Thank you very much}!"),
                    say(rng, "You are welcome!{| Have a nice day!| I am glad I could help.}"),
                ),
                (
                    say(rng, "{Good night|Goodbye|Bye|See you tomorrow}!"),
                    say(
                        rng,
                        "{Goodbye! Have a nice day!|Good night! Sleep well!|Bye! See you soon!}",
                    ),
                ),
            ]
        )
    ]


def animals(rng: random.Random) -> list[Turn]:
    """Food, sound, home and riddles."""
    name = rng.choice(list(w.FACTS))
    eats, sound, home = w.FACTS[name]
    s = {"a": name, "e": eats, "s": sound, "h": home}
    return [
        rng.choice(
            [
                (
                    say(rng, "{What does a $a say|What sound does a $a make}?", **s),
                    say(rng, "A $a says $s.", **s),
                ),
                (
                    say(rng, "What does a $a {eat|like to eat}?", **s),
                    say(rng, "A $a eats $e.", **s),
                ),
                (say(rng, "Where does a $a live?", **s), say(rng, "A $a lives in $h.", **s)),
                (
                    say(rng, "I say $s, and I eat $e. {What am I|Who am I}?", **s),
                    say(rng, "You are a $a!", **s),
                ),
                (
                    say(rng, "I live in $h, and I say $s. {What am I|Who am I}?", **s),
                    say(rng, "You are a $a!", **s),
                ),
            ]
        )
    ]


def colors(rng: random.Random) -> list[Turn]:
    """What colour things are, and what mixing gives."""
    if rng.random() < 0.35:
        a, b, c = rng.choice(w.MIXES)
        if rng.random() < 0.5:
            a, b = b, a
        return [
            (
                say(
                    rng,
                    "{What do you get when you mix $a and $b|What color do $a and $b make}?",
                    a=a,
                    b=b,
                ),
                say(rng, "{$a and $b make $c|When you mix $a and $b, you get $c}.", a=a, b=b, c=c),
            )
        ]
    thing, color = rng.choice(w.COLOR_OF)
    return [
        (say(rng, "What color is $x?", x=thing), say(rng, "{$x is $c|It is $c}.", x=thing, c=color))
    ]


def opposites(rng: random.Random) -> list[Turn]:
    """Opposites and comparisons."""
    if rng.random() < 0.3:
        i, j = sorted(rng.sample(range(len(SIZES)), 2))
        a, b = (SIZES[i], SIZES[j]) if rng.random() < 0.5 else (SIZES[j], SIZES[i])
        if rng.random() < 0.5:
            return [
                (
                    say(rng, "{Which is bigger|What is bigger}, $a or $b?", a=a, b=b),
                    say(rng, "$x is bigger than $y.", x=SIZES[j], y=SIZES[i]),
                )
            ]
        return [
            (
                say(rng, "{Which is smaller|What is smaller}, $a or $b?", a=a, b=b),
                say(rng, "$x is smaller than $y.", x=SIZES[i], y=SIZES[j]),
            )
        ]
    a, b = rng.choice(w.OPPOSITES)
    if rng.random() < 0.5:
        a, b = b, a
    ask = rng.choice(["What is the opposite of $a?", "Tell me the opposite of $a."])
    return [(say(rng, ask, a=a), say(rng, "The opposite of $a is $b.", a=a, b=b))]


def numbers(rng: random.Random) -> list[Turn]:
    """Counting, next numbers and small sums."""
    kind = rng.randrange(5)
    if kind == 0:
        n = rng.randint(3, 12)
        return [
            (
                say(rng, "{Count to $n|Can you count to $n}?", n=NUM[n]),
                w.polish(", ".join(NUM[1 : n + 1]) + "."),
            )
        ]
    if kind == 1:
        n = rng.randint(0, 18)
        return [
            (
                say(rng, "What {number |}comes after $n?", n=NUM[n]),
                w.polish(f"{NUM[n + 1]} comes after {NUM[n]}."),
            )
        ]
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    if kind == 2:
        return [
            (
                say(rng, "What is $a plus $b?", a=NUM[a], b=NUM[b]),
                w.polish(f"{NUM[a]} plus {NUM[b]} is {NUM[a + b]}."),
            )
        ]
    if kind == 3:
        a, b = max(a, b), min(a, b)
        return [
            (
                say(rng, "What is $a minus $b?", a=NUM[a], b=NUM[b]),
                w.polish(f"{NUM[a]} minus {NUM[b]} is {NUM[a - b]}."),
            )
        ]
    name, food = rng.choice(w.GIRLS + w.BOYS), rng.choice(w.FOODS)
    a, b = rng.randint(2, 8), rng.randint(2, 6)
    q = "$p has $a $f and gets $b more. How many $f does $p have {|now}?"
    return [
        (
            say(rng, q, p=name, a=NUM[a], b=NUM[b], f=food),
            say(rng, "$p has $c $f.", p=name, c=NUM[a + b], f=food),
        )
    ]


def calendar(rng: random.Random) -> list[Turn]:
    """Days, months and seasons."""
    names, unit = rng.choice([(DAYS, "day"), (MONTHS, "month"), (SEASONS, "season")])
    i = rng.randrange(len(names))
    after, before = names[(i + 1) % len(names)], names[i - 1]
    cap = {"x": names[i], "y": after, "z": before, "u": unit}
    return [
        rng.choice(
            [
                (
                    say(rng, "What {$u |}comes after $x?", **cap),
                    say(rng, "$y comes after $x.", **cap),
                ),
                (
                    say(rng, "What {$u |}comes before $x?", **cap),
                    say(rng, "$z comes before $x.", **cap),
                ),
                (
                    f"What are the {unit}s{' of the week' if unit == 'day' else ' of the year'}?",
                    w.polish(f"The {unit}s are {w.listing(names)}."),
                ),
            ]
        )
    ]


def name_some(rng: random.Random) -> list[Turn]:
    """Name three animals, colours, fruits."""
    what, pool = rng.choice(
        [
            ("animals", w.ANIMALS),
            ("colors", w.COLORS),
            ("things to eat", w.FOODS),
            ("toys", ["a " + t for t in w.THINGS]),
        ]
    )
    n = rng.randint(2, 5)
    items = rng.sample(pool, n)
    if what == "animals":
        items = ["a " + a for a in items]
    ask = rng.choice(["Name $n $w.", "Tell me $n $w.", "Can you name $n $w?"])
    return [(say(rng, ask, n=NUM[n], w=what), w.polish(w.listing(items) + "."))]


def feelings(rng: random.Random) -> list[Turn]:
    """Comfort and advice."""
    t = rng.choice(w.THINGS)
    return [
        rng.choice(
            [
                (
                    say(rng, "I am sad because I lost my $t.", t=t),
                    say(
                        rng,
                        "{I am sorry to hear that|Do not be sad}. {Maybe a friend can help you look for your $t.|Where did you last see your $t?}",
                        t=t,
                    ),
                ),
                (
                    say(rng, "I am {afraid of the dark|scared at night}."),
                    say(
                        rng,
                        "{You are very brave to say that|Do not be afraid}. {A small lamp can help you|The dark is only the day with its eyes closed|Hold your favorite toy and think of something nice}.",
                    ),
                ),
                (
                    say(rng, "I am {so |}{happy|very happy} today!"),
                    say(
                        rng,
                        "{That is wonderful|I am glad to hear that}! {What happened|Tell me more}{!|.}",
                    ),
                ),
                (
                    say(rng, "I am {bored|so bored}."),
                    say(
                        rng,
                        "You could {draw a picture|read a book|build something|play with a $t|go outside and look for $s}.",
                        t=t,
                        s=rng.choice(w.SIGHTS),
                    ),
                ),
                (
                    say(rng, "{I cannot sleep|I am not tired}."),
                    say(
                        rng,
                        "Close your eyes and think of {the sea|a quiet forest|$n sheep}. {Would you like a story|Good night}!",
                        n=rng.choice(w.NUMBERS),
                    ),
                ),
                (
                    say(rng, "My friend is sick. What can I do?"),
                    say(
                        rng,
                        "You could {bring some $d|make a card|read a story to your friend|bring some $f}.",
                        d=rng.choice(w.DISHES),
                        f=rng.choice(w.FOODS),
                    ),
                ),
                (
                    say(rng, "I had a fight with my friend."),
                    say(
                        rng,
                        "{I am sorry to hear that. |}{You can say that you are sorry|Talk to your friend and listen|Good friends can make up again}.",
                    ),
                ),
            ]
        )
    ]


def tell(rng: random.Random, held_out: bool) -> list[Turn]:
    """A request for a story, the story, and questions about it."""
    want: dict[str, str] = {}
    kind = rng.randrange(5)
    if kind in (1, 2):
        want["kind"] = rng.choice([*w.ANIMALS, "girl", "boy", "girl", "boy", "girl", "boy"])
    if kind == 2 and want["kind"] not in ("girl", "boy"):
        want["hero"] = rng.choice(w.ANIMAL_NAMES)
    if kind == 4:
        want["plot"] = rng.choice(["lost", "clean", "scary", "newfriend", "lost"])
    s = stories.make(rng, held_out, **want)
    p, hk, hero = (
        "{Tell me a story|Can you tell me a story|Please tell me a story|I want to hear a story|Write a story}",
        s.slots["hk"],
        s.slots["H"],
    )
    who = (
        f"a {hk}"
        if rng.random() < 0.5
        else f"a {s.slots['hadj']} {hk}"
        if s.slots["hadj"] in s.text
        else f"a {hk}"
    )
    ask = [
        p,
        f"{p} about {who}",
        f"{p} about a {hk} named {hero}",
        f"{p} about {who} {SUMMARY[s.plot]}",
        f"{p} {{about|with}} {who} and a $t" if s.slots["t"] in s.text else p,
    ][kind]
    text = say(rng, ask + ".", **s.slots)
    if text.startswith("Can"):
        text = text[:-1] + "?"
    turns = [(text, s.text)]
    turns += rng.sample(questions(rng, s), rng.choice([0, 0, 1, 2, 3]))
    return turns


def questions(rng: random.Random, s: stories.Story) -> list[Turn]:
    """Questions whose answers are in the story."""
    f = s.facts
    name = f["hero"]
    out = [
        (
            "What was the name of the " + f["kind"] + "?",
            say(rng, "{The name of the $k was $n|The $k was named $n|$n}.", k=f["kind"], n=name),
        ),
        (f"Who is {name}?", w.polish(f"{name} is a {f['kind']}.")),
        (say(rng, "What {can we learn|do we learn} from the story?"), LESSON[s.plot]),
    ]
    if "friend" in f and f["friend_kind"] in s.text:
        out.append(
            (
                say(rng, "Who is $n?", n=f["friend"]),
                w.polish(f"{f['friend']} is a {f['friend_kind']}."),
            )
        )
    if "color" in f:
        out.append(
            (
                f"What color was the {f['thing']}?",
                say(rng, "{The $t was $c|It was $c}.", t=f["thing"], c=f["color"]),
            )
        )
    return out


def read(rng: random.Random, held_out: bool) -> list[Turn]:
    """The user tells the story, and asks."""
    s = stories.make(rng, held_out)
    qs = rng.sample(questions(rng, s), rng.choice([1, 2, 3]))
    q0, a0 = qs[0]
    return [(f"{s.text}\n\n{q0}", a0), *qs[1:]]


SHORT = [
    greet,
    about,
    animals,
    animals,
    colors,
    opposites,
    numbers,
    numbers,
    calendar,
    name_some,
    feelings,
]


def turns(rng: random.Random, held_out: bool) -> list[Turn]:
    """All exchanges of one conversation."""
    out = greet(rng) if rng.random() < 0.25 else []
    if rng.random() < 0.45:
        out += tell(rng, held_out) if rng.random() < 0.8 else read(rng, held_out)
    else:
        for _ in range(rng.choice([1, 2, 2, 3])):
            out += rng.choice(SHORT)(rng)
    return out + (about(rng) if rng.random() < 0.1 else [])


def conversation(seed: str, index: int, held_out: bool = False) -> str:
    """Conversation number ``index`` of a series, in ChatML."""
    rng = random.Random(f"{seed}/chat/{index}")
    text = f"<|im_start|>system\n{rng.choice(SYSTEMS)}<|im_end|>\n" if rng.random() < 0.2 else ""
    for user, assistant in turns(rng, held_out):
        text += (
            f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{assistant}<|im_end|>\n"
        )
    return text


if __name__ == "__main__":
    for number in range(5):
        print(conversation("train", number), end="\n---\n")
