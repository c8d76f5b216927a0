"""Tests that compare block drafters (DFlash, DFlash2, DSpark) with the published code."""

import shutil
from functools import partial

import model_util
import numpy as np
import pytest
from drafter_rounds import LENGTH, Rounds
from tiny_models import edit_json, write_safetensors

from graft.cudagraph.driver.dtypes import to_float32
from graft.models.drafters import DFlash
from graft.models.errors import CheckpointError, ConfigError
from graft.models.llm.checkpoint import Checkpoint

FOLDER = model_util.FIXTURES / "dflash"
DFLASH2 = model_util.FIXTURES / "dflash2"
TARGET = model_util.FIXTURES / "eight_layers_bfloat16"


def read(folder):
    """Return the tensors of a checkpoint as float32."""
    checkpoint = Checkpoint(folder)
    return {name: to_float32(*checkpoint.get(name)) for name in checkpoint.names}


def fast_target(device):
    """Return the target with the kernels that are fast on the device, to compute features."""
    return model_util.load_llama(device, TARGET, dtype="float32")


@pytest.mark.parametrize("form", model_util.FORMS)
@pytest.mark.full("warp")
def test_dflash_logits_equal_published_code(device, stream, form):
    """The logits of every level equal logits that the published code computed.

    Prompts are processed in chunks. Rounds commit one to five tokens in changing batch rows. The
    last blocks, here and in the published code, end at the last position of the sequence.
    """
    expected = np.load(FOLDER / "expected.npz")
    target = model_util.load_llama(device, TARGET, form=form, dtype="float32")
    features = fast_target(device)
    rounds = Rounds(device, stream, target, FOLDER, 4, expected["tokens"], feature_target=features)
    assert isinstance(rounds.drafter, DFlash) and rounds.width == 5
    for slot, chunks in enumerate([(0,), (0, 1), (0, 3, 32)]):
        rounds.prompt(slot, chunks)
    for batch, counts in [
        ([0, 1, 2], [1, 5, 1]),
        ([2, -1, 0], [4, 0, 1]),
        ([0, 1], [5, 1]),
        ([1, 0], [5, 5]),
    ]:
        for slot, down, logits in rounds.levels(rounds.commit(batch, counts)):
            wanted = expected[f"logits_{rounds.n[slot]}"][1:]
            if len(down) < len(wanted):
                np.testing.assert_allclose(logits, wanted[len(down)], atol=1e-4)


@pytest.mark.parametrize("tree", [None, (2, 4)])
def test_dflash_feeds_whole_blocks_near_length_limit(device, stream, tree):
    """If a slot has pages after its length limit, the limit does not change the logits.

    Slots of a draft tree have such pages. The block of the last round has five rows, two of them
    at or after the limit.
    """
    target = model_util.load_llama(device, TARGET, dtype="float32")
    found = []
    for limit in (LENGTH, LENGTH + 5):
        rounds = Rounds(device, stream, target, FOLDER, 4, tree=tree)
        rounds.slots["limit"] = limit
        rounds.slots["capacity"] = LENGTH + 5
        rounds.prompt(0, (0, 32))
        rounds.prompt(0, (32, 37))
        found.append([logits for _, _, logits in rounds.levels(rounds.commit([0], [1]))])
    assert np.isfinite(found).all()
    assert model_util.same_bits(*np.array(found))


def test_dflash_block_has_draft_length_rows(device, stream):
    """A drafter makes the requested number of drafts, limited by its block size."""
    target = model_util.load_llama(device, TARGET)
    for drafts, wanted in ((1, 1), (3, 3), (9, 4)):
        drafter = Rounds(device, stream, target, FOLDER, drafts).drafter
        assert drafter.shape.nodes == len(drafter.shape.levels) == wanted


def make_dspark(folder, rank):
    """Write a DSpark drafter and return its tensors.

    The drafter has the tensors of the DFlash fixture and a random Markov head of rank `rank`.
    """
    shutil.copytree(FOLDER, folder)
    edit_json(
        folder / "config.json",
        **of_dflash()["dflash_config"],
        dflash_config=None,
        architectures=["Qwen3DSparkModel"],
        markov_rank=rank,
        markov_head_type="vanilla",
        num_anchors=512,
        enable_confidence_head=True,
    )
    target = read(TARGET)
    rng = np.random.default_rng(3)
    tensors = {
        **read(FOLDER),
        "embed_tokens.weight": target["model.embed_tokens.weight"],
        "lm_head.weight": target["lm_head.weight"],
        "confidence_head.proj.weight": np.zeros((1, 24 + rank), np.float32),
        **{
            f"markov_head.markov_{name}.weight": model_util.normal(rng, 64, rank)
            for name in ("w1", "w2")
            if rank
        },
    }
    write_safetensors(folder / "model.safetensors", tensors, "float32")
    return tensors


