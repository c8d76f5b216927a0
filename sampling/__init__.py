"""Token masks, sampling, and verification of drafts on the device."""

from graft.sampling.arrays import SamplingArrays
from graft.sampling.draft_verifier import DraftVerifier, verify_drafts
from graft.sampling.mask import MaskApply
from graft.sampling.params import VERIFY_MODES, Relaxed, SamplingParams
from graft.sampling.results import output_ring
from graft.sampling.rows import DraftVocab, RowMap
from graft.sampling.sampler import Sampler
from graft.sampling.state import SlotRequest, SlotState

__all__ = [
    "DraftVerifier",
    "DraftVocab",
    "MaskApply",
    "Relaxed",
    "RowMap",
    "Sampler",
    "SamplingArrays",
    "SamplingParams",
    "SlotRequest",
    "SlotState",
    "VERIFY_MODES",
    "output_ring",
    "verify_drafts",
]
