#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Uses a trained language model in the terminal: starts its trainer with the settings of the run.

usage: chat.py [--config FILE.yaml] [key=value ...] [option ...]

    tools/chat.py --config examples/configs/lora_tiny.yaml lora.adapter=FOLDER      chat with an adapter
    tools/chat.py --config examples/configs/lora_tiny.yaml checkpoint.dir=FOLDER    with a checkpoint
    tools/chat.py --config FILE.yaml lora.rank=0 model.init=pretrained model.path=FOLDER    with a model
    tools/chat.py --config examples/configs/gpt2_sample.yaml checkpoint.dir=FOLDER  continue texts

Each line is a message (gpt2_ddp: a text to continue). /reset forgets the conversation, Ctrl-C and Ctrl-D
end it. decode.max_new_tokens, .temperature, .top_k and .seed say how the model answers (gpt2_ddp: sample.*).

--program PATH        lora_ddp if the settings have a section lora, else gpt2_ddp. A name is looked for in
                      build/examples/ and in the install tree
--system TEXT         a system message before the conversation
--tokenizer PATH      tokenizer.json or its folder, or tiktoken:NAME. Default: the one in tokens.path, else
                      in model.path; files of bytes or characters need none
--chat-template FILE  another template (Jinja) than the one beside the tokenizer, or the word chatml

