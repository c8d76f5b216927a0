"""Rotary position embedding (RoPE): frequencies, scaling, and the cosine and sine table.

All rows of a model read one table, so the rotation of a row depends only on its position. Two kinds
of scaling, ``dynamic`` and ``longrope``, are defined in transformers by the length of the current
sequence. Here they depend on the maximum length of all sequences instead (`Rope.for_length`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from graft.models.errors import ConfigError
from graft.models.json_fields import Fields

MAX_POSITIONS = 1 << 24
#: Names of the config section with the RoPE parameters, in transformers 5 and in older versions.
_SECTIONS = ("rope_parameters", "rope_scaling")
#: Fields that may be present for every kind of scaling. Some are read; the others have no effect.
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned")


class _Model(NamedTuple):
    """Properties of a model from which the parameters of its RoPE scaling are computed.

    `original` is the maximum number of positions without scaling.
    """

    head_dim: int
    theta: float
    max_positions: int
    original: int


def _unscaled(theta: float, head_dim: int) -> np.ndarray:
    """Return the inverse frequencies without scaling, float64[head_dim // 2]."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return theta**-exponent


@dataclass(frozen=True)
class Scaling(ABC):
    """Scaling of RoPE for sequences longer than those that the model was first trained on.

    `kind` is the `rope_type` in configs, and `fields` lists the names of the config fields. The
    cosines and sines of the RoPE table are multiplied by `attention_factor`.
    """

    kind: ClassVar[str]
    fields: ClassVar[tuple[str, ...]]
    attention_factor = 1.0

    @property
    def variant(self) -> str:
        """Name of the scaling. Each scaling that `for_length` may return has a different name."""
        return self.kind

    @classmethod
    @abstractmethod
    def from_fields(cls, section: Fields, model: _Model) -> Self:
        """Read the scaling from a config section, whose field names the caller has checked."""

    @abstractmethod
    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        """Return the inverse frequencies, float64[head_dim // 2]."""

    def for_length(self, length: int) -> Scaling | None:
        """Return the scaling for sequences of at most `length` tokens; None for no scaling."""
        return self

    def max_length(self, max_positions: int) -> int:
        """Return the maximum sequence length of a model with these `max_position_embeddings`."""
        return max_positions


@dataclass(frozen=True)
class Linear(Scaling):
    """Divides all frequencies by `factor`."""

    factor: float

    kind = "linear"
    fields = ("factor",)

    @classmethod
    def from_fields(cls, section: Fields, model: _Model) -> Self:
        return cls(section.number("factor", low=1.0))

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        return _unscaled(theta, head_dim) / self.factor


@dataclass(frozen=True)
class Llama3(Scaling):
    """Divides the frequencies of long wavelengths by `factor`.

    Wavelengths below ``original / high`` are kept. Wavelengths above ``original / low`` are
    multiplied by `factor`. Wavelengths between the two limits are interpolated.
    """

    factor: float
    low: float
    high: float
    original: int

    kind = "llama3"
    fields = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")

    @classmethod
    def from_fields(cls, section: Fields, model: _Model) -> Self:
        factor = section.number("factor", low=1.0)
        low = section.number("low_freq_factor", low=1e-6)
        high = section.number("high_freq_factor", low=1e-6)
        if high <= low:
            raise ConfigError(
                f"{section.where}: high_freq_factor {high} must exceed low_freq_factor {low}"
            )
        return cls(factor, low, high, model.original)

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        inverse = _unscaled(theta, head_dim)
        wavelength = 2.0 * math.pi / inverse
        # `keep` is 1 for short wavelengths, which are kept, and 0 for long wavelengths, which are
        # multiplied by the factor.
        span = self.high - self.low
        keep = (self.original / wavelength - self.low) / span
        keep = np.clip(keep, 0.0, 1.0)
        stretched = (1.0 - keep) * inverse / self.factor
        return stretched + keep * inverse


@dataclass(frozen=True)
class Yarn(Scaling):
    """YaRN (Peng et al., 2023): divides low frequencies by `factor`, and keeps high frequencies.

    A frequency is kept if it makes more than `beta_fast` rotations in `original` positions, and
    divided if it makes fewer than `beta_slow` rotations. Between these limits, frequencies are
    interpolated by their index. If `truncate` is true, the limits of the interpolation are rounded
    to whole indices.
    """

    factor: float
    original: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    kind = "yarn"
    fields = (
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    )

    @classmethod
    def from_fields(cls, section: Fields, model: _Model) -> Self:
        factor = model.max_positions / model.original
        if section.get("factor") is not None or factor <= 1.0:
            factor = section.number("factor", low=1.0)
        beta_fast = section.number("beta_fast", low=1e-6, default=32.0)
        beta_slow = section.number("beta_slow", low=1e-6, default=1.0)
        if beta_fast <= beta_slow:
            raise ConfigError(
                f"{section.where}: beta_fast {beta_fast} must exceed beta_slow {beta_slow}"
            )
        if model.theta <= 1.0:
            raise ConfigError(f"{section.where}: YaRN requires a rope_theta above 1")
        mscale = section.number("mscale", default=0.0)
        mscale_all_dim = section.number("mscale_all_dim", default=0.0)
        if mscale and mscale_all_dim:
            attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
        else:
            attention_factor = _yarn_mscale(factor, 1.0)
        return cls(
            factor,
            model.original,
            beta_fast,
            beta_slow,
            section.boolean("truncate", default=True),
            section.number("attention_factor", low=1e-6, default=attention_factor),
        )

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        def index(rotations: float) -> float:
            """Return the index (not rounded) of the frequency with this many full rotations.

            The rotations are counted over the maximum number of positions before the extension
            (`self.original`).
            """
            wavelength = self.original / rotations
            return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

        begin = index(self.beta_fast)
        end = index(self.beta_slow)
        if self.truncate:
            begin = math.floor(begin)
            end = math.ceil(end)
        begin = max(begin, 0)
        end = min(end, head_dim - 1)
        if begin == end:
            end += 0.001
        divided = np.clip((np.arange(head_dim // 2) - begin) / (end - begin), 0.0, 1.0)
        inverse = _unscaled(theta, head_dim)
        return inverse * (1.0 - divided) + inverse / self.factor * divided

    def max_length(self, max_positions: int) -> int:
        return max(max_positions, min(int(self.original * self.factor), MAX_POSITIONS))


def _yarn_mscale(factor: float, weight: float) -> float:
    """Return the attention factor of YaRN for the scaling factor `factor`.

    `weight` is `mscale` or `mscale_all_dim` of the configuration; 1 by default.
    """
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


@dataclass(frozen=True)
class Dynamic(Scaling):
    """Dynamic NTK: a larger base for sequences longer than `original`.

    In transformers, the base grows with the sequence, and keys that are already cached keep the
    rotation of an earlier base. In graft, as in vLLM, all sequences use the base of the maximum
    length ``factor * original``. If no sequence is longer than `original`, nothing is scaled.
    """

    factor: float
    original: int

    kind = "dynamic"
    fields = ("factor", "original_max_position_embeddings")

    @classmethod
    def from_fields(cls, section: Fields, model: _Model) -> Self:
        if model.original != model.max_positions:
            raise ConfigError(
                f"{section.where}: original_max_position_embeddings {model.original} is not "
                f"implemented for dynamic scaling: it must be max_position_embeddings, "
                f"{model.max_positions}"
            )
        if model.head_dim <= 2:
            raise ConfigError(f"{section.where}: dynamic scaling requires a head_dim above 2")
        return cls(section.number("factor", low=1.0), model.max_positions)

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        growth = self.factor * self.factor - (self.factor - 1.0)
        base = theta * growth ** (head_dim / (head_dim - 2))
        return _unscaled(base, head_dim)

    def for_length(self, length: int) -> Scaling | None:
        return self if length > self.original else None

    def max_length(self, max_positions: int) -> int:
        return min(int(max_positions * self.factor), MAX_POSITIONS)


@dataclass(frozen=True)
class LongRope(Scaling):
    """LongRoPE (Ding et al., 2024): divides each frequency by its own factor.

    There is one list of factors for sequences of up to `original` tokens and another one for longer
    sequences. transformers chooses the list by the length of the current sequence. As in vLLM,
    `for_length` chooses it by the maximum length of all sequences.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original: int
    attention_factor: float = 1.0
    is_long: bool = True

    kind = "longrope"
    fields = (
        "short_factor",
        "long_factor",
        "factor",
        "attention_factor",
        "original_max_position_embeddings",
    )

    @classmethod
    def from_fields(cls, section: Fields, model: _Model) -> Self:
        ratio = model.max_positions / model.original
        factor = section.number("factor", default=ratio)
        attention_factor = 1.0
        if factor > 1.0 and model.original > 1:
            attention_factor = math.sqrt(1.0 + math.log(factor) / math.log(model.original))
        return cls(
            _factors(section, "short_factor", model.head_dim // 2),
            _factors(section, "long_factor", model.head_dim // 2),
            model.original,
            section.number("attention_factor", low=1e-6, default=attention_factor),
        )

    @property
    def variant(self) -> str:
        return f"longrope with {'long' if self.is_long else 'short'}_factor"

    def frequencies(self, theta: float, head_dim: int) -> np.ndarray:
        factors = self.long if self.is_long else self.short
        return _unscaled(theta, head_dim) / np.array(factors)

    def for_length(self, length: int) -> Scaling | None:
        return replace(self, is_long=length > self.original)


def _factors(section: Fields, name: str, count: int) -> tuple[float, ...]:
    """Return the config field `name`, the divisors of `count` frequencies."""
    factors = section.numbers(name, low=1e-6)
    if len(factors) != count:
        raise ConfigError(
            f"{section.where}: {name} has {len(factors)} factors, expected head_dim / 2 = {count}"
        )
    return factors


#: Kinds of scaling by `rope_type`.
SCALINGS: dict[str, type[Scaling]] = {
    scaling.kind: scaling for scaling in (Linear, Dynamic, Yarn, LongRope, Llama3)
}
KINDS = ("default", *SCALINGS)


@dataclass(frozen=True)
class Rope:
    """RoPE parameters of a model.

    Dimension i of a head is rotated together with dimension i + head_dim / 2 (half-split layout).
    The frequencies are ``theta ** (-2 i / head_dim)``.
    """

    theta: float = 10000.0
    scaling: Scaling | None = None

    @staticmethod
    def from_fields(
        fields: Fields, *, head_dim: int, max_positions: int, default_theta: float = 10000.0
    ) -> Rope:
        """Read the RoPE fields of a config.

        The fields are ``rope_parameters``, or ``rope_theta`` and ``rope_scaling`` in older configs.
        If a config has both forms, they must agree, because some libraries read the first form and
        others read the second. Fields that are invalid, disagree or are not implemented raise
        ConfigError.
        """
        sections = []
        for name in _SECTIONS:
            section = fields.section(name)
            if section is not None and section.data:
                sections.append(section)
        theta = _agreed(fields, sections, "rope_theta")
        theta = default_theta if theta is None else theta
        parameters = [_parameters(section) for section in sections]
        if len(parameters) > 1 and parameters[0] != parameters[1]:
            raise ConfigError(
                f"{fields.where}: rope_parameters {sections[0].data!r} and rope_scaling "
                f"{sections[1].data!r} differ; remove one of them"
            )
        if not parameters or parameters[0]["rope_type"] == "default":
            return Rope(theta)
        section = sections[0]
        scaling = SCALINGS[parameters[0]["rope_type"]]
        name = "original_max_position_embeddings"
        original = _agreed(fields, sections[:1], name) if name in scaling.fields else None
        if original is None:
            original = max_positions
        model = _Model(head_dim, theta, max_positions, int(original))
        return Rope(theta, scaling.from_fields(section, model))

    @property
    def kind(self) -> str:
        """`rope_type` of the scaling; "default" without scaling."""
        return "default" if self.scaling is None else self.scaling.kind

    @property
    def variant(self) -> str:
        """Name of the scaling that `for_length` has chosen; "default" without scaling."""
        return "default" if self.scaling is None else self.scaling.variant

    def for_length(self, length: int) -> Rope:
        """Return the parameters for sequences with at most `length` tokens."""
        if self.scaling is None:
            return self
        return replace(self, scaling=self.scaling.for_length(length))

    def max_length(self, max_positions: int) -> int:
        """Return the maximum sequence length of a model with these `max_position_embeddings`."""
        return max_positions if self.scaling is None else self.scaling.max_length(max_positions)

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Return the inverse frequencies, float32[head_dim // 2]."""
        if self.scaling is None:
            inverse = _unscaled(self.theta, head_dim)
        else:
            inverse = self.scaling.frequencies(self.theta, head_dim)
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
        if self.scaling is not None:
            table *= self.scaling.attention_factor
        return table.astype(np.float32)


def identity_table(positions: int, head_dim: int) -> np.ndarray:
    """Return the table of layers without RoPE, in which all angles are zero."""
    table = np.zeros((positions, head_dim), np.float32)
    table[:, : head_dim // 2] = 1.0
    return table


def _agreed(fields: Fields, sections: list[Fields], name: str) -> float | None:
    """Return a numeric field that a config and its `sections` may contain; None if all lack it.

    If the values of the field `name` differ, raise ConfigError, which lists them.
    """
    values = {}
    for source in (fields, *sections):
        if source.get(name) is None:
            continue
        if name == "rope_theta":
            values[source.where] = source.number(name, low=1.0)
        else:
            values[source.where] = source.integer(name, low=2, high=MAX_POSITIONS)
    if len(set(values.values())) > 1:
        raise ConfigError(
            f"{fields.where}: {name} has different values: "
            + ", ".join(f"{value!r} in {where}" for where, value in values.items())
        )
    return next(iter(values.values()), None)


def _parameters(section: Fields) -> dict[str, Any]:
    """Check the field names of a config section with RoPE parameters.

    Return `rope_type` and the fields that only some kinds of scaling have.
    """
    types = [section.data[name] for name in ("rope_type", "type") if section.get(name) is not None]
    if len(types) == 2 and types[0] != types[1]:
        raise ConfigError(f"{section.where}: rope_type {types[0]!r} and type {types[1]!r} differ")
    others = {
        name: value
        for name, value in section.data.items()
        if name not in _COMMON and value is not None
    }
    if not types and others:
        raise ConfigError(
            f"{section.where}: rope_type is missing, but {', '.join(others)} is given; expected "
            f"one of {KINDS}"
        )
    kind = types[0] if types else "default"
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(
            f"{section.where}: rope_type {kind!r} is not implemented, expected one of {KINDS}"
        )
    if section.number("partial_rotary_factor", default=1.0) != 1.0:
        raise ConfigError(
            f"{section.where}: partial_rotary_factor "
            f"{section.get('partial_rotary_factor')!r} is not implemented (1.0 only)"
        )
    known = SCALINGS[kind].fields if kind in SCALINGS else ()
    section.require_known(dict.fromkeys((*_COMMON, *known)))
    return {"rope_type": kind, **others}
