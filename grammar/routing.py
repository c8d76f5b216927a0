"""Which backend compiles a grammar that names none: decided off the engine's thread."""

from __future__ import annotations

import queue
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from graft.cudagraph.errors import OptionError

from .errors import GrammarError
from .matcher import CompiledGrammar
from .resolve import resolved
from .schema.enforcement import available_backends
from .spec import Spec

__all__ = ["Routing"]

_KEPT = 256  # answers kept, so that a schema seen before is routed in microseconds
Submit = Callable[[Spec], "Future[CompiledGrammar]"]


class Routing:
    """Answers `resolved` on one daemon thread, and keeps the answers.

    Parameters
    ----------
    choice
        The engine's backend: ``"auto"``, a name, or a callable, for which nothing is routed.
    submit
        Compiles a grammar whose backend is decided. Never called by two threads at once.

    Attributes
    ----------
    default
        The backend of what is not routed: ``choice``, or for ``"auto"`` the first one installed.

    Raises
    ------
    OptionError
        If ``"auto"`` finds no backend installed.
    """

    def __init__(self, choice: Any, submit: Submit):
        self._choice = choice if isinstance(choice, str) else ""
        self._submit = submit
        installed = available_backends()
        if choice == "auto" and not installed:
            raise OptionError("grammar_backend: auto needs llguidance or xgrammar installed")
        self.default: Any = installed[0] if choice == "auto" else choice
        self._ebnf = choice == "auto" and "xgrammar" in installed  # whose notation it is
        self._compiling = threading.Lock()
        self._lock = threading.Lock()  # guards the three below
        self._answers: OrderedDict[Spec, Spec | GrammarError] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Spec, Future[CompiledGrammar]] | None] = (
            queue.SimpleQueue()
        )

    def submit(self, spec: Spec) -> Future[CompiledGrammar]:
        """A future of the compiled grammar; it raises ``GrammarError`` if the router refuses."""
        if self._ebnf and spec.kind == "ebnf" and not spec.backend:
            return self._compile(replace(spec, backend="xgrammar"))
        if not self._choice or spec.backend or spec.kind != "json_schema":
            return self._compile(spec)
        with self._lock:
            if self._closed:
                raise GrammarError("compile service: is closed")
            answer = self._answers.get(spec)
            if answer is None and self._thread is None:
                self._thread = threading.Thread(target=self._work, name="graft-route", daemon=True)
                self._thread.start()
        if isinstance(answer, Spec):
            return self._compile(answer)
        future: Future[CompiledGrammar] = Future()
        future.set_running_or_notify_cancel()
        if answer is not None:
            future.set_exception(answer)
        else:
            self._jobs.put((spec, future))
        return future

    def close(self) -> None:
        """End the thread; what has not been routed fails with ``GrammarError``."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._jobs.put(None)
            thread.join()

    def _compile(self, spec: Spec) -> Future[CompiledGrammar]:
        with self._compiling:
            return self._submit(spec)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            spec, future = job
            try:
                if self._closed:
                    raise GrammarError("compile service: is closed")
                self._compile(self._resolve(spec)).add_done_callback(_passed_to(future))
            except Exception as error:  # whoever asked is told, and this thread lives on
                future.set_exception(error)

    def _resolve(self, spec: Spec) -> Spec:
        """The answer, kept for the next one who asks."""
        try:
            answer: Spec | GrammarError = resolved(spec, self._choice)
        except GrammarError as error:
            answer = error
        with self._lock:
            self._answers[spec] = answer
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
        if isinstance(answer, GrammarError):
            raise answer
        return answer


def _passed_to(
    future: Future[CompiledGrammar],
) -> Callable[[Future[CompiledGrammar]], None]:
    """A callback that hands one future's outcome to another."""

    def done(compiled: Future[CompiledGrammar]) -> None:
        error = compiled.exception()
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(compiled.result())

    return done
