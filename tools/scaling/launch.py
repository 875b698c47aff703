# SPDX-License-Identifier: Apache-2.0
"""Starts the runs of a study: as Slurm arrays, or one after another on this host."""

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time

from .command_line import WriteError
from .files import make_own_folder, regular, replace_file
from .folder import DONE
from .numbers import read_optional
from .plan import SBATCH_FILES, StudyError
from .study_file import SETTING_NAME, setting_names

# What Open MPI needs to start as root, and more ranks than cores (scripts/env.sh).
MPI_SETTINGS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}


# Which key of a study names another setting of the program for one of these.
NAMED_BY = {
    "train.max_steps": "steps_setting",
    "train.batch_size": "batch_size_setting",
    "loader.global_batch_size": "global_batch_size_setting or batch_size_setting",
}


def program_path(study, build):
    if study.work_dir:
        return os.path.join(study.work_dir, study.program)
    return os.path.join(build, "examples", study.program)


def program_settings(study, build):
    """({name: default} of the program's settings, why there are none)."""
    try:
        done = subprocess.run(
            [program_path(study, build), "--help", "all"],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            stdin=subprocess.DEVNULL,
            cwd=study.work_dir or None,
        )
    except OSError as error:
        return {}, error.strerror
    except subprocess.TimeoutExpired:
        return {}, "no answer in 120 s"
    if done.returncode != 0:
        return {}, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    found = re.findall(rf"^ *({SETTING_NAME.pattern})=(.*)$", done.stdout, re.MULTILINE)
    return {name: default.strip() for name, _, default in found}, "" if found else "it prints no settings"


def fit_to_program(study, build):
    """A program given by its path may lack settings that libddp's trainers have. So it is asked for them."""
    if not study.work_dir:
        return
    check_program(study, build)
    known, why = program_settings(study, build)
    if not known:
        raise StudyError(
            f"{study.path}: {program_path(study, build)} --help all: {why}; fix: give a program of ddp::run "
            "that starts on this host"
        )
    configuration = os.path.join(study.work_dir, study.config)
    study.fit(known, setting_names(configuration) if study.config else [])


def check_settings(study, build):
    """Settings that the program does not have are told before anything waits in a queue. Where the program
    does not start here (a login node without its libraries) each run itself will tell."""
    known, _ = program_settings(study, build)
    words = study.settings + [word for group in study.groups for word in group.settings]
    for key in [word.split("=")[0] for word in words] + list(study.vary):
        if known and key not in known:
            near = difflib.get_close_matches(key, known, 1)
            named_by = f"; fix: {NAMED_BY[key]} names the program's own" if key in NAMED_BY else ""
            raise StudyError(
                f"{study.path}: {study.program} has no setting "
                f"{key}{f', did you mean {near[0]}?' if near else ''}{named_by}"
            )


def prepare(study):
    """Makes what the study needs and is not there yet, as its data."""
    for path, command in study.prepare.items():
        file = os.path.join(study.work_dir, path)
        if os.path.exists(file):
            continue
        print(f"{path} is missing: {command}", flush=True)
        try:
            code = subprocess.run(shlex.split(command), check=False, cwd=study.work_dir or None).returncode
        except OSError as error:
            raise StudyError(f"{study.path}: prepare: {command}: {error.strerror}") from None
        if code != 0 or not os.path.exists(file):
            raise StudyError(
                f"{study.path}: prepare: {command} ended with {code} and left "
                f"{'' if os.path.exists(file) else 'no '}{path}"
            )


# --- Slurm -----------------------------------------------------------------------------------------
def task_list(tasks):
    """What --array takes, for example 1-3,5."""
    parts, tasks = [], sorted(tasks)
    for task in tasks:
        if parts and parts[-1][1] == task - 1:
            parts[-1][1] = task
        else:
            parts.append([task, task])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def slurm_environment(study, folder_path, build):
    environment = {"DDP_PROGRAM": program_path(study, build), "DDP_RUNS": folder_path}
    if study.work_dir:
        environment["DDP_WORK_DIR"] = study.work_dir
        environment["DDP_PROGRAM_BUILD"] = build_folder(study, build)
    return environment


def slurm_command(study, group, runs, folder_path):
    """One array job for `runs` of a group. Jobs of one name wait for each other (singleton), and tasks
    of an array (%1): runs that share a network or a node would measure each other."""
    command = [
        "sbatch",
        "--parsable",
        f"--job-name={study.name}",
        "--dependency=singleton",
        f"--nodes={group.nodes}",
        f"--ntasks-per-node={group.per_node}",
        f"--cpus-per-task={study.cpus_per_rank}",
        f"--time={study.time}",
        f"--array={task_list([run.task for run in runs])}%1",
        f"--output={folder_path}/slurm-%A_%a.out",
    ]
    if study.device == "cuda":
        command.append(f"--gpus-per-node={group.per_node}")
    command += study.sbatch + [sbatch_file(study, folder_path)]
    if study.kind == "sensitivity":
        for key, values in study.vary.items():
            command += ["--vary", f"{key}={','.join(values)}"]
        command += ["--repeats", str(study.repeats)]
    return command + study.arguments(group)


