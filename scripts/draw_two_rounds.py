"""Draws docs/two-rounds.svg: two synchronous rounds, and the same rollouts under tail batching, by the simulator.

    python scripts/draw_two_rounds.py [--out FILE]

Both simulations train on the same 16 prompts x 8 rollouts, with lengths of RollPacker's fitted workload (arXiv 2509.21009) of
at most 8k tokens. Qwen2.5-7B on four H800, seconds from the analytic step cost. The seed is the default one, and the rounds are
the first two. `over=2` starts all 16 prompts in the short round and trains on the 8 that finish first. The command also prints
how many times less twelve rounds take. Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import drawing  # noqa: E402
import plot_rounds  # noqa: E402

from jaxrl_post.simulate import settings, simulation  # noqa: E402

DEVICES = 4
TOKEN_S = 6 * 7.62e9 / (0.4 * 9.9e14) / DEVICES  # 6 operations a weight and token, at 40 % of an H800's peak
SHARED = (
    "workload.name=rollpacker",
    "workload.cap=8192",
    "workload.prompts=1024",
    f"cluster.replicas={DEVICES}",
    "cluster.slots=32",
    f"learner.token_s={TOKEN_S}",
    "scheduler.prompts=8",
    "scheduler.group_size=8",
)
MODES = {
    "Before, synchronous rounds": (),
    "After, tail batching": ("scheduler.name=tail_batching", "scheduler.over=2.0", "scheduler.prefix_mode=recompute"),
}


def panels(rounds: int = 2) -> list[plot_rounds.Panel]:
    """Returns the first rounds of both simulations, in simulated seconds."""
    return [_panel(title, (f"rounds={rounds}", *SHARED, *overrides)) for title, overrides in MODES.items()]


def ratio(before: plot_rounds.Panel, after: plot_rounds.Panel) -> float:
    """Returns how many times less time the second takes."""
    return before.length / after.length


def _panel(title: str, overrides: tuple[str, ...]) -> plot_rounds.Panel:
    pieces: list[str] = []
    simulation.run(settings.resolve(settings.default(), overrides), pieces.append)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        file.write_text("".join(pieces), encoding="utf-8")
        return plot_rounds.panel(plot_rounds.read(file), title, slice(None), False)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Draws two rounds before and after tail batching.", allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "two-rounds.svg")
    given = parser.parse_args(arguments)
    both = panels()
    drawing.save(plot_rounds.draw(both, False), given.out)
    print("; ".join(f"{one.title}: {one.length:.4g} s, bubble {one.bubble():.0%}" for one in both))
    print(f"two rounds: {ratio(*both):.3g} times less; twelve: {ratio(*panels(12)):.3g} times less")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
