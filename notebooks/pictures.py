"""What the notebook shows of a run: a curve that grows, the timeline of slots, and tables of rollouts.

Pictures are PNG with a description, so that they need no script of the page. Texts of rollouts are escaped.
"""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import drawing
import plot_rounds
from IPython.display import HTML, display

REWARD, LENGTH = "critic/score/mean", "response_length/mean"
BLUE, ORANGE = "#4a7fb5", "#e0a458"


class Curve:
    """Draws reward and length by step while a run goes on: a callback of jaxrl_post.train. `steps`: of the run."""

    def __init__(self, steps: int):
        self.steps, self.rows = steps, []
        self.shown = display(self._picture(), display_id=True)

    def __call__(self, row: Mapping[str, float]) -> None:
        if REWARD in row:
            self.rows.append((row["step"], row[REWARD], row[LENGTH]))
            self.shown.update(self._picture())

    def _picture(self) -> HTML:
        picture = drawing.figure(8.0, 2.6)
        reward, length = picture.subplots(1, 2)
        steps, *columns = zip(*self.rows) if self.rows else ((), (), ())
        for axes, title, values, color in zip(
            (reward, length), ("mean reward", "mean length, tokens"), columns, (BLUE, ORANGE)
        ):
            axes.plot(steps, values, color=color, marker=".")
            axes.set_title(title, loc="left")
            axes.set_xlim(0, self.steps + 1)
            axes.set_ylim(0, None if self.rows and axes is length else 1)
            axes.set_xlabel("optimizer step")
        last = f"{self.rows[-1][1]:.2f} at step {self.rows[-1][0]:.0f}" if self.rows else "no step yet"
        return _image(picture, f"Reward and length by optimizer step; reward {last}")


def timeline(panels: Mapping[str, Path], rounds: slice) -> HTML:
    """Returns the rounds of runs below one another, slot by slot. panels: title -> folder of a run with a trace."""
    drawn = [
        plot_rounds.panel(plot_rounds.read(next(folder.glob("trace_*.json"))), title, rounds, False)
        for title, folder in panels.items()
    ]
    said = "; ".join(f"{one.title}: {one.length:.3g} s, {one.bubble():.0%} of slot time idle" for one in drawn)
    return _image(plot_rounds.draw(drawn, False), f"Timeline of slots. {said}")


def _image(picture: Any, description: str) -> HTML:
    """Returns a picture as an element of the page, which keeps its description in every frontend and when it is exported."""
    file = io.BytesIO()
    picture.savefig(file, format="png", dpi=110)
    data = base64.b64encode(file.getvalue()).decode()
    return HTML(
        f'<img alt="{html.escape(description)}" src="data:image/png;base64,{data}" style="max-width: 100%; background: white">'
    )


def rollouts(rows: Sequence[Mapping[str, Any]]) -> HTML:
    """Returns a table of rollouts of a run: step, prompt, text, reward, length, and mean log-prob of a token."""
    heads = ("step", "prompt", "rollout", "reward", "tokens", "mean log-prob")
    cells = (
        (
            row["step"],
            row["prompt"],
            row["text"],
            "none" if row["reward"] is None else f"{row['reward']:.2g}",
            len(row["tokens"]),
            f"{row['logprobs'].mean():.3f}",
        )
        for row in rows
    )
    return _table(heads, cells)


def before_and_after(
    prompts: Sequence[str], before: Sequence, after: Sequence, right: Callable[[str, str], bool]
) -> HTML:
    """Returns a table of the rollouts of two policies for each prompt, with a mark at those that are right.

    before, after: what `generate` returned, [prompt][sample]. right: whether a text is right for a prompt.
    """

    def texts(prompt: str, found: Sequence) -> str:
        return "\n".join(f"{'✓' if right(prompt, one.text) else '✗'} {one.text}" for one in found)

    rows = ((prompt, texts(prompt, old), texts(prompt, new)) for prompt, old, new in zip(prompts, before, after))
    return _table(("prompt", "before", "after"), rows)


def _table(heads: Sequence[str], rows: Any) -> HTML:
    style = "text-align: left; white-space: pre-wrap; vertical-align: top"
    cells = lambda tag, row: "".join(f'<{tag} style="{style}">{html.escape(str(cell))}</{tag}>' for cell in row)  # noqa: E731
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return HTML(f"<table><thead><tr>{cells('th', heads)}</tr></thead><tbody>{body}</tbody></table>")
