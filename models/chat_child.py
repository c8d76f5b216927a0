"""Renders chat templates, in a process of its own: they are programs of whoever made the model.

Run as a script by `graft.models.chat`; needs nothing of graft's. A line in, a line out, both JSON.
"""

from __future__ import annotations

import datetime
import functools
import json
import resource
import signal
import sys
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


def environment() -> ImmutableSandboxedEnvironment:
    """What chat templates expect: block trimming, loop controls and three helpers."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    made.filters["tojson"] = _tojson
    made.globals["raise_exception"] = _raise_exception
    made.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return made


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike jinja's own filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.lru_cache(16)
def _compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def main() -> None:
    """Serve until the other side closes the pipe; the alarm ends the process at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    limit_s, memory = float(sys.argv[1]), int(sys.argv[2])
    with open("/proc/self/statm", encoding="ascii") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    soft = mapped + memory
    resource.setrlimit(
        resource.RLIMIT_AS, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard)
    )
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            source, variables = json.loads(line)
            answer = [True, _compiled(source).render(**variables)]
        except MemoryError:
            answer = [False, f"it takes more than {memory >> 20} MiB of memory"]
        except Exception as error:
            answer = [False, str(error) or type(error).__name__]
        text = json.dumps(answer)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        print(text, flush=True)


if __name__ == "__main__":
    main()
