"""List of all sections.

A new section is a function that takes a `Session`, and a line in `SECTIONS`. The function calls
`Session.case` for each part that may fail, and a part calls `Session.check` or `Session.add`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from graft.tools.gpu_first import checks, measurements, programs, sampling
from graft.tools.gpu_first.session import Session


class Section(NamedTuple):
    """A section of the run. `run` executes its cases one after another with `Session.case`."""

    run: Callable[[Session], None]
    limit_s: float  #: time limit of the section
    case_limit_s: float = 30.0  #: time limit of a case


#: Sections by name in the order in which they run.
SECTIONS = {
    "compile": Section(measurements.compile_kernels, 80, 75),
    "truth_linears": Section(checks.check_linears, 45, 15),
    "truth_epilogues": Section(checks.check_epilogues, 25, 10),
    "truth_attention": Section(checks.check_attention, 15, 10),
    "truth_model": Section(checks.check_model, 15, 12),
    "truth_races": Section(checks.check_races, 15, 10),
    "truth_hops": Section(checks.check_hops, 10, 8),
    "truth_sampling": Section(checks.check_sampling, 20, 10),
    "sanitizer": Section(programs.check_memory, 40, 38),
    "ceilings": Section(measurements.measure_ceilings, 12),
    "forward": Section(measurements.measure_forward, 25),
    "linears": Section(measurements.measure_linears, 25),
    "attention": Section(measurements.measure_attention, 12),
    "sampling": Section(sampling.measure_sampling, 15),
    "rounds": Section(measurements.measure_rounds, 60),
    "gaps": Section(measurements.measure_gaps, 14),
    "hops": Section(measurements.measure_hops, 15),
    "cublas": Section(measurements.measure_cublas, 15),
    "ncu": Section(programs.profile, 40, 38),
    "suite": Section(programs.run_tests, 590, 590),
}
