"""A small Llama drafts for a large one that reads the same tokens."""

from __future__ import annotations

from pathlib import Path

from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.drafters.base import Drafter, DrafterContext, DraftVocab, TreeShape
from graft.models.drafters.feed import Feed
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.tokenizer import Tokenizer

__all__ = ["SmallModel"]


class SmallModel(Drafter):
    """Drafts with a Llama of its own cache, fed every token at its own position."""

    lookahead = 1

    def __init__(self, model: LlamaModel, shape: TreeShape) -> None:
        self.model = model
        self.shape = shape
        self.vocab = DraftVocab(model.vocab_size)
        self.caches = (model.kv,)

    @classmethod
    def from_dir(cls, folder: Path, room: DrafterContext) -> SmallModel:
        """Load a model's folder.

        Raises
        ------
        OptionError
            Its tokenizer is not the target's.
        CheckpointError, ConfigError, TokenizerError
        """
        config = LlamaConfig.from_dir(folder)
        check_tokens(folder, room.tokenizer)
        cache = room.cache(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.dtype
        )
        model = LlamaModel(
            room.device,
            config,
            Checkpoint(folder),
            cache,
            max_rows=room.max_rows,
            activations=room.target.kernels.activations,
        )
        return cls(model, TreeShape.by_level(room.drafts, room.tree))

    def prefill(self, lane: Lane, own: Rows, following: Rows, features: DeviceArray | None) -> None:
        self.model.forward(lane, own)

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        hidden = self.model.forward(lane, feed.committed(lane, shift=1))
        if feed.width == 1:
            return None
        logits = feed.logits[: feed.batch]
        self.model.head(lane, hidden, logits, feed.last)
        return logits

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        rows = feed.drafts(lane, level, 1)
        logits = feed.logits[: rows.count]
        self.model.forward(lane, rows, logits=logits)
        return logits


def check_tokens(folder: Path, target: Tokenizer) -> None:
    """Refuse a drafter whose ids mean other tokens than the target's. Raises OptionError."""
    own = Tokenizer(folder).backend.get_vocab(with_added_tokens=True)
    wanted = target.backend.get_vocab(with_added_tokens=True)
    for token in sorted(own.keys() | wanted.keys(), key=lambda t: own.get(t, wanted.get(t, 0))):
        if own.get(token) != wanted.get(token):
            raise OptionError(
                f"drafter {folder}: token {token!r} has id {own.get(token)}, and "
                f"{wanted.get(token)} in the target's {target.path}: drafter and target must have "
                "one tokenizer"
            )
