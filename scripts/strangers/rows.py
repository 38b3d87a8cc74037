"""Rows of strangers: what a template is shown of each, written here by plain string operations, and what is refused.

Kinds of templates: tools and arguments (F05), parts (F13), nulls of Arrow (F14), begun turns (F15), dates (F23), marks without an
end (F31), and the options (T20). Kinds of files: duplicates (F19), pairs beside a text (F20), messages as text (F21), arrays and
byte order marks (F22).
"""

from __future__ import annotations

import datetime
import itertools
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from jaxrl_post import config as configs
from jaxrl_post.data import duplicates, files, supervised
from strangers import Members
from strangers._written import (
    TEXTS,
    WORDS,
    Tried,
    followed,
    paired,
    prompts_of,
    read,
    requested,
    say,
    taught,
    template,
    tool,
    written,
)


def f05() -> Members:
    """Tools and arguments, as lists and as JSON, in every use."""
    out, chat = Tried(), template()
    sets = [[tool("f", "a")], [tool("g"), tool("wetter", "stadt", "tag")], [tool("數", "é")], None, []]
    for at, (tools, mood) in enumerate(itertools.product(sets, ("", "calm"))):
        user, answer = say("user", TEXTS[at]), say("assistant", "5")
        told: dict[str, Any] = {"tools": tools if at % 2 else json.dumps(tools, ensure_ascii=False)}
        kwargs = {"mood": mood} if mood else {}
        told["chat_template_kwargs"] = kwargs if at % 3 else json.dumps(kwargs)
        head = written([user], tools, mood)
        out.same(f"prompt {at}", lambda: prompts_of([{"prompt": [user], **told}], chat), [head])
        body = {"messages": [user], "tools": tools, "chat_template_kwargs": kwargs}
        out.same(f"request {at}", lambda: requested(body, chat), head)
        if mood:
            continue  # it is written behind the head, where an answer follows
        for row in ({"messages": [user, answer]}, {"prompt": [user], "completion": [answer]}):
            out.same(f"answer {at}", lambda: taught({**row, **told}, chat), (head, "5|"))
        pair = {"prompt": [user], "chosen": [answer], "rejected": [say("assistant", "6")], **told}
        out.same(f"pair {at}", lambda: paired(pair, chat), (head, "5|", "6|"))
    arguments = {"tools": [tool("f")], "mood": "calm"}
    out.same(
        "turn", lambda: followed([say("user", "x")], [say("tool", "z")], chat, arguments), "|<tool>z|<assistant>{calm}"
    )
    for bad in ([1], "hammer", {"f": 1}, [[tool("f")]], 5):
        out.refused(
            f"tools {bad}", lambda: prompts_of([{"prompt": [say("user", "x")], "tools": bad}], chat), "row 0", "'tools'"
        )
    for bad in ([1], "calm", 5, {"messages": []}, {"add_generation_prompt": False}, {"tools": []}):
        row = {"prompt": [say("user", "x")], "chat_template_kwargs": bad}
        out.refused(f"arguments {bad}", lambda: prompts_of([row], chat), "row 0", "chat_template_kwargs")
    chat.close()
    return out.members()


NO_TEXTS = [
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": "x"}},
    {"type": "audio"},
    "text",
    {"text": "x"},
    None,
]
NO_TEXTS += [
    {"type": "text"},
    {"type": "text", "text": 5},
    {"type": "input_text", "text": "x"},
    {"type": "video", "video": "x"},
]


def f13() -> Members:
    """Contents as lists of parts, of all roles, and parts of other kinds."""
    out, plain = Tried(), template()
    reading = template(
        "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}{{ p['text'] }},{% endfor %}{% endfor %}"
    )
    for at, text in enumerate(TEXTS):
        cut = len(text) // 2
        parts = [
            {"type": "text", "text": piece, **({"image": None} if at % 2 else {})} for piece in (text[:cut], text[cut:])
        ]
        for role in ("system", "user", "assistant", "tool"):
            talk = [say("user", "x"), say(role, text), say("user", "z")]
            listed = [talk[0], say(role, parts), talk[2]]
            out.same(f"{role} {at}", lambda: prompts_of([{"prompt": listed}], plain), [written(talk)])
        listed = [say("user", parts), say("system", parts)]
        wanted = "".join(f"<{one['role']}>{text[:cut]},{text[cut:]}," for one in listed)
        out.same(f"kept {at}", lambda: prompts_of([{"prompt": listed}], reading), [wanted])
        row = {"messages": [say("user", parts), say("assistant", parts)]}
        out.same(f"answer {at}", lambda: taught(row, plain), (written([say("user", text)]), f"{text}|"))
    for bad in NO_TEXTS:
        rows = [say("user", [{"type": "text", "text": "x"}, bad])]
        out.refused(f"part {bad}", lambda: prompts_of([{"prompt": rows}], plain), "row 0", "content[1]", "no text part")
    for bad in (5, {"text": "x"}, True):
        out.refused(f"content {bad}", lambda: prompts_of([{"prompt": [say("user", bad)]}], plain), "row 0", "content")
    plain.close()
    reading.close()
    return out.members()


