"""Train the EAGLE-3 head of SmolLM2-135M-Instruct and write its checkpoint.

    python -m tools.train.smollm corpus features eagle export --model DIR --work DIR

``--model`` is the folder that ``graft import`` made. The corpus is what the model itself answers
to prompts of many kinds, and JSON completions of its requests with a schema. Stages resume from
what ``--work`` holds. Needs torch (CPU is enough).
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from tqdm import tqdm

from .. import demo_tasks
from .evaluate import walked
from .nets import Eagle3, Llama, Sizes, rotary, rotate

SIZES = Sizes(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, inner=1536, vocab=49152,
              theta=100000.0, positions=8192)
AUX = (1, 14, 26)  # outputs of the layers that EAGLE-3 reads by default of 30
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
END = "<|im_end|>"
LONGEST = 384
TOPICS = """rivers|the moon|bread|bicycles|a lost dog|winter|the ocean|jazz|a small village|robots
gardening|the Roman Empire|photosynthesis|a lighthouse|coffee|chess|whales|the internet|volcanoes
friendship|trains|honey bees|mountains|the heart|electricity|a haunted house|tea|dinosaurs|maps
vaccines|paper|a brave mouse|clouds|gravity|music|deserts|cats|budgeting|sleep|running a marathon
the water cycle|black holes|pottery|recycling|a pirate ship|algebra|glaciers|democracy|yoga|soup
solar power|castles|the brain|a magic key|penguins|wine|poetry|bridges|time travel|rain|owls
public speaking|the stock market|airplanes|a time machine|rice|fireworks|stars|painting|sharks
computers|the desert fox|salt|friendship between a boy and a dragon|tourism|insects|banks|snow
forests|swimming|a shy giant|learning a language|glass|football|healthy food|rockets|libraries"""
ASKS = """Write a short poem about {}.|Explain {} to a child.|List five facts about {}.
Tell me a short story about {}.|What is important to know about {}?|Describe {} in two sentences.
Why do people like {}?|Write a slogan for {}.|Give three tips about {}.|What is the history of {}?
Write an email to a friend about {}.|Summarise what you know about {} in one paragraph."""
FACTS = """Is this review positive or negative? "{} was great, I would come again."
Name a city near {}.|Write a Python function about {}.|Translate to French: I like {}.
Which category fits best, science, sports or art: {}?|Give a synonym of the word: {}"""


def prompt(text: str) -> str:
    """A request as the model's chat template writes it."""
    return (f"<|im_start|>system\n{SYSTEM}{END}\n<|im_start|>user\n{text}{END}\n"
            "<|im_start|>assistant\n")


def free_prompts() -> list[str]:
    """Requests whose answers the model writes itself."""
    topics = [topic for line in TOPICS.split("\n") for topic in line.split("|")]
    asks = [ask for line in (ASKS + "\n" + FACTS).split("\n") for ask in line.split("|")]
    pairs = [ask.replace("{}", topic) for ask, topic in itertools.product(asks, topics)]
    random.Random(0).shuffle(pairs)
    return pairs


def completions(data: Path) -> list[tuple[str, str]]:
    """(request with a schema, JSON answer): function calls, and records of the demo's kind."""
    rows = []
    with gzip.open(data / "bfcl-prompts" / "bfcl_prompts.jsonl.gz", "rt") as lines:
        for row in map(json.loads, lines):
            if row["id"].split("_")[-1][-1] != "7":  # those are kept for evaluation
                asked = demo_tasks.with_schema(row["prompt"], row["schema"])
                rows.append((asked, row["completion"]))
    for i in range(1500):
        task = demo_tasks.make_task(random.Random(f"train-{i}"))
        asked = task.text if task.schema is None else demo_tasks.with_schema(task.text, task.schema)
        rows.append((asked, task.answer))
    random.Random(1).shuffle(rows)
    return rows


def load_target(folder: Path) -> Llama:
    """The target in float32."""
    model = Llama(SIZES)
    with safe_open(folder / "model.safetensors", "pt") as file:
        model.load_state_dict({name: file.get_tensor(name).float() for name in file.keys()})  # noqa: SIM118
    return model.eval()


