#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns text into token files for the pre-training of libddp's language models.

usage: prepare_text.py FILE [FILE ...] OUT_DIR [--tokenizer KIND] [...]

FILE     UTF-8 text, one document a file; or JSON Lines (.jsonl) of {"text": "..."}, one a line
OUT_DIR  receives train.safetensors, eval.safetensors and vocabulary.safetensors (data/README.md)
--tokenizer KIND     bytes (default; any encoding), chars (one id a character that occurs),
                     bpe (byte-level BPE trained on the text, saved to OUT_DIR as tokenizer.json),
                     wordpiece (BERT's, lower case, trained and saved likewise; documents become
                     [CLS] text [SEP]),
                     the path of a tokenizer.json, of a folder with one or with GPT-2's vocab.json and
                     merges.txt, or tiktoken:NAME (tiktoken:gpt2)
--vocab-size N       ids of bpe and wordpiece (default 4096)
--eval-fraction F    share of the evaluation split (default 0.1): the end of a single document, else
                     the last documents
--separator TEXT     cuts text files into documents at TEXT, which is left out. \\n is a line end, LF or
                     CRLF. TEXT must occur in one of the files

A byte order mark at the start of a file is left out.

Where there are several documents, or the tokenizer has an id for it, each document ends with the id of
<|endoftext|>. bytes and chars need the standard library only.
"""

import argparse
import json
import os
import re

from prepare_script import Parser, PrepareError, UsageError, run_main
from text_tokenizers import (
    BERT_TOKENS,
    END_OF_TEXT,
    ByteTokenizer,
    CharacterTokenizer,
    open_tokenizer,
    train_tokenizer,
    train_wordpiece,
)
from token_files import Documents, check_unicode, decode_utf8, open_text, read_json_lines, write_folder


def read_json_documents(path, as_bytes):
    for line, record in read_json_lines(path):
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise PrepareError("no 'text'", path, line)
        check_unicode(text, path, line)
        yield text.encode() if as_bytes else text


def read_text(path, as_bytes):
    with open_text(path) as file:
        data = file.read()
    return data if as_bytes else decode_utf8(data, path)


def separator_pattern(separator, as_bytes):
    """Matches the separator with either kind of line end."""
    pattern = "\r?\n".join(re.escape(part) for part in separator.split("\n"))
    return re.compile(pattern.encode() if as_bytes else pattern)


def read_documents(paths, as_bytes, separator):
    """The documents of all files. Empty ones are left out, and their number is printed."""
    documents, cuts = [], 0
    for path in paths:
        if path.endswith(".jsonl"):
            documents += read_json_documents(path, as_bytes)
            continue
        text = read_text(path, as_bytes)
        parts = separator_pattern(separator, as_bytes).split(text) if separator else [text]
        cuts += len(parts) - 1
        documents += parts
    if separator and not cuts:
        raise PrepareError(
            f"the separator {separator!r} occurs in no text file; fix: give a text that "
            "stands between the documents, or leave out --separator",
            paths[0],
        )
    filled = [document for document in documents if document]
    if filled and len(filled) < len(documents):
        print(f"left out: {len(documents) - len(filled)} empty documents")
    return filled


def split(documents, fraction):
    if len(documents) == 1:
        cut = int(len(documents[0]) * (1 - fraction))
        return {"train": [documents[0][:cut]], "eval": [documents[0][cut:]]}
    held_out = max(1, round(len(documents) * fraction))
    return {"train": documents[:-held_out], "eval": documents[-held_out:]}


def tokenizer_files(tokenizer, config):
    config["clean_up_tokenization_spaces"] = False
    return {
        "tokenizer.json": (tokenizer.tokenizer.to_str(pretty=False) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=1) + "\n").encode(),
    }


def make_tokenizer(args, documents):
    """A tokenizer and the files that belong to it."""
    several = len(documents) > 1
    if args.tokenizer == "bytes":
        return ByteTokenizer(several), {}
    if args.tokenizer == "chars":
        return CharacterTokenizer(documents, several), {}
    if args.tokenizer == "bpe":
        tokenizer = train_tokenizer(
            split(documents, args.eval_fraction)["train"], args.vocab_size, [END_OF_TEXT], "bpe"
        )
        return tokenizer, tokenizer_files(
            tokenizer, {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT}
        )
    if args.tokenizer == "wordpiece":
        tokenizer = train_wordpiece(
            split(documents, args.eval_fraction)["train"], args.vocab_size, "wordpiece"
        )
        return tokenizer, tokenizer_files(
            tokenizer,
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **{token[1:-1].lower() + "_token": token for token in BERT_TOKENS},
            },
        )
    if not args.tokenizer.startswith("tiktoken:") and not os.path.exists(args.tokenizer):
        raise UsageError(
            f"--tokenizer {args.tokenizer} is neither bytes, chars, bpe, wordpiece, "
            "tiktoken:NAME nor a path that exists"
        )
    return open_tokenizer(args.tokenizer), {}


def parse_arguments():
    summary, usage, details = __doc__.split("\n\n", 2)
    parser = Parser(
        usage=usage[7:],
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("out", help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", default="bytes", help=argparse.SUPPRESS)
    parser.add_argument("--vocab-size", type=int, default=4096, help=argparse.SUPPRESS)
    parser.add_argument("--eval-fraction", type=float, default=0.1, help=argparse.SUPPRESS)
    parser.add_argument("--separator", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not 0 < args.eval_fraction < 1:
        parser.error(f"--eval-fraction {args.eval_fraction} must lie between 0 and 1")
    args.separator = args.separator.replace("\\n", "\n")
    return args


def main():
    args = parse_arguments()
    documents = read_documents(args.files, args.tokenizer == "bytes", args.separator)
    if not documents:
        raise PrepareError("no text: nothing was written", args.files[0])
    tokenizer, files = make_tokenizer(args, documents)
    vocabulary = tokenizer.vocabulary
    splits = {}
    for name, texts in split(documents, args.eval_fraction).items():
        splits[name] = Documents(len(vocabulary.entries))
        for text in texts:
            splits[name].add(tokenizer.encode(text), end=vocabulary.end_of_text)
    write_folder(args.out, vocabulary, splits, os.path.splitext(os.path.basename(args.files[0]))[0], files)


if __name__ == "__main__":
    run_main(main)
