"""Program that every rank runs in the tensor-parallel tests. Rank 0 prints the results as JSON."""

import json
import os
import signal
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from engine_util import DRAFTER, TARGET, mixed_requests

from graft.cudagraph.errors import GraftError
from graft.cudagraph.ranks.ranks import RankGroup
from graft.grammar.decoder import GuidedDecoder
from graft.models import CheckpointError, Engine, Request
from graft.models.engine.options import InternalOptions
from graft.models.llm import worker_rank
from graft.tools import cli
from graft.tools.demo.smollm import HEAD, cache_folder


def workload() -> list[Request]:
    """Return alternating greedy and coupled requests, with and without a grammar.

    One prompt takes two prefill chunks.
    """
    guided = mixed_requests(4, seed=3, max_tokens=14)
    free = Request(tokens=[300 + i % 90 for i in range(300)], max_tokens=8)
    coupled = {"temperature": 0.9, "top_p": 0.95, "verify": "coupled"}
    return [
        replace(r, id=str(i), seed=i, logprobs=0, **(coupled if i % 2 else {}))
        for i, r in enumerate([*guided, free])
    ]


def answers(
    ranks: RankGroup | None,
    order: int,
    model: Path = TARGET,
    drafter: Path = DRAFTER,
    **options: Any,
) -> dict[str, Any]:
    """Run the requests of the test on an engine.

    Return tokens, log probabilities and finish reasons by request id, and the number of mask fills.
    If `order` is -1, the requests are submitted in reverse order.
    """
    with Engine(model, drafter, max_length=512, ranks=ranks, **options) as engine:
        requests = workload() if model == TARGET else workload()[:3]
        found = {output.id: output for output in engine.generate(requests[::order])}
        fills = engine.counters()["grammar"]["fills"]
    return {
        "tokens": {name: output.tokens for name, output in found.items()},
        "logprobs": {name: [p.value for p in o.logprobs or ()] for name, o in found.items()},
        "reasons": {name: output.reason for name, output in found.items()},
        "fills": fills,
    }


#: A round is launched after the host has read the previous one.
ONE_AT_A_TIME = InternalOptions(overlap=False)


def equal(ranks: RankGroup) -> None:
    """Run the workload in one process and on all ranks, with several batch sizes and orders."""
    found: dict[str, Any] = {}
    try:
        answers(ranks, 1, max_batch_size=1)
    except GraftError as error:
        found["refused"] = [type(error).__name__, str(error)]
    found["alone"] = answers(None, 1, max_batch_size=2)
    found["ranks"] = [
        answers(ranks, order, **options)
        for order, options in (
            (1, {"max_batch_size": 2}),
            (-1, {"max_batch_size": 4, "draft_tree": (2, 3), "internal": ONE_AT_A_TIME}),
        )
    ]
    print(json.dumps(found))


def real(ranks: RankGroup) -> None:
    """Run three requests with SmolLM2 on all ranks, with two batch sizes and orders."""
    print(
        json.dumps(
            [
                answers(ranks, order, cache_folder(), HEAD, max_batch_size=batch)
                for order, batch in ((1, 1), (-1, 3))
            ]
        )
    )


def architecture(ranks: RankGroup, model: Path) -> None:
    """Run greedy requests with a model, without a drafter, in one process and on all ranks."""
    requests = [
        Request(tokens=[7 * i + j for j in range(9 + i)], max_tokens=16, logprobs=0, id=str(i))
        for i in range(3)
    ]
    found = []
    for group in (None, ranks):
        with Engine(model, max_length=256, ranks=group) as engine:
            outputs = engine.generate(requests)
        found.append(
            {
                "tokens": {output.id: output.tokens for output in outputs},
                "logprobs": {o.id: [p.value for p in o.logprobs or ()] for o in outputs},
            }
        )
    print(json.dumps(found))


def disturb(case: str) -> None:
    """Make this rank fail.

    In case "equal", the rank fails to load its first shard. In case "killed", it kills its own
    process when it receives the 12th command. In other cases, it sleeps past the deadline when it
    receives the 12th command.
    """
    plain_load = worker_rank.TensorParallelWorker.__init__
    plain_run = worker_rank.TensorParallelWorker.run
    runs = [0]

    def load(self: Any, *given: Any, **options: Any) -> None:
        worker_rank.TensorParallelWorker.__init__ = plain_load  # type: ignore[method-assign]
        raise CheckpointError("a file is missing here")

    def run(self: Any, header: tuple[int, ...]) -> None:
        runs[0] += 1
        if runs[0] == 12 and case == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if runs[0] == 12:
            time.sleep(100)
        plain_run(self, header)

    def no_masks(*_: Any, **__: Any) -> None:
        raise RuntimeError("only rank 0 computes masks")

    if case == "equal":
        worker_rank.TensorParallelWorker.__init__ = load  # type: ignore[assignment, method-assign]
        GuidedDecoder.__init__ = no_masks  # type: ignore[assignment, method-assign]
    else:
        worker_rank.TensorParallelWorker.run = run  # type: ignore[method-assign]


def idle(ranks: RankGroup, stderr_file: str) -> None:
    """Wait for a command, or kill this process if it is rank 0 and was idle for a while.

    Rank 0 lives longer than the deadline, so the worker rank depends on its heartbeats.
    """
    if ranks.rank == 0:
        time.sleep(1.5 * ranks.deadline_s)
        os.kill(os.getpid(), signal.SIGKILL)
    os.dup2(os.open(stderr_file, os.O_WRONLY | os.O_CREAT), 2)
    started = time.monotonic()
    try:
        worker_rank.run_worker(ranks)
    except GraftError as error:
        assert time.monotonic() - started > 1.5 * ranks.deadline_s
        print(f"graft: {error}", file=sys.stderr)


def main(case: str, path: str) -> int:
    """Run a case. `path` is the file for stderr; in the case "architecture", it is the model."""
    if case == "idle":
        idle(RankGroup.from_mpi(2.0), path)
        return 1
    cases = {"equal": equal, "real": real, "architecture": partial(architecture, model=Path(path))}
    ranks = RankGroup.from_mpi(120.0 if case in cases else 2.0)
    if ranks.rank and case not in ("real", "architecture"):
        disturb(case)
    elif case == "killed":  # the launcher may end before this rank
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), 2)
    if case in cases:
        worker_rank.run_worker(ranks) if ranks.rank else cases[case](ranks)
        return 0
    RankGroup.from_mpi = lambda: ranks  # type: ignore[assignment, method-assign]
    return cli.main(
        [
            "generate",
            "--parallel",
            "--prompt",
            "Make a person.",
            "--max-tokens",
            "200",
            "--no-speculation",
        ]
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
