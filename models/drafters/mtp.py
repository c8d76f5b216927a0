"""Multi-token prediction modules (DeepSeek-V3 technical report, section 2.2) as a drafter.

Module j joins h_i of the module before it with the embedding of token i + 1 + j, runs one decoder
layer at rotary position i, and norms what comes out: its own h_i, from which its head predicts
token i + 2 + j. The first one's h_i is the target's, behind the final norm; the report leaves that
open, but the code that comes with DeepSeek's checkpoints and those who serve them do so.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.lanes import Lane
from graft.cudagraph.memory import DeviceArray
from graft.models.drafters.base import Drafter, DrafterContext, DraftVocab, TreeShape, check_target
from graft.models.drafters.feed import Feed
from graft.models.errors import DrafterError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderLayer, DecoderStack
from graft.models.llm.weights import Weights

__all__ = ["Mtp"]

KERNELS = Path(__file__).resolve().parent / "kernels" / "mtp.cu"
_BLOCK = 64


@dataclass(frozen=True)
class _Module:
    embedding: DeviceArray
    enorm: DeviceArray
    hnorm: DeviceArray
    joined: DeviceArray
    layer: DecoderLayer
    norm: DeviceArray
    head: DeviceArray


class Mtp(Drafter):
    """Drafts level by level: a lone module at every level, its h in the target's stead; else
    module j at level j of a chain, and no more drafts than modules.

    Parameters
    ----------
    folder : a config.json of the target's shape with `num_nextn_predict_layers`; and tensors
        ``model.layers.{n}.*`` of the layers behind the target's: each a decoder layer, ``enorm``,
        ``hnorm``, ``eh_proj``, ``shared_head.norm``, and ``embed_tokens`` and ``shared_head.head``
        where they are not the target's, whose own tensors may stand beside these.

    Raises
    ------
    CheckpointError, ConfigError
        Also when the modules were made for another target.
    """

    def __init__(self, folder: Path, room: DrafterContext) -> None:
        config = LlamaConfig.from_dir(folder)
        device = room.device
        target = room.target
        layers = config.num_hidden_layers
        hidden = config.hidden_size
        check_target(
            target, vocab_size=config.vocab_size, hidden_size=hidden, num_hidden_layers=layers
        )
        weights = Weights(device, Checkpoint(folder))

        def shared(name: str, of_target: DeviceArray) -> DeviceArray:
            own = name in weights.checkpoint
            return weights.matrix(name, config.vocab_size, hidden) if own else of_target

        names = [f"model.layers.{layers + j}" for j in range(config.num_nextn_predict_layers)]
        modules = [
            _Module(
                shared(f"{name}.embed_tokens.weight", target.embedding),
                weights.vector(f"{name}.enorm.weight", hidden),
                weights.vector(f"{name}.hnorm.weight", hidden),
                weights.matrix(f"{name}.eh_proj.weight", hidden, 2 * hidden),
                DecoderLayer.load(weights, name, config, hidden, target.kernels),
                weights.vector(f"{name}.shared_head.norm.weight", hidden),
                shared(f"{name}.shared_head.head.weight", target.lm_head),
            )
            for name in names
        ]
        weights.finish(
            (
                "model.embed_tokens.",
                "model.norm.",
                "lm_head.",
                "rotary_emb.inv_freq",
                *(f"model.layers.{i}." for i in range(layers)),
            )
        )
        self._several = len(modules) > 1
        self.lookahead = None if self._several else 1  # the modules behind the first carry state
        drafts = min(room.drafts, len(modules)) if self._several else room.drafts
        self.shape = TreeShape.by_level(drafts, None if self._several else room.tree)
        self.taps = (layers - 1,)
        self.vocab = DraftVocab(config.vocab_size)
        self._modules = modules[:drafts]
        count = len(self._modules)
        self._kv = room.cache(count, config.num_key_value_heads, config.head_dim, config.dtype)
        self.caches = (self._kv,)
        self._config = config
        self._target = target
        self._stack = DecoderStack(
            target.kernels,
            config,
            [module.layer for module in self._modules],
            self._kv,
            max_rows=room.max_rows,
            attention_width=2 * hidden,
        )
        self._hidden = device.empty((room.max_rows, hidden), "float32")
        self._earlier = device.empty((room.max_rows,), "int32")
        # Of module j: h of every slot's last true token, for the module behind it; and of each row
        # h of entry n - 1 - j, which goes through the modules behind it level by level.
        self._carried, self._ends = (
            device.zeros((count, room.slots * self.shape.branch, hidden), "float32")
            for _ in range(2)
        )

    def prefill(self, lane: Lane, own: Rows, following: Rows, features: DeviceArray | None) -> None:
        self._absorb(lane, following, features)

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        self._absorb(lane, feed.committed(lane), feed.features, feed.last)
        if feed.width == 1:
            return None
        return self._predict(lane, feed, 0, self._ends[0][: feed.batch])

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        if feed.branch > 1:
            both = self._ends[0], self._hidden
            before, ends = both if level % 2 else both[::-1]
            rows = feed.drafts(lane, level)
            ends = ends[: rows.count]
            self._target.kernels.gather(lane, before, feed.origin, ends)
            self._run(lane, 0, rows, ends)
            return self._predict(lane, feed, 0, ends)
        j = level if self._several else 0
        # Entries n - j .. n - 1 of module j are paired with drafts; those of a lone one go on.
        for back in reversed(range(max(j, 1))):
            rows = feed.drafts(lane, level - back, -j)
            self._run(lane, j, rows, self._ends[back][: feed.batch])
        return self._predict(lane, feed, j, self._ends[0][: feed.batch])

    def _absorb(
        self, lane: Lane, rows: Rows, features: DeviceArray | None, last: DeviceArray | None = None
    ) -> None:
        """Feed true tokens to every module; row r of module j is entry ``rows.pos[r] - j``."""
        if features is None:
            raise DrafterError("MTP modules need features of the target's last layer")
        target = self._target
        kernels = self._target.kernels
        width = self._config.hidden_size
        n = rows.check(len(self._hidden))
        hidden = self._hidden[:n]
        earlier = self._earlier[:n]
        kernels.norm(lane, features, target.final_norm, target.config.rms_norm_eps, hidden)
        for j in range(len(self._modules)):
            if j:
                carried = self._carried[j - 1]
                args = [hidden, rows.slot, rows.pos, earlier, carried, n, len(carried), width]
                delay = target.device.load(KERNELS)["delay_rows"]
                lane.kernel(delay, -(-width // _BLOCK), _BLOCK, args, name="delay rows")
                rows = Rows(rows.token, rows.slot, earlier, rows_per_slot=rows.rows_per_slot)
            self._run(lane, j, rows, hidden)
            if last is not None:
                kernels.gather(lane, hidden, last, self._ends[j][: len(last)])

    def _run(self, lane: Lane, j: int, rows: Rows, hidden: DeviceArray) -> None:
        """Turn float32[R, hidden], h of the module before, into module j's."""
        n = rows.count
        module = self._modules[j]
        kernels = self._target.kernels
        buffers = self._stack.buffers
        eps = self._config.rms_norm_eps
        residual = buffers.residual[:n]
        kernels.eagle_input(
            lane,
            rows.token,
            module.embedding,
            hidden,
            module.enorm,
            module.hnorm,
            eps,
            False,
            buffers.attention_input[:n],
            residual,
        )
        x = self._stack.input_norm(n, j, module.joined)
        kernels.linear(
            lane, buffers.attention_input[:n], module.joined, residual, norm=x, name="eh_proj"
        )
        self._stack.run(lane, rows, x, layers=range(j, j + 1))
        kernels.norm(lane, residual, module.norm, eps, hidden)

    def _predict(self, lane: Lane, feed: Feed, j: int, ends: DeviceArray) -> DeviceArray:
        logits = feed.logits[: ends.shape[0]]
        self._target.kernels.linear(lane, ends, self._modules[j].head, logits, name="MTP head")
        return logits
