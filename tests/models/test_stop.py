"""Stop strings: incremental search compared with searching the whole text."""

import random

from graft.models.text.stop import StopFinder


def test_stop_finder_equals_search_in_whole_text():
    """Overlapping strings in pieces of any size are found in the same piece at the same offset.

    The held characters are the longest suffix of the text that is a prefix of a stop string.
    """
    rng = random.Random(4)
    for _ in range(400):
        stops = {"".join(rng.choices("ab", k=rng.randint(1, 6))) for _ in range(rng.randint(1, 4))}
        finder = StopFinder(sorted(stops))
        text = ""
        for _ in range(30):
            piece = "".join(rng.choices("abc", k=rng.randint(0, 4)))
            text += piece
            expected = min((text.find(s) for s in stops if s in text), default=None)
            assert finder.feed(piece) == expected
            if expected is not None:
                break
            begins = [n for n in range(len(text) + 1) if any(s.startswith(text[n:]) for s in stops)]
            assert finder.held == len(text) - begins[0]
