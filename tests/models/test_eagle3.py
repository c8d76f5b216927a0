"""EAGLE-3 heads: outputs of NumPy and of published code, both formats, maps, refusals."""

import functools

import nets_util as nets
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
    rows = nets.make_rows(drafter.device, token, slot, pos)
    out = getattr(drafter, call)(StreamLane(stream), rows, nets.upload(drafter.device, features))
    return nets.host(stream, out)


step = functools.partial(entries, call="step")


def draft_logits(stream, drafter, out) -> np.ndarray:
    logits = drafter.device.zeros((out.shape[0], drafter.draft_vocab), "float32")
    drafter.head(StreamLane(stream), nets.upload(drafter.device, out), logits)
    return nets.host(stream, logits)


def pair(device, tmp_path, *, form=None, target=None, **options):
    """A tiny target and a head for it, with their weights."""
    target_weights = make_tiny_llama(tmp_path / "target", **(target or {}))
    weights = make_tiny_eagle3(tmp_path / "head", llama_config(**(target or {})), **options)
    model = nets.load_llama(device, tmp_path / "target", form=form)
    drafter = nets.load_eagle3(device, tmp_path / "head", model)
    return model, drafter, target_weights, weights


@pytest.mark.parametrize("form", nets.FORMS)
def test_draft_steps_equal_published_code(device, stream, form):
    """From every position, an extend over true features and three steps over the head's own
    outputs give what published training code unrolls, by the features that ours trained on."""
    folder = nets.FIXTURES / "eagle3"
    expected = np.load(folder / "expected.npz")
    model = nets.load_llama(device, folder / "target", form=form)
    drafter = nets.load_eagle3(device, folder / "head", model)
    tokens = expected["tokens"]
    outs = expected["outs"]
    nets.own(stream, model.kv, 0, 40)
    nets.own(stream, drafter.kv, 0, 40)
    features = device.zeros((40, 3 * 32), "float32")
    nets.forward(stream, model, tokens, 0, range(40), features)
    features = features.to_host()
    for last in (0, 1, 7, 30, 35):  # entries 0..last have true features
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


@pytest.mark.parametrize("form", nets.FORMS)
@pytest.mark.parametrize("options", HEADS.values(), ids=HEADS)
def test_entries_equal_numpy(device, stream, tmp_path, form, options):
    """Both formats and residual variants, an own embedding, base or width: the oracle's outputs."""
    options = {"form": form, "draft_vocab": 70, **options}
    model, drafter, target_weights, weights = pair(device, tmp_path, **options)
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 320, 20)
    nets.own(stream, drafter.kv, 2, 20)
    features = rng.standard_normal((20, 3 * 48)).astype(np.float32)
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


def test_step_accepts_what_earlier_calls_returned(device, stream, tmp_path):
    """Device views flow from entries through gather into step and step, without a host copy."""
    _, drafter, _, _ = pair(device, tmp_path, draft_vocab=30)
    features = np.random.default_rng(1).standard_normal((6, 144)).astype(np.float32)
    lane = StreamLane(stream)
    for slot in (0, 1):
        nets.own(stream, drafter.kv, slot, 9)
    out = entries(stream, drafter, range(6), 0, range(6), features)
    wanted = step(stream, drafter, [7], 0, [4], out[3:4])
    wanted = step(stream, drafter, [8], 0, [5], wanted)
    rows = nets.make_rows(device, range(6), 1, range(6))
    view = drafter.entries(lane, rows, nets.upload(device, features))
    view = drafter.gather(lane, view, nets.integers(device, [3]))
    view = drafter.step(lane, nets.make_rows(device, [7], 1, [4]), view)
    view = drafter.step(lane, nets.make_rows(device, [8], 1, [5]), view)
    assert nets.same_bits(nets.host(stream, view), wanted)


def test_the_draft_vocabulary_maps_both_ways(device, tmp_path):
    """d2t holds absolute target ids, t2d their inverse, -1 elsewhere."""
    _, drafter, _, weights = pair(device, tmp_path, draft_vocab=70)
    d2t = drafter.d2t.to_host()
    t2d = drafter.t2d.to_host()
    np.testing.assert_array_equal(d2t, weights["d2t"] + np.arange(70))
    np.testing.assert_array_equal(t2d[d2t], np.arange(70))
    np.testing.assert_array_equal(t2d >= 0, weights["t2d"])
    assert (np.delete(t2d, d2t) == -1).all()


