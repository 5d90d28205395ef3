"""Environment of a job on several hosts: the forwarded variables of the caller, and their transport.

[Note: variables over stdin]
Every user who can list the processes of a machine can read their command lines. So variables are never put
on one: a shell reads them from the first line of its stdin and leaves the rest of it to the command. It has
to be a shell, since the interpreter itself can need some of them (LD_LIBRARY_PATH), and `read` takes no byte
beyond the line. A newline in a value is the shell variable `cai_nl`, and the script contains none: csh, as a
login shell, accepts no newline between quotes.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from colossalai.launcher._cleanup import MARK_VARIABLE

_PREFIXES = (
    *("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "HIP_", "ROCR_", "XLA_", "UCX_", "FI_", "IBV_"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "TRITON_", "HF_", "TRANSFORMERS_", "TOKENIZERS_", "COLOSSALAI_"),
)
_NAMES = (
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "PYTHONHASHSEED",
    "PYTHONUNBUFFERED",
    "PYTHONWARNINGS",
)
_SECRETS = ("TOKEN", "KEY", "SECRET", "PASS", "CREDENTIAL", "AUTH")  # names kept on this machine
_NOT_SECRET = ("NCCL_IB_PKEY", "UCX_IB_PKEY")  # a partition of InfiniBand

READ_VARIABLES = (
    """cai_nl=$(printf '\\nx') && cai_nl=${cai_nl%x} && IFS= read -r cai_line && eval "$cai_line" """
    "&& unset cai_nl cai_line"
)
"""For a POSIX shell: set the variables of `variables_line`; see [Note: variables over stdin]."""


def forwarded_environment(environment: Mapping[str, str], given: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that every host gets: those that matter to a job, and the user's --env.

    Args:
        environment: The caller's environment.
        given: See `given_variables`; they take precedence.

    Raises:
        ValueError: A word of `given` is not a variable.
    """
    names = [name for name in sorted(environment) if _matters(name) and not is_secret(name)]
    kept = {name: environment[name] for name in names}
    return kept | package_path(environment) | given_variables(given, environment)


def withheld_names(environment: Mapping[str, str], given: Sequence[str] = ()) -> list[str]:
    """Return the names of the caller's variables that would go along if they did not look like secrets."""
    asked = {word.partition("=")[0] for word in given}
    return [name for name in sorted({*environment} - asked) if _matters(name) and is_secret(name)]


def given_variables(given: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of --env.

    Args:
        given: "NAME=VALUE" each, or "NAME" for the caller's value, which keeps it off the command line.
        environment: The caller's.

    Raises:
        ValueError: A word of `given` is neither NAME nor NAME=VALUE, or the caller has no variable NAME.
    """
    env = {}
    for word in given:
        name, sign, value = word.partition("=")
        if not is_variable_name(name):
            raise ValueError(
                f"--env {word!r} is not a variable; write NAME=VALUE, or NAME for your own value"
            )
        if not sign and name not in environment:
            raise ValueError(f"--env {name}: it is not set here; write {name}=VALUE")
        env[name] = value if sign else environment[name]
    return env


def package_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the PYTHONPATH for this package, if it is found through the caller's directory only."""
    root = str(Path(__file__).resolve().parents[2])
    if root != os.getcwd():
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))}


def _matters(name: str) -> bool:
    """Whether a variable of the caller's is for the job."""
    is_ours = name in _NAMES or name.startswith(_PREFIXES)
    return is_ours and is_variable_name(name) and name != MARK_VARIABLE


def is_secret(name: str) -> bool:
    """Whether the name of a variable looks like a secret's; TOKENIZERS_PARALLELISM does not."""
    rest = name.upper().removeprefix("TOKENIZERS_")
    return name not in _NOT_SECRET and any(word in rest for word in _SECRETS)


def variables_line(env: Mapping[str, str]) -> bytes:
    """Return the line from which `READ_VARIABLES` sets these variables.

    Raises:
        ValueError: A name of `env` is not a name of a shell variable.
    """
    for name in env:
        if not is_variable_name(name):
            raise ValueError(f"{name!r} is no name of a variable: use letters, digits and underscores")
    words = [f"{name}={_quoted(value)}" for name, value in env.items()]
    return os.fsencode(" ".join(["export", *words] if words else [":"])) + b"\n"


def is_variable_name(name: str) -> bool:
    """Whether a shell takes a name as a variable's."""
    return name.isascii() and name.isidentifier()


def _quoted(value: str) -> str:
    return shlex.quote(value).replace("\n", "'\"$cai_nl\"'")  # a value with a newline is in single quotes
