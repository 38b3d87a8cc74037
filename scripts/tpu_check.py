"""Everything that only a TPU can show, on one host of v5e, v6e or v5p: `python scripts/tpu_check.py [--json FILE]`.

It is scripts/gpu_check.py with another profile: the same options, resume, file, table and exit codes. FILE is
scripts/results/tpu-check.json unless given. Calls of at most ten minutes go on from it until `not_reached` is empty.

Sections (scripts/tpu/sections.py): kernels against references, bits of rows, decoding, training, swaps and runs of RL.
Training takes all chips of the host, and everything else the first. Sections that only GPUs have stand in the file
under `left_out`, with the reason. Expected figures are the assumptions of plans and cost tables. No TPU has confirmed them.

Exit code 2: there is no such TPU.
"""

from __future__ import annotations

import sys

import gpu_check
from tpu.sections import TPU

if __name__ == "__main__":
    gpu_check.end_with_sections()
    sys.exit(gpu_check.main(sys.argv[1:], profile=TPU))
