"""What the engine's tests share: the demo model and requests made from its tasks."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from graft.models.engine import Engine
from graft.models.request import Event, Output, Request
from graft.tools.bench.demo_evaluation import task_grammar
from graft.tools.demo_tasks import Task, held_out_tasks, unseen_key_tasks

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"
TARGET, DRAFTER = DEMO / "target", DEMO / "eagle3"


def demo_engine(*, speculation: bool = True, drafter: Any = DRAFTER, **options: Any) -> Engine:
    """An engine on the shipped model, with its drafter, another or none."""
    return Engine(TARGET, drafter if speculation else None, **options)


def task_request(task: Task, **options: Any) -> Request:
    """The request that asks for a task's answer."""
    return Request(prompt=task.text, grammar=task_grammar(task), **({"max_tokens": 160} | options))


def outputs(events: Iterable[Event]) -> dict[str, Output]:
    """Outputs among events, by id."""
    return {event.id: event.output for event in events if event.output is not None}


def drain(engine: Engine) -> dict[str, Output]:
    """Step until nothing is left to do; the outputs that came."""
    found: dict[str, Output] = {}
    while engine.busy:
        found |= outputs(engine.step())
    return found


def mixed_requests(count: int, seed: int = 7, **options: Any) -> list[Request]:
    """Requests of the kinds the model knows, two thirds with keys it has seen in training."""
    known = list(held_out_tasks(count, seed))
    unseen = list(unseen_key_tasks(count, seed))
    tasks = [unseen[i] if i % 3 == 2 else known[i] for i in range(count)]
    return [task_request(task, **options) for task in tasks]
