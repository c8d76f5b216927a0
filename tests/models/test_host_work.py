"""The host's work per step does not depend on the sizes of prefix cache, prompts and queue."""

import sys

import pytest

from graft.tools.bench import host_time


def count_opcodes(call):
    """Return the number of bytecode instructions that a call executes."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(previous)
    return count


@pytest.mark.parametrize("case", host_time.CASES)
def test_host_work_per_step_does_not_grow(device, case):
    """With 20 times the cached pages and waiting requests, a step needs no more instructions.

    The steps include those in which the running requests get new pages.
    """
    most = []
    for pages, waiting in ((200, 20), (4000, 400)):
        rounds = host_time.HostRounds(device, case, 4, pages, waiting)
        most.append(max(count_opcodes(rounds.step) for _ in range(40)))
        rounds.scheduler.slots.close()
    few, many = most
    assert few > 500
    assert many <= few + 100, f"{few} instructions became {many}"


def test_host_time_bench_measures_all_cases(tmp_path, capsys):
    file = tmp_path / "times.json"
    sizes = ["--batch", "2", "--pages", "50", "--waiting", "3", "--steps", "2"]
    assert host_time.main([*sizes, "--json", str(file)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "2 running requests"
    assert len(lines) == 1 + 4 * len(host_time.CASES)
    assert '"waiting": 3' in file.read_text()
    with pytest.raises(SystemExit):
        host_time.main(["--pages", "0"])
