"""Multi-token prediction modules: every level of many rounds equals NumPy over whole sequences."""

import itertools
from types import SimpleNamespace

import nets_util as nets
import numpy as np
import numpy_llama
import pytest
from tiny_models import edit_json, edit_tensors, llama_config, make_tiny_llama, make_tiny_mtp

from graft.cudagraph.lanes import StreamLane
from graft.models.drafters import Mtp
from graft.models.drafters.load import make_drafter
from graft.models.errors import CheckpointError, ConfigError

TARGET = llama_config()
SLOTS, WIDTH, LENGTH = 3, 5, 48


def make_room(device, target, drafts):
    """What an engine gives to a drafter, for a few slots of some 60 positions."""
    def cache(layers, *shape):
        config = SimpleNamespace(**dict(zip(
            ("num_key_value_heads", "head_dim", "dtype"), shape, strict=True)))  # fmt: skip
        return nets.make_cache(device, config, layers)

    return SimpleNamespace(device=device, target=target, drafts=drafts, slots=SLOTS,
                           max_rows=64, cache=cache, tokenizer=None)  # fmt: skip


class Rounds:
    """Sequences of true tokens and features, of which a drafter is told round by round."""

    def __init__(self, device, stream, drafter, vocab, width, seed):
        self.device, self.lane, self.drafter = device, StreamLane(stream), drafter
        self.rng = np.random.default_rng(seed)
        self.tokens = self.rng.integers(0, vocab, (SLOTS, LENGTH))
        self.features = self.rng.standard_normal((SLOTS, LENGTH, width)).astype(np.float32)
        self.n = np.zeros(SLOTS, np.int64)
        self.batch, self.drafts = [0] * SLOTS, np.zeros((SLOTS, 8), np.int64)
        for slot in range(SLOTS):
            nets.own(stream, drafter.caches[0], slot, LENGTH)

    def prompt(self, slot, chunks):
        """Absorb a prompt that ends behind the last chunk."""
        for begin, end in itertools.pairwise(chunks):
            rows = nets.make_rows(self.device, self.tokens[slot, begin + 1 : end + 1], slot,
                                  range(begin, end))  # fmt: skip
            features = nets.upload(self.device, self.features[slot, begin:end])
            self.drafter.prefill(self.lane, rows, rows, features)
        self.n[slot] = chunks[-1]

    def commit(self, batch, counts):
        """The feed of a round that commits `counts` tokens in the slots of `batch`; -1: padding."""
        rows = np.full((3, len(batch), WIDTH), -1)
        rows[0] = 0
        features = self.rng.standard_normal((len(batch), WIDTH, self.features.shape[2]))
        for b, (slot, count) in enumerate(zip(batch, counts, strict=True)):
            at = np.arange(self.n[slot], self.n[slot] + count)
            if slot >= 0:
                rows[:, b, :count] = self.tokens[slot, at + 1], np.full(count, slot), at
                features[b, :count] = self.features[slot, at]
                self.n[slot] += count
        self.batch = batch
        last = [b * WIDTH + max(count, 1) - 1 for b, count in enumerate(counts)]
        vocab = self.drafter.vocab.size
        return SimpleNamespace(
            committed=lambda lane: nets.make_rows(self.device, *rows.reshape(3, -1)),
            features=nets.upload(self.device, features.reshape(len(batch) * WIDTH, -1)),
            batch=len(batch), last=nets.integers(self.device, last), drafts=self.draft_rows,
            logits=self.device.zeros((len(batch), vocab), "float32"))  # fmt: skip

    def draft_rows(self, lane, level, shift=0):
        """Draft `level` of each slot, at position ``n + shift + level - 1``."""
        slots = np.array(self.batch)
        pos = np.where(slots < 0, -1, self.n[slots] + shift + level - 1)
        return nets.make_rows(self.device, self.drafts[slots, level - 1], slots, pos)


def oracle(weights, of_target, tokens, features, drafts, modules):
    """Logits [vocab] of what follows `tokens` and `drafts`, with features of all tokens but the
    last: a lone module goes on behind its own states, of several each reads the one before it."""
    said = np.concatenate([tokens, drafts]).astype(np.int64)
    norm, table = of_target["model.norm.weight"], of_target["model.embed_tokens.weight"]
    h = numpy_llama.rms_norm(features[: len(tokens) - 1].astype(np.float64), norm, 1e-5)
    for level in range(len(drafts) + 1):
        j = level if modules > 1 else 0
        prefix = f"model.layers.{3 + j}"
        own = weights.get(f"{prefix}.embed_tokens.weight", table)
        following = said[1 + j :][: len(h)]
        out = numpy_llama.mtp_states(weights, TARGET, prefix, own, h, following)
        h = out if modules > 1 else np.concatenate([h, out[-1:]])
    return weights.get(f"{prefix}.shared_head.head.weight", table).astype(np.float64) @ h[-1]


