"""docs/figures.json: its records are whole, and docs/benchmarks.md shows the same numbers under their ids."""
import re

import pytest
from conftest import ROOT

from measure import figures

PAGE = (ROOT / "docs/benchmarks.md").read_text()


def numbers(cell):
    """The numbers of a cell: [value] or [value, least, most]; the peer's name behind a comma has none."""
    cell = re.sub(r", \[?[a-zA-Z].*", "", cell)
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", cell)]


def rows():
    """{column: cell} of each row of the page's tables."""
    names = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            names = []
        elif not names:
            names = cells
        elif set(line) - set("|-"):
            yield dict(zip(names, cells, strict=True))


def expected(figure, column):
    """The numbers that a figure has for a column of the page."""
    peer = (figure.get("others") or [{}])[0]
    if column == "ratio (least-most)":
        keys = ["ratio", "ratio_low", "ratio_high"]
    elif column == "published":
        keys = ["published"]
    elif column in ("ours", "best other"):
        keys = ["value"]
    else:
        keys = ["value", "low", "high"]
    record = peer if column in ("best other", "ratio (least-most)") else figure
    return [record[key] for key in keys if key in record]


def test_the_page_shows_the_numbers_of_the_records():
    records = figures.read()
    seen = []
    for row in rows():
        ids = row["id"].split()
        seen += ids
        columns = [name for name in row if name not in ("what", "cores", "stage", "id")]
        for id, column in zip(ids if len(ids) > 1 else ids * len(columns), columns, strict=True):
            assert numbers(row[column]) == expected(records[id], column), (id, column)
        assert row.get("cores", "") in records[ids[0]].get("machine", ""), row
    assert len(seen) == len(set(seen)) > 35
    assert set(re.findall(r"\b[DFGKMPQRSTY]\d+\b", PAGE)) <= records.keys()


def test_the_best_other_has_the_least_ratio():
    for figure in figures.read().values():
        ratios = [peer["ratio"] for peer in figure.get("others", ()) if "ratio" in peer]
        assert ratios == sorted(ratios), figure["id"]


def test_every_measured_figure_has_its_machine_date_and_command():
    records = figures.read()
    assert len(records) == (ROOT / "docs/figures.json").read_text().count('"id": ')
    for figure in records.values():
        if "published_by" in figure:
            assert "source" in figure and figure.keys() & {"published", "published_low"}, figure
            if "value" not in figure:
                continue
        assert {"what", "machine", "versions", "date"} <= figure.keys(), figure
        assert re.fullmatch(r"2026-11(-\d\d)?", figure["date"]), figure
        assert "command" in figure or "command" in figure.get("note", ""), figure
        assert figure.keys() & {"value", "values", "low", "ratio", "ratio_low", "more"}, figure
        if "low" in figure:
            assert figure["low"] <= figure.get("value", figure["high"]) <= figure["high"], figure


def test_pages_that_link_to_a_figure_name_one():
    known = figures.read().keys() | {"figures.json"}
    for page in (ROOT / "docs").glob("*.md"):
        assert set(re.findall(r"\[([^\]]+)\]\(figures\.json\)", page.read_text())) <= known, page.name


def test_the_command_prints_figures(capsys):
    assert figures.main(["T2", "R6"]) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^## (\w+):", printed, re.M) == ["T2", "R6"]
    assert "- value: 41,800\n" in printed and "- command: python bench.py --stage=train --peers\n" in printed
    assert figures.main([]) == 0
    assert re.findall(r"^## (\w+):", capsys.readouterr().out, re.M) == list(figures.read())


@pytest.mark.parametrize("argv", [["X1"], ["T2", "t2"]])
def test_an_unknown_id_is_refused(argv, capsys):
    assert figures.main(argv) == 2
    assert f"no figure {argv[-1]}" in capsys.readouterr().err
