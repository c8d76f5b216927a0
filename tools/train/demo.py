"""Train the demo model, its EAGLE-3 head and its block drafter, and write the checkpoints.

    python -m tools.train.demo tokenizer target eagle block export --work DIR

Stages run in the order given and resume from what `--work` holds. Needs torch (CPU
is enough), tokenizers, safetensors, jinja2 and tqdm: a development-time extra.
The learning rate follows the share of the time budget that is spent, so a slow
machine trains less but still ends on a finished schedule.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm

from .. import demo_tasks as demo
from . import data
from . import tasks as drawn
from .evaluate import AUX, BLOCK_AUX, acceptance, block_acceptance, blocks_of, whole_right
from .nets import Block, Eagle3, Llama, Sizes

Module = TypeVar("Module", bound=nn.Module)
ROOT = Path(__file__).resolve().parents[2]
# Every batch has its own shape; without these glibc gives memory back to the kernel
# after each step and half of the time goes into page faults.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "500000000",
}
#: Of the target's training, and the tokens of a batch; then those of the drafter's.
RATE = 4e-3
TOKENS = 4096
EAGLE_TOKENS = 3072
DRAFT_VOCABULARY = 1024
UNROLLED = 3
#: Of the block drafter's: tokens, blocks a sequence, rows of a block, sizes of its own.
BLOCK_TOKENS = 2048
BLOCKS = 16
WIDTH = 8
BLOCK_SIZES = {"layers": 3, "inner": 192}


class Run:
    """What the stages share: sizes, paths, the tokenizer, documents and the log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sizes = Sizes()
        self.work = Path(args.work)
        self.out = Path(args.out)
        self.work.mkdir(parents=True, exist_ok=True)
        corpus = Path(args.corpus)
        self.documents = drawn.corpus_documents(corpus) if corpus.exists() else []

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.work / "tokenizer.json"))

    def log(self, **row: Any) -> None:
        row = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        with (self.work / "training_log.jsonl").open("a") as f:
            f.write(json.dumps(row) + "\n")
        tqdm.write(json.dumps(row))

    # Each is a new one, or what is trained.

    def target(self) -> Llama:
        return self._trained(Llama(self.sizes), "target")

    def eagle(self) -> Eagle3:
        path = self.work / "eagle.pt"
        if path.exists():
            kept = torch.load(path)["model"]["t2d"].nonzero()[:, 0]
        else:
            kept = draft_vocabulary(self, self.tokenizer())
        head = Eagle3(self.sizes, kept)
        with torch.no_grad():
            head.lm_head.weight.copy_(self.target().model.embed_tokens.weight[kept])
        return self._trained(head, "eagle")

    def block(self) -> Block:
        return self._trained(Block(replace(self.sizes, **BLOCK_SIZES), len(BLOCK_AUX)), "block")

    def _trained(self, module: Module, stage: str) -> Module:
        path = self.work / f"{stage}.pt"
        if path.exists():
            module.load_state_dict(torch.load(path)["model"])
        return module

    def mask(self) -> int:
        """The token whose embedding stands for what is to be drafted; no answer holds it."""
        return self.tokenizer().get_vocab()["<|user|>"]


class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by an iteration of Newton and Schulz (Jordan et al., 2024), which
    torch's own does in bfloat16: where a CPU has none, that takes longer than all the rest."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("momentum", torch.zeros_like(p))
                kept.lerp_(p.grad, 0.05)
                x = p.grad.lerp(kept, 0.95)
                x = x / x.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
                rate = group["lr"]
                p.mul_(1 - 0.05 * rate).sub_(x, alpha=0.2 * max(p.shape) ** 0.5 * rate)


