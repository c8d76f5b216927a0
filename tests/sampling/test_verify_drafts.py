"""Tests of `verify_drafts` and `DraftVerifier`: verification of drafts given as plain arrays."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import reference_round as ref
from table_model import chi_square_p

import graft.sampling.arrays
from graft.cudagraph import Graph, OptionError, ShapeError, StreamLane
from graft.sampling import DraftVerifier, verify_drafts

MODES = {"rejection": ref.REJECTION, "per_token": ref.PER_TOKEN, "coupled": ref.COUPLED}
both_shapes = pytest.mark.usefixtures("row_shape")
sampled_modes = pytest.mark.parametrize("mode", MODES)


@pytest.fixture(params=[(1, 1), (64, 3)], ids=["block1", "block64"])
def row_shape(request, monkeypatch):
    """Threads of a block and blocks of a row: as on the soft device, or several."""
    block, parts = request.param
    monkeypatch.setattr(graft.sampling.arrays, "row_block", lambda device: block)
    monkeypatch.setattr(graft.sampling.arrays, "row_parts", lambda device, columns: parts)


def softmax(logits):
    exponentials = np.exp(logits.astype(np.float64))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def random_inputs(rng, batch, drafts, vocab):
    """Return logits with illegal tokens, q, and drafts from q that end early in some sequences."""
    logits = rng.normal(0, 1.5, (batch, drafts + 1, vocab)).astype(np.float32)
    q = softmax(logits[:, :drafts] + rng.normal(0, 0.7, (batch, drafts, vocab)))
    logits[rng.random(logits.shape) < 0.2] = -np.inf
    logits[..., 0] = 0.0
    ids = np.full((batch, drafts), -1)
    for b in range(batch):
        for j in range(rng.integers(drafts + 1)):
            ids[b, j] = rng.choice(vocab, p=q[b, j])
    return logits, ids, q.astype(np.float32)


def greedy_tokens(logits, drafts):
    """Return the tokens of one sequence in mode "greedy"."""
    tokens = []
    for j, row in enumerate(logits):
        tokens.append(int(np.flatnonzero(row == row.max())[0]))
        if j == len(drafts) or drafts[j] != tokens[-1]:
            return tokens
    raise AssertionError


@both_shapes
def test_verify_drafts_accepts_argmax_tokens_in_greedy_mode(device):
    rng = np.random.default_rng(3)
    accepted = 0
    for _ in range(3):
        logits, drafts, q = random_inputs(rng, 8, 4, 37)
        logits = np.round(logits)  # many equal logits
        best = logits[:, :4].argmax(axis=-1)
        drafts = np.where((rng.random(drafts.shape) < 0.8) & (drafts >= 0), best, drafts)
        tokens = verify_drafts(logits, drafts, q, mode="greedy")
        assert tokens == [greedy_tokens(*row) for row in zip(logits, drafts, strict=True)]
        accepted += sum(map(len, tokens)) - len(tokens)
    assert accepted > 12


@both_shapes
@sampled_modes
@pytest.mark.parametrize("has_q", [True, False], ids=["q", "no q"])
@pytest.mark.full(
    "block1-q-per_token",
    "block1-no q-rejection",
    "block1-no q-coupled",
    "block64-q-rejection",
    "block64-q-coupled",
    "block64-no q-per_token",
)
def test_verify_drafts_makes_choices_of_reference_round_for_same_seeds(device, mode, has_q):
    """The reference is the oracle of the kernels that the engine's rounds use."""
    rng = np.random.default_rng(5)
    filters = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
    accepted = 0
    for _ in range(5):
        logits, drafts, q = random_inputs(rng, 6, 3, 41)
        seeds = rng.integers(0, 2**63, 6)
        positions = rng.integers(1, 500, 6)
        tokens = verify_drafts(
            logits,
            drafts,
            q if has_q else None,
            mode=mode,
            seeds=seeds.astype(np.uint64),
            positions=positions,
            **filters,
        )
        for b in range(6):
            slot = ref.Slot(
                n=int(positions[b]) - 1,
                tree=ref.chain(0),
                limit=10**6,
                seed=int(seeds[b]),
                filter=ref.Filter(**filters),
                verify=MODES[mode],
            )
            kind = ref.DENSE if has_q and mode != "coupled" else ref.POINT
            for j, token in enumerate(drafts[b][drafts[b] >= 0].tolist()):
                ref.keep(slot, token, kind, q[b, j].astype(np.float64))
            free = [ref.MaskRow(ref.FREE, slot.epoch, 0, detail=1)] * 4
            outcome = ref.verify(slot, logits[b], free, 41)
            assert tuple(tokens[b]) == outcome.tokens
            accepted += outcome.accepted
    assert accepted > (10 if has_q and mode != "coupled" else 0)


