"""Device arrays that the sampling kernels of a round share."""

from __future__ import annotations

from graft.cudagraph.driver.cstruct import read_struct
from graft.cudagraph.driver.memory import DeviceArray
from graft.sampling.checks import check_range, expect
from graft.sampling.exchange import Exchange
from graft.sampling.kernels.loader import KERNELS, row_block, row_parts
from graft.sampling.results import row_words
from graft.sampling.rows import DraftVocab, RowMap
from graft.sampling.state import MAX_DRAFTS, SlotState

__all__ = ["SamplingArrays"]


class SamplingArrays:
    """Device arrays and sizes that the sampling kernels share, and checks of common arguments.

    Parameters
    ----------
    state
        State of all slots. The kernels run on its device.
    exchange
        Records that kernels, grammar worker and host exchange, for as many slots as `state` has. It
        determines the draft mode, the maximum number of drafts K, and the size V of the target's
        vocabulary, which must be less than 2**24.
    replay
        int32 [1], number of the current replay.
    token_limit
        Token ids at or above this number are illegal, also for requests without a grammar.
    max_batch
        Maximum number of batch rows.
    draft_vocab
        Vocabulary of the drafter's logits; None if the drafter computes no logits.
    block
        Threads per block of the kernels that process rows of logits: 1 or a multiple of 32, at most
        1024. The default depends on the device. Results do not depend on it.
    parts
        Blocks that share a row of logits, at most 32. The default depends on the device. Results do
        not depend on it.
    """

    def __init__(
        self,
        state: SlotState,
        exchange: Exchange,
        replay: DeviceArray,
        *,
        token_limit: int,
        max_batch: int,
        draft_vocab: DraftVocab | None = None,
        block: int | None = None,
        parts: int | None = None,
    ) -> None:
        self.device = state.device
        self.state = state
        self.exchange = exchange
        self.mode = exchange.mode
        self.vocab_size = exchange.vocab_size
        self.token_limit = token_limit
        self.draft_length = exchange.drafts
        self.draft_vocab = DraftVocab(0) if draft_vocab is None else draft_vocab
        self.max_batch = max_batch
        self.replay = replay
        check_range("parts", 1 if parts is None else parts, 1, 32)
        self._check_sizes()
        self.block = row_block(self.device) if block is None else block
        self.parts = parts or row_parts(self.device, self.vocab_size)
        self.draft_parts = parts or row_parts(self.device, self.draft_vocab.size)
        self._allocate()

    def _check_sizes(self) -> None:
        state = self.state
        vocab_size = self.vocab_size
        check_range("vocab_size", vocab_size, 1, (1 << 24) - 1)
        check_range("token_limit", self.token_limit, 1, vocab_size)
        # `RowMap.map` stores the batch row in the upper half of an int32.
        max_batch_limit = min(state.slots, (1 << 15) - 1)
        check_range("max_batch", self.max_batch, 1, max_batch_limit)
        check_range("draft_length", self.draft_length, 0, MAX_DRAFTS)
        check_range("exchange slots", self.exchange.slots, state.slots, state.slots)
        check_range("vocab_size of the state", state.vocab_size, vocab_size, vocab_size)
        expect("replay", self.replay, "int32", N=1)
        self.draft_vocab.check(vocab_size)

    def _allocate(self) -> None:
        device = self.device
        rows = self.max_batch * (self.draft_length + 1)
        # Filtered distribution of each forward row, from which its token is sampled. Undefined for
        # rows that are not ready and for greedy requests (temperature < 1e-5).
        self.probs = device.zeros((rows, self.vocab_size), "float32")
        # Logits of the forward rows of requests that ask for log probabilities: as the model
        # computed them or, with `logprobs_masked`, after adjustment and masking.
        self.raw_logits = device.zeros((rows, self.vocab_size), "float32")
        # Token sampled for each forward row; -1 if the `Verifier` determines it by testing a draft.
        self.target_tokens = device.zeros((rows,), "int32")
        # Status of each forward row: 0 if its mask row is not ready, otherwise ROW_OK,
        # ROW_NO_TOKEN, ROW_BAD_LOGIT or ROW_RELAXED (kernels/row.cuh).
        self.row_status = device.zeros((rows,), "int32")
        # State (ROW_*) of the mask row that each forward row uses.
        self.mask_states = device.zeros((rows,), "int32")
        self.row_words = row_words(self.draft_length)
        self.results = device.zeros((self.max_batch, self.row_words), "int32")
        # Tables of draft probabilities: the distribution that each draft was sampled from.
        table_shape = (self.state.slots, self.mode.tables, max(self.draft_vocab.size, 1))
        self.draft_probs = device.zeros(table_shape, "float32")
        # DraftInput of each batch row. The first launch for a draft reads it from host memory, and
        # later launches for this draft read this copy.
        input_words = read_struct(KERNELS / "sample.cu", "DraftInput").itemsize // 4
        self.draft_inputs = device.zeros((self.max_batch, input_words), "int32")
        # Results of rejection sampling by forward row: the factor P of the target distribution p in
        # the residual max(P p - q, 0) after this row, and whether the row's draft has passed.
        self.test_weights = device.zeros((rows,), "float32")
        self.test_results = device.zeros((rows,), "int32")
        # Number of drafts that have probability 0 in the table they were sampled from. It stays 0
        # unless there is a bug.
        self.faults = device.zeros((1,), "int32")
        # Scratch memory of the blocks that share a row (struct CrossBlockScratch). The kernels
        # expect zeros and write zeros again before they end.
        scratch_bytes = read_struct(KERNELS / "row.cuh", "CrossBlockScratch").itemsize
        scratch_rows = self.max_batch * self.mode.rows_per_request
        self.cross_block = device.zeros((scratch_rows, scratch_bytes), "uint8")

    @property
    def exchange_args(self) -> tuple[object, ...]:
        """Kernel arguments: records exchanged with the host, their layout, replay number."""
        return (self.exchange.memory, self.exchange.layout, self.replay)

    @property
    def draft_vocab_args(self) -> tuple[object, ...]:
        """Kernel arguments that describe the columns of draft logits and map them to token ids."""
        vocab = self.draft_vocab
        return (vocab.size, self.token_limit, vocab.d2t, vocab.t2d)

    @property
    def drafting_args(self) -> tuple[object, ...]:
        """Kernel arguments: scratch for each row of logits; slots; results; draft probabilities."""
        results = (self.results, self.row_words)
        tables = (self.draft_probs, self.draft_probs.shape[1])
        return (self.cross_block, self.state.array, *results, *tables)

    def check_slots(self, row_slot: DeviceArray) -> int:
        """Check type and size of `row_slot`, the slot of each batch row; return the size."""
        batch = row_slot.shape[0] if len(row_slot.shape) == 1 else -1
        expect("row_slot", row_slot, "int32", B=batch)
        check_range("batch rows B", batch, 1, self.max_batch)
        return int(batch)

    def check_rows(self, rows: RowMap) -> int:
        """Check types and sizes of a row map's arrays; return the number of batch rows."""
        batch = self.check_slots(rows.slot)
        expect("first", rows.first, "int32", B=batch)
        check_range("rows R", rows.count, batch, batch * (self.draft_length + 1))
        expect("map", rows.map, "int32", R=rows.count)
        return batch
