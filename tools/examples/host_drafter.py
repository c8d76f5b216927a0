"""Use a Python function as the drafter of an engine of graft.models.

Each decoding round is one CUDA graph. A node of this graph calls the function.
"""

from __future__ import annotations

from graft.models import Engine, Request
from graft.models.drafters import UserDrafter
from graft.tools.demo_model import demo_model


def propose(tokens: list[int]) -> list[int]:
    """Return the tokens that followed the previous occurrence of the last token.

    Parameters
    ----------
    tokens
        Token ids of the prompt and of the output so far.
    """
    last = tokens[-1]
    positions = [i for i, token in enumerate(tokens[:-1]) if token == last]
    if not positions:
        return []
    start = positions[-1] + 1
    return tokens[start : start + 3]


def main() -> None:
    """Generate the same text with and without the drafter, and print the number of rounds."""
    request = Request(prompt="code: AA-1111\nGive only the code.", max_tokens=40)
    for drafter in (UserDrafter.of(propose, deadline_s=0.5), None):
        with Engine(demo_model()[0], drafter, draft_length=3) as engine:
            [output] = engine.generate([request])
            print(f"{output.text!r}: {output.accepted} drafts accepted, {output.rounds} rounds")


if __name__ == "__main__":
    main()