class Optimizers:
    """Muon for the matrices inside the layers, AdamW for the rest; one schedule by time."""

    def __init__(self, model: nn.Module, minutes: float) -> None:
        inner = [p for n, p in model.named_parameters() if p.ndim == 2 and "layer" in n]
        rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "layer" in n)]
        self.all: list[torch.optim.Optimizer] = [
            Muon(inner, {"lr": RATE}),
            torch.optim.AdamW(rest, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.minutes = minutes
        self.step_no = 0
        self.spent = 0.0
        self.params = [*inner, *rest]
        self.clock = time.monotonic()

    @property
    def share(self) -> float:
        """Of the time budget, what is spent."""
        return min(1.0, self.spent / self.minutes)

    def step(self, loss: Tensor) -> None:
        """One update, at the rate that the time since the last one asks for."""
        now = time.monotonic()
        self.spent = self.spent + (now - self.clock) / 60
        self.clock = now
        warm = min(1.0, (self.step_no + 1) / 60)
        rate = RATE * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * self.share)))
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        for o in self.all:
            for group in o.param_groups:
                group["lr"] = rate
            o.step()
            o.zero_grad(set_to_none=True)
        self.step_no += 1

    def state(self) -> dict[str, Any]:
        return {
            "all": [o.state_dict() for o in self.all],
            "step": self.step_no,
            "spent": self.spent,
        }

    def load(self, state: dict[str, Any]) -> None:
        for o, s in zip(self.all, state["all"], strict=True):
            o.load_state_dict(s)
        self.step_no = state["step"]
        self.spent = state["spent"]


def make_tokenizer(run: Run) -> None:
    """Train the BPE on prompts, answers and real JSON; keep it if it is there already."""
    path = run.work / "tokenizer.json"
    if path.exists():
        return
    tasks = itertools.islice(drawn.mixture(run.documents, 0.0, 0), 12000)
    texts = (part for t in tasks for part in (data.prompt(t), t.answer))
    data.train_tokenizer(texts, run.sizes.vocab).save(str(path))


def learn(
    run: Run,
    stage: str,
    module: nn.Module,
    minutes: float,
    draw: Callable[[Optimizers], Iterator[Tensor]],
    figures: Callable[[], dict[str, float]],
) -> None:
    """Go down with the losses that `draw` gives, from where the stage was left until its time is
    up; now and then log, with `figures`, and keep what is learnt."""
    opt = Optimizers(module, minutes)
    path = run.work / f"{stage}.pt"
    if path.exists():
        opt.load(torch.load(path)["optimizers"])
    bar = tqdm(total=minutes, unit="min", initial=opt.spent)
    losses = []
    for loss in draw(opt):
        opt.step(loss)
        losses.append(loss.item())
        bar.n = opt.spent
        bar.set_postfix(loss=f"{losses[-1]:.3f}")
        if opt.step_no % 200 == 0 or opt.share >= 1.0:
            run.log(
                stage=stage,
                step=opt.step_no,
                minutes=opt.spent,
                loss=sum(losses) / len(losses),
                **figures(),
            )
            losses = []
            torch.save({"model": module.state_dict(), "optimizers": opt.state()}, path)
        if opt.share >= 1.0:
            return


def train_target(run: Run) -> None:
    """Next-token loss on the answers; copying and short sequences first."""
    model = run.target()
    tokenizer = run.tokenizer()
    probe = data.encode(tokenizer, demo.held_out_tasks(128, seed=99))

    def draw(opt: Optimizers) -> Iterator[Tensor]:
        rng = random.Random(opt.step_no)
        for copying, longest, until in ((0.3, 128, 0.15), (0.03, 320, 1.0)):
            tasks = drawn.mixture(run.documents, copying, opt.step_no * 1000)
            stream = data.batches(tokenizer, tasks, TOKENS, longest, rng)
            while opt.share < until:
                ids, answer = next(stream)
                wanted = answer[:, 1:]
                hidden = model(ids[:, :-1])[-1][wanted]
                yield F.cross_entropy(model.logits(hidden), ids[:, 1:][wanted])

    learn(
        run,
        "target",
        model,
        run.args.minutes,
        draw,
        lambda: {"held_out": whole_right(model, probe)},
    )


def draft_vocabulary(run: Run, tokenizer: Tokenizer) -> Tensor:
    """The tokens most frequent in answers, and every printable ASCII character."""
    counts: Counter[int] = Counter()
    tasks = list(itertools.islice(drawn.mixture(run.documents, 0.0, 0), 20000))
    for ids, start in data.encode(tokenizer, tasks):
        counts.update(ids[start:])
    vocabulary = tokenizer.get_vocab()
    for piece in [*(chr(c) for c in range(33, 127)), "<|end|>"]:
        counts[vocabulary[piece]] += 1_000_000
    return torch.tensor(sorted(i for i, _ in counts.most_common(DRAFT_VOCABULARY)))


