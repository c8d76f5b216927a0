"""Train the EAGLE-3 head of SmolLM2-135M-Instruct and write its checkpoint.

    python -m tools.train.smollm rows head export --model DIR --work DIR

``--model`` is the folder that ``graft import`` made. A row is a request drawn from
``smollm_prompts.json`` with what the model says to it under its grammar, and the streams that the
head reads. The head may be trained beside: it takes new rows as they come. Needs torch (CPU is
enough), and graft's native part for the grammars.
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

from ..demo_tasks import add_schema_to_prompt
from .evaluate import walked
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
#: The head's own: as many key-value heads as heads, for they carry the embedding of the last token.
HEAD = replace(SIZES, kv_heads=9, inner=1664, theta=1e6)
AUX = (1, 14, 26)  # outputs of the layers that EAGLE-3 reads by default of 30
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END = "<|im_end|>"
SHARP = 1.5  # times the logits that the loss compares
HERE = Path(__file__).parent
H = SIZES.hidden
#: Kinds of requests by family, whose prompts are alike in length; most tokens of an answer.
FAMILIES = {
    "free": (("explain", "tips"), 128),
    "own": (("explain", "tips"), 128),
    "short": (("choices", "choices", "dates"), 16),
    "json": (("calls",) * 5 + ("records", "nested") * 2, 96),
}
#: How requests of the family "own" begin, which the model itself makes up.
BEGUN = (("explain", "Explain in two sentences why"), ("tips", "List three tips for"))


@dataclass
class Row:
    """A request and its answer.

    Attributes
    ----------
    ids, start : of both, and where the answer begins.
    kind : of the request.
    legal : bits over the vocabulary for every token of the answer; empty without a grammar.
    streams : float16 [n - 1, 4 hidden], those of AUX and the normed last one.
    """

    ids: list[int]
    start: int
    kind: str
    legal: list[np.ndarray] = field(default_factory=list)
    streams: Tensor = None


class Prompts:
    """Requests of ``smollm_prompts.json``: texts with slots, behind ``=>`` what is asked for."""

    def __init__(self, seed: int) -> None:
        self._texts = json.loads((HERE / "smollm_prompts.json").read_text())
        self._rng = random.Random(seed)

    def draw(self, kind: str) -> tuple[str, GrammarSpec | None]:
        text, *asked = self._rng.choice(self._texts[kind]).split(" => ")
        if kind == "choices":
            about = self._fill(self._rng.choice(self._texts[asked[1]]))
            return f'{text} "{about}"', GrammarSpec.choice(asked[0].split("|"))
        if kind == "dates":
            words, pattern = self._rng.choice(self._texts["date_forms"]).split(" => ")
            return f"{text} {words}", GrammarSpec.regex(pattern)
        if not asked:
            return self._fill(text), None
        called = re.fullmatch(r"(\w+)\((.*)\)", asked[0])
        schema = record(called[2] if called else asked[0])
        if called:
            schema = closed({called[1]: schema})
        return add_schema_to_prompt(self._fill(text), schema), GrammarSpec.json_schema(schema)

    def _fill(self, text: str) -> str:
        """Words in the slots; ``{place}`` and ``{place2}`` are two places."""
        used: list[str] = []
        while slot := re.search(r"\{(\w+)\}", text):
            words = self._texts["slots"][slot[1].rstrip("23")]
            used.append(self._rng.choice([word for word in words if word not in used]))
            text = text[: slot.start()] + used[-1] + text[slot.end() :]
        return text


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def record(text: str) -> dict[str, Any]:
    """Schema of ``name:type`` fields; ``name[...]`` is a list of such records.

    Types: s a string, i an integer, n a number, t a time, d a date, [s] strings, a|b an enum.
    """
    plain = {
        "s": {"type": "string"},
        "i": {"type": "integer"},
        "n": {"type": "number"},
        "t": {"type": "string", "pattern": "^[0-2][0-9]:[0-5][0-9]$"},
        "d": {"type": "string", "pattern": "^20[0-9]{2}-[01][0-9]-[0-3][0-9]$"},
    }
    found: dict[str, Any] = {}
    for name, inner, kind in re.findall(r"(\w+)(?:\[(.*?)\]|:(\[s\]|[\w|]+))", text):
        if inner or kind == "[s]":
            items = record(inner) if inner else plain["s"]
            found[name] = {
                "type": "array",
                "items": items,
                "minItems": 1,
                "maxItems": 2 if inner else 3,
            }
        else:
            found[name] = {"enum": kind.split("|")} if "|" in kind else plain[kind]
    return closed(found)


def prompt(text: str) -> str:
    """A request as the model's chat template writes it."""
    return (
        f"<|im_start|>system\n{SYSTEM}{END}\n<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"
    )


