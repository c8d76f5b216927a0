"""The page of the conformance suite lists its rows."""

import re

from public_issues import PAGE, PROJECTS, named_tests, page, themes


def test_page_has_all_rows():
    """Run tests/conformance/public_issues.py to write the page."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_conformance_test_has_a_row():
    for theme in themes():
        named = {name for name in vars(theme) if name.startswith("test_")}
        assert named == named_tests(theme).keys()


def test_issues_are_listed_once():
    links = re.findall(r"^\| \[([^]]+)\]", page(), flags=re.M)
    assert len(links) == len(set(links)) >= 40
    assert {link.rpartition(" ")[0] for link in links} == PROJECTS.keys()


def test_page_names_tests_that_exist():
    """The section about changes of graft names only tests with rows."""
    _, _, section = PAGE.read_text(encoding="utf-8").partition("## Evidence")
    named = {f"test_{name}" for name in re.findall(r"`([a-z_0-9]{12,}|dead_end)`", section)}
    assert len(named) > 20
    assert named <= {name for theme in themes() for name in named_tests(theme)}
