"""What drafts, one file each, behind one protocol."""

from graft.models.drafters.base import Drafter, DrafterChoice, DrafterRoom, DraftVocab, TreeShape
from graft.models.drafters.eagle3 import Eagle3
from graft.models.drafters.forced import Forced

__all__ = ["DraftVocab", "Drafter", "DrafterChoice", "DrafterRoom", "Eagle3", "Forced", "TreeShape"]
