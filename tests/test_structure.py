"""Rules about the project's structure: imports run one way and never in a circle; heavy libraries are imported lazily.

Every import counts: at the top of a file, inside a function, and under TYPE_CHECKING.
"""

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from umbra.base.files import ROOT
from umbra.models.registry import families
from umbra.ops.formats import SPECS

FOLDERS = sorted(f"umbra.models.{path.parent.name}" for path in (ROOT / "models").glob("*/config.py"))
DEVICES = sorted(path.parent.name for path in (ROOT / "executor/platform").glob("*/facts.py"))
# From the ground up: a room imports from the floors below its own, never from one beside it. A module is in the room of
# the longest name that fits.
FLOORS = [
    ["umbra.base.errors"],
    ["umbra.base.files", "umbra.base.progress"],
    ["umbra.ops", "umbra.text"],
    ["umbra.ops.parallel", "umbra.ops.cpu"],
    ["umbra.ops.ascend", "umbra.ops.cuda"],
    ["umbra.models", "umbra.cpu_offload.memory", "umbra.cpu_offload.policy"],
    [*FOLDERS, "umbra.cpu_offload"],
    ["umbra.cpu_offload.planner"],
    ["umbra.executor.config"],
    ["umbra.executor.checkpoint"],
    ["umbra.executor.platform"],
    [f"umbra.executor.platform.{device}" for device in DEVICES],
    ["umbra.executor.plan"],
    [f"umbra.executor.platform.{device}.plan" for device in DEVICES],
    ["umbra.executor.engine.memory"],
    ["umbra.executor.engine.drafts"],
    ["umbra.executor.engine.schedule"],
    ["umbra.executor.engine.step"],
    ["umbra.executor.launch"],
    ["umbra.executor.run"],
    ["umbra.executor.model_runner"],
    ["umbra.executor.rank_program"],
    ["umbra.serving.ranks"],
    ["umbra.serving.api"],
    ["umbra.planner"],
    ["umbra.planner.simulation"],
    ["umbra.commands"],
    ["umbra", "run"],
    ["umbra.tools.benchmarks"],
    ["umbra.planner.benchmarks"],
    ["umbra.tools"],
]
STRANGERS = [("umbra.models", "umbra.cpu_offload"), ("umbra.ops", "umbra.text")]  # neither imports the other
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
WHOLE_CASE = FLOOR["umbra.executor.plan"]  # rooms below it take what they need of a case, never all of it
# Only these files and folders import Ascend's libraries, so that everything else can be imported on a laptop.
ASCEND = ["executor/platform/ascend", "ops/ascend"]
ASCEND += ["tools/benchmarks/npu_gemv.py", "tools/benchmarks/npu_layers.py", "tools/npu_check/stages"]


PACKAGES = [path.name for path in (ROOT / "umbra").iterdir() if path.is_symlink()]  # folders beside umbra/


