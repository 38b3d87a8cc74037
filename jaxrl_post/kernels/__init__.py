"""The door to the top-level folder kernels/: `jaxrl_post.kernels.X` is the file kernels/X.py.

In a checkout (a pyproject.toml two levels up) that folder is appended to this package's search path. A wheel holds the
same files in this package itself, so there the door does nothing. kernels/ never gets an `__init__.py`: a regular
top-level package of that name would shadow another distribution's.
"""

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]

if (_ROOT / "pyproject.toml").is_file() and (_ROOT / "kernels").is_dir():
    __path__.append(str(_ROOT / "kernels"))
