"""Multi-token prediction (MTP) modules (DeepSeek-V3 technical report, section 2.2) as a drafter.

Each module computes a hidden state h_i for every position i. Module j (from 0) combines h_i of the
previous module with the embedding of token i + 1 + j, runs one decoder layer at RoPE position i,
and applies a norm. The result is module j's own h_i, from which its head predicts token i + 2 + j.

The first module reads h_i from the target, after the target's final norm. The report does not say
whether the norm is applied, but DeepSeek's code and the serving engines apply it.

A module passes its h_i on, either to the next module or to itself at the next draft level. SGLang
passes on the state after the module's ``shared_head.norm``, vLLM the state before this norm. If a
module was trained for one variant and runs with the other, fewer drafts are accepted from the
second draft on. The option `norm_hidden` of `Mtp` selects the variant.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graft.cudagraph.driver.memory import DeviceArray
from graft.cudagraph.lanes import Lane
from graft.models.drafters.base import Drafter, DrafterContext, TreeShape, check_target
from graft.models.drafters.feed import Feed
from graft.models.errors import DrafterError
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import LlamaConfig
from graft.models.llm.llama import LlamaModel
from graft.models.llm.rows import Rows
from graft.models.llm.stack import DecoderLayer, DecoderStack
from graft.models.llm.weights import Weights
from graft.sampling.rows import DraftVocab

__all__ = ["Mtp"]

KERNELS = Path(__file__).resolve().parent / "kernels" / "mtp.cu"
_BLOCK = 64


@dataclass(frozen=True)
class _Module:
    """Weights of one prediction module. The fields have the names of the checkpoint's tensors."""

    embedding: DeviceArray
    enorm: DeviceArray
    hnorm: DeviceArray
    eh_proj: DeviceArray
    layer: DecoderLayer
    norm: DeviceArray
    head: DeviceArray