V = 4
LENGTH = 3  # tokens of an output whose distribution is tested


def make_model(seed, scale):
    """Return the logits [V, V, V] of a model by the last two tokens; token V - 1 comes first."""
    return np.random.default_rng(seed).normal(0, scale, (V, V, V)).astype(np.float32)


def run_batch(rng, target, drafter, mode, batch, seeds, told_drafter=None):
    """Return outputs [batch, LENGTH] that begin with the tokens that one call commits.

    The drafts are sampled with NumPy. The distribution of the missing tokens at the end of an
    output is that of the target. `told_drafter` is the model whose distributions are passed as `q`.
    """
    told = drafter if told_drafter is None else told_drafter
    context = np.full((batch, LENGTH + 2), V - 1)
    drafts = np.zeros((batch, LENGTH - 1), int)
    logits = np.zeros((batch, LENGTH, V), np.float32)
    q = np.zeros((batch, LENGTH - 1, V), np.float32)
    for j in range(LENGTH):
        last = context[:, j], context[:, j + 1]
        logits[:, j] = target[last]
        if j < LENGTH - 1:
            q[:, j] = softmax(told[last])
            context[:, j + 2] = drafts[:, j] = choose(rng, softmax(drafter[last]))
    positions = np.full(batch, 7)
    tokens = verify_drafts(logits, drafts, q, mode=mode, seeds=seeds, positions=positions)
    outputs = np.full((batch, LENGTH + 2), V - 1)
    missing = np.ones((batch, LENGTH), bool)
    for b, row in enumerate(tokens):
        outputs[b, 2 : 2 + len(row)] = row
        missing[b, : len(row)] = False
    for j in range(LENGTH):
        sampled = choose(rng, softmax(target[outputs[:, j], outputs[:, j + 1]]))
        outputs[:, j + 2] = np.where(missing[:, j], sampled, outputs[:, j + 2])
    return outputs[:, 2:]


def choose(rng, p):
    """Sample one token for each row of probabilities."""
    return (rng.random((len(p), 1)) > p.cumsum(axis=1)[:, :-1]).sum(axis=1)


def output_distribution(target):
    """Return the probability of each output [V, V, V], by enumeration."""
    p = softmax(target)
    expected = np.zeros((V,) * LENGTH)
    for a, b, c in itertools.product(range(V), repeat=LENGTH):
        expected[a, b, c] = p[V - 1, V - 1, a] * p[V - 1, a, b] * p[a, b, c]
    return expected


def law_p_value(mode, told_drafter=None):
    """Return the p-value with which 6,000 outputs follow the target's distribution."""
    rng = np.random.default_rng(11)
    target = make_model(1, 1.0)
    drafter = make_model(2, 1.0)
    counts = np.zeros((V,) * LENGTH)
    for wave in range(3):
        seeds = np.arange(2000) + 10**6 * wave
        outputs = run_batch(rng, target, drafter, mode, 2000, seeds, told_drafter)
        np.add.at(counts, tuple(outputs.T), 1)
    return chi_square_p(counts, output_distribution(target))


@sampled_modes
def test_verify_drafts_keeps_distribution_of_target(device, mode):
    assert law_p_value(mode) > 1e-3


