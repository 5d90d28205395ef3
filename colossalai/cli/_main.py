"""Commands and their options. Their implementations are imported lazily, so that `--help` is quick."""

import sys
from typing import Any, NoReturn

import click

from colossalai._version import __version__
from colossalai.cli._benchmark_command import benchmark
from colossalai.cli._checkpoint_commands import checkpoint
from colossalai.cli._memory_command import memory
from colossalai.cli._plan_command import plan
from colossalai.cli._run_command import run
from colossalai.cli._serve_command import serve

# \b keeps click from filling the lines.
_EXAMPLES = """\b
Examples:
  colossalai run --nproc_per_node 4 train.py
  colossalai check -i
  colossalai check --doctor --host host1,host2"""
_CHECK_EXAMPLES = """\b
Examples:
  colossalai check -i
  colossalai check -i --json
  colossalai check --doctor --host host1,host2
  colossalai check --doctor --hostfile hosts --script train.py
  colossalai check --bandwidth --nproc_per_node 4
  colossalai check --bandwidth --mesh 2x4 --json > mesh.json
  colossalai check --matmul"""
_PIPELINE_EXAMPLES = """\b
Examples:
  colossalai pipeline --stages 8 --microbatches 32
  colossalai pipeline --stages 4 --microbatches 8 --schedule 1f1b,zb-v --text
  colossalai pipeline --stages 8 --microbatches 32 --chunks 4 --p2p 0.05 \\
    --plot schedules.png
  colossalai pipeline --file mine.csv --schedule zb-h1 --json"""

_POSITIVE = click.IntRange(min=1)
_TIME = click.FloatRange(min=0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXAMPLES)
@click.version_option(__version__, prog_name="colossalai")
def main() -> None:
    """Colossal-AI: start parallel training, compare ways to do it, and check the installation."""


main.add_command(run)
main.add_command(benchmark)
main.add_command(memory)
main.add_command(checkpoint)
main.add_command(plan)
main.add_command(serve)


@main.command(epilog=_CHECK_EXAMPLES)
@click.option("-i", "--installation", is_flag=True, help="Check the installation of this machine.")
@click.option(
    "--doctor", is_flag=True, help="Check the hosts of a job: all that is checked before it starts."
)
@click.option("--bandwidth", is_flag=True, help="Measure communication between processes of this machine.")
@click.option(
    "--matmul", is_flag=True, help='Measure the times behind matmul="auto" again; best on a quiet machine.'
)
@click.option(
    "--host", "hosts", metavar="H,...", help="Hosts to check, as for run; this machine if not given."
)
@click.option("--hostfile", metavar="FILE", help="A file with a host in each line, as for run.")
@click.option("--include", metavar="H,...", help="Check these of the hosts only.")
@click.option("--exclude", metavar="H,...", help="Leave these of the hosts out.")
@click.option("--master_addr", "--master-addr", metavar="NAME", help="The first host, as the others know it.")
@click.option(
    "--master_port",
    "--master-port",
    type=click.IntRange(0, 65535),
    metavar="P",
    help="Port of the first host; a free one is picked if not given or 0.",
)
@click.option(
    "--nproc_per_node",
    "--nproc-per-node",
    "num_procs",
    type=_POSITIVE,
    metavar="N",
    help="Processes on each host.",
)
@click.option("--mesh", metavar="AxB", help="With --bandwidth: the grid of the processes, such as 2x4.")
@click.option("--script", metavar="FILE", help="See that all hosts have this script.")
@click.option("--ssh-port", "--ssh_port", type=click.IntRange(1, 65535), metavar="P", help="Port of sshd.")
@click.option("--env", multiple=True, metavar="NAME[=VALUE]", help="A variable of the job; several times.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def check(
    installation: bool, doctor: bool, bandwidth: bool, matmul: bool, as_json: bool, **settings: Any
) -> None:
    """Show versions, devices, back ends and optional libraries, and whether they fit together.

    With --doctor: whether a job can be started on some hosts, and if not, the problems and their remedies.
    Ends with exit code 1 if a requirement is missing. With --bandwidth: the cost of each kind of
    communication between processes of this machine. With --matmul: which library multiplies float32 matrices
    faster; jobs use these figures from then on.
    """
    given = {name: value for name, value in settings.items() if value not in (None, ())}
    if installation + doctor + bandwidth + matmul != 1:
        raise click.UsageError(
            "choose a check: colossalai check -i checks the installation, colossalai check --doctor the "
            "hosts of a job, colossalai check --bandwidth measures the cost of communication, "
            "colossalai check --matmul products of matrices"
        )
    allowed = {"num_procs", "mesh"} if bandwidth else set(settings) - {"mesh"} if doctor else set()
    if not allowed.issuperset(given):
        names = ", ".join(name for name in given if name not in allowed)
        whose = "--bandwidth" if names == "mesh" else "--doctor"
        raise click.UsageError(f"{names}: these are options of colossalai check {whose}")
    if bandwidth:
        _check_bandwidth(as_json=as_json, **given)
    if matmul:
        from colossalai.cli._check import check_products

        sys.exit(check_products(as_json=as_json))
    if installation:
        from colossalai.cli._check import show_installation
        from colossalai.cluster import examine_installation
        from colossalai.kernel import auto_product

        installed = examine_installation({'matmul="auto"': auto_product()})
        show_installation(installed, as_json=as_json)
        sys.exit(0 if installed.is_fit else 1)
    from colossalai.cli._check import DoctorSettings, examine, show_preflight

    try:
        report = examine(DoctorSettings(**given))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    show_preflight(report, as_json=as_json)
    sys.exit(0 if report.is_fit else 1)


