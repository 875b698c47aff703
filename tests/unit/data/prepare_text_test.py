# SPDX-License-Identifier: Apache-2.0
"""data/prepare_text.py: bytes and characters, which need no package, and byte-level BPE where there is
the package tokenizers.

usage: prepare_text_test.py SCRIPT FOLDER     (FOLDER is made anew)
"""

import importlib.util
import os
import shutil
import sys

from token_reader import Folder, read_bytes, refused, run_script

script, work = sys.argv[1:]
shutil.rmtree(work, ignore_errors=True)
os.makedirs(work)
TEXT = "".join(f"Line {i}: naïve façade, {i * i} €\n\n  indented 😀\n" for i in range(200))


def path(name):
    return os.path.join(work, name)


def write(name, data):
    with open(path(name), "wb") as file:
        file.write(data if isinstance(data, bytes) else data.encode())
    return path(name)


def prepare(*arguments):
    result = run_script(script, *arguments)
    assert result.returncode == 0, result.stderr
    return Folder(str(arguments[1]))


def whole(folder):
    return folder.text("train", 0) + folder.text("eval", 0)


text = write("text.txt", TEXT)

folder = prepare(text, path("bytes"), "--tokenizer", "bytes", "--eval-fraction", "0.25")
assert folder.metadata["vocab_size"] == "256" and "end_of_text" not in folder.metadata
data = TEXT.encode()
assert bytes(folder.ids("train", 0)) == data[: int(len(data) * 0.75)]
assert bytes(folder.ids("eval", 0)) == data[int(len(data) * 0.75) :]
assert "targets" not in folder.splits["train"][0]

folder = prepare(text, path("chars"), "--tokenizer", "chars")
assert folder.words == [c.encode() for c in sorted(set(TEXT))], folder.words
assert whole(folder) == TEXT
assert len(folder.ids("train", 0)) == int(len(TEXT) * 0.9)

# Several documents, each with its end.
several = write("several.txt", "one\n---\ntwo two\n---\n\n---\nthree\n---\nfour")
result = run_script(script, several, path("several"), "--tokenizer", "chars", "--separator", "\\n---\\n")
assert result.stdout.startswith("left out: 1 empty documents\n"), result
folder = Folder(path("several"))
end = int(folder.metadata["end_of_text"])
assert folder.words[end] == b"<|endoftext|>" and folder.special[end] == 1 and sum(folder.special) == 1
assert [folder.text("train", i) for i in range(folder.size("train"))] == [
    t + "<|endoftext|>" for t in ("one", "two two", "three")
]
assert folder.text("eval", 0) == "four<|endoftext|>" and folder.size("eval") == 1

# Windows: a line end of the separator is LF or CRLF, and a byte order mark is no token.
SPEECH = "First speech,\nsecond line.\n\nAnother one.\n\n" * 30
for kind in "chars", "bytes":
    expected = [t + "<|endoftext|>" for t in ("First speech,\r\nsecond line.", "Another one.") * 27]
    crlf = write("crlf.txt", "\ufeff" + SPEECH.replace("\n", "\r\n"))
    folder = prepare(crlf, path("crlf_" + kind), "--tokenizer", kind, "--separator", "\\n\\n")
    assert [folder.text("train", i) for i in range(folder.size("train"))] == expected
    folder = prepare(
        write("lf.txt", SPEECH), path("lf_" + kind), "--tokenizer", kind, "--separator", "\\n\\n"
    )
    assert folder.size("train") == 54 and folder.size("eval") == 6
marked = write("marked.jsonl", b"\xef\xbb\xbf" + b'{"text": "a"}\r\n{"text": "b"}\r\n')
assert prepare(marked, path("marked")).text("train", 0) == "a<|endoftext|>"
for source in crlf, marked:
    refused(
        script,
        65,
        ["separator '\\n--\\n' occurs in no text file"],
        source,
        path("x"),
        "--separator",
        "\\n--\\n",
    )
assert run_script(script, crlf, several, path("two"), "--separator", "\\n---\\n").returncode == 0

lines = write("lines.jsonl", '{"text": "caf\\u00e9"}\n\n{"text": "b", "other": 1}\n')
folder = prepare(lines, path("lines"))
assert folder.text("train", 0) == "café<|endoftext|>" and folder.text("eval", 0) == "b<|endoftext|>"
assert folder.metadata["vocab_size"] == "257"

# More characters than U16 has ids.
many = "".join(map(chr, [*range(0x20, 0xD800), *range(0xE000, 0x14000)])) * 2
folder = prepare(write("many.txt", many), path("many"), "--tokenizer", "chars")
assert folder.splits["train"][0]["tokens"].typecode == "i"
assert whole(folder) == many

# The same input gives the same bytes; what fails leaves what was there.
before = read_bytes(path("chars"))
prepare(text, path("chars"), "--tokenizer", "chars")
assert read_bytes(path("chars")) == before
bad = write("bad.txt", b"fine\nalso fine\nbad \xe9 here\n")
refused(
    script, 65, ["bad.txt:3:", "invalid UTF-8", "0xe9 at byte 4"], bad, path("chars"), "--tokenizer", "chars"
)
assert read_bytes(path("chars")) == before
prepare(bad, path("bad"), "--tokenizer", "bytes")  # bytes are bytes
# The disk is full behind the vocabulary, which is written first.
refused(script, 73, ["chars: cannot write"], text, path("chars"), largest_file=4096)
assert read_bytes(path("chars")) == before

