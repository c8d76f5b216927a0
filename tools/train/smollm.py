"""Train the EAGLE-3 head of SmolLM2-135M-Instruct and write its checkpoint.

    python -m tools.train.smollm rows head export --model DIR --work DIR

``--model`` is a folder that ``graft import`` has written. A training row consists of a random
request from ``smollm_prompts.json``, the target's answer under the request's grammar, and the
hidden states that the head reads. Rows can be generated while the head is being trained, because
the training reads new files of rows as they appear. The script requires torch (CPU is sufficient),
and graft's native extension for the grammars.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from graft.grammar import GrammarSpec, Vocabulary, make_backend
from graft.models.tokenizer import Tokenizer

from ..demo.tasks import add_schema_to_prompt
from .evaluate import simulate_speculation
from .nets import Eagle3, Llama, Sizes, rotary, rotate

SIZES = Sizes(
    hidden=576,
    layers=30,
    heads=9,
    kv_heads=3,
    head_dim=64,
    inner=1536,
    vocab=49152,
    theta=100000.0,
    positions=8192,
)
#: Sizes of the head. It has as many key-value heads as attention heads, so that the values of each
#: attention head can carry another part of the last token's embedding (`Trainer.initialize`).
HEAD = replace(SIZES, kv_heads=9, inner=1664, theta=1e6)
#: Layers whose outputs the head reads: EAGLE-3's default for a target with 30 layers.
AUX_LAYERS = (1, 14, 26)
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END = "<|im_end|>"
#: Factor by which the loss multiplies the logits of head and target to sharpen both distributions.
SHARPNESS = 1.5
#: Logit of an illegal token.
MASKED_LOGIT = -1e4
#: Number of rows in a file, which are generated as one batch.
ROWS_PER_FILE = 32
FOLDER = Path(__file__).parent
HIDDEN = SIZES.hidden
#: Families of requests with prompts of similar length. The values are the kinds of requests, and
#: the maximum number of tokens of an answer. The kind of a request is drawn uniformly from the
#: tuple, so a kind that is listed n times is drawn n times as often. The prompts come from
#: templates. Only in the family "own", the target model itself writes them (`REQUEST_BEGINNINGS`).
FAMILIES = {
    "free": (("explain", "tips"), 128),
    "own": (("explain", "tips"), 128),
    "short": (("choices", "choices", "dates"), 16),
    "json": (("calls",) * 5 + ("records", "nested") * 2, 96),
}
#: Kinds and beginnings of the requests of the family "own". The target continues a beginning to
#: write a whole request.
REQUEST_BEGINNINGS = (("explain", "Explain in two sentences why"), ("tips", "List three tips for"))


@dataclass
class Row:
    """A training row: a request, its answer and the target's hidden states."""

    ids: list[int]  #: token ids of prompt and answer
    start: int  #: index of the first token of the answer
    kind: str  #: kind of the request
    #: Bitmask of the legal tokens at each position of the answer; empty without a grammar.
    legal: list[np.ndarray] = field(default_factory=list)

    #: Outputs of AUX_LAYERS and normalized last hidden state for each of `ids` except the last one;
    #: float16 [len(ids) - 1, 4 hidden].
    streams: Tensor = None


# Requests -----------------------------------------------------------------------------------------


class Prompts:
    """Generator of random requests from the templates in ``smollm_prompts.json``.

    A template is a text with slots for words. If the output has a given form, ``=>`` and the form
    follow the text.
    """

    def __init__(self, seed: int) -> None:
        self._texts = json.loads((FOLDER / "smollm_prompts.json").read_text())
        self._rng = random.Random(seed)

    def draw(self, kind: str) -> tuple[str, GrammarSpec | None]:
        """Return the text and the grammar of a random request."""
        text, *form = self._rng.choice(self._texts[kind]).split(" => ")
        if kind == "choices":
            subject = self._fill(self._rng.choice(self._texts[form[1]]))
            return f'{text} "{subject}"', GrammarSpec.choice(form[0].split("|"))
        if kind == "dates":
            words, pattern = self._rng.choice(self._texts["date_forms"]).split(" => ")
            return f"{text} {words}", GrammarSpec.regex(pattern)
        if not form:
            return self._fill(text), None
        call = re.fullmatch(r"(\w+)\((.*)\)", form[0])
        if call:
            schema = closed_object({call[1]: record_schema(call[2])})
        else:
            schema = record_schema(form[0])
        return add_schema_to_prompt(self._fill(text), schema), GrammarSpec.json_schema(schema)

    def _fill(self, text: str) -> str:
        """Replace slots by words. ``{place}`` and ``{place2}`` are replaced by different places."""
        used: list[str] = []
        while slot := re.search(r"\{(\w+)\}", text):
            words = self._texts["slots"][slot[1].rstrip("23")]
            used.append(self._rng.choice([word for word in words if word not in used]))
            text = text[: slot.start()] + used[-1] + text[slot.end() :]
        return text


