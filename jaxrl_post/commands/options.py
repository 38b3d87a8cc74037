"""python -m jaxrl_post options [SECTION]

Prints the options of a config: all sections with their first words, or every option of one section.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jaxrl_post.config import reference


def main(arguments: Sequence[str]) -> int:
    """Prints a section. Exit code 1, with one sentence, for a section that does not exist."""
    try:
        print(reference.help_on(arguments, str(__doc__)))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
