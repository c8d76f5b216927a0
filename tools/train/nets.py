"""The demo model and its drafters in plain torch, for training.

`Llama` is equivalent to Hugging Face's ``LlamaForCausalLM`` (RMSNorm before each block, half-split
rotary embedding, grouped-query attention, SwiGLU, tied output head) and has the same parameter
names. `Eagle3` is one Llama layer with an LM head over a draft vocabulary. The attention of the
layer reads the embedding of a token concatenated with a feature of the target. `Block` is a DFlash
drafter: layers with normalized queries and keys, and the target's LM head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model."""

    #: Hidden size, layers, attention heads, key-value heads, head size, MLP size, vocabulary size.
    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 512
    vocab: int = 2048
    theta: float = 10000.0  #: base of the rotary embedding
    eps: float = 1e-5  #: epsilon of RMSNorm
    positions: int = 1024  #: maximum number of positions

    def config(self) -> dict[str, Any]:
        """Return the values of a Hugging Face config that target and drafters share."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": self.positions,
            "vocab_size": self.vocab,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary(s: Sizes, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the half-split rotary embedding, [positions, head_dim] each."""
    frequencies = s.theta ** (-torch.arange(0, s.head_dim, 2, dtype=torch.float32) / s.head_dim)
    angle = positions.float()[:, None] * frequencies[None]
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Apply the rotary embedding."""
    cos, sin = rope
    half = x.shape[-1] // 2
    rotated_half = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + rotated_half * sin


class Attention(nn.Module):
    """Projections of an attention layer. `q` and `kv` also apply the rotary embedding.

    `width` is the number of input features. With `head_norm`, queries and keys are normalized.
    """

    def __init__(self, s: Sizes, width: int, head_norm: bool = False) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(width, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        self.q_norm = RMSNorm(s.head_dim, s.eps) if head_norm else nn.Identity()
        self.k_norm = RMSNorm(s.head_dim, s.eps) if head_norm else nn.Identity()

    def q(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """Return queries, [batch, heads, length, head_dim]."""
        b, n, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, n, self.s.heads, -1))
        return rotate(q.transpose(1, 2), rope)

    def kv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values, repeated to [batch, heads, length, head_dim] each."""
        b, n, _ = x.shape
        group = self.s.heads // self.s.kv_heads
        k = self.k_norm(self.k_proj(x).view(b, n, self.s.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.s.kv_heads, -1).transpose(1, 2)
        return rotate(k, rope).repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def out(self, attention_output: Tensor) -> Tensor:
        """Apply the output projection to [batch, heads, length, head_dim]."""
        b, _, n, _ = attention_output.shape
        return self.o_proj(attention_output.transpose(1, 2).reshape(b, n, -1))


class MLP(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, s: Sizes, head_norm: bool = False) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.self_attn = Attention(s, s.hidden, head_norm)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)
        self.mlp = MLP(s)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        y = self.input_layernorm(x)
        q = self.self_attn.q(y, rope)
        k, v = self.self_attn.kv(y, rope)
        x = x + self.self_attn.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)