@torch.no_grad()
def answers(model: Llama, rows: list[list[int]], most: int, end: int,
            temperature: float) -> list[list[int]]:
    """What the model says to prompts, decoded together with a cache."""
    s, count, width = SIZES, len(rows), max(map(len, rows)) + most
    keys = torch.zeros(s.layers, count, s.kv_heads, width, s.head_dim)
    values = torch.zeros_like(keys)
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.zeros(count, int(lengths.max()), dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
    at = torch.arange(ids.shape[1]).expand(count, -1)
    said: list[list[int]] = [[] for _ in rows]
    alive = torch.ones(count, dtype=torch.bool)
    group, slots = s.heads // s.kv_heads, torch.arange(width)
    for _ in range(most):
        x = model.model.embed_tokens(ids)
        cos, sin = rotary(s, at.reshape(-1))
        rope = cos.view(count, 1, -1, s.head_dim), sin.view(count, 1, -1, s.head_dim)
        unseen = (slots > at[..., None])[:, None]
        spread = at[:, None, :, None].expand(-1, s.kv_heads, -1, s.head_dim)
        for n, layer in enumerate(model.model.layers):
            y, attend = layer.input_layernorm(x), layer.self_attn
            heads = (count, y.shape[1], s.kv_heads, s.head_dim)
            keys[n].scatter_(2, spread, rotate(attend.k_proj(y).view(heads).transpose(1, 2), rope))
            values[n].scatter_(2, spread, attend.v_proj(y).view(heads).transpose(1, 2))
            mixed = F.scaled_dot_product_attention(
                attend.q(y, rope), keys[n].repeat_interleave(group, 1),
                values[n].repeat_interleave(group, 1), attn_mask=~unseen)
            x = x + attend.out(mixed)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        last = x[torch.arange(count), (lengths - 1 - at[:, 0]).clamp(max=x.shape[1] - 1)]
        logits = model.logits(last)
        token = (logits.argmax(-1) if temperature == 0 else
                 torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0])
        for i in range(count):
            if alive[i]:
                said[i].append(int(token[i]))
        alive &= token != end
        if not alive.any():
            break
        ids, at, lengths = token[:, None], lengths[:, None], lengths + 1
    return said


