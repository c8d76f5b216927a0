"""KV transfer between engines, for disaggregated prefill and for moving requests.

A migrated request consists of the request, its output so far, and full KV-cache pages of target and
drafter. If the request has a grammar, only its specification is transferred: the receiving engine
compiles it, and advances the new matcher by the tokens that the source engine has output.

Only pages in the source engine's prefix cache are transferred. The receiving engine computes their
keys from the tokens and inserts the pages into its own prefix cache. The request then continues
like one that was preempted: tokens without a page are prefilled.

Kernels are row-invariant, which means that the other rows of a batch do not affect the results of a
row. Greedy and coupled outputs are therefore the same as on a single engine.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, get_type_hints

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from graft.cudagraph.device import Device
from graft.cudagraph.driver.memory import PinnedArray
from graft.cudagraph.lanes import StreamLane
from graft.grammar.grammar_spec import GrammarSpec
from graft.grammar.spec import Marker
from graft.models.cache.kv import PagedKV
from graft.models.cache.prefix import PageGroup, PrefixCache
from graft.models.drafters import Drafter, DrafterChoice
from graft.models.engine.options import Options
from graft.models.engine.request_state import RequestState
from graft.models.errors import MigrationError, RequestError
from graft.models.llm.config import LlamaConfig
from graft.models.request import Logprob, Output, Request
from graft.native.errors import short_repr
from graft.sampling.params import Relaxed

__all__ = ["MigratedRequest", "Migrator"]

#: Version of the data of a `MigratedRequest`. Increment it when the data or its meaning changes.
FORMAT = 4

#: `checkpoint_digest` reads this many bytes of a file at each of about `_MAX_SAMPLES` offsets.
_SAMPLE_BYTES = 1 << 14
_MAX_SAMPLES = 64

_THREADS = 128
_KERNELS = Path(__file__).parents[1] / "cache" / "kernels" / "pages.cu"

#: Exceptions that reading a malformed description may raise.
_UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)

#: Fields of `Output` that the receiving engine sets itself or that are transferred separately.
_LOCAL_OUTPUT_FIELDS = (
    "id",
    "prompt_tokens",
    "tokens",
    "text",
    "reason",
    "error",
    "error_type",
    "error_param",
    "seed",
    "sample",
    "total_s",
)


@dataclass(frozen=True, eq=False)
class MigratedRequest:
    """A request in transfer to another engine.

    Parameters
    ----------
    description
        JSON-compatible data: properties of the source engine, the request and its output.
    pages
        KV-cache pages, one array per cache, the target's cache first. Each array is int32 of shape
        [2 (keys, values), pages, layers, 32-bit words per page].
    """

    description: dict[str, Any]
    pages: tuple[np.ndarray, ...] = ()

    @property
    def tokens(self) -> list[int]:
        """Prompt and output so far."""
        prompt = self.description["request"]["tokens"]
        output = self.description["output"]["tokens"]
        return [*prompt, *output]

    @property
    def num_pages(self) -> int:
        """Number of migrated KV-cache pages per cache. They are the first pages of the request."""
        if not self.pages:
            return 0
        return self.pages[0].shape[1]

    def to_bytes(self) -> bytes:
        """Return the request as safetensors: the description as JSON text, and the pages."""
        text = json.dumps({"format": FORMAT, **self.description}, default=list)
        tensors = {"description": np.frombuffer(text.encode(), np.uint8)}
        for i, array in enumerate(self.pages):
            tensors[f"pages.{i}"] = array
        return save(tensors)

    @classmethod
    def from_bytes(cls, data: bytes) -> MigratedRequest:
        """Return the request that was serialized by `to_bytes`.

        Raises
        ------
        MigrationError
            If the data is not in safetensors format, or has a version other than `FORMAT`.
        """
        try:
            tensors = load(data)
            description = json.loads(tensors.pop("description").tobytes())
            found = description.pop("format")
            pages = tuple(tensors[f"pages.{i}"] for i in range(len(tensors)))
        except (SafetensorError, RecursionError, *_UNREADABLE) as error:
            raise MigrationError(
                f"{len(data)} bytes beginning with {data[:8]!r} are not a migrated request: {error}"
            ) from error
        if found != FORMAT:
            raise MigrationError(
                f"the migrated request has format {found}; this version reads format {FORMAT} only"
            )
        return cls(description, pages)


def describe_request(state: RequestState, verify: str) -> dict[str, Any]:
    """Return an unfinished request and its output as JSON-compatible data.

    Parameters
    ----------
    state
        State of the request.
    verify
        Verification mode of the engine. It applies if the request does not specify one.
    """
    output = state.output
    request = state.request
    resolved = replace(
        request,
        tokens=state.prompt,
        prompt=None,
        messages=None,
        schema=None,
        max_tokens=state.max_tokens,
        seed=output.seed,
        sample=output.sample,
        verify=request.verify or verify,
        id=output.id,
    )
    values = {field.name: getattr(resolved, field.name) for field in fields(resolved)}
    values["grammar"] = None if resolved.grammar is None else asdict(resolved.grammar)
    values["relaxed"] = asdict(resolved.relaxed)
    values["logit_bias"] = list((resolved.logit_bias or {}).items())
    output_values = {}
    for name, value in vars(output).items():
        if name not in _LOCAL_OUTPUT_FIELDS:
            output_values[name] = value
    output_values["tokens"] = list(output.tokens)
    return {"request": values, "output": output_values, "age_s": state.age_s}


def read_request(description: Mapping[str, Any]) -> Request:
    """Create a request from the result of `describe_request`.

    Raise MigrationError if the description is malformed.
    """
    try:
        values = dict(description["request"])
        grammar = values["grammar"]
        if grammar is not None:
            grammar = dict(grammar)
            if grammar["marker"]:
                grammar["marker"] = Marker(**grammar["marker"])
            values["grammar"] = GrammarSpec(**grammar)
        values["relaxed"] = Relaxed(**values["relaxed"])
        values["logit_bias"] = dict(values["logit_bias"])
        return Request(**values)
    except _UNREADABLE as error:
        raise MigrationError(
            f"the migrated request has an invalid field: {type(error).__name__}: {error}"
        ) from error


def check_output(description: Mapping[str, Any]) -> None:
    """Raise MigrationError unless `restore_output` can use the output in a description.

    Without this check, a counter that is not a number, for example, would make a later round of the
    engine fail.
    """
    types = {**get_type_hints(Output), "age_s": float}
    try:
        values = {**description["output"], "age_s": description["age_s"]}
        for token in values.pop("tokens"):
            _check_type("tokens", token, int)
        for value, top, *rank in values.pop("logprobs") or ():
            _check_type("logprobs", value, float)
            for token, logprob in top:
                _check_type("logprobs", token, int)
                _check_type("logprobs", logprob, float)
            for number in rank:
                _check_type("logprobs", number, (int, NoneType))
        for name, value in values.items():
            _check_type(name, value, types[name])
    except _UNREADABLE as error:
        raise MigrationError(
            f"the migrated request has an invalid output: {type(error).__name__}: {error}"
        ) from error


def _check_type(name: str, value: Any, allowed: Any) -> None:
    if not isinstance(value, allowed):
        raise TypeError(f"{name} is {short_repr(value)}, must be {allowed}")


def restore_output(state: RequestState, description: Mapping[str, Any]) -> None:
    """Copy the output in `description`, from `describe_request`, to a newly admitted request.

    The copied tokens and text are marked as reported, so that later events do not repeat them.

    Raises
    ------
    RequestError
        If the output is already complete.
    """
    output = state.output
    values = dict(description["output"])
    tokens = values.pop("tokens")
    logprobs = values.pop("logprobs")
    for name, value in values.items():
        setattr(output, name, value)
    if logprobs is not None:
        output.logprobs = []
        for value, top, *rank in logprobs:
            pairs = tuple((token, logprob) for token, logprob in top)
            output.logprobs.append(Logprob(value, pairs, *rank))
    state.submitted_at = time.monotonic() - description["age_s"]
    _, stopped = state.append_tokens(tokens)
    state.take_new_tokens()
    if stopped or len(tokens) >= state.max_tokens:
        state.finish_text()
        raise RequestError(f"request {state.id!r} was migrated after its output was complete")


def checkpoint_digest(folder: Path) -> str:
    """Return a digest of a checkpoint's JSON and safetensors files.

    The digest covers the names and sizes of the files, the contents of small files, and samples of
    the contents of large files.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = [*folder.glob("*.json"), *folder.glob("*.safetensors")]
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        stride = max(size // _MAX_SAMPLES, _SAMPLE_BYTES)
        with file.open("rb") as opened:
            for offset in range(0, size, stride):
                opened.seek(offset)
                digest.update(opened.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def engine_properties(
    device: Device,
    options: Options,
    model: Path,
    choice: DrafterChoice | None,
    drafter: Drafter | None,
    config: LlamaConfig,
) -> dict[str, str | int]:
    """Return the properties that sending and receiving engine must have in common.

    `Migrator` adds the shapes of the KV caches and the page size, which must be equal too.
    """
    drafter_name = type(drafter).__name__
    if isinstance(choice, (str, Path)) and Path(choice).is_dir():
        drafter_name = checkpoint_digest(Path(choice))
    backend = options.grammar_backend
    return {
        "model": checkpoint_digest(model),
        "drafter": drafter_name,
        "activations": options.internal.activations,
        "weights": options.weights,
        # With some kinds of RoPE scaling, the keys in the pages depend on max_length.
        "rope_type": config.rope.variant,
        "grammar_backend": str(getattr(backend, "__qualname__", backend)),
        "device": f"{device.kind} {device.compute_capability}",
    }


class Migrator:
    """Copies the pages of migrated requests out of and into the caches of an engine.

    Parameters
    ----------
    device
        Device of the engine.
    lane
        In-order work queue on the stream of the replays. Copies are therefore ordered after all
        work that has written the pages and before all work that will read or overwrite them.
    caches
        All paged caches of the engine.
    prefix_cache
        Prefix cache of the engine.
    properties
        Result of `engine_properties`.
    """

    def __init__(
        self,
        device: Device,
        lane: StreamLane,
        caches: Sequence[PagedKV],
        prefix_cache: PrefixCache,
        properties: Mapping[str, str | int],
    ) -> None:
        self._device = device
        self._lane = lane
        self._caches = caches
        self._prefix_cache = prefix_cache
        shapes = [
            f"{cache.layers} x {cache.kv_heads} x {cache.head_dim} {cache.dtype}"
            for cache in caches
        ]
        self._properties = {
            **properties,
            "page_size": caches[0].page_size,
            "caches": ", ".join(shapes),
        }
        self._copy_pages = device.load(_KERNELS)["copy_pages"]

    def pack(self, state: RequestState, verify: str) -> MigratedRequest:
        """Return a request for migration.

        The result contains copies of those pages of the request that are in this engine's prefix
        cache. The method waits until the copies are complete.

        Parameters
        ----------
        state
            State of an unfinished request.
        verify
            Verification mode of the engine, which the result has if the request specifies none.
        """
        groups = self._prefix_cache.match(self._prefix_cache.keys(state.tokens))
        packed = self._enqueue_copies(groups, ()) if groups else []
        self._lane.record("pages").synchronize()
        description = {"engine": self._properties, **describe_request(state, verify)}
        return MigratedRequest(description, tuple(array.array for array in packed))

    def check(self, migrated: MigratedRequest) -> None:
        """Check that this engine can continue a migrated request.

        Raises
        ------
        MigrationError
            If a property of the engines differs, the shape of the pages or the description of the
            output is invalid, or the prefix cache is too small for the pages.
        """
        if not isinstance(migrated, MigratedRequest):
            raise MigrationError(f"expected a MigratedRequest, got {short_repr(migrated)}")
        source = migrated.description.get("engine")
        if not isinstance(source, Mapping):
            raise MigrationError(f"the source engine is {short_repr(source)}, must be an object")
        for name, value in self._properties.items():
            if source.get(name) != value:
                raise MigrationError(
                    f"the engines differ in {name}: the source engine has {source.get(name)}, "
                    f"this engine has {value}"
                )
        self._check_pages(migrated.pages)
        check_output(migrated.description)
        max_pages = self._prefix_cache.max_pages
        if migrated.num_pages > max_pages:
            raise MigrationError(
                f"the request has {migrated.num_pages} pages, but the prefix cache of this engine "
                f"holds at most {max_pages} (the limit depends on prefix_cache_bytes and is 0 with "
                "a drafter whose entries cannot be shared)"
            )

    def _check_pages(self, pages: Sequence[np.ndarray]) -> None:
        """Raise MigrationError if there are `pages`, but they do not fit this engine's KV caches.

        Without this check, NumPy would broadcast an array with axes of length 1, and other requests
        with the same prefix would reuse wrong pages.
        """
        if not pages:
            return
        num_pages = pages[0].shape[1] if pages[0].ndim == 4 else 0
        expected = [("int32", self._packed_shape(cache, num_pages)) for cache in self._caches]
        found = [(str(array.dtype), array.shape) for array in pages]
        if found != expected:
            raise MigrationError(f"the pages are {found}, this engine needs {expected}")

    @staticmethod
    def _packed_shape(cache: PagedKV, num_pages: int) -> tuple[int, int, int, int]:
        """Return the shape of the pages of one cache in `MigratedRequest.pages`."""
        return 2, num_pages, cache.layers, cache.page_bytes // (8 * cache.layers)

    def insert_pages(self, migrated: MigratedRequest) -> None:
        """Insert as many pages of a migrated request as possible into the prefix cache."""
        keys = self._prefix_cache.keys(migrated.tokens)[: migrated.num_pages]

        def write(groups: Sequence[PageGroup], indices: Sequence[int]) -> None:
            contents = [array[:, indices] for array in migrated.pages]
            self._enqueue_copies(groups, contents)

        self._prefix_cache.insert_migrated(keys, write)

    def _enqueue_copies(
        self, groups: Sequence[PageGroup], contents: Sequence[np.ndarray]
    ) -> list[PinnedArray]:
        """Enqueue the copies of pages between the caches and pinned memory.

        Parameters
        ----------
        groups
            Pages of the caches to copy.
        contents
            Contents to write into the pages, one array per cache. If `contents` is empty, the pages
            are read instead.

        Returns
        -------
        list of PinnedArray
            Pinned copies of the pages, one array per cache, shaped like `MigratedRequest.pages`.
            The arrays are valid once the lane has completed the copies.
        """
        packed_arrays = []
        for i, cache in enumerate(self._caches):
            shape = self._packed_shape(cache, len(groups))
            words = shape[-1]
            packed = self._device.pinned(shape, "int32")
            if contents:
                packed.array[:] = contents[i]
            indices = np.array([group[i] for group in groups], np.int32)
            pages = self._device.from_host(indices)
            half_size = packed.array[0].size
            for kind, array in enumerate((cache.k, cache.v)):
                half = packed.view(kind * half_size, packed.shape[1:])
                read = int(not contents)
                args = (array, half, pages, cache.scratch_page + 1, words, read)
                grid = (len(groups), cache.layers, 1)
                self._lane.kernel(self._copy_pages, grid, _THREADS, args, name="copy pages")
            packed_arrays.append(packed)
        return packed_arrays
