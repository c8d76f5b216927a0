"""The grammar backends of one engine: its own, and those that single grammars ask for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from .backend import GrammarBackend, make_backend
from .compile import CompileService
from .matcher import CompiledGrammar
from .spec import GrammarSpec
from .vocabulary import Vocabulary

__all__ = ["GrammarService"]


class GrammarService:
    """Compiles each grammar with the backend it names, or with the default one.

    Matchers of different backends may sit in one batch: the guided worker is the same for all.

    Parameters
    ----------
    vocabulary
        What the grammars are compiled for.
    choice
        Default backend: a name, or a callable that makes one for the vocabulary.
    native
        Whether matchers have a side that runs without the GIL.
    threads, timeout_s
        Of each backend's `CompileService`.

    Notes
    -----
    A further backend is made when a grammar first names it, on the calling thread: about a second
    for a vocabulary of 128k tokens.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        choice: str | Callable[[Vocabulary], GrammarBackend] = "xgrammar",
        *,
        native: bool = True,
        threads: int = 1,
        timeout_s: float = 30.0,
    ):
        self._vocabulary, self._native = vocabulary, native
        self._threads, self._timeout_s = threads, timeout_s
        self.backend = make_backend(choice, vocabulary, native=native)
        self._default = self._service(self.backend)
        self._services = {choice: self._default} if isinstance(choice, str) else {}

    def _service(self, backend: GrammarBackend) -> CompileService:
        return CompileService(backend, threads=self._threads, timeout_s=self._timeout_s)

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """A future of the compiled grammar, as `CompileService.submit`; not for several threads.

        Raises
        ------
        GrammarError, OptionError
            If the backend that the grammar names cannot be had.
        """
        if not spec.backend:
            return self._default.submit(spec)
        service = self._services.get(spec.backend)
        if service is None:
            made = make_backend(spec.backend, self._vocabulary, native=self._native)
            service = self._services[spec.backend] = self._service(made)
        return service.submit(spec)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until the default backend compiles without further preparation."""
        return self._default.wait_ready(timeout_s)

    def close(self) -> None:
        """Close every compile service."""
        for service in {id(s): s for s in (self._default, *self._services.values())}.values():
            service.close()
