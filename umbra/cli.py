"""The command line: one parser whose subcommands call plain functions of executor/.

Nothing heavy is imported at the top, so `list`, `plan --help` and errors in a case are printed without importing torch.
"""

import argparse
import ast
import difflib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from executor.config.case import Case
from executor.config.load import list_cases, load_case, load_model_config
from executor.config.resolved import read_resolved
from executor.launch.launch import run_case
from executor.platform.ascend.compile_cache import clear_cache
from ops.format import GROUP_SIZES
from umbra import check_packages
from umbra.errors import UserError, run_main
from umbra.files import ROOT

CASE = "a name in yaml_configs/, or a path ending in .yaml"
QUANTIZE_TOKENS = 8192
BENCHMARKS = ("tools/benchmarks", "planner/benchmarks")  # their folders


class Help(argparse.HelpFormatter):
    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=28, width=100)


class Parser(argparse.ArgumentParser):
    """A parser whose help starts with an example."""

    def __init__(self, *, example: str, **options: Any):
        super().__init__(formatter_class=Help, **options)
        self.example = example

    def format_help(self) -> str:
        return f"example: {self.example}\n\n{super().format_help()}"


def main() -> None:
    """The entry point of `umbra` and `python -m umbra`."""
    run_main(execute)


def execute(argv: list[str]) -> None:
    """Run one command. Bad input raises UserError, or ends the process with argparse's message and status 2."""
    args = make_parser().parse_args(argv)
    call: Callable[[argparse.Namespace], None] = args.call
    call(args)


def make_parser() -> Parser:
    parser = Parser(
        prog="umbra",
        example="umbra run demo --set max_new_tokens=40    (COMMAND --help has one for each command)",
        description="Runs Mixture-of-Experts language models on Huawei Ascend and on plain CPUs.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=Parser)

    def command(name: str, call: Callable[[argparse.Namespace], None], summary: str, example: str) -> Parser:
        added: Parser = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + ".", example=f"umbra {name} {example}"
        )
        added.set_defaults(call=call)
        return added

    add = command("run", run, "run a case on all its ranks", "demo_tp8 --set max_new_tokens=40 temperature=0.9")
    add.add_argument("case", nargs="?", default="demo", help=f"{CASE} (default: demo)")
    overrides(add)

    add = command("chat", talk, "talk to a case's model at the terminal", "demo_chat --set temperature=0.7")
    add.add_argument("case", nargs="?", default="demo_chat", help=f"{CASE} (default: demo_chat)")
    overrides(add)

    add = command("serve", serve_case, "serve a case to OpenAI clients over HTTP", "demo_serve --set port=8001")
    add.add_argument("case", nargs="?", default="demo_serve", help=f"{CASE} (default: demo_serve)")
    add.add_argument("--restarts", type=int, metavar="N", help="the same as --set serve_config.restarts=N")
    overrides(add)

    add = command(
        "plan", plan, "count a rank's memory; with shadow experts also predict times", "qwen3_235b_a22b_w4a16_tp8"
    )
    add.add_argument("case", nargs="?", help=CASE)
    overrides(add)
    add.add_argument(
        "--cluster", type=Path, metavar="FILE", help="instead, find the best layouts of a model over machines"
    )
    add.add_argument("--simulate", action="store_true", help="--cluster: serve its traffic on the cheapest layout")
    add.add_argument(
        "--json", type=Path, metavar="FILE", help="--cluster: also write the layouts, or the figures, here"
    )
    add.add_argument("--plot", type=Path, metavar="FILE", help="--cluster: also draw them here, as PNG")

    command("list", show_cases, "show the cases in yaml_configs/", "")

    add = command("clear-cache", clear, "remove a case's compiled graphs", "qwen3_30b_a3b_bf16_tp8")
    add.add_argument("case", nargs="?", default="demo", help=f"{CASE} (default: demo)")
    overrides(add)

    add = command(
        "inspect",
        inspect,
        "show what is in a checkpoint, by its config and headers alone",
        "checkpoints/austen_moe_awq --case demo_awq",
    )
    add.add_argument("checkpoint", type=Path, help="its folder")
    add.add_argument("--case", help="also count what each rank of this case keeps of it")
    overrides(add)
    add.add_argument("--json", type=Path, metavar="FILE", help="also write the facts here")

    add = command(
        "quantize",
        quantize,
        "quantise a checkpoint to 4 bits (AWQ) or to FP8; started again, it resumes",
        "--model checkpoints/austen_moe --out OUT --group 32 --calibrate TEXT.txt",
    )
    add.add_argument("--model", type=Path, required=True, help="folder of a checkpoint in floats, or in FP8 blocks")
    add.add_argument("--out", type=Path, required=True, help="folder to write: new, or left by the same command")
    add.add_argument("--format", choices=("awq", "fp8"), default="awq", help="what to write (default awq)")
    add.add_argument("--group", type=int, choices=GROUP_SIZES, help="awq: columns that share a scale (default 128)")
    add.add_argument("--calibrate", type=Path, metavar="TEXT", help="awq: a UTF-8 text like those the model will see")
    add.add_argument("--tokens", type=int, help=f"tokens of the text to use at most (default {QUANTIZE_TOKENS})")
    add.add_argument(
        "--keep", nargs="+", action="extend", default=[], metavar="MODULE",
        help="leave in floats: self_attn, or model.layers.0.block_sparse_moe.experts",
    )  # fmt: skip

    add = command(
        "evaluate",
        evaluate,
        "measure a model's perplexity on a text, and how far it differs from another's",
        "--case demo_awq --against demo --text TEXT.txt",
    )
    add.add_argument("--case", required=True, help=CASE)
    overrides(add)
    add.add_argument("--text", type=Path, required=True, help="a UTF-8 text file")
    add.add_argument("--against", metavar="CASE", help="the case to compare with, normally the one in bfloat16")
    overrides(add, "--against-set", "its keys")
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
    add.add_argument("--steps", type=int, default=0, help="greedy steps after the prefill (default 0)")
    add.add_argument("--out", type=Path, required=True, help="the .npz to write (docs/commands.md has its arrays)")
    by_ranks(add)

    add = command("bench", bench, "run a benchmark; without a name, list them", "cpu decode --json rows.json")
    add.add_argument("name", nargs="?", help="one of those listed")
    add.add_argument("arguments", nargs=argparse.REMAINDER, help="its own arguments; --help shows them")
    return parser


