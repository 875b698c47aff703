# SPDX-License-Identifier: Apache-2.0
"""--help and --version of every program and script, paging, and the completion in bash and zsh:
command_line_test.py BUILD."""

import concurrent.futures
import functools
import glob
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import tempfile
import unittest

from study_support import ROOT

BUILD = os.path.abspath(sys.argv.pop(1)) if len(sys.argv) > 1 else os.path.join(ROOT, "build")
TRAINERS = [
    "resnet_ddp",
    "vit_ddp",
    "cnn_ddp",
    "gpt2_ddp",
    "bert_ddp",
    "lora_ddp",
    "exported_ddp",
    "quickstart",
]


def is_program(path):
    return os.path.isfile(path) and os.access(path, os.X_OK)


def programs():
    """What is built and no test."""
    found = []
    for folder in ("examples", "tools", "benchmarks"):
        found += sorted(glob.glob(f"{BUILD}/{folder}/*"))
    return [path for path in found if is_program(path)]


def scripts():
    folders = (
        "scripts",
        "packaging",
        "packaging/docker",
        "tools",
        "data",
        "benchmarks",
        "docs/report",
        "tests/mutations",
        "tests/cluster",
    )
    found = []
    for pattern in ("*.sh", *(folder + "/*" for folder in folders)):
        found += sorted(glob.glob(os.path.join(ROOT, pattern)))
    return [path for path in found if is_program(path)]


def trainer(name="resnet_ddp"):
    path = os.path.join(BUILD, "examples", name)
    if not is_program(path):
        raise unittest.SkipTest(f"{path} is not built")
    return path


@functools.cache
def completion(shell, program="resnet_ddp"):
    return run(trainer(program), "--completion", shell).stdout


def run(*command, **environment):
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            timeout=120,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", **environment},
        )
        done.left = os.listdir(folder)
    return done


class Help(unittest.TestCase):
    def outputs(self, paths, option):
        """(path, standard output) of each program, several at a time; each must end with 0 and leave
        nothing."""
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for path, done in zip(paths, pool.map(lambda path: run(path, option), paths)):
                self.assertEqual((done.returncode, done.stderr, done.left), (0, "", []), f"{path} {option}")
                yield path, done.stdout

    def test_every_program_has_help_and_a_version(self):
        self.assertTrue(programs(), f"nothing is built in {BUILD}")
        for path, text in self.outputs(programs(), "--help"):
            self.assertRegex(text, rf"usage:\s+(.* )?{os.path.basename(path)}\b")
        for path, text in self.outputs(programs(), "--version"):
            self.assertRegex(text, r"^libddp +\d+\.\d+\.\d+( \(commit [0-9a-f]{12}\))?\nLibTorch +2\.", path)

    @unittest.skipUnless(shutil.which("cc"), "there is no C compiler")
    def test_a_library_of_another_version_is_named(self):
        if re.search("^NCCL +none", run(trainer(), "--version").stdout, re.MULTILINE):
            raise unittest.SkipTest("this build has no NCCL")
        with tempfile.TemporaryDirectory() as folder:
            library = os.path.join(folder, "nccl.so")
            subprocess.run(
                ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library],
                check=True,
                text=True,
                input="int ncclGetVersion(int* version) { *version = 29901; return 0; }",
            )
            text = run(trainer(), "--version", LD_PRELOAD=library).stdout
        self.assertRegex(text, r"\nNCCL +2\.\d+\.\d+ \(loaded: 2\.99\.1\)\n")
        self.assertRegex(text, r"\nCUDA +\d+\.\d+\n")

    def test_the_launcher_of_tests_has_help(self):
        launcher = os.path.join(BUILD, "tests", "support", "ddp_test_launch")
        if not is_program(launcher):
            raise unittest.SkipTest(f"{launcher} is not built")
        for _, text in self.outputs([launcher], "--help"):
            self.assertIn("usage:", text)

    def test_every_script_has_help(self):
        names = [os.path.relpath(path, ROOT) for path in scripts()]
        for name in (
            "quickstart.sh",
            "test.sh",
            "tools/study.py",
            "benchmarks/compare_pytorch",
            "data/prepare_text.py",
            "docs/report/build.py",
        ):
            self.assertIn(name, names)
        for path, text in self.outputs(scripts(), "--help"):
            self.assertIn("usage:", text, path)

    def test_wrong_topic(self):
        done = run(trainer(), "--help", "optimiser")
        self.assertEqual((done.returncode, done.stdout), (64, ""))
        self.assertIn("did you mean optimizer?", done.stderr)

    def test_lines_fit_the_width(self):
        for columns in (80, 120):
            for topic in ([], ["all"]):
                done = run(trainer(), "--help", *topic, COLUMNS=str(columns))
                self.assertGreater(len(done.stdout.splitlines()), 40)
                self.assertEqual([line for line in done.stdout.splitlines() if len(line) > columns], [])


