"""Regenerate tests/fixtures: tiny random checkpoints and the outputs of reference implementations.

    python tools/train/fixtures.py tests/fixtures

Run by hand in an environment with torch, transformers and the published code of drafters (packages
dflash 0.1.0 and specforge 0.2.0). graft does not require any of them.

Folders of target models
    The output of ``save_pretrained``, and ``expected.npz``: token ids, logits, and the hidden
    states at the input of each layer, computed by transformers in float32 from the stored weights.
``rope_scaling``
    Config values that change the RoPE scaling of some of these models (``cases.json``), and the
    logits and greedy tokens that transformers computes with them. ``frequencies.json`` has RoPE
    parameters at the sizes of real models, and the frequencies that result from them.
``tensor_cores/bfloat16``
    A Llama whose sizes fit tensor cores, with the logits that transformers computes in float32 and
    in bfloat16.
``eagle3``
    A target and an EAGLE-3 head with random weights, both built with `nets.py`, and the outputs of
    several draft steps, computed by the published training code. `nets.py` must compute the same
    outputs.
``dflash``
    A drafter for the target ``eight_layers_bfloat16``, and the logits that the drafter's published
    code computes from the target's hidden states at several positions. One block is complete, and
    the end of the sequence truncates another one.
``dflash2``
    The same files for a DFlash2 drafter, and the outputs of its selector: greedy drafts, the ids
    from which the selector chooses, and the probability of each of these ids after each token.
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
EAGLE3_LAYERS = (0, 2, 3)
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
SMALLER: dict[str, Any] = {"vocab_size": 64, "intermediate_size": 40}
#: Maps names of target models to stored dtype, maximum shard size, and values that differ from
#: SMALL.
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
    "qwen2_bfloat16": (
        "bfloat16",
        "1GB",
        {
            **SMALLER,
            "model_type": "qwen2",
            "num_key_value_heads": 2,
            "sliding_window": 16,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral_float16": (
        "float16",
        "1GB",
        {
            **SMALLER,
            "model_type": "mistral",
            "num_key_value_heads": 2,
            "head_dim": 12,
            "sliding_window": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
    "smollm3_bfloat16": (
        "bfloat16",
        "1GB",
        {
            **SMALLER,
            "model_type": "smollm3",
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "tie_word_embeddings": True,
            "pretraining_tp": 2,
            "pad_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
        },
    ),
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.0, 1.1, 1.25, 1.5],
    "long_factor": [1.0, 2.0, 3.5, 8.0],
}
#: RoPE cases by name: the folder of a model, and config values that replace its RoPE parameters.
ROPE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": (
        "qwen3_bfloat16",
        {"rope_parameters": {**YARN, "original_max_position_embeddings": 16}},
    ),
    "yarn_whole_length": ("mistral_float16", {"rope_parameters": YARN}),
    "yarn_mscale": (
        "heads_all_float32",
        {
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 24,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
                "beta_fast": 4.0,
                "beta_slow": 0.5,
            }
        },
    ),
    "yarn_attention_factor": (
        "qwen2_bfloat16",
        {
            "rope_parameters": {
                **YARN,
                "original_max_position_embeddings": 24,
                "attention_factor": 1.3,
                "truncate": False,
            }
        },
    ),
    "dynamic": (
        "heads_all_float32",
        {
            "max_position_embeddings": LENGTH // 2,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0},
        },
    ),
    "longrope_short": (
        "heads_all_float32",
        {"rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": LENGTH}},
    ),
    "longrope_long": (
        "qwen2_bfloat16",
        {"rope_parameters": {**LONG_ROPE, "original_max_position_embeddings": LENGTH - 1}},
    ),
    "linear": (
        "smollm3_bfloat16",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.5}},
    ),
}
#: RoPE parameters at the sizes of real models, with `max_position_embeddings`.
FREQUENCY_CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "yarn": (
        40960,
        {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 32768,
        },
    ),
    "yarn_not_truncated": (
        131072,
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    ),
    "dynamic": (16384, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    "linear": (16384, {"rope_type": "linear", "rope_theta": 1e5, "factor": 4.0}),
    "longrope": (
        131072,
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0 + i / 64 for i in range(64)],
            "long_factor": [1.0 + i for i in range(64)],
            "original_max_position_embeddings": 4096,
        },
    ),
    "llama3": (
        131072,
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


def make_llama(folder: Path, seed: int, dtype: str, shard: str, changes: dict[str, Any]) -> None:
    """Write a random Llama and the outputs of transformers.

    `changes` has the config values that differ from SMALL, and `shard` is the maximum shard size.
    """
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(**{"model_type": "llama", **SMALL, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape))
            elif "bias" in name:
                parameter.copy_(0.5 * torch.randn(parameter.shape))
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


def make_rope_scaling(folder: Path, models: Path) -> None:
    """Write the configs of `ROPE_CASES` and the last logits that transformers computes with them.

    The logits are computed for the token ids in the model's ``expected.npz``. ``greedy`` contains
    the greedy tokens that follow the first half of these ids. Each greedy token is computed from
    the whole sequence before it, without a KV cache.
    """
    folder.mkdir()
    cases = {
        name: {"model": model, "config": config} for name, (model, config) in ROPE_CASES.items()
    }
    (folder / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    expected = {}
    for name, (model, changes) in ROPE_CASES.items():
        data = json.loads((models / model / "config.json").read_text())
        config = transformers.AutoConfig.for_model(**{**data, **changes})
        exact = transformers.AutoModelForCausalLM.from_pretrained(
            models / model, config=config, dtype=torch.float32, attn_implementation="eager"
        )
        tokens = torch.from_numpy(np.load(models / model / "expected.npz")["tokens"]).long()
        with torch.no_grad():
            expected[f"{name}_logits"] = exact(tokens[None]).logits[0, -8:].numpy()
            greedy = tokens[None, : LENGTH // 2]
            while greedy.shape[1] < LENGTH:
                logits = exact(greedy, use_cache=False).logits[0, -1]
                greedy = torch.cat([greedy, logits.argmax().reshape(1, 1)], 1)
        expected[f"{name}_greedy"] = greedy[0].numpy().astype(np.int32)
    np.savez_compressed(folder / "expected.npz", **expected)
    make_rope_frequencies(folder)


def make_rope_frequencies(folder: Path) -> None:
    """Write `FREQUENCY_CASES` and the frequencies and attention factors of transformers.

    Frequencies that depend on the length of the sequence are those for the maximum scaled length.
    """
    cases = {}
    for name, (length, parameters) in FREQUENCY_CASES.items():
        fields = {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "max_position_embeddings": length,
            "rope_parameters": parameters,
        }
        config = transformers.AutoConfig.for_model("llama", **json.loads(json.dumps(fields)))
        compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
        longest = int(length * parameters.get("factor", 1.0))
        frequencies, attention_factor = compute(config, torch.device("cpu"), seq_len=longest)
        cases[name] = {
            "config": fields,
            "frequencies": [float(str(x)) for x in frequencies.numpy()],
            "attention_factor": attention_factor,
        }
    (folder / "frequencies.json").write_text(json.dumps(cases) + "\n")


def make_tensor_core_llama(folder: Path) -> None:
    """Write a Llama with 128 columns and the outputs of transformers in float32 and bfloat16."""
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
    expected = dict(np.load(folder / "expected.npz"))
    with torch.no_grad():
        logits = model(torch.from_numpy(expected["tokens"]).long()[None]).logits[0]
    np.savez_compressed(folder / "expected.npz", **expected, rounded=logits.float().numpy())


def make_eagle3(folder: Path, seed: int) -> None:
    """Write a target and an EAGLE-3 head, and the outputs of the head's draft steps."""
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
    write_eagle3_checkpoints(folder, target, head, sizes)
    with torch.no_grad():
        tokens = torch.randint(0, sizes.vocab, (1, LENGTH))
        streams = target(tokens)
        features = torch.cat([streams[i] for i in EAGLE3_LAYERS], -1)[:, :-1]
        embedded = target.model.embed_tokens(tokens[:, 1:])
        positions = torch.arange(LENGTH - 1)[None]
        own_outs = head.unroll(features, embedded, 4, positions)
        config = {**sizes.config(), "draft_vocab_size": 40}
        outs = unroll_published(head, config, features, embedded)
        for j, (own, out) in enumerate(zip(own_outs, outs, strict=True)):
            torch.testing.assert_close(own[:, j:], out[:, j:], atol=2e-5, rtol=0)
        logits = [head.lm_head(head.norm(out)) for out in outs]
    np.savez_compressed(
        folder / "expected.npz",
        tokens=tokens[0].numpy().astype(np.int32),
        outs=torch.cat(outs).numpy(),
        logits=torch.cat(logits).numpy(),
    )


