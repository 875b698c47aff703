# SPDX-License-Identifier: Apache-2.0
"""data/prepare_chat.py: what counts as target, both layouts, templates, and every refusal. Where there is
the package transformers, its ids and masks must be the same.

usage: prepare_chat_test.py SCRIPT FOLDER     (FOLDER is made anew)
"""

import json
import os
import shutil
import sys

try:
    import jinja2  # noqa: F401
    import tokenizers  # noqa: F401
except ImportError as error:
    print("skipped:", error)
    sys.exit(77)

from token_reader import Folder, read_bytes, refused, run_script

script, work = sys.argv[1:]
shutil.rmtree(work, ignore_errors=True)
os.makedirs(work)
END = "<|im_end|>"


def path(name):
    return os.path.join(work, name)


def write(name, data):
    os.makedirs(os.path.dirname(path(name)), exist_ok=True)
    with open(path(name), "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
    return path(name)


def chat(*turns):
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def write_lines(name, records):
    return write(name, "".join(json.dumps(record) + "\n" for record in records))


def prepare(train, out, *arguments):
    result = run_script(script, train, path(out), *arguments)
    assert result.returncode == 0, result.stderr
    return Folder(path(out)), result


def chatml(record):
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in record["messages"])


CHATS = [
    chat(("system", "Be brief."), ("user", "Where is Zürich? 😀"), ("assistant", "In Switzerland, 中文 😀.")),
    chat(
        ("user", "One?"),
        ("assistant", "Uno."),
        ("user", "Two?"),
        ("assistant", "Dos.\n\nDue."),
        ("user", "unanswered"),
    ),
    chat(
        ("system", "Tools."),
        ("user", "Call it."),
        ("assistant", '<functioncall> {"a": "<x>"}'),
        ("tool", '{"b": 1}'),
        ("assistant", "It is 1."),
    ),
    chat(("user", "x"), ("assistant", "Uno.")),
] * 5
ANSWERS = []
for record in CHATS:
    ANSWERS.append([m["content"] + END for m in record["messages"] if m["role"] == "assistant"])
train = write_lines("train.jsonl", CHATS)
held_out = write_lines("eval.jsonl", CHATS[:3])

# A tokenizer of our own.
own, _ = prepare(train, "own", "--eval", held_out, "--vocab-size", "400")
assert own.size("train") == 20 and own.size("eval") == 3
for split in "train", "eval":
    for i in range(own.size(split)):
        assert own.text(split, i) == chatml(CHATS[i]), own.text(split, i)
        assert own.answers(split, i) == ANSWERS[i], own.answers(split, i)
assert own.words[int(own.metadata["end_of_turn"])].decode() == END
assert own.words[int(own.metadata["end_of_text"])] == b"<|endoftext|>"
assert [w.decode() for w, s in zip(own.words, own.special) if s] == [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
]
before = read_bytes(path("own"))
prepare(train, "own", "--eval", held_out, "--vocab-size", "400")
assert read_bytes(path("own")) == before, "the same input gave other bytes"

# The tokenizer it saved, as a model's own.
given, _ = prepare(train, "given", "--eval", held_out, "--tokenizer", path("own"))
assert given.metadata["tokenizer"] == own.metadata["tokenizer"]
assert given.splits["train"][0] == own.splits["train"][0]
assert given.metadata["end_of_turn"] == own.metadata["end_of_turn"]

# Without evaluation file: every fifth conversation.
split, _ = prepare(train, "split", "--eval-fraction", "0.2", "--vocab-size", "400")
assert split.size("train") == 16 and split.size("eval") == 4
assert split.text("eval", 0) == chatml(CHATS[4])
few, _ = prepare(train, "few", "--eval", held_out, "--limit", "7", "--eval-limit", "2", "--vocab-size", "300")
assert (few.size("train"), few.size("eval")) == (7, 2)

# Glaive's layout, as lines and as one list.
GLAIVE = [
    {
        "system": "SYSTEM: Tools.",
        "chat": 'USER: Call it.\n\n\nASSISTANT: <functioncall> {"a": 1} '
        '<|endoftext|>\n\n\nFUNCTION RESPONSE: {"b": 1}\n\n\nASSISTANT: USER: is a word. <|endoftext|>\n\n\n',
    },
    {"system": "", "chat": "USER: Hello\nthere\n\n\nASSISTANT: Hi.<|endoftext|>"},
]
AS_CHATS = [
    chat(
        ("system", "Tools."),
        ("user", "Call it."),
        ("assistant", '<functioncall> {"a": 1}'),
        ("tool", '{"b": 1}'),
        ("assistant", "USER: is a word."),
    ),
    chat(("user", "Hello\nthere"), ("assistant", "Hi.")),
]
for name, source in (
    ("glaive.jsonl", write_lines("glaive.jsonl", GLAIVE)),
    ("glaive.json", write("glaive.json", json.dumps(GLAIVE, indent=1))),
):
    folder, _ = prepare(source, "glaive", "--eval", source, "--tokenizer", path("own"))
    assert [folder.text("train", i) for i in range(2)] == [chatml(c) for c in AS_CHATS], name
    assert folder.answers("train", 0) == ['<functioncall> {"a": 1}' + END, "USER: is a word." + END]

