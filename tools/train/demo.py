"""Train the demo model, its EAGLE-3 head and its block drafter, and write their checkpoints.

    python -m tools.train.demo tokenizer target eagle block export --work DIR

The stages run in the given order. A stage resumes from the files that an earlier run has left in
the work folder. The script requires torch (CPU is sufficient), tokenizers, safetensors, jinja2 and
tqdm. The learning rate depends on the share of the time budget that has been spent. On a slow
machine, training therefore takes fewer steps but still completes the schedule.
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

from ..demo import tasks as demo
from . import data
from . import tasks as training
from .evaluate import (
    AUX_LAYERS,
    BLOCK_AUX_LAYERS,
    acceptance_length,
    block_acceptance_length,
    embed_blocks,
    share_of_correct_answers,
)
from .nets import Block, Eagle3, Llama, Sizes

Module = TypeVar("Module", bound=nn.Module)
ROOT = Path(__file__).resolve().parents[2]
# Batches have different shapes. Without these settings, glibc returns memory to the operating
# system after each step, and half of the time is spent on page faults.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4000000000",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "500000000",
}
#: Learning rate of all stages.
RATE = 4e-3
WARM_UP_STEPS = 60
#: Steps between two entries of the log.
LOG_STEPS = 200
MAX_LENGTH = 320
#: Number of tokens per batch when the target is trained.
TOKENS = 4096

#: Constants for training the EAGLE-3 head: tokens per batch, size of the draft vocabulary, number
#: of unrolled draft steps.
EAGLE_TOKENS = 3072
DRAFT_VOCABULARY = 1024
UNROLLED = 3
#: Constants for training the block drafter: tokens per batch, blocks per sequence, maximum rows per
#: block, and the sizes of the drafter that differ from the target's sizes.
BLOCK_TOKENS = 2048
BLOCKS = 16
WIDTH = 8
BLOCK_SIZES = {"layers": 3, "inner": 192}


class Run:
    """Options, paths and models of a training run.

    Attributes
    ----------
    args
        Command line options.
    sizes
        Sizes of the target.
    work, out
        Folder of intermediate results, and output folder of the stage "export".
    documents
        Real JSON objects from the corpus; empty if there is no corpus.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.sizes = Sizes()
        self.work = Path(args.work)
        self.out = Path(args.out)
        self.work.mkdir(parents=True, exist_ok=True)
        corpus = Path(args.corpus)
        self.documents = training.corpus_documents(corpus) if corpus.exists() else []

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.work / "tokenizer.json"))

    def log(self, **row: Any) -> None:
        """Append an entry to the log and print it."""
        row = {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
        with (self.work / "training_log.jsonl").open("a") as f:
            f.write(json.dumps(row) + "\n")
        tqdm.write(json.dumps(row))

    # Each of the following methods returns the model with the weights of its checkpoint. Without a
    # checkpoint, the model has initial weights.

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
        sizes = replace(self.sizes, **BLOCK_SIZES)
        return self._trained(Block(sizes, len(BLOCK_AUX_LAYERS)), "block")

    def _trained(self, module: Module, stage: str) -> Module:
        path = self.work / f"{stage}.pt"
        if path.exists():
            module.load_state_dict(torch.load(path)["model"])
        return module

    def mask(self) -> int:
        """Return the id of the mask token of the block drafter, which occurs in no answer."""
        return self.tokenizer().get_vocab()["<|user|>"]


class Muon(torch.optim.Optimizer):
    """Optimizer that orthogonalizes momentum by a Newton-Schulz iteration (Jordan et al., 2024).

    This class iterates in float32. torch's implementation iterates in bfloat16, which takes longer
    than the rest of the step on a CPU without bfloat16 instructions.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                x = p.grad.lerp(momentum, 0.95)
                x = x / x.norm().clamp(min=1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x + (2.0315 * gram @ gram - 4.775 * gram) @ x
                rate = group["lr"]
                p.mul_(1 - 0.05 * rate).sub_(x, alpha=0.2 * max(p.shape) ** 0.5 * rate)


class Optimizers:
    """Trains the layers' matrices with Muon and the other parameters with AdamW.

    The learning rate depends on the share of the time budget that has been spent.

    Parameters
    ----------
    model
        Model to train.
    minutes
        Time budget.

    Attributes
    ----------
    step_no
        Number of completed steps.
    spent
        Minutes of training that have been spent.
    """

    def __init__(self, model: nn.Module, minutes: float) -> None:
        matrices = []
        others = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "layer" in name:
                matrices.append(parameter)
            else:
                others.append(parameter)
        self.all: list[torch.optim.Optimizer] = [
            Muon(matrices, {"lr": RATE}),
            torch.optim.AdamW(others, lr=RATE, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.minutes = minutes
        self.step_no = 0
        self.spent = 0.0
        self.params = [*matrices, *others]
        self.clock = time.monotonic()

    @property
    def share(self) -> float:
        """Share of the time budget that has been spent, from 0 to 1."""
        return min(1.0, self.spent / self.minutes)

    def step(self, loss: Tensor) -> None:
        """Update the parameters. The learning rate depends on step number and time spent."""
        now = time.monotonic()
        self.spent += (now - self.clock) / 60
        self.clock = now
        warm_up = min(1.0, (self.step_no + 1) / WARM_UP_STEPS)
        cosine = 0.5 * (1 + math.cos(math.pi * self.share))
        rate = RATE * warm_up * (0.02 + 0.98 * cosine)
        loss.backward()
        nn.utils.clip_grad_norm_(self.params, 1.0)
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_no += 1

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "all": [optimizer.state_dict() for optimizer in self.all],
            "step": self.step_no,
            "spent": self.spent,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        for optimizer, saved in zip(self.all, state["all"], strict=True):
            optimizer.load_state_dict(saved)
        self.step_no = state["step"]
        self.spent = state["spent"]


def make_tokenizer(run: Run) -> None:
    """Train the tokenizer on prompts and answers, unless the work folder contains a tokenizer."""
    path = run.work / "tokenizer.json"
    if path.exists():
        return
    tasks = itertools.islice(training.mixture(run.documents, 0.0, 0), 12000)
    texts = (part for t in tasks for part in (data.prompt(t), t.answer))
    data.train_tokenizer(texts, run.sizes.vocab).save(str(path))


def train(
    run: Run,
    stage: str,
    module: nn.Module,
    minutes: float,
    losses: Callable[[Optimizers], Iterator[Tensor]],
    metrics: Callable[[], dict[str, float]],
) -> None:
    """Train a model until its time budget is spent, starting from its checkpoint if there is one.

    `stage` names the checkpoint and the log entries. `losses` yields the losses of the steps, and
    `metrics` returns metrics for the log.
    """
    optimizers = Optimizers(module, minutes)
    path = run.work / f"{stage}.pt"
    if path.exists():
        optimizers.load(torch.load(path)["optimizers"])
    bar = tqdm(total=minutes, unit="min", initial=optimizers.spent)
    recent = []
    for loss in losses(optimizers):
        optimizers.step(loss)
        recent.append(loss.item())
        bar.n = optimizers.spent
        bar.set_postfix(loss=f"{recent[-1]:.3f}")
        is_over = optimizers.share >= 1.0
        if is_over or optimizers.step_no % LOG_STEPS == 0:
            run.log(
                stage=stage,
                step=optimizers.step_no,
                minutes=optimizers.spent,
                loss=sum(recent) / len(recent),
                **metrics(),
            )
            recent = []
            checkpoint = {"model": module.state_dict(), "optimizers": optimizers.state()}
            torch.save(checkpoint, path)
        if is_over:
            return


def train_target(run: Run) -> None:
    """Train the target on the answers, beginning with short sequences and many copying tasks."""
    model = run.target()
    tokenizer = run.tokenizer()
    held_out = data.encode(tokenizer, demo.held_out_tasks(128, seed=99))

    def losses(optimizers: Optimizers) -> Iterator[Tensor]:
        rng = random.Random(optimizers.step_no)
        for copying, max_length, until in ((0.3, 128, 0.15), (0.03, MAX_LENGTH, 1.0)):
            tasks = training.mixture(run.documents, copying, optimizers.step_no * 1000)
            stream = data.batches(tokenizer, tasks, TOKENS, max_length, rng)
            while optimizers.share < until:
                ids, is_answer = next(stream)
                is_target = is_answer[:, 1:]
                hidden = model(ids[:, :-1])[-1][is_target]
                yield F.cross_entropy(model.logits(hidden), ids[:, 1:][is_target])

    def metrics() -> dict[str, float]:
        return {"held_out": share_of_correct_answers(model, held_out)}

    train(run, "target", model, run.args.minutes, losses, metrics)


def draft_vocabulary(run: Run, tokenizer: Tokenizer) -> Tensor:
    """Return the ids of the draft vocabulary.

    It consists of the most frequent answer tokens and of all printable ASCII characters.
    """
    counts: Counter[int] = Counter()
    tasks = list(itertools.islice(training.mixture(run.documents, 0.0, 0), 20000))
    for ids, start in data.encode(tokenizer, tasks):
        counts.update(ids[start:])
    vocabulary = tokenizer.get_vocab()
    for piece in [*(chr(c) for c in range(33, 127)), "<|end|>"]:
        counts[vocabulary[piece]] += 1_000_000
    return torch.tensor(sorted(i for i, _ in counts.most_common(DRAFT_VOCABULARY)))


def distillation_loss(
    head: Eagle3, target: Llama, ids: Tensor, is_answer: Tensor, steps: int
) -> Tensor:
    """Return the head's cross-entropy with the target's distribution over the draft vocabulary.

    Draft step j of `steps` unrolled steps has the weight 0.8^j. `ids` and `is_answer` are the
    results of `data.pad` for a batch.
    """
    is_target = is_answer[:, 2:]
    # The rows begin `steps` positions before the answer. Draft step j reads the output that step
    # j - 1 has one position earlier, so the first j rows of step j have no valid input.
    first = (is_target.int().argmax(1) - steps).clamp(min=0)
    width = int((is_target.sum(1) + steps).max())
    rows = (first[:, None] + torch.arange(width)).clamp(max=is_target.shape[1] - 1)
    counts = is_target.gather(1, rows)
    counts[:, :steps] = False
    counts &= torch.arange(width) < is_target.sum(1)[:, None] + steps
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        streams = target(ids[:, :-1])
        following = (rows + 1)[..., None].expand(-1, -1, streams[-1].shape[-1])
        logits = target.logits(streams[-1].gather(1, following)[counts])
    p = logits.float().softmax(-1)[:, head.t2d]
    features = torch.cat([streams[layer].float() for layer in AUX_LAYERS], -1)[:, :-1]
    embedded = target.model.embed_tokens(ids[:, 1:-1]).detach()
    total = torch.zeros(())
    for j, out in enumerate(head.unroll(features, embedded, steps, rows)):
        log_q = head.lm_head(head.norm(out[counts])).log_softmax(-1)
        total = total - 0.8**j * (p * log_q).sum() / p.sum()
    return total


def train_eagle(run: Run) -> None:
    """Distill the target into the EAGLE-3 head.

    From the second draft step on, the head reads its own outputs, as it does during inference.
    """
    target = run.target()
    tokenizer = run.tokenizer()
    head = run.eagle()
    held_out = data.encode(tokenizer, demo.held_out_tasks(64, seed=99))

    def losses(optimizers: Optimizers) -> Iterator[Tensor]:
        tasks = training.mixture(run.documents, 0.0, 10**8 + optimizers.step_no * 1000)
        rng = random.Random(optimizers.step_no)
        for ids, is_answer in data.batches(tokenizer, tasks, EAGLE_TOKENS, MAX_LENGTH, rng):
            yield distillation_loss(head, target, ids, is_answer, UNROLLED)

    def metrics() -> dict[str, float]:
        return {"acceptance_length": acceptance_length(head, target, held_out, UNROLLED)}

    train(run, "eagle", head, run.args.eagle_minutes, losses, metrics)


def block_loss(
    drafter: Block, target: Llama, ids: Tensor, is_answer: Tensor, width: int, mask: int
) -> Tensor:
    """Return the drafter's cross-entropy with the target, for blocks at random positions.

    Draft j of a block of `width` rows has the weight 0.8^j. `mask` is the id of the mask token.
    `ids` and `is_answer` are the results of `data.pad` for a batch.
    """
    is_target = is_answer[:, 1:]
    with torch.no_grad():
        streams = target(ids[:, :-1])
        p = target.logits(streams[-1][is_target]).softmax(-1)
        start = torch.multinomial(is_target.float(), BLOCKS, replacement=True)
        rows = start[..., None] + torch.arange(width - 1)
        counts = rows < is_target.shape[1]
        rows = rows.clamp(max=is_target.shape[1] - 1)
        counts &= is_target.gather(1, rows.flatten(1)).view_as(rows)
        # Row of `p` for each position. `p` has one row per true element of `is_target`.
        index = (is_target.flatten().cumsum(0) - 1).view_as(is_target).gather(1, rows.flatten(1))
        p = p[index.view_as(rows)[counts]]
        features = torch.cat([streams[layer] for layer in BLOCK_AUX_LAYERS], -1)
        blocks = embed_blocks(target, ids, start, width, mask)
    out = drafter(features, blocks, start)[:, :, 1:][counts]
    log_q = F.linear(out, target.model.embed_tokens.weight.detach()).log_softmax(-1)
    weight = (0.8 ** torch.arange(width - 1)).expand(counts.shape)[counts]
    return -(weight * (p * log_q).sum(-1)).sum() / weight.sum()


def train_block(run: Run) -> None:
    """Distill the target into the block drafter, with blocks of several widths (rows per block)."""
    target = run.target()
    tokenizer = run.tokenizer()
    drafter = run.block()
    mask = run.mask()
    held_out = data.encode(tokenizer, demo.held_out_tasks(64, seed=99))

    def losses(optimizers: Optimizers) -> Iterator[Tensor]:
        tasks = training.mixture(run.documents, 0.0, 2 * 10**8 + optimizers.step_no * 1000)
        rng = random.Random(optimizers.step_no)
        for ids, is_answer in data.batches(tokenizer, tasks, BLOCK_TOKENS, MAX_LENGTH, rng):
            yield block_loss(drafter, target, ids, is_answer, rng.randint(4, WIDTH), mask)

    def metrics() -> dict[str, float]:
        length = block_acceptance_length(drafter, target, held_out, UNROLLED, mask)
        return {"acceptance_length": length}

    train(run, "block", drafter, run.args.block_minutes, losses, metrics)


def export(run: Run) -> None:
    """Write the trained checkpoints in bfloat16, in the formats of Hugging Face and EAGLE-3."""
    tokenizer = run.tokenizer()
    ids = {name: tokenizer.token_to_id(name) for name in data.SPECIAL}
    end_ids = {"bos_token_id": ids["<|begin|>"], "eos_token_id": ids["<|end|>"]}
    shared = {
        **run.sizes.config(),
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        **end_ids,
    }
    target = run.out / "target"
    target_config = {
        "architectures": ["LlamaForCausalLM"],
        **shared,
        "num_hidden_layers": run.sizes.layers,
        "tie_word_embeddings": True,
    }
    write_checkpoint(target, run.target(), target_config)
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "pad_token": "<|end|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": run.sizes.positions,
        "chat_template": data.TEMPLATE,
    }
    write_json(target / "tokenizer_config.json", tokenizer_config)
    generation_config = {**end_ids, "do_sample": False, "max_new_tokens": 256}
    write_json(target / "generation_config.json", generation_config)
    tokenizer.save(str(target / "tokenizer.json"))
    if (run.work / "eagle.pt").exists():
        head = run.eagle()
        write_checkpoint(run.out / "eagle3", head, eagle_config(shared, head))
    if (run.work / "block.pt").exists():
        drafter = run.block()
        write_checkpoint(run.out / "dflash", drafter, block_config(run, shared, drafter))
    (run.out / "training_log.jsonl").write_text((run.work / "training_log.jsonl").read_text())


def eagle_config(shared: dict[str, Any], head: Eagle3) -> dict[str, Any]:
    """Return the config of the EAGLE-3 head. `shared` has the values that all configs contain."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **shared,
        "num_hidden_layers": 1,
        "draft_vocab_size": len(head.d2t),
        "tie_word_embeddings": False,
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
        },
    }


