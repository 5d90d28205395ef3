"""Options that the scripts of this folder share, and their results: plugin, model, tokenizer."""

import argparse
import ast
import inspect
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from colossalai.booster import Booster, plugin
from colossalai.chat import (
    PolicyDriftError,
    RolloutOptions,
    ValueModel,
    load_reward_model,
)
from colossalai.core import global_context as gpc
from colossalai.inference import SamplingParams, base_of_adapters

STRATEGIES = ("naive", "ddp", "colossalai_gemini", "colossalai_zero2", "colossalai_zero2_cpu")
STRATEGY = "colossalai_zero2"
FAMILIES = ("gpt2", "bloom", "opt", "llama")
OPTION_OF = {"max_length": "--max_len", "max_tokens": "--max_new_tokens"}
"""Options of the scripts by the arguments of `fit` that errors name."""


def make_parser(
    description: str | None,
    *,
    epochs: int = 3,
    learned: str = "the rows",
    dataset: str = "--dataset",
    has_batches: bool = True,
) -> argparse.ArgumentParser:
    """Return a parser with the options that all scripts have.

    Args:
        description: Description of the script.
        epochs: Default of `--max_epochs`.
        learned: Data of the passes of `--max_epochs`.
        dataset: Name of the option for the data.
        has_batches: Whether there are `--batch_size` and `--accumulation_steps`.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--strategy",
        choices=STRATEGIES,
        metavar="NAME",
        default=STRATEGY,
        help=f"one of {', '.join(STRATEGIES)}; default: %(default)s",
    )
    add(
        "--plugin",
        metavar="CALL",
        help="any plugin in the place of a strategy, as 'HybridParallelPlugin(tp_size=2, zero_stage=1)'",
    )
    add(
        "--model",
        choices=(*FAMILIES, "auto"),
        default="bloom",
        help="the family of --pretrain; default: %(default)s",
    )
    add("--pretrain", required=True, help="a folder of save_pretrained, or of adapters")
    add("--model_path", help="begin with the weights in this folder of a run before, as those of --pretrain")
    data = "a file of rows, or a data set in the cache of the library datasets"
    add(dataset, dest="dataset", required=True, help=data)
    add("--subset", help="subset of a data set in that cache, if it has several")
    add("--max_datasets_size", type=at_least(1), help="read so many rows at most")
    add("--save_path", default="output", help="the folder of the trained model; default: %(default)s")
    add("--need_optim_ckpt", type=truth, default=False, help="save the state of the optimizer, too")
    add("--max_epochs", type=at_least(1), default=epochs, help=f"passes over {learned}; default: %(default)s")
    if has_batches:
        rows = "rows of a batch of one rank; default: %(default)s"
        add("--batch_size", type=at_least(1), default=4, help=rows)
        batches = "batches of a step; default: %(default)s"
        add("--accumulation_steps", type=at_least(1), default=1, help=batches)
    add("--lr", type=at_least(0.0), default=5e-6, help="learning rate; default: %(default)s")
    add("--max_norm", type=float, help="scale gradients of a larger norm down to it")
    add("--max_len", type=at_least(2), default=512, help="most tokens of a text; default: %(default)s")
    adapters = "train adapters of this rank only; default: %(default)s"
    add("--lora_rank", type=at_least(0), default=0, help=adapters)
    add("--grad_checkpoint", action="store_true", help="compute activations again in the backward")
    add("--precision", choices=("fp32", "bf16", "fp16"), help="default: bf16 on an accelerator, else fp32")
    add(
        "--log_interval",
        type=at_least(1),
        default=100,
        help="steps between lines on the screen; default: %(default)s",
    )
    add(
        "--resume",
        metavar="FOLDER",
        help="go on from the training state in it, if there is one; states go there",
    )
    states = "steps between training states in the folder of --resume"
    add("--save_interval", type=at_least(1), help=states)
    add("--seed", type=at_least(0), default=42, help="of all draws; default: %(default)s")
    return parser


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the options of scripts that sample answers: `sampling_of` reads them."""
    add = parser.add_argument
    tokens = "most tokens of an answer; default: %(default)s"
    add("--max_new_tokens", type=at_least(1), default=64, help=tokens)
    add("--temperature", type=float, default=1.0, help="of the draws; default: %(default)s")
    ahead = "1: draw the answers of the next step while this one is made; default: %(default)s"
    add("--async", dest="ahead", type=int, choices=(0, 1), default=0, help=ahead)
    tokens = "most tokens of answers and padding that a forward computes; default: any number"
    add("--tokens_at_once", type=at_least(1), help=tokens)
    layers = "ranks that share the layers of an engine that answers; default: %(default)s"
    add("--rollout_tp_size", type=at_least(1), default=1, help=layers)
    add("--rollout_pp_size", type=at_least(1), default=1, help="stages of an engine; default: %(default)s")


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return how, where and when answers are drawn, as arguments of `fit`."""
    return {
        "tokens_at_once": args.tokens_at_once,
        "sampling": SamplingParams(max_tokens=args.max_new_tokens, temperature=args.temperature),
        "rollouts": RolloutOptions(
            ahead=args.ahead, tp_size=args.rollout_tp_size, pp_size=args.rollout_pp_size
        ),
    }


def truth(text: str) -> bool:
    """Parse a word as a bool."""
    if text.lower() in ("true", "1", "yes"):
        return True
    if text.lower() in ("false", "0", "no"):
        return False
    raise argparse.ArgumentTypeError(f"{text!r}: give True or False")


def at_least(least: float) -> Callable[[str], float]:
    """Return the type of an option whose number is at least `least`: whole where that is an int."""
    kind = type(least)

    def number(text: str) -> float:
        value = kind(text)
        if not (value >= least and math.isfinite(value)):
            raise argparse.ArgumentTypeError(f"{text}: give a number of at least {least}")
        return value

    number.__name__ = kind.__name__  # argparse names it where the text is not a number
    return number


@contextmanager
def plain_errors() -> Iterator[None]:
    """End the script with the message of a mistake, under the names of its options, without a traceback."""
    try:
        yield
    except (ValueError, OSError, PolicyDriftError) as error:
        names = "|".join(OPTION_OF)
        message = re.sub(rf"\b({names})=", lambda found: f"{OPTION_OF[found[1]]} ", str(error))
        raise SystemExit(message) from error
    except ModuleNotFoundError as error:
        if error.name != "peft":  # raised by a user's reward, for example
            raise
        raise SystemExit('adapters need peft: pip install "colossalai[chat]"') from error


def make_booster(args: argparse.Namespace) -> Booster:
    """Return the selected parallel methods."""
    default = "bf16" if torch.accelerator.is_available() else "fp32"
    precision = args.precision or default
    if args.grad_checkpoint and args.plugin is not None:
        raise SystemExit("--grad_checkpoint goes with --strategy: give recompute=True in --plugin")
    if args.save_interval and not args.resume:
        raise SystemExit("--save_interval without --resume: name the folder of the training states there")
    if args.plugin is not None:
        if args.strategy != STRATEGY:
            raise SystemExit(f"--strategy {args.strategy} and --plugin {args.plugin!r}: give one of them")
        made, own = called(args.plugin, args.precision, default)
        return Booster(plugin=made, mixed_precision=own)
    if args.strategy == "naive" and gpc.mesh.world_size > 1:
        raise SystemExit(
            "--strategy naive is one process: choose another, or start one with --nproc_per_node 1"
        )
    again = {"recompute": args.grad_checkpoint}
    if args.strategy in ("naive", "ddp"):
        return Booster(plugin=plugin.TorchDDPPlugin(**again), mixed_precision=precision)
    if args.strategy == "colossalai_gemini":
        return Booster(plugin=plugin.GeminiPlugin(precision=precision, **again))
    offload = args.strategy.endswith("_cpu")
    return Booster(
        plugin=plugin.LowLevelZeroPlugin(stage=2, precision=precision, cpu_offload=offload, **again)
    )


def called(text: str, precision: str | None, default: str) -> tuple[plugin.Plugin, str | None]:
    """Return a plugin from how it is called, and the precision that is left to its booster.

    Args:
        text: The call; its arguments are numbers, texts, lists and the like.
        precision: That of --precision, which the call can have instead; None if it is not given.
        default: The precision if neither has one.
    """
    try:
        call = ast.parse(text, mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args):
            raise ValueError("it is not a call with named arguments")
        made = getattr(plugin, call.func.id)
        given = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        if "precision" not in inspect.signature(made).parameters:
            return made(**given), precision or default
        if precision is not None and "precision" in given:
            raise ValueError(f"it has a precision, and --precision {precision} is given too: leave one out")
        return made(**{"precision": precision or default, **given}), None
    except (AttributeError, SyntaxError, TypeError, ValueError) as error:
        raise SystemExit(
            f"--plugin {text!r}: {error}; write it as HybridParallelPlugin(tp_size=2)"
        ) from error


def load(args: argparse.Namespace, *, is_reward: bool = False) -> tuple[Any, Any]:
    """Return a model and its tokenizer: a causal language model, or as `--model_path` a reward model."""
    check_family("--model", args.model, args.pretrain)
    is_beside = Path(args.pretrain, "tokenizer_config.json").is_file()
    base = None if is_beside else base_of_adapters(args.pretrain)
    tokenizer = AutoTokenizer.from_pretrained(base or args.pretrain)
    if args.model_path is None:
        return load_causal(args.pretrain), tokenizer
    check_weights(args, is_reward=is_reward)
    if is_reward:
        return load_reward_model(args.model_path, dtype=torch.float32), tokenizer
    return load_causal(args.model_path), tokenizer


def load_causal(folder: str) -> Any:
    """Return a causal language model; adapters, as a run with `--lora_rank` saves them, are added into it."""
    base = base_of_adapters(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(base or folder, dtype=torch.float32)
    if base is None:
        return model
    from peft import PeftModel

    adapted: Any = PeftModel.from_pretrained(model, folder)
    return adapted.merge_and_unload().requires_grad_(True)  # peft has frozen it


def config_of(folder: str) -> Any:
    """Return the config of a folder of save_pretrained; for adapters, the config of their base model."""
    folder = base_of_adapters(folder) or folder
    if not Path(folder, "config.json").is_file():
        raise SystemExit(f"{folder}: there is no config.json in it; give a folder of save_pretrained")
    return AutoConfig.from_pretrained(folder)


def check_family(option: str, family: str, folder: str) -> None:
    """Refuse a folder with a model of another family."""
    found = config_of(folder).model_type
    if family not in ("auto", found):
        raise SystemExit(
            f"{option} {family}, and {folder} has a model of {found}: give {option} {found} or auto"
        )


def check_weights(args: argparse.Namespace, *, is_reward: bool) -> None:
    """Refuse weights of `--model_path` that are of another kind or shape than the model of `--pretrain`."""
    of_path = config_of(args.model_path)
    base = config_of(args.pretrain)
    if (of_path.architectures or [""])[0].endswith("ForSequenceClassification") != is_reward:
        kinds = (
            ("a reward model", "a language model") if is_reward else ("a language model", "a reward model")
        )
        raise SystemExit(f"--model_path {args.model_path}: it has to be {kinds[0]}, and is {kinds[1]}")
    for name in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size"):
        found, wanted = getattr(of_path, name), getattr(base, name)
        if found != wanted:
            raise SystemExit(
                f"--model_path {args.model_path} has {name} {found}, and --pretrain {args.pretrain} has "
                f"{wanted}: give the folder of a run that began with it"
            )


def with_adapters(model: Any, rank: int) -> Any:
    """Return a model of which adapters are trained: LoRA (2106.09685) on all linear layers but the head.

    A value head is trained itself.
    """
    if rank == 0:
        return model
    from peft import LoraConfig, get_peft_model

    options: dict[str, Any] = {"target_modules": "all-linear"}
    if isinstance(model, ValueModel):
        linear = [name for name, part in model.named_modules() if type(part).__name__ in ("Linear", "Conv1D")]
        names = {name.rpartition(".")[2] for name in linear} - {"score"}
        options = {"target_modules": sorted(names), "modules_to_save": ["score"]}
    return get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, **options))


def writes_whole(args: argparse.Namespace, *, is_reward: bool = False) -> bool:
    """Return whether trained adapters are added into the model that is saved.

    A reward model is for `--rm_path`, and of what others were added into there is no folder without adapters.
    """
    begins_with_adapters = base_of_adapters(args.model_path or args.pretrain) is not None
    return args.lora_rank > 0 and (is_reward or begins_with_adapters)


def trained(model: Any) -> list[torch.nn.Parameter]:
    """Return the parameters that are trained: all, or those of adapters."""
    return [param for param in model.parameters() if param.requires_grad]