class Llama(nn.Module):
    """Target model. Its input sequences start at position 0 and are padded on the right."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.model = Backbone(s)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * s.layers) ** 0.5 if is_residual else 0.02
                nn.init.normal_(p, std=std)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """Return the residual stream after each layer, [batch, length, hidden] each.

        The final norm is not applied to the last entry.
        """
        x = self.model.embed_tokens(ids)
        rope = rotary(self.s, torch.arange(ids.shape[1]))
        streams = []
        for layer in self.model.layers:
            x = layer(x, rope)
            streams.append(x)
        return streams

    def logits(self, stream: Tensor) -> Tensor:
        """Return the logits for the residual stream after the last layer."""
        return F.linear(self.model.norm(stream), self.model.embed_tokens.weight)


class MidLayer(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.hidden_norm = RMSNorm(s.hidden, s.eps)
        self.input_layernorm = RMSNorm(s.hidden, s.eps)
        self.self_attn = Attention(s, 2 * s.hidden)
        self.post_attention_layernorm = RMSNorm(s.hidden, s.eps)
        self.mlp = MLP(s)


class Eagle3(nn.Module):
    """EAGLE-3 head. Its input entry i is the feature of token i and the embedding of token i+1.

    Parameters
    ----------
    s
        Sizes of the head.
    kept
        Target ids of the draft vocabulary.

    Attributes
    ----------
    d2t
        Target id minus draft id, for each draft id.
    t2d
        Whether each target id is in the draft vocabulary.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, s: Sizes, kept: Tensor) -> None:
        super().__init__()
        self.s = s
        self.fc = nn.Linear(3 * s.hidden, s.hidden, bias=False)
        self.midlayer = MidLayer(s)
        self.norm = RMSNorm(s.hidden, s.eps)
        self.lm_head = nn.Linear(s.hidden, len(kept), bias=False)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        in_vocabulary = torch.zeros(s.vocab, dtype=torch.bool)
        in_vocabulary[kept] = True
        self.register_buffer("d2t", kept.sort().values - torch.arange(len(kept)))
        self.register_buffer("t2d", in_vocabulary)

    def kept(self) -> Tensor:
        """Return the target ids of the draft vocabulary in ascending order."""
        return self.d2t + torch.arange(len(self.d2t))

    def unroll(self, features: Tensor, embedded: Tensor, steps: int, rows: Tensor) -> list[Tensor]:
        """Return the outputs of several draft steps at many positions (training-time test).

        Parameters
        ----------
        features
            Low, middle and high features of tokens 0..n-1; [batch, n, 3 hidden].
        embedded
            Embeddings of tokens 1..n; [batch, n, hidden].
        steps
            Number of steps. Step 0 uses true features. In step j, the feature of an entry is the
            output of step j-1 one position earlier, with the embedding of the true token.
        rows
            Consecutive positions to compute; [batch, r]. All other positions are only context.

        Returns
        -------
        list of Tensor
            Outputs of each step before the last norm; [batch, r, hidden]. The entry at position i
            predicts token i+2. The first j entries of step j have no valid input and must be
            ignored.

        Notes
        -----
        Attention is the same as during inference. Position i in step j attends to the entries with
        true features at positions up to i-j, whose keys are computed in step 0. It also attends to
        the draft's own entries at positions i-j+1..i. Entry i-j+t was computed in step t.
        """
        n = features.shape[1]
        mid = self.midlayer
        attention = mid.self_attn
        scale = self.s.head_dim**-0.5
        positions = torch.arange(n)
        cos, sin = rotary(self.s, positions)
        emb = mid.input_layernorm(embedded)
        g = self.fc(features)
        k0, v0 = attention.kv(torch.cat((emb, mid.hidden_norm(g)), -1), (cos, sin))
        index = rows[..., None].expand(-1, -1, self.s.hidden)
        emb = emb.gather(1, index)
        g = g.gather(1, index)
        rope = cos[rows][:, None], sin[rows][:, None]
        drafted: list[tuple[Tensor, Tensor]] = []  # keys and values of steps 1, 2, ...
        outs = []
        for j in range(steps):
            x = torch.cat((emb, mid.hidden_norm(g)), -1)
            q = attention.q(x, rope)
            if j > 0:
                drafted.append(attention.kv(x, rope))
            masked = (positions > rows[..., None] - j)[:, None]
            scores = [(q @ k0.transpose(-1, -2) * scale).masked_fill(masked, -torch.inf)]
            for t, (k, _) in enumerate(drafted, 1):
                scores.append((q * k.roll(j - t, 2)).sum(-1, keepdim=True) * scale)
            p = torch.cat(scores, -1).softmax(-1)
            attention_output = p[..., :n] @ v0
            for t, (_, v) in enumerate(drafted, 1):
                weight = p[..., n + t - 1 : n + t]
                attention_output = attention_output + weight * v.roll(j - t, 2)
            h = g + attention.out(attention_output)
            out = h + mid.mlp(mid.post_attention_layernorm(h))
            outs.append(out)
            g = F.pad(out[:, :-1], (0, 0, 1, 0))
        return outs


class Block(nn.Module):
    """DFlash drafter. A block is the last token followed by mask tokens in place of the drafts.

    Parameters
    ----------
    s
        Sizes of the drafter.
    aux_layers
        Number of target layers whose outputs the drafter reads.
    """

    def __init__(self, s: Sizes, aux_layers: int) -> None:
        super().__init__()
        self.s = s
        self.fc = nn.Linear(aux_layers * s.hidden, s.hidden, bias=False)
        self.hidden_norm = RMSNorm(s.hidden, s.eps)
        self.norm = RMSNorm(s.hidden, s.eps)
        self.layers = nn.ModuleList(Layer(s, head_norm=True) for _ in range(s.layers))
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, features: Tensor, embedded: Tensor, start: Tensor) -> Tensor:
        """Return the inputs of the target's LM head for many blocks of each sequence.

        Parameters
        ----------
        features
            Target features at positions 0..n-1; [batch, n, aux_layers * hidden].
        embedded
            Embeddings of the rows of the blocks; [batch, blocks, width, hidden].
        start
            Position of the first row of each block; [batch, blocks]. The block attends to the
            features at earlier positions.

        Returns
        -------
        Tensor
            [batch, blocks, width, hidden]; row j predicts the token at position start + j.
        """
        batch, blocks, width, _ = embedded.shape
        n = features.shape[1]
        positions = (start[..., None] + torch.arange(width)).flatten(1)
        block_of = torch.arange(blocks).repeat_interleave(width)
        sees_feature = torch.arange(n) < start.repeat_interleave(width, 1)[..., None]
        sees_row = (block_of == block_of[:, None]).expand(batch, -1, -1)
        mask = torch.cat((sees_feature, sees_row), -1)[:, None]
        cos, sin = rotary(self.s, torch.arange(n + width))
        block_rope = (cos[positions][:, None], sin[positions][:, None])
        context_rope = (cos[:n], sin[:n])
        context = self.hidden_norm(self.fc(features))
        x = embedded.flatten(1, 2)
        for layer in self.layers:
            y = layer.input_layernorm(x)
            attention = layer.self_attn
            context_k, context_v = attention.kv(context, context_rope)
            block_k, block_v = attention.kv(y, block_rope)
            k = torch.cat((context_k, block_k), 2)
            v = torch.cat((context_v, block_v), 2)
            q = attention.q(y, block_rope)
            x = x + attention.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).view_as(embedded)
