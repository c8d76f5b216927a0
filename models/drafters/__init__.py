"""What drafts, one file each, behind one protocol."""

from graft.models.drafters.base import Drafter, DrafterChoice, DrafterContext, DraftVocab, TreeShape
from graft.models.drafters.cascade import CascadeDrafter
from graft.models.drafters.dflash import DFlash
from graft.models.drafters.eagle3 import Eagle3
from graft.models.drafters.feed import Feed
from graft.models.drafters.forced import Forced
from graft.models.drafters.lm import SmallModel
from graft.models.drafters.mtp import Mtp
from graft.models.drafters.ngram import NGram
from graft.models.drafters.suffix import Suffix
from graft.models.drafters.user import UserDrafter

__all__ = [
    "CascadeDrafter",
    "DFlash",
    "DraftVocab",
    "Drafter",
    "DrafterChoice",
    "DrafterContext",
    "Eagle3",
    "Feed",
    "Forced",
    "Mtp",
    "NGram",
    "SmallModel",
    "Suffix",
    "TreeShape",
    "UserDrafter",
]