def closed_object(properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def record_schema(text: str) -> dict[str, Any]:
    """Return the schema of a record that is described by ``name:type`` fields.

    ``name[...]`` is a list of records. The types are s (string), i (integer), n (number), t (time),
    d (date), [s] (list of strings) and a|b (enum with the values a and b).
    """
    types = {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "t": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
        "d": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
    }
    properties: dict[str, Any] = {}
    for name, record, kind in re.findall(r"(\w+)(?:\[(.*?)\]|:(\[s\]|[\w|]+))", text):
        if record:
            items = record_schema(record)
            properties[name] = {"type": "array", "items": items, "minItems": 1, "maxItems": 2}
        elif kind == "[s]":
            properties[name] = {"type": "array", "items": types["s"], "minItems": 1, "maxItems": 3}
        elif "|" in kind:
            properties[name] = {"enum": kind.split("|")}
        else:
            properties[name] = types[kind]
    return closed_object(properties)


def prompt(text: str) -> str:
    """Return the prompt of a request in the format of the model's chat template."""
    return (
        f"<|im_start|>system\n{SYSTEM}{END}\n<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"
    )


# Generation of rows -------------------------------------------------------------------------------


def load_target(folder: Path) -> Llama:
    """Load the target in float32."""
    model = Llama(SIZES)
    with safe_open(folder / "model.safetensors", "pt") as file:
        model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
    return model.eval()


def unpack_bits(bitmask: np.ndarray) -> np.ndarray:
    """Unpack a token bitmask to one byte per token."""
    return np.unpackbits(bitmask, axis=-1, bitorder="little")


class _KVCache:
    """Keys and values of all layers for a batch of sequences with at most `length` tokens."""

    def __init__(self, batch: int, length: int) -> None:
        s = SIZES
        self.keys = torch.zeros(s.layers, batch, s.kv_heads, length, s.head_dim)
        self.values = torch.zeros_like(self.keys)

    def keep(self, rows: list[int]) -> None:
        """Drop all sequences of the batch except those with the indices `rows`."""
        self.keys = self.keys[:, rows]
        self.values = self.values[:, rows]


def forward(
    model: Llama, cache: _KVCache, ids: Tensor, positions: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Run the target on new tokens and add them to the KV cache.

    Parameters
    ----------
    model, cache
        Target and KV cache.
    ids, positions
        Token ids and their positions; int64 [batch, length].

    Returns
    -------
    aux : list of Tensor
        Outputs of AUX_LAYERS; [batch, length, hidden] each.
    last : Tensor
        Normalized last hidden state; [batch, length, hidden].
    """
    s = SIZES
    n, length = ids.shape
    group = s.heads // s.kv_heads
    end = int(positions.max()) + 1
    cos, sin = rotary(s, positions.reshape(-1))
    rope = cos.view(n, 1, -1, s.head_dim), sin.view(n, 1, -1, s.head_dim)
    mask = (torch.arange(end) <= positions[..., None])[:, None]
    index = positions[:, None, :, None].expand(-1, s.kv_heads, -1, s.head_dim)
    x = model.model.embed_tokens(ids)
    aux = []
    for number, layer in enumerate(model.model.layers):
        y = layer.input_layernorm(x)
        attention = layer.self_attn
        shape = (n, length, s.kv_heads, s.head_dim)
        keys = rotate(attention.k_proj(y).view(shape).transpose(1, 2), rope)
        values = attention.v_proj(y).view(shape).transpose(1, 2)
        cache.keys[number].scatter_(2, index, keys)
        cache.values[number].scatter_(2, index, values)
        attention_output = F.scaled_dot_product_attention(
            attention.q(y, rope),
            cache.keys[number, :, :, :end].repeat_interleave(group, 1),
            cache.values[number, :, :, :end].repeat_interleave(group, 1),
            attn_mask=mask,
        )
        x = x + attention.out(attention_output)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if number in AUX_LAYERS:
            aux.append(x)
    return aux, model.model.norm(x)


def next_token(scores: Tensor, temperature: float) -> int:
    """Return the most likely token, or a random sample if the temperature is not 0."""
    if temperature:
        return int(torch.multinomial((scores / temperature).softmax(-1), 1))
    return int(scores.argmax())


@torch.no_grad()
def generate(
    model: Llama,
    rows: list[Row],
    matchers: list[Any],
    max_tokens: int,
    end: int,
    temperature: float = 0.0,
) -> None:
    """Generate the answers to the requests of rows as one batch.

    The answers and their hidden states are stored in the rows.

    `matchers` has the grammar matcher of each row, or None. `end` is the id of the end token. With
    temperature 0, decoding is greedy.
    """
    cache = _KVCache(len(rows), max(len(row.ids) for row in rows) + max_tokens)
    last = torch.tensor([row.start - 1 for row in rows])
    ids = torch.zeros(len(rows), int(last.max()) + 1, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : row.start] = torch.tensor(row.ids)
    positions = torch.arange(ids.shape[1]).expand(len(rows), -1)
    running = rows
    running_matchers = matchers
    mask = np.zeros(SIZES.vocab // 32, "i4")
    streams: dict[int, list[Tensor]] = {id(row): [] for row in rows}
    for step in range(max_tokens):
        n = len(running)
        aux, x = forward(model, cache, ids, positions)
        states = torch.cat([*aux, x], -1).half()
        scores = F.linear(x[torch.arange(n), last], model.model.embed_tokens.weight)
        unfinished = []
        for i, (row, matcher) in enumerate(zip(running, running_matchers, strict=True)):
            streams[id(row)].append(states[i, : last[i] + 1])
            legal = np.full(SIZES.vocab // 8, 255, np.uint8)
            if matcher is not None and matcher.fill(mask):
                legal = mask.view(np.uint8).copy()
                scores[i, torch.from_numpy(unpack_bits(legal) == 0)] = -torch.inf
            row.ids.append(next_token(scores[i], temperature))
            if matcher is not None:
                matcher.accept(row.ids[-1])
                row.legal.append(legal)
            if row.ids[-1] != end:
                unfinished.append(i)
        if not unfinished:
            break
        # Step 0 has processed whole prompts, which have different lengths. Every other step
        # processes one token per row.
        last_positions = positions[:, 0] if step else last
        positions = last_positions[unfinished, None] + 1
        last = torch.zeros_like(last[unfinished])
        cache.keep(unfinished)
        running = [running[i] for i in unfinished]
        running_matchers = [running_matchers[i] for i in unfinished]
        ids = torch.tensor([row.ids[-1:] for row in running])
    for row in rows:
        row.streams = torch.cat(streams[id(row)])


def write_requests(
    model: Llama, tokenizer: Tokenizer, rng: random.Random, count: int
) -> list[tuple[str, str]]:
    """Let the target model write requests, for which it later generates answers to train on.

    Parameters
    ----------
    model, tokenizer
        Target and tokenizer.
    rng
        Random generator that selects the beginnings of the requests.
    count
        Number of requests that the target begins to write. A request is dropped if it does not end
        after a few tokens, has several lines, or contains the subject of a held-out prompt.

    Returns
    -------
    list of (str, str)
        Kind and text of each request.
    """
    held_out = [
        json.loads(line)["prompt"].lower().rstrip(".")
        for line in (FOLDER / "smollm_held.jsonl").read_text().splitlines()
    ]
    subjects = {
        text.removeprefix(beginning.lower())
        for text in held_out
        for _, beginning in REQUEST_BEGINNINGS
    }
    begun = [rng.choice(REQUEST_BEGINNINGS) for _ in range(count)]
    rows = []
    for kind, text in begun:
        unfinished = prompt(text).removesuffix(f"{END}\n<|im_start|>assistant\n")
        ids = tokenizer.backend.encode(unfinished).ids
        rows.append(Row(ids, len(ids), kind))
    generate(model, rows, [None] * count, 18, tokenizer.stop_ids[0], temperature=0.85)
    requests = set()
    for row, (kind, beginning) in zip(rows, begun, strict=True):
        if row.ids[-1] not in tokenizer.stop_ids:
            continue
        text = beginning + tokenizer.backend.decode(row.ids[row.start :]).rstrip()
        if "\n" not in text and not any(subject in text.lower() for subject in subjects):
            requests.add((kind, text))
    return sorted(requests)


def make_rows(args: argparse.Namespace) -> None:
    """Write files of rows to ``rows/*.pt``. Each file contains one family of requests."""
    tokenizer = Tokenizer(args.model)
    model = load_target(args.model)
    prompts = Prompts(args.seed)
    vocabulary = Vocabulary.from_tokenizer(tokenizer.backend, SIZES.vocab, tokenizer.stop_ids)
    backend = make_backend("llguidance", vocabulary)
    rng = random.Random(args.seed)
    (args.work / "rows").mkdir(exist_ok=True)
    for number, family in zip(tqdm(range(args.batches), "rows"), itertools.cycle(args.families)):
        kinds, max_tokens = FAMILIES[family]
        rows = []
        matchers = []
        written = write_requests(model, tokenizer, rng, 64) if family == "own" else []
        for _ in range(ROWS_PER_FILE):
            kind = rng.choice(kinds)
            text, spec = prompts.draw(kind)
            if written:  # about 40 requests, of the 64 that the target began to write
                kind, text = written.pop(rng.randrange(len(written)))
                spec = None
            ids = tokenizer.backend.encode(prompt(text)).ids
            rows.append(Row(ids, len(ids), kind))
            matchers.append(None if spec is None else backend.compile(spec).matcher())
        generate(model, rows, matchers, max_tokens, tokenizer.stop_ids[0])
        # Drop an answer under a grammar if the token limit cuts it off: it is probably an endless
        # repetition and not a document.
        rows = [row for row in rows if row.ids[-1] in tokenizer.stop_ids or not row.legal]
        path = args.work / "rows" / f"{args.seed}-{number:04}.pt"
        partial = path.with_suffix(".part")
        torch.save([vars(row) for row in rows], partial)
        partial.rename(path)  # a concurrent training reads only complete files


# Training data ------------------------------------------------------------------------------------


class Data:
    """Training rows; one in 16 is held out.

    Attributes
    ----------
    train, held
        Training rows and held-out rows.
    scale
        Root mean square of each feature. A few features are a thousand times larger than the
        others. The head is trained on normalized features, and `export` folds the scale into
        ``fc``.
    """

    def __init__(self, folder: Path) -> None:
        self.train: list[Row] = []
        self.held: list[Row] = []
        self._folder = folder
        self._known: set[Path] = set()
        self.load_new()
        features = torch.cat([row.streams[:, : 3 * HIDDEN].float() for row in self.train[::8]])
        self.scale = features.square().mean(0).sqrt().clamp(min=1e-4)

    def load_new(self) -> None:
        """Load the files of rows that the stage ``rows`` has written since the last call."""
        for path in sorted(set(self._folder.glob("*.pt")) - self._known):
            rows = [Row(**row) for row in torch.load(path, weights_only=False)]
            self.held += rows[5::16]
            self.train += [row for i, row in enumerate(rows) if i % 16 != 5]
            self._known.add(path)

    def batches(self, tokens: int, rng: random.Random) -> Iterator[list[Row]]:
        """Yield batches of rows of similar length in random order, forever.

        A batch has at most about `tokens` tokens, including padding.
        """
        while True:
            groups: list[list[Row]] = [[]]
            for row in sorted(self.train, key=lambda row: len(row.ids) // 48 + rng.random() / 2):
                if (len(groups[-1]) + 1) * len(row.ids) > tokens:
                    groups.append([])
                groups[-1].append(row)
            rng.shuffle(groups)
            yield from filter(None, groups)


class Batch:
    """Batch of padded rows with the positions from which to draft.

    The head's output at position t predicts token t + 2. The parameter `positions` has a list of
    such positions t for each row. `scale` is the scale of the features (`Data.scale`), and `kept`
    has the ids of the draft vocabulary.

    Attributes
    ----------
    ids
        Token ids; int64 [batch, length].
    positions, real
        The lists of positions, padded to the same length, and whether each entry is a position and
        not padding; [batch, length of the longest list].
    illegal
        Whether each token of the draft vocabulary is illegal as token t + 2; bool [entries that are
        not padding, kept].
    features
        Normalized features; [batch, length - 2, 3 hidden].
    final
        Normalized last hidden states of the target; [batch, length, hidden].
    """

    def __init__(
        self, rows: list[Row], positions: list[list[int]], scale: Tensor, kept: Tensor
    ) -> None:
        length = max(len(row.ids) for row in rows)
        max_positions = max(map(len, positions))
        self.ids = torch.zeros(len(rows), length, dtype=torch.long)
        self.positions = torch.full((len(rows), max_positions), length - 3)
        self.real = torch.zeros(len(rows), max_positions, dtype=torch.bool)
        streams = torch.zeros(len(rows), length, 4 * HIDDEN)
        legal = []
        for i, (row, row_positions) in enumerate(zip(rows, positions, strict=True)):
            self.ids[i, : len(row.ids)] = torch.tensor(row.ids)
            streams[i, : len(row.streams)] = row.streams.float()
            self.positions[i, : len(row_positions)] = torch.tensor(row_positions)
            self.real[i, : len(row_positions)] = True
            for position in row_positions:
                if row.legal and position + 2 >= row.start:
                    legal.append(row.legal[position + 2 - row.start])
                else:
                    legal.append(np.full(SIZES.vocab // 8, 255, np.uint8))
        self.kept = kept
        self.illegal = torch.from_numpy(unpack_bits(np.stack(legal))[:, kept.numpy()] == 0)
        self.features = streams[:, :-2, : 3 * HIDDEN] / scale
        self.final = streams[..., 3 * HIDDEN :]


# Training -----------------------------------------------------------------------------------------


class Trainer:
    """Training of an EAGLE-3 head whose LM head is copied from rows of the target's LM head."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.data = Data(args.work / "rows")
        target = load_target(args.model).model
        self.embed = target.embed_tokens.weight.detach()
        self.norm = target.norm.weight.detach()
        self.kept = draft_vocabulary(self.data.train, args.draft_vocab)
        self.head = Eagle3(HEAD, self.kept)
        del self.head.lm_head
        self.rng = random.Random(0)

    def draft_logits(self, batch: Batch, steps: int) -> list[Tensor]:
        """Return the logits of each draft step over the draft vocabulary, illegal tokens masked.

        They are [positions without padding, tokens of the draft vocabulary].
        """
        embedded = F.embedding(batch.ids[:, 1:-1], self.embed)
        output_rows = self.embed[batch.kept]
        logits = []
        for out in self.head.unroll(batch.features, embedded, steps, batch.positions):
            step_logits = self.head.norm(out)[batch.real] @ output_rows.T
            logits.append(step_logits.masked_fill(batch.illegal, MASKED_LOGIT))
        return logits

    def _loss_positions(self, row: Row, steps: int) -> list[int]:
        """Return the positions of a row at which the loss is computed.

        These are the positions that predict the tokens of the answer, and some before them. If the
        loss is computed for one draft (`steps` is 1), a random tenth of the prompt's positions is
        added. If it is computed for several consecutive drafts, the last two positions before the
        answer's positions are added, so that later drafts predict the first tokens of the answer.
        """
        if steps == 1:
            sample = self.rng.sample(range(28, row.start - 2), (row.start - 30) // 10)
            before = sorted(sample)
        else:
            before = list(range(row.start - 4, row.start - 2))
        return [*before, *range(row.start - 2, len(row.ids) - 2)]

    def loss(self, rows: list[Row], steps: int) -> Tensor:
        """Return the head's cross-entropy with the target's distribution, summed over draft steps.

        Both distributions are sharpened because the head is used for greedy decoding. The weights
        of the draft steps are 1, 0.7 and 0.5. Verification stops at the first wrong draft, so the
        weight of the drafts after a wrong draft is multiplied by 0.15. The cross-entropy is
        computed over the draft vocabulary, the tokens of the answers and 1,024 random ids.
        """
        positions = [self._loss_positions(row, steps) for row in rows]
        answers = [torch.tensor(row.ids[row.start :]) for row in rows]
        kept = torch.cat([self.kept, torch.randint(SIZES.vocab, (1024,)), *answers]).unique()
        batch = Batch(rows, positions, self.data.scale, kept)
        batch.features += torch.empty_like(batch.features).uniform_(-0.1, 0.1)
        index = (batch.positions + 1)[..., None].expand(-1, -1, HIDDEN)
        final = batch.final.gather(1, index)[batch.real]
        target_logits = SHARPNESS * (final @ self.embed[kept].T)
        target_p = target_logits.masked_fill(batch.illegal, MASKED_LOGIT).softmax(-1)
        correct = batch.ids.gather(1, batch.positions + 2)[batch.real]
        loss = torch.zeros(())
        has_legal_token = ~batch.illegal.all(-1)
        hit = torch.ones(batch.positions.shape)
        order = torch.arange(batch.positions.shape[1]).expand_as(batch.positions)
        for step, logits in enumerate(self.draft_logits(batch, steps)):
            counts = (order >= step)[batch.real] & has_legal_token
            weight = counts * ((1, 0.7, 0.5)[step] * (0.15 + 0.85 * hit[batch.real]))
            sharp = SHARPNESS * logits
            cross_entropy = sharp.logsumexp(-1) - (target_p * sharp).sum(-1)
            loss = loss + (cross_entropy * weight).sum() / has_legal_token.sum()
            hit[batch.real] *= kept[logits.detach().argmax(-1)] == correct
            hit = F.pad(hit[:, :-1], (1, 0))
        return loss / (1.0 if steps == 1 else 1.6)

    @torch.no_grad()
    def acceptance_length(self, rows: list[Row], drafts: int = 3) -> dict[str, float]:
        """Return the tokens per round of greedy chains of masked drafts, by kind of request.

        The simulation assumes that the target generates the answers of the rows.
        """
        sums: dict[str, list[int]] = {}
        for i in range(0, len(rows), 8):
            some = rows[i : i + 8]
            positions = [list(range(row.start - 4, len(row.ids) - 2)) for row in some]
            batch = Batch(some, positions, self.data.scale, self.kept)
            sizes = [len(row_positions) for row_positions in positions]
            predictions = [
                self.kept[logits.argmax(-1)].split(sizes)
                for logits in self.draft_logits(batch, drafts)
            ]
            for j, row in enumerate(some):
                hits = draft_hits(row, [step[j] for step in predictions])
                rounds, tokens = simulate_speculation([[]] * row.start + hits, row.ids, row.start)
                kind_sums = sums.setdefault(row.kind, [0, 0])
                kind_sums[0] += rounds
                kind_sums[1] += tokens
        sums["all"] = [sum(values) for values in zip(*sums.values(), strict=True)]
        return {kind: tokens / rounds for kind, (rounds, tokens) in sorted(sums.items())}

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialize the head with linear regressions and with hand-made attention heads.

        A ridge regression predicts the target's next normalized output from the features and the
        embedding of the last token. ``fc`` outputs the part of the prediction that depends on the
        features. In the 96 directions in which the target's output varies least, ``fc`` instead
        outputs a code of the token to which the feature belongs: a random projection of the token's
        embedding, as predicted from the feature by a second regression.

        Of the attention heads, six output the part of the prediction that depends on the embedding
        of the last token. Their queries and keys are the same projection of the embedding, so that
        they attend to their own position. Three heads attend to the positions after earlier
        occurrences of the last token, which they find by the codes, and copy the tokens at these
        positions.
        """
        head = self.head
        d = HEAD.head_dim
        own = 6 * d  # number of projection rows of the six heads that attend to their own position
        attention = head.midlayer.self_attn
        q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
        rows = self.data.train[::3]
        # Regression that predicts the target's next output from the features and the last token's
        # embedding.
        table = F.rms_norm(self.embed, (HIDDEN,))
        x = torch.cat([row.streams[:-1, : 3 * HIDDEN].float() for row in rows]) / self.data.scale
        y = torch.cat([row.streams[1:, 3 * HIDDEN :].float() for row in rows]) / self.norm
        feature_token = table[torch.cat([torch.tensor(row.ids[:-2]) for row in rows])]
        last_token = table[torch.cat([torch.tensor(row.ids[1:-1]) for row in rows])]
        z = torch.cat([x, last_token], 1)
        gram = z.T @ z / len(z)
        gram += 0.01 * gram.diagonal().mean() * torch.eye(4 * HIDDEN)
        linear = torch.linalg.solve(gram, z.T @ y / len(z)).T
        # Random projections of the whitened embeddings. The distance between two tokens in these
        # projections is similar for all pairs of tokens.
        mean = table.mean(0)
        size, axes = torch.linalg.eigh((table - mean).T @ (table - mean) / len(table))
        white = axes[:, :-16] / size[:-16].sqrt() @ axes[:, :-16].T
        centered = white - torch.outer(white @ mean, mean) / mean.square().sum()
        projections = torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0] @ centered
        # `low` has the 96 directions in which the target's output varies least. There, fc outputs a
        # code of the feature's token (`token_code`) instead of the prediction of the regression.
        # The heads that copy tokens compare these codes.
        low = torch.linalg.eigh(torch.cov(y.T))[1][:, :96]
        token_code = feature_token @ projections[-96:].T
        token_map = torch.linalg.solve(
            gram[: 3 * HIDDEN, : 3 * HIDDEN], x.T @ token_code / len(x)
        ).T
        rest = linear[:, : 3 * HIDDEN] - low @ (low.T @ linear[:, : 3 * HIDDEN])
        rest_rms = (x @ rest.T).square().mean().sqrt()
        share = 0.15 * rest_rms * 6**0.5 / token_code.square().mean().sqrt()
        head.fc.weight.copy_(rest + share * low @ token_map)
        size = (x @ head.fc.weight.T).square().mean(1).sqrt().mean()
        # Six heads attend to their own position.
        q.mul_(0.2)
        k.mul_(0.2)
        q[:own, :HIDDEN] = 1.2 * projections[:own]
        k[:own, :HIDDEN] = 1.2 * projections[:own]
        left, values, right = torch.linalg.svd(linear[:, 3 * HIDDEN :])
        v.zero_()
        v[:own, :HIDDEN] = values[:own].sqrt()[:, None] * right[:own]
        o[:, :own] = left[:, :own] * values[:own].sqrt()
        # Three heads copy tokens: they attend to entries whose feature's token equals the last
        # token. To find them, they compare the 96-dimensional codes of tokens (`token_code`) in the
        # dimensions that the rotary embedding hardly rotates (`slow`).
        slow = torch.cat([torch.arange(16, 32), torch.arange(48, 64)])
        copied = torch.linalg.qr(torch.randn(HIDDEN, 3 * d))[0]
        for i in range(3):
            index = own + i * d + slow
            code = slice(32 * i, 32 * i + 32)
            k[index] = 0
            q[index, :HIDDEN] = 2.5**0.5 * projections[-96:][code]
            k[index, HIDDEN:] = 2.5**0.5 * low[:, code].T * size / share
        v[own:, :HIDDEN] = copied.T
        o[:, own:] = 0.3 * copied
        head.midlayer.mlp.down_proj.weight.mul_(0.1)
        head.norm.weight.copy_(0.8 * self.norm)

    def run(self) -> None:
        """Train for ``--minutes`` minutes, with one or three draft steps at random.

        After a warm-up of 50 steps, the learning rate of AdamW falls linearly with the time spent,
        to 3 % of its initial value.
        """
        args = self.args
        self.initialize()
        optimizer = torch.optim.AdamW(self.head.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
        batches = self.data.batches(args.tokens, self.rng)
        minutes = 0.0
        logged_minutes = 0.0
        losses = []
        for step in itertools.count(1):
            start = time.monotonic()
            rate = args.rate * min(1.0, step / 50) * max(0.03, 1 - minutes / args.minutes)
            loss = self.loss(next(batches), 3 if self.rng.random() < 0.6 else 1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            minutes += (time.monotonic() - start) / 60
            if minutes - logged_minutes < 2 and minutes < args.minutes:
                continue
            logged_minutes = minutes
            self.save(step, minutes, sum(losses) / len(losses))
            if minutes >= args.minutes:
                return
            losses = []
            self.data.load_new()

    def save(self, step: int, minutes: float, loss: float) -> None:
        """Evaluate the head, append an entry to the training log and write a checkpoint."""
        entry = {
            "step": step,
            "minutes": minutes,
            "rows": len(self.data.train),
            "loss": loss,
            "acceptance_length": self.acceptance_length(self.data.held),
        }
        with (self.args.work / "training_log.jsonl").open("a") as log:
            log.write(json.dumps(entry) + "\n")
        tqdm.write(json.dumps(entry))
        checkpoint = {"head": self.head.state_dict(), "scale": self.data.scale, "kept": self.kept}
        torch.save(checkpoint, self.args.work / "head.pt")


def draft_hits(row: Row, predictions: list[Tensor]) -> list[list[bool]]:
    """Return whether each draft is correct: a list per token t of the answer, in order of steps s.

    Draft s after token t is a guess of token t + s + 1. Step s makes this guess at position
    t + s - 1.

    Parameters
    ----------
    row
        Row with its answer.
    predictions
        For each step, the ids that it predicts at position ``row.start - 4`` and the following
        ones.
    """
    hits = []
    for t in range(row.start, len(row.ids)):
        hits.append(
            [
                bool(step[t + s + 3 - row.start] == row.ids[t + s + 1])
                for s, step in enumerate(predictions)
                if t + s + 1 < len(row.ids)
            ]
        )
    return hits


def draft_vocabulary(rows: list[Row], size: int) -> Tensor:
    """Return the ids of the draft vocabulary in ascending order.

    The vocabulary is filled up to `size` tokens in this order: the end token and single bytes, the
    most frequent tokens of answers, the most frequent tokens of whole rows, ids in numeric order.
    """
    in_answers = Counter(token for row in rows for token in row.ids[row.start :])
    in_rows = Counter(token for row in rows for token in row.ids)
    frequent = [token for counts in (in_answers, in_rows) for token, _ in counts.most_common()]
    order = dict.fromkeys([2, *range(17, 17 + 256), *frequent, *range(SIZES.vocab)])
    return torch.tensor(sorted(list(order)[:size]))


def export(args: argparse.Namespace) -> None:
    """Write the head's checkpoint in bfloat16 and its training log.

    The draft vocabulary is larger than in training, which is possible because the head's LM head
    consists of rows of the target's LM head. Ids are added in numeric order until the vocabulary
    has ``--export-vocab`` tokens. Then all other tokens that consist of lower-case letters are
    added, because keys of JSON objects begin with such tokens.
    """
    vocabulary = Tokenizer(args.model).backend.get_vocab()
    checkpoint = torch.load(args.work / "head.pt")
    kept = set(checkpoint["kept"].tolist())
    others = [token for token in range(SIZES.vocab) if token not in kept]
    kept |= set(others[: args.export_vocab - len(kept)])
    kept |= {token for text, token in vocabulary.items() if re.fullmatch("[a-z]+", text)}
    head = checkpoint["head"]
    head["fc.weight"] = head["fc.weight"] / checkpoint["scale"]
    tensors = {}
    for name, value in head.items():
        if name not in ("d2t", "t2d"):
            tensors[name] = value.bfloat16().contiguous()
    tensors["d2t"] = (torch.tensor(sorted(kept)) - torch.arange(len(kept))).int()
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.out / "model.safetensors", metadata={"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    config = {
        **HEAD.config(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": len(kept),
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        },
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.out / "training_log.jsonl").write_text((args.work / "training_log.jsonl").read_text())


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "rows": make_rows,
    "head": lambda args: Trainer(args).run(),
    "export": export,
}


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of rows, checkpoint and log"
    )
    rows = parser.add_argument_group("rows")
    rows.add_argument("--batches", type=int, default=60, help="files of 32 rows to generate")
    rows.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    rows.add_argument("--seed", type=int, default=1, help="seed of the rows")
    head = parser.add_argument_group("head")
    head.add_argument("--minutes", type=float, default=60.0, help="training time")
    head.add_argument("--rate", type=float, default=1.2e-3, help="learning rate")
    head.add_argument("--tokens", type=int, default=1500, help="tokens per batch")
    head.add_argument(
        "--draft-vocab",
        type=int,
        default=6144,
        help="size of the draft vocabulary in training, without the tokens of a batch",
    )
    export = parser.add_argument_group("export")
    export.add_argument("--out", type=Path, help="folder to which export writes")
    export.add_argument(
        "--export-vocab",
        type=int,
        default=24576,
        help="size of the checkpoint's draft vocabulary, without the tokens of lower-case letters",
    )
    return parser


def main() -> None:
    """Run the stages of the command line in order."""
    args = _make_parser().parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for stage in args.stages:
        STAGES[stage](args)


if __name__ == "__main__":
    main()
