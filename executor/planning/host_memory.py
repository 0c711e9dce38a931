"""Refuses a case whose ranks cannot fit into the memory of this machine, before any of it is allocated."""

import os

from errors import UserError
from executor.config.case import Case
from executor.config.units import GB
from executor.planning.memory import cache_of, sketch_of, weights_of


def check_host_memory(case: Case, local_ranks: int) -> None:
    """Checks a case whose platform's device is the CPU. `local_ranks` is the number of the job's ranks on this
    machine."""
    sketch = sketch_of(case)
    weights = sum(part.nbytes for part in weights_of(sketch.model))
    cache = cache_of(sketch.model, case.cache_config.page_size).nbytes
    total, present = local_ranks * (weights + cache), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if total > present:
        raise UserError(
            f"case {case.name}: {weights / GB:.2f} GB of weights and {cache / GB:.2f} GB of KV cache on each of "
            f"{local_ranks} rank(s) of this machine do not fit into its {present / GB:.2f} GB of memory"
        )
