"""The trusted side of a judged program: runs its tests and compares what it returns.

Tests run here, in a namespace of their own, and see the program's functions as `Remote` objects. Values that come back
are exact built-in types, so that a program's own `__eq__` decides nothing. A name of a test means, in this order: what
the tests define, a builtin, a module of the standard library, and only then the program's object of that name.
"""

from __future__ import annotations

import ast
import builtins
import collections
import contextlib
import copy
import importlib
import sys
from types import CodeType
from typing import NamedTuple

from jaxrl_post.rewards.sandbox import wire

_FEW = 1 << 20  # bytes


class Failed(Exception):
    """The program broke the protocol, or could not be loaded."""


class Unsupported(BaseException):
    """The test passes a value that cannot be sent to a program. This is no verdict on the program.

    It is no Exception, so that a test that expects exceptions does not catch it.
    """


class ProgramTest(NamedTuple):
    """One test of a program.

    Attributes:
      source: statements that raise if the program is wrong.
      setup: statements that run before it.
      head: trusted code that goes before the program, such as the head of a function. Its other functions are the
        test's own.
      entry_point: the program's function that `source` gets as `candidate` and by its name. Empty: it is named in
        `source`.
      prelude: imports that go before the program, in its process alone.
    """

    source: str
    setup: str = ""
    head: str = ""
    entry_point: str = ""
    prelude: str = ""


class Link:
    """Requests to a judged program over a socket."""

    def __init__(self, channel):
        self._channel, self._buffer, self._received = channel, bytearray(), 0

    def recv(self, most: int) -> bytes:
        data = self._channel.recv(most)
        self._received += len(data)
        return data

    def ask(self, **request) -> dict:
        """Returns the program's reply to one request.

        Raises:
          Failed: the program is gone, broke the protocol or is too large.
          Unsupported: the test's values are too large to be sent.
          Exception: the built-in exception that the program raised, or RuntimeError for another.
        """
        try:
            frame = wire.pack(request)
        except wire.Broken as error:
            own = request["do"] != "load" and self._received < _FEW  # the values are the test's, not the program's
            raise (Unsupported if own else Failed)(str(error)) from None
        try:
            self._channel.sendall(frame)
            reply = wire.receive(self, self._buffer)
        except (EOFError, OSError, wire.Broken) as error:
            raise Failed(f"{type(error).__name__}: {error}") from None
        if "raised" in reply:
            raise _raised(reply["raised"], reply.get("text"))
        return reply

    def value(self, **request) -> object:
        """Returns the value of the program's reply."""
        return self.decode(self.ask(**request).get("value"))

    def decode(self, given: object) -> object:
        try:
            return wire.decode(given, lambda items: Remote(self, _number(items)))
        except wire.Broken as error:
            raise Failed(str(error)) from None


class Remote:
    """An object of the judged program: a function, a class, an instance, a generator.

    It can be called, indexed and iterated, and its attributes can be set. `attribute` reads them. It is equal to itself alone
    and has no truth value, so that no comparison is decided by the program.
    """

    __slots__ = ("_link", "_of")

    def __init__(self, link: Link, of: int):
        object.__setattr__(self, "_link", link)
        object.__setattr__(self, "_of", of)

    def __call__(self, *args, **named):
        given = {**{str(place): arg for place, arg in enumerate(args)}, **{f"={name}": named[name] for name in named}}
        try:
            reply = self._link.ask(
                do="call",
                of=self._of,
                args=[wire.encode(arg, _refer) for arg in args],
                named={name: wire.encode(arg, _refer) for name, arg in named.items()},
            )
        except StopIteration as error:  # it would end a `map` of the test early
            raise RuntimeError(f"the program raised StopIteration: {error}") from None
        changed = reply.get("changed")
        for place, now in changed.items() if isinstance(changed, dict) else ():
            if place in given:
                _assign(given[place], self._link.decode(now))
        return self._link.decode(reply.get("value"))

    def _read(self, name: str) -> object:
        """Returns an attribute of the program's object. Names that begin with two underscores are this object's own."""
        return self._link.value(do="get", of=self._of, name=name)

    def __setattr__(self, name: str, value) -> None:
        self._link.ask(do="set", of=self._of, name=name, value=wire.encode(value, _refer))

    def __getitem__(self, key):
        return self._link.value(do="item", of=self._of, key=wire.encode(key, _refer))

    def __setitem__(self, key, value) -> None:
        self._link.ask(do="put", of=self._of, key=wire.encode(key, _refer), value=wire.encode(value, _refer))

    def __len__(self) -> int:
        return self._link.value(do="len", of=self._of)

    def __iter__(self):
        return self._link.value(do="iter", of=self._of)

    def __next__(self):
        return self._link.value(do="next", of=self._of)

    def __bool__(self) -> bool:
        raise TypeError("an object of the judged program has no truth value")

    def __eq__(self, other) -> bool:
        return isinstance(other, Remote) and (other._link, other._of) == (self._link, self._of)

    def __hash__(self) -> int:
        return hash(self._of)


