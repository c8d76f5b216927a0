"""One object for all sampling kernels of a round. It adds them to lanes of a graph or stream."""

from __future__ import annotations

from graft.sampling.arrays import SamplingArrays
from graft.sampling.chain import ChainSampler
from graft.sampling.mask_rows import MaskRows
from graft.sampling.proposals import Proposals
from graft.sampling.target import TargetSampler
from graft.sampling.verify import Verifier

__all__ = ["Sampler"]


class Sampler:
    """Adds the sampling kernels of a round to lanes.

    A round calls ``target.sample`` and ``verifier.verify``. It then calls either ``chain.draft``
    for j = 1 .. K, or `TreeSampler.draft` for each level, or ``proposals.add_drafts``. Before
    kernels of a lane read mask rows, the lane must wait for the kernel that
    ``mask_rows.copy_to_device`` adds.

    All methods check sizes before a launch and raise OptionError or ShapeError with the name of the
    argument.
    """

    def __init__(self, arrays: SamplingArrays) -> None:
        self.arrays = arrays
        self.mask_rows = MaskRows(arrays)
        self.target = TargetSampler(arrays)
        self.verifier = Verifier(arrays)
        self.chain = ChainSampler(arrays)
        self.proposals = Proposals(arrays)
