"""The command line: one parser whose subcommands call plain functions of executor/.

Nothing heavy is imported at the top, so `list`, `plan --help` and errors in a case are printed without importing torch.
"""

import argparse
import ast
import difflib
import runpy
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from umbra.base.errors import UserError, run_main
from umbra.base.files import ROOT, VERSION
from umbra.executor.checkpoint.hub.fetch import fetched, hub_name
from umbra.executor.checkpoint.index import weights_in
from umbra.executor.config.case import Case
from umbra.executor.config.load import list_cases, load_case, load_model_config, model_folder
from umbra.executor.config.resolved import read_resolved
from umbra.executor.launch.launch import run_case
from umbra.executor.platform.registry import clear_graphs
from umbra.executor.run.defaults import (
    CHATTING,
    MEASURING,
    PLANNING,
    RUNNING,
    SERVING,
    Purpose,
    checkpoint_path,
    open_case,
    write_case,
)
from umbra.flags import add_flags, given, unknown_flag
from umbra.models.gguf.folder import name_of
from umbra.ops.formats import GROUP_SIZES
from umbra.text.tokenizer_file import has_tokenizer

CHECKPOINT = "a checkpoint: its folder, its GGUF file, or its name on a hub"
CASE = "a case (`umbra list`), its file, or a checkpoint (folder, GGUF, hub)"
SETTINGS = "override any key of docs/config.md; the flags below set common ones"
QUANTIZE_TOKENS = 8192
BENCHMARKS = ("tools/benchmarks", "planner/benchmarks")  # their folders


class Help(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28, width=100)
        self._action_max_length = len("    clear-cache")  # whose indent argparse forgets

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.fill(text, width, break_on_hyphens=False)


class CommandParser(argparse.ArgumentParser):
    """A parser whose help starts with an example."""

    def __init__(self, *, example: str, **options: Any):
        super().__init__(formatter_class=Help, allow_abbrev=False, **options)
        self.example = example

    def format_help(self) -> str:
        return f"example: {self.example}\n\n{super().format_help()}"


def main() -> None:
    """The entry point of `umbra` and `python -m umbra`."""
    run_main(execute)


def execute(argv: list[str]) -> None:
    """Run one command. Bad input raises UserError, or ends the process with argparse's message and status 2."""
    parser = make_parser()
    args, rest = parser.parse_known_args(argv)
    if rest:
        unknown = next((word for word in rest if word.startswith("-")), rest[0])
        raise unknown_flag(unknown, args.parser)
    call: Callable[[argparse.Namespace], None] = args.call
    call(args)