class Mtp(Drafter):
    """Drafter that drafts level by level with the MTP modules of a checkpoint.

    A single module drafts every level. After the first level, the module reads its own hidden state
    instead of the target's. With several modules, module j drafts level j of a chain, so there are
    at most as many drafts as modules.

    Parameters
    ----------
    folder
        A folder with config.json and tensors. The config has the target's shape and
        `num_nextn_predict_layers`. The tensors of the modules are ``model.layers.{n}.*``, numbered
        after the target's layers. Each module has a decoder layer, ``enorm``, ``hnorm``,
        ``eh_proj`` and ``shared_head.norm``. It has ``embed_tokens`` and ``shared_head.head`` only
        if they differ from the target's. Tensors of the target may be present and are ignored.
    norm_hidden
        Whether a module passes on its hidden state after ``shared_head.norm`` instead of before it.
        An engine whose drafter is given as a folder uses the default. To change it, pass
        ``lambda context: Mtp(folder, context, norm_hidden=False)`` as the drafter.

    Raises
    ------
    CheckpointError
        If tensors are missing or do not match the config.
    ConfigError
        If the config is invalid or the modules were made for another target.
    """

    def __init__(self, folder: Path, context: DrafterContext, *, norm_hidden: bool = True) -> None:
        config = LlamaConfig.from_dir(folder).for_length(context.max_length, folder)
        device = context.device
        target = context.target
        hidden = config.hidden_size
        layers = config.num_hidden_layers
        check_target(
            target, vocab_size=config.vocab_size, hidden_size=hidden, num_hidden_layers=layers
        )
        modules = _load_modules(folder, config, target)
        self._several = len(modules) > 1
        # Modules after the first depend on state of earlier calls, so cached prefixes cannot be
        # shared.
        self.lookahead = None if self._several else 1
        if self._several:
            drafts = min(context.max_drafts, len(modules))
            self.shape = TreeShape.by_level(drafts)
        else:
            drafts = context.max_drafts
            self.shape = TreeShape.by_level(drafts, context.tree)
        self.feature_layers = (layers - 1,)
        self.vocab = DraftVocab(config.vocab_size)
        self._modules = modules[:drafts]
        count = len(self._modules)
        kv = context.make_cache(count, config.num_key_value_heads, config.head_dim, config.dtype)
        self.caches = (kv,)
        self._config = config
        self._target = target
        self._stack = DecoderStack(
            target.kernels,
            config,
            [module.layer for module in self._modules],
            kv,
            max_rows=context.max_rows,
            attention_width=2 * hidden,
        )
        self._norm_hidden = norm_hidden
        self._hidden = device.empty((context.max_rows, hidden), "float32")
        # Hidden states after the norm, which the heads read. If the modules pass on states before
        # the norm, the states after the norm need a buffer of their own.
        self._normed = self._hidden
        if not norm_hidden:
            rows = context.slots * self.shape.branch
            self._normed = device.empty((rows, hidden), "float32")
        self._earlier = device.empty((context.max_rows,), "int32")
        # State of each module j between calls. `_carried[j]` holds, for each slot, the module's
        # hidden state for the last committed token, which module j + 1 reads in the next call.
        # `_last_hidden[j]` holds, for each batch row, the module's hidden state of position
        # n - 1 - j, where n is the position of the request's last committed token. In `step`, a
        # module reads the hidden states of the module before it from `_last_hidden`, and writes its
        # own hidden states to the same place.
        size = (count, context.slots * self.shape.branch, hidden)
        self._carried = device.zeros(size, "float32")
        self._last_hidden = device.zeros(size, "float32")

    def prefill(
        self, lane: Lane, rows: Rows, next_rows: Rows, features: DeviceArray | None
    ) -> None:
        self._process_committed(lane, next_rows, features)

    def start(self, lane: Lane, feed: Feed) -> DeviceArray | None:
        self._process_committed(lane, feed.committed(lane), feed.features, feed.last)
        if feed.width == 1:
            return None
        return self._predict(lane, feed, 0, self._last_hidden[0][: feed.batch])

    def step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        if feed.branch > 1:
            return self._tree_step(lane, feed, level)
        j = level if self._several else 0
        # If there are several modules, module j computes its hidden states of positions n - j ..
        # n - 1 here, where n is the position of the last committed token. The hidden state of
        # position p depends on the token at position p + j + 1, which is a draft for these p, so
        # `start` could not compute them. A single module processes only this level's draft.
        for back in reversed(range(max(j, 1))):
            rows = feed.drafts(lane, level - back, -j)
            self._run(lane, j, rows, self._last_hidden[back][: feed.batch])
        return self._predict(lane, feed, j, self._last_hidden[0][: feed.batch])

    def _tree_step(self, lane: Lane, feed: Feed, level: int) -> DeviceArray:
        """Process the nodes of a level of a draft tree with the drafter's only MTP module.

        The hidden state of a node is computed from that of its parent in the level before. Two
        buffers therefore store the hidden states of consecutive levels alternately.
        """
        if level % 2:
            parents = self._last_hidden[0]
            hidden = self._hidden
        else:
            parents = self._hidden
            hidden = self._last_hidden[0]
        rows = feed.drafts(lane, level)
        hidden = hidden[: rows.count]
        self._target.kernels.elementwise.gather(lane, parents, feed.origin, hidden)
        self._run(lane, 0, rows, hidden)
        return self._predict(lane, feed, 0, hidden)

    def _process_committed(
        self, lane: Lane, rows: Rows, features: DeviceArray | None, last: DeviceArray | None = None
    ) -> None:
        """Run all modules for committed tokens.

        A module combines a token with a hidden state of an earlier position. `rows` has each
        committed token at the position of the token before it; for the same row, module j (from 0)
        computes the hidden state of position pos - j. `features` float32[R, hidden] is the output
        of the target's last layer. `last` int32[B] is the row of each request's last token; None
        during prefill.
        """
        if features is None:
            raise DrafterError(
                "MTP modules need features of the target's last layer: pass them to prefill and "
                "start"
            )
        target = self._target
        kernels = target.kernels
        count = rows.check(len(self._hidden))
        hidden = self._hidden[:count]
        kernels.norms.rms_norm(
            lane, features, target.final_norm, target.config.rms_norm_eps, hidden
        )
        for j in range(len(self._modules)):
            if j:
                rows = self._delay_rows(lane, rows, hidden, j)
            self._run(lane, j, rows, hidden)
            if last is not None:
                kernels.elementwise.gather(lane, hidden, last, self._last_hidden[j][: len(last)])

    def _delay_rows(self, lane: Lane, rows: Rows, hidden: DeviceArray, j: int) -> Rows:
        """Replace each row of `hidden` with that of the previous position, as input of module `j`.

        The first row of a slot gets the last row of the previous call, which `_carried` stores.
        Return `rows` with positions lower by one.
        """
        carried = self._carried[j - 1]
        width = self._config.hidden_size
        earlier = self._earlier[: rows.count]
        args = [hidden, rows.slot, rows.pos, earlier, carried, rows.count, len(carried), width]
        kernel = self._target.device.load(KERNELS)["delay_rows"]
        lane.kernel(kernel, -(-width // _BLOCK), _BLOCK, args, name="delay rows")
        return Rows(rows.token, rows.slot, earlier, rows_per_slot=rows.rows_per_slot)

    def _run(self, lane: Lane, j: int, rows: Rows, hidden: DeviceArray) -> None:
        """Run module j on `rows`, and overwrite `hidden` with the module's hidden states.

        Before the call, `hidden` float32[R, hidden] contains the hidden states of the previous
        module.
        """
        count = rows.count
        module = self._modules[j]
        kernels = self._target.kernels
        eps = self._config.rms_norm_eps
        residual = self._stack.buffers.residual[:count]
        joined = self._stack.buffers.attention_input[:count]
        kernels.norms.eagle_input(
            lane,
            rows.token,
            module.embedding,
            hidden,
            module.enorm,
            module.hnorm,
            eps,
            False,
            joined,
            residual,
        )
        x = self._stack.input_norm(count, j, module.eh_proj)
        kernels.products.linear(lane, joined, module.eh_proj, residual, norm=x, name="eh_proj")
        copies = None if self._norm_hidden else {j: (hidden, 0)}
        self._stack.run(lane, rows, x, layers=range(j, j + 1), copies=copies)
        if self._norm_hidden:
            kernels.norms.rms_norm(lane, residual, module.norm, eps, hidden)

    def _predict(self, lane: Lane, feed: Feed, j: int, hidden: DeviceArray) -> DeviceArray:
        """Compute the logits of module j from its hidden states and return them."""
        count = hidden.shape[0]
        logits = feed.logits[:count]
        if not self._norm_hidden:
            normed = self._normed[:count]
            self._target.kernels.norms.rms_norm(
                lane, hidden, self._modules[j].norm, self._config.rms_norm_eps, normed
            )
            hidden = normed
        self._target.kernels.products.linear(
            lane, hidden, self._modules[j].head, logits, name="MTP head"
        )
        return logits


def _load_modules(folder: Path, config: LlamaConfig, target: LlamaModel) -> list[_Module]:
    """Upload the prediction modules of a checkpoint and return them in order."""
    weights = Weights(target.device, Checkpoint(folder))
    hidden = config.hidden_size
    vocab = config.vocab_size
    layers = config.num_hidden_layers
    modules = []
    for j in range(config.num_nextn_predict_layers):
        name = f"model.layers.{layers + j}"
        modules.append(
            _Module(
                embedding=weights.matrix_or(
                    target.embedding, f"{name}.embed_tokens.weight", vocab, hidden
                ),
                enorm=weights.vector(f"{name}.enorm.weight", hidden),
                hnorm=weights.vector(f"{name}.hnorm.weight", hidden),
                eh_proj=weights.matrix(f"{name}.eh_proj.weight", hidden, 2 * hidden),
                layer=DecoderLayer.load(weights, name, config, hidden, target.kernels),
                norm=weights.vector(f"{name}.shared_head.norm.weight", hidden),
                head=weights.matrix_or(
                    target.lm_head, f"{name}.shared_head.head.weight", vocab, hidden
                ),
            )
        )
    of_target = [f"model.layers.{i}." for i in range(layers)]
    of_target += ["model.embed_tokens.", "model.norm.", "lm_head.", "rotary_emb.inv_freq"]
    weights.finish(tuple(of_target))
    return modules
