"""Use the engine of graft.models: speculative decoding of a batch, a grammar for each request."""

from __future__ import annotations

from graft.grammar import GrammarSpec
from graft.models import Engine, Request
from graft.tools.demo_model import demo_model

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["name", "age"],
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
}
PROMPT = "name: Olga Novak; age: 42\nReturn JSON."


def main() -> None:
    """Run three requests in one batch, and then stream the text of a fourth request."""
    target, drafter = demo_model()  # or the folders of a Llama model and its EAGLE-3 head
    with Engine(target, drafter, max_batch_size=4, draft_length=3) as engine:
        requests = [
            Request(prompt=PROMPT, grammar=GrammarSpec.json_schema(SCHEMA)),
            Request(
                prompt="code: QF-5702\nGive only the code.",
                grammar=GrammarSpec.regex("[A-Z]{2}-[0-9]{4}"),
            ),
            Request(prompt="Say yes or no.", grammar=GrammarSpec.choice(["yes", "no"])),
        ]
        for output in engine.generate(requests):
            print(
                output.text,
                f"({output.reason}, {len(output.tokens)} tokens in {output.rounds} rounds)",
            )
        for event in engine.stream(
            [Request(prompt=PROMPT, grammar=GrammarSpec.json_schema(SCHEMA))]
        ):
            print(event.text, end="", flush=True)
        print(f"\n{engine.stats.tokens_per_round:.2f} tokens per round")


if __name__ == "__main__":
    main()
