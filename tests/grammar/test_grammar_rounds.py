"""The round benchmark replays the same rounds for everyone, counts their fills and checks rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from graft.grammar import make_backend
from graft.tools import grammar_rounds
from graft.tools.grammar_rounds import Match, load, measure
from graft.tools.rounds_graft import Graft, GraftInGraph
from graft.tools.rounds_streams import documents, record

pytest.importorskip("llguidance")

K = 3
STRING = {"type": "string"}
ROWS = [
    {"id": name, "schema": {"type": "object", "properties": {name: STRING, "n": {}},
                            "required": [name], "additionalProperties": STRING},
     "valid": [{name: "a word or two", "n": [1, 2, {"k": None}]}], "invalid": []}
    for name in ("alpha", "beta", "gamma")
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three schemas with an instance each, and a tokenizer of single bytes with an end token."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({char: i for i, char in enumerate(alphabet)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    path = tmp_path_factory.mktemp("rounds")
    made.save(str(path / "tokenizer.json"))
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (path / "rows.jsonl").write_text(lines, encoding="utf-8")
    return path


@pytest.mark.parametrize("name", ["xgrammar", "llguidance"])
def test_every_subject_makes_the_rows_of_a_forward_matcher(folder, name):
    """All subjects' rows are equal, or a forward-only matcher finds graft's right."""
    tokenizer, vocabulary = load(folder / "tokenizer.json")
    backend = make_backend(name, vocabulary)
    found = list(documents(folder, backend, tokenizer, count=9, shortest=8, seed=0))
    assert sorted(json.loads(d.compiled.spec.text)["required"][0] for d in found) == [
        "alpha", "beta", "gamma",
    ]  # fmt: skip
    rng = np.random.default_rng(3)
    episodes = [
        record(found, slots=4, rounds=5, draft_length=K, wrong=0.4, rng=rng) for _ in range(3)
    ]
    stock = [make(backend, 4, K) for make in grammar_rounds.STOCK[name]]
    subjects = [Graft(backend, 4, K), GraftInGraph(backend, 4, K, threads=2), *stock]
    match = Match(subjects, backend, name)
    figures = measure(subjects, episodes, match, math.inf, grammar_rounds.tqdm(disable=True))
    assert match.rows > 200
    assert match.wrong["graft"] == match.wrong["graft, in a graph"] == 0
    # Each of the K + 1 rows once, against the first K of them twice; the rows that a last round
    # shares with a round that is not played any more are theirs to come.
    moves = [move for e in episodes for moves in e.rounds[1:] for move in moves]
    plain = [m for m in moves if vocabulary.stop_ids[0] not in (*m.tested, *m.tokens, *m.drafts)]
    assert len(plain) > len(moves) / 2
    edge = sum(len(e.rounds[-1]) for e in episodes)
    for subject in stock:
        theirs = figures[subject.name]["fills"]
        assert figures["graft"]["fills"] <= theirs * (K + 1) / (2 * K + 1) + edge
        assert theirs >= len(plain) * (2 * K + 1)
    assert figures["graft"]["fills"] == figures["graft, in a graph"]["fills"]
    for subject in subjects:
        subject.close()


def test_a_subject_that_has_taken_its_time_sits_out(folder):
    """Who has used up the seconds plays no further round, and keeps the rounds it has played."""
    tokenizer, vocabulary = load(folder / "tokenizer.json")
    backend = make_backend("xgrammar", vocabulary)
    found = list(documents(folder, backend, tokenizer, count=3, shortest=8, seed=0))
    rng = np.random.default_rng(0)
    episodes = [record(found, slots=2, rounds=4, draft_length=K, wrong=0.5, rng=rng)] * 2
    subjects = [make(backend, 2, K) for make in grammar_rounds.STOCK["xgrammar"]]
    figures = measure(subjects, episodes, None, 0.0, grammar_rounds.tqdm(disable=True))
    assert [len(figures[subject.name]["ns"]) for subject in subjects] == [1, 1]


def test_moves_follow_the_document(folder):
    """Committed tokens are the document's, drafts are accepted exactly as far as they are too."""
    tokenizer, vocabulary = load(folder / "tokenizer.json")
    backend = make_backend("xgrammar", vocabulary)
    found = list(documents(folder, backend, tokenizer, count=3, shortest=8, seed=0))
    rng = np.random.default_rng(0)
    episode = record(found, slots=8, rounds=6, draft_length=K, wrong=0.5, rng=rng)
    done = [list(prefix) for prefix in episode.prefixes]
    accepted = 0
    for moves in episode.rounds:
        for move in moves:
            tokens = done[move.slot]
            tokens += move.tokens
            truth = episode.documents[move.slot].tokens
            assert tuple(tokens) == truth[: len(tokens)]
            assert move.tokens[: move.accepted] == move.tested[: move.accepted]
            if move.accepted < len(move.tested):
                assert move.tested[move.accepted] != move.tokens[move.accepted]
            accepted += move.accepted
    assert 0 < accepted < 8 * 6 * K


def test_the_tool_reports_bars_and_refuses_nonsense(folder, tmp_path, capsys):
    """Fills, times beside an idle and a busy GIL, and bars reach table and JSON."""
    report = tmp_path / "out.json"
    arguments = [str(folder), "--tokenizer", str(folder / "tokenizer.json")]
    assert grammar_rounds.main([*arguments, "--slots", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err
    code = grammar_rounds.main([
        *arguments, "--backends", "llguidance", "--slots", "3", "--rounds", "2", "--episodes", "2",
        "--busy-episodes", "1", "--shortest", "8", "--documents", "3", "--json", str(report),
    ])  # fmt: skip
    assert code == 0
    found = json.loads(report.read_text())["backends"]["llguidance"]
    assert set(found["holds"]) == {"fills", "time", "busy_p99"}
    assert set(found["ratios"]) == {
        "fills", "time", "busy_p99", "busy_p99_plain", "time_in_graph",
    }  # fmt: skip
    assert found["idle"]["graft"]["rounds"] == 4
    assert found["busy"]["graft, in a graph"]["rounds"] == 2
    assert "graft over the faster stock way" in capsys.readouterr().out
