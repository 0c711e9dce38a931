"""Memory of the host that a GPU copies from while the host goes on. It is registered once it is filled: the driver's
own pinned memory is zeroed slowly and cannot be made of huge pages."""

import functools
from pathlib import Path

from umbra.base.errors import UserError
from umbra.ops.cuda.driver import DEVICE_MAP, PORTABLE, CudaError, Driver

CGROUP = Path("/sys/fs/cgroup")
MIB = 1 << 20

driver = functools.cache(Driver)


class RegisteredRange:
    """A range of whole buffers that is registered with the current device until `end`. Registered memory cannot be
    swapped or reclaimed, so all of it must fit into what the control group may use."""

    total = 0  # bytes that this process has registered

    def __init__(self, address: int, nbytes: int, what: str):
        """`what` begins the message of an error."""
        self.address, self.nbytes = address, nbytes
        most = memory_limit()
        if most is not None and RegisteredRange.total + nbytes > most:
            wanted = (RegisteredRange.total + nbytes) // MIB
            raise UserError(
                f"{what}: {wanted} MiB of experts must stay in the host's memory, of which this control group may use "
                f"{most // MIB} MiB: raise its memory.max, or offload_config.start_layer"
            )
        try:
            driver().cuMemHostRegister_v2(address, nbytes, PORTABLE | DEVICE_MAP)
        except CudaError as error:
            raise UserError(
                f"{what}: the driver registers no more of the host's memory ({error}, after "
                f"{RegisteredRange.total // MIB} MiB): raise `ulimit -l`, or offload_config.start_layer"
            ) from None
        RegisteredRange.total += nbytes

    def end(self) -> None:
        """To be called when nothing copies from it any more."""
        if self.nbytes:
            driver().cuMemHostUnregister(self.address)
            RegisteredRange.total -= self.nbytes
            self.nbytes = 0


def memory_limit() -> int | None:
    """The bytes that this process's control group may use; None: no limit is known."""
    file = CGROUP / "memory.max"
    text = file.read_text().strip() if file.is_file() else "max"
    return None if text == "max" else int(text)