def shown(environment, command):
    return " ".join(
        [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
        + [shlex.quote(x) for x in command]
    )


def sbatch_file(study, folder_path):
    """What is submitted. The sbatch files ask for GPUs, and a cluster that knows none refuses even 0 of them:
    studies of CPU ranks submit a copy without that line."""
    file = SBATCH_FILES[study.kind]
    return os.path.join(folder_path, os.path.basename(file)) if study.device == "cpu" else file


def without_gpus(study, folder_path):
    """The command that makes the copy of sbatch_file(), or nothing."""
    if study.device != "cpu":
        return ""
    return (
        f"mkdir -p {shlex.quote(folder_path)} && sed '/^#SBATCH --gpus-per-node/d' "
        f"{SBATCH_FILES[study.kind]} "
        f">{shlex.quote(sbatch_file(study, folder_path))}"
    )


def submit(study, folder, runs, build):
    """Submits `runs`; returns the number of jobs."""
    if shutil.which("sbatch") is None:
        raise StudyError("sbatch is not installed here; fix: --local runs the study on this host")
    environment = slurm_environment(study, folder.path, build)
    copy = without_gpus(study, folder.path)
    if copy:
        done = subprocess.run(["bash", "-c", copy], capture_output=True, text=True)
        if done.returncode != 0:
            raise WriteError(f"{sbatch_file(study, folder.path)}: cannot write: {done.stderr.strip()}")
    jobs = 0
    for group in study.groups:
        wanted = [run for run in group.runs if run in runs]
        if not wanted:
            continue
        sent = slurm_command(study, group, wanted, folder.path)
        done = subprocess.run(sent, env={**os.environ, **environment}, capture_output=True, text=True)
        if done.returncode != 0:
            raise StudyError(
                f"sbatch refused {group.ranks} rank(s): {done.stderr.strip()}\n  {shown(environment, sent)}"
            )
        job_id = done.stdout.strip().split(";")[0]
        try:
            folder.record_submission(job_id, shown(environment, sent), wanted)
        except OSError as error:
            raise WriteError(
                f"{folder.path}: job {job_id} was submitted, but this cannot be recorded here: "
                f"{error.strerror}; "
                f"fix: scancel {job_id}, make room or the rights to write, and call this again"
            ) from None
        print(f"job {job_id}: {group.ranks} rank(s), run(s) {', '.join(run.name for run in wanted)}")
        jobs += 1
    return jobs


# --- this host -------------------------------------------------------------------------------------
def num_gpus():
    """GPUs a program of this host sees."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() and entry.strip() != "-1"])
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return sum(line.startswith("GPU ") for line in listing.splitlines())


def launcher_words(launcher, study, ranks, build):
    """What stands before the program. One rank needs no launcher; on GPUs torchrun serves builds without
    MPI; the tests' own launcher needs neither and starts fastest."""
    if ranks == 1:
        return []
    if launcher == "auto":
        launcher = (
            "torchrun"
            if study.device == "cuda" and (shutil.which("torchrun") or not shutil.which("mpirun"))
            else "mpirun"
        )
    if launcher == "torchrun":
        return ["torchrun", "--standalone", "--no-python", f"--nproc-per-node={ranks}"]
    if launcher == "ddp_test_launch":
        return [
            os.path.join(build, "tests", "support", launcher),
            "--ranks",
            str(ranks),
            "--timeout",
            str(seconds(study.time)),
            "--launch",
            "env" if study.device == "cuda" else "mpi",
            "--verbose",
            "--",
        ]
    return ["mpirun", "-n", str(ranks)]


def local_command(study, group, run, folder_path, build, launcher):
    return (
        launcher_words(launcher, study, run.ranks, build)
        + [program_path(study, build)]
        + study.arguments(group)
        + run.settings
        + [f"metrics.repeat={run.repeat}"]
        + ([] if study.work_dir else ["checkpoint.dir="])
        + [f"metrics.dir={folder_path}", f"metrics.run_name={run.name}"]
    )


def local_environment(study, run):
    """CPU ranks get equally many threads at every point, as from Slurm. Otherwise one rank has all cores."""
    threads = study.cpus_per_rank
    if study.device == "cuda":
        threads = max(1, len(os.sched_getaffinity(0)) // run.ranks)
    return {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0"),
        **MPI_SETTINGS,
    }


def set_attempt_aside(path):
    """Figures of one start must not be mixed with those of another."""
    old = (
        [name for name in os.listdir(path) if not name.startswith("attempt-")] if os.path.isdir(path) else []
    )
    if old:
        number = 1
        while os.path.exists(os.path.join(path, f"attempt-{number}")):
            number += 1
        aside = os.path.join(path, f"attempt-{number}")
        os.makedirs(aside)
        for name in old:
            os.rename(os.path.join(path, name), os.path.join(aside, name))


def seconds(limit):
    days, _, clock = limit.rpartition("-")
    hours, minutes, rest = (int(part) for part in clock.split(":"))
    return int(days or 0) * 86400 + hours * 3600 + minutes * 60 + rest


def run_here(study, folder, group, run, build, launcher):
    """Starts one run and waits; its exit code goes to exit_code, as a batch job's does."""
    path = folder.run_path(run)
    set_attempt_aside(path)
    make_own_folder(path)
    command = local_command(study, group, run, folder.path, build, launcher)
    environment = local_environment(study, run)
    replace_file(
        os.path.join(path, "command.txt"),
        shown({"OMP_NUM_THREADS": environment["OMP_NUM_THREADS"]}, command) + "\n",
    )
    begin = time.monotonic()
    with open(os.path.join(path, "log.txt"), "wb", opener=regular) as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            start_new_session=True,
            cwd=study.work_dir or None,
        )
        try:
            code = process.wait(timeout=seconds(study.time))
        except BaseException as error:  # also Ctrl-C: the ranks are in a session of their own
            _end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            log.write(f"ended after the time limit of {study.time}\n".encode())
            code = 124
    replace_file(os.path.join(path, "exit_code"), f"{code}\n")
    return code, time.monotonic() - begin


def _end(process):
    for signal_number, grace in ((15, 10), (9, 10)):
        try:
            os.killpg(process.pid, signal_number)
            process.wait(timeout=grace)
            return
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue


def build_folder(study, build):
    """The folder that a program given by its path was built in, if one is above it; otherwise `build`."""
    folder = os.path.dirname(program_path(study, build)) if study.work_dir else ""
    while folder not in ("", "/"):
        if os.path.exists(os.path.join(folder, "CMakeCache.txt")):
            return folder
        folder = os.path.dirname(folder)
    return build


def describe_system(folder, build, program):
    report = os.path.join(folder.path, "SYSTEM.md")
    if not os.path.exists(report):
        tool = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "system_report.py")
        subprocess.run(
            [sys.executable, tool, "--build", build, "--program", program, "--output", report], check=False
        )


