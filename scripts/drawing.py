"""A picture of rectangles and short texts, written as SVG or, without any library, as PNG.

Invariant: both hold the same shapes in the same order. A PNG's letters are blocks of 3 x 5 pixels, all capitals; a
character that the alphabet lacks is left out there.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

import numpy as np

# Rows of each character from top to bottom, a digit of 3 bits each.
_BLOCKS = dict(
    zip(
        "abcdefghijklmnopqrstuvwxyz0123456789.,%:/-+()=#_>' ",
        (
            "25755 65656 34443 65556 74647 74644 34553 55755 72227 11152 55655 44447 57755 65555 25552 65644 25563 65655 34216 72222 "
            "55557 55552 55775 55255 55222 71247 75557 26227 71747 71717 55711 74717 74757 71111 75757 75717 00002 00024 51245 02020 "
            "11244 00700 02720 24442 21112 07070 57575 00007 42124 22000 00000"
        ).split(),
        strict=True,
    )
)
_SCALE = 2  # pixels of a block in a PNG
TEXT = 5 * _SCALE  # height of a text


@dataclass
class Picture:
    """Shapes over white, in pixels from the upper left corner; colours as "#rrggbb"."""

    width: int
    height: int
    shapes: list[tuple] = field(default_factory=list)

    def rectangle(self, x: float, y: float, width: float, height: float, color: str) -> None:
        """Its corner is the upper left one."""
        self.shapes.append(("rectangle", x, y, width, height, color))

    def text(self, x: float, y: float, words: str, color: str = "#222222") -> None:
        """`y` is its upper edge."""
        self.shapes.append(("text", x, y, words, color))

    def svg(self) -> str:
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width}" height="{self.height}" '
            f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif" font-size="{TEXT + 2}">',
            '<rect width="100%" height="100%" fill="#ffffff"/>',
        ]
        for kind, x, y, *rest in self.shapes:
            if kind == "rectangle":
                width, height, color = rest
                lines.append(
                    f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{color}"/>'
                )
            else:
                words, color = rest
                lines.append(f'<text x="{x:.2f}" y="{y + TEXT:.2f}" fill="{color}">{escape(words)}</text>')
        return "\n".join([*lines, "</svg>\n"])

    def png(self) -> bytes:
        pixels = np.full((self.height, self.width, 3), 255, np.uint8)
        for kind, x, y, *rest in self.shapes:
            if kind == "rectangle":
                width, height, color = rest
                _fill(pixels, x, y, x + width, y + height, color)
            else:
                words, color = rest
                for place, letter in enumerate(words.lower()):
                    _letter(pixels, round(x) + 4 * _SCALE * place, round(y), _BLOCKS.get(letter, "00000"), color)
        rows = np.concatenate([np.zeros((self.height, 1), np.uint8), pixels.reshape(self.height, -1)], axis=1)
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        return (
            b"\x89PNG\r\n\x1a\n"
            + _chunk(b"IHDR", header)
            + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
            + _chunk(b"IEND", b"")
        )


def _fill(pixels: np.ndarray, left: float, top: float, right: float, bottom: float, color: str) -> None:
    """At least one pixel, so that nothing short vanishes."""
    x, y = round(left), round(top)
    pixels[max(y, 0) : max(round(bottom), y + 1), max(x, 0) : max(round(right), x + 1)] = tuple(
        bytes.fromhex(color[1:])
    )


def _letter(pixels: np.ndarray, x: int, y: int, rows: str, color: str) -> None:
    for down, row in enumerate(rows):
        for along in range(3):
            if int(row) >> (2 - along) & 1:
                _fill(
                    pixels,
                    x + along * _SCALE,
                    y + down * _SCALE,
                    x + (along + 1) * _SCALE,
                    y + (down + 1) * _SCALE,
                    color,
                )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
