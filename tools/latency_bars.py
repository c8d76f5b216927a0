"""What the latency laboratory's figures mean: ratios to the peer, and graft's own bars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["bars", "ratios"]

PEER = "cuda.core"
Row = dict[str, Any]


def _find(rows: Sequence[Row], transport: str, callbacks: int, python: str) -> Row | None:
    wanted = (transport, callbacks, python, 0)
    return next((r for r in rows if (r["transport"], r["callbacks"], r["python"], r["pause_us"])
                 == wanted), None)


def ratios(rows: Sequence[Row]) -> list[Row]:
    """Median hops of every arm as parts of cuda.core's in the same state."""
    out = []
    for row in rows:
        peer = _find(rows, PEER, row["callbacks"], row["python"])
        if row["hop_us"] is None or row["pause_us"] or peer is None or row is peer:
            continue
        out.append({"transport": row["transport"], "callbacks": row["callbacks"],
                    "python": row["python"],
                    "of_cuda_core": row["hop_us"]["p50"] / peer["hop_us"]["p50"]})
    return out


def bars(rows: Sequence[Row], kind: str) -> list[Row]:
    """Each bar with its value here, where both of its sides were measured.

    Hops are compared where the device records them; with a busy interpreter it is the joins' 99th
    percentile, which every transport has; on hardware a mailbox's join is held against that of a
    blocking host node.
    """
    out: list[Row] = []

    def add(what: str, one: float, other: float, limit: float) -> None:
        out.append({"what": what, "value": one / other, "limit": limit,
                    "holds": one <= limit * other})

    for n in sorted({row["callbacks"] for row in rows}):
        peer = _find(rows, PEER, n, "idle")
        for name, limit in (("python", 1 / 5), ("native", 1 / 20)):
            row = _find(rows, name, n, "idle")
            if row and peer and row["hop_us"] and peer["hop_us"]:
                add(f"median hop of {name} / cuda.core, {n} steps, idle",
                    row["hop_us"]["p50"], peer["hop_us"]["p50"], limit)
        slow = _find(rows, "python", n, "busy")
        for name in ("native", "mailbox"):
            row = _find(rows, name, n, "busy")
            if row and slow:
                add(f"p99 join of {name} / python, {n} steps, busy",
                    row["join_us"]["p99"], slow["join_us"]["p99"], 1 / 10)
        mailbox, host = _find(rows, "mailbox", n, "idle"), _find(rows, "native", n, "idle")
        if kind == "cuda" and mailbox and host:
            add(f"median join of mailbox / native host node, {n} steps, idle",
                mailbox["join_us"]["p50"], host["join_us"]["p50"], 1 / 2)
    return out
