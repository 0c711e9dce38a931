"""Builds a fake CANN beside the installed torch_npu wheel: python -m tests.fakes.cann.generate OUT

It builds one library and installs it under the name of every CANN library that the wheel links or opens. The library
has the functions of the .cpp files here, a logging trampoline for each aclnn kernel, and a stub that returns 0 for
every other function. It also builds a package of custom operators, as CANN installs one, with trampolines for the
operators of ops/ascend/vector_core.
"""

import ctypes
import hashlib
import re
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
CUSTOM_OPS = HERE.parents[2] / "ops/ascend/vector_core/op_host"
CUSTOM_LIBRARY = "custom_opp/op_api/lib/libcust_opapi.so"  # below ASCEND_CUSTOM_OPP_PATH from op_api on
SITE = Path(sysconfig.get_paths()["purelib"])
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Wno-deprecated-declarations"]
LIBRARY = "libfake_cann.so"
OPENED = ["libopapi.so", "libnnopbase.so"]  # by dlopen; linked libraries are in the wheel's ELF headers
SYSTEM = ["libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libstdc++.so.6", "libgcc_s.so.1"]
KERNEL = re.compile(rb"(?<=\0)aclnn[A-Z][A-Za-z0-9]*(?=\0)")
FUNCTION = re.compile(rb"(?<=\0)(?:acl|rt|Hccl|Hcom|Msprof|hal|Aml|dcmi)[A-Z_a-z0-9]+(?=\0)")  # found by dlsym
ADDED = re.compile(r"OP_ADD\((\w+)\)")
HUGE_MEMORY = {"InitHugeMemThreadLocal", "UnInitHugeMemThreadLocal", "ReleaseHugeMem"}


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    stamp = out / "stamp"
    if stamp.is_file() and stamp.read_text() == fingerprint():
        return
    out.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    wheel = sorted((SITE / "torch_npu").rglob("*.so"))
    texts = b"".join(path.read_bytes() for path in wheel)
    kernels = with_sizing({name.decode() for name in KERNEL.findall(texts)})
    custom = with_sizing(
        {f"aclnn{name}" for path in CUSTOM_OPS.glob("*.cpp") for name in ADDED.findall(path.read_text())}
    )
    functions = {name.decode() for name in FUNCTION.findall(texts)} | HUGE_MEMORY | missing(wheel)
    write_stubs(out / "stubs.cpp", kernels, functions - kernels)
    write_stubs(out / "custom.cpp", custom, set())
    build(out, [*sorted(HERE.glob("*.cpp")), out / "stubs.cpp"], LIBRARY)
    build(out, [out / "custom.cpp"], CUSTOM_LIBRARY, str(out / LIBRARY))
    for name in linked(wheel) | set(OPENED):
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(LIBRARY)
    stamp.write_text(fingerprint())
    print(f"fake CANN: {len(kernels)} aclnn functions, {len(functions - kernels)} other names")


def with_sizing(kernels: set[str]) -> set[str]:
    return kernels | {f"{name}GetWorkspaceSize" for name in kernels if not name.endswith("WorkspaceSize")}


def fingerprint() -> str:
    paths = [*sorted(HERE.glob("*.*")), *sorted(CUSTOM_OPS.glob("*.cpp"))]
    sources = b"".join(path.read_bytes() for path in paths if path.is_file())
    return f"torch_npu {metadata.version('torch_npu')} {hashlib.sha256(sources).hexdigest()}\n"


def symbols(path: Path, which: str) -> set[str]:
    lines = subprocess.run(["nm", "-D", which, str(path)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in lines.splitlines() if line.split()[-2] not in "wv"}


def torch_libraries() -> list[Path]:
    """PyTorch's libraries. PyTorch may be in another site-packages folder, which a .pth file of ours names."""
    (folder,) = {library.parent for entry in sys.path for library in Path(entry).glob("torch/lib/libtorch_cpu.so")}
    return sorted(folder.glob("*.so*"))


def missing(wheel: list[Path]) -> set[str]:
    """The functions that the wheel's libraries need and that are neither theirs, PyTorch's, Python's nor the system's
    (those are written name@version)."""
    wanted = {name for path in wheel for name in symbols(path, "--undefined-only") if "@" not in name}
    given = {name for path in [*wheel, *torch_libraries()] for name in symbols(path, "--defined-only")}
    system = [ctypes.CDLL(name) for name in SYSTEM] + [ctypes.CDLL(None)]
    return {name for name in wanted - {n.split("@")[0] for n in given} if not any(hasattr(s, name) for s in system)}


def linked(wheel: list[Path]) -> set[str]:
    """The names of the CANN libraries: those that are linked, have no version as the system's libraries have, and are
    neither the wheel's nor PyTorch's."""
    headers = subprocess.run(["readelf", "-d", *map(str, wheel)], capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"NEEDED.*\[(.*\.so)\]", headers))
    return names - {path.name for path in [*wheel, *torch_libraries()]}


def write_stubs(path: Path, kernels: set[str], functions: set[str]) -> None:
    """Writes weak symbols, so that the functions written by hand take precedence."""
    lines = [
        "#include <cstdarg>",
        'extern "C" {',
        "long fake_aclnn(const char *name, long first, va_list rest);",
        "long fake_stub(const char *name);",
        "#define WEAK __attribute__((weak))",
        "#define KERNEL(name) WEAK long name(long first, ...) { va_list rest; va_start(rest, first); \\",
        "    long status = fake_aclnn(#name, first, rest); va_end(rest); return status; }",
        "#define STUB(name) WEAK long name() { return fake_stub(#name); }",
        *(f"KERNEL({name})" for name in sorted(kernels)),
        *(f"STUB({name})" for name in sorted(functions)),
        "}",
    ]
    path.write_text("\n".join(lines) + "\n")


def build(out: Path, sources: list[Path], library: str, *links: str) -> None:
    include = SITE / "torch_npu" / "include"
    flags = [*FLAGS, f"-I{include}", f"-I{include / 'third_party/acl/inc'}"]
    objects = [out / f"{source.stem}.o" for source in sources]
    jobs = [
        subprocess.Popen(["g++", *flags, "-c", str(s), "-o", str(o)]) for s, o in zip(sources, objects, strict=True)
    ]
    statuses = [job.wait() for job in jobs]
    if any(statuses):
        sys.exit("error: the fake CANN does not compile")
    (out / library).parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["g++", "-shared", "-o", str(out / library), *map(str, objects), *links], check=True)


if __name__ == "__main__":
    main()
