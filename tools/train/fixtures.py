"""Remake tests/fixtures: tiny random checkpoints and what other implementations make of them.

Run by hand where torch, transformers and published code of drafters (packages dflash 0.1.0 and
specforge 0.2.0) are installed; graft itself needs none of them::

    python tools/train/fixtures.py tests/fixtures

Each Llama folder is what ``save_pretrained`` writes, plus ``expected.npz``: token ids, logits and
the hidden states that enter each layer, computed in float32 by transformers from the stored
weights. The ``eagle3`` folder holds a target and a head made by the training code of this
repository (`nets.py`), with the outputs of several draft steps that published training code makes
of the head, which ours must equal. ``dflash`` is a drafter of
the target ``eight_layers_bfloat16``, with the logits that its published code makes of that target's
hidden states at several places, all rows, and of a block that the end of the request cuts;
``dflash2`` is one with what its selector makes of them: the greedy drafts, the ids that it selects
from and, behind every token, their probabilities.
``tensor_cores/bfloat16`` is a Llama of sizes that tensor cores take, with the logits that
transformers makes in bfloat16 beside those in float32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

LENGTH = 40
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": [0, 2],
}
# name -> (stored dtype, shard size, changes of SMALL)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "heads_all_float32": ("float32", "1GB", {}),
    "grouped_llama3_bfloat16": (
        "bfloat16",
        "1GB",
        {
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
            "max_position_embeddings": 512,
        },
    ),
    "single_key_linear_float16": (
        "float16",
        "1GB",
        {
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "linear", "factor": 2.5, "rope_theta": 1000.0},
        },
    ),
    "wide_heads_sharded": (
        "float32",
        "20KB",
        {"hidden_size": 40, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
    ),
    "eight_layers_bfloat16": (
        "bfloat16",
        "1GB",
        {"hidden_size": 24, "num_key_value_heads": 2, "num_hidden_layers": 8, "vocab_size": 64},
    ),
    "qwen3_bfloat16": (
        "bfloat16",
        "1GB",
        {
            "model_type": "qwen3",
            "num_key_value_heads": 2,
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
}


def make_llama(folder: Path, seed: int, dtype: str, shard: str, changes: dict[str, Any]) -> None:
    """Save one random Llama and what transformers computes with it."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**{"model_type": "llama", **SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape))
    model.save_pretrained(folder, max_shard_size=shard)
    exact = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    tokens = torch.randint(0, config.vocab_size, (1, LENGTH))
    with torch.no_grad():
        result = exact(tokens, output_hidden_states=True)
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens[0].numpy().astype(np.int32),
        logits=result.logits[0].numpy(),
        inputs=torch.cat(result.hidden_states[:-1]).numpy(),
        transformers=np.array(transformers.__version__),
    )


def make_rounded(folder: Path) -> None:
    """Save a Llama of 128 columns, and what transformers computes with it in bfloat16 too."""
    make_llama(
        folder,
        7,
        "bfloat16",
        "1GB",
        {
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_key_value_heads": 2,
            "vocab_size": 64,
            "num_hidden_layers": 1,
            "tie_word_embeddings": True,
            "initializer_range": 0.1,
        },
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    known = dict(np.load(folder / "expected.npz"))
    with torch.no_grad():
        logits = model(torch.from_numpy(known["tokens"]).long()[None]).logits[0]
    np.savez_compressed(folder / "expected.npz", **known, rounded=logits.float().numpy())


def make_eagle3(folder: Path, seed: int) -> None:
    """Save a target and a head as the training code writes them, and the head's draft steps."""
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from nets import Eagle3, Llama, Sizes

    torch.manual_seed(seed)
    sizes = Sizes(hidden=32, layers=4, heads=4, kv_heads=2, head_dim=8, inner=48, vocab=96)
    target = Llama(sizes)
    head = Eagle3(sizes, torch.randperm(96)[:40])
    with torch.no_grad():
        for name, parameter in (*target.named_parameters(), *head.named_parameters()):
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape))
            else:
                parameter.mul_(10.0)
        tokens = torch.randint(0, sizes.vocab, (1, LENGTH))
        streams = target(tokens)
        layers = (0, 2, 3)
        features = torch.cat([streams[i] for i in layers], -1)[:, :-1]
        embedded = target.model.embed_tokens(tokens[:, 1:])
        everywhere = torch.arange(LENGTH - 1)[None]
        ours = head.unroll(features, embedded, 4, everywhere)
        sized = {**sizes.config(), "draft_vocab_size": 40}
        outs = unroll_published(head, sized, features, embedded)
        for j, (own, out) in enumerate(zip(ours, outs, strict=True)):
            torch.testing.assert_close(own[:, j:], out[:, j:], atol=2e-5, rtol=0)
        logits = [head.lm_head(head.norm(out)) for out in outs]
    of_target = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": sizes.layers}
    of_head = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 40,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }
    for name, module, own in (
        ("target", target, {**of_target, "tie_word_embeddings": True}),
        ("head", head, {**of_head, "tie_word_embeddings": False}),
    ):
        (folder / name).mkdir(parents=True)
        text = json.dumps({**sizes.config(), **own}, indent=1) + "\n"
        (folder / name / "config.json").write_text(text)
        tensors = {k: v.contiguous() for k, v in module.state_dict().items()}
        save_file(tensors, folder / name / "model.safetensors")
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens[0].numpy().astype(np.int32),
        outs=torch.cat(outs).numpy(),
        logits=torch.cat(logits).numpy(),
    )


