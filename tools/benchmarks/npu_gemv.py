"""The fused vector-core kernel of a 4-bit mixture of experts compared with npu_grouped_matmul, on an NPU.

    python -m umbra.tools.benchmarks.npu_gemv [--hidden 2048] [--inner 768] [--experts 128] [--top-k 8]
        [--group 32] [--layers 16] [--batches 1 2 4 8] [--dtype bfloat16] [--rounds 30] [--read-mb 1024] [--float-sums]
        [--json FILE]

Needs an NPU and `bash ops/ascend/vector_core/build.sh`. Each way is captured into one graph that runs all layers,
whose weights differ, so that no cache holds them; before that, the kernel's results must be those of the unpacked
weights. The graphs are replayed
in turn; a time is the median of the device's own, divided by the layers. GB/s counts weights and scales of each
expert that is hit, once a layer. Limit: the better of a plain copy and a plain sum of --read-mb, timed in the same
rounds.
"""

import argparse
import os
from pathlib import Path

from umbra.base.errors import UserError, run_main
from umbra.executor.platform.ascend.environment import custom_operators
from umbra.ops.ascend import vector_core
from umbra.tools.benchmarks.output import printed, write_rows

COLUMNS = (
    ("batch", "Batch", 6, ""),
    ("ref_us", "Ref us", 10, ".2f"),
    ("custom_us", "Custom us", 11, ".2f"),
    ("ref_gbps", "Ref GB/s", 10, ".1f"),
    ("custom_gbps", "Custom GB/s", 13, ".1f"),
    ("speed_up", "speed-up", 10, ".2f"),
    ("limit_gbps", "limit GB/s", 12, ".1f"),
    ("fraction", "of limit", 10, ".2f"),
)


def arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in dict(hidden=2048, inner=768, experts=128, top_k=8, group=32, layers=16, rounds=30).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--read-mb", type=int, default=1024)
    parser.add_argument("--float-sums", action="store_true", help="as ascend_config.gemv_float_sums")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    return parser.parse_args(argv)


def main(argv: list[str], extension: Path = vector_core.EXTENSION) -> None:
    args = arguments(argv)
    if not vector_core.built(extension):
        raise UserError("the vector-core kernels are not built: run bash ops/ascend/vector_core/build.sh")
    # Before torch_npu is loaded, which may be when torch is.
    os.environ["ASCEND_CUSTOM_OPP_PATH"] = vector_core.package_path(custom_operators())
    try:
        from umbra.tools.benchmarks import npu_layers
    except ImportError as error:
        raise UserError(f"no NPU can be used: {error}") from None
    npu_layers.start(extension)
    sizes = args.hidden, args.inner, args.experts, args.top_k, args.group, args.layers
    shape = npu_layers.LayerShape(*sizes, args.dtype, args.float_sums)
    rows = npu_layers.measure(shape, args.batches, args.rounds, args.read_mb << 20)
    if not npu_layers.computes():
        for _ in rows:
            raise AssertionError("a device that computes nothing cannot be measured")
        print("captured and replayed; this device computes nothing, so there is nothing to measure")
        return
    write_rows(args.json, printed(rows, COLUMNS), **vars(shape))


if __name__ == "__main__":
    run_main(main)
