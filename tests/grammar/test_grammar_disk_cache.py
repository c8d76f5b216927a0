"""Grammars kept on disk: found again, refused when damaged or foreign, bounded, shared."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import zlib

import pytest
from guide_util import byte_vocabulary

from graft.cudagraph.errors import OptionError
from graft.grammar import (
    CompileService,
    GrammarService,
    GrammarSpec,
    LLGuidanceBackend,
    XGrammarBackend,
)
from graft.grammar.disk_cache import DiskCache

SPEC = GrammarSpec.choice(["true", "tell"])
RISKY = GrammarSpec.json_schema({"type": "array", "maxItems": 200, "items": {"type": "integer"}})


@pytest.fixture(scope="module")
def backend() -> XGrammarBackend:
    return XGrammarBackend(byte_vocabulary())


def compile_once(backend, folder, *specs: GrammarSpec) -> dict[str, int]:
    """What a service with an empty memory did for the specs; everything is written when it ends."""
    service = CompileService(backend, disk=DiskCache(folder), timeout_s=600)
    compiled = [service.submit(spec).result(timeout=300) for spec in specs]
    service.close()
    for grammar in compiled:
        assert backend.matcher(grammar).legal().tolist() == (
            backend.matcher(backend.compile(grammar.spec)).legal().tolist()
        )
    return service.counters()


def test_what_one_run_compiled_the_next_one_loads(backend, tmp_path):
    """Grammars from threads and from children come back from disk with the same masks."""
    first = compile_once(backend, tmp_path, SPEC, RISKY)
    assert (first["disk_misses"], first["disk_stores"]) == (2, 2)
    second = compile_once(backend, tmp_path, SPEC, RISKY)
    assert (second["disk_hits"], second["loaded_from_disk"]) == (2, 2)
    assert "compiled_in_threads" not in second and "compiled_in_children" not in second
    assert len(list(tmp_path.iterdir())) == 2


def damage_text(data: bytes) -> bytes:
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


def not_a_grammar(data: bytes) -> bytes:
    """A file whose checksum is right and whose text is no grammar."""
    import hashlib
    import json

    head = json.loads(data.partition(b"\n")[0])
    body = zlib.compress(b"{}")
    head |= {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    return json.dumps(head).encode() + b"\n" + body


@pytest.mark.parametrize(
    "damage, why",
    [
        (lambda data: b"", "Expecting value"),
        (lambda data: b"\x00" * 5000, "no header"),
        (lambda data: b"[]\n", "no header"),
        (lambda data: data[: len(data) // 2], "bytes"),
        (damage_text, "checksum"),
        (lambda data: data.replace(b'"release": "', b'"release": "9'), "release '9"),
        (lambda data: data.replace(b'"format": ', b'"format": 9'), "format 9"),
        (lambda data: data.replace(b'"vocabulary": "', b'"vocabulary": "0'), "vocabulary"),
        (not_a_grammar, ""),
    ],
)
def test_damaged_and_foreign_files_are_rebuilt(backend, tmp_path, caplog, damage, why):
    """A file that is not what its name promises is named in the log, and compiled again."""
    compile_once(backend, tmp_path, SPEC)
    (path,) = tmp_path.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING, "graft.grammar"):
        found = compile_once(backend, tmp_path, SPEC)
    assert (found["disk_ignored"], found["disk_stores"], found["disk_hits"]) == (1, 1, 0)
    (record,) = caplog.records
    assert path.name in record.getMessage() and why in record.getMessage()
    assert compile_once(backend, tmp_path, SPEC)["disk_hits"] == 1


def test_another_vocabulary_is_another_key(backend, tmp_path):
    """Grammars of one tokenizer are never loaded for another one."""
    compile_once(backend, tmp_path, SPEC)
    other = XGrammarBackend(byte_vocabulary(300))
    assert compile_once(other, tmp_path, SPEC)["disk_misses"] == 1
    assert len(list(tmp_path.iterdir())) == 2


def test_the_folder_is_bounded_and_the_oldest_go(backend, tmp_path):
    """Files used longest ago are removed when their bytes pass the bound; strangers stay."""
    specs = [GrammarSpec.regex(f"a{c}+") for c in "bcdefg"]
    (tmp_path / "notes.txt").write_text("not ours")
    compile_once(backend, tmp_path, *specs)
    sizes = [path.stat().st_size for path in tmp_path.glob("*.grammar")]
    cache = DiskCache(tmp_path, max(sizes) * 3)
    for age, spec in enumerate(specs):
        before = {path: path.stat().st_mtime for path in tmp_path.glob("*.grammar")}
        assert cache.load(backend, spec) is not None
        (touched,) = [p for p, at in before.items() if p.stat().st_mtime != at]
        os.utime(touched, (1000 + age, 1000 + age))
    grammar = backend.compile(specs[0])
    cache.store(backend, specs[0], backend.dump(grammar))
    assert sum(path.stat().st_size for path in tmp_path.glob("*.grammar")) <= max(sizes) * 3
    assert cache.load(backend, specs[0]) is not None  # just written
    assert cache.load(backend, specs[-1]) is not None  # the youngest of the others
    assert cache.load(backend, specs[1]) is None
    assert (tmp_path / "notes.txt").exists()


WRITER = """
import sys
from guide_util import byte_vocabulary
from graft.grammar import GrammarSpec, XGrammarBackend
from graft.grammar.disk_cache import DiskCache
backend = XGrammarBackend(byte_vocabulary())
cache = DiskCache(sys.argv[1], 20000)
specs = [GrammarSpec.regex(f"x{i}+") for i in range(12)]
texts = [backend.dump(backend.compile(spec)) for spec in specs]
for _ in range(15):
    for spec, text in zip(specs, texts):
        cache.store(backend, spec, text)
        cache.load(backend, spec)
counters = cache.counters()
assert counters["disk_failures"] == counters["disk_ignored"] == 0, counters
"""


def test_processes_share_a_folder(tmp_path):
    """Three processes that write, trim and read one folder never see a broken file."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    for process in running:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said
    assert not list(tmp_path.glob("new-*"))


def test_a_folder_that_cannot_be_used_is_refused(backend, tmp_path):
    """A path that is a file, or a bound that is none, is refused by name; lost folders are not."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"grammar_cache_dir .*file"):
        DiskCache(tmp_path / "file")
    with pytest.raises(OptionError, match="limit_bytes"):
        DiskCache(tmp_path, 0)
    lost = DiskCache(tmp_path / "lost")
    (tmp_path / "lost").rmdir()
    service = CompileService(backend, disk=lost)
    assert service.submit(SPEC).result(timeout=300).nbytes > 0
    service.close()
    assert service.counters()["disk_failures"] == 1


def test_llguidance_writes_nothing(tmp_path):
    """LLGuidance's grammars cannot be serialised: with it the folder stays empty."""
    service = GrammarService(byte_vocabulary(), "llguidance", cache_dir=tmp_path)
    assert service.submit(SPEC).result(timeout=300).nbytes > 0
    service.close()
    assert not list(tmp_path.iterdir())
    assert isinstance(service.backend, LLGuidanceBackend)
