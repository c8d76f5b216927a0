"""A program with type errors, which type checkers must find (`test_packaging.py`)."""

from graft.cudagraph import Graph, load_text, open_device
from graft.grammar import GrammarSpec
from graft.models import Engine, Options, Request
from graft.tools.demo_model import demo_model

target, drafter = demo_model()
device = open_device()
kernels = load_text(device, 5, "kernel.cu")  # error
graph = Graph(device, 7)  # error
graph.lane("main").kernel(kernels["twice"], 1, "4", [])  # error
graph.lane("main").hots(print)  # error
spec = GrammarSpec.regex(5)  # error
request = Request(prompt="name: Olga", grammar=GrammarSpec.regex("[0-9]+"), max_tokens=8)
Request(promt="name: Olga")  # error
Request(prompt="name: Olga", max_tokens="8")  # error
Request(prompt="name: Olga", grammar="[0-9]+")  # error
Engine(target, max_batch=8)  # error
Engine(target, max_batch_size="8")  # error
Engine(target, drafter, draft_tree=3)  # error
Engine(target, 5)  # error
options = Options(max_batch_size=4, pages="all")  # error
with Engine(target, drafter, max_batch_size=8, draft_length="auto", pages=None) as engine:
    [output] = engine.generate([request])
    text: str = output.text
    tokens: int = output.text  # error
    print(output.txt)  # error
    engine.generate(request)  # error
    for event in engine.stream([request]):
        print(event.id + event.text)
        print(event.text + 1)  # error
    print(engine.options.max_batch_size + 1, engine.stats.tokens_per_round * 2.0)
    print(engine.option)  # error