def f14() -> Members:
    """Calls and tools by way of Arrow, whose structs have the keys of all rows."""
    out, chat = Tried(), template()
    keys = ("city", "count", "day", "note")
    for at in range(12):
        rows, wanted = [], []
        for number in range(1, 6):
            told = {key: f"{key}{number}" for bit, key in enumerate(keys) if (at + number) >> bit & 1} or {
                "city": "Ulm"
            }
            call = {"type": "function", "function": {"name": "f", "arguments": told}}
            talk = [say("user", "x"), say("assistant", None, tool_calls=[call]), say("tool", f"{number}", name="f")]
            tools = [tool("f", *told)]
            rows.append({"prompt": talk, "tools": tools if number % 2 else None})
            wanted.append(written(talk, rows[-1]["tools"]))
        full = {
            "prompt": [
                say(
                    "user",
                    "x",
                    tool_calls=[{"type": "f", "function": {"name": "f", "arguments": dict.fromkeys(keys, "")}}],
                )
            ]
        }
        table = pyarrow.Table.from_pylist([{**full, "tools": [tool("f", *keys)]}, *rows])
        with tempfile.TemporaryDirectory() as folder:
            pyarrow.parquet.write_table(table, Path(folder) / "r.parquet")
            back = [row for _, row in files.objects(Path(folder) / "r.parquet")][1:]
        out.same(f"Parquet {at}", lambda: prompts_of(back, chat), wanted)
        arrow = table.to_pylist()[1:]
        out.same(f"Python {at}", lambda: prompts_of(arrow, chat), wanted)
        lines = [json.loads(json.dumps(row)) for row in arrow]
        out.same(f"JSON of Arrow {at}", lambda: prompts_of(lines, chat), wanted)
        out.same(f"JSONL {at}", lambda: prompts_of(rows, chat), wanted)
    chat.close()
    return out.members()


def f15() -> Members:
    """Prompts whose last message is of the assistant."""
    out, chat = Tried(), template()
    trimming = template("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}|{% endfor %}")
    for at, text in enumerate((*TEXTS, "", "Let me add.\n<think>", "x\n\n", "CONTINUE", "|")):
        talk = [say("user", "2+3?"), say("assistant", text)]
        head = written(talk)
        out.same(f"prompt {at}", lambda: prompts_of([{"prompt": talk}], chat), [head])
        out.same(
            f"trimmed {at}", lambda: prompts_of([{"prompt": talk}], trimming), [f"<user>2+3?|<assistant>{text.strip()}"]
        )
        out.same(f"request {at}", lambda: requested({"messages": talk}, chat), head)
        another = {"messages": talk, "continue_final_message": False}
        out.same(f"another turn {at}", lambda: requested(another, chat), f"{head}|<assistant>")
        row = {"prompt": talk, "completion": [say("assistant", "5")]}
        out.same(f"answer {at}", lambda: taught(row, chat), (head, "5|"))
        pair = {"prompt": talk, "chosen": [say("assistant", "5")], "rejected": [say("assistant", "6")]}
        out.same(f"pair {at}", lambda: paired(pair, chat), (head, "5|", "6|"))
        after = lambda: followed(talk, [say("user", "y")], chat, {}, begun=True)  # noqa: E731
        out.same(f"turn {at}", after, "|<user>y|<assistant>")
    for content in ({"tool_calls": [{"function": {"name": "f", "arguments": {}}}]}, {"reasoning_content": "x"}):
        row = {"prompt": [say("user", "x"), {"role": "assistant", **content}]}
        out.refused(f"nothing to continue {content}", lambda: prompts_of([row], chat), "row 0", "no content")
    chat.close()
    trimming.close()
    return out.members()


