"""NumPy reference implementation of Llama, EAGLE-3 and MTP, the oracle of the models' kernels.

The functions process whole sequences without a KV cache. Weights are dictionaries of float32 arrays
by Hugging Face name. The computation is in float64.
"""

from typing import Any

import numpy as np

Weights = dict[str, np.ndarray]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """Return the RMSNorm of the rows of x."""
    mean_square = (x * x).mean(-1, keepdims=True)
    root = np.sqrt(mean_square + eps)
    return x / root * weight.astype(np.float64)


def inverse_frequencies(config: dict[str, Any], dim: int) -> np.ndarray:
    """Return the RoPE frequencies, with linear or llama3 scaling."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    result = []
    for i in range(dim // 2):
        f = theta ** (-2.0 * i / dim)
        if kind == "linear":
            f /= rope["factor"]
        if kind == "llama3":
            wavelength = 2 * np.pi / f
            low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
            high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
            if wavelength > low:
                f /= rope["factor"]
            elif wavelength >= high:
                span = rope["high_freq_factor"] - rope["low_freq_factor"]
                ratio = rope["original_max_position_embeddings"] / wavelength
                s = (ratio - rope["low_freq_factor"]) / span
                stretched = (1 - s) * f / rope["factor"]
                f = stretched + s * f
        result.append(f)
    return np.array(result)


def rotate(x: np.ndarray, positions: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """Apply RoPE to x [T, heads, d]. Dimension i is rotated together with dimension i + d/2."""
    angle = positions[:, None] * frequencies
    c = np.cos(angle)[:, None]
    s = np.sin(angle)[:, None]
    a, b = np.split(x, 2, axis=-1)
    first = a * c - b * s
    second = b * c + a * s
    return np.concatenate([first, second], axis=-1)


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return softmax attention: q [Q, heads, d], k and v [T, kv_heads, d], mask [Q, T]."""
    group = q.shape[1] // k.shape[1]
    k = np.repeat(k, group, axis=1)
    v = np.repeat(v, group, axis=1)
    products = np.einsum("qhd,khd->hqk", q, k)
    scores = products / np.sqrt(q.shape[-1])
    scores = np.where(mask, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    p = np.exp(scores - top)
    p /= p.sum(-1, keepdims=True)
    out = np.einsum("hqk,khd->qhd", p, v)
    return out.reshape(q.shape[0], -1)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def decoder_layer(
    w: Weights, prefix: str, config: dict[str, Any], x: np.ndarray, residual: np.ndarray
) -> np.ndarray:
    """Return the residual stream after one causal layer with normalized attention input `x`."""
    length = x.shape[0]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    dim = config.get("head_dim") or config["hidden_size"] // heads
    frequencies = inverse_frequencies(config, dim)
    at = np.arange(length)

    def linear(name: str, y: np.ndarray) -> np.ndarray:
        weight = w[f"{prefix}.{name}.weight"]
        return y @ weight.astype(np.float64).T

    q = linear("self_attn.q_proj", x)
    k = linear("self_attn.k_proj", x)
    v = linear("self_attn.v_proj", x)
    q = rotate(q.reshape(length, heads, dim), at, frequencies)
    k = rotate(k.reshape(length, kv_heads, dim), at, frequencies)
    v = v.reshape(length, kv_heads, dim)
    causal = np.tril(np.ones((length, length), dtype=bool))
    attended = attention(q, k, v, causal)
    h = residual + linear("self_attn.o_proj", attended)
    norm_weight = w[f"{prefix}.post_attention_layernorm.weight"]
    y = rms_norm(h, norm_weight, config["rms_norm_eps"])
    gate = linear("mlp.gate_proj", y)
    up = linear("mlp.up_proj", y)
    return h + linear("mlp.down_proj", silu(gate) * up)


def llama_streams(w: Weights, config: dict[str, Any], tokens: np.ndarray) -> list[np.ndarray]:
    """Return the residual streams [T, hidden] after each layer."""
    x = w["model.embed_tokens.weight"].astype(np.float64)[tokens]
    eps = config["rms_norm_eps"]
    streams = []
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}"
        norm_weight = w[f"{prefix}.input_layernorm.weight"]
        y = rms_norm(x, norm_weight, eps)
        x = decoder_layer(w, prefix, config, y, x)
        streams.append(x)
    return streams


def llama_logits(w: Weights, config: dict[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Return logits [T, vocab]."""
    x = llama_streams(w, config, tokens)[-1]
    tied = config.get("tie_word_embeddings")
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    head = w[name].astype(np.float64)
    final = rms_norm(x, w["model.norm.weight"], config["rms_norm_eps"])
    return final @ head.T


def eagle3_outputs(
    w: Weights,
    config: dict[str, Any],
    embedding: np.ndarray,
    features: np.ndarray,
    next_tokens: np.ndarray,
    prefix: str = "midlayer",
    layers: int = 1,
) -> np.ndarray:
    """Return outputs [E, hidden] of entries 0..E-1 of an EAGLE-3 head, before the final norm.

    Entry i combines row i of features [E, 3 hidden], the features of token i, with element i of
    next_tokens [E], which is token i + 1.
    """
    eps = config["rms_norm_eps"]
    g = features @ w["fc.weight"].astype(np.float64).T
    normed = rms_norm(g, w[f"{prefix}.hidden_norm.weight"], eps)
    embedded = embedding.astype(np.float64)[next_tokens]
    input_norm = w[f"{prefix}.input_layernorm.weight"]
    x = np.concatenate([rms_norm(embedded, input_norm, eps), normed], -1)
    residual = normed if config.get("norm_before_residual") else g
    out = decoder_layer(w, prefix, config, x, residual)
    for i in range(1, layers):
        input_norm = w[f"layers.{i}.input_layernorm.weight"]
        x = rms_norm(out, input_norm, eps)
        out = decoder_layer(w, f"layers.{i}", config, x, out)
    return out


def eagle3_logits(w: Weights, config: dict[str, Any], out: np.ndarray) -> np.ndarray:
    """Return the draft logits of outputs [E, hidden]."""
    head = w["lm_head.weight"].astype(np.float64)
    final = rms_norm(out, w["norm.weight"], config["rms_norm_eps"])
    return final @ head.T


def mtp_states(
    w: Weights,
    config: dict[str, Any],
    prefix: str,
    embedding: np.ndarray,
    h: np.ndarray,
    tokens: np.ndarray,
) -> np.ndarray:
    """Return the states [E, hidden] of an MTP module before its norm.

    Entry i combines the previous module's state h[i] with tokens[i].
    """
    eps = config["rms_norm_eps"]
    embedded = embedding.astype(np.float64)[tokens]
    joined = [
        rms_norm(embedded, w[f"{prefix}.enorm.weight"], eps),
        rms_norm(h, w[f"{prefix}.hnorm.weight"], eps),
    ]
    projection = w[f"{prefix}.eh_proj.weight"].astype(np.float64)
    x = np.concatenate(joined, -1) @ projection.T
    input_norm = w[f"{prefix}.input_layernorm.weight"]
    y = rms_norm(x, input_norm, eps)
    return decoder_layer(w, prefix, config, y, x)