def load_target(folder: Path) -> Llama:
    """The target in float32."""
    model = Llama(SIZES)
    with safe_open(folder / "model.safetensors", "pt") as file:
        model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
    return model.eval()


def unpacked(bits: np.ndarray) -> np.ndarray:
    """Bits of mask rows, one a byte."""
    return np.unpackbits(bits, axis=-1, bitorder="little")


@torch.no_grad()
def answer(
    model: Llama, rows: list[Row], guides: list[Any], most: int, end: int, heat: float = 0.0
) -> None:
    """Let the model go on with the rows, together; a guide is a matcher or None.

    Greedily, or with `heat` as temperature.
    """
    s = SIZES
    count = len(rows)
    width = max(len(row.ids) for row in rows) + most
    keys = torch.zeros(s.layers, count, s.kv_heads, width, s.head_dim)
    values = torch.zeros_like(keys)
    group = s.heads // s.kv_heads
    slots = torch.arange(width)
    last = torch.tensor([row.start - 1 for row in rows])
    ids = torch.zeros(count, int(last.max()) + 1, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : row.start] = torch.tensor(row.ids)
    at = slots[: ids.shape[1]].expand(count, -1)
    alive = rows
    mask = np.zeros(s.vocab // 32, "i4")
    waiting = guides
    streams = {id(row): list[Tensor]() for row in rows}
    for step in range(most):
        n = len(alive)
        x = model.model.embed_tokens(ids)
        top = int(at.max()) + 1
        kept = []
        cos, sin = rotary(s, at.reshape(-1))
        rope = cos.view(n, 1, -1, s.head_dim), sin.view(n, 1, -1, s.head_dim)
        seen = (slots[:top] <= at[..., None])[:, None]
        spread = at[:, None, :, None].expand(-1, s.kv_heads, -1, s.head_dim)
        for number, layer in enumerate(model.model.layers):
            y = layer.input_layernorm(x)
            attend = layer.self_attn
            heads = (n, y.shape[1], s.kv_heads, s.head_dim)
            for cache, made in (
                (keys, rotate(attend.k_proj(y).view(heads).transpose(1, 2), rope)),
                (values, attend.v_proj(y).view(heads).transpose(1, 2)),
            ):
                cache[number].scatter_(2, spread, made)
            mixed = F.scaled_dot_product_attention(
                attend.q(y, rope),
                keys[number, :, :, :top].repeat_interleave(group, 1),
                values[number, :, :, :top].repeat_interleave(group, 1),
                attn_mask=seen,
            )
            x = x + attend.out(mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            if number in AUX:
                kept.append(x)
        x = model.model.norm(x)
        made = torch.cat([*kept, x], -1).half()
        scores = F.linear(x[torch.arange(n), last], model.model.embed_tokens.weight)
        going = []
        for i, (row, guide) in enumerate(zip(alive, waiting, strict=True)):
            streams[id(row)].append(made[i, : last[i] + 1])
            bits = np.full(s.vocab // 8, 255, np.uint8)
            if guide is not None and guide.fill(mask):
                bits = mask.view(np.uint8).copy()
                scores[i, torch.from_numpy(unpacked(bits) == 0)] = -torch.inf
            row.ids.append(
                int(
                    torch.multinomial((scores[i] / heat).softmax(-1), 1)
                    if heat
                    else scores[i].argmax()
                )
            )
            if guide is not None:
                guide.accept(row.ids[-1])
                row.legal.append(bits)
            if row.ids[-1] != end:
                going.append(i)
        if not going:
            break
        at = (at[:, 0] if step else last)[going, None] + 1
        last = torch.zeros_like(last[going])
        keys = keys[:, going]
        values = values[:, going]
        alive = [alive[i] for i in going]
        waiting = [waiting[i] for i in going]
        ids = torch.tensor([row.ids[-1:] for row in alive])
    for row in rows:
        row.streams = torch.cat(streams[id(row)])


def made_up(
    model: Llama, tokenizer: Tokenizer, rng: random.Random, count: int
) -> list[tuple[str, str]]:
    """Requests, with kinds, that the model makes up: of so many begun those that it ends in a line.

    None is about what a held-out one is about.
    """
    held = [
        json.loads(line)["prompt"].lower().rstrip(".")
        for line in (HERE / "smollm_held.jsonl").read_text().splitlines()
    ]
    about = {text.removeprefix(begun.lower()) for text in held for _, begun in BEGUN}
    rows = []
    begun = [rng.choice(BEGUN) for _ in range(count)]
    for kind, text in begun:
        opened = prompt(text).removesuffix(f"{END}\n<|im_start|>assistant\n")
        ids = tokenizer.backend.encode(opened).ids
        rows.append(Row(ids, len(ids), kind))
    answer(model, rows, [None] * count, 18, tokenizer.stop_ids[0], heat=0.85)
    texts = {
        (kind, text + tokenizer.backend.decode(row.ids[row.start :]).rstrip())
        for row, (kind, text) in zip(rows, begun, strict=True)
        if row.ids[-1] in tokenizer.stop_ids
    }
    return sorted(
        (kind, text)
        for kind, text in texts
        if "\n" not in text and not any(one in text.lower() for one in about)
    )


def make_rows(args: argparse.Namespace) -> None:
    """``rows/*.pt``, 32 rows each, by families in turn."""
    tokenizer = Tokenizer(args.model)
    model = load_target(args.model)
    prompts = Prompts(args.seed)
    vocabulary = Vocabulary.from_tokenizer(tokenizer.backend, SIZES.vocab, tokenizer.stop_ids)
    backend = make_backend("llguidance", vocabulary)
    rng = random.Random(args.seed)
    (args.work / "rows").mkdir(exist_ok=True)
    for number, family in zip(tqdm(range(args.batches), "rows"), itertools.cycle(args.families)):
        kinds, most = FAMILIES[family]
        rows = []
        guides = []
        own = made_up(model, tokenizer, rng, 64) if family == "own" else []
        for _ in range(32):
            kind = rng.choice(kinds)
            text, spec = prompts.draw(kind)
            if own:  # they are some 40
                (kind, text), spec = own.pop(rng.randrange(len(own))), None
            ids = tokenizer.backend.encode(prompt(text)).ids
            rows.append(Row(ids, len(ids), kind))
            guides.append(None if spec is None else backend.compile(spec).matcher())
        answer(model, rows, guides, most, tokenizer.stop_ids[0])
        # What a grammar cuts off runs away, as no document does.
        rows = [row for row in rows if row.ids[-1] in tokenizer.stop_ids or not row.legal]
        made = args.work / "rows" / f"{args.seed}-{number:04}.pt"
        torch.save([vars(row) for row in rows], made.with_suffix(".part"))
        made.with_suffix(".part").rename(made)  # whole, for who trains beside


class Data:
    """The rows found so far; every 16th is held out."""

    def __init__(self, folder: Path) -> None:
        self.train: list[Row] = []
        self.held: list[Row] = []
        self._folder = folder
        self._known = set[Path]()
        self.look()
        # A few columns of the streams are a thousand times the others: the head learns on what is
        # left once each is divided by its size, and `export` takes that into `fc`.
        some = torch.cat([row.streams[:, : 3 * H].float() for row in self.train[::8]])
        self.scale = some.square().mean(0).sqrt().clamp(min=1e-4)

    def look(self) -> None:
        """Take what is new."""
        for path in sorted(set(self._folder.glob("*.pt")) - self._known):
            rows = [Row(**row) for row in torch.load(path, weights_only=False)]
            self.held += rows[5::16]
            self.train += [row for i, row in enumerate(rows) if i % 16 != 5]
            self._known.add(path)

    def batches(self, tokens: int, rng: random.Random) -> Iterator[list[Row]]:
        """Rows alike in length together, in random order, for ever."""
        while True:
            groups: list[list[Row]] = [[]]
            for row in sorted(self.train, key=lambda row: len(row.ids) // 48 + rng.random() / 2):
                if (len(groups[-1]) + 1) * len(row.ids) > tokens:
                    groups.append([])
                groups[-1].append(row)
            rng.shuffle(groups)
            yield from filter(None, groups)


class Batch:
    """Padded rows, and the positions of theirs that are drafted from, for tokens two behind."""

    def __init__(self, rows: list[Row], at: list[list[int]], scale: Tensor, kept: Tensor) -> None:
        b = len(rows)
        n = max(len(row.ids) for row in rows)
        r = max(map(len, at))
        self.ids = torch.zeros(b, n, dtype=torch.long)
        streams = torch.zeros(b, n, 4 * H)
        self.at = torch.full((b, r), n - 3)
        self.real = torch.zeros(b, r, dtype=torch.bool)
        legal = []
        for i, (row, where) in enumerate(zip(rows, at, strict=True)):
            self.ids[i, : len(row.ids)] = torch.tensor(row.ids)
            streams[i, : len(row.streams)] = row.streams.float()
            self.at[i, : len(where)] = torch.tensor(where)
            self.real[i, : len(where)] = True
            legal += [
                row.legal[t + 2 - row.start]
                if row.legal and t + 2 >= row.start
                else np.full(SIZES.vocab // 8, 255, np.uint8)
                for t in where
            ]
        self.kept = kept
        #: Of the real positions, [_, kept].
        self.illegal = torch.from_numpy(unpacked(np.stack(legal))[:, kept.numpy()] == 0)
        self.features = streams[:, :-2, : 3 * H] / scale
        self.final = streams[..., 3 * H :]


class Trainer:
    """A head without output rows of its own: those of the target stand, for a draft vocabulary."""

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

    def drafts(self, batch: Batch, steps: int) -> list[Tensor]:
        """Logits of the draft steps at the real positions, illegal tokens out of reach."""
        embedded = F.embedding(batch.ids[:, 1:-1], self.embed)
        rows = self.embed[batch.kept]
        return [
            (self.head.norm(out)[batch.real] @ rows.T).masked_fill(batch.illegal, -1e4)
            for out in self.head.unroll(batch.features, embedded, steps, batch.at)
        ]

    def loss(self, rows: list[Row], steps: int) -> Tensor:
        """Sum over draft steps of the cross-entropy with the target's distribution.

        Both are sharpened, for greedy decoding. Step 2 weighs 0.7 and step 3 0.5; where a draft
        before it is wrong, so that it would not be reached, 0.15 of that. One step learns from a
        tenth of the prompt's positions, too. The vocabulary is that of training, what the answers
        have beside, and 1,024 ids by lot.
        """
        at = [
            [
                *sorted(
                    self.rng.sample(range(28, row.start - 2), (row.start - 30) // 10)
                    if steps == 1
                    else range(row.start - 4, row.start - 2)
                ),
                *range(row.start - 2, len(row.ids) - 2),
            ]
            for row in rows
        ]
        said = [torch.tensor(row.ids[row.start :]) for row in rows]
        kept = torch.cat([self.kept, torch.randint(SIZES.vocab, (1024,)), *said]).unique()
        batch = Batch(rows, at, self.data.scale, kept)
        batch.features += torch.empty_like(batch.features).uniform_(-0.1, 0.1)
        final = batch.final.gather(1, (batch.at + 1)[..., None].expand(-1, -1, H))[batch.real]
        scores = (SHARP * (final @ self.embed[kept].T)).masked_fill(batch.illegal, -1e4)
        aim = scores.softmax(-1)
        right = batch.ids.gather(1, batch.at + 2)[batch.real]
        loss = torch.zeros(())
        known = ~batch.illegal.all(-1)
        hit = torch.ones(batch.at.shape)
        order = torch.arange(batch.at.shape[1]).expand_as(batch.at)
        for step, logits in enumerate(self.drafts(batch, steps)):
            made = (order >= step)[batch.real] & known
            weight = made * ((1, 0.7, 0.5)[step] * (0.15 + 0.85 * hit[batch.real]))
            sharp = SHARP * logits
            each = sharp.logsumexp(-1) - (aim * sharp).sum(-1)
            loss = loss + (each * weight).sum() / known.sum()
            hit[batch.real] *= kept[logits.detach().argmax(-1)] == right
            hit = F.pad(hit[:, :-1], (1, 0))
        return loss / (1.0 if steps == 1 else 1.6)

    @torch.no_grad()
    def acceptance(self, rows: list[Row], k: int = 3) -> dict[str, float]:
        """Tokens per round of greedy chains of `k` legal drafts along the answers, by kind."""
        found: dict[str, list[int]] = {}
        for i in range(0, len(rows), 8):
            some = rows[i : i + 8]
            at = [list(range(row.start - 4, len(row.ids) - 2)) for row in some]
            batch = Batch(some, at, self.data.scale, self.kept)
            sizes = [len(where) for where in at]
            guesses = [self.kept[d.argmax(-1)].split(sizes) for d in self.drafts(batch, k)]
            for j, row in enumerate(some):
                # Draft s behind token t is the one that entry t + s - 1 predicts in step s.
                hits = [
                    [
                        bool(guess[j][t + s + 3 - row.start] == row.ids[t + s + 1])
                        for s, guess in enumerate(guesses)
                        if t + s + 1 < len(row.ids)
                    ]
                    for t in range(row.start, len(row.ids))
                ]
                rounds, tokens = walked([[]] * row.start + hits, row.ids, row.start)
                sums = found.setdefault(row.kind, [0, 0])
                sums[:] = sums[0] + rounds, sums[1] + tokens
        found["all"] = [sum(sums) for sums in zip(*found.values(), strict=True)]
        return {kind: tokens / rounds for kind, (rounds, tokens) in sorted(found.items())}

    @torch.no_grad()
    def warm(self) -> None:
        """Begin with a linear model, heads that pass the last token on, and heads that copy.

        ``fc`` is the ridge regression of the target's next normed output on the streams, but for
        96 directions in which that output hardly varies: these hold which token a stream is of.
        Six heads find their own position, for queries and keys are the same projection of
        embeddings, and pass on what the regression says of the last token's embedding. Three look
        for places where the last token stood before and pass on what came behind it.
        """
        head = self.head
        d = HEAD.head_dim
        own = 6 * HEAD.head_dim
        attend = head.midlayer.self_attn
        q, k, v, o = (getattr(attend, f"{n}_proj").weight for n in "qkvo")
        some = self.data.train[::3]
        x = torch.cat([row.streams[:-1, : 3 * H].float() for row in some]) / self.data.scale
        y = torch.cat([row.streams[1:, 3 * H :].float() for row in some]) / self.norm
        table = F.rms_norm(self.embed, (H,))
        this = table[torch.cat([torch.tensor(row.ids[:-2]) for row in some])]
        z = torch.cat([x, table[torch.cat([torch.tensor(row.ids[1:-1]) for row in some])]], 1)
        gram = z.T @ z / len(z)
        gram += 0.01 * gram.diagonal().mean() * torch.eye(4 * H)
        linear = torch.linalg.solve(gram, z.T @ y / len(z)).T
        # Projections of embeddings in which tokens differ alike.
        mean = table.mean(0)
        size, axes = torch.linalg.eigh((table - mean).T @ (table - mean) / len(table))
        white = axes[:, :-16] / size[:-16].sqrt() @ axes[:, :-16].T
        looks = torch.linalg.qr(torch.randn(H, H))[0] @ (
            white - torch.outer(white @ mean, mean) / mean.square().sum()
        )
        low = torch.linalg.eigh(torch.cov(y.T))[1][:, :96]
        known = this @ looks[-96:].T
        token = torch.linalg.solve(gram[: 3 * H, : 3 * H], x.T @ known / len(x)).T
        rest = linear[:, : 3 * H] - low @ (low.T @ linear[:, : 3 * H])
        share = 0.15 * (x @ rest.T).square().mean().sqrt() * 6**0.5 / known.square().mean().sqrt()
        head.fc.weight.copy_(rest + share * low @ token)
        size = (x @ head.fc.weight.T).square().mean(1).sqrt().mean()
        q.mul_(0.2)
        k.mul_(0.2)
        q[:own, :H] = k[:own, :H] = 1.2 * looks[:own]
        left, values, right = torch.linalg.svd(linear[:, 3 * H :])
        v.zero_()
        v[:own, :H] = values[:own].sqrt()[:, None] * right[:own]
        o[:, :own] = left[:, :own] * values[:own].sqrt()
        slow = torch.cat([torch.arange(16, 32), torch.arange(48, 64)])  # hardly rotated
        copied = torch.linalg.qr(torch.randn(H, 3 * d))[0]
        for i in range(3):
            at = own + i * d + slow
            which = slice(32 * i, 32 * i + 32)
            k[at] = 0
            q[at, :H] = 2.5**0.5 * looks[-96:][which]
            k[at, H:] = 2.5**0.5 * low[:, which].T * size / share
        v[own:, :H] = copied.T
        o[:, own:] = 0.3 * copied
        head.midlayer.mlp.down_proj.weight.mul_(0.1)
        head.norm.weight.copy_(0.8 * self.norm)

    def run(self) -> None:
        """AdamW, the rate falling to nothing with the minutes; of one step or of three, by lot."""
        args = self.args
        head = self.head
        self.warm()
        optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
        batches = self.data.batches(args.tokens, self.rng)
        spent = 0.0
        said = 0.0
        losses = []
        for step in itertools.count(1):
            begun = time.monotonic()
            share = spent / args.minutes
            loss = self.loss(next(batches), 3 if self.rng.random() < 0.6 else 1)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = args.rate * min(1.0, step / 50) * max(0.03, 1 - share)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            spent += (time.monotonic() - begun) / 60
            if spent - said < 2 and spent < args.minutes:
                continue
            said = spent
            row = {
                "step": step,
                "minutes": spent,
                "rows": len(self.data.train),
                "loss": sum(losses) / len(losses),
                "acceptance_length": self.acceptance(self.data.held),
            }
            with (args.work / "training_log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
            tqdm.write(json.dumps(row))
            torch.save(
                {"head": head.state_dict(), "scale": self.data.scale, "kept": self.kept},
                args.work / "head.pt",
            )
            if spent >= args.minutes:
                return
            losses = []
            self.data.look()


def draft_vocabulary(rows: list[Row], size: int) -> Tensor:
    """The end and single bytes, then the ids most used in answers, in prompts, and by number."""
    said = Counter(token for row in rows for token in row.ids[row.start :])
    seen = Counter(token for row in rows for token in row.ids)
    common = [token for counts in (said, seen) for token, _ in counts.most_common()]
    order = dict.fromkeys([2, *range(17, 17 + 256), *common, *range(SIZES.vocab)])
    return torch.tensor(sorted(list(order)[:size]))


def export(args: argparse.Namespace) -> None:
    """The head as graft's loader reads it, in bfloat16, with its training's log.

    Its output rows are the target's, so its draft vocabulary may be larger than in training: it
    gets ids by number, and those of lower-case letters alone, with which keys begin.
    """
    words = Tokenizer(args.model).backend.get_vocab()
    was = torch.load(args.work / "head.pt")
    kept = set(was["kept"].tolist())
    head = was["head"]
    kept |= set(
        [token for token in range(SIZES.vocab) if token not in kept][
            : args.export_vocab - len(kept)
        ]
    )
    kept |= {token for text, token in words.items() if re.fullmatch("[a-z]+", text)}
    head["fc.weight"] = head["fc.weight"] / was["scale"]
    tensors = {
        name: value.bfloat16().contiguous()
        for name, value in head.items()
        if name not in ("d2t", "t2d")
    }
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
            "eagle_aux_hidden_state_layer_ids": list(AUX),
        },
    }
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.out / "training_log.jsonl").write_text((args.work / "training_log.jsonl").read_text())


STAGES: dict[str, Callable[[argparse.Namespace], None]] = {
    "rows": make_rows,
    "head": lambda args: Trainer(args).run(),
    "export": export,
}


def main() -> None:
    """Parse the command line and run the stages named, in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--work", type=Path, required=True, help="rows, checkpoint and log")
    parser.add_argument("--out", type=Path, help="where export writes")
    parser.add_argument("--batches", type=int, default=60, help="of 32 rows to make")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--seed", type=int, default=1, help="of the rows")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training")
    parser.add_argument("--rate", type=float, default=1.2e-3)
    parser.add_argument("--tokens", type=int, default=1500, help="a batch")
    parser.add_argument(
        "--draft-vocab", type=int, default=6144, help="in training, beside what a batch says"
    )
    parser.add_argument(
        "--export-vocab", type=int, default=24576, help="before words that are keys"
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for stage in args.stages:
        STAGES[stage](args)


if __name__ == "__main__":
    main()
