"""python -m jaxrl_post options [SECTION]

Prints the options of a config: all sections with their first words, or every option of one section.
"""

from __future__ import annotations

from argparse import Namespace

from jaxrl_post.commands.arguments import Command
from jaxrl_post.config import reference
from jaxrl_post.config.command_line import Flag

_FLAGS = (Flag("[SECTION]", "prints every option of it"),)


def _print(flags: Namespace) -> int:
    print(reference.help_on([flags.section] if flags.section else [], str(__doc__)))
    return 0


main = Command("options", __doc__, _FLAGS, _print)
