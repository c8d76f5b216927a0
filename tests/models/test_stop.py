"""Stop strings: incremental search, compared with a search in the whole text."""

import random

from graft.models.text.stop import StopFinder


def test_stop_finder_equals_search_in_whole_text():
    """Searching a text piece by piece gives the same result as searching the whole text.

    `held` is the length of the longest suffix of the text that is a prefix of a stop string.
    """
    rng = random.Random(4)
    for _ in range(400):
        stops = set()
        for _ in range(rng.randint(1, 4)):
            letters = rng.choices("ab", k=rng.randint(1, 6))
            stops.add("".join(letters))
        finder = StopFinder(sorted(stops))
        text = ""
        for _ in range(30):
            piece = "".join(rng.choices("abc", k=rng.randint(0, 4)))
            text += piece
            expected = min((text.find(s) for s in stops if s in text), default=None)
            assert finder.feed(piece) == expected
            if expected is not None:
                break
            held = max(n for n in range(len(text) + 1) if is_prefix(text[len(text) - n :], stops))
            assert finder.held == held


def is_prefix(text, strings):
    return any(string.startswith(text) for string in strings)
