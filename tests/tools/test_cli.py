"""Tests of the command ``graft``: parsing of requests, errors, and outputs of the demo model."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from graft.cudagraph.errors import OptionError
from graft.grammar.grammar_spec import GrammarSpec, StructuralTag
from graft.models.request import Output, Request
from graft.sampling.params import SamplingParams
from graft.tools import cli, console, generate, prompt_rows
from graft.tools.demo_model import demo_model
from graft.tools.prompt_rows import PromptRow, read_requests
from graft.tools.serve.command import bind_socket

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REFUSED = {"type": "string", "not": {"format": "email"}}


def parse_requests(*arguments: str):
    """Return the requests that a command line of ``graft generate`` defines."""
    command = ["generate", *arguments]
    return read_requests(cli.parser(command).parse_args(command))


def run_json(capsys, *arguments: str, status: int = 0):
    """Run ``graft generate --json``, check the exit status, and return the parsed output."""
    assert cli.main(["generate", "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def parse_rows(tmp_path):
    """Return a function that writes rows to a prompt file and parses the file.

    Each row is given as an object, or as the text of its line.
    """

    def read(*rows, flags=()):
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
        return parse_requests("--prompts", str(tmp_path / "rows.jsonl"), *flags)

    return read


def test_generate_options_set_request_fields(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    options = (
        "--prompt hello --max-tokens 9 --temperature 0.5 --top-k 7 --top-p 0.9 --min-p 0.1 "
        "--seed 3 --verify coupled --n 2 --logit-bias 7=-1.5 --logit-bias 8=2 "
        "--presence-penalty 1 --frequency-penalty 0.5 --repetition-penalty 1.2 --min-tokens 4 "
        "--logprobs 5"
    )
    [row] = parse_requests(*options.split(), "--schema", str(tmp_path / "s.json"))
    request = row.request
    expected = Request(
        prompt="hello",
        max_tokens=9,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        verify="coupled",
        n=2,
        logit_bias={7: -1.5, 8: 2.0},
        min_tokens=4,
        presence_penalty=1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logprobs=5,
        id=request.id,
        grammar=GrammarSpec.json_schema(SCHEMA),
    )
    assert request == expected


def test_sampling_options_have_the_defaults_of_sampling_params():
    """Prompt rows accept all parameters of SamplingParams, except ``sample`` and ``relaxed``."""
    [row] = parse_requests("--prompt", "x")
    defaults = dataclasses.replace(SamplingParams(), verify="rejection", logit_bias={})
    assert SamplingParams.from_fields(row.request) == defaults
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    assert names - prompt_rows.ROW_FIELDS == {"sample", "relaxed"}


def test_prompt_rows_take_precedence_over_options(parse_rows):
    """The seed of a row without ``seed`` is the value of --seed plus the index of the row."""
    one, other = parse_rows(
        {"prompt": "a"},
        "",
        {
            "prompt": "b",
            "choice": ["x", "y"],
            "temperature": 1.5,
            "id": "mine",
            "logit_bias": {"5": 1, "no": 2},
        },
        flags=("--regex", "[0-9]+", "--seed", "10"),
    )
    for row, grammar, *expected in (
        (one, GrammarSpec.regex("[0-9]+"), 0.0, 10, "0", {}),
        (other, GrammarSpec.choice(["x", "y"]), 1.5, 11, "mine", {5: 1, "no": 2}),
    ):
        request = row.request
        assert request.grammar == grammar
        assert [request.temperature, request.seed, request.id, request.logit_bias] == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "tempreature": 1}', "line 1: unknown keys: tempreature"),
        ('{"prompt": ', "line 1: "),
        ("[1, 2]", "line 1: a row must be an object"),
        ("", "contains no prompt"),
    ],
)
def test_prompt_file_with_invalid_line_is_rejected(parse_rows, line, words):
    """A line that is not a row raises an error with the line number, before a model is loaded."""
    with pytest.raises(OptionError, match=words):
        parse_rows(line)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--key-order", "any"], "--key-order requires a row with schema in --prompts"),
        (["--partial"], "--partial requires a row with schema"),
        (["--assert-formats"], "--assert-formats requires a row with schema"),
        (["--whitespace", "any"], "--whitespace requires a row with schema or json_object"),
    ],
)
def test_grammar_option_that_applies_to_no_row_is_rejected(parse_rows, flags, words):
    with pytest.raises(OptionError, match=words):
        parse_rows({"prompt": "a", "regex": "[a-z]"}, {"prompt": "b"}, flags=flags)
    parse_rows({"prompt": "a", "schema": {}}, {"prompt": "b"}, flags=flags)


def test_after_option_without_grammar_is_rejected(parse_rows):
    with pytest.raises(OptionError, match="--after requires a row with schema or"):
        parse_rows({"prompt": "a"}, flags=["--after", "#"])


def test_forced_drafts_option_reduces_rounds(tmp_path, capsys):
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    options = ["--prompt", "Olga is 42.", "--schema", str(tmp_path / "s.json"), "--no-speculation"]
    plain = run_json(capsys, *options)
    forced = run_json(capsys, *options, "--forced-drafts")
    assert plain["outputs"][0]["text"] == forced["outputs"][0]["text"]
    assert plain["rounds"] > forced["rounds"] > 0


def test_prompt_rows_accept_partial_schemas_and_json_object_false(parse_rows):
    """With --partial, a schema is accepted even if no backend enforces all its keywords.

    A row with ``"json_object": false`` has no grammar.
    """
    rows = {"prompt": "a", "schema": REFUSED}, {"prompt": "p", "json_object": False}
    partial, free = parse_rows(*rows, flags=["--partial"])
    assert partial.refusal is None and partial.request.grammar.partial
    assert free.refusal is None and free.request.grammar is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"choice": "a,,b"}, "choice option: is empty"),
        ({"choice": 3}, "choice must be a list"),
        ({"choice": [1, True]}, "choice must be a list of strings or numbers"),
        ({"regex": "a", "backend": "telepathy"}, "backend must be one of"),
        ({"id": 5}, "id must be a string, got 5"),
        ({"id": True}, "id must be a string, got True"),
        ({"id": "first"}, "id 'first' is already used in line 1"),
        ({"json_object": "no"}, "json_object must be true or false"),
        ({"json_object": 0}, "json_object must be true or false, got 0"),
        ({"variables": 3}, "variables must be an object"),
        ({"variables": {"messages": []}}, "variables must not contain messages"),
        ({"raw": True, "tools": []}, "raw cannot be combined with tools"),
        ({"schema": REFUSED}, "#: not"),
        ({"schema": False}, "allows no output"),
        ({"structural_tag": []}, "must be an object, not list"),
        ({"structural_tag": {"tags": 3}}, "must be lists"),
        (
            {"structural_tag": {"tags": [{"begin": "<"}], "triggers": ["<"]}},
            "exactly begin, schema and end",
        ),
        ({"structural_tag": {"tags": [], "triggers": [], "x": 1}}, "unknown keys: x"),
        ({"structural_tag": {"tags": [], "triggers": []}}, "at least one"),
    ],
)
def test_invalid_prompt_row_is_refused_alone(parse_rows, row, words):
    """An invalid row is refused with a message that contains its line number.

    The other rows of the file are accepted. The ids generated for rows without an id differ from
    the ids that other rows specify.
    """
    changes = ({"id": "first"}, row, {"id": "0"}, {"id": None})
    first, bad, zero, free = parse_rows(*({"prompt": "a"} | change for change in changes))
    assert bad.refusal is not None
    assert bad.refusal.startswith("line 2: ") and words in bad.refusal
    assert bad.refusal_type in ("GrammarError", "OptionError")
    assert {first.refusal, zero.refusal, free.refusal} == {None}
    assert [first.request.id, zero.request.id] == ["first", "0"]
    assert len({row.request.id for row in (first, bad, zero, free)}) == 4


def test_prompt_rows_end_at_line_feeds_only(tmp_path, monkeypatch):
    """A Unicode line separator inside a JSON string does not end a row.

    With ``--prompts -``, the rows are read from standard input.
    """
    text = json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + '\r\n\n{"prompt": "d"}'
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(text.encode())
    prompts = [row.request.prompt for row in parse_requests("--prompts", str(rows))]
    assert prompts == ["a\u2028b\x85c", "d"]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert len(parse_requests("--prompts", "-")) == 2


def test_prompt_rows_control_the_chat_template(parse_rows):
    """The chat template is not applied to a raw prompt.

    For other rows, the template receives the tools, variables and schema of the row.
    """
    received = {}

    def render_chat(messages, **variables):
        received.update(variables, messages=messages)
        return [7]

    tokenizer = SimpleNamespace(encode=lambda text: [len(text)], chat=render_chat)
    engine = SimpleNamespace(tokenizer=tokenizer)
    (raw,) = parse_requests("--prompt", "four", "--raw")
    assert raw.for_engine(engine).tokens == [4]
    assert raw.for_engine(engine).prompt is None
    (one,) = parse_rows(
        {
            "prompt": "x",
            "tools": [{"name": "f", "strict": True}, {"function": {"name": "g", "strict": True}}],
            "schema": SCHEMA,
            "variables": {"day": 3},
        }
    )
    assert one.for_engine(engine).tokens == [7]
    assert received == {
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f"}, {"function": {"name": "g"}}],
        "day": 3,
        "schema": SCHEMA,
    }
    (plain,) = parse_requests("--prompt", "x")
    assert plain.for_engine(engine) is plain.request


TAGS = {
    "tags": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    "triggers": ["<f"],
}
TAG = StructuralTag.of("<f>", {"type": "integer"}, "</f>")
LARK = 'start: NUM "+" NUM\nNUM: /[0-9]{1,2}/'


@pytest.mark.parametrize(
    ("flag", "text", "grammar"),
    [
        ("--lark", LARK, GrammarSpec.lark(LARK)),
        ("--ebnf", 'root ::= "a"', GrammarSpec.ebnf('root ::= "a"')),
        ("--structural-tag", json.dumps(TAGS), GrammarSpec.structural_tag([TAG], ["<f"])),
        ("--json-object", None, GrammarSpec.json_object()),
        ("--regex", None, GrammarSpec.regex("a+")),
        ("--choice", None, GrammarSpec.choice(["x", "y"])),
    ],
)
def test_grammar_options_and_row_keys_define_grammars(tmp_path, parse_rows, flag, text, grammar):
    """Grammars of every kind can be given on the command line and in rows.

    The option --after applies to all of them, unless a row has its own key ``after``.
    """
    (tmp_path / "g").write_text(text or "")
    values = {"--json-object": [], "--regex": ["a+"], "--choice": ["x,y"]}
    flags = (flag, *values.get(flag, [str(tmp_path / "g")]))
    options = ("--prompt", "p", *flags)
    assert parse_requests(*options)[0].request.grammar == grammar
    (after,) = parse_requests(*options, "--after", "</think>")
    options = {"required": True, "skips_space": True}
    assert after.request.grammar == grammar.after("</think>", **options)

    key = flag[2:].replace("-", "_")
    value = {"regex": "a+", "choice": ["x", "y"], "json_object": True}.get(key, text)
    rows = ({"prompt": "p", key: value}, {"prompt": "p", key: value, "after": 7}, {"prompt": "p"})
    first, second, third = parse_rows(*rows, flags=("--after", "###"))
    assert first.request.grammar == grammar.after("###", **options)
    assert second.request.grammar == grammar.after(7, **options)
    assert third.request.grammar is None
    *_, third = parse_rows(*rows, flags=flags)
    assert third.request.grammar == grammar


@pytest.mark.parametrize(
    ("flags", "options", "kind"),
    [
        (["--whitespace", "compact"], {"whitespace": "compact"}, "schema"),
        (["--whitespace", "2"], {"whitespace": 2}, "json_object"),
        (["--whitespace", "any"], {"whitespace": "any"}, "structural_tag"),
        (["--assert-formats"], {"assert_formats": True}, "schema"),
        (
            ["--no-assert-formats", "--key-order", "any"],
            {"assert_formats": False, "key_order": "any"},
            "schema",
        ),
    ],
)
def test_json_options_apply_to_grammars_of_rows(parse_rows, flags, options, kind):
    """A JSON option of the command line has the same effect as the key of that name in a row.

    These options do not affect a row with another kind of grammar, such as ``regex``.
    """
    value, constructor, arguments = {
        "schema": (SCHEMA, GrammarSpec.json_schema, [SCHEMA]),
        "json_object": (True, GrammarSpec.json_object, []),
        "structural_tag": (TAGS, GrammarSpec.structural_tag, [[TAG], ["<f"]]),
    }[kind]
    plain = {"prompt": "p", kind: value}
    expected = constructor(*arguments, **options)
    json_row, regex_row = parse_rows(plain, {"prompt": "p", "regex": "a+"}, flags=flags)
    assert json_row.request.grammar == expected
    assert regex_row.request.grammar == GrammarSpec.regex("a+")
    assert parse_rows(plain | options)[0].request.grammar == expected


def test_own_grammar_backend_serves_command_line(capsys):
    arguments = ("--prompt", "Code?", "--regex", "[A-Z]{2}", "--backend")
    report = run_json(capsys, *arguments, "own_backend:OwnBackend")
    assert re.fullmatch("[A-Z]{2}", report["outputs"][0]["text"])
    assert report["options"]["grammar_backend"] == "own_backend:OwnBackend"
    with pytest.raises(SystemExit):
        run_json(capsys, *arguments, "outlines")
    assert "must be one of auto, xgrammar, llguidance or MODULE:NAME" in capsys.readouterr().err


def test_prompt_row_selects_grammar_backend(parse_rows):
    schema, lark, regex = [
        one.request.grammar
        for one in parse_rows(
            {"prompt": "p", "schema": SCHEMA, "backend": "llguidance"},
            {"prompt": "p", "lark": LARK, "backend": "llguidance"},
            {"prompt": "p", "regex": "a+", "backend": "auto"},
        )
    ]
    assert schema == GrammarSpec.json_schema(SCHEMA, backend="llguidance")
    assert lark.backend == "llguidance"
    assert regex == GrammarSpec.regex("a+")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--regex", "a(b"], r"--regex a\(b: regex: .*unclosed group"),
        (["--choice", "a,,b"], "--choice a,,b: choice option: is empty"),
        (["--lark", "FILE"], r"--lark \S+: lark: line 1, column 4"),
        (["--ebnf", "FILE"], r"--ebnf \S+: ebnf: "),
        (["--schema", "FILE"], r"--schema \S+: JSON schema: the text is not JSON"),
        (["--structural-tag", "FILE"], r"--structural-tag \S+: structural tag: .* not JSON"),
        (["--structural-tag", "/no/such/file"], "--structural-tag /no/such/file: "),
        (["--schema", "{}"], "--schema {}: No such file or directory; the option takes the name"),
        (["--json-object", "--after", ""], "--json-object --after : marker: is empty"),
        (["--regex", "a", "--key-order", "any"], "--regex a --key-order any: key_order requires"),
        (["--key-order", "any"], "--key-order any: key_order requires schema"),
        (
            ["--json-object", "--whitespace", "none"],
            "--whitespace none: whitespace 'none' is unknown",
        ),
        (["--lark", "FILE", "--whitespace", "2"], "--whitespace 2: whitespace requires schema or"),
        (["--regex", "a", "--assert-formats"], "--assert-formats: assert_formats requires schema"),
        (["--partial"], "--partial requires --schema"),
        (["--regex", "a", "--partial"], "--partial requires --schema"),
        (["--after", "###"], "--after ###: after requires a grammar"),
    ],
)
def test_invalid_grammar_option_is_rejected_with_its_value(tmp_path, arguments, message):
    """An invalid grammar option raises an error with its value, before a model is loaded."""
    (tmp_path / "bad").write_text("no grammar: (")
    arguments = [str(tmp_path / "bad") if a == "FILE" else a for a in arguments]
    with pytest.raises(OptionError, match=message):
        parse_requests("--prompt", "x", *arguments)


def test_output_validity_ignores_text_before_the_marker():
    """With --after, only the text after the marker must satisfy the grammar.

    White space may follow the marker. If an output does not contain the marker,
    `PromptRow.is_valid` returns None.
    """
    (row,) = parse_requests("--prompt", "x", "--choice", "a,b, c", "--after", "#")
    valid = {"so#a": True, "so#\n\n a": True, "so# c": True, "so#c": False, "so": None}
    valid |= {"so#\n c": True, f"so#{' ' * 16}a": True, f"so#{' ' * 17}a": False}
    assert {text: row.is_valid(text) for text in valid} == valid
    (row,) = parse_requests("--prompt", "x", "--json-object", "--after", "#")
    assert row.is_valid("so# \n{}") is True and row.is_valid("so# ]") is False


@pytest.mark.parametrize(
    "arguments",
    [
        "--model /no/such/model",
        "--draft /no/such/drafter",
        "--schema /no/such/schema.json",
        "--regex (",
        "--draft-length 0",
        "--top-p 0",
        "--temperature -1",
        "--json --stream",
        "--logprobs 2",
        "--no-speculation --draft-tree 2x1",
        "--max-length 1000000",
        f"--model {demo_model()[0]} --draft json:loads",
        f"--model {demo_model()[0]} --draft :",
    ],
)
def test_generate_errors_are_one_line_with_exit_status_2(arguments, capsys):
    assert cli.main(["generate", "--prompt", "x", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("graft: ") and captured.err.count("\n") == 1


def test_generate_json_reports_valid_output_and_statistics(tmp_path, capsys):
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    report = run_json(
        capsys,
        "--schema",
        str(tmp_path / "s.json"),
        "--prompt",
        "name: Olga Novak; age: 42\nReturn JSON.",
    )
    (output,) = report["outputs"]
    assert set(json.loads(output["text"])) == {"name", "age"}
    assert output["valid"] is True and output["finished"] and output["reason"] == "stop"
    assert report["tokens"] == len(output["tokens"])
    assert report["tokens_per_round"] == pytest.approx(report["tokens"] / output["rounds"])
    assert report["device"] and report["tokens_per_second"] > 0


@pytest.mark.parametrize("backend, reported", [("auto", "1"), ("own_backend:OwnBackend", "012")])
def test_generate_partial_reports_schemas_not_enforced_in_full(tmp_path, capsys, backend, reported):
    """An automaton enforces the last schema, although LLGuidance cannot.

    graft does not know whether a user-defined backend enforces a schema in full.
    """
    schemas = (SCHEMA, REFUSED, {"type": "array", "contains": {"type": "integer"}})
    rows = [{"prompt": "a", "schema": one, "id": str(i)} for i, one in enumerate(schemas)]
    (tmp_path / "rows").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--prompts", str(tmp_path / "rows"), "--partial", "--max-tokens", "4"]
    cli.main(["generate", *arguments, "--backend", backend])
    lines = [line for line in capsys.readouterr().err.split("\n") if "not enforced" in line]
    assert [line.split(": its schema is")[0] for line in lines] == [
        f"graft: request {name}" for name in reported
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft-length", "x"], "'x' is neither a number nor auto"),
        (["--logit-bias", "5"], "'5' is not a bias, such as 5=-2.5"),
    ],
)
def test_generate_names_option_values_that_do_not_parse(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "--prompt", "x", *arguments])
    assert capsys.readouterr().err.endswith(f"{message}\n")


def test_generate_reports_misspelled_option_rather_than_missing_prompt(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "--promt", "x"])
    assert capsys.readouterr().err.endswith(
        "graft generate: error: unrecognized arguments: --promt x; did you mean --prompt?\n"
    )
    assert cli.main(["generate"]) == 2
    assert "--prompt and --prompts is required" in capsys.readouterr().err


def test_option_before_subcommand_is_refused_with_its_place(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["--json", "doctor"])
    assert capsys.readouterr().err.endswith(
        "unrecognized arguments: --json; options follow the subcommand: graft doctor --json\n"
    )


def test_draft_length_auto_counts_rounds_by_length(code_output, capsys):
    """With --draft-length auto, greedy outputs are the same as with a fixed draft length.

    The report contains the number of rounds for each draft length.
    """
    fixed = run_json(capsys, *CODE, "--draft-length", "2")
    assert fixed["outputs"][0]["tokens"] == code_output["tokens"]
    auto = run_json(capsys, *CODE, "--draft-length", "auto")
    assert auto["outputs"][0]["tokens"] == code_output["tokens"]
    assert fixed["rounds_by_length"] == {"2": fixed["rounds"]}
    assert sum(auto["rounds_by_length"].values()) == auto["rounds"]
    assert auto["rounds_by_length"].keys() <= {"0", "1", "3", "7"}


CODE = ["--prompt", "code: QF-5702\nGive only the code.", "--regex", "[A-Z]{2}-[0-9]{4}"]


@pytest.fixture(scope="module")
def code_output():
    """Return the output of the command ``graft generate --json`` with the options `CODE`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(["generate", "--json", *CODE]) == 0
    [output] = json.loads(printed.getvalue())["outputs"]
    return output