def _check_bandwidth(*, as_json: bool, num_procs: int | None = None, mesh: str | None = None) -> NoReturn:
    from colossalai.cli._bandwidth import check_bandwidth

    try:
        sys.exit(check_bandwidth(num_procs=num_procs, mesh=mesh, as_json=as_json))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)


@main.command(epilog=_PIPELINE_EXAMPLES)
@click.option("--stages", "num_ranks", type=_POSITIVE, metavar="P", help="Pipeline ranks.")
@click.option(
    "--microbatches", "num_microbatches", type=_POSITIVE, metavar="M", help="Microbatches of a batch."
)
@click.option(
    "--schedule",
    "names",
    metavar="S,...",
    help="Some of gpipe, 1f1b, interleaved, zb-h1, zb-v; all if not given (none with --file).",
)
@click.option(
    "--chunks",
    "num_chunks",
    type=_POSITIVE,
    default=2,
    show_default=True,
    metavar="V",
    help="Stages on a rank of the interleaved schedule.",
)
@click.option(
    "--file",
    "file",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE.csv",
    help="A schedule of your own: a row for each rank, cells like 0F0 (stage; F, B, I or W; microbatch).",
)
@click.option(
    "--forward",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    metavar="T",
    help="Time of a forward through a rank's share of the model.",
)
@click.option(
    "--backward",
    type=_TIME,
    default=2.0,
    show_default=True,
    metavar="T",
    help="Time of a whole backward through it.",
)
@click.option(
    "--weight_grad",
    "--weight-grad",
    type=_TIME,
    metavar="T",
    help="The part of the backward that computes weight gradients; half of it if not given.",
)
@click.option("--p2p", type=_TIME, default=0.0, show_default=True, metavar="T", help="Time of a message.")
@click.option("--bytes", "message_bytes", type=_POSITIVE, metavar="N", help="Bytes of a message.")
@click.option("--plot", "plot_file", metavar="FILE.png", help="Also draw the schedules in time.")
@click.option("--text", "has_text", is_flag=True, help="Also draw them with characters.")
@click.option("--steps", "has_steps", is_flag=True, help="Also list the actions of each rank, with messages.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, without tables.")
def pipeline(
    names: str | None,
    plot_file: str | None,
    *,
    has_text: bool,
    has_steps: bool,
    as_json: bool,
    **settings: Any,
) -> None:
    """Compare pipeline schedules: step time, bubble, memory and messages, without running them.

    The schedules are the lists of actions that training runs. Times are in any unit. A rank's share of the
    model takes the same time in all schedules, however many stages it is cut into.
    """
    from colossalai.cli._pipeline import PipelineOutput, PipelineSettings, compare

    chosen = None if names is None else tuple(name.strip() for name in names.split(","))
    output = PipelineOutput(plot_file=plot_file, has_text=has_text, has_steps=has_steps, as_json=as_json)
    try:
        compare(PipelineSettings(names=chosen, **settings), output)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
