"""Tests of EAGLE-3 heads: outputs, checkpoint formats and vocabulary maps."""

import functools

import model_util
import numpy as np
import numpy_llama
import pytest
from tiny_models import edit_tensors, llama_config, make_tiny_eagle3, make_tiny_llama

from graft.cudagraph.errors import ShapeError
from graft.cudagraph.lanes import StreamLane
from graft.models.drafters.eagle3 import Eagle3Head
from graft.models.errors import CheckpointError, ConfigError
from graft.models.llm.checkpoint import Checkpoint

TARGET = llama_config()


def entries(stream, drafter, token, slot, pos, features, call="entries") -> np.ndarray:
    """Run the method `call` of an EAGLE-3 head and return the result on the host."""
    rows = model_util.make_rows(drafter.device, token, slot, pos)
    out = getattr(drafter, call)(
        StreamLane(stream), rows, model_util.upload(drafter.device, features)
    )
    return model_util.download(stream, out)


step = functools.partial(entries, call="step")


def draft_logits(stream, drafter, out) -> np.ndarray:
    """Compute the draft logits from outputs of the head and return them on the host."""
    logits = drafter.device.zeros((out.shape[0], drafter.draft_vocab), "float32")
    drafter.head(StreamLane(stream), model_util.upload(drafter.device, out), logits)
    return model_util.download(stream, logits)


def make_head(device, tmp_path, *, form=None, target=None, **options):
    """Create a tiny target and an EAGLE-3 head. Return both models and both sets of weights."""
    target_weights = make_tiny_llama(tmp_path / "target", **(target or {}))
    weights = make_tiny_eagle3(tmp_path / "head", llama_config(**(target or {})), **options)
    model = model_util.load_llama(device, tmp_path / "target", form=form)
    drafter = model_util.load_eagle3(device, tmp_path / "head", model)
    return model, drafter, target_weights, weights


@pytest.mark.parametrize("form", model_util.FORMS)
def test_eagle3_draft_steps_equal_published_code(device, stream, form):
    """Three draft steps of the head equal the three unrolled steps of the published training code.

    Before the steps, the head processes a prefix of the sequence with features of the target.
    """
    folder = model_util.FIXTURES / "eagle3"
    expected = np.load(folder / "expected.npz")
    model = model_util.load_llama(device, folder / "target", form=form)
    drafter = model_util.load_eagle3(device, folder / "head", model)
    tokens = expected["tokens"]
    outs = expected["outs"]
    model_util.allocate_pages(stream, model.kv, 0, 40)
    model_util.allocate_pages(stream, drafter.kv, 0, 40)
    features = device.zeros((40, 3 * 32), "float32")
    model_util.forward(stream, model, tokens, 0, range(40), features)
    features = features.to_host()
    for last in (0, 1, 7, 30, 35):  # entries 0..last have features of the target
        count = last + 1
        out = entries(stream, drafter, tokens[1 : count + 1], 0, range(count), features[:count])
        np.testing.assert_allclose(out, outs[0, :count], atol=5e-5)
        hidden = out[-1:]
        for j in range(1, 4):
            at = last + j
            hidden = step(stream, drafter, tokens[at + 1 : at + 2], 0, [at], hidden)
            np.testing.assert_allclose(hidden[0], outs[j, at], atol=5e-5)
            logits = draft_logits(stream, drafter, hidden)[0]
            np.testing.assert_allclose(logits, expected["logits"][j, at], atol=5e-5)


HEADS = {
    "official": {},
    "speculators": {"names": "speculators"},
    "feature normed": {"norm_before_residual": True, "own_embedding": True},
    "speculators, feature normed": {"names": "speculators", "norm_before_residual": True},
    "three layers": {"num_hidden_layers": 3, "names": "speculators"},
    "rotary base is not its target's": {"target": {"rope_theta": 500000.0}},
    "narrower than its target": {
        "hidden_size": 32,
        "target_hidden_size": 48,
        "own_embedding": True,
    },
}


