"""From what a user names to a drafter."""

from __future__ import annotations

import importlib
from pathlib import Path

from graft.cudagraph.errors import GraftError, OptionError
from graft.models.drafters.base import Drafter, DrafterChoice, DrafterContext
from graft.models.drafters.dflash import DFlash
from graft.models.drafters.eagle3 import Eagle3
from graft.models.drafters.lm import SmallModel
from graft.models.drafters.mtp import Mtp
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import Eagle3Config

__all__ = ["make_drafter"]


def make_drafter(choice: DrafterChoice, room: DrafterContext) -> Drafter:
    """Load a checkpoint's drafter, or call what makes one.

    Raises
    ------
    OptionError
        No such module or name, or what it makes is no `Drafter`.
    CheckpointError, ConfigError, TokenizerError
        A folder holds no drafter for this target.
    """
    if callable(choice):
        made = choice(room)
    elif isinstance(choice, str) and ":" in choice and not Path(choice).exists():
        module, _, attribute = choice.partition(":")
        try:
            made = getattr(importlib.import_module(module), attribute)(room)
        except GraftError:
            raise
        except Exception as error:  # whatever the module or what it names raises
            raise OptionError(f"drafter {choice!r}: {error}") from error
    else:
        made = _from_folder(Path(choice), room)
    if not isinstance(made, Drafter):
        raise OptionError(f"drafter {choice}: made a {type(made).__name__}, which is no Drafter")
    return made


def _from_folder(folder: Path, room: DrafterContext) -> Drafter:
    """What a checkpoint's tensors say it is."""
    names = Checkpoint(folder).names if (folder / "config.json").is_file() else ()
    if any(name.endswith(".eh_proj.weight") for name in names):
        return Mtp(folder, room)
    if "hidden_norm.weight" in names:
        return DFlash(folder, room)
    if "model.norm.weight" in names:
        return SmallModel.from_dir(folder, room)
    return Eagle3.from_dir(folder, Eagle3Config.from_dir(folder), room)