@pytest.mark.parametrize(
    "options",
    ["--no-speculation", "--draft-masking none", "--draft dflash", "--draft-tree 0,1,0.0"],
)
@pytest.mark.full("--draft-masking none")
def test_draft_options_do_not_change_greedy_output(options, code_output, capsys):
    [output] = run_json(capsys, *CODE, *options.split())["outputs"]
    assert output["tokens"] == code_output["tokens"]
    assert output["valid"] is True


def test_generate_prompt_rows_with_different_grammars(tmp_path, capsys):
    """The outputs have the same order as the rows, and each output satisfies the row's grammar."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "\n".join(
            json.dumps(row)
            for row in (
                {"prompt": "name: Lako; age: 7\nReturn JSON.", "schema": SCHEMA},
                {"prompt": "Say yes or no.", "choice": ["yes", "no"]},
                {"prompt": "pages: 72\nGive only the pages.", "regex": "[0-9]{1,4}"},
                {"prompt": "Bits.", "ebnf": 'root ::= ("0" | "1") ("0" | "1")'},
                {"prompt": "Sum?", "lark": LARK, "backend": "llguidance"},
            )
        )
    )
    outputs = run_json(capsys, "--prompts", str(rows), "--backend", "auto")["outputs"]
    assert [output["id"] for output in outputs] == ["0", "1", "2", "3", "4"]
    assert [output["valid"] for output in outputs] == [True, True, True, None, None]
    assert re.fullmatch(r"[0-9]{1,2}\+[0-9]{1,2}", outputs[4]["text"])
    assert outputs[3]["text"] in {"00", "01", "10", "11"}


def test_generate_n_reports_each_sample_with_logprobs(capsys):
    options = "--prompt x --max-tokens 3 --temperature 2 --n 3 --seed 1 --logprobs 2"
    outputs = run_json(capsys, *options.split())["outputs"]
    assert [output["id"] for output in outputs] == ["0/0", "0/1", "0/2"]
    assert all(len(o["logprobs"]) == len(o["tokens"]) > 0 for o in outputs)


def test_generate_stream_prints_the_complete_text(code_output, capsys):
    assert cli.main(["generate", "--stream", *CODE]) == 0
    assert capsys.readouterr().out == code_output["text"] + "\n"


def test_generate_stream_numbers_rows_without_id(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"prompt": "a", "choice": ["x"], "id": null}\n{"prompt": "b", "choice": ["y"]}'
    )
    assert cli.main(["generate", "--stream", "--prompts", str(rows)]) == 0
    assert set(capsys.readouterr().out.splitlines()) == {"[0] 'x'", "[1] 'y'"}


@pytest.mark.parametrize(
    ("grammar", "reason", "status"),
    [
        (True, "stop", 0),
        (True, "length", 1),
        (False, "length", 0),
        (False, "stop_string", 0),
        (False, "error", 1),
        (True, "dead_end", 1),
        (True, "refused", 2),
    ],
)
def test_generate_exit_status(grammar, reason, status):
    """The exit status is 1 for a truncated structured output, but 0 for truncated free text."""
    spec = GrammarSpec.regex("a+") if grammar else None
    rows = [PromptRow(Request(prompt="x", grammar=spec)), PromptRow(Request(prompt="y"))]
    outputs = [Output(id="0", reason=reason), Output(id="1", reason="stop")]
    assert generate.exit_status(rows, outputs) == status


def test_command_prints_usage_and_version(capsys):
    assert cli.main(["generate"]) == 2
    assert "--prompt" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert re.fullmatch(r"graft \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_command_handles_write_errors_and_limited_encodings(tmp_path, monkeypatch, capsys):
    """If the disk is full, graft prints a one-line error and returns exit status 1.

    Characters that stdout cannot encode are printed as escape sequences. The generated text is
    printed even if the trace file cannot be written.
    """
    arguments = ("generate", "--prompt", "x", "--choice", "\u017d,\u017d\u017d")
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert cli.main([*arguments]) == 1
    message = capsys.readouterr().err
    assert "No space left" in message and "Traceback" not in message
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert cli.main([*arguments, "--json"]) == 0
    sys.stdout.seek(0)
    assert json.load(sys.stdout)["outputs"][0]["text"][0] == "\u017d"
    trace = tmp_path / "trace.json"
    trace.symlink_to("/dev/full")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert cli.main([*arguments, "--trace", str(trace)]) == 1
    sys.stdout.seek(0)
    assert sys.stdout.read().startswith("\\u017d")
    message = capsys.readouterr().err
    assert "--trace" in message and "Traceback" not in message


def run_shell(command: str):
    """Run a shell command after replacing GRAFT by ``python -m graft.tools.cli``."""
    script = command.replace("GRAFT", f"{sys.executable} -m graft.tools.cli")
    env = {**os.environ, "GRAFT_DEVICE": "soft"}
    return subprocess.run(["bash", "-c", script], text=True, capture_output=True, env=env)


@pytest.mark.parametrize(
    ("command", "status", "stdout", "stderr"),
    [
        ("GRAFT generate --prompt x --choice yes 2>&-", 0, "yes\n", ""),
        pytest.param(
            "GRAFT generate --prompt x --choice yes 2>/dev/full",
            0,
            "yes\n",
            "",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "{ GRAFT generate --prompt x --choice yes 2>&1 >&3 | true; } 3>&1",
            0,
            "yes\n",
            "",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "GRAFT generate --prompt x --choice yes >&-",
            2,
            "",
            "graft: standard output is closed, so the output cannot be written\n",
            marks=pytest.mark.full,
        ),
        pytest.param(
            "GRAFT generate --prompt x --choice yes >/dev/full",
            1,
            "",
            "graft: [Errno 28] No space left on device: 'standard output'\n",
            marks=pytest.mark.full,
        ),
        pytest.param("GRAFT --help <&- >&- 2>&-", 0, "", "", marks=pytest.mark.full),
    ],
)
def test_command_works_with_closed_and_full_standard_streams(command, status, stdout, stderr):
    """Without standard error, the output is complete. Without standard output, commands fail."""
    done = run_shell(command)
    assert (done.returncode, done.stdout, done.stderr) == (status, stdout, stderr)


@pytest.mark.parametrize(
    ("streams", "has_url"),
    [
        pytest.param("<&- >&- 2>&-", False, marks=pytest.mark.full),
        pytest.param(">/dev/full", False, marks=pytest.mark.full),
        pytest.param("2>&-", True, marks=pytest.mark.full),
    ],
)
def test_server_works_with_closed_and_full_standard_streams(streams, has_url):
    pytest.importorskip("uvicorn", reason="the extra serve is not installed")
    with contextlib.closing(bind_socket("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    done = run_shell(
        f"GRAFT serve --port {port} {streams} & "
        f"for i in {{1..300}}; do sleep 0.1; (: </dev/tcp/127.0.0.1/{port}) 2>/dev/null && break; "
        "done; kill $!; wait $!"
    )
    assert (done.returncode, bool(done.stdout), done.stderr) == (0, has_url, "")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "generate --prompt x",
            "graft: standard output is closed, so the output cannot be written\n",
        ),
        ("serve --model /no/such/model", "graft: /no/such/model is not a folder: "),
    ],
)
def test_command_without_standard_output_fails_if_it_prints_its_result(
    command, message, monkeypatch, capsys
):
    """The server needs no standard output. It refuses the model."""
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(command.split()) == 2
    assert capsys.readouterr().err.startswith(message)


def test_standard_streams_raise_errors_of_stdout_and_ignore_errors_of_stderr(monkeypatch):
    with open("/dev/full", "w") as out, open("/dev/full", "w") as err:
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", err)
        with console.standard_streams() as is_open:
            assert is_open
            print("a message", file=sys.stderr, flush=True)
            with pytest.raises(OSError, match="'standard output'"):
                print("an answer", flush=True)
        assert (sys.stdout, sys.stderr) == (out, err)


def test_interrupt_during_imports_prints_one_line(monkeypatch, capsys):
    """Ctrl-C during the imports, which take most of the startup time, prints no traceback.

    The module of the command and the text for ``--help`` need few imports.
    """

    class Interrupt:
        def find_spec(self, name, *_):
            if name == "graft.tools.console":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "graft.tools.console")
    monkeypatch.setattr(sys, "meta_path", [Interrupt(), *sys.meta_path])
    assert cli.main(["--version"]) == 130
    assert capsys.readouterr().err == "graft: interrupted\n"
    source = (
        "import sys; import graft.tools.cli\n"
        "try: graft.tools.cli.main(['--help'])\n"
        "finally: sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", source]).returncode == 0


@pytest.mark.parametrize("option", ["--max-tokens", "--seed", "--draft-length"])
@pytest.mark.parametrize("digits", [400, 5000])
def test_command_does_not_repeat_long_numbers(option, digits, capsys):
    arguments = ["generate", "--prompt", "x", option, "9" * digits]
    try:
        status = cli.main(arguments)
    except SystemExit as error:
        status = error.code
    last_line = capsys.readouterr().err.splitlines()[-1]
    assert status == 2
    assert len(last_line) < 300 and "9" * 20 in last_line
