"""The program that measures what each layer costs: its arithmetic, and that the guide has its rows."""

import doctest
import importlib.util
from pathlib import Path

PROGRAM = Path(__file__).parent / "costs" / "costs.py"
GUIDE = Path(__file__).parents[2] / "docs" / "python.md"


def load():
    spec = importlib.util.spec_from_file_location("costs", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_examples_of_the_program_hold():
    tested = doctest.testmod(load())
    assert tested.failed == 0 and tested.attempted > 0


def test_cells_compare_the_lowest_rounds():
    costs, case = load(), (2, 8)
    found = {(costs.BASE, case): [(9e-6, 2e-6), (5e-6, 3e-6)], ("C", case): [(6e-6, 1e-6), (8e-6, 1e-6)]}
    assert costs.cells(found, "C", case) == ["7.0 (6.0 to 8.0)", "1.0", "1.0 (1.0 to 1.0)"]
    assert costs.cells(found, costs.BASE, case)[1] == ""


def test_figures_are_of_the_slowest_rank_and_of_all_processors():
    assert load().figures("0.5 0.25\n0.75 0.75\n") == (0.75, 0.5)


def test_guide_has_the_rows_of_the_program():
    costs = load()
    # Rows that need no program to be named.
    rows = object.__new__(costs.Costs)
    rows.rust = rows.c = ""
    guide = GUIDE.read_text().split("### What each layer costs", 1)[1].split("\n### ", 1)[0]
    assert all(guide.count(f"\n| {name} | ") == 4 for name in rows.layers())