def test_distribution_test_detects_wrong_q(device):
    assert law_p_value("rejection", told_drafter=make_model(3, 1.0)) < 1e-6


def test_drafts_sampled_with_targets_random_numbers_are_accepted_in_coupled_mode(device):
    rng = np.random.default_rng(2)
    logits = rng.normal(0, 1, (5, 4, 30)).astype(np.float32)
    seeds = [1, 2, 3, 2**62, 5]
    positions = np.array([1, 9, 9, 100, 7])
    drafts = np.zeros((5, 3), np.int32)
    for j in range(3):
        sampled = verify_drafts(
            logits[:, j : j + 1],
            np.zeros((5, 0), np.int32),
            mode="coupled",
            seeds=seeds,
            positions=positions + j,
        )
        drafts[:, j] = np.ravel(sampled)
    tokens = verify_drafts(logits, drafts, mode="coupled", seeds=seeds, positions=positions)
    assert [row[:3] for row in tokens] == drafts.tolist()
    assert {len(row) for row in tokens} == {4}


@both_shapes
def test_draft_verifier_in_graph_verifies_new_inputs_in_every_replay(device, stream):
    rng = np.random.default_rng(9)
    verifier = DraftVerifier(device, batch=3, drafts=2, vocab_size=20, mode="rejection")
    logits = device.zeros((3, 3, 20), "float32")
    drafts = device.zeros((3, 2), "int64")
    q = device.zeros((3, 2, 20), "float32")
    seeds = device.zeros((3,), "uint64")
    positions = device.zeros((3,), "int32")
    graph = Graph(device, "verify drafts")
    verifier.add(graph.lane("main"), logits, drafts, q, seeds=seeds, positions=positions)
    run = graph.instantiate()
    for replay in range(4):
        values = random_inputs(rng, 3, 2, 20)
        for array, value in zip((logits, drafts, q), values, strict=True):
            array.copy_from(value)
        seeds.copy_from(np.arange(3, dtype=np.uint64) + replay)
        positions.copy_from(np.full(3, 4 + replay, np.int32))
        run.launch(stream)
        run.synchronize(10)
        verifier.check()
        expected = verify_drafts(
            *values, mode="rejection", seeds=np.arange(3) + replay, positions=[4 + replay] * 3
        )
        found = [row[row >= 0].tolist() for row in verifier.tokens.to_host()]
        assert found == expected
    bad = np.array([[1, 2], [3, 99], [1, 2]])
    drafts.copy_from(bad)
    run.launch(stream)
    run.synchronize(10)
    with pytest.raises(OptionError, match=r"drafts\[1, 1\] is 99"):
        verifier.check()
    assert (verifier.tokens.to_host()[1] == -1).all()


class ByInterface:
    """A device array of another library that has only ``__cuda_array_interface__``."""

    def __init__(self, base, read_only=False):
        interface = base.__cuda_array_interface__
        self.__cuda_array_interface__ = {**interface, "data": (base.ptr, read_only)}
        self.base = base


class ByDlpack:
    """An array of another library that has only DLPack."""

    def __init__(self, base):
        self.base = base

    def __dlpack_device__(self):
        return self.base.__dlpack_device__()

    def __dlpack__(self, **options):
        return self.base.__dlpack__(**options)


def as_pinned(device, array):
    """Return a copy of an array in pinned memory."""
    pinned = device.pinned(array.shape, array.dtype)
    pinned.array[:] = array
    return pinned


#: Functions that make an input from a device and a NumPy array.
KINDS = {
    "lists": lambda device, array: array if array.dtype == np.float32 else array.tolist(),
    "strided": lambda device, array: np.stack([array, array], axis=-1)[..., 0],
    "read-only": lambda device, array: np.frombuffer(array.tobytes(), array.dtype).reshape(
        array.shape
    ),
    "DeviceArray": lambda device, array: device.from_host(array),
    "PinnedArray": as_pinned,
    "interface": lambda device, array: ByInterface(device.from_host(array)),
    "interface, read-only": lambda device, array: ByInterface(device.from_host(array), True),
    "DLPack, device": lambda device, array: ByDlpack(device.from_host(array)),
    "DLPack, host": lambda device, array: ByDlpack(array),
}


