"""Test of the prefix-cache benchmark (graft.tools.bench.prefix)."""

from graft.tools.bench import prefix
from graft.tools.demo_model import demo_model


def test_prefix_bench_finds_all_full_pages_in_cache(capsys):
    """With a prefix cache, a request reuses the 12 full KV-cache pages of the 200 shared tokens."""
    target, drafter = map(str, demo_model())
    options = ["--tokens", "200", "--calls", "2", "--model", target, "--draft", drafter]
    assert prefix.main(options) == 0
    cached, uncached, summary = capsys.readouterr().out.splitlines()[1:]
    assert cached.removeprefix(prefix.CACHED).split()[0] == "192"
    assert uncached.removeprefix(prefix.UNCACHED).split()[0] == "0"
    assert summary.startswith("200 shared tokens: ")
