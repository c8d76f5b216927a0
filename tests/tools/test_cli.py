"""The graft command: requests from options and files, refusals, generation with the demo model."""

from __future__ import annotations

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
from graft.tools import cli, generate
from graft.tools.demo_model import demo_model
from graft.tools.prompt_rows import Asked, read_requests

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
UNIQUE = {"type": "array", "uniqueItems": True}


def requests_of(*arguments: str):
    """Requests that a command line asks for, without running them."""
    return read_requests(cli.parser().parse_args(["generate", *arguments]))


def run_json(capsys, *arguments: str, status: int = 0):
    """Parsed JSON of ``graft generate --json``, which ends with this status."""
    assert cli.main(["generate", "--json", *arguments]) == status
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def requests_of_rows(tmp_path):
    """Requests that a file of rows asks for, each an object or the line's text."""

    def read(*rows, flags=()):
        (tmp_path / "rows.jsonl").write_text(
            "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
        )
        return requests_of("--prompts", str(tmp_path / "rows.jsonl"), *flags)

    return read


def test_options_become_a_request(tmp_path):
    """Every sampling option of the command line reaches the request."""
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    (one,) = requests_of(
        "--prompt",
        "hello",
        "--schema",
        str(tmp_path / "s.json"),
        "--max-tokens",
        "9",
        "--temperature",
        "0.5",
        "--top-k",
        "7",
        "--top-p",
        "0.9",
        "--min-p",
        "0.1",
        "--seed",
        "3",
        "--verify",
        "coupled",
        "--n",
        "2",
        "--logit-bias",
        "7=-1.5",
        "--logit-bias",
        "8=2",
        "--presence-penalty",
        "1",
        "--frequency-penalty",
        "0.5",
        "--repetition-penalty",
        "1.2",
        "--min-tokens",
        "4",
        "--logprobs",
        "5",
    )
    request = one.request
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


def test_rows_of_a_file_win_over_options_and_get_seeds_of_their_own(requests_of_rows):
    """A row's own grammar and sampling replace the options'; other rows keep the options'."""
    one, other = requests_of_rows(
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
    for asked, grammar, *expected in (
        (one, GrammarSpec.regex("[0-9]+"), 0.0, 10, "0", {}),
        (other, GrammarSpec.choice(["x", "y"]), 1.5, 11, "mine", {5: 1, "no": 2}),
    ):
        request = asked.request
        assert request.grammar == grammar
        assert [request.temperature, request.seed, request.id, request.logit_bias] == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a", "tempreature": 1}', "line 1: unknown tempreature"),
        ('{"prompt": ', "line 1: "),
        ("[1, 2]", "line 1: a row must be an object"),
        ("", "holds no prompt"),
    ],
)
def test_a_wrong_row_is_refused_with_its_line(requests_of_rows, line, words):
    """What is wrong in a file of prompts is named by its line, before a model is opened."""
    with pytest.raises(OptionError, match=words):
        requests_of_rows(line)


def test_forced_text_is_drafted(tmp_path, capsys):
    """The flag reaches the engine: the same text in fewer rounds."""
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    asked = ["--prompt", "Olga is 42.", "--schema", str(tmp_path / "s.json"), "--no-speculation"]
    found = [run_json(capsys, *asked, *flags) for flags in ([], ["--forced-drafts"])]
    assert len({figures["outputs"][0]["text"] for figures in found}) == 1
    assert found[0]["rounds"] > found[1]["rounds"] > 0