def unroll_published(
    head: torch.nn.Module, config: dict[str, Any], features: torch.Tensor, embedded: torch.Tensor
) -> list[torch.Tensor]:
    """Outputs of four draft steps; the entry of step j at position i is made of step j - 1's one
    before it, and of true ones up to i - j."""
    from specforge.modeling.draft.llama3_eagle import (
        LlamaForCausalLMEagle3,
        prepare_decoder_attention_mask,
    )

    model = LlamaForCausalLMEagle3(transformers.LlamaConfig(**config))
    model.load_state_dict(head.state_dict(), strict=False)
    caches: list[list[torch.Tensor]] = [[], []]
    count = features.shape[1]
    outs = []
    mask = prepare_decoder_attention_mask(
        torch.ones((1, count), dtype=torch.bool), (1, count), embedded, 0
    )
    hidden = model.project_hidden_states(features)
    for j in range(4):
        behind = torch.nn.functional.pad(embedded[:, j:], (0, 0, 0, j))
        hidden = model.backbone(behind, hidden, caches, mask, torch.arange(count)[None])
        outs.append(hidden.roll(j, 1))
    return outs


def make_dflash(folder: Path, target: Path, seed: int, second: bool = False) -> None:
    """Save a block drafter, of DFlash or DFlash2, and what it makes of blocks behind positions of
    the target's tokens."""
    from dflash.model import DFlash2DraftModel, DFlashDraftModel, _raw_input_embeddings
    from transformers import Qwen3Config

    torch.manual_seed(seed)
    made = DFlash2DraftModel if second else DFlashDraftModel
    mask = 63
    read = [1, 3, 6]
    own: dict[str, Any] = {"block_size": 5, "mask_token_id": mask, "target_layer_ids": read}
    changes: dict[str, Any] = {}
    if second:
        own |= {
            "conv_kernel_size": 3,
            "conv_group_size": 8,
            "selector_rank": 6,
            "selector_top_k": 7,
            "output_multiplier": 0.75,
            "final_logit_softcapping": 4.0,
            "input_embedding_scale": 1.5,
        }
        changes = {
            "is_causal": False,
            "use_sliding_window": True,
            "sliding_window": LENGTH,
            "layer_types": ["sliding_attention"] * 2,
        }
    config = Qwen3Config(
        **{
            **SMALL,
            "vocab_size": 64,
            "hidden_size": 24,
            "intermediate_size": 40,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "num_target_layers": 8,
            "dflash_config": own,
            "dtype": "bfloat16",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            **changes,
        }
    )
    model = made(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape))
            elif "base_kernel" in name:
                parameter.copy_(0.4 * torch.randn(parameter.shape))
            elif "codebook" in name:
                parameter.mul_(6.0)
        model.save_pretrained(folder)
        if second:  # as published
            tensors = {
                name.replace("codebook.weight", "codebook"): tensor.contiguous()
                for name, tensor in model.state_dict().items()
            }
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        exact = made.from_pretrained(folder, dtype=torch.float32)
        of_target = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
        known = np.load(target / "expected.npz")
        tokens = torch.from_numpy(known["tokens"]).long()
        context = torch.cat([torch.from_numpy(known["inputs"][i + 1]) for i in read], -1)
        expected: dict[str, Any] = {}
        for n in (1, 2, 6, 7, 12, 20, 33, 37):
            width = min(5, LENGTH - n)
            block = torch.full((1, width), mask)
            block[0, 0] = tokens[n]
            scale = own.get("input_embedding_scale", 1.0)
            out = exact(
                target_hidden=context[None, :n],
                position_ids=torch.arange(n + width)[None],
                noise_embedding=_raw_input_embeddings(of_target, block, scale),
            )
            logits = exact.compute_logits(out, of_target.lm_head)
            expected[f"logits_{n}"] = logits[0].numpy()
            if not second:
                continue
            select = exact.candidate_selector.select
            path = select(out[:, 1:], logits[:, 1:], block[:, 0], 0.0)[0]
            expected[f"drafts_{n}"] = path[0].numpy()
            # Of each row, behind every token, the law of the ids that are selected from.
            rows = [
                select(
                    *(x[:, [row]].expand(64, -1, -1) for x in (out, logits)), torch.arange(64), 1.0
                )
                for row in range(1, width)
            ]
            ids, order = torch.cat([row[1] for row in rows], 1).transpose(0, 1).sort()
            law = torch.cat([row[2] for row in rows], 1).transpose(0, 1).gather(-1, order)
            expected[f"ids_{n}"], expected[f"law_{n}"] = ids[:, 0].numpy(), law.numpy()
    np.savez_compressed(folder / "expected.npz", tokens=known["tokens"], **expected)


def main() -> None:
    """Write every fixture below the given folder, replacing what is there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    for seed, (name, case) in enumerate(CASES.items()):
        shutil.rmtree(folder / name, ignore_errors=True)
        make_llama(folder / name, seed, *case)
    shutil.rmtree(folder / "tensor_cores", ignore_errors=True)
    make_rounded(folder / "tensor_cores" / "bfloat16")
    shutil.rmtree(folder / "eagle3", ignore_errors=True)
    make_eagle3(folder / "eagle3", 5)
    for second, name in enumerate(("dflash", "dflash2")):
        shutil.rmtree(folder / name, ignore_errors=True)
        make_dflash(folder / name, folder / "eight_layers_bfloat16", 6 + second, bool(second))


if __name__ == "__main__":
    main()
