"""DFlash (arXiv 2602.06036), a block drafter whose logits do not depend on the drafts."""

from __future__ import annotations

from graft.models.drafters.block import BlockDrafter

__all__ = ["DFlash"]


class DFlash(BlockDrafter):
    """Drafter that drafts from logits of a single forward pass.

    The folder has config.json and tensors with the published names: ``fc``, ``hidden_norm``,
    ``layers.{i}.*`` and ``norm``, as well as ``embed_tokens`` and ``lm_head`` if these differ from
    the target's. A DSpark checkpoint without a Markov head is a DFlash drafter, too. A confidence
    head is ignored.
    """

    kind = "DFlash"
    logits_at_once = True
