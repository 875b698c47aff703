# SPDX-License-Identifier: Apache-2.0
"""tools/chat.py with a program that answers each prompt by the prompt: the ids it sends, what it shows, and
how it ends. tests/distributed/chat_test.py talks with trained models."""

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import unittest

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
SAMPLE = os.path.join(ROOT, "data", "chat-sample")
sys.path[:0] = [os.path.join(ROOT, folder) for folder in ("tools", "data", "tests/unit/data")]
import chat  # noqa: E402
from prepare_script import write_files  # noqa: E402
from text_tokenizers import ByteTokenizer, CharacterTokenizer  # noqa: E402
from token_files import Vocabulary, serialize  # noqa: E402
from token_reader import Folder  # noqa: E402

ECHO = """\
#!/usr/bin/env python3
import json, sys
settings = dict(setting.split("=", 1) for setting in sys.argv[1:])
if "fail" in settings:
    sys.exit("first cause: no such adapter") if settings["fail"] == "1" else sys.exit(int(settings["fail"]))
print("a line of the program's own")
ready = {"tokens": settings["tokens.path"], "model": settings.get("model.path", "")}
print(json.dumps({"ready": ready}), flush=True)
for line in sys.stdin:
    print(line, end="", file=open(settings["log"], "a")) if "log" in settings else None
    ids = json.loads(line)
    if len(ids) > 400 or ids == [0, 0]:
        print(json.dumps({"error": "the prompt is too long"}), flush=True)
        continue
    for token in ids:
        print(json.dumps({"token": token}), flush=True)
    print(json.dumps({"end": settings.get("end", "end_token")}), flush=True)
"""


def packages():
    try:
        import jinja2  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError:
        return False
    return True


class ChatTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.work = folder.name
        for name in "gpt2_echo", "lora_echo":
            path = self.path(name)
            with open(path, "w") as file:
                file.write(ECHO)
            os.chmod(path, 0o755)

    def path(self, name):
        return os.path.join(self.work, name)

    def folder(self, vocabulary, name="tokens"):
        metadata = vocabulary.metadata() | {"format": "ddp_vocabulary"}
        write_files(self.path(name), {"vocabulary.safetensors": serialize(vocabulary.tensors(), metadata)})
        return self.path(name)

    def command(self, program, *arguments):
        return [sys.executable, chat.__file__, "--program", self.path(program), *arguments]

    def talk(self, text, program, *arguments, **environment):
        return subprocess.run(
            self.command(program, *arguments),
            input=text,
            capture_output=True,
            encoding="utf-8",
            env=os.environ | environment,
            timeout=60,
        )

    def characters(self, with_end=False):
        return self.folder(CharacterTokenizer(["abc é"], with_end).vocabulary)

    def test_continues_texts_of_characters(self):
        for with_end in False, True:
            result = self.talk("ab é\n\ncc\n", "gpt2_echo", "tokens.path=" + self.characters(with_end))
            self.assertEqual((result.stdout, result.stderr), ("ab éab é\ncccc\n", ""))
            self.assertEqual(result.returncode, 0)

    def test_characters_of_several_tokens_and_no_special_tokens(self):
        tokens = self.folder(ByteTokenizer(True).vocabulary)
        result = self.talk("é😀\n", "gpt2_echo", "tokens.path=" + tokens)
        self.assertEqual(result.stdout, "é😀é😀\n", result.stderr)
        vocabulary = Vocabulary("x", [(b"a", False), (b"<end>", True), ("é".encode()[:1], False)])

        class Answer:
            def answer(self, ids):
                return iter(ids)

        with contextlib.redirect_stdout(io.StringIO()) as shown:
            answer = chat.show_answer(Answer(), [0, 1, 0, 2], vocabulary)
        self.assertEqual((answer, shown.getvalue()), ("aa\ufffd", "aa\ufffd\n"))

    def test_controls_of_the_terminal_are_shown_not_obeyed(self):
        tokens = self.folder(ByteTokenizer(True).vocabulary)
        result = self.talk("a\x1b[2J\n", "gpt2_echo", "tokens.path=" + tokens)
        self.assertEqual(result.stdout, "a\\x1b[2Ja\\x1b[2J\n")

    def test_goes_on_after_a_text_that_cannot_be_answered(self):
        result = self.talk("xyz\n  \n" + "a" * 401 + "\nb\n", "gpt2_echo", "tokens.path=" + self.characters())
        self.assertTrue(result.stdout.endswith("\nbb\n"), result.stdout)
        self.assertIn("error: the vocabulary of characters has no 'x'", result.stderr)
        self.assertIn("error: the prompt is too long\n", result.stderr)
        self.assertEqual(result.returncode, 0)

    def test_ends_with_the_code_of_the_program(self):
        for code, expected in ("70", 70), ("1", 1), ("0", 1):
            result = self.talk("a\n", "gpt2_echo", "fail=" + code)
            self.assertEqual((result.returncode, result.stdout), (expected, ""))
            self.assertNotIn("Traceback", result.stderr)
        self.assertIn("first cause", self.talk("a\n", "gpt2_echo", "fail=1").stderr)

    def test_ctrl_c_ends_with_0_and_ends_the_program(self):
        tokens = "tokens.path=" + self.characters()
        with subprocess.Popen(
            self.command("gpt2_echo", tokens), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as tool:
            tool.stdin.write("a\n")
            tool.stdin.flush()
            self.assertEqual(tool.stdout.readline(), "aa\n")
            (child,) = subprocess.check_output(["pgrep", "-P", str(tool.pid)], text=True).split()
            tool.send_signal(signal.SIGINT)
            self.assertEqual(tool.wait(20), 0)
            self.assertFalse(os.path.exists(f"/proc/{child}"))

    def test_mistakes_are_named(self):
        result = self.talk("", "gpt2_none")
        self.assertEqual(result.returncode, 64)
        self.assertIn("gpt2_none: cannot be started", result.stderr)
        result = subprocess.run(
            [sys.executable, chat.__file__, "--program", "no_ddp"], capture_output=True, text=True
        )
        self.assertEqual(result.returncode, 64)
        self.assertIn("cmake --build build --target no_ddp", result.stderr)
        tokens = self.folder(Vocabulary("gpt2", [(b"ab", False)]))
        result = self.talk("ab\n", "gpt2_echo", "tokens.path=" + tokens)
        self.assertEqual(result.returncode, 64)
        self.assertRegex(result.stderr, "no tokenizer.json in .*tokens, .*'gpt2'; fix: --tokenizer FOLDER")
        with open(os.path.join(tokens, "vocabulary.safetensors"), "r+b") as file:
            file.truncate(20)
        result = self.talk("ab\n", "gpt2_echo", "tokens.path=" + tokens)
        self.assertEqual(result.returncode, 65)
        self.assertRegex(result.stderr, "tokens/vocabulary.safetensors: not a vocabulary")

    def test_a_missing_package_is_named_with_the_command(self):
        os.mkdir(self.path("without"))
        with open(self.path("without/tokenizers.py"), "w") as file:
            file.write("raise ImportError")
        result = self.talk("a\n", "lora_echo", "fail=1", PYTHONPATH=self.path("without"))
        self.assertEqual((result.returncode, result.stdout), (64, ""))
        self.assertNotIn("first cause", result.stderr)  # no model was loaded
        self.assertIn("python3 -m pip install tokenizers", result.stderr)

    def test_chooses_the_program_by_the_settings(self):
        with open(self.path("lora.yaml"), "w") as file:
            file.write("model:\n  size: tiny\nlora:\n  rank: 32\n")
        with open(self.path("gpt2.yaml"), "w") as file:
            file.write(textwrap.dedent("model:\n  layers: 4\nsample:\n  seed: 1\n"))
        self.assertTrue(chat.has_adapters(self.path("lora.yaml"), []))
        self.assertFalse(chat.has_adapters(self.path("gpt2.yaml"), ["model.path=lora.x", "checkpoint.dir=x"]))
        self.assertTrue(chat.has_adapters(None, ["lora.adapter=x"]))
        options, settings = chat.parse_arguments(["a=1", "--config", "x.yaml", "--system", "s", "b=2"])
        self.assertEqual(settings, ["--config", "x.yaml", "a=1", "b=2"])
        self.assertEqual((options.config, options.system), ("x.yaml", "s"))

    def prompts(self, text, *arguments):
        """The prompts that the program got, as text, and the tool's result."""
        log = self.path("log")
        result = self.talk(text, "lora_echo", "log=" + log, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        words = [word for word, _ in chat.read_vocabulary(SAMPLE).entries]
        with open(log, encoding="ascii") as file:
            prompts = [b"".join(words[i] for i in json.loads(line)).decode() for line in file]
        os.remove(log)
        return prompts, result

    @unittest.skipUnless(packages(), "needs tokenizers and jinja2")
    def test_keeps_the_conversation_until_reset(self):
        first = "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
        answer = "user\nHi!\nassistant"  # the prompt without its special tokens
        second = f"{first}{answer}<|im_end|>\n{first}"
        tokens = "tokens.path=" + SAMPLE
        prompts, result = self.prompts("Hi!\nHi!\n/reset\nHi!\n", tokens)
        self.assertEqual(prompts, [first, second, first])
        self.assertTrue(result.stdout.startswith(answer), result.stdout)
        system = "<|im_start|>system\nBe brief.<|im_end|>\n"
        prompts, _ = self.prompts("Hi!\n/reset\nHi!\n", tokens, "--system", "Be brief.")
        self.assertEqual(prompts, [system + first] * 2)
        # What cannot be answered is not part of the conversation. A cut answer is, and is said to be cut.
        prompts, result = self.prompts("a " * 500 + "\nHi!\nHi!\n", tokens, "end=length")
        self.assertEqual(prompts[1:], [first, second])
        self.assertIn("error: the prompt is too long; /reset forgets the conversation\n", result.stderr)
        self.assertEqual(result.stderr.count("the answer is cut"), 2)

    @unittest.skipUnless(packages(), "needs tokenizers and jinja2")
    def test_sends_the_ids_that_the_model_was_trained_on(self):
        data, turn = Folder(SAMPLE), "<|im_start|>{}\n(.*)<|im_end|>\n"
        pattern = turn.format("system") + turn.format("user") + "<.im_start.>assistant\n"
        tokenizer = chat.open_tokenizer(SAMPLE)
        template = chat.ChatTemplate(*chat.load_template(SAMPLE, None))
        for document in range(20):
            ids, text = data.ids("eval", document), data.text("eval", document)
            system, user = re.match(pattern.replace("|", r"\|"), text).groups()
            prompt = list(chat.Conversation(tokenizer, template, system).prompt(user))
            self.assertEqual(prompt, ids[: len(prompt)])
            splits = data.splits["eval"][0]
            self.assertEqual(splits["targets"][splits["documents"][document] + len(prompt)], 1)
            self.assertNotIn(1, splits["targets"][splits["documents"][document] :][: len(prompt)])

    @unittest.skipUnless(packages(), "needs tokenizers and jinja2")
    def test_finds_tokenizer_and_template(self):
        vocabulary = chat.read_vocabulary(SAMPLE)
        bare = self.folder(vocabulary, "bare")
        prompts, _ = self.prompts("Hi!\n", "tokens.path=" + bare, "model.path=" + SAMPLE)
        self.assertIn("Hi!", prompts[0])
        _, result = self.prompts("Hi!\n", "tokens.path=" + bare, "--tokenizer", SAMPLE)
        self.assertEqual(result.stderr, "")
        other = Vocabulary("other", [*vocabulary.entries, (b"more", False)])
        _, result = self.prompts(
            "Hi!\n", "tokens.path=" + self.folder(other, "other"), "--tokenizer", SAMPLE + "/tokenizer.json"
        )
        self.assertRegex(result.stderr, "warning: the tokenizer of .* has other tokens than tokens.path=")
        result = self.talk("Hi!\n", "lora_echo", "tokens.path=" + SAMPLE, "--chat-template", "/no/such")
        self.assertEqual(result.returncode, 65)
        self.assertIn("/no/such", result.stderr)


if __name__ == "__main__":
    unittest.main()