Needs the packages tokenizers and jinja2, but not for files of bytes or characters. Exit codes: 0 after
Ctrl-C and Ctrl-D, 64 a mistake in the call, 65 an unusable tokenizer or vocabulary, else the trainer's.
"""

import argparse
import codecs
import contextlib
import json
import os
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tools"), os.path.join(ROOT, "data")]
# pylint: disable=wrong-import-position
from prepare_chat import ChatTemplate, load_template  # noqa: E402
from prepare_script import Parser, PrepareError, UsageError, run_main  # noqa: E402
from scaling.files import linked  # noqa: E402
from text_tokenizers import holds_tokenizer, open_tokenizer, tokenizer_of, tokenizers_package  # noqa: E402
from token_files import read_vocabulary  # noqa: E402


def parse_arguments(arguments):
    """The tool's options, and what the trainer gets."""
    summary, usage, details = __doc__.split("\n\n", 2)
    parser = Parser(
        usage=usage[7:],
        description=summary,
        epilog=details,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in "--program", "--system", "--tokenizer", "--chat-template", "--config":
        parser.add_argument(option, help=argparse.SUPPRESS)
    options, settings = parser.parse_known_args(arguments)
    if options.config:
        settings[:0] = ["--config", options.config]
    return options, settings


def has_adapters(config, settings):
    """Whether the settings have a section lora."""
    lines = [setting for setting in settings if "=" in setting]
    if config:
        with open(config, encoding="utf-8", errors="replace", opener=linked) as file:
            lines += file
    return any(line.startswith(("lora:", "lora.")) for line in lines)


def find_program(name):
    if os.sep in name:
        return name
    for folder in os.path.join(ROOT, "build", "examples"), os.path.join(ROOT, "examples"):
        if os.access(os.path.join(folder, name), os.X_OK):
            return os.path.join(folder, name)
    path = shutil.which(name)
    if not path:
        raise UsageError(
            f"{name} is not built; fix: cmake --build build --target {name}, or give it with --program PATH"
        )
    return path


class Program:
    """A trainer that answers prompts of token ids (examples/language/prompt_loop.hpp)."""

    def __init__(self, command):
        environment = {"DDP_LOG_LEVEL": "warning", **os.environ}
        try:  # Ctrl-C belongs to this tool, so the trainer has a session of its own
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise UsageError(f"{command[0]}: cannot be started: {error.strerror}") from None
        self.end = None  # of the last answer: {"end": …} or {"error": …}

    def read(self):
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        code = self.process.wait()  # it has said why on standard error
        sys.exit(128 - code if code < 0 else code or 1)

    def answer(self, ids):
        """The new tokens, as they come."""
        try:
            self.process.stdin.write(json.dumps(list(ids)) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # read() ends the tool
        while "token" in (event := self.read()):
            yield event["token"]
        self.end = event

    def close(self):
        self.process.terminate()
        self.process.wait()


def find_tokenizer(chosen, tokens, model, vocabulary):
    """The tokenizer of the ids in the folder `tokens`, and the folder that has its chat template."""
    folders = [folder for folder in (tokens, model) if folder]
    path = chosen or next(filter(holds_tokenizer, folders), "")
    if not path:
        tokenizer = tokenizer_of(vocabulary)
        if not tokenizer:
            raise UsageError(
                f"there is no tokenizer.json in {' or '.join(folders)}, whose ids come from the tokenizer "
                f"'{vocabulary.name}'; fix: --tokenizer FOLDER"
            )
        return tokenizer, tokens
    tokenizer = open_tokenizer(path)
    if tokenizer.vocabulary.identity() != vocabulary.identity():
        print(
            f"warning: the tokenizer of {path} has other tokens than tokens.path={tokens}, which the model "
            "learned; fix: name the right one with --tokenizer",
            file=sys.stderr,
        )
    return tokenizer, path if os.path.isdir(path) else os.path.dirname(path) or "."


class Texts:
    """Each line is a text to continue."""

    hint = ""  # what helps after an error

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def prompt(self, line):
        print(line, end="", flush=True)
        return self.tokenizer.encode(line)

    def add(self, line, answer):
        """Forgets it: the next prompt is the next line alone."""

    def reset(self):
        """Has nothing to forget."""


class Conversation:
    """Each line is a message of the user."""

    hint = "; /reset forgets the conversation"

    def __init__(self, tokenizer, template, system):
        self.tokenizer, self.template = tokenizer, template
        self.start = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.start)

    def prompt(self, line):
        messages = [*self.messages, {"role": "user", "content": line}]
        try:
            return self.tokenizer.encode(self.template.render(messages, add_generation_prompt=True))
        except self.template.failures as error:
            raise PrepareError(f"the chat template refuses the conversation: {error}") from None

    def add(self, line, answer):
        self.messages += [{"role": "user", "content": line}, {"role": "assistant", "content": answer.strip()}]

    def reset(self):
        self.messages = list(self.start)


def show_answer(program, ids, vocabulary):
    """Prints the answer while it comes, and returns it."""
    decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for token in program.answer(ids):
        word, is_special = vocabulary.entries[token]
        part = "" if is_special else decoder.decode(word)
        text += part
        print(part, end="", flush=True)
    rest = decoder.decode(b"", final=True)
    print(rest)
    return text + rest


def talk(program, session, vocabulary):
    """Until the end of standard input."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("Type a line. /reset forgets the earlier ones, Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> " if is_terminal else "")
        except EOFError:
            print("\n" if is_terminal else "", end="")
            return
        if line.strip() == "/reset":
            session.reset()
        elif line.strip():
            try:
                answer = show_answer(program, session.prompt(line), vocabulary)
                if "error" in program.end:
                    raise PrepareError(program.end["error"])
                session.add(line, answer)
                if program.end["end"] == "length" and isinstance(session, Conversation):
                    print("(the answer is cut: decode.max_new_tokens sets its length)", file=sys.stderr)
            except PrepareError as error:
                print(f"error: {error}{session.hint}", file=sys.stderr)


def main():
    options, settings = parse_arguments(sys.argv[1:])
    adapters = has_adapters(options.config, settings)
    path = find_program(options.program or ("lora_ddp" if adapters else "gpt2_ddp"))
    chats = not os.path.basename(path).startswith("gpt2")
    if chats:
        tokenizers_package()  # before a large model is loaded
    sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (makes input() edit lines)
        print(f"Starting {path}", file=sys.stderr)
    program = Program([path, *settings, "run.mode=" + ("chat" if chats else "prompt")])
    try:
        ready = program.read()["ready"]
        vocabulary = read_vocabulary(ready["tokens"])
        tokenizer, folder = find_tokenizer(options.tokenizer, ready["tokens"], ready["model"], vocabulary)
        if chats:
            template = ChatTemplate(*load_template(folder, options.chat_template))
            session = Conversation(tokenizer, template, options.system)
        else:
            session = Texts(tokenizer)
        talk(program, session, vocabulary)
    finally:
        program.close()


if __name__ == "__main__":
    try:
        run_main(main)
    except KeyboardInterrupt:
        print()
