"""docs/diagnosis says what the rules say."""

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.diagnosis import FOLDER, LARGEST, SUFFICIENT, pages, sufficient, undecided
from cavesson.doctor.rules import RULES

PICTURES = json.loads((FOLDER / "pictures.json").read_text("utf-8"))


def test_the_pages_are_those_that_the_rules_make():
    made = pages(PICTURES)
    committed = {file.name: file.read_text("utf-8") for file in FOLDER.glob("*.md")}
    wrong = [name for name in made.keys() | committed.keys() if made.get(name) != committed.get(name)]
    assert wrong == [], "run python -m benchmarks.diagnosis"
    assert len(made) == len(RULES) + 1


def test_a_recorder_knows_which_columns_suffice_for_each_rule():
    assert SUFFICIENT.read_text("utf-8") == sufficient(), "run python -m benchmarks.diagnosis"


def test_what_a_record_cannot_show_is_said_of_numbers_that_have_a_rule():
    page = (FOLDER.parent / "doctor.md").read_text("utf-8")
    section = page.partition("## What a record cannot show")[2].partition("\n## ")[0]
    assert "Every known failure has a rule" in section
    assert sorted(rule.number for rule in RULES) == list(range(1, len(RULES) + 1))
    assert len(undecided()) == sum(line.startswith("|") for line in section.splitlines()) - 2 > 0
    for rule in RULES:
        written = (FOLDER / f"{rule.name}.md").read_text("utf-8")
        assert ("**Not visible in a record:**" in written) == (rule.number in undecided())
        assert undecided().get(rule.number, "") in written


def test_a_page_has_a_picture_or_says_why_not():
    assert len(PICTURES) > 60
    for rule in RULES:
        written = (FOLDER / f"{rule.name}.md").read_text("utf-8")
        assert written.count(f"](pictures/{rule.name}.svg)") == (rule.name in PICTURES and PICTURES[rule.name]["drawn"])
        assert ("*No picture: " in written) == (rule.name not in PICTURES)
        assert "none of the runs shows it" not in written, "prose.toml says why the rule has no picture"


def test_every_page_is_reached_from_the_index():
    index = (FOLDER / "README.md").read_text("utf-8").partition("\n## Translations\n")[0]
    assert [rule.name for rule in RULES if index.count(f"({rule.name}.md)") != 1] == []


def test_every_picture_that_is_spoken_of_is_there_and_small():
    drawn = {name for name, picture in PICTURES.items() if picture["drawn"]}
    files = {file.stem: file for file in (FOLDER / "pictures").glob("*.svg")}
    assert files.keys() == drawn and len(drawn) > 20
    assert max(file.stat().st_size for file in files.values()) <= LARGEST


@pytest.mark.parametrize("name", sorted(name for name, picture in PICTURES.items() if picture["drawn"]))
def test_a_picture_is_a_curve_that_asks_for_nothing(name):
    root = ElementTree.parse(FOLDER / "pictures" / f"{name}.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    kinds = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert kinds.count("polyline") == 1 and set(kinds) <= {"svg", "style", "rect", "path", "text", "polyline"}
    assert not any(name.rpartition("}")[2] in ("href", "src") for element in root.iter() for name in element.attrib)


def test_the_questions_are_the_same_in_all_languages_and_lead_somewhere():
    docs = FOLDER.parent
    texts = [(docs / name).read_text("utf-8") for name in ("faq.md", "faq.zh.md", "faq.vi.md")]
    links = [re.findall(r"\]\((diagnosis/[^)]+)\)", text) for text in texts]
    assert links[0] == links[1] == links[2] and len(links[0]) > 30
    assert [link for link in links[0] if not (docs / link).exists()] == []
    assert len({text.count("\n## ") for text in texts}) == 1