def check_program(study, build):
    if not os.access(program_path(study, build), os.X_OK):
        raise StudyError(
            f"there is no program {program_path(study, build)}; fix: build it, or give "
            + ("its path from the folder of this call" if study.work_dir else "the build folder (--build)")
        )


def check_gpus(study, runs):
    """Refuses where none of `runs` has the GPUs it needs on this host; returns how many GPUs there are (None
    for CPU ranks)."""
    if study.device != "cuda":
        return None
    available = num_gpus()
    if runs and all(run.ranks > available for run in runs):
        raise StudyError(
            f"{study.path}: nothing to run here: the remaining runs need at least "
            f"{min(run.ranks for run in runs)} GPU(s), and this "
            f"host has {available}; fix: use a host with more, or Slurm (without --local)"
        )
    return available


def telling_lines(log, count=8):
    """What of a failed run's log says why: what the ranks call an error, each error once (the ranks repeat
    one another), the first and the last where they are many; then the end, which may be no more than the
    launcher's own words."""
    errors = {}
    for line in log:
        if "[error]" in line:
            errors.setdefault(line[line.index("[error]") :], line)
    errors = list(errors.values())
    if len(errors) > count:
        half = count // 2
        errors[half:-half] = [f"… {len(errors) - 2 * half} more errors …"]
    end = [line for line in log[-count:] if line.strip() and "[error]" not in line]
    return errors + end


def check_launcher(study, runs, build, launcher):
    """Refuses where what starts several ranks is not on this host."""
    available = check_gpus(study, runs)
    ranks = [run.ranks for run in runs if run.ranks > 1 and (available is None or run.ranks <= available)]
    words = launcher_words(launcher, study, max(ranks), build) if ranks else []
    if words and shutil.which(words[0]) is None:
        raise StudyError(
            f"{study.path}: {words[0]}, which starts {max(ranks)} ranks, is not installed here; fix: install "
            "it, or choose another --launcher"
        )


def run_local(study, folder, runs, build, launcher):
    """Runs them here, one after another; returns how many failed. Points of more GPUs than there are
    stay missing, and are named."""
    available = check_gpus(study, runs)
    groups = {id(run): group for group in study.groups for run in group.runs}
    todo = [run for run in study.runs if run in runs]
    if available is not None:
        beyond = sorted({run.ranks for run in todo if run.ranks > available})
        if beyond:
            print(f"skipped: {', '.join(map(str, beyond))} GPUs, this host has {available}")
        todo = [run for run in todo if run.ranks <= available]
    describe_system(folder, build_folder(study, build), program_path(study, build))
    failed = 0
    for number, run in enumerate(todo, 1):
        code, took = run_here(study, folder, groups[id(run)], run, build, launcher)
        state, why = folder.state(run)
        print(
            f"[{number}/{len(todo)}] {run.name}: {state}{f' ({why})' if why else ''}, {took:.1f} s",
            flush=True,
        )
        if state != DONE:
            failed += 1
            log = read_optional(os.path.join(folder.run_path(run), "log.txt"))
            print("\n".join(f"    {line}" for line in telling_lines(log.splitlines())))
    return failed
