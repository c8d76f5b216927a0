"""Drafters for speculative decoding. All of them are subclasses of `Drafter`.

===================  ==========================================================================
`Eagle3`             EAGLE-3 draft head
`Mtp`                multi-token prediction (MTP) modules
`DFlash`             block drafter, which drafts all levels from one forward pass
`DFlash2`            DFlash with convolutions and a candidate selector
`DSpark`             DFlash with a Markov head
`SmallModel`         small draft model with the target's tokenizer
`NGram`              n-gram prompt lookup
`Suffix`             suffix decoding
`UserDrafter`        proposals of a Python function
`Forced`             tokens at positions where the grammar allows only one text
`CascadeDrafter`     a lookup drafter whose proposals a draft model continues
===================  ==========================================================================
"""

from graft.models.drafters.base import Drafter, DrafterChoice, DrafterContext, TreeShape
from graft.models.drafters.cascade import CascadeDrafter
from graft.models.drafters.dflash import DFlash
from graft.models.drafters.dflash2 import DFlash2
from graft.models.drafters.dspark import DSpark
from graft.models.drafters.eagle3 import Eagle3
from graft.models.drafters.feed import Feed
from graft.models.drafters.forced import Forced
from graft.models.drafters.lm import SmallModel
from graft.models.drafters.mtp import Mtp
from graft.models.drafters.ngram import NGram
from graft.models.drafters.suffix import Suffix
from graft.models.drafters.user import UserDrafter
from graft.sampling.rows import DraftVocab

__all__ = [
    "CascadeDrafter",
    "DFlash",
    "DFlash2",
    "DSpark",
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
