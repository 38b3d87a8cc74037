"""Pictures of rounds: what is drawn against a trace written by hand, and pixels against the shapes."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))

import draw_two_rounds
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


def boxes(axes, name):
    """(left, bottom, width, height) of each rectangle of that name, by left and bottom."""
    (found,) = [one for one in axes.collections if one.get_label() == name]
    corners = [path.get_extents() for path in found.get_paths()]
    return np.array(sorted((box.x0, box.y0, box.width, box.height) for box in corners))


@pytest.mark.parametrize("steps", [False, True])
def test_every_rollout_is_drawn_in_its_colour_and_place(tmp_path, steps):
    one = plot_rounds.panel(plot_rounds.read(traced(tmp_path / "t.json")), "t", slice(None), steps)
    picture = plot_rounds.draw([one, one], steps)
    assert len(picture.axes) == 2
    for axes in picture.axes:
        first, second = ((0, 10), (10, 20)) if steps else ((0, 1), (2, 2))  # start and length of each round
        for name, shapes in {
            "idle slot": [(first[0], 0, first[1], 2), (second[0], 0, second[1], 2)],
            "finished": [(0, 0.1, first[1] / 2, 0.8), (0, 1.1, first[1], 0.8)],  # slot 0 lies above slot 1
            "continued": [(second[0], 1.1, second[1], 0.8)],
            "parked": [(second[0], 0.1, second[1], 0.8)],
        }.items():
            np.testing.assert_allclose(boxes(axes, name), shapes)
        assert axes.get_xlim() == (0, 30 if steps else 5)
        named = [label.get_text() for label in axes.get_yticklabels()]
        assert named == (["2 slots"] if steps else ["2 slots", "learner", "engine"])
    if not steps:
        np.testing.assert_allclose(boxes(picture.axes[0], "engine"), [(0, 6.4, 1, 3.2), (2, 6.4, 2, 3.2)])
        np.testing.assert_allclose(boxes(picture.axes[0], "learner"), [(1, 2.4, 1, 3.2)])
    words = [text.get_text() for text in picture.legends[0].get_texts()]
    assert words == [*([] if steps else ["engine", "learner"]), "finished", "continued", "parked", "idle slot"]


def test_pixels_of_a_png_have_the_colours_of_the_shapes(tmp_path):
    from matplotlib import image

    one = plot_rounds.panel(plot_rounds.read(traced(tmp_path / "t.json")), "t", slice(None), False)
    picture, out = plot_rounds.draw([one], False), tmp_path / "a.png"
    drawing.save(picture, out)
    pixels, (axes,) = np.round(image.imread(out)[:, :, :3] * 255).astype(int), picture.axes
    width, height = picture.get_size_inches() * picture.dpi
    for point, color in (
        ((0.75, 0.5), plot_rounds.COLORS["bubble"]),  # slot 1 is idle in the second half of the first round
        ((0.25, 0.5), plot_rounds.COLORS["ended"]),
        ((3.0, 1.5), plot_rounds.COLORS["again"]),
        ((3.0, 0.5), plot_rounds.COLORS["parked"]),
        ((1.5, 4.0), plot_rounds.PARTS["learner"]),
        ((1.5, 0.5), "#ffffff"),
    ):
        x, y = axes.transData.transform(point)
        row, column = int((1 - y / height) * len(pixels)), int(x / width * pixels.shape[1])
        assert tuple(pixels[row, column]) == tuple(bytes.fromhex(color[1:])), point


def test_the_same_picture_twice_is_the_same_file(tmp_path):
    one = plot_rounds.panel(plot_rounds.read(traced(tmp_path / "t.json")), "a & b", slice(None), False)
    for name in ("a.svg", "b.svg"):
        drawing.save(plot_rounds.draw([one], False), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "a & b: 2 rounds in 5 s, 8 % of slot time idle while generating" in texts(tmp_path / "a.svg")


def texts(file):
    """The words of an SVG."""
    return [node.text for node in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]


def test_the_committed_picture_is_what_the_simulator_gives():
    both = draw_two_rounds.panels()
    drawn = texts(Path(__file__).resolve().parents[1] / "docs" / "two-rounds.svg")
    for one in both:
        start = f"{one.title}: 2 rounds in {one.length:.4g} s, {100 * one.bubble():.0f} % of slot time"
        assert any(text.startswith(start) for text in drawn), start
    before, after = (sorted(s.name for s in one.spans if s.track in one.slots) for one in both)
    assert len(before) == 128 and set(before) == set(after)  # the same rollouts; parked ones have two spans


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
