"""Config files: damaged Python, and values of every type for every option."""

from __future__ import annotations

from pathlib import Path

from fuzz import mutations
from fuzz.child import sentence

FILES = ("demo.py", "demo_pipeline.py", "demo_speculation.py", "gspo.py", "gsm8k_qwen2_5_0_5b.py")
SPECIAL = (
    *("", "\x00", "def get_config(", "get_config = 1", "def get_config(): return 1", "def get_config(): return None"),
    *(
        "raise MemoryError",
        "raise RecursionError",
        "import nothing_like_it",
        "1/0",
        "def get_config(a): pass",
        "exit(3)",
    ),
    *("raise SystemExit(0)", "raise StopIteration", "x = '\\d'", "\\", "é = '\udcff'", "# coding: nothing", "(" * 500),
    *("def get_config():\n  return get_config()", f"x = {'[' * 150 + ']' * 150}", f"x = {'-' * 50_000}1"),
)


class Cases:
    """A third are files, a third mappings, a third overrides."""

    def __init__(self, folder: Path):
        from jaxrl_post import config
        from jaxrl_post.config import fields

        self._config, self._folder = config, folder
        self._options = list(fields.options(config.Config))
        here = Path(__file__).resolve().parents[2] / "configs"
        self._sources = [(here / name).read_bytes() for name in FILES]
        self._demo = (here / "demo.py").read_bytes()

    def valid(self) -> None:
        self._read(self._demo)()

    def own(self, error: BaseException) -> bool:
        return sentence(error, "config") or sentence(error, " ")

    def case(self, index, random):
        if index < len(SPECIAL):
            return repr(SPECIAL[index][:60]), self._read(SPECIAL[index].encode("utf-8", errors="surrogateescape"))
        if index % 3 == 0:
            what, source = mutations.damaged(random, random.choice(self._sources))
            return what, self._read(source)
        option = random.choice(self._options)
        value = random.choice(
            (*mutations.SCALARS, option.default, [option.default], {1: 2}, (), (1, None), b"a", object)
        )
        if index % 3 == 1:
            return f"{option.name}={repr(value)[:60]}", lambda: self._set(option.name, value)
        text = f"{option.name}{random.choice(('', '.a', '.a.b', '[0]'))}={value}"
        return repr(text)[:100], lambda: self._config.resolve(self._config.default(), [text])

    def _read(self, source: bytes):
        file = self._folder / "configured.py"
        file.write_bytes(source)
        return lambda: self._config.resolve(self._config.load(str(file)))

    def _set(self, name: str, value) -> None:
        given = self._config.default().to_dict()
        where, _, leaf = name.rpartition(".")
        (given[where] if where else given)[leaf] = value
        self._config.resolve(given)
