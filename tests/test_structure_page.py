"""The table of families says what is seen of each."""

from __future__ import annotations

import pytest

from tests.structure_page import BEGIN, END, FAMILIES, PAGE, line

# One of each way to be built; `make test-all` has all of them.
FEW = ("Llama", "GPT-OSS", "GPT-2", "OPT", "BERT", "ViT", "T5", "BART")


def written():
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].splitlines()


EACH = [pytest.param(one, id=one.name, marks=() if one.name in FEW else (pytest.mark.slow,)) for one in FAMILIES]


@pytest.mark.parametrize("family", EACH)
def test_the_table_says_what_is_seen(family):
    assert line(family) in written(), "make architectures writes the table"


def test_the_table_has_all_of_them():
    assert [row.split(" | ")[0].removeprefix("| ") for row in written()[2:]] == [one.name for one in FAMILIES]