def f19() -> Members:
    """Rows of equal ids under the three choices."""
    out = Tried()
    for at, text in enumerate(
        ("aa", "aba", "abab", "aaaa", "abc", "cbabc", "zzyz", "a", "", "abcabcabc", "bbaab", "xyzzy")
    ):
        rows = [{"id": id, "where": f"line {line}", "prompt": f"{line}"} for line, id in enumerate(text)]
        counts, numbered = Counter(), []
        for id in text:
            counts[id] += 1
            numbered.append(id if counts[id] == 1 else f"{id}#{counts[id]}")
        more = len(text) - len(set(text))
        for mode, ids in (("drop", list(dict.fromkeys(text))), ("number", numbered), ("refuse", list(text))):
            found = lambda: duplicates.settled(rows, mode, "data.train", "F")  # noqa: E731
            out.same(f"{mode} {at}", lambda: [row["id"] for row in found()[0]], ids)
            told = [f"{more} row"] if more and mode != "refuse" else []
            out.same(
                f"{mode} {at}, line",
                lambda: [one.split("F: ")[1].split("s have")[0].split(" has")[0] for one in found()[1]],
                told,
            )
    return out.members()


def f20() -> Members:
    """Pairs of whole conversations beside a text, as TRL reads them: the text is not read."""
    out, chat = Tried(), template()
    for at, text in enumerate(TEXTS):
        for before in ([], [say("system", "Add.")], [say("user", "a"), say("assistant", "b")]):
            talk = [*before, say("user", text)]
            row = {
                "prompt": "something else",
                "chosen": [*talk, say("assistant", "5")],
                "rejected": [*talk, say("assistant", "6")],
            }
            for given in (row, {name: row[name] for name in ("chosen", "rejected")}):
                out.same(f"{at} {len(before)}", lambda: paired(given, chat), (written(talk), "5|", "6|"))
    bare = {"prompt": "2+3?", "chosen": [say("assistant", "5")], "rejected": [say("assistant", "6")]}
    out.refused("a text and messages", lambda: paired(bare, chat), "row 1", "the prompt is a text")
    out.same("a text as a message", lambda: paired(bare, chat, chat=True), (written([say("user", "2+3?")]), "5|", "6|"))
    chat.close()
    return out.members()


def f21() -> Members:
    """Texts that are messages, and texts that are not."""
    out, chat = Tried(), template()
    for at, text in enumerate(TEXTS):
        talk = [say("system", "Add."), say("user", text)]
        for form in (json.dumps(talk), json.dumps(talk, indent=2), f" {json.dumps(talk, ensure_ascii=False)}\n"):
            out.same(f"prompt {at}", lambda: prompts_of([{"prompt": form}], chat), [written(talk)])
        row = {"messages": json.dumps([*talk, say("assistant", "5")])}
        out.same(f"messages {at}", lambda: taught(row, chat), (written(talk), "5|"))
        other = (repr(talk), json.dumps({"messages": talk}), json.dumps(talk[1]), json.dumps(json.dumps(talk)))
        for form in other:
            out.refused(f"other form {at}", lambda: prompts_of([{"prompt": form}], chat), "row 0", "no JSON list")
    for text in (
        "[1, 2]",
        "[]",
        '{"a": 1}',
        '["role"]',
        '[{"role": "x"',
        "role",
        '[{"name": "x", "content": "y"}]',
        "{'role': 1}",
    ):
        out.same(f"a text {text}", lambda: prompts_of([{"prompt": text}], None), [text])
    chat.close()
    return out.members()


def f22() -> Members:
    """Arrays, byte order marks and blank lines."""
    out = Tried()
    rows = [{"prompt": text, "answer": str(at)} for at, text in enumerate(TEXTS)]
    for count, name in itertools.product((1, 2, len(rows)), ("r.json", "r.jsonl")):
        some = rows[:count]
        forms = (
            json.dumps(some),
            json.dumps(some, indent=2, ensure_ascii=False),
            f"\n\n  {json.dumps(some)}\n",
            "[\n" + ",\n".join(map(json.dumps, some)) + "\n]",
            "\n".join(map(json.dumps, some)),
            "\r\n\r\n".join(map(json.dumps, some)) + "\r\n",
        )
        for at, form in enumerate(forms):
            for mark in ("", "\ufeff"):
                data = (mark + form).encode()
                out.same(f"{name} {count} {at} {mark!r}", lambda: read(name, data), some)
    bad = (
        (b"[1]", "item 1"), (b"[[1]]", "item 1"), (b'[{"prompt": "x"}, "y"]', "item 2"), (b'[{"prompt": "x"}', "no JSON"),
        (b'[{"prompt": "x"},]', "no JSON"), (b'[1]\n{"prompt": "x"}', "one array"), ("[]".encode("utf-16"), "UTF-8"), (b"5", "line 1"),
    )  # fmt: skip
    for data, word in bad:
        out.refused(f"{data!r}", lambda: read("r.json", data), "r.json", word)
    return out.members()