def test_a_row_may_be_partial_or_ask_for_nothing(requests_of_rows):
    """With --partial what cannot be enforced is taken; json_object false constrains nothing."""
    rows = {"prompt": "a", "schema": UNIQUE}, {"prompt": "p", "json_object": False}
    allowed, free = requests_of_rows(*rows, flags=["--partial"])
    assert allowed.refusal is None and allowed.request.grammar.partial
    assert free.refusal is None and free.request.grammar is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"regex": "a", "choice": ["a"]}, "regex and choice"),
        ({"choice": "a,,b"}, "choice option: is empty"),
        ({"choice": 3}, "choice must be a list"),
        ({"regex": "a", "backend": "telepathy"}, "backend must be one of"),
        ({"id": 5}, "id must be text, got 5"),
        ({"id": True}, "id must be text, got True"),
        ({"id": "first"}, "id 'first' is that of line 1"),
        ({"json_object": "no"}, "json_object must be true or false"),
        ({"variables": 3}, "variables must be an object"),
        ({"variables": {"messages": []}}, "variables: messages has another meaning"),
        ({"raw": True, "tools": []}, "a raw prompt has no chat template"),
        ({"schema": UNIQUE}, "#: uniqueItems"),
        ({"schema": False}, "allows no output"),
        ({"structural_tag": []}, "must be an object, not list"),
        ({"structural_tag": {"tags": 3}}, "must be lists"),
        (
            {"structural_tag": {"tags": [{"begin": "<"}], "triggers": ["<"]}},
            "needs begin, schema and end",
        ),
        ({"structural_tag": {"tags": [], "triggers": [], "x": 1}}, "unknown x"),
        ({"structural_tag": {"tags": [], "triggers": []}}, "at least one"),
    ],
)
def test_a_wrong_row_is_refused_alone_by_its_line(requests_of_rows, row, words):
    """What a row states wrongly costs that row; the others keep ids that nobody else has."""
    first, bad, zero, free = requests_of_rows(
        *({"prompt": "a"} | one for one in ({"id": "first"}, row, {"id": "0"}, {"id": None}))
    )
    assert bad.refusal is not None and bad.refusal.startswith("line 2: ") and words in bad.refusal
    assert {first.refusal, zero.refusal, free.refusal} == {None}
    assert [first.request.id, zero.request.id] == ["first", "0"]
    assert len({one.request.id for one in (first, bad, zero, free)}) == 4


