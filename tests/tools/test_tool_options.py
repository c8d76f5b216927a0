"""Tests that command-line tools reject invalid options with exit status 2 and a clear message."""

from __future__ import annotations

import importlib
import sys

import pytest

from graft.cudagraph.errors import OptionError
from graft.tools.bench import serving, speculation

#: Module of the tool, its command line, and words of the error message. "{folder}" is an empty
#: folder.
REFUSALS = [
    ("bench.speculation", "--prompts {prompts} --max-length 4", "request 0 refused"),
    ("bench.speculation", "--batches 0", "--batches: must be a whole number of at least 1, not 0"),
    ("bench.speculation", "--chart {folder}/chart.gif", "chart.gif: the name must end in .svg"),
    ("bench.speculation", "--tasks 0", "--tasks: must be a whole number of at least 1, not 0"),
    ("cli", "generate --prompt x --trace {folder}/trace.txt", "must end in .json"),
    ("cli", "generate --prompt x --trace {folder}/none/trace.json", "there is no folder"),
    ("gpu_first.__main__", "--sections none", "invalid choice: 'none'"),
    ("gpu_first.__main__", "--minutes 0", "--minutes must be above 0, not 0"),
    ("labs.callback_latency.__main__", "--callbacks 65", "--callbacks"),
    ("labs.callback_latency.__main__", "--samples 0", "--samples"),
    ("labs.gil_deadlock.__main__", "--case alloc", "--case"),
    ("labs.gil_deadlock.__main__", "--case alloc:python", "--case"),
    ("labs.gil_deadlock.__main__", "--case alloc:python:x", "--case"),
    ("labs.gil_deadlock.__main__", "--case alloc:telepathy:1", "--case"),
    ("labs.gil_deadlock.__main__", "--case sleep:python:1", "--case"),
    ("trace.draw_round", "{folder}/round.png", "round.png"),
]


def run_tool(module, arguments):
    """Return the exit status of a tool's main function."""
    try:
        return importlib.import_module(f"graft.tools.{module}").main(arguments)
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize(
    ("module", "options", "words"),
    REFUSALS,
    ids=[f"{module} {options}" for module, options, _ in REFUSALS],
)
def test_tool_rejects_options(tmp_path, capsys, module, options, words):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n')
    texts = {"folder": tmp_path, "prompts": prompts}
    assert run_tool(module, options.format(**texts).split()) == 2
    assert words in capsys.readouterr().err


def test_serving_bench_names_missing_package(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert run_tool("bench.serving", ["--calls", "1"]) == 2
    assert "needs the package httpx: pip install httpx" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "words"), [("http://127.0.0.1:1/v1", "ConnectError"), ("nowhere", "protocol")]
)
def test_serving_bench_says_why_no_request_succeeds(capsys, url, words):
    pytest.importorskip("httpx")
    assert run_tool("bench.serving", ["--calls", "1", "--url", url]) == 2
    error = capsys.readouterr().err
    assert f"--url {url}: all warm-up requests failed: " in error and words in error


def test_serving_bench_goodput_is_the_rate_if_all_responses_are_in_time():
    """Goodput counts responses per second of sending. It excludes the wait for the last one."""
    responses = [serving.Response(0.1, 0.01, True)] * 12
    result = serving.summarize(6, responses, 2.0, 2.64, (1.0, 0.1))
    assert result["goodput"] == result["sent_per_s"] == 6


def test_docs_reject_unknown_package(tmp_path, capsys):
    pytest.importorskip("pdoc")
    assert run_tool("docs", ["nothing", "--output", str(tmp_path)]) == 2
    assert "there is no package graft.nothing" in capsys.readouterr().err


def test_speculation_bench_rejects_demo_drafter_for_other_models():
    with pytest.raises(OptionError, match="eagle belongs to the demo model"):
        speculation.choose_drafter("ngram+eagle", None)