@pytest.mark.parametrize("kind", KINDS)
def test_verify_drafts_accepts_arrays_of_all_libraries(device, kind):
    rng = np.random.default_rng(4)
    logits, drafts, q = random_inputs(rng, 5, 3, 40)
    seeds = np.arange(5)
    positions = np.arange(5) + 3
    expected = verify_drafts(logits, drafts, q, mode="rejection", seeds=seeds, positions=positions)
    given = [KINDS[kind](device, array) for array in (logits, drafts, q, seeds, positions)]
    logits, drafts, q, seeds, positions = given
    tokens = verify_drafts(logits, drafts, q, mode="rejection", seeds=seeds, positions=positions)
    assert tokens == expected


@pytest.mark.parametrize("kind", ["DeviceArray", "PinnedArray", "interface", "DLPack, device"])
def test_draft_verifier_reads_arrays_in_place(device, stream, kind):
    logits = np.zeros((1, 2, 5), np.float32)
    logits[0, [0, 1], [3, 2]] = 1
    verifier = DraftVerifier(device, batch=1, drafts=1, vocab_size=5, mode="greedy")
    drafts = KINDS[kind](device, np.array([[3]], np.int32))
    verifier.add(StreamLane(stream), KINDS[kind](device, logits), drafts)
    stream.synchronize()
    assert verifier.tokens.to_host().tolist() == [[3, 2]]


def changed(name, index, value):
    """Return a change of one element of an input."""

    def apply(inputs):
        inputs[name][index] = value

    return apply


def replaced(**values):
    """Return a change that replaces inputs."""
    return lambda inputs: inputs.update(values)


NAN = float("nan")
WRONG = {
    "mode": (replaced(mode="exact"), OptionError, "mode must be one of 'greedy'.*got 'exact'"),
    "logits shape": (replaced(logits=np.zeros((2, 9), np.float32)), ShapeError, r"logits is \[2, "),
    "logits dtype": (
        replaced(logits=np.zeros((2, 4, 9))),
        ShapeError,
        r"logits is float64\[2, 4, 9\], expected float32",
    ),
    "drafts shape": (replaced(drafts=[[1], [2]]), ShapeError, r"drafts is int64\[2, 1\], .*K=3"),
    "drafts dtype": (
        replaced(drafts=np.zeros((2, 3))),
        ShapeError,
        r"drafts is float64\[2, 3\], expected int32 or int64",
    ),
    "draft too large": (
        changed("drafts", (1, 2), 9),
        OptionError,
        r"drafts\[1, 2\] is 9, .* 0 to 8",
    ),
    "draft negative": (changed("drafts", (0, 1), -2), OptionError, r"drafts\[0, 1\] is -2"),
    "draft of 64 bits": (changed("drafts", (0, 0), 2**32), OptionError, r"is 4294967296, must"),
    "draft after the end": (
        changed("drafts", (0, 0), -1),
        OptionError,
        r"drafts\[0, 1\] is 2 after a -1",
    ),
    "q shape": (replaced(q=np.zeros((2, 3, 8), np.float32)), ShapeError, r"q is .*V=9"),
    "q dtype": (
        replaced(q=np.zeros((2, 3, 9))),
        ShapeError,
        r"q is float64\[2, 3, 9\], expected float32",
    ),
    "q sum": (changed("q", (1, 0, 0), 0.5), OptionError, r"q\[1, 0\] has the sum 1.3.*must be 1"),
    "q negative": (changed("q", (1, 2, 8), -0.25), OptionError, r"q\[1, 2\] contains -0.25"),
    "q NaN": (changed("q", (0, 1, 4), NAN), OptionError, r"q\[0, 1\] contains nan"),
    "q zero": (
        lambda inputs: inputs["q"][0, 0].__setitem__(slice(None), np.eye(9)[8]),
        OptionError,
        r"drafts\[0, 0\] is 1, which has probability 0 in q\[0, 0\]",
    ),
    "logit NaN": (changed("logits", (1, 0, 3), NAN), OptionError, r"logits\[1, 0\] contains NaN"),
    "no legal token": (
        changed("logits", (0, 0), -np.inf),
        OptionError,
        r"logits\[0, 0\] has no finite logit",
    ),
    "no seeds": (replaced(seeds=None), OptionError, "seeds must be given.*'rejection'"),
    "no positions": (replaced(positions=None), OptionError, "positions must be given"),
    "seeds shape": (replaced(seeds=[1]), ShapeError, r"seeds is int64\[1\], .*B=2"),
    "position": (changed("positions", 1, 0), OptionError, r"positions\[1\] is 0, must be from 1"),
    "temperature": (
        replaced(temperature=0),
        OptionError,
        "temperature must be a number from 1e-05",
    ),
    "top_p": (replaced(top_p=2.0), OptionError, "top_p"),
}


