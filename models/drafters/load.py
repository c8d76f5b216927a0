"""Creation of a drafter from a checkpoint folder, an import name or a callable."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from graft.cudagraph.errors import GraftError, OptionError
from graft.models.drafters.base import Drafter, DrafterChoice, DrafterContext
from graft.models.drafters.block import BlockDrafter
from graft.models.drafters.dflash import DFlash
from graft.models.drafters.dflash2 import DFlash2
from graft.models.drafters.dspark import DSpark
from graft.models.drafters.eagle3 import Eagle3
from graft.models.drafters.lm import SmallModel
from graft.models.drafters.mtp import Mtp
from graft.models.llm.checkpoint import Checkpoint
from graft.models.llm.config import DFlashConfig, Eagle3Config

__all__ = ["is_block_drafter", "make_drafter", "runs_on_host"]

LOG = logging.getLogger("graft")
_BLOCK_DRAFTER_TENSOR = "hidden_norm.weight"
_BLOCK_DRAFTERS: dict[str, type[BlockDrafter]] = {
    drafter.kind: drafter for drafter in (DFlash, DFlash2, DSpark)
}
#: End of the error messages about a callable that is given as drafter, but raises an exception or
#: does not return a drafter.
_EXPECTED = (
    "a callable given as drafter must take a DrafterContext and return a Drafter. For a function "
    "that takes token ids and returns drafts, give UserDrafter.of(function)"
)


def make_drafter(choice: DrafterChoice, context: DrafterContext) -> Drafter:
    """Create a drafter.

    `choice` is a callable that takes the context and returns a drafter, the import name
    ``module:attribute`` of such a callable, or a checkpoint folder.

    Raises
    ------
    OptionError
        If the name does not exist, or the callable raises an exception that is not a `GraftError`
        or does not return a `Drafter`.
    CheckpointError, ConfigError, TokenizerError
        If the folder does not contain a drafter for this target.
    """
    is_name = isinstance(choice, str) and ":" in choice and not Path(choice).exists()
    drafter: object
    if callable(choice) or is_name:
        try:
            make = choice if callable(choice) else _import_attribute(str(choice))
            drafter = make(context)
        except GraftError:
            raise
        except Exception as error:  # user code: importing or calling it may raise anything
            problem = f"raised {type(error).__name__}: {error}"
            raise OptionError(f"drafter {_name(choice)} {problem}; {_EXPECTED}") from error
    else:
        drafter = _from_folder(Path(choice), context)
    if not isinstance(drafter, Drafter):
        raise OptionError(
            f"drafter {_name(choice)} returned {type(drafter).__name__}, not a Drafter; {_EXPECTED}"
        )
    if drafter.feeds_blocks and not is_block_drafter(choice):
        LOG.warning(
            "drafter %s: blocks are shortened near max_tokens; set feeds_blocks = True on the "
            "callable to avoid this",
            choice,
        )
    return drafter


def _name(choice: object) -> str:
    """Return the name of a drafter choice for error messages."""
    return getattr(choice, "__qualname__", None) or str(choice)


def _import_attribute(name: str) -> Any:
    """Import and return the object with the import name `name`, ``module:attribute``."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def is_block_drafter(choice: object) -> bool:
    """Return whether a choice of `make_drafter` is known to create a block drafter.

    A block drafter processes rows at positions after the last draft that can be accepted. The
    engine reserves these positions before it creates the drafter. A choice creates a block drafter
    if it is a folder with the checkpoint of a block drafter, if its attribute `feeds_blocks` is
    true, or if it is a ``functools.partial`` whose function or an argument fulfils one of these
    conditions.
    """
    return any(map(_feeds_blocks, _parts(choice)))


def runs_on_host(choice: object) -> bool:
    """Return whether a choice of `make_drafter` is known to create a drafter with host steps.

    This is the case if the attribute `runs_on_host` of the choice is true, or if the choice is a
    ``functools.partial`` whose function or an argument has this attribute.
    """
    return any(getattr(part, "runs_on_host", False) is True for part in _parts(choice))


def _parts(choice: object) -> Iterator[object]:
    """Yield a choice of `make_drafter`; for a partial, yield its function and arguments instead."""
    if isinstance(choice, str) and ":" in choice and not Path(choice).exists():
        with suppress(Exception):  # `make_drafter` reports the error
            yield from _parts(_import_attribute(choice))
    elif isinstance(choice, partial):
        for part in (choice.func, *choice.args, *choice.keywords.values()):
            yield from _parts(part)
    else:
        yield choice


def _feeds_blocks(part: object) -> bool:
    """Return whether one of `_parts` is a block drafter, or the folder of one."""
    if callable(part):
        return getattr(part, "feeds_blocks", False) is True
    if not isinstance(part, (str, Path)) or not (Path(part) / "config.json").is_file():
        return False
    return _BLOCK_DRAFTER_TENSOR in Checkpoint(Path(part)).names


def _from_folder(folder: Path, context: DrafterContext) -> Drafter:
    """Load a checkpoint folder. The tensor names determine the kind of drafter."""
    names: tuple[str, ...] = ()
    if (folder / "config.json").is_file():
        names = Checkpoint(folder).names
    if any(name.endswith(".eh_proj.weight") for name in names):
        return Mtp(folder, context)
    if _BLOCK_DRAFTER_TENSOR in names:
        return _BLOCK_DRAFTERS[DFlashConfig.from_dir(folder).kind](folder, context)
    if "model.norm.weight" in names:
        return SmallModel.from_dir(folder, context)
    config = Eagle3Config.from_dir(folder).for_length(context.max_length, folder)
    return Eagle3.from_dir(folder, config, context)
