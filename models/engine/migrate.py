"""Handing a request from one engine to another: what it asks, the tokens it has, and its pages.

A grammar travels as its statement and the tokens it has taken; the other engine compiles it from
its own cache. Pages are those that a prefix cache would find again, of the target and the drafter,
and they are put into the other's prefix cache, under keys that it makes of the tokens itself. There
the request goes on like one that was preempted: what no page holds is prefilled. Kernels are
row-invariant, so greedy and coupled outputs are those of one engine.
"""

from __future__ import annotations

import hashlib
import json
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from graft.cudagraph.device import Device
from graft.cudagraph.lanes import StreamLane
from graft.cudagraph.memory import PinnedArray
from graft.grammar.spec import Marker
from graft.grammar.statement import GrammarSpec
from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import Pages, PrefixCache
from graft.models.drafters import Drafter, DrafterChoice
from graft.models.engine.options import Options
from graft.models.engine.slots import RequestState
from graft.models.errors import MigrationError, RequestError
from graft.models.request import Logprob, Request, shown
from graft.sampling.state import Relaxed

#: Goes up when what is handed over, or what it means, changes.
FORMAT = 1
_HEAD = struct.Struct("<6sHQ")  # magic, format, bytes of the description
_MAGIC = b"graft\0"
_SAMPLES = 64
_SAMPLE = 1 << 16
_THREADS = 128
_KERNELS = Path(__file__).parents[1] / "cache" / "kernels" / "pages.cu"
#: Of an output these are what the other engine finds out by itself, or is told otherwise.
_OWN = (
    "id",
    "prompt_tokens",
    "tokens",
    "text",
    "reason",
    "error",
    "error_type",
    "seed",
    "sample",
    "total_s",
)