@both_shapes
@pytest.mark.parametrize("case", WRONG)
def test_verify_drafts_refuses_invalid_input(device, case):
    change, error, message = WRONG[case]
    inputs = {
        "logits": np.zeros((2, 4, 9), np.float32),
        "drafts": np.array([[1, 2, 3], [4, 5, 6]]),
        "q": np.full((2, 3, 9), 1 / 9, np.float32),
        "mode": "rejection",
        "seeds": [1, 2],
        "positions": np.array([3, 4]),
    }
    change(inputs)
    with pytest.raises(error, match=message):
        verify_drafts(**inputs)


def test_invalid_logits_after_accepted_draft_are_refused(device):
    logits = np.zeros((1, 3, 5), np.float32)
    logits[0, 0, 2] = 1
    logits[0, 1] = np.nan
    assert verify_drafts(logits, [[1, 1]], mode="greedy") == [[2]]  # row 1 is not needed
    with pytest.raises(OptionError, match=r"logits\[0, 1\] contains NaN"):
        verify_drafts(logits, [[2, 1]], mode="greedy")


def test_verify_drafts_accepts_nested_lists() -> None:
    logits = np.random.default_rng(1).normal(size=(2, 3, 5)).astype(np.float32)
    drafts = [[1, 2], [3, -1]]
    expected = verify_drafts(logits, np.array(drafts), mode="greedy")
    assert verify_drafts(logits.tolist(), drafts, mode="greedy") == expected


def test_verify_drafts_refuses_rows_of_different_lengths() -> None:
    logits = np.zeros((2, 3, 5), np.float32)
    with pytest.raises(ShapeError, match="drafts has rows of different lengths"):
        verify_drafts(logits, [[1, 2], [3]], mode="greedy")


def test_verify_drafts_refuses_drafts_without_logits_for_them() -> None:
    logits = np.zeros((1, 1, 5), np.float32)
    with pytest.raises(ShapeError, match=r"drafts is \[1, 2\], but logits has one row"):
        verify_drafts(logits, [[1, 2]], mode="greedy")
    assert verify_drafts(logits, np.zeros((1, 0), np.int32), mode="greedy") == [[0]]


def test_draft_verifier_names_a_stream_that_is_given_as_lane(device) -> None:
    verifier = DraftVerifier(device, batch=1, drafts=0, vocab_size=4, mode="greedy")
    with pytest.raises(OptionError, match=r"needs a lane, such as StreamLane\(stream\)"):
        verifier.add(device.stream(), device.zeros((1, 1, 4), "float32"))  # type: ignore[arg-type]


def test_draft_verifier_names_the_array_that_kernels_cannot_read(device) -> None:
    verifier = DraftVerifier(device, batch=1, drafts=1, vocab_size=4, mode="greedy")
    lane = StreamLane(device.stream())
    with pytest.raises(ShapeError, match=r"^drafts: .*pageable host memory"):
        verifier.add(lane, device.zeros((1, 2, 4), "float32"), np.zeros((1, 1), np.int32))
