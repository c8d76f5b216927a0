"""KV transfer: migrating requests between engines (disaggregated prefill)."""

import copy
import itertools
import multiprocessing
import signal
from collections import defaultdict
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from engine_cases import MODES, answers, settled, workload
from engine_util import DEMO, demo_engine, drain
from safetensors.numpy import save

from graft.cudagraph.errors import OptionError
from graft.models import Request, RequestError
from graft.models.drafters import NGram
from graft.models.engine.migrate import MigratedRequest
from graft.models.errors import MigrationError
from graft.models.transfer import Mooncake, SharedMemory

FREE = Request(tokens=[300, 301, 302] * 7, min_tokens=20, max_tokens=30, id="free")
REQUESTS = [r for i in range(2) for r in workload()[i::5]]


def generate_with_migration(first, second, requests):
    """Submit requests to engine `first` and migrate them to engine `second`.

    A third of the requests is migrated while they wait, a third after the first token and a third
    after nine tokens. The tokens and texts of all events must agree with the outputs. Return the
    outputs and the number of migrated pages.
    """
    transfer = SharedMemory()
    outputs = {}
    tokens = defaultdict(list)
    texts = defaultdict(str)
    # Number of tokens after which each request is migrated.
    pending = {first.submit(request): (0, 1, 9)[i % 3] for i, request in enumerate(requests)}
    num_pages = 0
    while first.busy or second.busy:
        due = [request_id for request_id, n in pending.items() if len(tokens[request_id]) >= n]
        for request_id in due:
            ticket = transfer.send(first.migrate_out(request_id))
            migrated = transfer.receive(tuple(ticket))
            transfer.free(ticket)
            assert second.migrate_in(migrated) == request_id
            num_pages += migrated.num_pages
            del pending[request_id]
        for engine in (first, second):
            events = engine.step() if engine.busy else []
            for event in events:
                tokens[event.id] += event.tokens
                texts[event.id] += event.text
                if event.output is not None and event.output.reason != "moved":
                    outputs[event.id] = event.output
                    pending.pop(event.id, None)
    for request_id, output in outputs.items():
        assert (tokens[request_id], texts[request_id]) == (output.tokens, output.text)
    return [outputs[request.id] for request in requests], num_pages