@dataclass(frozen=True, eq=False)
class MigratedRequest:
    """A request on its way to another engine.

    Attributes
    ----------
    about : plain data: of the engine it comes from, the request, its output and the pages.
    pages : of each cache, target's first: int32 [keys and values, pages, layers, words of a page].
    """

    about: dict[str, Any]
    pages: tuple[np.ndarray, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        return [*self.about["request"]["tokens"], *self.about["output"]["tokens"]]

    @property
    def cached(self) -> int:
        """How many pages of those tokens come with it."""
        return self.pages[0].shape[1] if self.pages else 0

    def parts(self) -> list[memoryview]:
        """The bytes of it, in order."""
        shapes = [array.shape for array in self.pages]
        told = json.dumps({**self.about, "shapes": shapes}, default=list).encode()
        head = _HEAD.pack(_MAGIC, FORMAT, len(told)) + told + bytes(-len(told) % 8)
        return [memoryview(head), *(array.reshape(-1).data.cast("B") for array in self.pages)]

    @classmethod
    def read(cls, data: np.ndarray) -> MigratedRequest:
        """Of its bytes, uint8; the pages are views of them.

        Raises
        ------
        HandOverError
            They are of another format.
        """
        magic, form, size = _HEAD.unpack(bytes(data[: _HEAD.size]).ljust(_HEAD.size))
        if magic != _MAGIC or form != FORMAT:
            raise MigrationError(
                f"what begins with {bytes(data[:8])!r} is no hand-over of format "
                f"{FORMAT}, which this graft reads"
            )
        at = _HEAD.size + size
        about = json.loads(bytes(data[_HEAD.size : at]))
        pages = []
        at += -size % 8
        for shape in about.pop("shapes"):
            end = at + 4 * int(np.prod(shape))
            pages.append(data[at:end].view(np.int32).reshape(shape))
            at = end
        return cls(about, tuple(pages))


def described(running: RequestState, verify: str) -> dict[str, Any]:
    """An unfinished request and its output as plain data; `verify` where it names none."""
    output = running.output
    request = running.request
    asked = replace(
        request,
        tokens=running.prompt,
        prompt=None,
        messages=None,
        schema=None,
        max_tokens=running.max_tokens,
        seed=output.seed,
        sample=output.sample,
        verify=request.verify or verify,
        id=output.id,
    )
    told = {field.name: getattr(asked, field.name) for field in fields(asked)}
    told["grammar"] = None if asked.grammar is None else asdict(asked.grammar)
    told["relaxed"] = asdict(asked.relaxed)
    told["logit_bias"] = list((asked.logit_bias or {}).items())
    known = {name: value for name, value in vars(output).items() if name not in _OWN}
    return {
        "request": told,
        "output": {**known, "tokens": list(output.tokens)},
        "age_s": running.age_s,
    }


def requested(about: Mapping[str, Any]) -> Request:
    """The request that `described` tells of."""
    told = dict(about["request"])
    if (grammar := told["grammar"]) is not None:
        marker = grammar["marker"] and Marker(**grammar["marker"])
        told["grammar"] = GrammarSpec(**{**grammar, "marker": marker})
    return Request(
        **{**told, "relaxed": Relaxed(**told["relaxed"]), "logit_bias": dict(told["logit_bias"])}
    )


def restore(running: RequestState, about: Mapping[str, Any]) -> None:
    """Let a request that was just made go on from an output that somebody has been told of.

    Raises
    ------
    RequestError
        That output has ended.
    """
    output = running.output
    told = dict(about["output"])
    tokens = told.pop("tokens")
    logprobs = told.pop("logprobs")
    for name, value in told.items():
        setattr(output, name, value)
    if logprobs is not None:
        output.logprobs = [Logprob(value, tuple(map(tuple, top))) for value, top in logprobs]
    running.submitted = time.monotonic() - about["age_s"]
    _, stopped = running.push(tokens)
    running.hand_out()
    if stopped or len(tokens) >= running.max_tokens:
        raise RequestError(f"request {running.id!r} was handed over when its output had ended")


def digest(folder: Path) -> str:
    """Of a model's files: their names and sizes, and all of small ones, samples of large ones."""
    told = hashlib.blake2b(digest_size=16)
    for file in sorted((*folder.glob("*.json"), *folder.glob("*.safetensors"))):
        size = file.stat().st_size
        told.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for at in range(0, size, max(size // _SAMPLES, _SAMPLE)):
                opened.seek(at)
                told.update(opened.read(_SAMPLE))
    return told.hexdigest()


def facts(
    device: Device,
    options: Options,
    model: Path,
    choice: DrafterChoice | None,
    drafter: Drafter | None,
) -> dict[str, str | int]:
    """What two engines must have in common, by name, but for the shapes of their caches."""
    folder = isinstance(choice, (str, Path)) and Path(choice).is_dir()
    backend = options.grammar_backend
    return {
        "model": digest(model),
        "drafter": digest(Path(str(choice))) if folder else type(drafter).__name__,
        "activations": options.activations,
        "weights": options.weights,
        "grammar_backend": str(getattr(backend, "__qualname__", backend)),
        "device": f"{device.kind} {device.compute_capability}",
    }


class Migrator:
    """An engine's end of it: pages out of its caches, and others' into them.

    Parameters
    ----------
    lane : the replays' stream: what is enqueued there lies behind all that wrote the pages, and
        before all that will read or rewrite them.
    known : see `facts`.
    """

    def __init__(
        self,
        device: Device,
        lane: StreamLane,
        caches: Sequence[PagedKV],
        prefixes: PrefixCache,
        known: Mapping[str, str | int],
    ) -> None:
        self._device = device
        self._lane = lane
        self._caches = caches
        self._prefixes = prefixes
        shapes = [f"{c.layers} x {c.kv_heads} x {c.head_dim} {c.dtype}" for c in caches]
        self._facts = {**known, "page_size": caches[0].page_size, "caches": ", ".join(shapes)}
        self._move = device.load(_KERNELS)["move_pages"]

    def pack(self, running: RequestState, verify: str) -> MigratedRequest:
        """A request and the pages that are kept of its tokens, once the device has copied them."""
        pages = self._prefixes.match(self._prefixes.keys(running.tokens))
        packed = self._enqueue(pages, ()) if pages else []
        self._lane.record("pages").synchronize()
        about = {"engine": self._facts, **described(running, verify)}
        return MigratedRequest(about, tuple(array.array for array in packed))

    def check(self, over: MigratedRequest) -> None:
        """Refuse what this engine cannot go on with. Raises HandOverError naming what differs."""
        if not isinstance(over, MigratedRequest):
            raise MigrationError(f"what is handed over must be a HandOver, got {shown(over)}")
        theirs = over.about["engine"]
        for name, ours in self._facts.items():
            if theirs.get(name) != ours:
                raise MigrationError(
                    f"the engine that hands over has {name} {theirs.get(name)}, this one {ours}"
                )
        if over.cached > self._prefixes.most:
            raise MigrationError(
                f"{over.cached} pages are handed over, and the prefix cache here keeps "
                f"{self._prefixes.most} at most (prefix_cache_bytes, and no drafter that shares "
                "nothing)"
            )

    def adopt(self, over: MigratedRequest) -> None:
        """Keep the pages that come with a request, as far as others leave room for them."""
        keys = self._prefixes.keys(over.tokens)[: over.cached]
        self._prefixes.adopt(
            keys,
            lambda pages, which: self._enqueue(pages, [array[:, which] for array in over.pages]),
        )

    def _enqueue(self, pages: Sequence[Pages], given: Sequence[np.ndarray]) -> list[PinnedArray]:
        """Copy pages of all caches to pinned memory, or what is given into them."""
        moved = []
        for i, cache in enumerate(self._caches):
            words = cache.page_bytes // (8 * cache.layers)
            packed = self._device.pinned((2, len(pages), cache.layers, words), "int32")
            if given:
                packed.array[:] = given[i]
            ids = self._device.from_host(np.array([every[i] for every in pages], np.int32))
            for kind, array in enumerate((cache.k, cache.v)):
                half = packed.view(kind * packed.array[0].size, packed.shape[1:])
                args = (array, half, ids, cache.scratch_page + 1, words, int(not given))
                self._lane.kernel(
                    self._move, (len(pages), cache.layers, 1), _THREADS, args, name="move pages"
                )
            moved.append(packed)
        return moved
