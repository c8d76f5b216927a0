"""The demo model and its drafters in plain torch, for training only.

`Llama` computes what a Hugging Face ``LlamaForCausalLM`` computes (RMSNorm before
each block, half-split rotary embedding, grouped-query attention, SwiGLU, tied
output head); parameter names are those of the checkpoint. `Eagle3` is one such
layer over [embedding, feature] with its own head over a pruned vocabulary. `Block`
is DFlash: layers with normalised queries and keys, and the target's own head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Sizes:
    """Sizes of the target; the drafter shares all but `layers`."""

    hidden: int = 192
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    inner: int = 512
    vocab: int = 2048
    theta: float = 10000.0
    eps: float = 1e-5
    positions: int = 1024

    def config(self) -> dict[str, Any]:
        """What a Hugging Face config says of the target and of the drafter alike."""
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
    """cos and sin, shape (positions, head_dim), of the half-split rotary embedding."""
    inv = s.theta ** (-torch.arange(0, s.head_dim, 2, dtype=torch.float32) / s.head_dim)
    angle = positions.float()[:, None] * inv[None]
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    half = x.shape[-1] // 2
    return x * rope[0] + torch.cat((-x[..., half:], x[..., :half]), -1) * rope[1]


class Attention(nn.Module):
    """Projections and rotary embedding; `width` is the input's size."""

    def __init__(self, s: Sizes, width: int, head_norm: bool = False) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(width, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)
        norms = (RMSNorm(s.head_dim, s.eps) if head_norm else nn.Identity() for _ in range(2))
        self.q_norm, self.k_norm = norms

    def q(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """(batch, heads, length, head_dim)."""
        b, n, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, n, self.s.heads, -1))
        return rotate(q.transpose(1, 2), rope)

    def kv(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """(batch, heads, length, head_dim) each, repeated from the key-value heads."""
        b, n, _ = x.shape
        group = self.s.heads // self.s.kv_heads
        k = self.k_norm(self.k_proj(x).view(b, n, self.s.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(b, n, self.s.kv_heads, -1).transpose(1, 2)
        return rotate(k, rope).repeat_interleave(group, 1), v.repeat_interleave(group, 1)

    def out(self, mixed: Tensor) -> Tensor:
        b, _, n, _ = mixed.shape
        return self.o_proj(mixed.transpose(1, 2).reshape(b, n, -1))


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
        q, (k, v) = self.self_attn.q(y, rope), self.self_attn.kv(y, rope)
        x = x + self.self_attn.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = RMSNorm(s.hidden, s.eps)


class Llama(nn.Module):
    """The target. Sequences start at position 0 and are padded on the right."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.s = s
        self.model = Backbone(s)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(p, std=0.02 if not deep else 0.02 / (2 * s.layers) ** 0.5)

    def forward(self, ids: Tensor) -> list[Tensor]:
        """Residual streams after each layer, (batch, length, hidden), before any final norm."""
        x = self.model.embed_tokens(ids)
        rope = rotary(self.s, torch.arange(ids.shape[1]))
        streams = []
        for layer in self.model.layers:
            x = layer(x, rope)
            streams.append(x)
        return streams

    def logits(self, stream: Tensor) -> Tensor:
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
    """EAGLE-3 head; entry i = (feature of token i, embedding of token i+1) at position i."""

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
        known = torch.zeros(s.vocab, dtype=torch.bool)
        known[kept] = True
        self.register_buffer("d2t", kept.sort().values - torch.arange(len(kept)))
        self.register_buffer("t2d", known)

    def kept(self) -> Tensor:
        """Target ids of the draft vocabulary, ascending."""
        return self.d2t + torch.arange(len(self.d2t))

    def unroll(self, features: Tensor, embedded: Tensor, steps: int, rows: Tensor) -> list[Tensor]:
        """Drafter outputs of `steps` draft steps at many positions at once.

        Parameters
        ----------
        features : Tensor
            (batch, n, 3 hidden), low|mid|high of tokens 0..n-1.
        embedded : Tensor
            (batch, n, hidden), embeddings of tokens 1..n.
        steps : int
            Step 0 uses true features; step j feeds each entry the output of step
            j-1 one position earlier, with the true token embedding.
        rows : Tensor
            (batch, r), consecutive positions wanted of each sequence; all other
            positions only serve as context.

        Returns
        -------
        list of Tensor
            Per step (batch, r, hidden), before the last norm. The entry at position i
            predicts token i+2; the first j entries of step j mean nothing.

        Notes
        -----
        Attention of position i in step j is that of inference: true-feature entries up
        to i-j (keys of step 0), then the entries i-j+1..i that the draft itself made,
        where i-j+t was made in step t. (Training-time test, EAGLE-3.)
        """
        n = features.shape[1]
        mid = self.midlayer
        scale = self.s.head_dim**-0.5
        at = torch.arange(n)
        attend = mid.self_attn
        cos, sin = rotary(self.s, at)
        emb = mid.input_layernorm(embedded)
        g = self.fc(features)
        k0, v0 = attend.kv(torch.cat((emb, mid.hidden_norm(g)), -1), (cos, sin))
        pick = rows[..., None].expand(-1, -1, self.s.hidden)
        emb = emb.gather(1, pick)
        g = g.gather(1, pick)
        rope = cos[rows][:, None], sin[rows][:, None]
        drafted: list[tuple[Tensor, Tensor]] = []
        outs = []
        for j in range(steps):
            x = torch.cat((emb, mid.hidden_norm(g)), -1)
            q = attend.q(x, rope)
            if j > 0:
                drafted.append(attend.kv(x, rope))
            unseen = (at > rows[..., None] - j)[:, None]
            scores = [(q @ k0.transpose(-1, -2) * scale).masked_fill(unseen, -torch.inf)]
            for t, (k, _) in enumerate(drafted, 1):
                scores.append((q * k.roll(j - t, 2)).sum(-1, keepdim=True) * scale)
            p = torch.cat(scores, -1).softmax(-1)
            mixed = p[..., :n] @ v0
            for t, (_, v) in enumerate(drafted, 1):
                mixed = mixed + p[..., n + t - 1 : n + t] * v.roll(j - t, 2)
            h = g + attend.out(mixed)
            out = h + mid.mlp(mid.post_attention_layernorm(h))
            outs.append(out)
            g = F.pad(out[:, :-1], (0, 0, 1, 0))
        return outs


class Block(nn.Module):
    """DFlash; a block is the last token and masks behind it, in place of tokens to draft."""

    def __init__(self, s: Sizes, taps: int) -> None:
        super().__init__()
        self.s = s
        self.fc = nn.Linear(taps * s.hidden, s.hidden, bias=False)
        self.hidden_norm = RMSNorm(s.hidden, s.eps)
        self.norm = RMSNorm(s.hidden, s.eps)
        self.layers = nn.ModuleList(Layer(s, head_norm=True) for _ in range(s.layers))
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, features: Tensor, embedded: Tensor, start: Tensor) -> Tensor:
        """What the target's head reads, of many blocks of a sequence at once.

        Parameters
        ----------
        features : Tensor
            (batch, n, taps * hidden), of the target at positions 0..n-1.
        embedded : Tensor
            (batch, blocks, width, hidden), rows of the blocks.
        start : Tensor
            (batch, blocks), position of each one's first row; it sees features before it.

        Returns
        -------
        Tensor
            (batch, blocks, width, hidden); row j predicts the token at position start + j.
        """
        batch, blocks, width, _ = embedded.shape
        n = features.shape[1]
        at = (start[..., None] + torch.arange(width)).flatten(1)
        own = torch.arange(blocks).repeat_interleave(width)
        before = torch.arange(n) < start.repeat_interleave(width, 1)[..., None]
        seen = torch.cat((before, (own == own[:, None]).expand(batch, -1, -1)), -1)[:, None]
        cos, sin = rotary(self.s, torch.arange(n + width))
        rope = (cos[at][:, None], sin[at][:, None])
        behind = (cos[:n], sin[:n])
        context = self.hidden_norm(self.fc(features))
        x = embedded.flatten(1, 2)
        for layer in self.layers:
            y = layer.input_layernorm(x)
            attend = layer.self_attn
            pairs = zip(attend.kv(context, behind), attend.kv(y, rope), strict=True)
            k, v = (torch.cat(pair, 2) for pair in pairs)
            q = attend.q(y, rope)
            x = x + attend.out(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x).view_as(embedded)
