"""Block drafters: logits of their published code, and refusals."""

import shutil

import nets_util as nets
import numpy as np
import pytest
from drafter_rounds import Rounds
from tiny_models import edit_json, write_safetensors

from graft.cudagraph.dtypes import to_float32
from graft.models.drafters import DFlash
from graft.models.errors import CheckpointError, ConfigError
from graft.models.llm.checkpoint import Checkpoint

FOLDER = nets.FIXTURES / "dflash"
SECOND = nets.FIXTURES / "dflash2"
TARGET = nets.FIXTURES / "eight_layers_bfloat16"


def read(folder):
    """A checkpoint's tensors as float32."""
    checkpoint = Checkpoint(folder)
    return {name: to_float32(*checkpoint.get(name)) for name in checkpoint.names}


@pytest.mark.parametrize("form", nets.FORMS)
def test_blocks_equal_the_published_code(device, stream, form):
    """Prompts in chunks and rounds that commit one to five tokens in changing rows: the logits of
    every draft are those of a block behind the whole context, and of one that the limit cuts."""
    expected = np.load(FOLDER / "expected.npz")
    target = nets.load_llama(device, TARGET, form=form, dtype="float32")
    rounds = Rounds(device, stream, target, FOLDER, 4, expected["tokens"])
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


def test_fewer_drafts_are_a_shorter_block(device, stream):
    """The engine's draft_length counts, up to what the block was made for."""
    target = nets.load_llama(device, TARGET)
    for drafts, wanted in ((1, 1), (3, 3), (9, 4)):
        drafter = Rounds(device, stream, target, FOLDER, drafts).drafter
        assert drafter.shape.nodes == len(drafter.shape.levels) == wanted


def make_dspark(folder, rank):
    """The fixture as DSpark's published checkpoints are laid out, with a random head beside it;
    returns the tensors."""
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
            f"markov_head.markov_{name}.weight": rng.standard_normal((64, rank)).astype(np.float32)
            for name in ("w1", "w2")
            if rank
        },
    }
    write_safetensors(folder / "model.safetensors", tensors, "float32")
    return tensors


@pytest.mark.parametrize("rank, tree", [(0, None), (6, None), (0, (3, 7)), (6, (3, 5))])
def test_a_dspark_row_also_reads_the_draft_before_it(device, stream, tmp_path, rank, tree):
    """Every row predicts the token behind it, the first one's before is the last token: logits are
    those of the published block and w2 w1[token before], in a tree every node's."""
    tensors = make_dspark(tmp_path / "dspark", rank)
    expected = np.load(FOLDER / "expected.npz")
    target = nets.load_llama(device, TARGET, dtype="float32")
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
                wanted = wanted + w2 @ w1[[expected["tokens"][rounds.n[slot]], *down][-1]]
            np.testing.assert_allclose(logits, wanted, atol=1e-4)
            seen += 1
        assert seen == 2 * (1 + (levels - 1) * rounds.branch)


@pytest.mark.parametrize("tree", [None, (3, 4)], ids=["chain", "tree"])
@pytest.mark.parametrize("form", nets.FORMS)
def test_a_selector_chooses_as_the_published_code_does(device, stream, form, tree):
    """Behind any token, the ids that a row of DFlash2 selects from have the published law, all
    others stand far below in the order of their logits, and greedy drafts are the published ones.
    """
    expected = np.load(SECOND / "expected.npz")
    target = nets.load_llama(device, TARGET, form=form, dtype="float32")
    rounds = Rounds(device, stream, target, SECOND, 4, expected["tokens"], tree)
    for slot, chunks in enumerate([(0,), (0, 1), (0, 3, 32)]):
        rounds.prompt(slot, chunks)
    for batch, counts in [([0, 1, 2], [1, 5, 1]), ([2, -1, 0], [4, 0, 1]), ([0, 1], [5, 1])]:
        for slot, count in zip(batch, counts, strict=True):
            if slot >= 0 and tree is None:  # levels behind the first see the published drafts
                published = expected[f"drafts_{rounds.n[slot] + count}"]
                rounds.drafts[slot, : len(published)] = published
        for slot, down, logits in rounds.levels(rounds.commit(batch, counts)):
            n = rounds.n[slot]
            level = len(down)
            if level >= len(expected[f"drafts_{n}"]):
                continue  # behind the limit
            before = [expected["tokens"][n], *down][-1]
            ids = expected[f"ids_{n}"][level]
            law = expected[f"law_{n}"][level, before]
            others = np.setdiff1d(np.arange(64), ids)
            assert logits[others].max() < logits[ids].min() - 39.9
            weights = np.log(law / law.max())
            np.testing.assert_allclose(logits[ids] - logits[ids].max(), weights, atol=1e-4)
            unary = expected[f"logits_{n}"][1 + level][others]
            np.testing.assert_allclose(logits[others], unary, atol=1e-4)
            if tree is None:
                assert logits.argmax() == expected[f"drafts_{n}"][level]


def of_dflash(**changes):
    """Changes of a config's dflash_config."""
    own = {"block_size": 5, "mask_token_id": 63, "target_layer_ids": [1, 3, 6], **changes}
    return {"dflash_config": {name: value for name, value in own.items() if value is not None}}


def of_dflash2(**changes):
    sizes = {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7}
    return of_dflash(**(sizes | changes))


#: Tensors changed, fields of the config, the error; of each kind of block drafter.
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
        (None, {"vocab_size": 65}, ConfigError, "with vocab_size 65, .* has 64"),
        (None, {"num_target_layers": 9}, ConfigError, "with num_hidden_layers 9, .* has 8"),
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
    SECOND: [
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
        (None, {"sliding_window": 39}, ConfigError, "sliding_window = 39 .* max_length is 40"),
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
def test_unfit_drafters_are_refused(device, stream, tmp_path, source, change, fields, error, words):
    """Missing and leftover tensors, what is not implemented, drafters of another target, and
    windows that are shorter than a request may be, or of causal layers."""
    folder = shutil.copytree(source, tmp_path / "drafter")
    if change is not None:
        tensors = read(source)
        change(tensors)
        write_safetensors(folder / "model.safetensors", tensors, "float32")
    edit_json(folder / "config.json", **fields)
    target = nets.load_llama(device, TARGET)
    with pytest.raises(error, match=words):
        Rounds(device, stream, target, folder, 4)