def test_rows_end_where_json_lines_end(tmp_path, monkeypatch):
    """A line separator of Unicode within a string ends no row; `-` reads standard input."""
    text = json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + '\r\n\n{"prompt": "d"}'
    rows = tmp_path / "rows.jsonl"
    rows.write_bytes(text.encode())
    assert [one.request.prompt for one in requests_of("--prompts", str(rows))] == [
        "a\u2028b\x85c",
        "d",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert len(requests_of("--prompts", "-")) == 2


def test_a_prompt_can_be_raw_and_template_variables_reach_the_template(requests_of_rows):
    """A raw prompt is the tokenizer's tokens; tools and variables make the template's."""
    seen = {}
    engine = SimpleNamespace(
        tokenizer=SimpleNamespace(
            encode=lambda text: [len(text)],
            chat=lambda messages, **given: seen.update(given, m=messages) or [7],
        )
    )
    (raw,) = requests_of("--prompt", "four", "--raw")
    assert raw.for_engine(engine).tokens == [4] and raw.for_engine(engine).prompt is None
    (one,) = requests_of_rows(
        {"prompt": "x", "tools": [{"name": "f"}], "schema": SCHEMA, "variables": {"day": 3}}
    )
    assert one.for_engine(engine).tokens == [7]
    assert seen == {
        "m": [{"role": "user", "content": "x"}],
        "tools": [{"name": "f"}],
        "day": 3,
        "schema": SCHEMA,
    }
    (plain,) = requests_of("--prompt", "x")
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
def test_every_way_to_state_a_constraint(tmp_path, requests_of_rows, flag, text, grammar):
    """Each flag, and the key of that name in a row, makes its grammar; --after goes with each."""
    (tmp_path / "g").write_text(text or "")
    values = {"--json-object": [], "--regex": ["a+"], "--choice": ["x,y"]}
    stated = (flag, *values.get(flag, [str(tmp_path / "g")]))
    asked = ("--prompt", "p", *stated)
    assert requests_of(*asked)[0].request.grammar == grammar
    (after,) = requests_of(*asked, "--after", "</think>")
    assert after.request.grammar == grammar.after("</think>")

    key = flag[2:].replace("-", "_")
    value = {"regex": "a+", "choice": ["x", "y"], "json_object": True}.get(key, text)
    rows = ({"prompt": "p", key: value}, {"prompt": "p", key: value, "after": 7}, {"prompt": "p"})
    first, second, third = requests_of_rows(*rows, flags=("--after", "###"))
    assert first.request.grammar == grammar.after("###")
    assert second.request.grammar == grammar.after(7)
    assert third.request.grammar is None
    *_, third = requests_of_rows(*rows, flags=stated)
    assert third.request.grammar == grammar


@pytest.mark.parametrize(
    ("flags", "stated", "kind"),
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
def test_how_json_is_written_is_said_by_flags_and_by_rows(requests_of_rows, flags, stated, kind):
    """White space, formats and the order of keys reach the grammar; a row's own choice wins."""
    value, make, given = {
        "schema": (SCHEMA, GrammarSpec.json_schema, [SCHEMA]),
        "json_object": (True, GrammarSpec.json_object, []),
        "structural_tag": (TAGS, GrammarSpec.structural_tag, [[TAG], ["<f"]]),
    }[kind]
    plain = {"prompt": "p", kind: value}
    said = [
        one.request.grammar
        for one in requests_of_rows(plain, {"prompt": "p", "regex": "a+"}, flags=flags)
    ]
    assert said == [make(*given, **stated), GrammarSpec.regex("a+")]
    assert requests_of_rows(plain | stated)[0].request.grammar == said[0]


def test_a_row_names_its_backend(requests_of_rows):
    """A row's backend goes with its grammar: routed for a schema, as it stands for the others."""
    schema, lark, regex = [
        one.request.grammar
        for one in requests_of_rows(
            {"prompt": "p", "schema": SCHEMA, "backend": "llguidance"},
            {"prompt": "p", "lark": LARK, "backend": "llguidance"},
            {"prompt": "p", "regex": "a+", "backend": "auto"},
        )
    ]
    assert schema == GrammarSpec.json_schema(SCHEMA, backend="llguidance")
    assert lark.backend == "llguidance" and regex == GrammarSpec.regex("a+")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--regex", "a(b"], r"--regex a\(b: regex: .*unclosed group"),
        (["--choice", "a,,b"], "--choice a,,b: choice option: is empty"),
        (["--lark", "FILE"], r"--lark \S+: lark: line 1, column 4"),
        (["--ebnf", "FILE"], r"--ebnf \S+: ebnf: "),
        (["--schema", "FILE"], r"--schema \S+: JSON schema: the text is not JSON"),
        (["--structural-tag", "FILE"], r"--structural-tag \S+: structural tag: .* not JSON"),
        (["--structural-tag", "/no/such/file"], "--structural-tag /no/such/file: "),
        (["--json-object", "--after", ""], "--json-object --after : marker: is empty"),
        (["--regex", "a", "--key-order", "any"], "--regex a --key-order any: key_order goes with"),
        (["--key-order", "any"], "--key-order any: key_order goes with a schema"),
        (
            ["--json-object", "--whitespace", "none"],
            "--whitespace none: whitespace 'none' is unknown",
        ),
        (
            ["--lark", "FILE", "--whitespace", "2"],
            "--whitespace 2: whitespace goes with a schema or",
        ),
        (
            ["--regex", "a", "--assert-formats"],
            "--assert-formats: assert_formats goes with a schema",
        ),
        (["--partial"], "--partial goes with --schema"),
        (["--regex", "a", "--partial"], "--partial goes with --schema"),
        (["--after", "###"], "--after ###: after names the end of free text"),
    ],
)
def test_a_flag_that_states_no_grammar_is_named_with_its_value(tmp_path, arguments, said):
    """What cannot be a grammar is refused by the flag and its value, before a model is opened."""
    (tmp_path / "bad").write_text("no grammar: (")
    arguments = [str(tmp_path / "bad") if a == "FILE" else a for a in arguments]
    with pytest.raises(OptionError, match=said):
        requests_of("--prompt", "x", *arguments)


def test_output_after_a_marker_is_checked_without_the_free_text():
    """What stands before the marker does not decide over validity; without it nobody can tell."""
    (asked,) = requests_of("--prompt", "x", "--choice", "a,b", "--after", "#")
    assert [asked.is_valid(text) for text in ("so#a", "so#c", "so")] == [True, False, None]


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
        "--stop a --regex [a-z]+",
        "--json --stream",
        "--logprobs 2",
        "--no-speculation --draft-tree 2x1",
        "--max-length 1000000",
        "--verify traversal",
        f"--model {demo_model()[0]} --draft json:loads",
        f"--model {demo_model()[0]} --draft :",
    ],
)
def test_refusals_are_one_line_and_exit_status_2(arguments, capsys):
    """What cannot be served ends with exit status 2 and a sentence, never with a traceback."""
    assert cli.main(["generate", "--prompt", "x", *arguments.split()]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("graft: ") and said.err.count("\n") == 1


def test_a_schema_guides_the_demo_model(tmp_path, capsys):
    """The output of a schema request is valid, finished and counted; the device is named."""
    (tmp_path / "s.json").write_text(json.dumps(SCHEMA))
    said = run_json(
        capsys,
        "--schema",
        str(tmp_path / "s.json"),
        "--prompt",
        "name: Olga Novak; age: 42\nReturn JSON.",
    )
    (output,) = said["outputs"]
    assert set(json.loads(output["text"])) == {"name", "age"}
    assert output["valid"] is True and output["finished"] and output["reason"] == "stop"
    assert said["tokens"] == len(output["tokens"])
    assert said["tokens_per_round"] == pytest.approx(said["tokens"] / output["rounds"])
    assert said["device"] and said["tokens_per_second"] > 0


def test_only_what_is_not_enforced_in_full_is_said_to_be(tmp_path, capsys):
    """--partial takes a whole schema too, and marks the output of another one alone."""
    rows = [{"prompt": "a", "schema": one, "id": str(i)} for i, one in enumerate((SCHEMA, UNIQUE))]
    (tmp_path / "rows").write_text("\n".join(map(json.dumps, rows)))
    cli.main(["generate", "--prompts", str(tmp_path / "rows"), "--partial", "--max-tokens", "4"])
    said = [line for line in capsys.readouterr().err.split("\n") if "not enforced" in line]
    assert len(said) == 1 and said[0].startswith("graft: request 1, ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--draft-length", "x"], "'x' is no whole number and not auto"),
        (["--logit-bias", "5"], "'5' is no bias, such as 5=-2.5"),
    ],
)
def test_what_no_option_can_say_is_said_in_words(arguments, said, capsys):
    """An option's value that does not parse is named as a user knows it."""
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", "--prompt", "x", *arguments])
    assert capsys.readouterr().err.endswith(f"{said}\n")