def on_terminal(*command, keys="", **environment):
    """(exit code, what a terminal shows) of a command; `keys` are typed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(environment)
        try:
            os.execv(command[0], command)
        finally:
            os._exit(127)
    os.write(terminal, keys.encode())
    shown = b""
    while select.select([terminal], [], [], 60)[0]:
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode().replace("\r\n", "\n")


class Paging(unittest.TestCase):
    def test_a_terminal_gets_the_pager(self):
        code, shown = on_terminal(trainer(), "--help", PAGER="sed 's/^/> /'")
        self.assertEqual(code, 0)
        self.assertIn("> usage: resnet_ddp", shown)

    def test_a_pager_that_is_empty_or_missing_prints(self):
        for pager in ("", "no_such_pager 2>/dev/null"):
            code, shown = on_terminal(trainer(), "--help", PAGER=pager)
            self.assertEqual(code, 0)
            self.assertTrue(shown.startswith("usage: resnet_ddp"), shown)

    def test_a_pager_that_ends_early_is_no_failure(self):
        code, shown = on_terminal(trainer(), "--help", "all", PAGER="head -n 1")
        self.assertEqual((code, len(shown.splitlines())), (0, 1))

    def test_a_pipe_gets_no_pager(self):
        self.assertTrue(
            run(trainer(), "--help", PAGER="sed 's/^/> /'").stdout.startswith("usage: resnet_ddp")
        )


class Bash(unittest.TestCase):
    """The function that bash calls, with bash's variables set as bash sets them."""

    SCRIPT = r"""
set -u
source /dev/stdin
[ "$(complete -p "${1##*/}")" = "complete -F _ddp_complete_${1##*/} ${1##*/}" ] || exit 3
compopt() { echo "compopt $*"; }
COMP_WORDBREAKS=$3 COMP_LINE="$1 $2" COMP_POINT=$((${#1} + 1 + ${#2})) COMP_WORDS=("$1") COMP_CWORD=0
cd "$4"
_ddp_complete_"${1##*/}"
printf '%s\n' "${COMPREPLY[@]}"
"""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        for name in ("run one.yaml", "run.yaml"):
            open(os.path.join(self.folder.name, name), "w", encoding="utf-8").close()

    def complete(self, line, program="resnet_ddp", breaks=" \t\n\"'><=;|&(:"):
        done = subprocess.run(
            ["bash", "-c", self.SCRIPT, "bash", trainer(program), line, breaks, self.folder.name],
            input=completion("bash", program),
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        return done.stdout.splitlines()

    def test_sections_then_keys(self):
        self.assertIn("train.", self.complete(""))
        self.assertEqual(self.complete("tr"), ["compopt -o nospace", "train."])
        self.assertEqual(self.complete("train.ep"), ["compopt -o nospace", "train.epochs="])
        self.assertEqual(
            self.complete("amp.dtype=bf16 train.max_s"), ["compopt -o nospace", "train.max_steps="]
        )

    def test_values(self):
        self.assertEqual(self.complete("amp.dtype="), ["off", "bf16", "fp16"])
        self.assertEqual(self.complete("amp.dtype=b"), ["bf16"])
        self.assertEqual(self.complete("amp.dtype=b", breaks=" \t\n"), ["amp.dtype=bf16"])
        self.assertEqual(self.complete("train.deterministic=t"), ["true"])
        self.assertEqual(self.complete("train.epochs="), [""])
        self.assertEqual(self.complete("ddp.bucket_cap_mb="), ["auto"])

    def test_files(self):
        for line in ("--config ru", "--config=ru", "data.path=ru"):
            self.assertEqual(self.complete(line), ["compopt -o filenames", "run one.yaml", "run.yaml"], line)

    def test_options_and_topics(self):
        self.assertEqual(self.complete("--co"), ["--config", "--completion"])
        self.assertEqual(self.complete("--completion "), ["bash", "zsh"])
        self.assertEqual(self.complete("--help tra"), ["train"])
        self.assertEqual(self.complete("--help al"), ["all"])
        self.assertEqual(self.complete("-h train.ep"), ["train.epochs"])

    def test_each_trainer_completes_its_own_settings(self):
        for name in TRAINERS:
            if not is_program(os.path.join(BUILD, "examples", name)):
                continue
            known = re.findall(r"^  ([a-z0-9_.]+)=", run(trainer(name), "--help", "all").stdout, re.MULTILINE)
            sections = sorted({key.split(".")[0] + "." for key in known})
            self.assertEqual(sorted(word for word in self.complete("", name) if word.endswith(".")), sections)
            offered = []
            for section in sections:
                offered += [word for word in self.complete(section, name) if word.endswith("=")]
            self.assertEqual(sorted(word[:-1] for word in offered), sorted(known))

    @unittest.skipUnless(shutil.which("shellcheck"), "shellcheck is not installed")
    def test_shellcheck(self):
        done = subprocess.run(
            ["shellcheck", "-s", "bash", "-"],
            input=completion("bash"),
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.stdout, "")


@unittest.skipUnless(shutil.which("zsh"), "zsh is not installed")
class Zsh(unittest.TestCase):
    """What stands on the line of a zsh on a terminal after the TAB key. The key Ctrl-X writes the line to a
    file."""

    START = """PS1=; unset zle_bracketed_paste; autoload -Uz compinit; compinit -u -d {folder}/dump
{load}
cd {folder}/files
show() {{ print -r -- "<$BUFFER>" >>{folder}/lines; BUFFER= }}; zle -N show; bindkey '^X' show
print started >>{folder}/lines
"""

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        os.mkdir(self.folder.name + "/files")
        for name in ("files/run.yaml", "lines"):
            open(os.path.join(self.folder.name, name), "w", encoding="utf-8").close()
        with open(self.folder.name + "/_resnet_ddp", "w", encoding="utf-8") as file:
            file.write(completion("zsh"))

    def wait_for(self, terminal, count):
        """The lines written, once they are `count`; what zsh shows is read meanwhile."""
        path, shown = os.path.join(self.folder.name, "lines"), b""
        for _ in range(300):
            if select.select([terminal], [], [], 0.1)[0]:
                shown += os.read(terminal, 65536)
            with open(path, encoding="utf-8") as file:
                lines = file.read().splitlines()
            if len(lines) >= count:
                return lines
        self.fail(f"zsh wrote {lines}, and showed {shown.decode(errors='replace')}")

    def complete(self, load, *typed):
        pid, terminal = pty.fork()
        if pid == 0:
            os.environ.update(TERM="xterm", ZDOTDIR=self.folder.name)
            os.execvp("zsh", ["zsh", "-f", "-i"])
        try:
            start = self.START.format(folder=self.folder.name, load=load.format(folder=self.folder.name))
            with open(self.folder.name + "/start", "w", encoding="utf-8") as file:
                file.write(start)
            os.write(terminal, f"source {self.folder.name}/start\n".encode())
            self.wait_for(terminal, 1)
            for count, line in enumerate(typed):
                os.write(terminal, f"resnet_ddp {line}\t\x18".encode())
                lines = self.wait_for(terminal, count + 2)
        finally:
            os.close(terminal)
            os.waitpid(pid, 0)
        return [line.removeprefix("<resnet_ddp ").removesuffix(">") for line in lines[1:]]

    def test_completes(self):
        cases = {
            "tr": "train.",
            "train.ep": "train.epochs=",
            "amp.dtype=b": "amp.dtype=bf16 ",
            "--show": "--show-settings ",
            "train.deterministic=t": "train.deterministic=true ",
            "--help tra": "--help train ",
            "-h train.ep": "-h train.epochs ",
            "--help al": "--help all ",
            "--completion z": "--completion zsh ",
            "--config ru": "--config run.yaml ",
            "--config=ru": "--config=run.yaml ",
            "data.path=ru": "data.path=run.yaml ",
            "amp.dtype=bf16 loader.num": "amp.dtype=bf16 loader.num_workers=",
        }
        self.assertEqual(self.complete("source {folder}/_resnet_ddp", *cases), list(cases.values()))

    def test_a_file_in_fpath_is_loaded(self):
        self.assertEqual(
            self.complete("fpath=({folder} $fpath); compinit -u -d {folder}/dump2", "train.ep", "tr"),
            ["train.epochs=", "train."],
        )


if __name__ == "__main__":
    unittest.main()
