"""The commands and their options. What they do is imported when it is asked for: `--help` is quick."""

import sys
from typing import Any, NoReturn

import click

from colossalai._version import __version__
from colossalai.cli._checkpoint_commands import checkpoint
from colossalai.cli._run_command import run

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
  colossalai check --bandwidth --mesh 2x4 --json > mesh.json"""
_BENCHMARK_EXAMPLES = """\b
Examples:
  colossalai benchmark --gpus 4
  colossalai benchmark --gpus 8 --batch_size 16 --hidden_size 1024 --plot modes.png
  colossalai benchmark --gpus 4 --modes 1d,2d --json -"""
_PIPELINE_EXAMPLES = """\b
Examples:
  colossalai pipeline --stages 8 --microbatches 32
  colossalai pipeline --stages 4 --microbatches 8 --schedule 1f1b,zb-v --text
  colossalai pipeline --stages 8 --microbatches 32 --chunks 4 --p2p 0.05 --plot schedules.png
  colossalai pipeline --file mine.csv --schedule zb-h1 --json"""
_MEMORY_EXAMPLES = """\b
Examples:
  colossalai memory --model gpt2-xl --dp 8 --zero 2
  colossalai memory --model gpt3 --dp 16 --tp 8 --pp 12 --zero 1 --recompute --explain
  colossalai memory --model path/to/config.json --batch 4 --seq 512 --precision bf16 --json
  colossalai memory --model gpt2-small --trace out.png --memory-budget 512MiB --offload-dir /tmp/chunks"""

_POSITIVE = click.IntRange(min=1)
_TIME = click.FloatRange(min=0)


@click.group(context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EXAMPLES)
@click.version_option(__version__, prog_name="colossalai")
def main() -> None:
    """Colossal-AI: start parallel training, compare ways to do it, and check the installation."""


main.add_command(run)
main.add_command(checkpoint)


@main.command(epilog=_CHECK_EXAMPLES)
@click.option("-i", "--installation", is_flag=True, help="Check the installation of this machine.")
@click.option(
    "--doctor", is_flag=True, help="Check the hosts of a job: all that is checked before it starts."
)
@click.option("--bandwidth", is_flag=True, help="Measure communication between processes of this machine.")
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
def check(installation: bool, doctor: bool, bandwidth: bool, as_json: bool, **settings: Any) -> None:
    """Show versions, devices, back ends and optional libraries, and whether they fit together.

    With --doctor: whether a job can be started on some hosts, and if not, what is wrong and what to do. Ends
    with exit code 1 if something that is needed is missing. With --bandwidth: what each kind of communication
    between processes of this machine costs.
    """
    given = {name: value for name, value in settings.items() if value not in (None, ())}
    if installation + doctor + bandwidth != 1:
        raise click.UsageError(
            "say what to check: colossalai check -i checks the installation, colossalai check --doctor the "
            "hosts of a job, colossalai check --bandwidth measures what communication costs"
        )
    allowed = {"num_procs", "mesh"} if bandwidth else set(settings) - {"mesh"} if doctor else set()
    if not allowed.issuperset(given):
        names = ", ".join(name for name in given if name not in allowed)
        whose = "--bandwidth" if names == "mesh" else "--doctor"
        raise click.UsageError(f"{names}: these are options of colossalai check {whose}")
    if bandwidth:
        _check_bandwidth(as_json=as_json, **given)
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


@main.command(epilog=_BENCHMARK_EXAMPLES)
@click.option(
    "--gpus",
    "num_procs",
    type=_POSITIVE,
    required=True,
    metavar="N",
    help="Processes to start: one on each of N accelerators, or N on the CPU of a machine without.",
)
@click.option("--batch_size", "--batch-size", type=_POSITIVE, default=8, show_default=True, metavar="B")
@click.option("--seq_length", "--seq-length", type=_POSITIVE, default=128, show_default=True, metavar="S")
@click.option("--hidden_size", "--hidden-size", type=_POSITIVE, default=512, show_default=True, metavar="H")
@click.option("--num_heads", "--num-heads", type=_POSITIVE, default=8, show_default=True, metavar="A")
@click.option("--num_layers", "--num-layers", type=_POSITIVE, default=2, show_default=True, metavar="L")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    metavar="W",
    help="Steps that do not count.",
)
@click.option(
    "--rounds", type=_POSITIVE, default=10, show_default=True, metavar="R", help="Steps that count."
)
@click.option("--modes", metavar="M,...", help="Some of 1d, 2d, 2.5d, 3d; all that fit if not given.")
@click.option(
    "--json", "json_file", metavar="FILE", help="Also write the results as JSON; - is stdout, without tables."
)
@click.option("--plot", "plot_file", metavar="FILE.png", help="Also draw the results as a bar chart.")
def benchmark(modes: str | None, json_file: str | None, plot_file: str | None, **sizes: int) -> None:
    """Measure every tensor-parallel configuration of N processes on this machine.

    Each is run on a multi-layer perceptron and on a transformer of (batch, sequence, hidden), forward and
    backward. What does not fit the sizes is listed with the reason.
    """
    from colossalai.cli._benchmark import BenchmarkOutput, BenchmarkSettings
    from colossalai.cli._benchmark import benchmark as run_benchmark

    chosen = None if modes is None else tuple(mode.strip() for mode in modes.split(","))
    output = BenchmarkOutput(json_file=json_file, plot_file=plot_file)
    try:
        sys.exit(run_benchmark(BenchmarkSettings(**sizes, configurations=()), chosen, output))
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
    help="Some of gpipe, 1f1b, interleaved, zb-h1, zb-v; all if not given (none beside --file).",
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
@click.option("--steps", "has_steps", is_flag=True, help="Also list what each rank does, messages included.")
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


@main.command(epilog=_MEMORY_EXAMPLES)
@click.option(
    "--model",
    required=True,
    metavar="NAME",
    help="A model such as gpt2-xl (a wrong name lists all), or a config.json of Hugging Face transformers.",
)
@click.option("--dp", type=_POSITIVE, default=1, show_default=True, metavar="N", help="Data-parallel ranks.")
@click.option(
    "--tp", type=_POSITIVE, default=1, show_default=True, metavar="T", help="Ranks that share a layer (1d)."
)
@click.option(
    "--pp", type=_POSITIVE, default=1, show_default=True, metavar="P", help="Pipeline ranks (1f1b)."
)
@click.option(
    "--zero",
    type=click.IntRange(0, 3),
    default=0,
    show_default=True,
    help="Stage of ZeRO: 1 cuts optimizer states over the data-parallel ranks, 2 gradients, 3 parameters.",
)
@click.option(
    "--precision",
    default="bf16_master",
    show_default=True,
    metavar="NAME",
    help="fp32; bf16, fp16 (autocast); bf16_master, fp16_naive (16 bits and float32 masters, as ZeRO's).",
)
@click.option(
    "--batch",
    type=_POSITIVE,
    default=1,
    show_default=True,
    metavar="B",
    help="Samples in a forward of a rank.",
)
@click.option(
    "--seq", type=_POSITIVE, metavar="S", help="Length of the sequences; the model's longest if not given."
)
@click.option("--recompute", is_flag=True, help="Blocks keep their input only and are recomputed.")
@click.option(
    "--attention",
    type=click.Choice(["sdpa", "eager"]),
    default="sdpa",
    show_default=True,
    help="Fused, or with attention weights written out.",
)
@click.option("--explain", is_flag=True, help="Also print the formula of each row, with its numbers.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, formulas included, without tables.")
@click.option(
    "--trace",
    "trace_file",
    metavar="FILE.png",
    help="Train two iterations under Gemini, and draw what lay in memory when. The options below are its.",
)
@click.option("--memory-budget", "--memory_budget", metavar="SIZE", help="Of a rank: 268435456, or 256MiB.")
@click.option("--offload-dir", "--offload_dir", metavar="FOLDER", help="For what does not fit into it.")
@click.option(
    "--placement-policy",
    "--placement_policy",
    metavar="NAME",
    help="One of those of GeminiPlugin; auto if there is a budget, cpu if not.",
)
@click.option(
    "--blocks", type=_POSITIVE, metavar="N", help="Train with N blocks of the model; 4 if not given."
)
@click.option(
    "--min-chunk-size-mb",
    "--min_chunk_size_mb",
    type=click.FloatRange(min=0, min_open=True),
    metavar="MB",
    help="The least size of a chunk, in MB of 2**20 elements; a sixteenth of the model if not given.",
)
def memory(as_json: bool, explain: bool, trace_file: str | None, **settings: Any) -> None:
    """Estimate what a rank holds in training with Adam: parameters, gradients, states, activations.

    Neither weights nor ranks are needed: parameters are counted on the meta device. With a pipeline, the
    stage that needs most is shown.

    With --trace nothing is estimated: --dp ranks train with random data, on this machine, by default with 4
    blocks on 128 tokens.
    """
    of_trace = ("memory_budget", "offload_dir", "placement_policy", "blocks", "min_chunk_size_mb")
    if trace_file is None:
        if given := [name for name in of_trace if settings.pop(name) is not None]:
            raise click.UsageError(f"--{given[0].replace('_', '-')} is an option of --trace FILE.png")
    elif explain:
        raise click.UsageError("--trace measures, and has no formulas: leave --explain out")
    from colossalai.cli._memory import show_memory, trace_memory

    if as_json and explain:
        raise click.UsageError("--json has the formulas: leave --explain out")
    try:
        if trace_file is None:
            show_memory(**settings, as_json=as_json, explain=explain)
        else:
            sys.exit(trace_memory(trace_file, **settings, as_json=as_json))
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except KeyboardInterrupt:
        sys.exit(130)