refused(script, 65, ["bad.jsonl:2:", "not JSON"], write("bad.jsonl", '{"text": "a"}\n{"text": \n'), path("x"))
refused(script, 65, ["none.jsonl:1:", "no 'text'"], write("none.jsonl", '{"texts": "a"}\n'), path("x"))
refused(
    script, 65, ["half.jsonl:1:", "\\ud800 is half"], write("half.jsonl", '{"text": "\\ud800"}\n'), path("x")
)
refused(script, 65, ["no text"], write("empty.txt", ""), path("x"))
refused(
    script, 65, ["evaluation set is empty"], write("short.txt", "abc"), path("x"), "--eval-fraction", "1e-20"
)
refused(script, 65, ["missing.txt"], path("missing.txt"), path("x"))
refused(script, 64, ["neither bytes, chars"], text, path("x"), "--tokenizer", "byte")
assert not os.path.exists(path("x"))

if not importlib.util.find_spec("tokenizers"):
    print("bytes and characters; no package tokenizers: BPE was not tried")
    sys.exit(0)
folder = prepare(text, path("bpe"), "--tokenizer", "bpe", "--vocab-size", "400")
assert folder.metadata["vocab_size"] == "400"
assert whole(folder).replace("<|endoftext|>", "") == TEXT
assert folder.ids("train", 0)[-1] == int(folder.metadata["end_of_text"])
again = prepare(text, path("again"), "--tokenizer", path("bpe"))
assert again.ids("train", 0) == folder.ids("train", 0)
assert again.metadata["tokenizer"] == folder.metadata["tokenizer"]
refused(
    script,
    64,
    ["--vocab-size 100", "at least 257"],
    text,
    path("x"),
    "--tokenizer",
    "bpe",
    "--vocab-size",
    "100",
)
refused(script, 65, ["not a tokenizer"], text, path("x"), "--tokenizer", write("tokenizer.json", "{}"))

# A long text is cut into chunks: its ids are those of the whole.
sys.path.insert(0, os.path.dirname(script))
import text_tokenizers  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

tokenizer = text_tokenizers.load_tokenizer(path("bpe"))
text_tokenizers.CHUNK_CHARACTERS = 37
assert len(list(text_tokenizers.chunks(TEXT))) > 50
assert tokenizer.encode(TEXT) == Tokenizer.from_file(path("bpe/tokenizer.json")).encode(TEXT).ids

# SentencePiece's style: a mark for blanks, and bytes of characters that have no id.
from tokenizers import decoders, models, pre_tokenizers  # noqa: E402

words = ["<unk>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\u2581", *"atexofwrds", "or"]
pieces = Tokenizer(
    models.BPE({word: i for i, word in enumerate(words)}, [("o", "r")], unk_token="<unk>", byte_fallback=True)
)
pieces.add_special_tokens(["<unk>", "</s>"])
pieces.pre_tokenizer = pre_tokenizers.Metaspace()
pieces.decoder = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
)
pieces.save(path("pieces.json"))
WORDS = "a text \u20ac of\nwords words\n" * 9
folder = prepare(
    write("words.txt", WORDS), path("pieces"), "--tokenizer", path("pieces.json"), "--eval-fraction", "0.3"
)
assert folder.text("train", 0) == " " + WORDS[: int(len(WORDS) * 0.7)] + "</s>"
assert b"\xe2" in folder.words and b"or" in folder.words

# WordPiece: BERT's special tokens come first, and every document is [CLS] text [SEP].
SPEECHES = "\n\n".join(f"First Citizen:\nSpeak, speak {i % 7} words and unspoken." for i in range(60))
speeches = write("speeches.txt", SPEECHES)
folder = prepare(
    speeches, path("wordpiece"), "--tokenizer", "wordpiece", "--vocab-size", "60", "--separator", "\\n\\n"
)
BERT_TOKENS = [b"[PAD]", b"[UNK]", b"[CLS]", b"[SEP]", b"[MASK]"]
assert folder.words[:5] == BERT_TOKENS, folder.words[:5]
assert folder.words[5:] == sorted(folder.words[5:]) and any(word.startswith(b"##") for word in folder.words)
assert folder.metadata["end_of_text"] == "3"
ids = list(folder.ids("train", 1))
assert ids[0] == 2 and ids[-1] == 3 and min(ids[1:-1]) > 4, ids
joined = b" ".join(folder.words[i] for i in ids[1:-1]).replace(b" ##", b"")
assert joined == b"first citizen : speak , speak 1 words and unspoken .", joined
# The saved tokenizer frames a text as the documents are framed.
encoded = Tokenizer.from_file(path("wordpiece/tokenizer.json")).encode(
    "First Citizen: Speak, speak 1 words and UNSPOKEN."
)
assert encoded.ids == ids, (encoded.ids, ids)
again = prepare(speeches, path("wordpiece_again"), "--tokenizer", path("wordpiece"), "--separator", "\\n\\n")
assert list(again.ids("train", 1)) == ids and again.metadata["tokenizer"] == folder.metadata["tokenizer"]
refused(
    script,
    64,
    ["--vocab-size 10", "at least"],
    speeches,
    path("x"),
    "--tokenizer",
    "wordpiece",
    "--vocab-size",
    "10",
)
print("bytes, characters, BPE, WordPiece")