def make_parser() -> CommandParser:
    parser = CommandParser(
        prog="umbra",
        example="umbra run demo --set max_new_tokens=40    (COMMAND --help has one for each command)",
        description="Runs Mixture-of-Experts language models. A case is a YAML file: which model runs, where and how.",
        add_help=False,  # it would take lines of one screen
    )
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"umbra {VERSION}", help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=CommandParser)

    def command(name: str, call: Callable[[argparse.Namespace], None], summary: str, example: str) -> CommandParser:
        added: CommandParser = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", example=f"umbra {name} {example}"
        )
        added.set_defaults(call=call, parser=added)
        return added

    add = command("run", run, "run the prompts of a case on all its ranks", 'PATH/TO/MODEL --prompt "Once upon a time"')
    case_argument(add, "demo")
    add.add_argument("--prompt", nargs="+", metavar="TEXT", help="continue these prompts instead of the case's")

    add = command("chat", talk, "talk to a model at the terminal", "PATH/TO/MODEL --temperature 0.7")
    case_argument(add, "demo_chat")

    add = command(
        "serve",
        serve_case,
        "serve a model over HTTP to clients of OpenAI's and Anthropic's APIs",
        "PATH/TO/MODEL --port 8001",
    )
    case_argument(add, "demo_serve", server=True)
    add.add_argument("--restarts", type=int, metavar="N", help="the same as --set serve_config.restarts=N")

    add = command(
        "run-batch",
        answer_batch,
        "answer a file of requests of OpenAI's API, one a line",
        "PATH/TO/MODEL -i requests.jsonl -o answers.jsonl",
    )
    case_argument(add, "demo_serve", server=True)
    add.add_argument(
        "-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, as in OpenAI's batches"
    )
    add.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="the file to write")

    add = command(
        "pull", pull_model, "fetch a model from a hub and print its path", "Qwen/Qwen3-30B-A3B-Instruct-2507-FP8"
    )
    add.add_argument("name", help="ORG/NAME or ORG/NAME@REVISION; for GGUF files ORG/NAME:QUANT or ORG/NAME:FILE")

    add = command(
        "init",
        init,
        "write a case file with settings for a checkpoint, to be edited",
        "PATH/TO/MODEL --out my_model.yaml",
    )
    add.add_argument("checkpoint", help=CHECKPOINT)
    add.add_argument("--out", type=Path, metavar="FILE", help="the file to write (default: NAME_OF_FOLDER.yaml here)")
    overrides(add, text=SETTINGS)
    add_flags(add, server=True)

    add = command(
        "plan",
        plan,
        "count the memory of each rank; with shadow experts also predict times",
        "qwen3_235b_a22b_w4a16_tp8",
    )
    case_argument(add, None)
    add.add_argument(
        "--cluster", type=Path, metavar="FILE", help="find the best layouts over the machines in FILE instead"
    )
    add.add_argument(
        "--simulate", action="store_true", help="with --cluster: simulate its traffic on the cheapest layout"
    )
    add.add_argument(
        "--json", type=Path, metavar="FILE", help="with --cluster: also write the layouts, or the figures, here"
    )
    add.add_argument("--plot", type=Path, metavar="FILE", help="with --cluster: also draw them here, as PNG")

    command("list", show_cases, "list the cases in yaml_configs/", "")

    add = command("clear-cache", clear, "remove a case's compiled graphs", "qwen3_30b_a3b_bf16_tp8")
    add.add_argument("case", nargs="?", default="demo", help=f"{CASE} (default: demo)")
    overrides(add)

    add = command(
        "inspect",
        inspect,
        "show what is in a checkpoint, from its config and headers, without reading weights",
        "checkpoints/austen_moe_awq --case demo_awq",
    )
    add.add_argument("checkpoint", help=CHECKPOINT)
    add.add_argument("--case", help="also count what each rank of this case keeps of it")
    overrides(add)
    add.add_argument("--json", type=Path, metavar="FILE", help="also write the facts here")

    add = command(
        "quantize",
        quantize,
        "quantise a checkpoint to 4 bits, FP8 or W8A8; resumes if started again",
        "--model checkpoints/austen_moe --out OUT --group 32 --calibrate TEXT.txt",
    )
    add.add_argument(
        "--model", required=True, help="a checkpoint in floats or in FP8 blocks: its folder or its name on a hub"
    )
    add.add_argument(
        "--out", type=Path, required=True, help="folder to write: a new one, or one that the same command has begun"
    )
    add.add_argument(
        "--format",
        choices=("awq", "fp8", "mxfp4", "w8a8"),
        help="format to write (default awq; mxfp4 for experts in one tensor, which have no other)",
    )
    add.add_argument("--group", type=int, choices=GROUP_SIZES, help="for awq: columns that share a scale (default 128)")
    add.add_argument(
        "--calibrate", type=Path, metavar="TEXT", help="for awq: a UTF-8 text like those that the model will see"
    )
    add.add_argument("--tokens", type=int, help=f"use at most so many tokens of the text (default {QUANTIZE_TOKENS})")
    add.add_argument(
        "--keep",
        nargs="+",
        action="extend",
        default=[],
        metavar="MODULE",
        help="modules to leave in floats, such as self_attn or model.layers.0.block_sparse_moe.experts",
    )

    add = command(
        "evaluate",
        evaluate,
        "measure a model's perplexity on a text, and its divergence from another model",
        "--case demo_awq --against demo --text TEXT.txt",
    )
    add.add_argument("--case", required=True, help=CASE)
    overrides(add)
    add.add_argument("--text", type=Path, required=True, help="a UTF-8 text file")
    add.add_argument("--against", metavar="CASE", help="a case to compare with, usually the same model in bfloat16")
    overrides(add, "--against-set", "override settings of the --against case")
    add.add_argument("--window", type=int, default=256, help="tokens of one window (default 256)")
    add.add_argument("--batch", type=int, default=8, help="windows that run together (default 8)")
    add.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    by_ranks(add)
    # Set for the two passes of a comparison: the first writes its logits into this folder, the second reads them.
    add.add_argument("--logits", type=Path, help=argparse.SUPPRESS)

    add = command(
        "logits",
        logits,
        "write the logits of given token ids, to compare engines",
        '--case demo --ids "1,2,3;7,8" --steps 4 --out logits.npz',
    )
    add.add_argument("--case", required=True, help=CASE)
    overrides(add)
    add.add_argument("--ids", required=True, help='token ids of each sequence: "1,2,3;7,8"')
    add.add_argument("--steps", type=int, default=0, help="number of greedy decode steps after the prefill (default 0)")
    add.add_argument("--out", type=Path, required=True, help="the .npz to write (docs/commands.md has its arrays)")
    by_ranks(add)

    add = command("bench", bench, "run a benchmark; without a name, list them", "cpu decode --json rows.json")
    add.add_argument("name", nargs="?", help="its name, from the list")
    add.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="arguments of the benchmark; NAME --help explains them"
    )
    return parser


