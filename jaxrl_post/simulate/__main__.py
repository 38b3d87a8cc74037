"""python -m jaxrl_post.simulate: the same as python -m jaxrl_post simulate."""

from __future__ import annotations

import sys

from jaxrl_post.simulate.simulation import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