@pytest.mark.parametrize("rank, tree", [(0, None), (6, None), (0, (3, 7)), (6, (3, 5))])
def test_dspark_adds_markov_logits_of_previous_token(device, stream, tmp_path, rank, tree):
    """The logits of a DSpark node are the logits of its block row plus w2 w1[previous token].

    w1 and w2 are the matrices of the Markov head. With rank 0 the drafter has no Markov head. The
    drafts form a chain or a tree.
    """
    tensors = make_dspark(tmp_path / "dspark", rank)
    expected = np.load(FOLDER / "expected.npz")
    target = model_util.load_llama(device, TARGET, dtype="float32")
    rounds = Rounds(device, stream, target, tmp_path / "dspark", 9, expected["tokens"], tree)
    levels = len(rounds.drafter.shape.levels)
    assert levels == (5 if tree is None else min(tree[1], 5))
    rounds.prompt(1, (0, 4, 6))
    for batch, counts in [([0, 1], [2, 1]), ([-1, 1, 0], [0, 5, 4])]:
        seen = 0
        for slot, down, logits in rounds.levels(rounds.commit(batch, counts)):
            wanted = expected[f"logits_{rounds.n[slot]}"][len(down)]
            if rank:
                w1, w2 = (tensors[f"markov_head.markov_{w}.weight"] for w in ("w1", "w2"))
                previous = [expected["tokens"][rounds.n[slot]], *down][-1]
                wanted = wanted + w2 @ w1[previous]
            np.testing.assert_allclose(logits, wanted, atol=1e-4)
            seen += 1
        assert seen == 2 * (1 + (levels - 1) * rounds.branch)


def selector_cases():
    """Return combinations of kernel form and tree; those that are slow run in the full suite."""
    for form in model_util.FORMS:
        yield pytest.param(form, None, id=f"{form}-chain")
        is_slow = form != model_util.FORMS[0]
        yield pytest.param(
            form, (3, 4), id=f"{form}-tree", marks=pytest.mark.full if is_slow else ()
        )


@pytest.mark.parametrize("form, tree", list(selector_cases()))
def test_dflash2_selector_equals_published_code(device, stream, form, tree):
    """The candidates have the published distribution, for any previous token.

    The logits of all other ids are far lower and have their original order. In a chain, the greedy
    drafts equal those of the published code.
    """
    expected = np.load(DFLASH2 / "expected.npz")
    target = model_util.load_llama(device, TARGET, form=form, dtype="float32")
    features = fast_target(device)
    rounds = Rounds(device, stream, target, DFLASH2, 4, expected["tokens"], tree, features)
    for slot, chunks in enumerate([(0,), (0, 1), (0, 3, 32)]):
        rounds.prompt(slot, chunks)
    for batch, counts in [([0, 1, 2], [1, 5, 1]), ([2, -1, 0], [4, 0, 1])]:
        for slot, count in zip(batch, counts, strict=True):
            if slot >= 0 and tree is None:  # later levels continue the drafts of the published code
                published = expected[f"drafts_{rounds.n[slot] + count}"]
                rounds.drafts[slot, : len(published)] = published
        for slot, down, logits in rounds.levels(rounds.commit(batch, counts)):
            n = rounds.n[slot]
            level = len(down)
            if level >= len(expected[f"drafts_{n}"]):
                continue  # after the length limit
            before = [expected["tokens"][n], *down][-1]
            ids = expected[f"ids_{n}"][level]
            distribution = expected[f"law_{n}"][level, before]
            others = np.setdiff1d(np.arange(64), ids)
            assert logits[others].max() < logits[ids].min() - 39.9
            weights = np.log(distribution / distribution.max())
            np.testing.assert_allclose(logits[ids] - logits[ids].max(), weights, atol=1e-4)
            unary = expected[f"logits_{n}"][1 + level][others]
            np.testing.assert_allclose(logits[others], unary, atol=1e-4)
            if tree is None:
                assert logits.argmax() == expected[f"drafts_{n}"][level]


def of_dflash(**changes):
    """Return config changes that set the section `dflash_config`, with `changes` to its fields."""
    own = {"block_size": 5, "mask_token_id": 63, "target_layer_ids": [1, 3, 6], **changes}
    return {"dflash_config": {name: value for name, value in own.items() if value is not None}}


def of_dflash2(**changes):
    """Return config changes that set `dflash_config` of a DFlash2 drafter."""
    sizes = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7}
    return of_dflash(**(sizes | changes))


