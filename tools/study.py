#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a scaling study described by one YAML file (slurm/studies/; docs/reproduce.md).

    tools/study.py slurm/studies/resnet50_strong.yaml              submit what is missing or failed to Slurm
    tools/study.py slurm/studies/resnet50_strong.yaml --dry-run    print the jobs
    tools/study.py slurm/studies/resnet50_strong.yaml --status     what became of each run
    tools/study.py slurm/studies/resnet50_strong.yaml --local      run it on this host instead

`program` in the file is one of libddp's trainers, or the path of a program of your own. Paths in such a file
are seen from the folder of the call. The same command again submits what is missing by then: a run is done
when it ended with 0 and wrote its CSV files, and is otherwise begun anew; what an earlier start left is kept
in its attempt-<n>/. Everything lands in runs/<name of the study>/; tools/plot_scaling.py makes the report
from there.

Exit codes: 0 done (submitted, for Slurm), 1 a run failed (--local), 64 a mistake in the study or the call,
65 a file in its folder that cannot be used, 73 the study's folder cannot be written.
"""

import os
import shlex
import signal
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tools"))
# pylint: disable=wrong-import-position
from scaling import folder as study_folder  # noqa: E402
from scaling import launch, plan  # noqa: E402
from scaling.command_line import Parser, exit_code, writing  # noqa: E402


def parse(arguments):
    parser = Parser(__doc__)
    parser.add_argument("study", help="the study's YAML file")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--dry-run", action="store_true", help="print the jobs (with --local: the commands), start nothing"
    )
    what.add_argument("--status", action="store_true", help="print the state of each run")
    parser.add_argument(
        "--local", action="store_true", help="without Slurm: on this host, one run after another"
    )
    parser.add_argument("--output", help="the study's folder, seen by all nodes (runs/<name>)")
    parser.add_argument(
        "--build", help="build folder with examples/ (build; the installed tool: its programs)"
    )
    parser.add_argument(
        "--repeat", type=int, help="only runs of this repeat, for example to alternate with other studies"
    )
    parser.add_argument(
        "--max-ranks",
        type=int,
        default=plan.MAX_RANKS,
        help="only points of at most so many ranks, for example the GPUs of this host",
    )
    parser.add_argument(
        "--launcher",
        choices=("auto", "mpirun", "torchrun", "ddp_test_launch"),
        default="auto",
        help="how --local starts the ranks",
    )
    return parser.parse_args(arguments)


# In the share/ddp of an install tree the programs are beside the tools, and runs belong to the caller.
IS_INSTALLED = not os.path.exists(os.path.join(ROOT, "CMakeLists.txt"))


def shown_tool(name):
    """The command of a tool, for messages."""
    return f"libddp-{name.replace('_', '-')}" if IS_INSTALLED else f"tools/{name}.py"


def from_root(path):
    """`path` as seen from the top of the repository, where it lies inside."""
    inside = os.path.relpath(os.path.abspath(path), ROOT)
    return os.path.abspath(path) if inside.startswith("..") else inside


def print_plan(options, study, folder):
    for path, command in study.prepare.items():
        print(f"[ -e {shlex.quote(path)} ] || {command}")
    if options.local:
        for run in study.runs:
            group = next(group for group in study.groups if run in group.runs)
            print(
                launch.shown(
                    {}, launch.local_command(study, group, run, folder.path, options.build, options.launcher)
                )
            )
    else:
        if study.device == "cpu":
            print(launch.without_gpus(study, folder.path))
        for group in study.groups:
            print(
                launch.shown(
                    launch.slurm_environment(study, folder.path, options.build),
                    launch.slurm_command(study, group, group.runs, folder.path),
                )
            )
    print(
        f"# {len(study.runs)} runs of {study.kind} study {study.name}: {len(study.groups)} number(s) of "
        f"ranks, {study.repeats} repeat(s)"
    )


def print_status(study, folder):
    counts, in_use = {}, folder.in_use()
    for run in study.runs:
        state, why = folder.state(run)
        if state == "lost" and in_use:
            state, why = "running", "begun by a start that is under way"
        counts[state] = counts.get(state, 0) + 1
        print(f"{run.name:40} {state:8} {why}".rstrip())
    print("# " + ", ".join(f"{number} {state}" for state, number in counts.items()))


def unfinished(options, study, folder):
    """What is to be started, and the state of every run."""
    states = {run.name: folder.state(run) for run in study.runs}
    todo = [run for run in study.runs if states[run.name][0] in ("missing", "failed", "lost")]
    return [run for run in todo if options.repeat in (None, run.repeat)], states


def check(options, study, todo):
    """All that can be refused before anything is written."""
    if todo:
        launch.check_program(study, options.build)
        launch.check_settings(study, options.build)
        if options.local:
            launch.check_launcher(study, todo, options.build, options.launcher)


def start(options, study, folder, command):
    """Starts what is missing; the folder is ours. Returns the exit code."""
    todo, states = unfinished(options, study, folder)
    waiting = sum(state in ("queued", "running") for state, _ in states.values())
    done = sum(state == study_folder.DONE for state, _ in states.values())
    print(f"{study.name}: {len(study.runs)} runs: {done} done, {waiting} in the queue, {len(todo)} to start")
    for run in todo:
        if states[run.name][0] != "missing":
            print(f"  restart: {run.name}, {states[run.name][0]} ({states[run.name][1]})")
    if todo:
        launch.prepare(study)
    folder.save(
        command,
        kept={name for name, (state, _) in states.items() if state not in ("missing", "failed", "lost")},
    )
    report = f"{shown_tool('plot_scaling')} {shlex.quote(folder.path)}"
    if options.local:
        failed = launch.run_local(study, folder, todo, options.build, options.launcher)
        print(f"{failed} run(s) failed: see log.txt in their folders" if failed else f"report: {report}")
        return 1 if failed else 0
    if todo:
        launch.submit(study, folder, todo, options.build)
    again = [options.study]
    for key in ("output", "build"):
        if getattr(options, f"given_{key}"):
            again += [f"--{key}", getattr(options, key)]
    if options.max_ranks != plan.MAX_RANKS:
        again += ["--max-ranks", str(options.max_ranks)]
    print(f"status: {shown_tool('study')} {shlex.join(again)} --status; report: {report}")
    return 0


def main(arguments):
    options = parse(arguments)
    options.given_output, options.given_build = bool(options.output), bool(options.build)
    if IS_INSTALLED and not os.path.exists(options.study):
        options.study = os.path.join(ROOT, options.study)  # a study that was installed
    options.study = from_root(options.study)
    options.output = from_root(options.output) if options.output else None
    options.build = from_root(options.build or (ROOT if IS_INSTALLED else os.path.join(ROOT, "build")))
    caller, runs = os.getcwd(), os.path.abspath("runs") if IS_INSTALLED else "runs"
    os.chdir(ROOT)  # paths in studies, sbatch files and folders are seen from there
    study = plan.load(options.study, ROOT, caller, options.max_ranks)
    if study.work_dir:  # but those of a program given by its path from the folder of the call
        runs = os.path.join(caller, "runs")
        options.build = os.path.abspath(options.build)
        options.output = options.output and os.path.abspath(options.output)
    if options.repeat is not None and not 1 <= options.repeat <= study.repeats:
        raise plan.StudyError(f"--repeat {options.repeat}: {study.path} has the repeats 1 to {study.repeats}")
    folder = study_folder.StudyFolder(study, options.output or os.path.join(runs, study.name))
    if not options.status:
        launch.fit_to_program(study, options.build)
    if options.dry_run:
        print_plan(options, study, folder)
        return 0
    if options.status:
        print_status(study, folder)
        return 0
    check(options, study, unfinished(options, study, folder)[0])
    with writing(folder.path), folder.start():
        return start(options, study, folder, f"{shown_tool('study')} {shlex.join(arguments)}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks of --local are ended too
    sys.exit(exit_code(main, sys.argv[1:]))
