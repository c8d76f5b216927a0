"""Mask apply, sampling and chain verification on the device."""

from graft.sampling.adjust import Adjust
from graft.sampling.mask import MaskApply
from graft.sampling.sampler import RowMap, Sampler, output_ring
from graft.sampling.state import (
    COUPLED,
    PER_TOKEN,
    REJECTION,
    RELAXED,
    Relaxed,
    SlotState,
)

__all__ = [
    "COUPLED",
    "Adjust",
    "MaskApply",
    "PER_TOKEN",
    "REJECTION",
    "RELAXED",
    "Relaxed",
    "RowMap",
    "Sampler",
    "SlotState",
    "output_ring",
]
