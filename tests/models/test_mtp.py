"""Tests that compare multi-token prediction (MTP) modules with a NumPy reference."""

from functools import partial

import model_util
import numpy as np
import numpy_llama
import pytest
from drafter_rounds import Rounds
from tiny_models import edit_json, edit_tensors, llama_config, make_tiny_llama, make_tiny_mtp

from graft.models.drafters import Mtp
from graft.models.errors import CheckpointError, ConfigError

TARGET = llama_config()


def reference_logits(weights, of_target, tokens, features, drafts, modules, norm_hidden):
    """Return the logits [vocab] of the token after `tokens` and `drafts`.

    `features` holds the target's features of all tokens except the last. A single module continues
    from its own hidden states. Of several modules, each module reads the hidden states of the
    previous module.
    """
    sequence = np.concatenate([tokens, drafts]).astype(np.int64)
    norm = of_target["model.norm.weight"]
    table = of_target["model.embed_tokens.weight"]
    known = features[: len(tokens) - 1].astype(np.float64)
    h = numpy_llama.rms_norm(known, norm, 1e-5)
    for level in range(len(drafts) + 1):
        j = level if modules > 1 else 0
        prefix = f"model.layers.{3 + j}"
        own = weights.get(f"{prefix}.embed_tokens.weight", table)
        following = sequence[1 + j :][: len(h)]
        out = numpy_llama.mtp_states(weights, TARGET, prefix, own, h, following)
        normed = numpy_llama.rms_norm(out, weights[f"{prefix}.shared_head.norm.weight"], 1e-5)
        if norm_hidden:
            out = normed
        h = out if modules > 1 else np.concatenate([h, out[-1:]])
    head = weights.get(f"{prefix}.shared_head.head.weight", table)
    return head.astype(np.float64) @ normed[-1]


#: Number of modules, whether they have own embeddings, tree, and whether they pass on hidden states
#: after their norm.
CASES = [
    (2, False, None, True),
    (1, False, (3, 4), False),
    (4, True, None, True),
    (3, True, None, False),
    (1, True, (3, 4), True),
    (1, False, None, True),
    (1, True, None, True),
    (1, False, None, False),
]
#: Number of cases in the short run, for each of `model_util.FORMS`. A GPU has one form. On the soft
#: device, the second form, the GPU kernels, is slow.
NUM_SHORT = (5, 1)


@pytest.mark.parametrize(
    "modules, own, tree, norm_hidden, form",
    [
        pytest.param(*case, form, marks=() if number < num_short else pytest.mark.full)
        for form, num_short in zip(model_util.FORMS, NUM_SHORT, strict=False)
        for number, case in enumerate(CASES)
    ],
)
def test_mtp_logits_equal_numpy(device, stream, tmp_path, modules, own, tree, norm_hidden, form):
    """The logits of every draft equal the NumPy reference, which processes the whole sequence.

    Prompts are processed in chunks. Rounds commit one to five tokens in changing batch rows. Drafts
    form a chain or a tree. Modules pass on hidden states after or before their norm.
    """
    of_target = make_tiny_llama(tmp_path / "target")
    weights = make_tiny_mtp(tmp_path / "mtp", TARGET, modules=modules, own=own)
    target = model_util.load_llama(device, tmp_path / "target", form=form)
    factory = partial(Mtp, tmp_path / "mtp", norm_hidden=norm_hidden)
    choice = tmp_path / "mtp" if norm_hidden else factory
    features = model_util.load_llama(device, tmp_path / "target")  # with fast kernels
    rounds = Rounds(device, stream, target, choice, 4, tree=tree, feature_target=features)
    assert isinstance(rounds.drafter, Mtp)
    assert rounds.width == (5 if modules == 1 else modules + 1)
    for slot, chunks in enumerate([(0,), (0, 1), (0, 3, 4, 11)]):
        rounds.prompt(slot, chunks)
    for batch, counts in [
        ([0, 1, 2], [1, 1, 2]),
        ([2, -1, 0], [3, 0, 1]),
        ([0, 2, 1], [1, 2, 1]),
        ([1], [rounds.width]),
        ([2, 1, 0], [1, 2, 3]),
    ]:
        for slot, down, logits in rounds.levels(rounds.commit(batch, counts)):
            tokens = rounds.tokens[slot, : rounds.n[slot] + 1]
            wanted = reference_logits(
                weights, of_target, tokens, rounds.features[slot], down, modules, norm_hidden
            )
            np.testing.assert_allclose(logits, wanted, atol=1e-4)


def test_mtp_modules_may_share_folder_with_target(device, stream, tmp_path):
    """A target and its MTP drafter can be loaded from one folder; each ignores the other's tensors.

    If fewer drafts than modules are requested, the drafter's KV cache has fewer layers.
    """
    make_tiny_llama(tmp_path / "both")
    weights = make_tiny_mtp(tmp_path / "mtp", TARGET, modules=2)
    edit_tensors(tmp_path / "both", lambda tensors: tensors.update(weights))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3"):
        model_util.load_llama(device, tmp_path / "both")
    edit_json(tmp_path / "both" / "config.json", num_nextn_predict_layers=2)
    target = model_util.load_llama(device, tmp_path / "both")
    drafter = Rounds(device, stream, target, tmp_path / "both", 1).drafter
    assert drafter.shape.nodes == drafter.caches[0].layers == 1 and drafter.feature_layers == (2,)


@pytest.mark.parametrize(
    ("change", "fields", "error", "words"),
    [
        (
            lambda t: t.pop("model.layers.3.enorm.weight"),
            {},
            CheckpointError,
            "3.enorm.weight is mi",
        ),
        (lambda t: t.update(x=np.ones(3, np.float32)), {}, CheckpointError, "first x"),
        (lambda t: None, {"num_nextn_predict_layers": 1}, CheckpointError, "model.layers.4"),
        (lambda t: None, {"num_nextn_predict_layers": 3}, CheckpointError, "model.layers.5"),
        (lambda t: None, {"num_nextn_predict_layers": -1}, ConfigError, "num_nextn_predict_layers"),
        (lambda t: None, {"vocab_size": 321}, ConfigError, "size 321, .* has vocab_size 320"),
        (lambda t: None, {"num_hidden_layers": 4}, ConfigError, "with num_hidden_layers 4"),
    ],
)
def test_mtp_rejects_unsuitable_checkpoints(device, stream, tmp_path, change, fields, error, words):
    """Missing or unused tensors, a wrong number of modules or another target raise an error."""
    make_tiny_llama(tmp_path / "target")
    make_tiny_mtp(tmp_path / "mtp", TARGET, modules=2)
    edit_tensors(tmp_path / "mtp", change)
    edit_json(tmp_path / "mtp" / "config.json", **fields)
    target = model_util.load_llama(device, tmp_path / "target")
    with pytest.raises(error, match=words):
        Rounds(device, stream, target, tmp_path / "mtp", 2)
