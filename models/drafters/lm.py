"""Small draft model: a Llama model that uses the target's tokenizer."""

from __future__ import annotations

from pathlib import Path

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.errors import OptionError
from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, DrafterContext, TreeShape
from graft.models.drafters.feed import Feed
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.tokenizer import Tokenizer
from graft.sampling.rows import DraftVocab

__all__ = ["SmallModel"]


class SmallModel(Drafter):
    """Drafter that uses a small Llama model with its own KV cache.

    The model processes every token at the token's own position. (A draft head processes a token at
    the position of the previous token.)
    """

    lookahead = 1

    def __init__(self, model: LlamaModel, shape: TreeShape) -> None:
        self.model = model
        self.shape = shape
        self.vocab = DraftVocab(model.vocab_size)
        self.caches = (model.kv,)

    @classmethod
    def from_dir(cls, folder: Path, context: DrafterContext) -> SmallModel:
        """Load a model folder.

        Raises
        ------
        OptionError
            If the folder's tokenizer differs from the target's.
        CheckpointError, ConfigError, TokenizerError
            If a file of the folder is missing or invalid.
        """
        config = LlamaConfig.from_dir(folder).for_length(context.max_length, folder)
        check_tokenizer(folder, context.tokenizer)
        cache = context.make_cache(
            config.num_hidden_layers, config.num_key_value_heads, config.head_dim, config.dtype
        )
        model = LlamaModel(
            context.device,
            config,
            Checkpoint(folder),
            cache,
            max_rows=context.max_rows,
            activations=context.target.kernels.activations,
        )
        return cls(model, TreeShape.by_level(context.max_drafts, context.tree))

    def prefill(
        self, lane: Lane, rows: Rows, next_rows: Rows, features: DeviceArray | None
    ) -> None:
        self.model.forward(lane, rows)

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


def check_tokenizer(folder: Path, target: Tokenizer) -> None:
    """Raise OptionError unless the tokenizers of drafter and target assign equal ids to all tokens.

    Of the tokens whose ids differ, the message names the one with the lowest id.
    """
    draft_ids = Tokenizer(folder).backend.get_vocab(with_added_tokens=True)
    target_ids = target.backend.get_vocab(with_added_tokens=True)

    def order(token: str) -> int:
        return draft_ids.get(token, target_ids.get(token, 0))

    for token in sorted(draft_ids.keys() | target_ids.keys(), key=order):
        if draft_ids.get(token) != target_ids.get(token):
            raise OptionError(
                f"drafter {folder}: token {token!r} has id {draft_ids.get(token)}, but "
                f"{target_ids.get(token)} in the target's {target.path}: drafter and target must "
                "use the same tokenizer"
            )
