"""Rounds for tests of drafters. The test chooses tokens, features, slots and batch rows."""

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
from graft.sampling.results import row_words
from graft.sampling.state import SLOT, SlotState
from graft.sampling.tree import TreePlan

SLOTS = 3
LENGTH = 40
MAX_DRAFTS = 24


class Rounds:
    """Runs a drafter in rounds whose commits, features and drafts are chosen by the test.

    Caches are float32.

    Parameters
    ----------
    device, stream
        Device, and stream of all work.
    target
        Target model.
    folder
        Folder of the drafter.
    drafts
        Maximum number of drafts.
    tokens
        Tokens [SLOTS, LENGTH] that rounds commit, or one sequence for all slots. Random by default.
    tree
        Arguments of `TreePlan`; None for a chain.
    feature_target
        Model that computes the features; `target` by default.
    """

    def __init__(
        self,
        device,
        stream,
        target,
        folder: Path,
        drafts: int,
        tokens=None,
        tree=None,
        feature_target=None,
    ):
        self.device = device
        self.stream = stream
        self.lane = StreamLane(stream)
        drafter = self._load_drafter(target, folder, drafts, tree)
        self.drafter = drafter
        self.width = drafter.shape.nodes + 1
        self.branch = drafter.shape.branch
        vocab = target.vocab_size
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(0, vocab, (SLOTS, LENGTH))
        self.drafts = rng.integers(0, vocab, (SLOTS, MAX_DRAFTS))
        if tokens is not None:
            self.tokens[:] = tokens
        self.features = self._compute_features(feature_target or target)
        self.state = SlotState(device, SLOTS, vocab)
        self.slots = np.zeros(SLOTS, SLOT)
        self.slots["active"] = 1
        self.slots["limit"] = LENGTH
        self.slots["capacity"] = LENGTH
        self.parents = [self._random_parents(rng) for _ in range(SLOTS)]
        self.scratch = RoundScratch(
            device,
            SLOTS,
            self.width,
            vocab,
            branch=self.branch,
            features=self.features.shape[2],
            draft_vocab=drafter.vocab.size,
        )

    def _load_drafter(self, target, folder, drafts, tree):
        """Load the drafter with separate float32 caches."""

        def make_cache(layers, kv_heads, head_dim, dtype):
            config = SimpleNamespace(num_key_value_heads=kv_heads, head_dim=head_dim, dtype=dtype)
            return model_util.make_cache(self.device, config, layers, dtype="float32")

        context = SimpleNamespace(
            device=self.device,
            target=target,
            max_drafts=drafts,
            slots=SLOTS,
            tree=tree and TreePlan(*tree),
            max_rows=64,
            make_cache=make_cache,
            max_length=LENGTH,
            tokenizer=None,
        )
        return make_drafter(folder, context)

    def _compute_features(self, target) -> np.ndarray:
        """Return the target's features [SLOTS, LENGTH, size] of all tokens; allocate all pages."""
        layers = self.drafter.feature_layers
        target.set_feature_layers(layers)
        size = len(layers) * target.config.hidden_size
        features = np.zeros((SLOTS, LENGTH, size), np.float32)
        for slot in range(SLOTS):
            for kv in (target.kv, *self.drafter.caches):
                model_util.allocate_pages(self.stream, kv, slot, LENGTH + MAX_DRAFTS)
            output = self.device.zeros((LENGTH, size), "float32")
            model_util.forward(self.stream, target, self.tokens[slot], slot, range(LENGTH), output)
            features[slot] = output.to_host()
        return features

    def _random_parents(self, rng: np.random.Generator) -> list[int]:
        """Return the parent of each draft of a slot, a random node of the previous level."""
        parents = []
        for j in range(MAX_DRAFTS):
            level = j // self.branch
            first = (level - 1) * self.branch + 1
            parents.append(first + int(rng.integers(self.branch)) if level else 0)
        return parents

    def tree(self, slot: int) -> Tree:
        """Return the draft tree of a slot: the last committed token followed by the drafts."""
        last = int(self.slots["last"][slot])
        return Tree((last, *self.drafts[slot].tolist()), (-1, *self.parents[slot]))

    @property
    def n(self):
        """Position of the last token of every slot."""
        return self.slots["n"]

    def prompt(self, slot: int, chunks: tuple[int, ...]) -> None:
        """Process a prompt in chunks between the positions `chunks`, up to its last token."""
        for begin, end in itertools.pairwise(chunks):
            rows = model_util.make_rows(
                self.device, self.tokens[slot, begin + 1 : end + 1], slot, range(begin, end)
            )
            features = model_util.upload(self.device, self.features[slot, begin:end])
            self.drafter.prefill(self.lane, rows, rows, features)
        self.n[slot] = chunks[-1]

    def commit(self, batch: list[int], counts: list[int]) -> Feed:
        """Commit `counts` tokens in the slots of a batch, and return the drafter's input.

        A slot of -1 is a padding row. The features of padding rows and of rejected drafts are
        random.
        """
        rng = np.random.default_rng(1)
        features = rng.standard_normal((len(batch), self.width, self.features.shape[2]))
        rows = np.full((len(batch), row_words(self.width - 1)), -1, np.int32)
        for b, (slot, count) in enumerate(zip(batch, counts, strict=True)):
            positions = np.arange(self.n[slot], self.n[slot] + count)
            result = result_row(self.tokens[slot, positions + 1], slot=slot, old_n=self.n[slot])
            rows[b, : len(result)] = result
            features[b, :count] = self.features[slot, positions]
            self.n[slot] += count
            self.slots["last"][slot] = self.tokens[slot, self.n[slot]]
        for slot in range(SLOTS):
            write_draft_tree(self.slots[slot], self.tree(slot))
        self.state.copy_from(self.slots)
        return self._make_feed(batch, rows, features.astype(np.float32))

    def _make_feed(self, batch: list[int], rows: np.ndarray, features: np.ndarray) -> Feed:
        """Upload the results and the features of a round, and return the drafter's input."""
        num_rows = len(batch) * self.width
        self.scratch.row_slot[: len(batch)].copy_from(np.array(batch, np.int32))
        self.scratch.features[:num_rows].copy_from(features.reshape(num_rows, -1))
        results = self.device.from_host(rows)
        arrays = SimpleNamespace(results=results, row_words=rows.shape[1])
        sampler = SimpleNamespace(arrays=arrays)
        feed = Feed(
            self.device,
            len(batch),
            num_rows,
            self.width,
            self.branch,
            self.state,
            sampler,
            self.scratch,
        )
        first, packed = pack_even_rows(len(batch), self.width)
        feed.first.copy_from(first)
        feed.row_map.map.copy_from(packed)
        return feed

    def levels(self, feed: Feed):
        """Run the drafter; yield the slot, the path and the logits of every node of every level."""
        for level in range(len(self.drafter.shape.levels)):
            if level:
                output = self.drafter.step(self.lane, feed, level)
            else:
                output = self.drafter.start(self.lane, feed)
            level_logits = model_util.download(self.stream, output)
            nodes = len(level_logits) // feed.batch
            first_node = (level - 1) * nodes + 1 if level else 0
            row_slot = feed.row_slot.to_host()
            for r, logits in enumerate(level_logits):
                slot = row_slot[r // nodes]
                if slot >= 0:
                    path = self.tree(slot).path(first_node + r % nodes)
                    yield slot, path, logits