def make_corpus(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """``corpus.jsonl``: ids of prompt and answer, and where the answer begins."""
    path, end = args.work / "corpus.jsonl", tokenizer.token_to_id(END)
    have = sum(1 for _ in path.open()) if path.exists() else 0
    given = completions(args.data)
    with path.open("a") as out:
        if have < len(given):
            for asked, answer in tqdm(given[have:], desc="completions"):
                head = tokenizer.encode(prompt(asked)).ids
                tail = tokenizer.encode(answer + END).ids
                out.write(json.dumps({"ids": head + tail, "start": len(head)}) + "\n")
            have = len(given)
        out.flush()
        model, asked_for = load_target(args.model), free_prompts()[have - len(given):]
        asked_for = asked_for[: max(0, args.answers - (have - len(given)))]
        for i in tqdm(range(0, len(asked_for), 32), desc="answers"):
            rows = [tokenizer.encode(prompt(text)).ids for text in asked_for[i : i + 32]]
            torch.manual_seed(i + have)
            for row, tail in zip(rows, answers(model, rows, 160, end, 0.7 * (i // 32 % 2)),
                                 strict=True):
                out.write(json.dumps({"ids": row + tail, "start": len(row)}) + "\n")
            out.flush()


def read_corpus(args: argparse.Namespace) -> list[tuple[list[int], int]]:
    rows = [json.loads(line) for line in (args.work / "corpus.jsonl").open()]
    return [(row["ids"], row["start"]) for row in rows if len(row["ids"]) <= LONGEST]


@torch.no_grad()
def make_features(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """``features.pt``: the streams that the head reads and the last one, float16, a row each."""
    model, rows = load_target(args.model), read_corpus(args)
    found = []
    for ids, _ in tqdm(rows, desc="features"):
        streams = model(torch.tensor([ids]))
        kept = [streams[layer][0] for layer in AUX] + [model.model.norm(streams[-1])[0]]
        found.append(torch.cat(kept, -1).half())
    torch.save({"rows": rows, "features": found}, args.work / "features.pt")


def draft_vocabulary(rows: list[tuple[list[int], int]], size: int, end: int) -> Tensor:
    """The ids that answers use most; single bytes and the end are always among them."""
    counts = Counter(token for ids, start in rows for token in ids[start:])
    counts.update({token: 1 << 30 for token in range(17, 17 + 256)} | {end: 1 << 30})
    return torch.tensor(sorted(token for token, _ in counts.most_common(size)))


def batches(count: int, lengths: list[int], tokens: int, rng: random.Random) -> Iterator[list[int]]:
    """Row numbers by batch, rows alike in length together, in random order, for ever."""
    while True:
        order = sorted(rng.sample(range(count), count), key=lambda i: lengths[i] // 16)
        groups: list[list[int]] = [[]]
        for i in order:
            if (len(groups[-1]) + 1) * lengths[i] > tokens:
                groups.append([])
            groups[-1].append(i)
        rng.shuffle(groups)
        yield from groups


def train_eagle(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """Cross-entropy with the target's distribution on the draft vocabulary, step by step."""
    saved = torch.load(args.work / "features.pt")
    rows, features, target = saved["rows"], saved["features"], load_target(args.model).model
    embed = target.embed_tokens.weight.detach()
    # A few columns of the streams are a thousand times the others: the head learns on what is left
    # once each is divided by its size, and `export` takes that into `fc`.
    scale = features_size(features)
    for feature in features:
        feature[:, : len(scale)] /= scale
    kept = draft_vocabulary(rows, args.draft_vocab, int(tokenizer.token_to_id(END) or 0))
    head = Eagle3(replace(SIZES, inner=args.inner), kept)
    head.lm_head.weight.data.copy_(embed[head.kept()])
    head.norm.weight.data.copy_(target.norm.weight)
    held = list(range(0, len(rows), 40))
    train = [i for i in range(len(rows)) if i % 40]
    lengths = [len(rows[i][0]) for i in train]
    matrices = [p for n, p in head.named_parameters() if p.ndim == 2 and n != "lm_head.weight"]
    rest = [p for n, p in head.named_parameters() if p.ndim != 2 or n == "lm_head.weight"]
    optimizers = [torch.optim.AdamW(some, lr=1.0, betas=(0.9, 0.97), weight_decay=decay)
                  for some, decay in ((matrices, 0.02), (rest, 0.0))]
    spent, step, path = 0.0, 0, args.work / "eagle.pt"
    if path.exists():
        was = torch.load(path)
        head.load_state_dict(was["model"])
        spent, step = was["spent"], was["step"]
        for optimizer, state in zip(optimizers, was["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    stream, losses, clock = batches(len(train), lengths, args.tokens, random.Random(step)), [], 0.0
    with tqdm(total=args.minutes, unit="min", initial=round(spent, 2)) as bar:
        while spent < args.minutes:
            clock = time.monotonic()
            chosen = [train[i] for i in next(stream)]
            loss = loss_of(head, embed, [rows[i] for i in chosen], [features[i] for i in chosen])
            loss.backward()
            torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            share = spent / args.minutes
            rate = args.rate * min(1.0, (step + 1) / 60) * max(0.02, 1 - share)
            for optimizer, scale in zip(optimizers, (1.0, 0.3), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = rate * scale
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            step, spent = step + 1, spent + (time.monotonic() - clock) / 60
            losses.append(loss.item())
            bar.n = round(spent, 2)
            bar.set_postfix(loss=f"{losses[-1]:.3f}")
            if step % 100 == 0 or spent >= args.minutes:
                found = acceptance(head, embed, [rows[i] for i in held],
                                   [features[i] for i in held])
                log(args, stage="eagle", step=step, minutes=spent,
                    loss=sum(losses) / len(losses), acceptance_length=found)
                losses = []
                torch.save({"model": head.state_dict(), "scale": scale,
                            "spent": spent, "step": step,
                            "optimizers": [o.state_dict() for o in optimizers]}, path)


def features_size(features: list[Tensor]) -> Tensor:
    """Root of the mean square of every column that the head reads, of some rows."""
    some = torch.cat([feature[:, : 3 * SIZES.hidden].float() for feature in features[::20]])
    return some.square().mean(0).sqrt()


def padded(rows: list[tuple[list[int], int]], features: list[Tensor]) -> tuple[Tensor, Tensor,
                                                                                Tensor]:
    """Ids [b, n], features [b, n, 4 hidden] and whether token i + 2 is an answer's [b, n - 2]."""
    width = max(len(ids) for ids, _ in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    wanted = torch.zeros(len(rows), width - 2, dtype=torch.bool)
    streams = torch.zeros(len(rows), width, 4 * SIZES.hidden)
    for b, ((row, start), feature) in enumerate(zip(rows, features, strict=True)):
        ids[b, : len(row)] = torch.tensor(row)
        streams[b, : len(row)] = feature.float()
        wanted[b, start - 2 : len(row) - 2] = True
    return ids, streams, wanted


def drafted(head: Eagle3, embed: Tensor, ids: Tensor, streams: Tensor, steps: int) -> list[Tensor]:
    """Normed outputs of the draft steps; the one at position i is for token i + 2."""
    n = ids.shape[1] - 2
    every = torch.arange(n).expand(len(ids), -1)
    outs = head.unroll(streams[:, :n, : 3 * SIZES.hidden], F.embedding(ids[:, 1:-1], embed), steps,
                       every)
    return [head.norm(out) for out in outs]


def loss_of(head: Eagle3, embed: Tensor, rows: list[tuple[list[int], int]],
            features: list[Tensor], steps: int = 3) -> Tensor:
    """Mean over draft steps, weighted 1, 0.8, 0.64, of the cross-entropy on answers."""
    ids, streams, wanted = padded(rows, features)
    with torch.no_grad():
        final = streams[:, 1:-1, 3 * SIZES.hidden :][wanted]  # of the token before
        aim = (final @ embed[head.kept()].T).softmax(-1)
    loss = torch.zeros(())
    for step, out in enumerate(drafted(head, embed, ids, streams, steps)):
        usable = torch.arange(wanted.shape[1]).expand_as(wanted)[wanted] >= step
        logits = head.lm_head(out[wanted])
        each = -(aim * logits.log_softmax(-1)).sum(-1)
        loss = loss + 0.8**step * each[usable].mean()
    return loss


@torch.no_grad()
def acceptance(head: Eagle3, embed: Tensor, rows: list[tuple[list[int], int]],
               features: list[Tensor], k: int = 3) -> float:
    """Tokens per round of greedy chains of `k` unmasked drafts along the rows' answers."""
    rounds = tokens = 0
    for b in range(0, len(rows), 16):
        some = rows[b : b + 16]
        ids, streams, _ = padded(some, features[b : b + 16])
        hits = torch.stack([head.kept()[head.lm_head(out).argmax(-1)] == ids[:, 2:]
                            for out in drafted(head, embed, ids, streams, k)]).tolist()
        for i, (row, start) in enumerate(some):
            found = walked([hit[i] for hit in hits], row, start)
            rounds, tokens = rounds + found[0], tokens + found[1]
    return tokens / rounds


def log(args: argparse.Namespace, **row: Any) -> None:
    """Add a line to the training's log."""
    row = {key: round(value, 4) if isinstance(value, float) else value
           for key, value in row.items()}
    with (args.work / "training_log.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    tqdm.write(json.dumps(row))


def export(args: argparse.Namespace, tokenizer: Tokenizer) -> None:
    """The head as graft's loader reads it, in bfloat16, with its training's log."""
    was = torch.load(args.work / "eagle.pt")
    head = was["model"]
    head["fc.weight"] = head["fc.weight"] / was["scale"]
    args.out.mkdir(parents=True, exist_ok=True)
    save_file({name: (value.bfloat16() if value.is_floating_point() else value).contiguous()
               for name, value in head.items()}, args.out / "model.safetensors",
              metadata={"format": "pt"})
    (args.out / "model.safetensors").chmod(0o644)
    config = {
        **replace(SIZES, inner=args.inner).config(), "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1, "draft_vocab_size": len(head["d2t"]), "torch_dtype": "bfloat16",
        "tie_word_embeddings": False, "eagle_config": {
            "use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(AUX)},
    }  # fmt: skip
    (args.out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (args.out / "training_log.jsonl").write_text((args.work / "training_log.jsonl").read_text())


STAGES = {"corpus": make_corpus, "features": make_features, "eagle": train_eagle, "export": export}


def main() -> None:
    """Parse the command line and run the stages named, in order."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--model", type=Path, required=True, help="folder of the target")
    parser.add_argument("--work", type=Path, required=True, help="corpus, checkpoints and log")
    parser.add_argument("--data", type=Path, required=True, help="folder with bfcl-prompts")
    parser.add_argument("--out", type=Path, help="where export writes")
    parser.add_argument("--answers", type=int, default=1000, help="that the model writes itself")
    parser.add_argument("--minutes", type=float, default=45.0, help="of training")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--tokens", type=int, default=2048, help="a batch")
    parser.add_argument("--inner", type=int, default=768, help="width of the head's MLP")
    parser.add_argument("--draft-vocab", type=int, default=3840)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    for stage in args.stages:
        STAGES[stage](args, tokenizer)


if __name__ == "__main__":
    main()
