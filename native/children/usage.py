"""Time limits of calls, and the time that a child process has used for a call.

On a busy machine, a process may wait for a processor most of the time. Whether a call exceeds a
limit of the elapsed time would then depend on the other processes of the machine. The time of a
call therefore includes the time in which its process computes or is blocked, but not the time in
which the process waits for a processor or is stopped by a signal. A separate limit of the elapsed
time ensures that a caller does not wait much longer than the limit that it has set.
"""

from __future__ import annotations

import os
import time

__all__ = ["ProcessClock", "TimeLimit", "memory_of"]

# Minimum of the limit of `TimeLimit.elapsed_s`, in seconds. The elapsed time includes the time in
# which the process waits for a processor, so its limit may be longer than that of
# `TimeLimit.used_s`.
_MIN_ELAPSED_S = 30.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_CPUCLOCK_SCHED = 2  # bits of a clock id that select processor time, see clock_getcpuclockid(3)


class TimeLimit:
    """Time that several calls may use together, in seconds.

    Parameters
    ----------
    seconds
        Limit of `used_s`. The limit of `elapsed_s` is the same, but at least 30 s.

    Attributes
    ----------
    used_s
        Time that the calls have used so far, as `ProcessClock.sample` measures it.
    elapsed_s
        Elapsed time of the calls so far, including the time in which their process waited.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self.used_s = 0.0
        self.elapsed_s = 0.0

    @property
    def remaining_s(self) -> float:
        """Time that the calls may still use."""
        return self.seconds - self.used_s

    @property
    def is_over(self) -> bool:
        """Whether `used_s` or `elapsed_s` has reached its limit."""
        return self.remaining_s <= 0 or self.elapsed_s >= max(self.seconds, _MIN_ELAPSED_S)


class ProcessClock:
    """Samples the time that a child process uses.

    Parameters
    ----------
    pid
        Process id of a child that has not been reaped.

    Attributes
    ----------
    stopped_s
        Time since the process was stopped by a signal such as SIGSTOP; 0 if it is not stopped.
    """

    def __init__(self, pid: int):
        self.stopped_s = 0.0
        self._pid = pid
        self._elapsed = time.monotonic()
        self._processor = self._processor_s()

    def sample(self) -> float:
        """Return the seconds that the process has used since the previous sample.

        If a thread of the process is runnable or waits for a disk, only processor time counts. If
        all threads are blocked, the elapsed time counts, so that a deadlock exceeds every limit. If
        the process is stopped, no time counts.
        """
        now = time.monotonic()
        processor = self._processor_s()
        elapsed_s = now - self._elapsed
        used_s = min(elapsed_s, max(0.0, processor - self._processor))
        self._elapsed = now
        self._processor = processor
        states = self._states()
        if "T" in states:
            self.stopped_s += elapsed_s
            return used_s
        self.stopped_s = 0.0
        return used_s if states & {"R", "D"} else elapsed_s

    def _processor_s(self) -> float:
        """Return the processor time of all threads of the process, in seconds."""
        try:
            return time.clock_gettime((~self._pid << 3) | _CPUCLOCK_SCHED)
        except OSError:  # the process has ended
            return 0.0

    def _states(self) -> set[str]:
        """Return the states of the threads, as in ``/proc/PID/stat``; empty if they are unknown."""
        states = set()
        folder = f"/proc/{self._pid}/task"
        try:
            for task in os.listdir(folder):
                with open(f"{folder}/{task}/stat", encoding="utf-8", errors="replace") as stat:
                    fields = stat.read().rpartition(")")[2].split()
                states.add(fields[0])
        except (OSError, IndexError):  # a thread has ended
            pass
        return states


def memory_of(pid: int) -> tuple[int, int]:
    """Return the address space and the resident memory of a child process, in bytes.

    Both are 0 if the process has ended. The process must not have been reaped.
    """
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
            mapped, resident, *_ = map(int, statm.read().split())
    except (OSError, ValueError):
        return 0, 0
    return mapped * _PAGE_BYTES, resident * _PAGE_BYTES