# Other templates over the same tokenizer.
TEMPLATES = {
    "trimmed": (
        "{% for m in messages %}<|im_start|>[{{ m.role }}]\n\n{{ m.content | trim }}<|im_end|>"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>[assistant]\n\n{% endif %}"
    ),
    "marked": (
        "{%- for m in messages %}\n<|im_start|>{{ m.role }}:{% if m.role == 'assistant' %}"
        "{%- generation -%} {{ m.content }}<|im_end|>{%- endgeneration -%}{% else %} {{ m.content }}"
        "<|im_end|>{% endif %}\n{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant:"
        "{% endif %}"
    ),
    "no prompt": "{% for m in messages %}{{ m.role }}: {{ m.content }}<|endoftext|>\n{% endfor %}",
}
for name, template in TEMPLATES.items():
    folder, result = prepare(
        train,
        "template",
        "--eval",
        held_out,
        "--tokenizer",
        path("own"),
        "--chat-template",
        write(name + ".jinja", template),
    )
    end = "<|endoftext|>" if name == "no prompt" else END
    got = folder.answers("train", 1)
    assert [a.strip() for a in got] == ["Uno." + end, "Dos.\n\nDue." + end], (name, got)
    assert folder.words[int(folder.metadata["end_of_turn"])].decode() == end, name
    assert "warning" not in result.stderr
folder, result = prepare(
    train,
    "template",
    "--eval",
    held_out,
    "--tokenizer",
    path("own"),
    "--chat-template",
    write("bare.jinja", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"),
)
assert "does not learn where to stop" in result.stderr and "end_of_turn" not in folder.metadata
assert folder.answers("train", 1) == ["Uno.", "Dos.\n\nDue."]

# A special token that only the conversation's last turn has ends no turn before it, and what the user
# writes in between is no target; nor does a token with which the next turn begins.
for name, template, last in (
    (
        "last",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if loop.last and not add_generation_prompt %}<|im_end|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}",
        END,
    ),
    ("begins", "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}\n{% endfor %}", ""),
):
    folder, result = prepare(
        train,
        "template",
        "--eval",
        held_out,
        "--tokenizer",
        path("own"),
        "--chat-template",
        write(name + ".jinja", template),
    )
    assert "does not learn where to stop" in result.stderr, name
    assert folder.answers("train", 1) == ["Uno.", "Dos.\n\nDue."], (name, folder.answers("train", 1))
    got = folder.answers("train", 2)
    assert got == ['<functioncall> {"a": "<x>"}', "It is 1." + last], (name, got)

# Refusals: file and line, exit code, and what was there stays.
ok = json.dumps(CHATS[0])
kept = read_bytes(path("own"))
BAD = {
    "no answer": (json.dumps(chat(("user", "a"))), ["no assistant turn"]),
    "role": (json.dumps(chat(("user", "a"), ("bot", "b"))), ["role 'bot'", "system, user"]),
    "late system": (
        json.dumps(chat(("user", "a"), ("system", "s"), ("assistant", "b"))),
        ["message 1", "only the first"],
    ),
    "answer first": (json.dumps(chat(("assistant", "b"))), ["speaks first"]),
    "empty answer": (json.dumps(chat(("user", "a"), ("assistant", " "))), ["message 1", "is empty"]),
    "no content": ('{"messages": [{"role": "user"}]}', ["message 0 has no 'content'"]),
    "no role": ('{"messages": [{"content": "x"}]}', ["message 0 has the unknown role None"]),
    "no list": ('{"text": "a"}', ["neither a 'messages' list"]),
    "a number": ("3", ["neither a 'messages' list"]),
    "broken": (ok[:-3], ["not JSON"]),
    "half": (
        '{"messages": [{"role": "user", "content": "\\ud83d"}, {"role": "assistant", "content": "b"}]}',
        ["\\ud83d is half a character"],
    ),
    "glaive head": ('{"system": "", "chat": "Hi. USER: x"}', ["does not begin with USER:"]),
    "glaive number": ('{"system": "", "chat": 3}', ["must be texts"]),
}
for line, parts in BAD.values():
    bad = write("bad.jsonl", f"{ok}\n\n{line}\n{ok}\n")
    refused(script, 65, ["bad.jsonl:3:", *parts], bad, path("own"), "--eval", held_out)
    refused(script, 65, ["bad.jsonl:3:", *parts], train, path("own"), "--eval", bad)