@pytest.mark.parametrize("form", model_util.FORMS)
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_eagle3_entries_equal_numpy(device, stream, tmp_path, form, options):
    """Outputs and logits of the head equal the NumPy reference.

    The cases cover both checkpoint formats, both values of `norm_before_residual`, and heads with
    their own embedding, RoPE base or width or with several layers.
    """
    options = {"form": form, "draft_vocab": 70, **options}
    model, drafter, target_weights, weights = make_head(device, tmp_path, **options)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 320, 20)
    model_util.allocate_pages(stream, drafter.kv, 2, 20)
    features = model_util.normal(rng, 20, 3 * 48)
    out = entries(stream, drafter, tokens, 2, range(20), features)
    table = weights.get("embed_tokens.weight", target_weights["model.embed_tokens.weight"])
    config = {**TARGET, **options}
    prefix = "layers.0" if "names" in options else "midlayer"
    wanted = numpy_llama.eagle3_outputs(
        weights,
        config,
        table,
        features,
        tokens,
        prefix=prefix,
        layers=options.get("num_hidden_layers", 1),
    )
    np.testing.assert_allclose(out, wanted, atol=3e-5)
    logits = numpy_llama.eagle3_logits(weights, config, wanted)
    np.testing.assert_allclose(draft_logits(stream, drafter, out), logits, atol=5e-5)
    assert model.vocab_size == 320 and drafter.draft_vocab == 70
    if "target" in options:
        config["rope_theta"] = 500000.0
        off = numpy_llama.eagle3_outputs(weights, config, table, features, tokens)
        assert np.abs(off - wanted).max() > 1e-3


def test_eagle3_step_accepts_views_of_earlier_calls(device, stream, tmp_path):
    """Views returned by `entries`, `gather` and `step` can be passed directly to the next call."""
    _, drafter, _, _ = make_head(device, tmp_path, draft_vocab=30)
    features = model_util.normal(np.random.default_rng(1), 6, 144)
    lane = StreamLane(stream)
    for slot in (0, 1):
        model_util.allocate_pages(stream, drafter.kv, slot, 9)
    out = entries(stream, drafter, range(6), 0, range(6), features)
    wanted = step(stream, drafter, [7], 0, [4], out[3:4])
    wanted = step(stream, drafter, [8], 0, [5], wanted)
    rows = model_util.make_rows(device, range(6), 1, range(6))
    view = drafter.entries(lane, rows, model_util.upload(device, features))
    view = drafter.gather(lane, view, model_util.upload_ints(device, [3]))
    view = drafter.step(lane, model_util.make_rows(device, [7], 1, [4]), view)
    view = drafter.step(lane, model_util.make_rows(device, [8], 1, [5]), view)
    assert model_util.same_bits(model_util.download(stream, view), wanted)


def test_eagle3_vocab_maps_are_inverse(device, tmp_path):
    """The map t2d is the inverse of d2t, and -1 for target ids outside the draft vocabulary."""
    _, drafter, _, weights = make_head(device, tmp_path, draft_vocab=70)
    d2t = drafter.d2t.to_host()
    t2d = drafter.t2d.to_host()
    np.testing.assert_array_equal(d2t, weights["d2t"] + np.arange(70))
    np.testing.assert_array_equal(t2d[d2t], np.arange(70))
    np.testing.assert_array_equal(t2d >= 0, weights["t2d"])
    assert (np.delete(t2d, d2t) == -1).all()


def test_eagle3_with_full_vocab_shares_target_head(device, tmp_path):
    """A head with the target's vocabulary has no maps and can use the LM head of the target."""
    make_tiny_llama(tmp_path / "target")
    make_tiny_eagle3(tmp_path / "head", TARGET)
    edit_tensors(tmp_path / "head", lambda t: t.pop("lm_head.weight"))
    model = model_util.load_llama(device, tmp_path / "target")
    drafter = model_util.load_eagle3(device, tmp_path / "head", model)
    assert drafter.d2t is None and drafter.t2d is None and drafter.draft_vocab == 320
    assert drafter.lm_head is model.lm_head and drafter.embedding is model.embedding


