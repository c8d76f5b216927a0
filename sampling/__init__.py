"""Mask apply, sampling and chain verification on the device."""

from graft.sampling.adjust import Adjust
from graft.sampling.mask import MaskApply
from graft.sampling.sampler import Sampler, output_ring
from graft.sampling.state import COUPLED, PER_TOKEN, REJECTION, RELAXED, Relaxed, SlotState

__all__ = [
    "COUPLED", "Adjust", "MaskApply", "PER_TOKEN", "REJECTION", "RELAXED", "Relaxed", "Sampler",
    "SlotState", "output_ring",
]  # fmt: skip
