"""Defects that other engines shipped in guided decoding, and the test here that rules each out.

``TABLE`` names the defect and the test that would fail if graft had it; what no other file
tests is tested below.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import numpy as np
import pytest
from guide_util import KINDS, NOT_READY, READY, SPECS, Rig, byte_vocabulary, run_work

from graft.grammar import GrammarBackend, GrammarError, GuidedRequest, make_backend
from graft.grammar.statement import GrammarSpec

#: What went wrong elsewhere, and below it the test that would see it here.
TABLE = """
# Host functions in graphs.
records of captured callbacks live until the process ends
    test_lifetime_recapture.py::test_1000_recaptures_leave_nothing
a callback's record is freed while a graph can still run it
    test_lifetime_flight.py::test_launches_keep_what_they_run
a callback is dropped after its first call
    test_hostwork.py::test_host_step_placed_twice_survives_its_function
an exception in a callback is printed and forgotten
    test_hostwork.py::test_a_raising_step_stops_its_replay
work after a failed callback goes on with stale data
    test_hostwork.py::test_replays_in_flight_stand_down
the launching thread holds the GIL in the driver
    test_gil.py::test_no_driver_call_holds_the_gil
the driver waits for a callback that waits for the GIL
    test_gil.py::test_driver_calls_while_a_callback_wants_the_gil
a driver lock is held while callbacks run
    test_gil.py::test_no_deadlock_under_any_lock_model
a callback waits for a thread that keeps the GIL
    test_guide_native.py::test_a_step_runs_while_another_thread_keeps_the_gil
a stuck callback hangs without a word
    test_hostwork.py::test_a_deadline_names_the_running_step
a stuck callback hangs the exit
    test_hostwork.py::test_a_stuck_callback_does_not_block_the_exit
kernels are loaded while a callback is due
    test_gil_deadlock.py::test_a_cell_comes_to_what_follows_from_its_model
# Snapshots and rounds in flight.
two iterations share one buffer of tokens
    test_slots.py::test_ring_never_laps
a replay without a batch runs the last batch again
    test_guide_native.py::test_a_replay_without_a_snapshot_stands_down
a matcher advances twice in a repeated round
    test_guide_native.py::test_a_device_that_counts_replays_differently_is_noticed
a matcher is freed while a replay names it
    test_guide_native.py::test_snapshots_keep_matchers_until_their_replay_retires
a slot's next request meets callbacks of the last one
    test_interleave.py::test_every_interleaving_gives_the_sequential_output
counts by batch position are read by slot
    test_guide_rounds.py::test_rows_equal_a_stock_matcher_fed_from_the_start
graphs of several sizes disagree on a slot's state
    test_engine_requests.py::test_cancel_and_join_at_any_round
preemption loses the grammar's state
    test_guide_rounds.py::test_a_request_goes_on_elsewhere_from_its_tokens
a preempted request resumes with other tokens
    test_engine_overlap.py::test_disturbed_requests_get_the_same
# Masks, drafts and rollback.
each new drafter forgets to roll back
    test_guide_rounds.py::test_rows_equal_a_stock_matcher_fed_from_the_start
rows are filled for drafting and again for verification
    test_guide_rounds.py::test_a_masked_round_fills_at_most_k_plus_one_rows
drafts after a stop id are counted as accepted
    test_verify_chain.py::test_an_accepted_stop_id_ends_the_request_without_a_bonus
a stop id inside drafts cannot be undone
    test_guide_native.py::test_termination_inside_drafts_is_undone_until_committed
a row nobody filled counts as unconstrained
    test_verify_chain.py::test_stamps_of_another_request_or_position_are_not_ready
rows of unconstrained requests are filled and copied
    test_guide_native.py::test_unconstrained_slots_are_free_once_and_cost_nothing
padding rows touch state
    test_verify_chain.py::test_padding_rows_and_unused_entries_are_marked
