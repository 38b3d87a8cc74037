"""What a judged program is tested with: the forms in which data files hold tests, read into one of three kinds.

- `Whole`: the program is run, and what it prints is compared (APPS, verl's prime_code and sandbox_fusion, LiveCodeBench).
- `Called`: a function or a method of its class Solution is called with arguments, and its result is compared.
- `ProgramTest`: statements that raise if the program is wrong (MBPP, HumanEval, verl's assert_case).

Invariant: nothing of a data file is unpickled or run here. What is none of these forms stands as statements, which read
nothing of a program: `refusal` says so before a run.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_post.rewards.sandbox.examiner import ProgramTest, names
from jaxrl_post.ring import json_text

COLUMNS = ("test_list", "test")  # of a row, that stand for a ground truth
_FORMS = (
    "give stdin pairs {'inputs': [...], 'outputs': [...]}, call pairs with 'fn_name' beside them, a list of "
    "{'input', 'output', 'testtype'}, or statements that assert something of the program"
)
_PACKED = re.compile(r"[A-Za-z0-9+/\s]{32,}={0,2}\s*")  # base64, as LiveCodeBench packs its private tests
_ZLIB = (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")


class Whole(NamedTuple):
    """A text on stdin, and the text that a right program prints."""

    input: str
    output: str

    @property
    def source(self) -> str:
        """Returns what a reader is shown of the test."""
        return f"stdin {json_text.shown(self.input)} prints {json_text.shown(self.output)}"


class Called(NamedTuple):
    """A call of the function `name`. A result is right if it is one of `wanted`."""

    name: str
    arguments: tuple
    wanted: tuple

    @property
    def source(self) -> str:
        """Returns what a reader is shown of the test."""
        return f"{self.name}({', '.join(map(repr, self.arguments))}) == {self.wanted[0]!r}"


Test = Whole | Called | ProgramTest


def read(truth: Any, extra: Mapping) -> list[Test]:
    """Returns the tests of a row: of its column test_list, else of its column test, else of its ground truth.

    Raises:
      ValueError: there are none, or they have one of the known forms and lack something of it.
    """
    setup = str(extra.get("test_setup_code") or "")
    if extra.get("test_list"):
        found = _of(extra["test_list"], extra, setup)
    elif extra.get("test"):
        found = [_checked(extra)]
    else:
        found = _of(truth, extra, setup)
    if not found:
        raise ValueError("a program needs tests: test_list, test with entry_point, or a ground truth of tests")
    return found


def refusal(truth: Any, extra: Mapping) -> str:
    """Returns why a row's tests test nothing of a program, or cannot be read; else an empty text."""
    try:
        tests = read(truth, extra)
        idle = next((test for test in tests if not tests_something(test)), None)
    except SyntaxError as error:
        return f"a test of programs is neither JSON nor Python ({error.msg}): {json_text.shown(error.text or '')}; {_FORMS}"
    except (ValueError, RecursionError, MemoryError) as error:
        return json_text.said(error)
    if idle is not None:
        return f"{json_text.shown(idle.source)} tests nothing of the program; {_FORMS}"
    if all(isinstance(test, Whole) and not test.output.strip() for test in tests):
        return f"every expected output is empty, which tests nothing of the program; {_FORMS}"
    return ""


def gold(truth: Any, extra: Mapping) -> str:
    """Returns a program that knows the pairs of a row, and so passes them; of statements an empty text."""
    tests = read(truth, extra)
    if all(isinstance(test, Whole) for test in tests):
        known = {test.input: test.output for test in tests}
        return f"import sys\nprint({known!r}[sys.stdin.buffer.read().decode()])"
    if all(isinstance(test, Called) for test in tests):
        pairs = [(list(test.arguments), test.wanted[0]) for test in tests]
        return f"def {tests[0].name}(*given):\n    return next(wanted for one, wanted in {pairs!r} if one == list(given))\n"
    return ""


