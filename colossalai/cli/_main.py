"""The commands and their options. What they do is imported when it is asked for: `--help` is quick."""

import sys

import click

from colossalai._version import __version__

# \b keeps click from filling the lines.
_EXAMPLES = "\b\nExamples:\n  colossalai run --nproc_per_node 4 train.py\n  colossalai check -i"
_RUN_EXAMPLES = """\b
Examples:
  colossalai run --nproc_per_node 4 train.py --config config.py
  colossalai run --nproc_per_node 2 --master_port 29505 -m package.train"""
_CHECK_EXAMPLES = "\b\nExamples:\n  colossalai check -i\n  colossalai check -i --json"


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXAMPLES)
@click.version_option(__version__, prog_name="colossalai")
def main() -> None:
    """Colossal-AI: start parallel training, and check the installation."""


@main.command(context_settings={"allow_interspersed_args": False}, epilog=_RUN_EXAMPLES)
@click.option(
    "--nproc_per_node",
    "--nproc-per-node",
    "num_procs",
    type=int,
    metavar="N",
    help="Processes to start: one per accelerator if not given, or one on a machine without.",
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
    "-m", "--module", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m."
)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(num_procs: int | None, master_port: int, is_module: bool, script: str, args: tuple[str, ...]) -> None:
    """Run SCRIPT with ARGS in N processes on this machine.

    Every process finds RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its environment;
    colossalai.launch_from_torch reads them. When one process fails, all are ended, and the error of the
    first one is shown.
    """
    from colossalai.cli._job import Job, check_job
    from colossalai.cli._launcher import launch

    job = Job(target=script, args=args, is_module=is_module, num_procs=num_procs, master_port=master_port)
    try:
        check_job(job)
        sys.exit(launch(job))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)  # pressed before the processes were started; 128 + SIGINT, as a shell has it


@main.command(epilog=_CHECK_EXAMPLES)
@click.option("-i", "--installation", is_flag=True, help="Check the installation.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def check(context: click.Context, installation: bool, as_json: bool) -> None:
    """Show versions, devices, back ends and optional libraries, and whether they fit together.

    Ends with exit code 1 if something that is needed is missing.
    """
    if not installation:
        raise click.UsageError("say what to check: colossalai check -i checks the installation", context)
    from colossalai.cli._check import show
    from colossalai.cluster import examine_installation

    report = examine_installation()
    show(report, as_json=as_json)
    sys.exit(0 if report.is_fit else 1)