d2t points beyond the mask
    test_eagle3.py::test_map_entries_outside_the_vocabulary_are_refused
ids beyond the vocabulary are legal
    test_mask_apply.py::test_ids_at_or_above_the_bound_are_illegal_even_with_their_bit_set
a vocabulary that is no multiple of 32
    test_grammar_spec.py::test_legal_ids_are_text_or_stop_ids_whatever_the_size
only one of several stop ids ends a grammar
    test_grammar_spec.py::test_every_stop_id_ends_a_complete_grammar_and_rollback_undoes_it
a draft of zero probability passes rejection sampling
    test_verify_chain.py::test_a_draft_that_its_table_calls_impossible_is_refused_and_counted
# Errors and dead ends.
one request's error leaves later ones unconstrained
    test_guide_native.py::test_an_internal_error_stays_in_its_slot
a refused token is never heard of
    test_guide_rounds.py::test_committed_tokens_the_grammar_refuses_fail_their_slot_alone
no legal token turns logits into NaN and kills the process
    test_sampling_target.py::test_a_row_without_a_legal_token_ends_the_request_and_yields_nothing
a dead end inside drafts leaves the matcher one ahead
    test_guide_native.py::test_dead_ends_at_row_zero_and_inside_drafts
a dead end takes the batch along
    test_dead_ends.py::test_a_dead_end_ends_its_request_alone
no legal token in the drafter's pruned vocabulary
    test_dead_ends.py::test_a_grammar_outside_the_drafters_vocabulary_is_decoded_without_drafts
one slow matcher holds up the whole batch
    test_guide_threads.py::test_late_slots_resume_exactly
a bad grammar fails its whole batch
    test_engine_requests.py::test_bad_grammar_ends_alone
# Compilation.
compilation stalls the batch
    test_grammar_compile.py::test_quick_grammars_never_wait_for_slow_ones
a runaway compilation takes the engine along
    test_grammar_compile.py::test_the_bound_of_time_holds_for_every_backend
a crash while compiling takes the engine along
    test_grammar_compile.py::test_a_process_that_dies_fails_one_grammar
# Reasoning and free text.
the end of reasoning inside an accepted batch is missed
    test_grammar_streams.py::test_markers_are_found_alike_by_scanner_and_search
constraints after free text are dropped silently
    test_llguidance_engine.py::test_free_text_ends_where_the_marker_does
# Grammar libraries.
the library needs torch to be imported
    test_no_torch.py::test_importing_all_of_graft_imports_no_torch
keywords are ignored without a word
    test_grammar_spec.py::test_what_cannot_be_enforced_is_refused_unless_partial
one backend's weakness is held against another
    test_grammar_compile.py::test_the_engines_router_enforces_what_xgrammar_would_ignore
invalid instances pass unmarked
    test_schema_suite.py::test_every_group_is_right_or_refused_by_name
refused tokens print warnings
    test_guide_native.py::test_nothing_is_ever_printed
a refused token breaks the matcher for good
    test_grammar_streams.py::test_native_and_stock_masks_are_equal_at_every_step
masks are wrong after rollbacks
    test_grammar_streams.py::test_masks_after_rollbacks_are_those_of_a_new_matcher
limits end a text in its middle
    test_llguidance_limits.py::test_a_pattern_under_a_long_bound_goes_through
escapes of quotes slip through a class
    test_rewrite.py::test_classes_that_exclude_quotes_or_backslashes_exclude_them
another release's ABI is called
    test_grammar_backends.py::test_llguidance_must_be_the_module_that_python_loaded
a thread pool is made for every batch
    test_guide_threads.py::test_several_threads_make_the_same_rows
combinations are found broken by users
    test_engine_transports.py::test_every_transport_gives_the_same_rounds