@pytest.mark.parametrize(
    "options",
    [
        {"draft_length": 6, "draft_tree": (2, 3)},
        pytest.param({}, marks=pytest.mark.full),
        pytest.param(
            {"drafter": DEMO / "dflash", "draft_masking": "probe"}, marks=pytest.mark.full
        ),
        pytest.param({"drafter": NGram}, marks=pytest.mark.full),
        pytest.param({"speculation": False}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_migration_does_not_change_outputs(options):
    """Migrated requests have the same outputs as on one engine, without prefilling migrated pages.

    The requests are greedy and coupled. They have grammars, penalties, stop strings and log
    probabilities in various combinations.
    """
    requests = []
    for request, changes in zip(REQUESTS, itertools.cycle(MODES.values()), strict=False):
        requests.append(replace(request, **changes))
    options = {"max_batch_size": 4, "page_size": 4, **options}
    with settled(demo_engine(**options)) as first, settled(demo_engine(**options)) as second:
        outputs, num_pages = generate_with_migration(first, second, requests)
        expected = first.generate(requests)
    assert answers(outputs) == answers(expected)
    num_cached = sum(output.cached_tokens for output in outputs)
    assert num_pages > 10
    assert num_cached >= 4 * num_pages


@pytest.fixture(scope="module")
def pair():
    """Two engines with the same model and options, and no drafter."""
    options = {"speculation": False, "max_batch_size": 1}
    with demo_engine(**options) as first, demo_engine(**options) as second:
        yield first, second


def migrate_after_first_tokens(engine, request=FREE):
    """Run a request until its first event; return the migrated request and its first tokens."""
    engine.submit(request)
    events = []
    while not events:
        events = engine.step()
    return engine.migrate_out(request.id), list(events[0].tokens)


def test_migration_keeps_output_counters_and_deadline(pair):
    """The first engine finishes the request as "moved", and the second engine continues it.

    Its counters and times continue too, so its timeout is counted from the first submission.
    """
    first, second = pair
    migrated, tokens = migrate_after_first_tokens(first, replace(FREE, timeout_s=1000.0))
    output = drain(first)["free"]
    assert (output.reason, output.tokens) == ("moved", tokens) and migrated.num_pages == 1
    aged = {**migrated.description, "age_s": 990.0}
    second.migrate_in(MigratedRequest(aged, migrated.pages))
    finished = drain(second)["free"]
    assert finished.finished or finished.reason == "length"
    assert finished.total_s > 990 and finished.tokens[: len(tokens)] == tokens
    assert finished.rounds > output.rounds > 0
    assert finished.first_token_s == output.first_token_s
    expired = {**migrated.description, "age_s": 1001.0}
    second.migrate_in(MigratedRequest(expired, migrated.pages))
    assert drain(second)["free"].reason == "timeout"


def test_migration_rejects_unknown_duplicate_and_complete_requests(pair):
    first, second = pair
    with pytest.raises(RequestError, match="no unfinished request 'unknown'"):
        first.migrate_out("unknown")
    migrated, _ = migrate_after_first_tokens(first)
    second.submit(FREE)
    with pytest.raises(RequestError, match="'free' is already running"):
        second.migrate_in(migrated)
    request = {**migrated.description["request"], "max_tokens": 1, "min_tokens": 0, "id": "late"}
    description = {**migrated.description, "request": request}
    second.migrate_in(MigratedRequest(description, migrated.pages))
    assert "'late' was migrated after its output was complete" in drain(second)["late"].error


def test_migration_rejects_different_engines(pair):
    """If the engines differ, `migrate_in` raises an error and changes nothing.

    The error names the difference. An engine without a prefix cache is accepted if the request has
    no pages.
    """
    first, _ = pair
    migrated, _ = migrate_after_first_tokens(first)
    for message, options in {
        "page_size: the source engine has 16, this engine has 8": {
            "speculation": False,
            "page_size": 8,
        },
        "drafter: the source engine has NoneType, this engine has [0-9a-f]{32}": {},
        "grammar_backend: the source engine has auto": {
            "speculation": False,
            "grammar_backend": "xgrammar",
        },
        "holds at most 0 .the limit depends on prefix_cache": {
            "speculation": False,
            "prefix_cache_bytes": 0,
        },
    }.items():
        with demo_engine(max_batch_size=1, **options) as other:
            with pytest.raises(MigrationError, match=message):
                other.migrate_in(migrated)
            assert not other.busy and other.counters()["prefixes"]["pages"] == 0
            if "holds at most 0" in message:
                without_pages, _ = migrate_after_first_tokens(other)
                assert without_pages.num_pages == 0
                assert first.migrate_in(without_pages) == "free"
                assert drain(first)["free"].reason in ("stop", "length")


def with_value(migrated, path, value):
    """Return a migrated request with another value in its description, as a receiver reads it."""
    description = copy.deepcopy(migrated.description)
    *parents, key = path.split(".")
    part = description
    for name in parents:
        part = part[name]
    part[key] = value
    return MigratedRequest.from_bytes(MigratedRequest(description, migrated.pages).to_bytes())


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("engine", None, "the source engine is None"),
        ("request", 5, "'int' object is not iterable"),
        ("request.unknown", 1, "unexpected keyword argument 'unknown'"),
        ("request.grammar", {}, "KeyError: 'marker'"),
        ("request.relaxed", None, "must be a mapping"),
        ("output", {}, "KeyError: 'tokens'"),
        ("output.tokens", [1.5], "tokens is 1.5"),
        ("output.cached_tokens", "x", "cached_tokens is 'x'"),
        ("output.rounds", None, "rounds is None"),
        ("output.unknown", 1, "KeyError: 'unknown'"),
        ("output.logprobs", [[0.5, [["x", 1.0]]]], "logprobs is 'x'"),
        ("age_s", "x", "age_s is 'x'"),
    ],
)
def test_migration_rejects_other_descriptions(pair, path, value, message):
    """A description of another form is refused; it does not make a later round fail."""
    first, second = pair
    migrated, _ = migrate_after_first_tokens(first)
    with pytest.raises(MigrationError, match=message):
        second.migrate_in(with_value(migrated, path, value))
    assert not second.busy


@pytest.mark.parametrize(
    "change",
    [
        lambda page: page[:, :, :1, :1],
        lambda page: page.astype(np.float32),
        lambda page: page[0, 0, 0, 0],
        lambda page: page.reshape(-1),
    ],
    ids=["stretchable", "float32", "scalar", "flat"],
)
def test_migration_rejects_pages_of_other_shapes(pair, change):
    """Pages that do not fit the caches are refused, so that no request can reuse them."""
    first, second = pair
    migrated, _ = migrate_after_first_tokens(first)
    pages = tuple(np.ascontiguousarray(change(page)) for page in migrated.pages)
    with pytest.raises(MigrationError, match=r"the pages are .* this engine needs"):
        second.migrate_in(MigratedRequest(migrated.description, pages))
    more = MigratedRequest(migrated.description, (*migrated.pages, migrated.pages[0]))
    with pytest.raises(MigrationError, match=r"the pages are .* this engine needs"):
        second.migrate_in(more)
    assert not second.busy


def make_migrated_request():
    """Return a migrated request with arbitrary pages."""
    description = {"request": {"tokens": [1, 2, 3]}, "output": {"tokens": [4]}}
    pages = tuple(np.full((2, 1, 1, n), -n, np.int32) for n in (3, 8))
    return MigratedRequest(description, pages)


def is_equal(one, other):
    """Return whether two migrated requests have equal descriptions and pages."""
    if one.description != other.description:
        return False
    return all(map(np.array_equal, one.pages, other.pages))


def send_and_wait(make_transfer, tickets):
    """Run in a child process: send a request, and keep its data until the process is killed."""
    transfer = make_transfer()
    tickets.put(transfer.send(make_migrated_request()))
    signal.pause()


@pytest.mark.parametrize("make_transfer", [SharedMemory, partial(Mooncake, "127.0.0.1")])
def test_kv_transfer_handles_exit_of_sender_or_receiver(make_transfer):
    """Data can be received several times, until the sender frees it or exits."""
    try:
        transfer = make_transfer()
    except OptionError as error:
        assert "pip install mooncake-transfer-engine-non-cuda" in str(error)
        pytest.skip(str(error))
    context = multiprocessing.get_context("spawn")
    tickets = context.SimpleQueue()
    sender = context.Process(target=send_and_wait, args=(make_transfer, tickets))
    sender.start()
    ticket = tickets.get()
    for _ in range(2):
        assert is_equal(transfer.receive(ticket), make_migrated_request())
    sender.kill()
    sender.join()
    with pytest.raises(MigrationError, match="Ticket"):
        transfer.receive(ticket)
    own_ticket = transfer.send(make_migrated_request())
    transfer.free(own_ticket)
    transfer.free(own_ticket)
    with pytest.raises(MigrationError, match="Ticket"):
        transfer.receive(own_ticket)


class DamagingTransfer(SharedMemory):
    """Shared-memory transport that changes the data on receipt."""

    def __init__(self, damage):
        super().__init__()
        self.damage = damage

    def fetch(self, ticket):
        return self.damage(super().fetch(ticket).copy())


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-8],
        lambda data: data[:0],
        lambda data: np.concatenate([data, data]),
        lambda data: np.where(np.arange(len(data)) == len(data) - 12, data ^ 1, data),
        lambda data: data * 0,
    ],
    ids=["truncated", "empty", "doubled", "bit flip in a page", "zeros"],
)
def test_kv_transfer_rejects_damaged_data(damage):
    transfer = DamagingTransfer(damage)
    with pytest.raises(MigrationError, match="differ from the data that was sent"):
        transfer.receive(transfer.send(make_migrated_request()))
    transfer.close()
    assert not transfer.sent


def test_migrated_request_rejects_other_formats():
    """Data of another version or size, and other safetensors, are refused before they are used."""
    data = make_migrated_request().to_bytes()
    assert is_equal(MigratedRequest.from_bytes(data), make_migrated_request())
    other_version = data.replace(b'"format": 4', b'"format": 2')
    with pytest.raises(MigrationError, match="has format 2; this version reads format 4 only"):
        MigratedRequest.from_bytes(other_version)
    weights = save({"weight": np.zeros(3, np.float32)})
    text = save({"description": np.frombuffer(b"[2]", np.uint8)})
    deep = save({"description": np.frombuffer(b"[" * 100_000, np.uint8)})
    renamed = data.replace(b"pages.1", b"pages.7")
    for other in (b"", data[:-1], data + b"\0", bytes(99), weights, text, deep, renamed):
        with pytest.raises(MigrationError, match="are not a migrated request"):
            MigratedRequest.from_bytes(other)