def test_drafts_as_many_as_pay(capsys):
    """The length goes by round and is counted; the greedy output is that of any other length."""
    usual, auto = (run_json(capsys, *CODE, "--draft-length", length) for length in ("2", "auto"))
    assert auto["outputs"][0]["tokens"] == usual["outputs"][0]["tokens"]
    assert usual["rounds_by_length"] == {"2": usual["rounds"]}
    assert sum(auto["rounds_by_length"].values()) == auto["rounds"]
    assert auto["rounds_by_length"].keys() <= {"0", "1", "3", "7"}


CODE = ["--prompt", "code: QF-5702\nGive only the code.", "--regex", "[A-Z]{2}-[0-9]{4}"]


@pytest.mark.parametrize(
    "options",
    [
        "--no-speculation",
        "--no-draft-mask",
        "--draft dflash",
        "--draft-tree 0,1,0.0",
    ],
)
def test_how_drafts_are_made_does_not_change_greedy_output(options, capsys):
    """Without speculation, with unmasked drafts, another drafter or trees: the same tokens."""
    usual, other = (run_json(capsys, *CODE, *more)["outputs"][0] for more in ([], options.split()))
    assert other["tokens"] == usual["tokens"] and other["valid"] is True


def test_rows_run_together_and_each_obeys_its_own_grammar(tmp_path, capsys):
    """A file of prompts with different grammars gives outputs in order, each valid."""
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
    said = run_json(capsys, "--prompts", str(rows), "--backend", "auto")
    assert [output["id"] for output in said["outputs"]] == ["0", "1", "2", "3", "4"]
    assert [output["valid"] for output in said["outputs"]] == [True, True, True, None, None]
    assert re.fullmatch(r"[0-9]{1,2}\+[0-9]{1,2}", said["outputs"][4]["text"])
    assert said["outputs"][3]["text"] in {"00", "01", "10", "11"}