"""


def _entries() -> dict[str, str]:
    lines = [line for line in TABLE.strip().split("\n") if not line.startswith("#")]
    return {what: where.strip() for what, where in zip(lines[::2], lines[1::2], strict=True)}


ELSEWHERE = _entries()



@functools.cache
def _tests(name: str) -> dict[str, ast.FunctionDef]:
    (path,) = Path(__file__).parents[1].rglob(name)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("defect", ELSEWHERE)
def test_the_test_that_rules_it_out_exists_and_checks_something(defect):
    """The named test is there, states its contract, checks, and is not skipped outright."""
    name, _, function = ELSEWHERE[defect].partition("::")
    test = _tests(name)[function]
    assert ast.get_docstring(test)
    helpers = {*_tests(name)} - {function}
    checks = [
        node for node in ast.walk(test)
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.Attribute) and node.attr in ("raises", "assert_array_equal"))
        or (isinstance(node, ast.Name) and (node.id in helpers or node.id.startswith("check")))
    ]  # fmt: skip
    assert checks
    marks = {ast.unparse(mark).split("(")[0] for mark in test.decorator_list}
    assert not marks & {"pytest.mark.skip", "pytest.mark.xfail"}


@pytest.fixture(scope="module", params=["xgrammar", "llguidance"])
def backend(request) -> GrammarBackend:
    return make_backend(request.param, byte_vocabulary())


both = pytest.mark.parametrize("kind", KINDS)


@both
def test_draft_lengths_may_change_every_round(backend, kind):
    """From three drafts to none and back: what a longer round advanced is always undone."""
    rig = Rig(backend, kind, k=3)
    request = rig.request("regex")
    rig.decoder.publish(1, [request])
    rig.run(rig.open)
    history: list[int] = []
    for replay, length in enumerate([3, 0, 2, 0, 0, 3, 1, 3, 0], start=1):
        rig.committed(replay, ord("c"))  # every draft was refused
        history.append(ord("c"))
        rig.run(rig.commit)
        rig.expect_row(history)
        for j, work in enumerate(rig.drafts, start=1):
            rig.drafted(replay, *b"abc"[: min(j, length)])
            run_work(work)
            if j <= length:
                rig.expect_row([*history, *b"abc"[:j]], j=j)
        rig.drafted(replay, *b"abc"[:length])
        rig.decoder.retire(replay)
        rig.decoder.publish(replay + 1, [request])
        rig.run(rig.open)
        ready = [row[0] == READY for row in rig.states()]
        assert ready == [j <= length for j in range(4)]
    assert rig.decoder.counters()["desyncs"] == 0


@both
@pytest.mark.parametrize("stops", [(256, 256), (256, 257), (257, 256), (257, ord("c"))])
def test_a_stop_id_as_the_first_draft_and_whatever_follows_it(backend, kind, stops):
    """No row is ready after a drafted stop id; it can be refused, drafted again, and accepted."""
    rig = Rig(backend, kind, k=2)
    request = rig.request("regex")
    rig.decoder.publish(1, [request])
    rig.run(rig.open)
    for replay in (1, 2, 3):
        rig.committed(replay, ord("c"))
        rig.run(rig.commit)
        rig.expect_row([ord("c")] * replay)
        rig.drafted(replay, stops[0])
        rig.run(rig.drafts[0])
        rig.drafted(replay, *stops)
        rig.decoder.retire(replay)
        rig.decoder.publish(replay + 1, [request])
        rig.run(rig.open)
        assert [row[0] for row in rig.states()][1:] == [NOT_READY, NOT_READY]
    rig.committed(4, stops[0])
    rig.run(rig.commit)
    assert rig.decoder.counters()["committed_tokens"] == 4
    assert rig.decoder.counters()["terminations"] == 1
    assert rig.decoder.counters()["desyncs"] == rig.decoder.counters()["errors"] == 0


@both
def test_batch_order_is_not_slot_order(backend, kind):
    """Slots in any order, an unconstrained one among them, each with its own count of tokens."""
    rig = Rig(backend, kind, k=2, slots=3)
    first, last = rig.request("regex", slot=2, epoch=1), rig.request("choice", slot=0, epoch=3)
    free = GuidedRequest(1, 2, None, 7)
    rig.decoder.publish(1, [first, free, last])
    rig.run(rig.open)
    rig.committed(1, *b"ab", slot=2)
    rig.committed(1, ord("Q"), slot=1)
    rig.committed(1, *b"aba", slot=0)
    rig.run(rig.commit)
    rig.expect_row(list(b"ab"), slot=2)
    rig.expect_row(list(b"aba"), spec="choice", slot=0)
    rig.drafted(1, ord("c"), slot=2)
    rig.drafted(1, ord("b"), slot=0)
    rig.run(rig.drafts[0])
    rig.expect_row(list(b"abc"), j=1, slot=2)
    rig.decoder.publish(2, [last, first])  # the unconstrained one has left, the others changed
    rig.run(rig.open)
    rig.committed(2, ord("c"), slot=2)
    rig.committed(2, ord("b"), slot=0)
    rig.run(rig.commit)
    rig.expect_row(list(b"abc"), slot=2)
    rig.expect_row(list(b"abab"), spec="choice", slot=0)


@both
def test_a_marker_that_ends_inside_the_drafts(backend, kind):
    """Rows before the marker's end are free text, the row after it is the grammar's first."""
    rig = Rig(backend, kind, k=4)
    request = rig.request("text, then choice")
    rig.decoder.publish(1, [request])
    rig.run(rig.open)
    rig.committed(1, ord("x"))
    rig.run(rig.commit)
    drafts = [*b'a":', ord("a")]
    for j, work in enumerate(rig.drafts, start=1):
        rig.drafted(1, *drafts[:j])
        run_work(work)
        rig.expect_row([ord("x"), *drafts[:j]], j=j, spec="text, then choice")
    rig.drafted(1, *drafts)
    rig.decoder.publish(2, [request])
    rig.run(rig.open)
    rig.expect_row([ord("x"), *drafts], j=4, spec="text, then choice")
    rig.committed(2, *b'a"')  # the marker's last byte was refused
    rig.run(rig.commit)
    rig.expect_row(list(b'xa"'), spec="text, then choice")


@both
def test_a_published_snapshot_is_a_copy(backend, kind):
    """What the host does to its list after publishing changes no replay."""
    rig = Rig(backend, kind, slots=2)
    requests = [rig.request("regex"), rig.request("choice", slot=1, epoch=2)]
    rig.decoder.publish(1, requests)
    requests.clear()
    rig.run(rig.open)
    rig.expect_row([], slot=0)
    rig.expect_row([], spec="choice", slot=1)


def test_rows_that_are_not_contiguous_are_refused(backend):
    """The libraries ignore strides: a row with gaps must not be written as if it had none."""
    matcher = backend.matcher(backend.compile(SPECS["regex"]))
    words = backend.vocabulary.words
    memory = np.full(2 * words, 7, np.int32)
    with pytest.raises((TypeError, ValueError, GrammarError)):
        matcher.fill(memory[::2])
    assert (memory == 7).all()
    with pytest.raises((TypeError, ValueError, RuntimeError, GrammarError)):
        matcher.fill(memory[: words - 1])
    assert (memory == 7).all()


def test_ids_out_of_range_and_after_the_end_change_nothing(backend, capfd):
    """-1, the size, 2**31 and a token after the stop id are refused, silently, without a trace."""
    matcher = backend.matcher(backend.compile(GrammarSpec.regex("ab")))
    for token in (-1, 270, 2**31, -(2**31) - 1, 2**40):
        assert not matcher.accept(token)
    assert matcher.accept(ord("a")) and matcher.accept(ord("b")) and matcher.accept(256)
    assert not matcher.accept(256) and not matcher.accept(ord("a"))
    matcher.rollback(1)
    assert matcher.legal().tolist() == [256, 257]
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""
