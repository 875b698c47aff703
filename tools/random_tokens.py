#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Token files of random ids: for measuring speed where there is no text, with documents of one length.

    tools/random_tokens.py runs/tokens_gpt2 --vocab-size 50257 --tokens 20000000
    tools/random_tokens.py runs/tokens_qwen2 --vocab-size 151936 --tokens 4000000 --document-length 4096
    tools/random_tokens.py runs/tokens_bert --vocab-size 30522 --tokens 9000000 --document-length 128 --masked

Exit codes: 0 written, 64 a mistake in the call, 73 the folder cannot be written.
"""

import argparse
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "data"))
from prepare_script import Parser, UsageError, run_main
from text_tokenizers import BERT_TOKENS
from token_files import Documents, Vocabulary, write_folder

BLOCK = 1 << 20  # ids that are drawn; more tokens repeat them


def documents(vocab_size, num_tokens, length, seed, special):
    """Documents of `length` ids. With `special` tokens each begins with [CLS] and ends with [SEP]."""
    generator = random.Random(seed)
    block = generator.choices(range(len(special), vocab_size), k=min(BLOCK, num_tokens))
    result = Documents(vocab_size)
    for begin in range(0, num_tokens, length):
        start = begin % len(block)
        ids = block[start : start + length]
        while len(ids) < length:
            ids += block[: length - len(ids)]
        if special:
            ids[0], ids[-1] = special.index("[CLS]"), special.index("[SEP]")
        result.add(ids)
    return result


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="folder for train, eval and vocabulary.safetensors")
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument(
        "--tokens",
        type=int,
        required=True,
        help="of the training split, rounded up to whole documents; evaluation gets a hundredth",
    )
    parser.add_argument("--document-length", type=int, default=1024, help="tokens (1024)")
    parser.add_argument("--masked", action="store_true", help="with BERT's special tokens, for bert_ddp")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in ("vocab_size", "tokens", "document_length"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} {getattr(options, name)}: give at least 1")
    length = options.document_length
    special = BERT_TOKENS if options.masked else []
    if options.vocab_size <= len(special):
        raise UsageError(f"--vocab-size {options.vocab_size}: --masked needs at least {len(special) + 1} ids")
    entries = [(token.encode(), True) for token in special]
    entries += [(b"<%d>" % i, False) for i in range(len(special), options.vocab_size)]
    end = special.index("[SEP]") if special else None
    vocabulary = Vocabulary("random ids", entries, end_of_text=end)
    write_folder(
        options.out,
        vocabulary,
        {
            "train": documents(options.vocab_size, options.tokens, length, options.seed, special),
            "eval": documents(
                options.vocab_size, max(length, options.tokens // 100), length, options.seed + 1, special
            ),
        },
        "random tokens",
    )


if __name__ == "__main__":
    run_main(main)
