#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Turns conversations into token files for libddp's language models; the loss counts the assistant's turns.

usage: prepare_chat.py TRAIN OUT_DIR [--eval FILE | --eval-fraction F] [--tokenizer FOLDER] [...]

TRAIN    JSON Lines, one conversation a line, either of
           {"messages": [{"role": "system|user|assistant|tool", "content": "..."}, ...]}
           {"system": "SYSTEM: ...", "chat": "USER: ... ASSISTANT: ... <|endoftext|> ..."}   (Glaive
           function calling, version 2; also as one JSON list)
OUT_DIR  receives train.safetensors, eval.safetensors and vocabulary.safetensors (data/README.md)
--eval FILE          conversations of the evaluation split, laid out as TRAIN
--eval-fraction F    without --eval: every (1/F)-th conversation of TRAIN (default 0.05)
--tokenizer FOLDER   the model's own: tokenizer.json, and its chat template in chat_template.jinja or
                     tokenizer_config.json. Without it a byte-level BPE tokenizer with ChatML turns
                     (<|im_start|>role ... <|im_end|>) is trained on TRAIN and saved to OUT_DIR
--vocab-size N       ids of the tokenizer trained here (default 4096)
--chat-template FILE another template (Jinja); `chatml` is the one above
--limit N, --eval-limit N   only the first N conversations of a split
--skip-bad           leaves out conversations (and lines that are no JSON) in error, and counts them

Targets are the tokens of each assistant turn with the special token that ends it. Needs the packages
tokenizers and jinja2. Errors name file and line; nothing is written then.
"""

import argparse
import bisect
import json
import os
import re
import sys

from prepare_script import Parser, PrepareError, UsageError, run_main
from text_tokenizers import END_OF_TEXT, TURN_BEGIN, TURN_END, load_tokenizer, train_tokenizer
from token_files import Documents, check_unicode, decode_utf8, read_json_lines, write_folder

ROLES = ("system", "user", "assistant", "tool", "function")
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + "
    "message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
GLAIVE_TURN = re.compile(r"(?:^|\n)\s*(USER|ASSISTANT|FUNCTION RESPONSE):")
GLAIVE_ROLES = {"USER": "user", "ASSISTANT": "assistant", "FUNCTION RESPONSE": "tool"}
BATCH = 512


def from_glaive(record, path, line):
    system, chat = record.get("system", ""), record["chat"]
    if not isinstance(system, str) or not isinstance(chat, str):
        raise PrepareError("'system' and 'chat' must be texts", path, line)
    messages = []
    system = re.sub(r"^\s*SYSTEM:\s*", "", system).strip()
    if system:
        messages.append({"role": "system", "content": system})
    before, *parts = GLAIVE_TURN.split(chat)
    if before.strip():
        raise PrepareError(
            f"'chat' does not begin with USER: or ASSISTANT: but with {before.strip()[:40]!r}", path, line
        )
    for name, text in zip(parts[::2], parts[1::2]):
        messages.append({"role": GLAIVE_ROLES[name], "content": text.replace(END_OF_TEXT, "").strip()})
    return messages


def check_message(message, i, path, line):
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise PrepareError(f"message {i} has no 'content' text", path, line)
    role = message.get("role")
    if role not in ROLES:
        raise PrepareError(
            f"message {i} has the unknown role {role!r}; known are {', '.join(ROLES)}", path, line
        )
    if role == "system" and i > 0:
        raise PrepareError(f"message {i} has the role 'system', which only the first may have", path, line)
    if role == "assistant" and not message["content"].strip():
        raise PrepareError(f"message {i}, an assistant turn, is empty", path, line)
    check_unicode(message["content"], path, line)


def to_messages(record, path, line):
    if isinstance(record, dict) and isinstance(record.get("messages"), list):
        messages = record["messages"]
    elif isinstance(record, dict) and "chat" in record:
        messages = from_glaive(record, path, line)
    else:
        raise PrepareError("neither a 'messages' list nor a 'chat' text", path, line)
    for i, message in enumerate(messages):
        check_message(message, i, path, line)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise PrepareError("no assistant turn: nothing to learn from", path, line)
    if turns[0] == 0:
        raise PrepareError("the assistant speaks first: its answer has no prompt", path, line)
    return messages


class Skipped:
    """What --skip-bad left out."""

    def __init__(self, allowed):
        self.allowed, self.count = allowed, 0

    def __call__(self, error):
        if not self.allowed:
            raise error
        self.count += 1
        if self.count <= 5:
            print(f"skipped: {error}", file=sys.stderr)


def read_conversations(path, skipped, limit):
    """[(line, messages)]"""
    result = []
    for line, record in read_json_lines(path, skipped):
        if limit and len(result) == limit:
            break
        try:
            result.append((line, to_messages(record, path, line)))
        except PrepareError as error:
            skipped(error)
    return result


class ChatTemplate:
    def __init__(self, source, tokens):
        try:
            import jinja2
            import jinja2.ext
            import jinja2.sandbox
        except ImportError:
            raise UsageError(
                "chat templates need the package jinja2: python3 -m pip install jinja2"
            ) from None

        def raise_exception(message):
            raise jinja2.exceptions.TemplateError(message)

        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = raise_exception
        # No strftime_now: templates that know the date would give other files tomorrow.
        # Marks of what the assistant wrote, in templates that have them: found here without.
        source = re.sub(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}", r"{#\1 \2#}", source)
        self.failures = (jinja2.exceptions.TemplateError, TypeError)
        try:
            self.template = environment.from_string(source)
        except jinja2.exceptions.TemplateError as error:
            raise PrepareError(f"the chat template is not valid: {error}") from None
        self.tokens = tokens

    def render(self, messages, add_generation_prompt=False):
        return self.template.render(
            messages=messages,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.tokens,
        )

    def answers(self, messages, special):
        """The whole text, and (begin, end) of each assistant turn in it, with the special token
        (pattern `special`) that ends it."""
        text = self.render(messages)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            content = message["content"].strip()
            prompt = self.render(messages[:i], add_generation_prompt=True)
            bare = self.render(messages[:i])
            if prompt != bare and text.startswith(prompt):
                begin = len(prompt)
            else:  # no generation prompt, or not what the template writes before a turn
                begin = text.find(content, len(bare)) if text.startswith(bare) else -1
            found = text.find(content, begin) if begin >= 0 else -1
            if found < 0:
                raise ValueError(f"the chat template changes earlier turns, or message {i} itself")
            end = found + len(content)
            spans.append((begin, end + self.end_mark(messages[: i + 1], content, begin, text[end:], special)))
        return text, spans

    def end_mark(self, turns, content, begin, rest, special):
        """The length of what ends the last of `turns` up to its special token, where `rest` goes on so: a
        template may end only the conversation's last turn with one, and the next one in `rest` is then
        another's."""
        mark = special.search(rest) if special else None
        if not mark:
            return 0
        alone = self.render(turns)
        found = alone.find(content, begin)
        own = alone[found + len(content) :] if found >= 0 else ""
        return mark.end() if own.startswith(rest[: mark.end()]) else 0