def write_eagle3_checkpoints(
    folder: Path, target: torch.nn.Module, head: torch.nn.Module, sizes: Any
) -> None:
    """Write the checkpoints of a target and its EAGLE-3 head."""
    target_config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": sizes.layers,
        "tie_word_embeddings": True,
    }
    head_config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": 40,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(EAGLE3_LAYERS)},
        "tie_word_embeddings": False,
    }
    write_checkpoint(folder / "target", target, {**sizes.config(), **target_config})
    write_checkpoint(folder / "head", head, {**sizes.config(), **head_config})


def write_checkpoint(folder: Path, module: torch.nn.Module, config: dict[str, Any]) -> None:
    """Write the config and the weights of a model to a folder."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    tensors = {name: tensor.contiguous() for name, tensor in module.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")


def unroll_published(
    head: torch.nn.Module, config: dict[str, Any], features: torch.Tensor, embedded: torch.Tensor
) -> list[torch.Tensor]:
    """Return the outputs that the published training code computes for four draft steps.

    The entry of step j at position i is computed from the entry of step j-1 at position i-1, and
    from the entries with true features at positions up to i-j.

    Parameters
    ----------
    head
        Head whose weights are used.
    config
        Config of the head.
    features, embedded
        See `nets.Eagle3.unroll`.
    """
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
        shifted = torch.nn.functional.pad(embedded[:, j:], (0, 0, 0, j))
        hidden = model.backbone(shifted, hidden, caches, mask, torch.arange(count)[None])
        outs.append(hidden.roll(j, 1))
    return outs


DFLASH_TARGET_LAYERS = [1, 3, 6]
DFLASH_BLOCK = 5
DFLASH_MASK = 63
DFLASH_VOCAB = 64


def dflash_config(is_dflash2: bool) -> Any:
    """Return the config of a block drafter: DFlash2 with `is_dflash2`, otherwise DFlash."""
    from transformers import Qwen3Config

    drafter: dict[str, Any] = {
        "block_size": DFLASH_BLOCK,
        "mask_token_id": DFLASH_MASK,
        "target_layer_ids": DFLASH_TARGET_LAYERS,
    }
    changes: dict[str, Any] = {}
    if is_dflash2:
        drafter |= {
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
    return Qwen3Config(
        **{
            **SMALL,
            "vocab_size": DFLASH_VOCAB,
            "hidden_size": 24,
            "intermediate_size": 40,
            "head_dim": 8,
            "num_key_value_heads": 2,
            "num_target_layers": 8,
            "dflash_config": drafter,
            "dtype": "bfloat16",
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
            **changes,
        }
    )


def make_dflash(folder: Path, target: Path, seed: int, is_dflash2: bool = False) -> None:
    """Write a block drafter and the outputs of its published code at several positions.

    `target` is the folder of the target with its expected outputs. A DFlash2 drafter also has a
    selector, whose outputs are written too.
    """
    from dflash.model import DFlash2DraftModel, DFlashDraftModel, _raw_input_embeddings

    torch.manual_seed(seed)
    model_class = DFlash2DraftModel if is_dflash2 else DFlashDraftModel
    config = dflash_config(is_dflash2)
    model = model_class(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape))
            elif "base_kernel" in name:
                parameter.copy_(0.4 * torch.randn(parameter.shape))
            elif "codebook" in name:
                parameter.mul_(6.0)
        model.save_pretrained(folder)
        if is_dflash2:  # rename as in published checkpoints
            tensors = {
                name.replace("codebook.weight", "codebook"): tensor.contiguous()
                for name, tensor in model.state_dict().items()
            }
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        exact = model_class.from_pretrained(folder, dtype=torch.float32)
        target_model = transformers.AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32
        )
        known = np.load(target / "expected.npz")
        tokens = torch.from_numpy(known["tokens"]).long()
        inputs = [torch.from_numpy(known["inputs"][i + 1]) for i in DFLASH_TARGET_LAYERS]
        context = torch.cat(inputs, -1)
        scale = config.dflash_config.get("input_embedding_scale", 1.0)
        expected: dict[str, Any] = {}
        for n in (1, 2, 6, 7, 12, 20, 33, 37):
            width = min(DFLASH_BLOCK, LENGTH - n)
            block = torch.full((1, width), DFLASH_MASK)
            block[0, 0] = tokens[n]
            out = exact(
                target_hidden=context[None, :n],
                position_ids=torch.arange(n + width)[None],
                noise_embedding=_raw_input_embeddings(target_model, block, scale),
            )
            logits = exact.compute_logits(out, target_model.lm_head)
            expected[f"logits_{n}"] = logits[0].numpy()
            if is_dflash2:
                drafts, ids, law = select_drafts(exact.candidate_selector, out, logits, block)
                expected[f"drafts_{n}"] = drafts
                expected[f"ids_{n}"] = ids
                expected[f"law_{n}"] = law
    np.savez_compressed(folder / "expected.npz", tokens=known["tokens"], **expected)


def select_drafts(
    selector: Any, out: torch.Tensor, logits: torch.Tensor, block: torch.Tensor
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the outputs of DFlash2's selector for a block.

    Returns
    -------
    drafts
        Greedy drafts.
    ids
        Candidate ids of each row, in ascending order.
    law
        Probability of each of these ids after each token.
    """
    drafts = selector.select(out[:, 1:], logits[:, 1:], block[:, 0], 0.0)[0][0].numpy()
    every_token = torch.arange(DFLASH_VOCAB)
    rows = []
    for row in range(1, block.shape[1]):
        row_out, row_logits = (x[:, [row]].expand(DFLASH_VOCAB, -1, -1) for x in (out, logits))
        rows.append(selector.select(row_out, row_logits, every_token, 1.0))
    ids, order = torch.cat([row[1] for row in rows], 1).transpose(0, 1).sort()
    law = torch.cat([row[2] for row in rows], 1).transpose(0, 1).gather(-1, order)
    return drafts, ids[:, 0].numpy(), law.numpy()


def main() -> None:
    """Write all fixtures to a folder, replacing existing ones."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    torch.set_num_threads(1)
    for seed, (name, case) in enumerate(CASES.items()):
        shutil.rmtree(folder / name, ignore_errors=True)
        make_llama(folder / name, seed, *case)
    shutil.rmtree(folder / "rope_scaling", ignore_errors=True)
    make_rope_scaling(folder / "rope_scaling", folder)
    shutil.rmtree(folder / "tensor_cores", ignore_errors=True)
    make_tensor_core_llama(folder / "tensor_cores" / "bfloat16")
    shutil.rmtree(folder / "eagle3", ignore_errors=True)
    make_eagle3(folder / "eagle3", 5)
    target = folder / "eight_layers_bfloat16"
    for name, seed in (("dflash", 6), ("dflash2", 7)):
        shutil.rmtree(folder / name, ignore_errors=True)
        make_dflash(folder / name, target, seed, is_dflash2=name == "dflash2")


if __name__ == "__main__":
    main()