def attribute(thing: object, name: str, *default: object) -> object:
    """Returns `getattr(thing, name, *default)`. Attributes of the program's objects are asked of the program."""
    if type(thing) is not Remote or name.startswith("__"):
        return getattr(thing, name, *default)
    if name in _PREDICATES:
        raise Failed(f"{name} is asked of an object of the program's own, whose method would decide the test")
    try:
        return thing._read(name)
    except AttributeError:
        if not default:
            raise
        return default[0]


def has(thing: object, name: str) -> bool:
    """Returns `hasattr(thing, name)`. Attributes of the program's objects are asked of the program."""
    missing = object()
    return attribute(thing, name, missing) is not missing


# Of built-in types: what they say of themselves is a verdict, which an object of the program's own class could give.
_PREDICATES = frozenset(
    name
    for kind in (str, bytes, float, set, frozenset)
    for name in vars(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
)
_USUAL = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pandas": "pandas", "scipy": "scipy", "sympy": "sympy"}
# Members of modules that tests read without an import, and that no program is asked for beside its own function.
_MEMBERS = dict.fromkeys(("Counter", "OrderedDict", "defaultdict", "deque"), "collections") | {
    "Decimal": "decimal",
    "Fraction": "fractions",
    "allclose": "numpy",
    "array_equal": "numpy",
    "isclose": "math",
}
READ = "__read__"  # the name of `attribute` in tests
BUILTINS = {**vars(builtins), READ: attribute, "getattr": attribute, "hasattr": has}


class Reads(ast.NodeTransformer):
    """Turns each attribute that a test reads into a call of `attribute`, so that only the test's own reads reach a program."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if not isinstance(node.ctx, ast.Load) or node.attr.startswith("__"):
            return node
        return ast.Call(ast.Name(READ, ast.Load()), [node.value, ast.Constant(node.attr)], [])

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """`a.b += c` reads and writes: it becomes `a.b = a.b + c`."""
        if not isinstance(node.target, ast.Attribute):
            return self.generic_visit(node)
        before = ast.Attribute(copy.deepcopy(node.target.value), node.target.attr, ast.Load())
        return self.visit(ast.Assign([node.target], ast.BinOp(before, node.op, node.value)))


def compiled(text: str) -> CodeType:
    """Returns the code of a test."""
    return compile(ast.fix_missing_locations(Reads().visit(ast.parse(text))), "<test>", "exec")


def given_to_program(setup: str) -> str:
    """Returns the part of a setup that a program gets: its imports and its classes, no function and no value of the test."""
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef)
    return ast.unparse(ast.Module([one for one in ast.parse(setup).body if isinstance(one, kinds)], []))


class Names(NamedTuple):
    """Names that a test reads from elsewhere. `modules`: those of the standard library, which the program cannot give."""

    wanted: frozenset[str]
    modules: frozenset[str]


def names(test: ProgramTest) -> Names:
    """Returns the names that a test reads from elsewhere.

    A name is a module where the test reads its attributes and never calls it. A builtin is the test's own. Only where the
    test reads nothing else and calls one builtin alone, that name must be the program's.

    Raises:
      SyntaxError: the test is no Python.
    """
    loaded, owners, called, stored = set(), set(), set(), set()
    for text in (test.setup, test.source):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Name):
                (loaded if isinstance(node.ctx, ast.Load) else stored).add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owners.add(node.value.id)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                called.add(node.func.id)
            elif isinstance(node, ast.alias):
                stored.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                stored.add(node.name)
    own = set(vars(builtins))
    wanted = (loaded - stored - own) | ({test.entry_point} - {""})
    modules = frozenset((wanted & owners & {*sys.stdlib_module_names, *_USUAL}) - called)
    if wanted <= modules and len(called & own - stored) == 1:
        wanted |= called & own - stored
    return Names(frozenset(wanted), modules)


def examine(channel, test: ProgramTest, read: Names, source: str) -> None:
    """Loads the program `source` behind `channel` and runs one test, which reads the names `read`.

    Raises:
      Exception: whatever the test raises. The program has passed if nothing is raised.
    """
    link = Link(channel)
    space: dict = {"__name__": "tests", "__builtins__": BUILTINS}
    if test.head:
        with contextlib.suppress(SyntaxError):  # a head without a body has no functions of its own
            exec(compiled(test.head), space)
    space.pop(test.entry_point, None)
    wanted = read.wanted - set(space)
    before = [test.prelude] if test.head else [test.prelude, given_to_program(test.setup)]
    reply = link.ask(do="load", source=f"{test.head}{source}\n", before=before, wanted=sorted(wanted))
    found = _found(reply)
    if absent := wanted & vars(builtins).keys() - found.keys():
        raise Failed(f"the program does not define {', '.join(absent)}, and the builtin is not what is tested")
    members = _MEMBERS.keys() if wanted - _MEMBERS.keys() - read.modules else set()
    for name, given in found.items():
        if name in members:
            space[name] = getattr(importlib.import_module(_MEMBERS[name]), name)
        elif name in read.modules:
            space[name] = importlib.import_module(_USUAL.get(name, name))
        elif name in wanted and given != "module":
            space[name] = link.decode(given)
    for text in (test.setup, test.source):
        exec(compiled(text), space)
    if test.entry_point:
        space["check"](space[test.entry_point])


def _found(reply: dict) -> dict:
    """Returns the names of a reply to "load", each with "module" or an encoded value."""
    names = reply.get("names")
    if not isinstance(names, dict):
        raise Failed("the program's names are missing")
    for given in names.values():
        if given != "module" and not (isinstance(given, list) and len(given) == 2 and given[0] == "value"):
            raise Failed("the program's names are malformed")
    return {name: given if given == "module" else given[1] for name, given in names.items()}


def _assign(old, new) -> None:
    """Gives a mutable argument the content that the program left in it."""
    if type(old) is not type(new):
        return
    if isinstance(old, (list, bytearray)):
        old[:] = new
    elif isinstance(old, collections.deque):
        old.clear()
        old.extend(new)
    elif isinstance(old, (dict, set)):
        old.clear()
        old.update(new)


def _number(items: list) -> int:
    (number,) = items
    if type(number) is not int or number < 0:
        raise ValueError("a reference that is no number")
    return number


def _refer(value: object) -> list:
    if isinstance(value, Remote):
        return ["h", value._of]
    raise Unsupported(f"a {type(value).__name__} cannot be passed to a judged program")


def _raised(name: object, text: object) -> BaseException:
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if not (isinstance(kind, type) and issubclass(kind, Exception)):
        return RuntimeError(f"{name}: {text}")
    try:
        return kind(str(text))
    except TypeError:  # UnicodeDecodeError takes five arguments
        return RuntimeError(f"{name}: {text}")