def test_eagle3_with_pruned_vocab_takes_rows_of_target_head(device, tmp_path):
    model, _, target, _ = make_head(
        device, tmp_path, draft_vocab=70, target={"tie_word_embeddings": False}
    )
    edit_tensors(tmp_path / "head", lambda t: t.pop("lm_head.weight"))
    drafter = model_util.load_eagle3(device, tmp_path / "head", model)
    rows = target["lm_head.weight"][drafter.d2t.to_host()]
    np.testing.assert_array_equal(drafter.lm_head.to_host(), rows)


def test_eagle3_narrower_than_target_requires_lm_head(device, tmp_path):
    model, *_ = make_head(device, tmp_path, **HEADS["narrower than its target"])
    edit_tensors(tmp_path / "head", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is miss.* width 48, expected 32"):
        model_util.load_eagle3(device, tmp_path / "head", model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("d2t"), "d2t is missing"),
        (lambda t: t["d2t"].__setitem__(0, -1), "draft id 0 to -1,"),
        (lambda t: t["d2t"].__setitem__(35, 320 - 35), "draft id 35 to 320,"),
        (lambda t: t["d2t"].__setitem__(69, (1 << 40) - 69), f"draft id 69 to {1 << 40},"),
        (lambda t: t["d2t"].__setitem__(5, t["d2t"][4] - 1), "and another draft id"),
        (lambda t: t.__setitem__("d2t", t["d2t"][:-1]), "d2t has shape"),
        (lambda t: t.__setitem__("d2t", t["d2t"].astype(np.float32)), "d2t has dtype float32"),
        (lambda t: t.pop("fc.weight"), "fc.weight is missing"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "hidden_norm|layers.0"),
        (lambda t: t.__setitem__("fc.weight", np.ones((48, 145), np.float32)), r"\[48, 145\]"),
        (lambda t: t.__setitem__("fc.bias", np.ones(48, np.float32)), "fc.bias"),
        (lambda t: t.__setitem__("input_norm.weight", np.ones(144, np.float32)), "input_norm"),
    ],
)
def test_eagle3_rejects_damaged_checkpoints(device, tmp_path, change, words):
    """Damaged checkpoints of EAGLE-3 heads raise an error that names the tensor.

    The cases are missing and unused tensors, tensors of a wrong shape or dtype, and vocabulary maps
    that are out of range or not one to one.
    """
    model, _, _, _ = make_head(device, tmp_path, draft_vocab=70)
    edit_tensors(tmp_path / "head", change)
    with pytest.raises(CheckpointError, match=words):
        model_util.load_eagle3(device, tmp_path / "head", model)


@pytest.mark.parametrize(
    ("other", "options", "words"),
    [
        ({"vocab_size": 400}, {}, "vocab_size 400"),
        ({"hidden_size": 64}, {}, "with hidden_size 64"),
        ({}, {"eagle_config": None}, "3 layers"),
    ],
)
def test_eagle3_rejects_other_targets(device, tmp_path, other, options, words):
    """A head that was made for another vocabulary, width or number of layers raises an error."""
    model, drafter, _, _ = make_head(device, tmp_path, draft_vocab=70)
    assert drafter.feature_layers == (0, 1, 2)
    make_tiny_eagle3(tmp_path / "head", llama_config(**other), draft_vocab=70, **options)
    with pytest.raises(ConfigError, match=words):
        model_util.load_eagle3(device, tmp_path / "head", model)


def test_eagle3_rejects_wrong_operands(device, stream, tmp_path):
    _, drafter, _, _ = make_head(device, tmp_path, draft_vocab=70)
    rows = model_util.make_rows(device, range(4), 0, range(4))
    lane = StreamLane(stream)
    with pytest.raises(ShapeError, match="width=144"):
        drafter.entries(lane, rows, device.zeros((4, 48), "float32"))
    with pytest.raises(ShapeError, match="width=48"):
        drafter.step(lane, rows, device.zeros((4, 144), "float32"))
    kv = model_util.make_cache(device, drafter.config, 2)
    with pytest.raises(ShapeError, match="kv"):
        Eagle3Head(
            device, drafter.config, Checkpoint(tmp_path / "head"), drafter.target, kv, max_rows=4
        )
