"""models: a drafter in plain Python, which the round's graph asks between two forwards."""

from __future__ import annotations

from graft.models import Engine, Request
from graft.models.drafters import UserDrafter
from graft.tools.demo_model import demo_model


def propose(tokens: list[int]) -> list[int]:
    """What followed the last token where it stood before; prompt and output are in `tokens`."""
    places = [i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]
    return tokens[places[-1] + 1 :][:3] if places else []


def main() -> None:
    """The same text with it and without, and how many rounds it took."""
    request = Request(prompt="serial: AAAA-1111\nGive only the serial.", max_tokens=40)
    for drafter in (UserDrafter.of(propose, deadline_s=0.5), None):
        with Engine(demo_model()[0], drafter, draft_length=3) as engine:
            (output,) = engine.generate([request])
            print(f"{output.text!r}: {output.accepted} drafts accepted, {output.rounds} rounds")


if __name__ == "__main__":
    main()