def load_template(folder, chosen):
    """The template's text and the special tokens by the names that templates use."""
    config = {}
    if folder and os.path.isdir(folder):
        path = os.path.join(folder, "tokenizer_config.json")
        if os.path.exists(path):
            with open(path, "rb") as file:
                try:
                    config = json.loads(decode_utf8(file.read(), path))
                except json.JSONDecodeError as error:
                    raise PrepareError(f"not JSON: {error.msg}", path, error.lineno) from None
    tokens = {
        key: value["content"] if isinstance(value, dict) else value
        for key, value in config.items()
        if key.endswith("_token") and isinstance(value, (str, dict))
    }
    if chosen == "chatml":
        return CHATML, tokens
    jinja = chosen or (
        os.path.join(folder, "chat_template.jinja") if folder and os.path.isdir(folder) else ""
    )
    if chosen or os.path.exists(jinja):
        with open(jinja, "rb") as file:
            return decode_utf8(file.read(), jinja), tokens
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {t["name"]: t["template"] for t in template}.get("default")
    if not template:
        raise UsageError(
            f"{folder} has no chat template (chat_template.jinja, or chat_template in "
            "tokenizer_config.json): give one with --chat-template, or the word chatml"
        )
    return template, tokens


def make_documents(conversations, path, tokenizer, template, skipped):
    """Documents of a split, and the ids that ended answers, with how often."""
    documents = Documents(len(tokenizer.vocabulary.entries), with_targets=True)
    special = (
        re.compile("|".join(map(re.escape, tokenizer.special_tokens))) if tokenizer.special_tokens else None
    )
    ends = {}
    for first in range(0, len(conversations), BATCH):
        rendered = []
        for line, messages in conversations[first : first + BATCH]:
            try:
                rendered.append((line, *template.answers(messages, special)))
            except (ValueError, *template.failures) as error:
                skipped(PrepareError(str(error), path, line))
        encodings = tokenizer.tokenizer.encode_batch(
            [text for _, text, _ in rendered], add_special_tokens=False
        )
        for (_, _, spans), encoding in zip(rendered, encodings):
            ids, offsets = encoding.ids, encoding.offsets
            targets = bytearray(len(ids))
            begins = [begin for begin, _ in offsets]
            for begin, end in spans:
                last, t = None, bisect.bisect_left(begins, begin)
                while t < len(ids) and offsets[t][1] <= end:
                    targets[t], last, t = 1, ids[t], t + 1
                ends[last] = ends.get(last, 0) + 1
            documents.add(ids, targets)
    return documents, ends