def module_of(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return f"umbra.{name}" if name.split(".")[0] in PACKAGES else name


FILES = [path for top in ("umbra", *PACKAGES) for path in (ROOT / top).rglob("*.py")] + [ROOT / "run.py"]
SOURCES = {module_of(path): path for path in sorted(FILES) if path.resolve() == path}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[str]:
    """The names of all modules that the file imports, anywhere in it."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            for alias in node.names:
                if f"{node.module}.{alias.name}" in SOURCES:
                    yield f"{node.module}.{alias.name}"


def room_of(module: str) -> str | None:
    """The room of FLOORS with the longest name that the module is in; None: another's library, or `executor` itself."""
    return max((room for room in FLOOR if is_in(module, room)), key=len, default=None)


def is_in(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"{room}.")


def test_everything_has_one_name() -> None:
    """A package that could be imported by two names would be there twice."""
    for path in (ROOT / "umbra").iterdir():
        assert path.resolve() == (ROOT / path.name if path.is_symlink() else path)
    for module, path in SOURCES.items():
        assert not [name for name in imports(path) if name.split(".")[0] in PACKAGES], module


def test_imports_run_one_way() -> None:
    wrong = {
        (module, name)
        for module, path in SOURCES.items()
        for name in imports(path)
        for own, room in [(room_of(module), room_of(name))]
        if own and room and room != own and FLOOR[room] >= FLOOR[own]
    }
    assert not wrong


def test_some_rooms_know_nothing_of_each_other() -> None:
    for one, other in [pair for two in STRANGERS for pair in (two, two[::-1])]:
        for module in SOURCES:
            assert not is_in(module, one) or not [name for name in imports(SOURCES[module]) if is_in(name, other)]


def test_only_the_command_line_imports_the_planner() -> None:
    for module, path in SOURCES.items():
        if any(is_in(name, "umbra.planner") for name in imports(path)):
            assert is_in(module, "umbra.planner") or module in ("umbra.cli", "umbra.tools.config_docs"), module


def names_in(tree: ast.Module) -> set[str]:
    """Returns the names of the classes, functions and constants of a module."""
    constants = [target for part in tree.body if isinstance(part, ast.Assign) for target in part.targets]
    named = [part for part in tree.body if isinstance(part, ast.ClassDef | ast.FunctionDef)]
    return {part.name for part in named} | {target.id for target in constants if isinstance(target, ast.Name)}


def test_names_in_strings_are_there() -> None:
    """Registries name what is imported late as `module:name`."""
    names = 0
    for path in SOURCES.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                module, colon, name = node.value.partition(":")
                if colon and name.isidentifier() and module.startswith("umbra."):
                    assert name in names_in(tree_of(SOURCES[module])), node.value
                    names += 1
    assert names >= 10


def test_no_import_goes_in_a_circle() -> None:
    graph = {m: {n for n in imports(path) if n in SOURCES and n != m} for m, path in SOURCES.items()}
    packages = {m for m in graph if SOURCES[m].name == "__init__.py"}
    # `from package import module` imports the module; the package's own file is no part of a circle unless it imports.
    graph = {m: {n for n in to if n not in packages or graph[n]} for m, to in graph.items()}
    TopologicalSorter(graph).prepare()  # raises an error that names a circle


ENVIRONMENTS = ["umbra.executor.config.env", *(f"umbra.executor.platform.{name}.environment" for name in DEVICES)]
RULES = ["umbra.executor.config", *(f"umbra.executor.platform.{device}.rules" for device in DEVICES)]
LOWER = [
    module
    for module in SOURCES
    if FLOOR.get(room_of(module) or "", 99) < WHOLE_CASE and not any(is_in(module, room) for room in RULES)
]


def test_only_plans_and_what_is_above_take_a_whole_case() -> None:
    for module in LOWER:
        for node in ast.walk(tree_of(SOURCES[module])):
            if isinstance(node, ast.ImportFrom) and node.module == "umbra.executor.config.case":
                assert "Case" not in {alias.name for alias in node.names}, module


def test_ascends_libraries_are_imported_in_few_places() -> None:
    for module, own in SOURCES.items():
        if not any(own.is_relative_to(ROOT / path) for path in ASCEND):
            assert not {name.split(".")[0] for name in imports(own)} & {"torch_npu", "torchair"}, module


def test_triton_is_imported_by_kernels_alone() -> None:
    for module, path in SOURCES.items():
        if not is_in(module, "umbra.ops.cuda.kernels"):
            assert "triton" not in {name.split(".")[0] for name in imports(path)}, module


def test_environment_is_read_in_one_file_and_that_of_a_device_in_its_folder() -> None:
    for module, path in SOURCES.items():
        text = path.read_text()
        if module not in ENVIRONMENTS:
            assert "os.getenv" not in text, path
            assert "environ.get" not in text, path


MOST_PARAMETERS = 9


def test_no_function_has_many_parameters() -> None:
    for path in SOURCES.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                names = [p.arg for p in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                own = [name for name in names if name not in ("self", "cls")]
                assert len(own) <= MOST_PARAMETERS, f"{path}: {node.name}"


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Returns whether this is a kernel of Triton, whose parameters are pointers, sizes and strides."""
    return any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)


EMPTY_NAMES = {"found", "each", "made", "place"}


def names_bound(tree: ast.Module) -> Iterator[str]:
    """The names that the file gives: to variables, fields, attributes, parameters, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name.lower()
            case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.ExceptHandler(name=str(name)):
                yield name
            case ast.alias(asname=str(name)):
                yield name


def test_results_have_names_with_content() -> None:
    for path in [*SOURCES.values(), *(ROOT / "tests").rglob("*.py")]:
        assert not (names := EMPTY_NAMES & set(names_bound(tree_of(path)))), (
            f"{path}: {names} do not say what they hold"
        )


CLAUSE = re.compile(r"(Of|What|Where|Those|That|How|Whether)\b")


def test_docstrings_have_a_subject() -> None:
    """A docstring that begins with a word of CLAUSE is a clause: it does not say what is taken or returned."""
    for path in [*SOURCES.values(), *(ROOT / "tests").rglob("*.py")]:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                assert not CLAUSE.match(text), f"{path}: {text}"


# Rooms that may name families: what measures published models, and makes demos and test files of them.
NAMING = ["umbra.planner.benchmarks", "umbra.tools"]
# Modules that name published models, and why.
NAMING_MODULES = {
    "umbra.models.registry": "one line a family",
    "umbra.cpu_offload.planner.hits": "published hit rates, by the models that they were measured on",
    "umbra.cli": "examples of what is typed: a model on a hub, cases",
    "umbra.executor.model_runner": "a runner that the documents this project follows call so",
    "umbra.models.eagle3_config": "the model_type of EAGLE3's heads",
    "umbra.models.gguf.vocabulary": "the name of SentencePiece's tokenizers in GGUF files",
}
# Programs, keys of rotary embeddings and a class of tokenizers that are called like a family.
CALLED_ALIKE = re.compile(r"llama\.cpp|ik_llama|ollama|llama[ _]?[34]|LlamaTokenizer", re.IGNORECASE)


def family_words() -> re.Pattern[str]:
    """Returns an expression for the names of families, those of their classes, and the brands that names begin with."""
    classes = {record.architecture.removesuffix("ForCausalLM") for record in families()}
    names = {name for record in families() for name in (record.name, *record.old_types)}
    brands = {name if name.startswith("gpt") else re.split(r"[\d_]", name)[0] for name in names}  # GPTQ is a format
    brands = {brand for brand in brands if len(brand) > 2}  # a shorter one is in many words
    words = [word.replace("_", "[-_ ]?") for word in sorted({*names, *classes, *brands})]
    return re.compile("|".join(words), re.IGNORECASE)


def test_only_a_familys_folder_names_it() -> None:
    """Records, configs and models say what differs between families; other code asks these."""
    words, folders = family_words(), {record.config.rpartition(".")[0] for record in families()}
    wrong = {
        (module, number, word[0])
        for module, path in SOURCES.items()
        if module not in NAMING_MODULES and not any(is_in(module, room) for room in (*NAMING, *folders))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (word := words.search(CALLED_ALIKE.sub("", line)))
    }
    assert not wrong


def test_records_need_no_torch() -> None:
    code = "import sys; from umbra.models.registry import conventions; conventions(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_records_agree() -> None:
    """Two records say the same of one text or file, so that it makes no difference which one is asked."""
    for one, other in itertools.combinations(families(), 2):
        assert one.gguf is other.gguf or not (one.gguf and other.gguf and one.gguf.name == other.gguf.name)
        for name in ("formats", "splits", "classes"):
            first, second = getattr(one.text, name), getattr(other.text, name)
            assert all(first[key] == second[key] for key in first.keys() & second.keys())


def test_each_class_has_a_name_of_its_own() -> None:
    homes: dict[str, list[str]] = {}
    for module, path in SOURCES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(module)
    assert not {name: modules for name, modules in homes.items() if len(modules) > 1}


# Ascend, NPU, CANN and HCCL, alone or in names such as AscendOps, torch_npu and npugraph_ex.
OF_ONE_DEVICE = re.compile(r"(?i:(?<![a-z])(?:ascend|npu|cann|hccl))(?![a-z])|npugraph")
CODE = ("umbra", "serving", "planner", "executor", "models", "cpu_offload", "text", "ops")
# Benchmarks of the planner hold published figures of NPUs.
OWN = ("ops/ascend", "executor/platform/ascend", "planner/benchmarks")


def test_neutral_code_hardly_names_a_device() -> None:
    named = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in SOURCES.values()
        if path.relative_to(ROOT).parts[0] in CODE and not any(path.is_relative_to(ROOT / folder) for folder in OWN)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if OF_ONE_DEVICE.search(line)
    ]
    assert len(named) <= 5, "\n".join(named)


KERNELS = ROOT / "ops" / "cpu" / "csrc" / "kernels"


def test_files_of_an_instruction_set_name_no_format() -> None:
    """They ask the rows of formats.h. Comments may name formats as examples."""
    names = "|".join(["format_named", "Format::", *(rf"\b{name}\b" for name, spec in SPECS.items() if spec.quantised)])
    for path in (*(KERNELS / "x86").iterdir(), *(KERNELS / "arm").iterdir()):
        assert not re.findall(names, re.sub(r"//.*", "", path.read_text())), path


def test_few_neutral_files_name_a_format() -> None:
    """Besides formats, devices, readers and writers of checkpoints, commands and benchmarks."""
    own = ("ops/formats", "ops/ascend", "executor/platform", "executor/checkpoint/formats", "umbra", "tools")
    kinds = {name for name, spec in SPECS.items() if spec.quantised}
    named = {
        path: sum(isinstance(node, ast.Constant) and node.value in kinds for node in ast.walk(tree_of(path)))
        for path in SOURCES.values()
        if not str(path.relative_to(ROOT)).startswith(own) and "benchmarks" not in path.parts
    }
    assert sum(named.values()) <= 30, {path: count for path, count in named.items() if count}
    assert not re.findall("w8a8", "".join(path.read_text() for path in named))
