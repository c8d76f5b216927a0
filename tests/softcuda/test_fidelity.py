"""The table of fidelity (native/softcuda/FIDELITY.md) covers the functions of the soft device."""

from __future__ import annotations

import ctypes
import re
from fnmatch import fnmatchcase

import pytest
import softcuda_util as util

LEVELS = ("exact", "approximate", "refused", "unsupported")


def rows() -> list[tuple[str, list[str], str]]:
    """Return the group, the patterns and the level of each row."""
    found = []
    for line in (util.SOURCE / "FIDELITY.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 4 and "`" in cells[1]:
            found.append((cells[0], re.findall("`(.*?)`", cells[1]), cells[2]))
    return found


def matches(function: str, *levels: str) -> list[str]:
    """Return the groups of the rows with these levels that contain a function."""
    name = re.sub(r"_v\d+$", "", function)
    found = []
    for group, patterns, level in rows():
        found += [group for pattern in patterns if level in levels and fnmatchcase(name, pattern)]
    return found


@pytest.fixture(scope="module")
def exported() -> set[str]:
    """Names of the functions that the soft device's sources export.

    Macros make some of the names from parts, so that they are read from the library itself.
    """
    from graft.cudagraph.driver import chooser

    image = chooser.soft_library().read_bytes()
    library = ctypes.CDLL(str(chooser.preload_soft()))
    words = set(re.findall(rb"\0((?:cu[A-Z]|softcuda_)\w+)(?=\0)", image))
    return {word.decode() for word in words if hasattr(library, word.decode())}


def test_fidelity_levels_are_defined():
    assert len(rows()) > 30 and {level for _, _, level in rows()} == set(LEVELS)
    groups = [group for group, _, _ in rows()]
    assert len(set(groups)) == len(groups)


def test_fidelity_lists_each_exported_function_once(exported):
    assert len(exported) > 340 and {"cuInit", "cuMemAlloc_v2", "softcuda_live"} <= exported
    assert {
        name: matches(name, *LEVELS) for name in exported if len(matches(name, *LEVELS)) != 1
    } == {}
    assert [name for name in exported if matches(name, "unsupported")] == []


def test_fidelity_lists_each_function_of_the_driver():
    from cuda.bindings import driver

    functions = [name for name in dir(driver) if re.match("cu[A-Z]", name)]
    functions = [name for name in functions if callable(getattr(driver, name))]
    assert len(functions) > 450
    assert [name for name in functions if not matches(name, *LEVELS)] == []


def test_fidelity_has_no_pattern_without_function(exported):
    from cuda.bindings import driver

    names = {re.sub(r"_v\d+$", "", name) for name in (*exported, *dir(driver))}
    patterns = [pattern for _, patterns, _ in rows() for pattern in patterns]
    assert len(set(patterns)) == len(patterns)
    assert [p for p in patterns if not any(fnmatchcase(name, p) for name in names)] == []


def test_refused_functions_refuse(soft):
    (refused,) = [patterns for _, patterns, level in rows() if level == "refused"]
    assert refused == ["cuGetExportTable"]
    assert util.code(soft.d.cuGetExportTable(soft.d.CUuuid())) == "NOT_FOUND"
    assert "undocumented functions" in soft.refusal()