def distil_loss(head: Eagle3, target: Llama, ids: Tensor, answer: Tensor, steps: int) -> Tensor:
    """Cross-entropy to the target's distribution over the draft vocabulary, all draft steps."""
    wanted = answer[:, 2:]
    first = (wanted.int().argmax(1) - steps).clamp(min=0)
    width = int((wanted.sum(1) + steps).max())
    rows = (first[:, None] + torch.arange(width)).clamp(max=wanted.shape[1] - 1)
    real = wanted.gather(1, rows)
    real[:, :steps] = False
    real &= torch.arange(width) < wanted.sum(1)[:, None] + steps
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        streams = target(ids[:, :-1])
        after = (rows + 1)[..., None].expand(-1, -1, streams[-1].shape[-1])
        logits = target.logits(streams[-1].gather(1, after)[real])
    p = logits.float().softmax(-1)[:, head.t2d]
    features = torch.cat([streams[i].float() for i in AUX], -1)[:, :-1]
    embedded = target.model.embed_tokens(ids[:, 1:-1]).detach()
    total = torch.zeros(())
    for j, out in enumerate(head.unroll(features, embedded, steps, rows)):
        logq = head.lm_head(head.norm(out[real])).log_softmax(-1)
        total = total - 0.8**j * (p * logq).sum() / p.sum()
    return total


def train_eagle(run: Run) -> None:
    """Distil the target into the drafter with its own features fed back."""
    target = run.target()
    tokenizer = run.tokenizer()
    head = run.eagle()
    probe = data.encode(tokenizer, demo.held_out_tasks(64, seed=99))

    def draw(opt: Optimizers) -> Iterator[Tensor]:
        tasks = drawn.mixture(run.documents, 0.0, 10**8 + opt.step_no * 1000)
        rng = random.Random(opt.step_no)
        for ids, answer in data.batches(tokenizer, tasks, EAGLE_TOKENS, 320, rng):
            yield distil_loss(head, target, ids, answer, UNROLLED)

    learn(
        run,
        "eagle",
        head,
        run.args.eagle_minutes,
        draw,
        lambda: {"acceptance_length": acceptance(head, target, probe, UNROLLED)},
    )


def block_loss(
    drafter: Block, target: Llama, ids: Tensor, answer: Tensor, width: int, mask: int
) -> Tensor:
    """Cross-entropy to the target's distribution, of blocks at random places of the answers."""
    wanted = answer[:, 1:]
    with torch.no_grad():
        streams = target(ids[:, :-1])
        p = target.logits(streams[-1][wanted]).softmax(-1)
        start = torch.multinomial(wanted.float(), BLOCKS, replacement=True)
        rows = start[..., None] + torch.arange(width - 1)
        real = rows < wanted.shape[1]
        rows = rows.clamp(max=wanted.shape[1] - 1)
        real &= wanted.gather(1, rows.flatten(1)).view_as(rows)
        place = (wanted.flatten().cumsum(0) - 1).view_as(wanted).gather(1, rows.flatten(1))
        p = p[place.view_as(rows)[real]]
        features = torch.cat([streams[i] for i in BLOCK_AUX], -1)
        blocks = blocks_of(target, ids, start, width, mask)
    out = drafter(features, blocks, start)[:, :, 1:][real]
    logq = F.linear(out, target.model.embed_tokens.weight.detach()).log_softmax(-1)
    weight = (0.8 ** torch.arange(width - 1)).expand(real.shape)[real]
    return -(weight * (p * logq).sum(-1)).sum() / weight.sum()


def train_block(run: Run) -> None:
    """Distil the target into the block drafter, with blocks of several widths."""
    target = run.target()
    tokenizer = run.tokenizer()
    drafter = run.block()
    mask = run.mask()
    probe = data.encode(tokenizer, demo.held_out_tasks(64, seed=99))

    def draw(opt: Optimizers) -> Iterator[Tensor]:
        tasks = drawn.mixture(run.documents, 0.0, 2 * 10**8 + opt.step_no * 1000)
        rng = random.Random(opt.step_no)
        for ids, answer in data.batches(tokenizer, tasks, BLOCK_TOKENS, 320, rng):
            yield block_loss(drafter, target, ids, answer, rng.randint(4, WIDTH), mask)

    learn(
        run,
        "block",
        drafter,
        run.args.block_minutes,
        draw,
        lambda: {"acceptance_length": block_acceptance(drafter, target, probe, UNROLLED, mask)},
    )