#: Cases by fixture. A case has the change of the tensors, the changes of the config, the expected
#: exception and a pattern of its message.
UNFIT = {
    FOLDER: [
        (lambda t: t.pop("fc.weight"), {}, CheckpointError, "fc.weight is missing"),
        (lambda t: t.pop("layers.1.self_attn.q_norm.weight"), {}, CheckpointError, "1.*q_norm"),
        (lambda t: t.update(x=np.ones(3, np.float32)), {}, CheckpointError, "first x"),
        (
            None,
            {"architectures": ["DFlash2DraftModel"]},
            ConfigError,
            "conv_kernel_size is missing",
        ),
        (None, {"dflash_config": None}, ConfigError, "dflash_config is missing"),
        (None, {"is_causal": True}, ConfigError, "is_causal = True"),
        (None, {"layer_types": ["sliding_attention"] * 2}, ConfigError, "layer_types"),
        (
            None,
            {"use_sliding_window": True, "sliding_window": 64},
            ConfigError,
            "is_causal is miss",
        ),
        (None, {"vocab_size": 65}, ConfigError, "size 65, .* has vocab_size 64"),
        (None, {"num_target_layers": 9}, ConfigError, "layers 9, .* has num_hidden_layers 8"),
        (
            None,
            {"architectures": ["Qwen3DSparkModel"], "markov_head_type": "rnn"},
            ConfigError,
            "markov_head_type = 'rnn'",
        ),
        (
            None,
            {"architectures": ["Qwen3DSparkModel"], "final_logit_softcapping": 20.0},
            ConfigError,
            "final_logit_softcapping",
        ),
        (None, of_dflash(mask_token_id=64), ConfigError, "mask_token_id is 64"),
        (None, of_dflash(mask_token_id=None), ConfigError, "mask_token_id is missing"),
        (None, of_dflash(block_size=1), ConfigError, "block_size is 1"),
        (None, of_dflash(projector_type="domino"), ConfigError, "projector_type = 'domino'"),
        (None, of_dflash(selector_rank=6), ConfigError, "selector_rank = 6"),
        (None, of_dflash(output_multiplier="x"), ConfigError, "output_multiplier is 'x'"),
        *(
            (None, of_dflash(target_layer_ids=ids), ConfigError, "target_layer_ids")
            for ids in (None, [], [3, 1], [1, 1], [-1, 3], [1, 7])
        ),
    ],
    DFLASH2: [
        (
            lambda t: t.pop("candidate_selector.successor_codebook"),
            {},
            CheckpointError,
            "successor",
        ),
        (
            lambda t: t.pop("layers.1.mlp_conv.base_kernel"),
            {},
            CheckpointError,
            "1.mlp_conv.base_ker",
        ),
        (None, {"sliding_window": 39}, ConfigError, "sliding_window = 39 .* max_length = 40"),
        (None, {"sliding_window": None}, ConfigError, "sliding_window is missing"),
        (None, {"layer_types": ["chunked_attention"] * 2}, ConfigError, "chunked_attention"),
        (None, {"is_causal": None}, ConfigError, "is_causal is missing"),
        (None, {"is_causal": True}, ConfigError, "is_causal = True"),
        (None, of_dflash2(conv_kernel_size=None), ConfigError, "conv_kernel_size is missing"),
        (None, of_dflash2(conv_group_size=7), ConfigError, "24 is not a multiple of .* 7"),
        (None, of_dflash2(conv_kernel_size=2), CheckpointError, "base_kernel"),
        (None, of_dflash2(selector_rank=0), ConfigError, "selector_rank is 0"),
        (
            None,
            of_dflash2(selector_top_k=65),
            ConfigError,
            "selector_top_k is 65, must be from 1 to 64",
        ),
    ],
}


@pytest.mark.parametrize(
    ("source", "change", "fields", "error", "words"),
    [(source, *one) for source, many in UNFIT.items() for one in many],
)
def test_dflash_rejects_unsuitable_checkpoints(
    device, stream, tmp_path, source, change, fields, error, words
):
    """Block drafters with unsuitable tensors or configs raise an error.

    The cases are missing and unused tensors, unimplemented options, drafters for another target,
    and sliding windows that are too short or causal.
    """
    folder = shutil.copytree(source, tmp_path / "drafter")
    if change is not None:
        tensors = read(source)
        change(tensors)
        write_safetensors(folder / "model.safetensors", tensors, "float32")
    edit_json(folder / "config.json", **fields)
    target = model_util.load_llama(device, TARGET)
    with pytest.raises(error, match=words):
        Rounds(device, stream, target, folder, 4)


def test_block_drafter_class_rejects_checkpoint_of_another_kind(device, stream):
    target = model_util.load_llama(device, TARGET)
    with pytest.raises(ConfigError, match="dflash2: expected a DFlash drafter, not DFlash2"):
        Rounds(device, stream, target, partial(DFlash, DFLASH2), 4)
