"""Token masks, sampling, and verification of drafts on the device."""

from graft.sampling.mask import MaskApply
from graft.sampling.params import VERIFY_MODES, Relaxed, SamplingParams
from graft.sampling.sampler import DraftVocab, RowMap, Sampler, output_ring
from graft.sampling.state import SlotRequest, SlotState

__all__ = [
    "DraftVocab",
    "MaskApply",
    "Relaxed",
    "RowMap",
    "Sampler",
    "SamplingParams",
    "SlotRequest",
    "SlotState",
    "VERIFY_MODES",
    "output_ring",
]