def test_samples_of_a_prompt_have_rows_of_their_own(capsys):
    """With --n each completion has its id, and with --logprobs its tokens' log probabilities."""
    said = run_json(
        capsys,
        "--prompt",
        "x",
        "--max-tokens",
        "3",
        "--temperature",
        "2",
        "--n",
        "3",
        "--seed",
        "1",
        "--logprobs",
        "2",
    )
    assert [output["id"] for output in said["outputs"]] == ["0/0", "0/1", "0/2"]
    assert all(len(o["logprobs"]) == len(o["tokens"]) > 0 for o in said["outputs"])


def test_streamed_text_is_the_whole_text(capsys):
    """What --stream prints piece by piece is what comes without it."""
    assert cli.main(["generate", *CODE]) == 0
    whole = capsys.readouterr().out
    assert cli.main(["generate", "--stream", *CODE]) == 0
    assert capsys.readouterr().out == whole


def test_ids_need_not_be_given_to_stream(tmp_path, capsys):
    """A row without an id, or with a null one, streams under a number."""
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
def test_the_exit_status_tells_what_is_not_whole(grammar, reason, status):
    """A guided output that was cut is no success; free text ends where it was told to."""
    asked = Asked(Request(prompt="x", grammar=GrammarSpec.regex("a+") if grammar else None))
    outputs = [Output(id="0", reason=reason), Output(id="1", reason="stop")]
    assert generate.exit_status([asked, Asked(Request(prompt="y"))], outputs) == status


def run_program(*arguments: str, **options):
    """`python -m graft.tools.cli` in a process of its own."""
    env = {**os.environ, "GRAFT_DEVICE": "soft"} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, "-m", "graft.tools.cli", *arguments],
        text=True,
        stderr=subprocess.PIPE,
        env=env,
        timeout=240,
        **options,
    )


def test_the_command_runs_as_a_program():
    """Wrong options exit with 2 and argparse's usage; the version is the package's."""
    done = run_program("generate")
    assert done.returncode == 2 and "--prompt" in done.stderr
    done = run_program("--version", stdout=subprocess.PIPE)
    assert re.fullmatch(r"graft \d+\.\d+\.\d+\S*\n", done.stdout)


def test_output_that_cannot_be_written_is_said_and_none_is_lost_to_an_encoding(
    tmp_path, monkeypatch
):
    """A full disk ends with one sentence and status 1; what Latin-1 lacks is escaped; a trace that
    cannot be written costs no text."""
    asked = ("generate", "--prompt", "x", "--choice", "\u017d,\u017d\u017d")
    with open("/dev/full", "w") as full:
        done = run_program(*asked, stdout=full)
    assert done.returncode == 1 and "No space left" in done.stderr
    assert "Traceback" not in done.stderr
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert cli.main([*asked, "--json"]) == 0
    sys.stdout.seek(0)
    assert json.load(sys.stdout)["outputs"][0]["text"][0] == "\u017d"
    latin = {"stdout": subprocess.PIPE, "env": {"PYTHONIOENCODING": "latin-1"}}
    trace = tmp_path / "trace.json"
    trace.symlink_to("/dev/full")
    done = run_program(*asked, "--trace", str(trace), **latin)
    assert done.returncode == 1 and done.stdout.startswith("\\u017d")
    assert "--trace" in done.stderr and "Traceback" not in done.stderr
