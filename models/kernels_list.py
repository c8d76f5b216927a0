"""Kernel files of this room with the definitions they are compiled with on hardware."""

from __future__ import annotations

from typing import Any

_WEIGHTS = ("float", "fp16_t", "bf16_t")

KERNEL_VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[
        (f"{name}.cu", {"WEIGHT": weight})
        for name in ("linear_warp", "eagle_input_warp", "embed")
        for weight in _WEIGHTS
    ],
    *[(f"{name}.cu", {"WEIGHT": "bf16_t"}) for name in ("linear_thread", "eagle_input_thread")],
    *[
        (f"{name}.cu", {"CACHE": cache, "HEAD_DIM": dim})
        for name in ("rope", "attention_warp")
        for cache in _WEIGHTS
        for dim in (64, 128)
    ],
    ("attention_warp.cu", {"CACHE": "bf16_t", "HEAD_DIM": 80}),
    ("attention_thread.cu", {"CACHE": "bf16_t", "HEAD_DIM": 32}),
    ("norm_thread.cu", {}),
    ("norm_warp.cu", {}),
    ("silu.cu", {}),
    ("gather.cu", {}),
    ("round.cu", {}),
]
