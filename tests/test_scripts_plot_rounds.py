"""Pictures of rounds: what is drawn against a trace written by hand, and pixels against the shapes."""

from __future__ import annotations

import struct
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import drawing
import plot_rounds

from jaxrl_post.telemetry.trace import TraceFile


def traced(path):
    """Two rounds over two slots: 10 steps in seconds 0 to 1 and a second of training; 20 steps in 2 to 4, one of training."""
    pieces = []
    file = TraceFile(pieces.append)
    answer = {"again": False, "finish": "eos"}
    file.span("ring", "engine", "10 steps", 0, 1, clock=10)
    file.span("ring", "learner", "update_actor", 1, 2)
    file.span("ring", "round", "round to version 1", 0, 2)
    file.span("replica 0", "slot 000", "p #0", 0, 1, **answer)
    file.span("replica 0", "slot 001", "p #1", 0, 0.5, **answer)
    file.span("ring", "engine", "20 steps", 2, 4, clock=30)
    file.span("ring", "round", "round to version 2", 2, 5)
    file.span("replica 0", "slot 000", "q #0", 2, 4, **answer | {"again": True})
    file.span("replica 0", "slot 001", "q #1", 2, 4, **answer | {"finish": "parked"})
    file.close()
    path.write_text("".join(pieces))
    return path


def test_the_bubble_is_what_slots_are_idle_while_a_round_generates(tmp_path):
    spans = plot_rounds.read(traced(tmp_path / "t.json"))
    both, first, second = (plot_rounds.panel(spans, "t", slice(*which), False) for which in ((0, None), (0, 1), (1, 2)))
    assert both.length == 5 and first.length == 2 and second.length == 3
    assert both.windows() == [(0, 1), (2, 4)]
    assert both.bubble() == pytest.approx(0.5 / 6) and first.bubble() == pytest.approx(0.25) and second.bubble() == 0


def test_in_steps_only_the_engine_takes_time(tmp_path):
    both = plot_rounds.panel(plot_rounds.read(traced(tmp_path / "t.json")), "t", slice(None), True)
    assert both.length == 30 and both.windows() == [(0, 10), (10, 30)]
    assert {(s.name, s.start, s.end) for s in both.spans if s.track[0] == "replica 0"} == {
        ("p #0", 0, 10),
        ("p #1", 0, 5),
        ("q #0", 10, 30),
        ("q #1", 10, 30),
    }
    assert both.bubble() == pytest.approx(5 / 60)


@pytest.mark.parametrize("steps", [False, True])
def test_every_answer_is_drawn_in_its_colour_and_place(tmp_path, steps):
    one = plot_rounds.panel(plot_rounds.read(traced(tmp_path / "t.json")), "t", slice(None), steps)
    picture = plot_rounds.draw([one, one], steps)
    drawn = [shape for shape in picture.shapes if shape[0] == "rectangle"]
    for kind, count in (("ended", 2), ("again", 1), ("parked", 1), ("bubble", 2)):
        assert sum(shape[-1] == plot_rounds.COLORS[kind] for shape in drawn) == 2 * count
    scale = (plot_rounds.WIDTH - plot_rounds.LEFT - 20) / one.length
    start, end = (10, 30) if steps else (2, 4)
    again = next(shape for shape in drawn if shape[-1] == plot_rounds.COLORS["again"])
    assert again[1] == pytest.approx(plot_rounds.LEFT + start * scale)
    assert again[3] == pytest.approx((end - start) * scale - 0.6)
    root = ElementTree.fromstring(picture.svg())
    assert len(root.findall("{http://www.w3.org/2000/svg}rect")) == len(drawn) + 1


def pixels(data):
    """Of a PNG of 8 bits, RGB, every row unfiltered: [H, W, 3]."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        assert struct.unpack(">I", data[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + body)
        chunks[name] = body
        at += 12 + size
    width, height, depth, kind, *_ = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert (depth, kind) == (8, 2) and not rows[:, 0].any() and list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    return rows[:, 1:].reshape(height, width, 3)


def test_a_png_has_the_shapes_and_letters_of_the_picture():
    picture = drawing.Picture(40, 30)
    picture.rectangle(5, 6, 10, 4, "#ff0000")
    picture.rectangle(20, 6, 0.2, 0.2, "#0000ff")
    picture.text(2, 15, "I1", "#00ff00")
    found = pixels(picture.png())
    red = np.zeros((30, 40), bool)
    red[6:10, 5:15] = True
    assert np.array_equal((found == (255, 0, 0)).all(axis=2), red)
    assert (found == (0, 0, 255)).all(axis=2).sum() == 1  # nothing short vanishes
    green = (found == (0, 255, 0)).all(axis=2)[15:25:2, 2:16:2]
    assert ["".join(".#"[int(on)] for on in row) for row in green] == [
        "###..#.",
        ".#..##.",
        ".#...#.",
        ".#...#.",
        "###.###",
    ]


def test_what_cannot_be_drawn_is_one_sentence(tmp_path, capsys):
    file, out = traced(tmp_path / "trace_000000.json"), tmp_path / "a.png"
    assert (
        plot_rounds.main([str(tmp_path), "--out", str(out), "--rounds", "1:2", "--title", "one"]) == 0 and out.is_file()
    )
    assert "one: 3 seconds, bubble 0%" in capsys.readouterr().out
    for arguments, sentence in (
        ([str(file), "--rounds", "7:9"], "rounds 7:9 were not traced; it has 2"),
        ([str(file), "--replicas", "1:"], "replicas 1: were not traced; it has 1"),
        ([str(file), "--rounds", "3"], "'3' must be A:B"),
        ([str(tmp_path / "no.json")], "not a whole trace"),
        ([str(file), "--out", "a.gif"], "must end in"),
    ):
        assert plot_rounds.main([*arguments, *([] if "--out" in arguments else ["--out", str(out)])]) == 1
        assert sentence in capsys.readouterr().err
