"""Token masks, sampling, and verification of drafts on the device."""

from graft.sampling.mask import MaskApply
from graft.sampling.params import VERIFY_MODES, Relaxed, SamplingParams
from graft.sampling.sampler import RowMap, Sampler, output_ring
from graft.sampling.state import SlotState

__all__ = [
    "MaskApply",
    "Relaxed",
    "RowMap",
    "Sampler",
    "SamplingParams",
    "SlotState",
    "VERIFY_MODES",
    "output_ring",
]