def case_argument(parser: CommandParser, default: str | None, server: bool = False) -> None:
    """Adds the case, as the first argument or, as other engines have it, as --model; and the flags of its settings."""
    note = f" (default: {default})" if default else ""
    parser.add_argument("case", nargs="?", help=f"{CASE}{note}")
    parser.add_argument("-m", "--model", "--model-path", dest="model", help=argparse.SUPPRESS)
    parser.set_defaults(default_case=default)
    overrides(parser, text=SETTINGS)
    add_flags(parser, server)


def overrides(
    parser: CommandParser, flag: str = "--set", text: str = "override settings; docs/config.md lists all keys"
) -> None:
    parser.add_argument(flag, nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)


def by_ranks(parser: CommandParser) -> None:
    """Adds the flags of a command whose ranks or passes are started as the same command."""
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="folder for the ranks' logs")
    parser.add_argument("--resolved", type=Path, help=argparse.SUPPRESS)  # from who has started this one: its case


def case_of(args: argparse.Namespace) -> Case:
    """The case of a command that is started again as its own ranks."""
    return read_resolved(args.resolved) if args.resolved else open_case(args.case, MEASURING, args.set)


def opened(args: argparse.Namespace, purpose: Purpose, more: dict[str, object] | None = None) -> Case:
    """The case of a command that has `case_argument`."""
    return open_case(named(args), purpose, args.set, given(args) | (more or {}))


def named(args: argparse.Namespace) -> str:
    if args.case and args.model:
        raise UserError(f"--model {args.model}: the model is given already: {args.case}; give one of the two")
    name: str = args.case or args.model or args.default_case
    return name


def run(args: argparse.Namespace) -> None:
    prompts: dict[str, object] = {"data_config.prompts": args.prompt} if args.prompt else {}
    run_case(opened(args, RUNNING, prompts))


def talk(args: argparse.Namespace) -> None:
    from umbra.chat import chat

    chat(opened(args, CHATTING))


def serve_case(args: argparse.Namespace) -> None:
    print(f"umbra serve {args.model or args.case}", flush=True)  # at once: what follows takes seconds
    from umbra.serving.api.server import serve

    restarts: dict[str, object] = {} if args.restarts is None else {"serve_config.restarts": args.restarts}
    serve(opened(args, SERVING, restarts))


def answer_batch(args: argparse.Namespace) -> None:
    try:
        data = args.input_file.read_bytes()
    except OSError as error:
        raise UserError(f"--input-file {args.input_file}: cannot be read: {error.strerror}") from None
    from umbra.serving.api.server import run_batch

    run_batch(opened(args, SERVING), data, args.output_file)


def pull_model(args: argparse.Namespace) -> None:
    if (name := hub_name(args.name)) is None:
        raise UserError(f"{args.name}: is no name on a hub: give ORG/NAME, NAME@REVISION, or of GGUF files NAME:QUANT")
    print(fetched(name))


def init(args: argparse.Namespace) -> None:
    checkpoint = checkpoint_path(args.checkpoint)
    if not checkpoint.exists():
        raise UserError(f"{args.checkpoint}: there is no such folder or file: give that of a checkpoint")
    out = args.out or Path(f"{name_of(checkpoint)}.yaml")
    write_case(checkpoint, out, args.set, given(args))
    print(f"wrote {out}: edit it, then `umbra serve {out}`")


def plan(args: argparse.Namespace) -> None:
    if args.cluster:
        if args.case or args.model:
            raise UserError("--cluster FILE: the file names the case; give none")
        if args.simulate:
            from umbra.planner.simulation.report import show_simulation

            return show_simulation(args.cluster, args.set, args.json, args.plot)
        from umbra.planner.plan import show_cluster_plan

        return show_cluster_plan(args.cluster, args.set, args.json, args.plot)
    if not (args.case or args.model):
        raise UserError("umbra plan: name a case or a checkpoint, or give --cluster FILE")
    case = opened(args, PLANNING)
    load_model_config(case)  # refuse a wrong case before torch is imported
    from umbra.executor.run.memory_report import show_plan

    show_plan(case)
    folder = model_folder(case)
    if weights_in(folder) and not has_tokenizer(folder):
        print(f"\n{folder} has no tokenizer, which texts need: copy tokenizer.json and tokenizer_config.json there")


