"""Engines on PTX generate the same tokens as with kernels that are compiled for the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from graft.cudagraph.kernels import nvrtc
from graft.tools.demo.smollm import cache_folder

pytestmark = [
    pytest.mark.ptx,
    pytest.mark.skipif(nvrtc.missing_compiler() != "", reason="NVRTC is not installed"),
]
#: Prints the tokens of greedy, coupled and rejection-sampled requests with different grammars.
CELLS = """
import json, sys
from engine_util import demo_engine
from graft.models.request import Request
from graft.grammar import GrammarSpec

SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}, "ok": {"type": "boolean"}},
          "required": ["id", "ok"], "additionalProperties": False}
grammars = [None, GrammarSpec.regex("[a-f]{8}"), GrammarSpec.json_schema(SCHEMA)]
modes = [{}, {"temperature": 0.9, "verify": "coupled"}, {"temperature": 0.9, "verify": "rejection"}]
requests = [
    Request(prompt="A value: ", grammar=grammar, max_tokens=8, closing="off", seed=i, **mode)
    for i, mode in enumerate(modes)
    for grammar in grammars
]
with demo_engine(max_batch_size=3, **json.loads(sys.argv[1])) as engine:
    print(json.dumps([[output.tokens, output.reason] for output in engine.generate(requests)]))
"""
#: Prints 20 tokens of SmolLM2.
SMOLLM = """
import json
from graft.models import Engine, Request
from graft.models.round.prefill import Prefill
from graft.tools.demo.smollm import smollm

Prefill.warm = lambda *_: []  # runs prefills of all sizes, which takes minutes on PTX
with Engine(smollm(), max_batch_size=1, max_length=64) as engine:
    (output,) = engine.generate([Request(prompt="The capital of France is", max_tokens=20)])
    print(json.dumps(output.tokens))
"""


def output_of(code: str, *arguments: str, limit: int = 400) -> str:
    """Return the standard output of Python that runs with ``GRAFT_CODE=code``."""
    paths = os.pathsep.join([path for path in sys.path if path])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "GRAFT_DEVICE": "soft", "GRAFT_CODE": code, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "options",
    [
        {"draft_length": 3},
        {"draft_length": 5, "draft_tree": [2, 3]},
        {"draft_length": 3, "draft_masking": "probe"},
        {"draft_length": 3, "generation": "graph"},
    ],
    ids=["chain", "tree", "probe", "loops with automata"],
)
def test_engine_tokens_on_ptx_equal_host_tokens(options):
    host, found = (output_of(code, "-c", CELLS, json.dumps(options)) for code in ("host", "ptx"))
    tokens = json.loads(host)
    assert found == host and len(tokens) == 9 and all(tokens)


def test_hand_built_round_on_ptx_prints_same_tokens():
    module = "graft.tools.examples.one_round"
    host, found = (output_of(code, "-m", module) for code in ("host", "ptx"))
    assert found == host and "3 of 3 drafts accepted" in host


def test_demo_answers_on_ptx_equal_host_answers():
    host, found = (output_of(code, "-m", "graft.tools.cli", "demo") for code in ("host", "ptx"))
    devices, texts = zip(*(text.split("\n", 1) for text in (host, found)), strict=True)
    assert devices[1] == f"{devices[0]}, kernels run as PTX"
    answers = [text.split("launches  rounds")[0] for text in texts]
    assert answers[0] == answers[1] and answers[1].count("correct answer") == 10


def test_smollm_tokens_on_ptx_equal_host_tokens():
    if not cache_folder().is_dir():
        pytest.skip(f"{cache_folder()} does not exist; create it with graft demo --llm")
    host, found = (output_of(code, "-c", SMOLLM) for code in ("host", "ptx"))
    assert found == host and len(json.loads(host)) == 20