def find_end_of_turn(ends, tokenizer):
    marks = {i: n for i, n in ends.items() if i is not None and tokenizer.vocabulary.entries[i][1]}
    if sum(marks.values()) < sum(ends.values()):
        print(
            "warning: the chat template ends assistant turns without a special token: a model "
            "trained on them does not learn where to stop",
            file=sys.stderr,
        )
    return max(marks, key=marks.get) if marks else None


def trained_tokenizer(conversations, vocab_size, template):
    """A tokenizer, and the files that make it one for transformers too."""

    def texts():
        for _, messages in conversations:
            for message in messages:
                yield message["role"] + "\n"
                yield message["content"]

    tokenizer = train_tokenizer(texts(), vocab_size, [END_OF_TEXT, TURN_BEGIN, TURN_END], "chatml-bpe")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "chat_template": template,
        "clean_up_tokenization_spaces": False,
    }
    return tokenizer, {
        "tokenizer.json": (tokenizer.tokenizer.to_str(pretty=False) + "\n").encode(),
        "tokenizer_config.json": (json.dumps(config, indent=1) + "\n").encode(),
    }


def parse_arguments():
    summary, usage, details = __doc__.split("\n\n", 2)
    parser = Parser(
        usage=usage[7:],
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("train", help=argparse.SUPPRESS)
    parser.add_argument("out", help=argparse.SUPPRESS)
    parser.add_argument("--eval", help=argparse.SUPPRESS)
    parser.add_argument("--eval-fraction", type=float, default=0.05, help=argparse.SUPPRESS)
    parser.add_argument("--tokenizer", help=argparse.SUPPRESS)
    parser.add_argument("--vocab-size", type=int, default=4096, help=argparse.SUPPRESS)
    parser.add_argument("--chat-template", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--eval-limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--skip-bad", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.limit < 0 or args.eval_limit < 0:
        parser.error("limits must not be negative")
    if not args.eval and not 0 < args.eval_fraction < 1:
        parser.error(f"--eval-fraction {args.eval_fraction} must lie between 0 and 1")
    return args


def read_splits(args, skipped):
    """{split: (path, conversations)}"""
    train = read_conversations(args.train, skipped, args.limit)
    if args.eval:
        held_out = read_conversations(args.eval, skipped, args.eval_limit)
    else:
        every = max(2, round(1 / args.eval_fraction))
        held_out = train[every - 1 :: every]
        train = [c for i, c in enumerate(train) if i % every != every - 1]
        held_out = held_out[: args.eval_limit] if args.eval_limit else held_out
    for path, conversations, what in (
        (args.train, train, "training"),
        (args.eval or args.train, held_out, "evaluation"),
    ):
        if not conversations:
            raise PrepareError(f"no conversation for the {what} set: nothing was written", path)
    return {"train": (args.train, train), "eval": (args.eval or args.train, held_out)}


def main():
    args = parse_arguments()
    skipped = Skipped(args.skip_bad)
    splits = read_splits(args, skipped)
    files = {}
    if args.tokenizer:
        tokenizer = load_tokenizer(args.tokenizer)
        folder = args.tokenizer if os.path.isdir(args.tokenizer) else os.path.dirname(args.tokenizer) or "."
        source, tokens = load_template(folder, args.chat_template)
    else:
        source, tokens = load_template(None, args.chat_template or "chatml")
        tokenizer, files = trained_tokenizer(splits["train"][1], args.vocab_size, source)
    template = ChatTemplate(source, tokens)
    documents, ends = {}, {}
    for split, (path, conversations) in splits.items():
        documents[split], found = make_documents(conversations, path, tokenizer, template, skipped)
        for i, n in found.items():
            ends[i] = ends.get(i, 0) + n
    tokenizer.vocabulary.end_of_turn = find_end_of_turn(ends, tokenizer)
    name = os.path.splitext(os.path.basename(args.train))[0]
    write_folder(args.out, tokenizer.vocabulary, documents, name, files)
    if skipped.count:
        print(f"skipped: {skipped.count} conversations with errors")


if __name__ == "__main__":
    run_main(main)
