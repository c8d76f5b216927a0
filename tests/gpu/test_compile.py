"""Compile and load each kernel file with each combination of macros, then run an engine.

The kernels are compiled in parallel, so that later tests find them in the cache.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import machine_code
import pytest
from random_model import FULL, ROWS, SMALL, context_rows, random_engine, random_llama

from graft.cudagraph import Graph
from graft.models.engine.engine import Engine
from graft.models.request import Request
from graft.tools.demo_model import demo_model

VARIANTS = machine_code.all_variants()


@pytest.fixture(scope="module")
def modules(request, device):
    """Return the future of each loaded variant. The soft device compiles one per file."""
    pool = ThreadPoolExecutor(os.cpu_count())
    selected = [
        item.callspec.params["variant"]
        for item in request.session.items
        if item.module is request.module and hasattr(item, "callspec")
    ]
    variants = [v for v in selected if device.kind == "cuda" or not v.defines]
    futures = {v: pool.submit(device.load, v.path, dict(v.defines)) for v in variants}
    yield futures
    pool.shutdown(cancel_futures=True)


def make_cases():
    """Return all variants; a short test run compiles only two files."""
    cases = []
    for variant in VARIANTS:
        is_short = variant.path.stem in ("mailbox", "mask") and not variant.defines
        marks = [] if is_short else pytest.mark.full
        cases.append(pytest.param(variant, id=variant.title, marks=marks))
    return cases


@pytest.mark.parametrize("variant", make_cases())
def test_kernel_file_compiles_and_loads(modules, variant):
    if variant not in modules:
        pytest.skip("the soft device compiles each file once")
    module = modules[variant].result()
    names = machine_code.entry_names(variant.path)
    assert names
    for name in names:
        assert module[name].name == name


@pytest.mark.full
def test_kernels_of_measured_models_compile(device, small):
    """Threads build forward passes of all measured sizes in parallel, and an engine generates."""
    size = (SMALL if small else FULL) | {"num_hidden_layers": 3}
    model = random_llama(device, size)

    def build_forward(count):
        logits = device.empty((count, model.vocab_size), "float32")
        lane = Graph(device, f"{count} rows").lane("main")
        model.forward(lane, context_rows(device, 256, count), None, logits)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(build_forward, ROWS))
    with random_engine(size, 3, programmatic=False) as engine:
        (output,) = engine.generate([Request(tokens=[5] * 8, max_tokens=4)])
    assert output.error is None


def test_engine_generates_with_host_nodes():
    """The engine compiles the kernels that depend on its options. It has no mailbox."""
    request = Request(tokens=[300] * 8, max_tokens=6)
    with Engine(
        *demo_model(), max_batch_size=2, max_length=64, grammar_transport="native"
    ) as engine:
        (output,) = engine.generate([request])
    assert len(output.tokens) == 6
