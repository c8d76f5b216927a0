"""Rotary position embedding (RoPE): frequencies, scaling, and the cosine and sine table."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from graft.models.errors import ConfigError
from graft.models.json_fields import Fields

KINDS = ("default", "linear", "llama3")


@dataclass(frozen=True)
class Rope:
    """RoPE parameters of a model.

    Dimension i of a head is rotated together with dimension i + head_dim / 2 (half-split layout).

    Attributes
    ----------
    theta
        Base of the frequencies, ``theta ** (-2 i / head_dim)``.
    kind
        Kind of scaling. ``default`` does not scale, ``linear`` divides every frequency by
        `factor`, and ``llama3`` scales the frequencies by wavelength.
    factor
        Scaling factor of ``linear`` and ``llama3``.
    low, high, original
        Limits of ``llama3`` scaling. Wavelengths below ``original / high`` are kept. Wavelengths
        above ``original / low`` are multiplied by `factor`. Wavelengths between the two limits are
        interpolated.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192

    @staticmethod
    def from_fields(fields: Fields) -> Rope:
        """Read the RoPE fields of a config.

        The fields are ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` in older configs.
        If a config has both forms, their values must agree, because some libraries read the first
        form and others read the second.

        Raises
        ------
        ConfigError
            If the fields are invalid, disagree or are not implemented.
        """
        parameters = fields.section("rope_parameters")
        scaling = fields.section("rope_scaling")
        if parameters is not None and scaling is not None and parameters.data != scaling.data:
            raise ConfigError(
                f"{fields.where}: rope_parameters {parameters.data!r} and rope_scaling "
                f"{scaling.data!r} differ; remove one of them"
            )
        scaling = parameters or scaling
        theta = fields.number("rope_theta", default=10000.0, low=1.0)
        if scaling is None:
            return Rope(theta=theta)
        theta = scaling.number("rope_theta", default=theta, low=1.0)
        kind: Any = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in KINDS:
            raise ConfigError(
                f"{scaling.where}: rope_type {kind!r} is not implemented, expected one of {KINDS}"
            )
        if scaling.number("partial_rotary_factor", default=1.0) != 1.0:
            raise ConfigError(
                f"{scaling.where}: partial_rotary_factor "
                f"{scaling.get('partial_rotary_factor')!r} is not implemented (1.0 only)"
            )
        if kind == "default":
            return Rope(theta=theta)
        factor = scaling.number("factor", low=1.0)
        if kind == "linear":
            return Rope(theta=theta, kind=kind, factor=factor)
        low = scaling.number("low_freq_factor", low=1e-6)
        high = scaling.number("high_freq_factor", low=1e-6)
        if high <= low:
            raise ConfigError(
                f"{scaling.where}: high_freq_factor {high} must exceed low_freq_factor {low}"
            )
        original = scaling.integer("original_max_position_embeddings", low=1, high=1 << 24)
        return Rope(theta, kind, factor, low, high, original)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the inverse frequencies, float32[head_dim // 2]."""
        exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        inverse = self.theta**-exponent
        if self.kind == "linear":
            inverse = inverse / self.factor
        elif self.kind == "llama3":
            wavelength = 2.0 * math.pi / inverse
            # `keep` is 1 for short wavelengths, which do not change, and 0 for long wavelengths,
            # which are multiplied by the factor.
            span = self.high - self.low
            keep = (self.original / wavelength - self.low) / span
            keep = np.clip(keep, 0.0, 1.0)
            stretched = (1.0 - keep) * inverse / self.factor
            inverse = stretched + keep * inverse
        return inverse.astype(np.float32)

    def table(self, positions: int, head_dim: int) -> np.ndarray:
        """Return the table that the kernels read, float32[positions, head_dim].

        A row has the cosines of a position, then its sines. The angle is the float32 product of
        position and frequency, as in training. Cosine and sine are computed in float64 on the
        host, so all devices read the same bits.
        """
        position = np.arange(positions, dtype=np.float32)
        frequencies = self.frequencies(head_dim)
        angle = np.multiply.outer(position, frequencies).astype(np.float64)
        table = np.concatenate([np.cos(angle), np.sin(angle)], axis=1)
        return table.astype(np.float32)