deep = '{"messages": ' + "[" * 100000 + "]" * 100000 + "}"
refused(
    script,
    65,
    ["bad.jsonl:2:", "nested too deeply"],
    write("bad.jsonl", f"{ok}\n{deep}\n"),
    path("own"),
    "--eval",
    held_out,
)
refused(
    script,
    65,
    ["bad.jsonl:1:", "not readable JSON"],
    write("bad.jsonl", '{"messages": ' + "1" * 5000 + "}\n"),
    path("own"),
    "--eval",
    held_out,
)
refused(
    script,
    65,
    ["bad.json:", "nested too deeply"],
    write("bad.json", f"[{deep}]"),
    path("own"),
    "--eval",
    held_out,
)
refused(script, 64, ["usage", "--limitt"], train, path("own"), "--limitt", "3")
refused(script, 64, ["usage", "must lie between 0 and 1"], train, path("own"), "--eval-fraction", "3")
bad = write("bad.jsonl", ok.encode() + b"\n" + ok.encode().replace(b"brief", b"br\xffef") + b"\n")
refused(script, 65, ["bad.jsonl:2:", "invalid UTF-8", "0xff at byte"], bad, path("own"), "--eval", held_out)
refused(script, 65, ["none.jsonl", "evaluation set"], train, path("own"), "--eval", write("none.jsonl", "\n"))
refused(script, 65, ["none.jsonl", "training set"], path("none.jsonl"), path("own"), "--eval", held_out)
one = write_lines("one.jsonl", CHATS[:1])
refused(script, 65, ["one.jsonl", "evaluation set"], one, path("own"))
refused(script, 65, ["nothing.jsonl"], path("nothing.jsonl"), path("own"))
refused(script, 64, ["neither tokenizer.json"], train, path("own"), "--tokenizer", path("missing"))
plain = path("plain")
os.makedirs(plain)
shutil.copy(path("own/tokenizer.json"), plain)
refused(script, 64, ["no chat template", "--chat-template"], train, path("own"), "--tokenizer", plain)
refused(
    script,
    65,
    ["train.jsonl:1:", "no roles here"],
    train,
    path("own"),
    "--tokenizer",
    plain,
    "--chat-template",
    write("raise.jinja", "{{ raise_exception('no roles here') }}"),
)
refused(
    script,
    65,
    ["template is not valid"],
    train,
    path("own"),
    "--tokenizer",
    plain,
    "--chat-template",
    write("broken.jinja", "{% for %}"),
)
refused(
    script,
    65,
    ["train.jsonl:1:", "changes earlier turns"],
    train,
    path("own"),
    "--tokenizer",
    plain,
    "--chat-template",
    write("latest.jinja", "{{ messages[-1].content }}<|im_end|>"),
)
assert read_bytes(path("own")) == kept, "a refusal changed the files"
mixed = write("mixed.jsonl", "\n".join([ok, *(line for line, _ in list(BAD.values())[:5]), ok]) + "\n")
folder, result = prepare(mixed, "mixed", "--eval", held_out, "--tokenizer", path("own"), "--skip-bad")
assert folder.size("train") == 2 and "skipped: 5 conversations" in result.stdout
assert "mixed.jsonl:2:" in result.stderr
# Lines that are not UTF-8, not JSON or not readable JSON are skipped as well; the last one is truncated.
good = ok.encode()
mixed = write(
    "mixed.jsonl",
    b"\n".join(
        [
            good,
            good.replace(b"brief", b"br\xffef"),
            good[:-3],
            b"",
            deep.encode(),
            b'{"messages": ' + b"1" * 5000 + b"}",
            good,
            good[:40],
        ]
    ),
)
for arguments in ((mixed, "--eval", held_out), (train, "--eval", mixed)):
    folder, result = prepare(arguments[0], "mixed", *arguments[1:], "--tokenizer", path("own"), "--skip-bad")
    assert folder.size("eval" if arguments[0] == train else "train") == 2, result.stdout
    assert "skipped: 5 conversations" in result.stdout, result.stdout
    for part in "mixed.jsonl:2: invalid UTF-8", "mixed.jsonl:3: not JSON", "mixed.jsonl:8: not JSON":
        assert part in result.stderr, (part, result.stderr)
refused(
    script,
    65,
    ["bad.json:", "not JSON"],
    write("bad.json", f"[{ok}, {ok[:-3]}]"),
    path("own"),
    "--eval",
    held_out,
    "--skip-bad",
)

done = "own and given tokenizers, templates, Glaive, refusals"
try:
    import transformers
except ImportError:
    print(done + "; no package transformers to compare with")
    sys.exit(0)
tokenizer = transformers.AutoTokenizer.from_pretrained(path("own"))
marked = TEMPLATES["marked"]
folder, _ = prepare(
    train, "marked", "--eval", held_out, "--tokenizer", path("own"), "--chat-template", path("marked.jinja")
)
for i, record in enumerate(CHATS):
    ids = tokenizer.apply_chat_template(record["messages"], return_dict=True)["input_ids"]
    assert own.ids("train", i) == list(ids), i
    theirs = tokenizer.apply_chat_template(
        record["messages"], chat_template=marked, return_dict=True, return_assistant_tokens_mask=True
    )
    assert folder.ids("train", i) == list(theirs["input_ids"]), i
    tensors = folder.splits["train"][0]
    begin, end = tensors["documents"][i : i + 2]
    assert list(tensors["targets"][begin:end]) == list(theirs["assistant_masks"]), i
print(done + "; transformers agrees")