def test_a_full_vocabulary_needs_no_map(device, tmp_path):
    """Without pruning there is no map, and a missing head is the target's."""
    make_tiny_llama(tmp_path / "target")
    make_tiny_eagle3(tmp_path / "head", TARGET)
    edit_tensors(tmp_path / "head", lambda t: t.pop("lm_head.weight"))
    model = nets.load_llama(device, tmp_path / "target")
    drafter = nets.load_eagle3(device, tmp_path / "head", model)
    assert drafter.d2t is None and drafter.t2d is None and drafter.draft_vocab == 320
    assert drafter.lm_head is model.lm_head and drafter.embedding is model.embedding


def test_a_missing_head_is_the_target_s_rows(device, tmp_path):
    """With a map, a head without rows of its own has those of the target that the map names."""
    model, _, target, _ = pair(
        device, tmp_path, draft_vocab=70, target={"tie_word_embeddings": False}
    )
    edit_tensors(tmp_path / "head", lambda t: t.pop("lm_head.weight"))
    drafter = nets.load_eagle3(device, tmp_path / "head", model)
    rows = target["lm_head.weight"][drafter.d2t.to_host()]
    np.testing.assert_array_equal(drafter.lm_head.to_host(), rows)


def test_a_narrower_head_needs_rows_of_its_own(device, tmp_path):
    """Where the target's rows are too wide, a missing head is refused by name."""
    model, *_ = pair(device, tmp_path, **HEADS["narrower than its target"])
    edit_tensors(tmp_path / "head", lambda t: t.pop("lm_head.weight"))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing, .* width 48, not 32"):
        nets.load_eagle3(device, tmp_path / "head", model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("d2t"), "d2t is missing"),
        (lambda t: t["d2t"].__setitem__(0, -1), "draft id 0 to -1,"),
        (lambda t: t["d2t"].__setitem__(35, 320 - 35), "draft id 35 to 320,"),
        (lambda t: t["d2t"].__setitem__(69, (1 << 40) - 69), f"draft id 69 to {1 << 40},"),
        (lambda t: t["d2t"].__setitem__(5, t["d2t"][4] - 1), "and another one to"),
        (lambda t: t.__setitem__("d2t", t["d2t"][:-1]), "d2t has shape"),
        (lambda t: t.__setitem__("d2t", t["d2t"].astype(np.float32)), "d2t has dtype float32"),
        (lambda t: t.pop("fc.weight"), "fc.weight is missing"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "hidden_norm|layers.0"),
        (lambda t: t.__setitem__("fc.weight", np.ones((48, 145), np.float32)), r"\[48, 145\]"),
        (lambda t: t.__setitem__("fc.bias", np.ones(48, np.float32)), "fc.bias"),
        (lambda t: t.__setitem__("input_norm.weight", np.ones(144, np.float32)), "input_norm"),
    ],
)
def test_damaged_heads_are_refused_by_tensor(device, tmp_path, change, words):
    """Missing, misshapen, mistyped and leftover tensors, and maps that leave the vocabulary or are
    not one to one, raise by name."""
    model, _, _, _ = pair(device, tmp_path, draft_vocab=70)
    edit_tensors(tmp_path / "head", change)
    with pytest.raises(CheckpointError, match=words):
        nets.load_eagle3(device, tmp_path / "head", model)


@pytest.mark.parametrize(
    ("other", "options", "words"),
    [
        ({"vocab_size": 400}, {}, "vocab_size 400"),
        ({"hidden_size": 64}, {}, "with hidden_size 64"),
        ({}, {"eagle_config": None}, "3 layers"),
    ],
)
def test_a_head_of_another_target_is_refused(device, tmp_path, other, options, words):
    """A head whose vocabulary or feature width is not the target's raises, naming both; one without
    layer ids on a small target, too, while named ids work."""
    model, drafter, _, _ = pair(device, tmp_path, draft_vocab=70)
    assert drafter.feature_layers == (0, 1, 2)
    make_tiny_eagle3(tmp_path / "head", llama_config(**other), draft_vocab=70, **options)
    with pytest.raises(ConfigError, match=words):
        nets.load_eagle3(device, tmp_path / "head", model)


def test_operands_of_the_wrong_width_are_refused(device, stream, tmp_path):
    """Features and hidden states that do not fit raise by named dimension."""
    _, drafter, _, _ = pair(device, tmp_path, draft_vocab=70)
    rows = nets.make_rows(device, range(4), 0, range(4))
    lane = StreamLane(stream)
    with pytest.raises(ShapeError, match="width=144"):
        drafter.entries(lane, rows, device.zeros((4, 48), "float32"))
    with pytest.raises(ShapeError, match="width=48"):
        drafter.step(lane, rows, device.zeros((4, 144), "float32"))
    kv = nets.make_cache(device, drafter.config, 2)
    with pytest.raises(ShapeError, match="kv"):
        Eagle3Head(
            device, drafter.config, Checkpoint(tmp_path / "head"), drafter.target, kv, max_rows=4
        )
