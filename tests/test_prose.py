"""Prose of pages and sources: how sentences are found, and that no source has findings."""

from __future__ import annotations

import prose
import pytest

LONG = "word " * 31


def test_sources_have_no_findings():
    found = prose.unclean()
    assert not found, "\n".join(line for lines in found.values() for line in lines)


def test_the_glossary_retires_words_and_uses_none():
    words = prose.retired()
    assert len(words) >= 10 and all(words.values())
    assert words["favourites"] == "argmax token"
    assert not prose.findings(prose.of_page("The rollout was told apart by its argmax token."), {"argmax": "x"})[1:]


def texts(sentences):
    return [one.text for one in sentences]


def test_sentences_of_a_page():
    page = "# A heading\n\nOne sentence. Another, e.g. this one, with `a. b. C` in it.\nIt goes on? Yes.\n\n"
    page += "- an item\n- two\n  lines\n"
    page += (
        "\n| a cell | Two. Cells. |\n|---|---|\n\n```\nnot. Prose.\n```\n<!-- nor. This. -->\n[A link](to.md#x) ends.\n"
    )
    assert texts(prose.of_page(page)) == [
        "A heading",
        "One sentence.",
        "Another, e.g. this one, with <abC> in it.",
        "It goes on?",
        "Yes.",
        "an item",
        "two lines",
        "a cell",
        "Two.",
        "Cells.",
        "---",
        "---",
        "A link ends.",
    ]
    assert prose.of_page("one two\n\nthree")[1].line == 3


def test_a_number_at_the_end_of_a_sentence_is_no_item():
    source = '"""On 32 H800. Lengths are 4.\n\n1. An item. More.\n"""'
    assert texts(prose.of_source(source)) == ["On 32 H800.", "Lengths are 4.", "An item.", "More."]


def test_sentences_of_a_source():
    source = '''"""Does a thing. Then
another.

    python -m a.command --with=flags.  And more.

Args:
  first: what it is, over
    two lines. Two sentences.
  second: more.

| a cell | another. Two |
"""
# ---- a heading
x = 1  # a comment
# Two lines
# of one comment.
y = "not. A comment"  # noqa: E501


class A:
    """Of a class."""
'''
    assert texts(prose.of_source(source)) == [
        "Does a thing.",
        "Then another.",
        "Args:",
        "first: what it is, over two lines.",
        "Two sentences.",
        "second: more.",
        "a cell",
        "another.",
        "Two",
        "a heading",
        "a comment",
        "Two lines of one comment.",
        "Of a class.",
    ]


@pytest.mark.parametrize(
    "text, found",
    [
        ("class GuestBook: pass", 1),
        ("def f(a_guest): return self._guests", 1),
        ("guesthouse = guest = 1", 1),
        ("x.put_off(y)", 1),
        ("computed_offset = 'guest'  # guest", 0),
        ("carry_over = 1", 0),
    ],
)
def test_a_retired_word_in_an_identifier_is_found(text, found):
    words = {"guest": "lent devices", "put off": "defer", "carry-over": "swap policy"}
    assert len(prose.of_identifiers(text, words, "a.py")) == found


@pytest.mark.parametrize("text", [f'"""{LONG}"""', f"# {LONG}", f'def f():\n    """Short.\n\n    {LONG}\n    """\n'])
def test_a_planted_long_sentence_is_found(text):
    (line,) = prose.findings(prose.of_source(text, "a.py"), {})
    assert "31 words" in line


@pytest.mark.parametrize(
    "text, found", [("what was told here", 1), ("a toldx word, retold", 0), ("Told.", 1), ("`told` in code", 0)]
)
def test_a_planted_retired_word_is_found(text, found):
    assert len(prose.findings(prose.of_page(text), {"told": "given"})) == found
