#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Exports runs to Weights & Biases' offline mode or to MLflow, through their own packages.

    tools/export_metrics.py runs/2026-11-26_23-03-25 --to wandb
    tools/export_metrics.py runs/lr_1 runs/lr_2 --to mlflow

Then call the command that is printed: wandb sync, or mlflow ui.

A run is the folder that a program logs to: metrics.dir/<run>. Every numeric column of its JSONL or CSV files
becomes the metric <file>/<column>, at its step and time. Settings become wandb's config or MLflow's params,
and so do the constants of the run (run/ranks, run/gpu_type, ...). A row of epochs counts at the epoch's last
step. Nothing is sent anywhere: wandb writes offline, and MLflow a SQLite file unless --tracking-uri names a
server.

Exit codes: 0 exported, 64 a mistake in the call or a missing package, 65 a folder or file that cannot be
used, 73 the target cannot be written.
"""

import importlib
import os
import re
import sys

from run_page.files import Run
from scaling.command_line import EXIT_MISTAKE, Parser, WriteError, exit_code, writing
from scaling.files import regular
from scaling.terminal import unguarded

TARGETS = ("mlflow", "wandb")  # the names of their packages too
# Packages whose errors the targets let through.
BELOW = ("alembic", "pydantic_core", "requests", "sqlalchemy", "sqlite3", "urllib3")
MLFLOW_RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"  # MLflow's own 7 wait for minutes
MLFLOW_NAME = re.compile(r"[^\w\-. /]")  # what MLflow refuses in names
MLFLOW_METRICS, MLFLOW_PARAMS = 1000, 100  # of one call
MLFLOW_VALUE = 500  # characters of a parameter


def rows_of(run):
    """(step, time or None, {metric: value}) of all files, by ascending step."""
    rows = []
    for table in run.tables:
        for row in table.rows:
            values = {f"{table.name}/{column}": row[column] for column in table.columns if column in row}
            rows.append((int(run.position(table, row)), row.get("time"), values))
    return sorted(rows, key=lambda row: row[0])


def parameters_of(run):
    """The settings, and the constants of the run."""
    return {**run.settings, **{f"run/{name}": value for name, value in run.facts.items()}}


def to_wandb(wandb, run, options):
    """The folder of the offline run."""
    offline = wandb.init(
        mode="offline",
        project=options.project,
        name=run.label,
        dir=options.output,
        config=parameters_of(run),
        reinit="create_new",
    )
    merged = {}  # wandb takes one row for each step
    for step, time, values in rows_of(run):
        merged.setdefault(step, {}).update(values if time is None else {**values, "_timestamp": time})
    for step, values in merged.items():
        offline.log(values, step=step)
    folder = os.path.dirname(offline.dir)
    offline.finish()
    return f"wandb sync {folder}"


def to_mlflow(mlflow, run, options):
    """The run in the tracking store."""
    os.environ.setdefault(MLFLOW_RETRIES, "2")
    uri = options.tracking_uri
    if uri:
        print(f"{run.path}: sending to {uri}", flush=True)
    else:
        file = os.path.abspath(os.path.join(options.output, "mlflow.db"))
        # MLflow would try for minutes to open a file that it cannot write.
        with open(file, "ab", opener=regular):
            pass
        uri = "sqlite:///" + file
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name(options.project)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(options.project)
    rows = rows_of(run)
    times = [time for _, time, _ in rows if time is not None]
    start = int(1000 * min(times, default=0))
    run_id = client.create_run(experiment_id, run_name=run.label, start_time=start).info.run_id
    metrics = []
    for step, time, values in rows:
        at = int(1000 * time) if time else start
        for name, value in values.items():
            metrics.append(mlflow.entities.Metric(MLFLOW_NAME.sub("_", name), value, at, step))
    params = [
        mlflow.entities.Param(MLFLOW_NAME.sub("_", key), value[:MLFLOW_VALUE])
        for key, value in parameters_of(run).items()
    ]
    for begin in range(0, len(metrics), MLFLOW_METRICS):
        client.log_batch(run_id, metrics=metrics[begin : begin + MLFLOW_METRICS])
    for begin in range(0, len(params), MLFLOW_PARAMS):
        client.log_batch(run_id, params=params[begin : begin + MLFLOW_PARAMS])
    client.set_terminated(run_id, end_time=int(1000 * max(times, default=0)))
    return f"mlflow ui --backend-store-uri {uri}    (experiment {options.project}, run {run_id})"


def import_package(target):
    try:
        return importlib.import_module(target)
    except ImportError as error:
        print(
            f"error: --to {target} needs the package {target} ({error}); fix: pip install {target}",
            file=sys.stderr,
        )
        sys.exit(EXIT_MISTAKE)


def export(package, run, options):
    """The command that shows the run. An error of the target's package, or of one below it, ends with its own
    words."""
    try:
        with unguarded():  # both colour their messages
            return (to_wandb if options.to == "wandb" else to_mlflow)(package, run, options)
    except Exception as error:
        if type(error).__module__.split(".")[0] not in (options.to, *BELOW):
            raise
        places = (
            "--project, --output or --tracking-uri" if options.to == "mlflow" else "--project or --output"
        )
        raise WriteError(
            f"{run.path}: {options.to} refused the run: {error}; fix: name another {places}"
        ) from None


def main(arguments):
    parser = Parser(__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run")
    parser.add_argument("--to", required=True, choices=TARGETS, help="the target")
    parser.add_argument(
        "--project", default="libddp", help="wandb's project, or MLflow's experiment (libddp)"
    )
    parser.add_argument(
        "--output", default=".", metavar="DIR", help="the folder that gets wandb/ or mlflow.db (this one)"
    )
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow's store, instead of mlflow.db")
    options = parser.parse_args(arguments)
    if options.tracking_uri and options.to != "mlflow":
        parser.error(f"--tracking-uri {options.tracking_uri} is for --to mlflow; fix: leave it out")
    runs = [Run(path) for path in options.runs]
    package = import_package(options.to)
    with writing(options.output):
        os.makedirs(options.output, exist_ok=True)
        for run in runs:
            print(f"{run.path}: {export(package, run, options)}")
    for run in runs:
        for note in run.notes:
            print(f"note: {run.path}: {note}")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code(main, sys.argv[1:]))