def show_cases(args: argparse.Namespace) -> None:
    cases = list_cases()
    for name, description in cases:
        print(f"{name:<{max(len(n) for n, _ in cases)}}  {description}")


def clear(args: argparse.Namespace) -> None:
    case = load_case(args.case, args.set)
    print(f"{clear_graphs(case.name)} compiled graphs of case {case.name} removed")


def inspect(args: argparse.Namespace) -> None:
    from umbra.commands.inspect_checkpoint import inspect_checkpoint

    inspect_checkpoint(checkpoint_path(args.checkpoint), args.case, args.set, args.json)


def quantize(args: argparse.Namespace) -> None:
    if args.tokens is not None and (args.calibrate is None or args.tokens < 2):
        raise UserError(f"--tokens {args.tokens}: must be at least 2, and needs --calibrate")
    from umbra.commands.quantize.awq import AwqTarget
    from umbra.commands.quantize.convert import Calibration, convert
    from umbra.commands.quantize.fp8 import Fp8Target
    from umbra.commands.quantize.mxfp4 import Mxfp4Target
    from umbra.commands.quantize.source import CheckpointSource
    from umbra.commands.quantize.target import Target
    from umbra.commands.quantize.w8a8 import W8a8Target

    source, keep = CheckpointSource(checkpoint_path(args.model)), tuple(args.keep)
    format = args.format or ("awq" if source.files_of_family else "mxfp4")
    if format != "awq" and (args.group or args.calibrate):
        raise UserError(f"--format {format}: has neither --group nor --calibrate")
    if format == "awq":
        target: Target = AwqTarget(source, keep, args.group or 128)
    else:
        targets: dict[str, Callable[..., Target]] = {"fp8": Fp8Target, "mxfp4": Mxfp4Target, "w8a8": W8a8Target}
        target = targets[format](source, keep)
    convert(args.out, target, Calibration(args.calibrate, args.tokens or QUANTIZE_TOKENS) if args.calibrate else None)
    print(f"wrote {args.out}")


def evaluate(args: argparse.Namespace) -> None:
    from umbra.commands.evaluate import Evaluation, evaluate_case

    if args.against_set and not args.against:
        raise UserError("--against-set: belongs to --against CASE, which is missing")
    against = open_case(args.against, MEASURING, args.against_set) if args.against else None
    asked = Evaluation(
        case=case_of(args),
        text=args.text,
        against=against,
        window=args.window,
        batch=args.batch,
        json=args.json,
        results=args.results,
        logits=args.logits,
        label=args.case if args.resolved else "",
    )
    evaluate_case(asked, ["-m", "umbra", "evaluate"])


def logits(args: argparse.Namespace) -> None:
    from umbra.commands.logits import write_logits

    again = ["-m", "umbra", "logits", f"--case={args.case}"]
    again += [f"--ids={args.ids}", f"--steps={args.steps}", f"--out={args.out}"]
    write_logits(case_of(args), args.ids, args.steps, args.out, args.results, again)


def bench(args: argparse.Namespace) -> None:
    programs = benchmarks()
    if args.name is None:
        for name, path in programs.items():
            paragraph = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
            print(f"{name:<{max(map(len, programs))}}  {' '.join(paragraph.split()).partition('. ')[0].rstrip('.')}")
        return
    if args.name not in programs:
        close = difflib.get_close_matches(args.name, programs, n=3, cutoff=0.3) or list(programs)
        raise UserError(f"no benchmark {args.name!r}; nearest: {', '.join(close)}; all: umbra bench")
    sys.argv[1:] = args.arguments
    # Run it as `__main__` of this process, so that the benchmark's own processes find the classes that they unpickle.
    module = ".".join(("umbra", *programs[args.name].relative_to(ROOT).with_suffix("").parts))
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def benchmarks() -> dict[str, Path]:
    """The files of the modules of BENCHMARKS that can be run, by name; none is imported."""
    paths = {path.stem: path for folder in BENCHMARKS for path in (ROOT / folder).glob("*.py")}
    return {name: path for name, path in sorted(paths.items()) if '__name__ == "__main__"' in path.read_text()}