def f23() -> Members:
    """Dates that a template says, under several forms, and which a resumed run has."""
    from jaxrl_post.data import chat

    out = Tried()
    forms = ("%d %b %Y", "%Y-%m-%d", "%A, %B %d", "%H:%M:%S", "%j %U")
    for form, when in itertools.product(
        forms, ("2024-07-26", "2026-12-31T23:59:59", "2028-02-29T00:00", "1999-01-01", "2026-11-27T08:49:00")
    ):
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "chat_template.jinja").write_text(
                f"{{{{ strftime_now('{form}') }}}}|{{{{ messages[0].content }}}}"
            )
            made = chat.load(folder, now=when)
        wanted = f"{datetime.datetime.fromisoformat(when).strftime(form)}|x"
        out.same(f"{form} {when}", lambda: (made.dated, made.render([say("user", "x")])), (True, wanted))
        made.close()
    given = {"model": {"preset": "tiny"}}
    for when in ("2024-07-26", "2026-12-31T23:59:59", "2028-02-29T00:00"):
        then = {"data": {"date": when}}
        out.same(f"resumed {when}", lambda: configs.resolve(given, recorded=then).data.date, when)
        out.same(
            f"set {when}",
            lambda: configs.resolve(given, ["data.date=1999-01-01"], recorded=then).data.date,
            "1999-01-01",
        )
    for bad in ("yesterday", "2026-13-01", "31.07.2026", "now"):
        out.refused(bad, lambda: configs.resolve(given, [f"data.date={bad}"]), "data.date", bad)
    return out.members()


def f31() -> Members:
    """Turns whose marks hold their end token, or not. Id 0 is the end token."""
    out = Tried()
    for turns, at in itertools.product(range(1, 6), range(5)):
        ended = [bool(at >> bit & 1) for bit in range(turns)]
        tokens, trained = [], []
        for number, inside in enumerate(ended):
            tokens += [7, 8, 50 + number, 60, 0, 9]
            trained += [False, False, True, True, inside, False]
        one = supervised.Taught(tokens, trained)
        out.same(
            f"{ended}", lambda: supervised.without_end([one, one], WORDS.eos_ids), (2 * turns, 2 * ended.count(False))
        )
    return out.members()


def t20() -> Members:
    """The options of a system prompt and of template arguments, beside rows that have their own."""
    out = Tried()
    chat = template(arguments={"mood": "calm"})
    for at, text in enumerate(TEXTS):
        for own in ([], [say("system", "Own.")], [say("developer", "Own.")]):
            talk = [*own, say("user", text)]
            whole = talk if own else [say("system", "Be brief."), *talk]
            kwargs = {"mood": "wild"} if at % 2 else {}
            wanted = written(whole, mood=kwargs.get("mood", "calm"))
            row = {"prompt": talk, "chat_template_kwargs": kwargs}
            out.same(f"{at} {len(own)}", lambda: prompts_of([row], chat, system="Be brief."), [wanted])
        wanted = written([say("system", "Be brief."), say("user", text)], mood="calm")
        out.same(f"text {at}", lambda: prompts_of([{"prompt": text}], chat, system="Be brief.", chat=True), [wanted])
        out.refused(
            f"text {at}",
            lambda: prompts_of([{"prompt": text}], chat, system="Be brief."),
            "row 0",
            "data.system_prompt",
        )
    chat.close()
    return out.members()


KINDS = {
    "F05": f05,
    "F13": f13,
    "F14": f14,
    "F15": f15,
    "F19": f19,
    "F20": f20,
    "F21": f21,
    "F22": f22,
    "F23": f23,
    "F31": f31,
    "T20": t20,
}
