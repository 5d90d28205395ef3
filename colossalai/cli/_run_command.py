"""Options of `colossalai run`. Its implementation is imported lazily, so that `--help` is quick."""

import sys
from typing import Any

import click

_EXAMPLES = """\b
Examples:
  colossalai run --nproc_per_node 4 train.py --config config.py
  colossalai run --nproc_per_node 4 --set fp16.mode=bf16 \\
    train.py --config config.yaml
  colossalai run --nproc_per_node 2 --master_port 29505 -m package.train
  colossalai run --nproc_per_node 8 --host host1,host2 train.py
  colossalai run --hostfile hosts --exclude host3 --max-restarts 3 \\
    --log-dir logs train.py"""


@click.command(context_settings={"allow_interspersed_args": False}, epilog=_EXAMPLES)
@click.option(
    "--nproc_per_node",
    "--nproc-per-node",
    "num_procs",
    type=int,
    metavar="N",
    help="Processes to start on each machine: its slots, or one per accelerator, or one, if not given.",
)
@click.option(
    "--host",
    "host_list",
    metavar="H,...",
    help="Machines to run on: host1,host2 or host1:4,host2:4 or node[1-3,7]; if not given, the nodes of the "
    "allocation of SLURM or PBS, else this machine.",
)
@click.option(
    "--hostfile", metavar="FILE", help="The same, one in each line: host1, host1:4 or host1 slots=4."
)
@click.option("--include", metavar="H,...", help="Run on these of the hosts only.")
@click.option("--exclude", metavar="H,...", help="Run on all of the hosts but these.")
@click.option(
    "--master_addr",
    "--master-addr",
    metavar="ADDR",
    help="By which all machines reach the first one; its name in the list of hosts if not given.",
)
@click.option(
    "--master_port",
    "--master-port",
    "master_port",
    type=int,
    default=0,
    metavar="P",
    help="Port at which the processes find each other; a free one is picked if not given or 0.",
)
@click.option(
    "--nnodes",
    metavar="MIN:MAX",
    help="Start and go on with as few as MIN machines when some are absent or lost.",
)
@click.option(
    "--max-restarts",
    "--max_restarts",
    type=int,
    metavar="N",
    help="Start the job again after a failure, N times; the script resumes from its checkpoint. "
    "0 if not given, with --nnodes MIN:MAX once for each machine that may be lost.",
)
@click.option(
    "--timeout",
    type=float,
    metavar="S",
    help="Seconds until all machines must have started, or have come back at a restart; 120 if not given.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Put a value over the config of the script, e.g. fp16.mode=bf16 or clip_grad_norm=1.0; Python and "
    "JSON literals are read as values, other words as strings.",
)
@click.option(
    "--env",
    multiple=True,
    metavar="NAME[=VALUE]",
    help="Set a variable on all machines; NAME alone gives them your own value.",
)
@click.option(
    "--log-dir", "--log_dir", metavar="DIR", help="Also write the output of rank N to DIR/rank_N.log."
)
@click.option("--ssh-port", "--ssh_port", type=click.IntRange(1, 65535), metavar="P", help="Port of sshd.")
@click.option(
    "--extra_launch_args",
    "--extra-launch-args",
    metavar="A=1,...",
    help="Options of torch's launcher: max_restarts, nnodes, nproc_per_node, log_dir, standalone.",
)
@click.option(
    "--bind/--no-bind",
    default=None,
    help="Deal the cores of each machine out to its processes, so that no two compute on the same core. If "
    "neither is given, it is done where several processes compute on the CPUs of a machine with hardware "
    "threads or several NUMA nodes, and they are not bound already (by taskset, OMP_PROC_BIND or SLURM).",
)
@click.option(
    "--preflight/--no-preflight",
    default=True,
    show_default=True,
    help="First see whether all machines can run the job; if not, start nothing.",
)
@click.option(
    "--dry-run", "--dry_run", is_flag=True, help="Print the command of each machine, start nothing."
)
@click.option(
    "-m", "--module", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m."
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(script: str, **options: Any) -> None:
    """Run SCRIPT with ARGS in N processes on this machine, or on each of several.

    Every process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment;
    colossalai.launch_from_torch reads them. When one process fails, all are ended, and the error of the
    first one is shown.

    Other machines are reached with ssh; they need the same Python, script and working directory. Variables
    such as NCCL_*, OMP_* and PYTHONPATH go along.
    """
    from colossalai.launcher import RunOptions
    from colossalai.launcher import run as run_job

    try:
        sys.exit(run_job(RunOptions(target=script, **options)))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)  # before the processes were started; 128 + SIGINT, as in shells