def overrides(parser: Parser, flag: str = "--set", text: str = "override keys (docs/config.md)") -> None:
    parser.add_argument(flag, nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)


def by_ranks(parser: Parser) -> None:
    """For a command whose ranks or passes are started as the same command."""
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="folder for the ranks' logs")
    parser.add_argument("--resolved", type=Path, help=argparse.SUPPRESS)  # from who has started this one: its case


def case_of(args: argparse.Namespace) -> Case:
    return read_resolved(args.resolved) if args.resolved else load_case(args.case, args.set)


def run(args: argparse.Namespace) -> None:
    run_case(load_case(args.case, args.set))


def talk(args: argparse.Namespace) -> None:
    from umbra.chat import chat

    chat(args.case, args.set)


def serve_case(args: argparse.Namespace) -> None:
    from serving.api.server import serve

    restarts = [] if args.restarts is None else [f"serve_config.restarts={args.restarts}"]
    serve(load_case(args.case, [*args.set, *restarts]))


def plan(args: argparse.Namespace) -> None:
    if args.cluster:
        if args.case:
            raise UserError("--cluster FILE: the file names the case; give none")
        if args.simulate:
            from planner.simulation.report import show_simulation

            return show_simulation(args.cluster, args.set, args.json, args.plot)
        from planner.plan import show_cluster_plan

        return show_cluster_plan(args.cluster, args.set, args.json, args.plot)
    if args.case is None:
        raise UserError("umbra plan: name a case, or give --cluster FILE")
    case = load_case(args.case, args.set)
    load_model_config(case)  # refuse a wrong case before torch is imported
    from executor.run.memory_report import show_plan

    show_plan(case)


def show_cases(args: argparse.Namespace) -> None:
    cases = list_cases()
    for name, description in cases:
        print(f"{name:<{max(len(n) for n, _ in cases)}}  {description}")


def clear(args: argparse.Namespace) -> None:
    case = load_case(args.case, args.set)
    print(f"{clear_cache(case.name)} compiled graphs of case {case.name} removed")


def inspect(args: argparse.Namespace) -> None:
    from umbra.commands.inspect_checkpoint import inspect_checkpoint

    inspect_checkpoint(args.checkpoint, args.case, args.set, args.json)


def quantize(args: argparse.Namespace) -> None:
    if args.tokens is not None and (args.calibrate is None or args.tokens < 2):
        raise UserError(f"--tokens {args.tokens}: must be at least 2, and needs --calibrate")
    if args.format == "fp8" and (args.group or args.calibrate):
        raise UserError("--format fp8: has neither --group nor --calibrate")
    from umbra.commands.quantize.awq import AwqTarget
    from umbra.commands.quantize.convert import Calibration, convert
    from umbra.commands.quantize.fp8 import Fp8Target
    from umbra.commands.quantize.source import Source

    source, keep = Source(args.model), tuple(args.keep)
    target = Fp8Target(source, keep) if args.format == "fp8" else AwqTarget(source, keep, args.group or 128)
    convert(args.out, target, Calibration(args.calibrate, args.tokens or QUANTIZE_TOKENS) if args.calibrate else None)
    print(f"wrote {args.out}")


def evaluate(args: argparse.Namespace) -> None:
    from umbra.commands.evaluate import Evaluation, evaluate_case

    if args.against_set and not args.against:
        raise UserError("--against-set: belongs to --against CASE, which is missing")
    against = load_case(args.against, args.against_set) if args.against else None
    asked = Evaluation(
        case=case_of(args), text=args.text, against=against, window=args.window, batch=args.batch, json=args.json,
        results=args.results, logits=args.logits,
    )  # fmt: skip
    evaluate_case(asked, ["-m", "umbra", "evaluate"])


def logits(args: argparse.Namespace) -> None:
    from umbra.commands.logits import write_logits

    again = ["-m", "umbra", "logits", f"--case={args.case}"]
    again += [f"--ids={args.ids}", f"--steps={args.steps}", f"--out={args.out}"]
    write_logits(case_of(args), args.ids, args.steps, args.out, args.results, again)


def bench(args: argparse.Namespace) -> None:
    found = benchmarks()
    if args.name is None:
        for name, path in found.items():
            summary = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            print(f"{name:<{max(map(len, found))}}  {summary}")
        return
    if args.name not in found:
        close = difflib.get_close_matches(args.name, found, n=3, cutoff=0.3) or list(found)
        raise UserError(f"no benchmark {args.name!r}; nearest: {', '.join(close)}; all: umbra bench")
    check_packages("tools")
    sys.argv[1:] = args.arguments
    # Run it as `__main__` of this process, so that the benchmark's own processes find the classes that they unpickle.
    module = ".".join(found[args.name].relative_to(ROOT).with_suffix("").parts)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def benchmarks() -> dict[str, Path]:
    """The files of the modules of BENCHMARKS that can be run, by name; none is imported."""
    paths = {path.stem: path for folder in BENCHMARKS for path in (ROOT / folder).glob("*.py")}
    return {name: path for name, path in sorted(paths.items()) if '__name__ == "__main__"' in path.read_text()}