@pytest.mark.parametrize("form", nets.FORMS)
@pytest.mark.parametrize("modules, own", [(1, False), (1, True), (2, False), (4, True)])
def test_every_level_equals_numpy(device, stream, tmp_path, form, modules, own):
    """Prompts of every length in chunks, rounds that commit one to five tokens in changing rows:
    each level's logits are those of the whole sequence with the drafts behind it."""
    of_target = make_tiny_llama(tmp_path / "target")
    weights = make_tiny_mtp(tmp_path / "mtp", TARGET, modules=modules, own=own)
    target = nets.load_llama(device, tmp_path / "target", form=form)
    drafter = make_drafter(tmp_path / "mtp", make_room(device, target, 4))
    levels = 4 if modules == 1 else modules
    assert isinstance(drafter, Mtp) and drafter.shape.levels == (1,) * levels
    rounds = Rounds(device, stream, drafter, 320, 48, seed=modules)
    for slot, chunks in enumerate([(0,), (0, 1), (0, 3, 4, 11)]):
        rounds.prompt(slot, chunks)
    for batch, counts in [([0, 1, 2], (1, 1, 2)), ([2, -1, 0], (5, 0, 1)), ([0, 2, 1], (1, 4, 1)),
                          ([1], (5,)), ([2, 1, 0], (1, 2, 3))]:  # fmt: skip
        feed = rounds.commit(batch, counts)
        rounds.drafts[:] = rounds.rng.integers(0, 320, rounds.drafts.shape)
        for level in range(levels):
            made = drafter.step(rounds.lane, feed, level) if level else drafter.start(
                rounds.lane, feed)  # fmt: skip
            logits = nets.host(stream, made)
            for b, slot in enumerate(batch):
                if slot >= 0:
                    said = rounds.tokens[slot, : rounds.n[slot] + 1]
                    wanted = oracle(weights, of_target, said, rounds.features[slot],
                                    rounds.drafts[slot, :level], modules)  # fmt: skip
                    np.testing.assert_allclose(logits[b], wanted, atol=1e-4)


def test_a_target_may_stand_beside_its_modules(device, tmp_path):
    """One folder holds both: the target leaves the modules alone, and they the target's tensors;
    fewer drafts than modules load fewer layers of cache."""
    make_tiny_llama(tmp_path / "both")
    weights = make_tiny_mtp(tmp_path / "mtp", TARGET, modules=2)
    edit_tensors(tmp_path / "both", lambda tensors: tensors.update(weights))
    with pytest.raises(CheckpointError, match=r"model\.layers\.3"):
        nets.load_llama(device, tmp_path / "both")
    edit_json(tmp_path / "both" / "config.json", num_nextn_predict_layers=2)
    target = nets.load_llama(device, tmp_path / "both")
    drafter = make_drafter(tmp_path / "both", make_room(device, target, 1))
    assert drafter.shape.nodes == drafter.caches[0].layers == 1 and drafter.taps == (2,)


@pytest.mark.parametrize(
    ("change", "fields", "error", "words"),
    [(lambda t: t.pop("model.layers.3.enorm.weight"), {}, CheckpointError, "3.enorm.weight is mi"),
     (lambda t: t.update(x=np.ones(3, np.float32)), {}, CheckpointError, "first x"),
     (lambda t: None, {"num_nextn_predict_layers": 1}, CheckpointError, "model.layers.4"),
     (lambda t: None, {"num_nextn_predict_layers": 3}, CheckpointError, "model.layers.5"),
     (lambda t: None, {"num_nextn_predict_layers": -1}, ConfigError, "num_nextn_predict_layers"),
     (lambda t: None, {"vocab_size": 321}, ConfigError, "of vocab_size 321; .* is 320"),
     (lambda t: None, {"num_hidden_layers": 4}, ConfigError, "of num_hidden_layers 4")],
)  # fmt: skip
def test_modules_that_do_not_fit_are_refused(device, tmp_path, change, fields, error, words):
    """Missing and leftover tensors, another count, and modules of another target, by name."""
    make_tiny_llama(tmp_path / "target")
    make_tiny_mtp(tmp_path / "mtp", TARGET, modules=2)
    edit_tensors(tmp_path / "mtp", change)
    edit_json(tmp_path / "mtp" / "config.json", **fields)
    target = nets.load_llama(device, tmp_path / "target")
    with pytest.raises(error, match=words):
        make_drafter(tmp_path / "mtp", make_room(device, target, 2))