def tests_something(test: Test) -> bool:
    """Returns whether statements read a name of the program where they run. Pairs always test something.

    Raises:
      SyntaxError: the statements are no Python.
    """
    if not isinstance(test, ProgramTest):
        return True
    if test.entry_point:
        defined = {node.name for node in ast.parse(test.source).body if isinstance(node, ast.FunctionDef)}
        return "check" in defined and _reads_argument(test)
    running = ast.Module(_running(ast.parse(test.source).body), [])
    found = names(test._replace(source=ast.unparse(running)))
    return bool(found.wanted - found.modules)


def _running(body: Sequence[ast.stmt]) -> list[ast.stmt]:
    """Returns the statements that can fail: not bare values and comparisons, nor functions that nothing uses."""
    statements = [one for one in body if not (isinstance(one, ast.Expr) and not _acts(one.value))]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    kept = [one for one in statements if not isinstance(one, kinds)]
    waiting = [one for one in statements if isinstance(one, kinds)]
    while used := [one for one in waiting if any(one.name in _loaded(other) for other in kept)]:
        kept += used
        waiting = [one for one in waiting if one not in used]
    return kept


def _acts(value: ast.expr) -> bool:
    return isinstance(value, (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr))


def _loaded(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


def _reads_argument(test: ProgramTest) -> bool:
    """Returns whether a function `check`, or one beside it, reads its argument or the program's function by name."""
    for node in ast.walk(ast.parse(test.source)):
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            arguments = {one.arg for one in (*node.args.posonlyargs, *node.args.args)}
            body = ast.Module(_running(node.body), [])
            return bool(_loaded(body) & (arguments | {test.entry_point}))
    return False


def _checked(extra: Mapping) -> ProgramTest:
    """Returns HumanEval's form. Without an entry point, `test` holds statements."""
    if not extra.get("entry_point"):
        return ProgramTest(str(extra["test"]), setup=str(extra.get("test_setup_code") or ""))
    head = extra.get("prompt")  # in a conversation it is a list of messages
    return ProgramTest(
        str(extra["test"]), head=head if isinstance(head, str) else "", entry_point=str(extra["entry_point"])
    )


def _of(given: Any, extra: Mapping, setup: str) -> list[Test]:
    """Returns the tests in a value, or in its JSON text."""
    if isinstance(given, str):
        try:
            return _of_value(json.loads(given), extra, setup)
        except (ValueError, RecursionError) as error:
            if isinstance(error, _Lacking):
                raise
    return _of_value(given, extra, setup)


class _Lacking(ValueError):
    """A known form without a part that it needs."""


def _of_value(given: Any, extra: Mapping, setup: str) -> list[Test]:
    if isinstance(given, (list, tuple)):
        return [test for one in given if one for test in _of_member(one, extra, setup)]
    return [] if given is None or not str(given).strip() else _of_member(given, extra, setup)


def _of_member(one: Any, extra: Mapping, setup: str) -> list[Test]:
    if isinstance(one, Mapping):
        return _of_dict(one, extra, setup)
    if isinstance(one, str):
        _refuse_packed(one)
    return [ProgramTest(str(one), setup=setup)]


def _of_dict(given: Mapping, extra: Mapping, setup: str) -> list[Test]:
    """Returns the tests of an object: pairs, asserts, or one of the forms that a row may have as columns."""
    for key in ("assert_case", "test_list"):
        if given.get(key):
            own = "\n".join(str(part) for part in (given.get("test_setup_code"), setup) if part)
            return _of(given[key], extra, own)
    if given.get("test") and isinstance(given["test"], str):
        return [_checked(given)]
    for key, wanted in (("inputs", "outputs"), ("input", "output")):
        if key in given and wanted in given:
            return _pairs(given, given[key], given[wanted], extra)
    return [ProgramTest(str(dict(given)), setup=setup)]


def _pairs(given: Mapping, inputs: Any, outputs: Any, extra: Mapping) -> list[Test]:
    """Returns a test for each input and its output. One text is one pair."""
    single = isinstance(inputs, str) or "testtype" in given
    inputs, outputs = ([inputs], [outputs]) if single else (inputs, outputs)
    if not (isinstance(inputs, (list, tuple)) and isinstance(outputs, (list, tuple))):
        raise _Lacking(f"'inputs' and 'outputs' must be lists, got {json_text.shown(inputs)}")
    if len(inputs) != len(outputs):
        raise _Lacking(f"there are {len(inputs)} inputs and {len(outputs)} outputs; each input needs its output")
    name, kind = _function(given, extra), given.get("testtype")
    if kind not in (None, "stdin", "functional"):
        raise _Lacking(f"testtype {json_text.shown(kind)} is neither 'stdin' nor 'functional'")
    if kind == "functional" and not name:
        raise _Lacking(
            "a functional test needs the function's name: 'fn_name' beside it, or metadata.func_name in the row"
        )
    if name and kind != "stdin":
        wrapped = all(isinstance(one, (list, tuple)) and len(one) == 1 for one in outputs)
        return [_called(name, i, o, wrapped) for i, o in zip(inputs, outputs, strict=True)]
    return [Whole(_text(i, "inputs"), _text(o, "outputs")) for i, o in zip(inputs, outputs, strict=True)]


def _function(given: Mapping, extra: Mapping) -> str:
    """Returns the name of the function that call pairs call: of the object, of its metadata, or of the row's."""
    for place in (given, given.get("metadata"), extra, extra.get("metadata")):
        if isinstance(place, str):
            try:
                place = json.loads(place)
            except ValueError:
                continue
        if isinstance(place, Mapping):
            keys = ("fn_name", "func_name") + (("entry_point",) if place is given else ())
            if name := next((place[key] for key in keys if place.get(key)), ""):
                if not (isinstance(name, str) and name.isidentifier()):
                    raise _Lacking(f"the function's name {json_text.shown(name)} is no name")
                return name
    return ""


def _called(name: str, given: Any, output: Any, wrapped: bool) -> Called:
    """Returns one call. Arguments are a list, or a text with the JSON of one argument on each line."""
    if isinstance(given, str):
        arguments = [_line(line, name) for line in given.splitlines() if line.strip()]
        output = _line(output, name) if isinstance(output, str) else output
        return Called(name, tuple(map(_numbered, arguments)), (output,))
    arguments = list(given) if isinstance(given, (list, tuple)) else [given]
    wanted = (output, output[0]) if wrapped else (output,)  # APPS may put a result into a list of its own
    return Called(name, tuple(map(_numbered, arguments)), wanted)


def _line(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise _Lacking(
            f"the text {json_text.shown(text)} of a call of {name} is no JSON; write its arguments as a list, or the JSON "
            "of one argument on each line"
        ) from None


def _numbered(argument: Any) -> Any:
    """Returns an argument whose keys are numbers again, which JSON can only write as texts (as APPS reads it)."""
    if isinstance(argument, Mapping) and argument and all(re.fullmatch(r"-?\d+", str(key)) for key in argument):
        return {int(key): value for key, value in argument.items()}
    return argument


def _text(given: Any, what: str) -> str:
    """Returns what stands on stdin or stdout: a text, or the list of its lines."""
    if isinstance(given, str):
        return given
    if isinstance(given, (list, tuple)) and all(isinstance(line, str) for line in given):
        return "".join(f"{line}\n" for line in given)
    raise _Lacking(
        f"{json_text.shown(given)} in {what!r} is no text; write what stands on stdin and stdout, or name the function "
        "that call pairs call in 'fn_name'"
    )


def _refuse_packed(text: str) -> None:
    """Refuses a packed text, which only a pickle could open."""
    if not _PACKED.fullmatch(text):
        return
    try:
        begins = base64.b64decode("".join(text.split())[:64], validate=True)[:2]
    except (binascii.Error, ValueError):
        return
    if begins in _ZLIB:
        raise _Lacking(
            f"{json_text.shown(text)} is compressed (LiveCodeBench's private_test_cases): it holds a pickle, which is never "
            "opened here; write its cases as a list of {'input', 'output', 'testtype'}"
        )
