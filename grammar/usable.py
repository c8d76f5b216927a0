"""Determines which grammar libraries this process can use."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Iterator

from graft.grammar.errors import GrammarError
from graft.grammar.schema.keyword_support import BACKENDS
from graft.native.errors import OptionError

__all__ = ["require_usable", "unusable_reason", "usable_backends", "warn_if_unusable"]

_log = logging.getLogger("graft.grammar")


def unusable_reason(name: str) -> str:
    """Return why a backend's library cannot be used, or an empty string if it can.

    The function loads the library. Possible reasons: the library is not installed, its version is
    not tested, or its interface differs from that of the tested version.
    """
    # Imported here, because the backends' modules import modules that call this function.
    module = importlib.import_module(f"graft.grammar.backends.{name}")
    try:
        module.load_native()
    except OptionError as error:
        return str(error)
    return ""


def usable_backends() -> Iterator[str]:
    """Yield the names of the usable backends in order of preference.

    Each library is loaded only when the iteration reaches it.
    """
    for name in BACKENDS:
        if not unusable_reason(name):
            yield name


def require_usable(name: str) -> None:
    """Raise `GrammarError` with the reason if a backend's library cannot be used."""
    reason = unusable_reason(name)
    if reason:
        raise GrammarError(reason)


@functools.cache
def warn_if_unusable(name: str) -> None:
    """Log why an installed library cannot be used, once per process."""
    if importlib.util.find_spec(name) and (reason := unusable_reason(name)):
        _log.warning("%s; no grammar is compiled with this library", reason)
