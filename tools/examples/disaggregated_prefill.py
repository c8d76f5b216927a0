"""Disaggregated prefill with graft.models: one process prefills prompts, another one decodes.

The prefilling engine exports each request after its first tokens with `Engine.migrate_out`, unless
the first tokens already complete the output. The KV cache of the request is transferred through
shared memory. For each exported request, the decoding process receives a ticket: a small message
that identifies the shared memory of the request.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

from graft.grammar import GrammarSpec
from graft.models import Engine, Request
from graft.models.transfer import SharedMemory
from graft.tools.demo_model import demo_model
from graft.tools.examples.engine import PROMPT, SCHEMA

REQUESTS = [
    Request(
        prompt="code: QF-5702\nGive only the code.",
        id="code",
        grammar=GrammarSpec.regex("[A-Z]{2}-[0-9]{4}"),
    ),
    Request(
        prompt=PROMPT,
        id="json",
        grammar=GrammarSpec.json_schema(SCHEMA),
        seed=7,
        temperature=0.8,
        verify="coupled",
    ),
    # The prefilling engine finishes this request, because it needs no token after the first one.
    Request(prompt="code: QF-5702\nGive only the code.", id="one token", max_tokens=1),
]


def decode(tickets: Any, finished: Any) -> None:
    """Receive requests from the prefilling process and decode them, in the decoding process.

    Parameters
    ----------
    tickets
        Queue of tickets, one per request. None follows the last ticket.
    finished
        Queue for the results. Each entry is a list with the last events of requests that ended.
    """
    transfer = SharedMemory()
    expects_tickets = True
    with Engine(*demo_model()) as engine:
        while expects_tickets or engine.busy:
            while expects_tickets and not (engine.busy and tickets.empty()):
                ticket = tickets.get()
                if ticket is None:
                    expects_tickets = False
                else:
                    engine.migrate_in(transfer.receive(ticket))
            finished.put([event for event in engine.step() if event.finished])


def main() -> None:
    """Migrate requests after their first tokens, and compare the outputs with a single engine's."""
    context = multiprocessing.get_context("spawn")
    transfer = SharedMemory()
    tickets = context.Queue()
    finished = context.Queue()
    decoder = context.Process(target=decode, args=(tickets, finished))
    decoder.start()
    outputs: dict[str, Any] = {}
    with Engine(*demo_model()) as engine:
        for event in engine.stream(REQUESTS):
            if event.output is None:
                tickets.put(transfer.send(engine.migrate_out(event.id)))
            elif event.output.reason != "moved":
                outputs[event.id] = event.output  # finished by this engine, not migrated
        tickets.put(None)
        while len(outputs) < len(REQUESTS):
            outputs.update((event.id, event.output) for event in finished.get())
        transfer.close()  # safe, because the other process has received everything
        for expected in engine.generate(REQUESTS):
            output = outputs[expected.id]
            print(
                f"{output.text} ({output.cached_tokens} tokens were transferred), equal to the "
                f"output of one engine: {output.tokens == expected.tokens}"
            )
    decoder.join()


if __name__ == "__main__":
    main()
