"""Which moments of a round the device stamps, and which parts of the round lie between them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RoundTiming"]


@dataclass(frozen=True)
class RoundTiming:
    """The timeline of one shape of round.

    Parameters
    ----------
    draft_length : drafts per round.
    masked : whether each draft waits for the grammar: its mask row or, when `probed`, its answer.
    """

    draft_length: int
    masked: bool
    probed: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """Stamps in the order in which they are made; a row of the timeline has these columns."""
        rows = [
            name for j in range(1, self.draft_length) for name in (f"step{j + 1}", f"row{j}")
        ]  # fmt: skip
        return ("begin", "target", "masks", "verify", "extend", "row0", *rows, "end")

    @property
    def spans(self) -> tuple[tuple[str, str, str], ...]:
        """Parts of a round: name, stamp it starts at, stamp it ends at; a name may come again."""
        spans = [
            ("target forward", "begin", "target"),
            ("wait for masks", "target", "masks"),
            ("verify", "masks", "verify"),
            ("drafter extend", "verify", "extend"),
            ("wait for row 0", "extend", "row0"),
        ]
        drafting = "row0"
        if self.masked:
            for j in range(1, self.draft_length):
                spans.append(("drafting", drafting, f"step{j + 1}"))
                spans.append((f"wait for row {j}", f"step{j + 1}", f"row{j}"))
                drafting = f"row{j}"
        return (*spans, ("drafting", drafting, "end"))

    @property
    def waits(self) -> dict[str, str]:
        """Parts in which the model waits for the grammar, and the host step it waits for."""
        if self.probed:
            waits = {f"wait for row {j}": f"probe {j + 1}" for j in range(self.draft_length)}
            return {"wait for masks": "open: missing rows"} | waits
        waits = {"wait for masks": "open: missing rows", "wait for row 0": "commit, fill row 0"}
        return waits | {f"wait for row {j}": f"fill row {j}" for j in range(1, self.draft_length)}
