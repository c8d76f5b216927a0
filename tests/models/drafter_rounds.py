"""Rounds as a drafter sees them: known tokens and features in changing slots and rows."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import model_util
import numpy as np
from reference_round import Tree
from round_simulator import pack_even_rows, result_row, write_draft_tree

from graft.cudagraph.lanes import StreamLane
from graft.models.drafters.feed import Feed, RoundScratch
from graft.models.drafters.load import make_drafter
from graft.sampling.sampler import row_words
from graft.sampling.state import SLOT, SlotState
from graft.sampling.tree import TreePlan

SLOTS = 3
LENGTH = 40
MAX_DRAFTS = 24


class Rounds:
    """Loads the drafter of a folder and feeds it tokens [SLOTS, LENGTH] round by round.

    Tokens are random unless given; features are the target's. Caches are float32.
    """

    def __init__(self, device, stream, target, folder: Path, drafts: int, tokens=None, tree=None):
        def cache(layers, *shape):
            names = ("num_key_value_heads", "head_dim", "dtype")
            config = SimpleNamespace(**dict(zip(names, shape, strict=True)))
            return model_util.make_cache(device, config, layers, dtype="float32")

        context = SimpleNamespace(
            device=device,
            target=target,
            max_drafts=drafts,
            slots=SLOTS,
            tree=tree and TreePlan(*tree),
            max_rows=64,
            make_cache=cache,
            max_length=LENGTH,
            tokenizer=None,
        )
        self.device = device
        self.stream = stream
        self.lane = StreamLane(stream)
        self.drafter = drafter = make_drafter(folder, context)
        self.width = drafter.shape.nodes + 1
        vocab = target.vocab_size
        self.branch = drafter.shape.branch
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, vocab, (SLOTS, LENGTH))
        self.drafts = rng.integers(0, vocab, (SLOTS, MAX_DRAFTS))
        if tokens is not None:
            self.tokens[:] = tokens
        target.set_feature_layers(drafter.feature_layers)
        feature_size = len(drafter.feature_layers) * target.config.hidden_size
        self.features = np.zeros((SLOTS, LENGTH, feature_size), np.float32)
        for slot in range(SLOTS):
            for kv in (target.kv, *drafter.caches):
                model_util.allocate_pages(stream, kv, slot, LENGTH + MAX_DRAFTS)
            logits_array = device.zeros((LENGTH, feature_size), "float32")
            model_util.forward(stream, target, self.tokens[slot], slot, range(LENGTH), logits_array)
            self.features[slot] = logits_array.to_host()
        self.state = SlotState(device, SLOTS, vocab)
        self.slots = np.zeros(SLOTS, SLOT)
        self.slots["active"] = 1
        self.slots["limit"] = LENGTH
        self.parents = [self._random_parents(rng) for _ in range(SLOTS)]
        self.scratch = RoundScratch(
            device,
            SLOTS,
            self.width,
            vocab,
            branch=self.branch,
            features=feature_size,
            draft_vocab=drafter.vocab.size,
        )

    def _random_parents(self, rng: np.random.Generator) -> list[int]:
        """Return the parents of a slot's drafts: random nodes of the previous level."""
        parents = []
        for j in range(MAX_DRAFTS):
            level = j // self.branch
            first = (level - 1) * self.branch + 1
            parents.append(first + int(rng.integers(self.branch)) if level else 0)
        return parents

    def tree(self, slot: int) -> Tree:
        """Return the last committed token and the drafts of a slot."""
        last = int(self.slots["last"][slot])
        return Tree((last, *self.drafts[slot].tolist()), (-1, *self.parents[slot]))

    @property
    def n(self):
        """Position of the last token of every slot."""
        return self.slots["n"]

    def prompt(self, slot: int, chunks: tuple[int, ...]) -> None:
        """Process the prompt that ends with the token at the last position of `chunks`."""
        for begin, end in itertools.pairwise(chunks):
            rows = model_util.make_rows(
                self.device, self.tokens[slot, begin + 1 : end + 1], slot, range(begin, end)
            )
            features = model_util.upload(self.device, self.features[slot, begin:end])
            self.drafter.prefill(self.lane, rows, rows, features)
        self.n[slot] = chunks[-1]

    def commit(self, batch: list[int], counts: list[int]) -> Feed:
        """Return the feed of a round that commits `counts` tokens in these slots (-1: padding)."""
        rows = np.full((len(batch), row_words(self.width - 1)), -1, np.int32)
        features = (
            np.random.default_rng(1)
            .standard_normal((len(batch), self.width, self.features.shape[2]))
            .astype(np.float32)
        )
        for b, (slot, count) in enumerate(zip(batch, counts, strict=True)):
            at = np.arange(self.n[slot], self.n[slot] + count)
            result = result_row(self.tokens[slot, at + 1], slot=slot, old_n=self.n[slot])
            rows[b, : len(result)] = result
            features[b, :count] = self.features[slot, at]
            self.n[slot] += count
            self.slots["last"][slot] = self.tokens[slot, self.n[slot]]
        for slot in range(SLOTS):
            write_draft_tree(self.slots[slot], self.tree(slot))
        self.state.copy_from(self.slots)
        self.scratch.row_slot[: len(batch)].copy_from(np.array(batch, np.int32))
        self.scratch.features[: features[..., 0].size].copy_from(
            features.reshape(-1, features.shape[2])
        )
        sampler = SimpleNamespace(rows=self.device.from_host(rows), row_words=rows.shape[1])
        feed = Feed(
            self.device,
            len(batch),
            len(batch) * self.width,
            self.width,
            self.branch,
            self.state,
            sampler,
            self.scratch,
        )
        first, packed = pack_even_rows(len(batch), self.width)
        feed.first.copy_from(first)
        feed.rows.map.copy_from(packed)
        return feed

    def levels(self, feed: Feed):
        """Yield slot, path and logits of every node of every level."""
        for level in range(len(self.drafter.shape.levels)):
            logits_array = (
                self.drafter.step(self.lane, feed, level)
                if level
                else self.drafter.start(self.lane, feed)
            )
            logits_array = model_util.download(self.stream, logits_array)
            nodes = len(logits_array) // feed.batch
            row_slot = feed.row_slot.to_host()
            for r, logits in enumerate(logits_array):
                slot = row_slot[r // nodes]
                node = (level - 1) * nodes + r % nodes + 1 if level else 0
                if slot >= 0:
                    yield slot, self.tree(slot).path(node), logits