def block_config(run: Run, shared: dict[str, Any], drafter: Block) -> dict[str, Any]:
    """Return the config of the block drafter. `shared` has the values that all configs contain."""
    return {
        **shared,
        **drafter.s.config(),
        "model_type": "qwen3",
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": drafter.s.layers,
        "num_target_layers": run.sizes.layers,
        "tie_word_embeddings": False,
        "dflash_config": {
            "block_size": WIDTH,
            "mask_token_id": run.mask(),
            "target_layer_ids": list(BLOCK_AUX_LAYERS),
        },
    }


def write_checkpoint(folder: Path, module: nn.Module, config: dict[str, Any]) -> None:
    """Write config and weights of a model. Floating-point weights are converted to bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, tensor in module.state_dict().items():
        tensors[name] = (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)
    write_json(folder / "config.json", config)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(content, indent=2) + "\n")


STAGES = {
    "tokenizer": make_tokenizer,
    "target": train_target,
    "eagle": train_eagle,
    "block": train_block,
    "export": export,
}


def main() -> None:
    """Run the stages of the command line in order."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="+", choices=list(STAGES))
    parser.add_argument("--work", default="build/demo", help="folder of tokenizer, models and log")
    parser.add_argument(
        "--out", default=str(ROOT / "models" / "demo"), help="folder to which export writes"
    )
    parser.add_argument(
        "--corpus", default=str(ROOT.parent / "shared/data/corpora/json_instances.jsonl.gz")
    )
    parser.add_argument(
        "--minutes", type=float, default=45.0, help="time budget of the target (default 45)"
    )
    parser.add_argument("--eagle-minutes", type=float, default=12.0)
    parser.add_argument("--block-minutes", type=float, default=12.0)
    parser.add_argument(
        "--threads", type=int, default=2, help="use 1 on a machine with other work (default 2)"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    run = Run(args)
    run.log(stage="start", stages=args.stages, sizes=asdict(run.sizes), rate=RATE, tokens=TOKENS)
    for stage in args.stages:
        STAGES[stage](run)


if __name__ == "__main__":
    if not KEEP_MEMORY.keys() <= os.environ.keys():
        command = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEEP_MEMORY})
    main()
