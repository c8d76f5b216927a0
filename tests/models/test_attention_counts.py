"""Memory traffic and balance of attention on tensor cores, counted on PTX for sm_90."""

from __future__ import annotations

import launch_counts
import pytest

from graft.tools.bench import roofline

pytestmark = [pytest.mark.ptx, pytest.mark.nvrtc]

STEP = 16  # positions of a step, which are loaded together
# Numbers of the parameters `keys` and `values` of the attention kernels.
KEYS_AND_VALUES = {"attention_split": ("5", "6"), "attention_prompt": ("4", "5")}


def count(tmp_path, **arguments):
    """Launch attention (`attention_launch.launch`). Return the counts by kernel."""
    launches = launch_counts.run("attention_launch.py", tmp_path / "counts", arguments)
    return {launch["kernel"]: launch for launch in launches}


def attention_counts(counts):
    """Return the name of the attention kernel that was launched, and its counts."""
    (kernel,) = KEYS_AND_VALUES.keys() & counts.keys()
    return kernel, counts[kernel]


def bytes_loaded(counts):
    """Return the bytes of keys and values that attention has loaded."""
    kernel, attention = attention_counts(counts)
    return sum(attention["loaded_by_parameter"][number] for number in KEYS_AND_VALUES[kernel])


def machine_instructions(attention):
    """Return the executed instructions without those that copy registers.

    The compiler from PTX to machine code removes most copies of registers.
    """
    return sum(attention["instructions"].values()) - attention["instructions"]["move"]


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.full)])
def test_attention_loads_keys_and_values_once_per_tile_of_slot(tmp_path, dim):
    """Chains of different lengths share no tile, so none of them is loaded for another one.

    Eight requests have 1 to 8 rows, up to seven of them for drafts, and 2,000 positions before
    them. A tile has up to four rows. The last positions are loaded more often, because a row must
    not read those of later rows.
    """
    lengths = [8, 1, 5, 2, 7, 3, 4, 2]
    slots = [s for s, length in enumerate(lengths) for _ in range(length)]
    positions = [2000 + j for length in lengths for j in range(length)]
    counts = count(tmp_path, slots=slots, positions=positions, dim=dim, rows_per_slot=8)
    tiles = sum(-(-length // 4) for length in lengths)
    minimum = tiles * -(-2001 // STEP) * STEP * dim * 2 * 2
    assert minimum <= bytes_loaded(counts) <= 1.15 * minimum


@pytest.mark.parametrize(
    ("long", "short"), [(8192, 256), pytest.param(32768, 1024, marks=pytest.mark.full)]
)
def test_attention_divides_long_context_among_blocks(tmp_path, long, short):
    """One long context among 63 short ones: the longest block is at most 1.3 times the mean."""
    positions = [long - 1] + [short - 1] * 63
    counts = count(tmp_path, slots=[*range(64)], positions=positions, heads=32, kv_heads=8)
    split = counts["attention_split"]
    mean = sum(split["instructions"].values()) / split["blocks"]
    assert split["longest_block_instructions"] <= 1.3 * mean
    assert split["longest_block_loaded"] <= 1.3 * split["loaded"]["global"] / split["blocks"]
    # The plan is made by one warp before the first layer.
    assert counts["attention_plan"]["longest_block_instructions"] < 0.1 * mean


@pytest.mark.parametrize(
    ("rows", "length"), [(64, 1024), pytest.param(256, 4096, marks=pytest.mark.full)]
)
def test_prompt_attention_loads_keys_and_values_a_quarter_as_often(tmp_path, rows, length):
    """Four query tiles of a prompt share keys and values, and need no more instructions."""
    positions = range(length - rows, length)
    alone, shared = (
        count(
            tmp_path / str(per_slot),
            slots=[0] * rows,
            positions=[*positions],
            dim=128,
            rows_per_slot=per_slot,
        )
        for per_slot in (1, rows)
        if not (tmp_path / str(per_slot)).mkdir()
    )
    # Tiles of 16 rows load each position once, although their first rows need a few less.
    assert bytes_loaded(shared) <= rows // 16 * length * 128 * 2 * 2
    assert 3.9 * bytes_loaded(shared) <= bytes_loaded(alone)
    instructions = [machine_instructions(attention_counts(counts)[1]) for counts in (shared, alone)]
    assert instructions[0] <= 1.02 * instructions[1]


def test_attention_output_of_16_bits_stores_half(tmp_path):
    stored = [
        count(tmp_path / dtype, slots=[0, 1], positions=[40, 50], dtype=dtype)["attention_split"]
        for dtype in ("float32", "bfloat16")
        if not (tmp_path / dtype).mkdir()
    ]
    assert [counts["stored"]["global"] for counts in stored] == [2 * 4 * 64 * 4, 2 * 4 * 64 * 2]


@pytest.mark.parametrize(
    ("requests", "rows", "context", "tolerance"),
    [
        (1, 64, 512, 0.3),
        pytest.param(64, 1, 1024, 0.05, marks=pytest.mark.full),
        pytest.param(1, 256, 4096, 0.05, marks=pytest.mark.full),
    ],
)
def test_roofline_counts_executed_work_of_attention(tmp_path, requests, rows, context, tolerance):
    """The model counts the executed instructions, and the bytes through L1 and shared memory.

    A short context has a greater share of steps of single rows, which the model does not contain.
    """
    counts = count(
        tmp_path,
        slots=[slot for slot in range(requests) for _ in range(rows)],
        positions=[*range(context - rows, context)] * requests,
        heads=roofline.HEADS,
        kv_heads=roofline.KV_HEADS,
        dim=roofline.HEAD_DIM,
        rows_per_slot=rows,
        dtype="bfloat16",
    )
    kernel, attention = attention_counts(counts)
    moved = attention["loaded"]["shared"] + attention["stored"]["shared"]
    if kernel == "attention_split":
        # attention_prompt copies keys and values to shared memory without the L1 cache.
        moved += bytes_loaded(counts)
    work = roofline.attention([context] * requests, rows).work
    assert work["issue"] == pytest.approx(machine_instructions(attention), rel=tolerance)
    assert work["L1"] == pytest.approx(moved, rel=tolerance)