def export(run: Run) -> None:
    """Write the checkpoints in the form of the Hugging Face and EAGLE-3 loaders, in bf16."""
    s = run.sizes
    tokenizer = run.tokenizer()
    ids = {name: tokenizer.token_to_id(name) for name in data.SPECIAL}
    ends = {"bos_token_id": ids["<|begin|>"], "eos_token_id": ids["<|end|>"]}
    shape = {
        **s.config(),
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **ends,
    }
    files: dict[str, dict[str, Any]] = {
        "target/config.json": {
            "architectures": ["LlamaForCausalLM"],
            **shape,
            "num_hidden_layers": s.layers,
            "tie_word_embeddings": True,
        },
        "target/tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|begin|>",
            "eos_token": "<|end|>",
            "pad_token": "<|end|>",
            "add_bos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": s.positions,
            "chat_template": data.TEMPLATE,
        },
        "target/generation_config.json": {**ends, "do_sample": False, "max_new_tokens": 256},
    }
    weights = {"target": {k: v.bfloat16() for k, v in run.target().state_dict().items()}}
    if (run.work / "eagle.pt").exists():
        head = run.eagle()
        weights["eagle3"] = {
            k: v.bfloat16() if v.is_floating_point() else v for k, v in head.state_dict().items()
        }
        files["eagle3/config.json"] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **shape,
            "num_hidden_layers": 1,
            "draft_vocab_size": len(head.d2t),
            "tie_word_embeddings": False,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(AUX),
            },
        }
    if (run.work / "block.pt").exists():
        drafter = run.block()
        weights["dflash"] = {k: v.bfloat16() for k, v in drafter.state_dict().items()}
        files["dflash/config.json"] = {
            **shape,
            **drafter.s.config(),
            "model_type": "qwen3",
            "architectures": ["DFlashDraftModel"],
            "num_hidden_layers": drafter.s.layers,
            "num_target_layers": s.layers,
            "tie_word_embeddings": False,
            "dflash_config": {
                "block_size": WIDTH,
                "mask_token_id": run.mask(),
                "target_layer_ids": list(BLOCK_AUX),
            },
        }
    for name, tensors in weights.items():
        (run.out / name).mkdir(parents=True, exist_ok=True)
        path = run.out / name / "model.safetensors"
        save_file({k: v.contiguous() for k, v in tensors.items()}, path, metadata={"format": "pt"})
        path.chmod(0o644)
    for name, content in files.items():
        (run.out / name).write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(run.out / "target" / "tokenizer.json"))
    (run.out / "training_log.jsonl").write_text((run.work / "training_log.jsonl").read_text())


STAGES = {
    "tokenizer": make_tokenizer,
    "target": train_target,
    "eagle": train_eagle,
    "block": train_block,
    "export": export,
}


def main() -> None:
    """Parse the command line and run the stages named, in order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--work", default="build/demo", help="checkpoints, tokenizer and log")
    parser.add_argument("--out", default=str(ROOT / "models" / "demo"), help="where export writes")
    parser.add_argument(
        "--corpus", default=str(ROOT.parent / "shared/data/corpora/json_instances.jsonl.gz")
    )
    parser.add_argument("--minutes", type=float, default=45.0, help="of the target's training")
    parser.add_argument("--eagle-minutes", type=float, default=12.0)
    parser.add_argument("--block-minutes", type=float, default=12.0)
    parser.add_argument("--threads", type=int, default=2, help="use 1 where others compute too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    run = Run(args)
    run.log(stage="start", stages=args.stages, sizes=asdict(run.sizes), rate=RATE, tokens=TOKENS)
    for stage in args.stages:
        STAGES[stage](run)


if __name__ == "__main__":
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        again = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        os.execve(sys.executable, again, {**os.environ, **KEEP_MEMORY})
    main()
