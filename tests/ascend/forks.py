"""Starts the processes of tools/npu_check by forking, from a process that has imported what they need, so that they
start in milliseconds. Their device computes (tests/ascend/computing.py), their sizes are small, and they may have a
fault."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tests.ascend.ranks  # noqa: F401 (what the processes are forked from has imported torch_npu)
from tools.npu_check import processes

CASE = "tiny.yaml"  # beside the socket
PLACE = ""  # the server's socket


@dataclass
class Forked:
    """Implements tools.npu_check.processes.Process."""

    pid: int
    status: int | None = None

    def poll(self) -> int | None:
        if self.status is None:
            self.status = ask({"poll": self.pid})
        return self.status


def ask(request: dict[str, Any]) -> Any:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(PLACE)
        client.sendall(json.dumps(request).encode() + b"\n")
        with client.makefile() as answer:
            return json.loads(answer.readline())


def start_server(folder: Path) -> multiprocessing.process.BaseProcess:
    """The process that the others are forked from. Ends with `stop_server`."""
    global PLACE
    PLACE = str(folder / "socket")
    context = multiprocessing.get_context("forkserver")
    ready, told = context.Pipe(False)
    server = context.Process(target=serve, args=(PLACE, told))
    server.start()
    ready.recv()
    return server


def forked(fault: str) -> Any:
    """Takes the place of `processes.start`."""

    def start(arguments: list[str], environment: dict[str, str], log: Path, group: bool) -> Forked:
        request = {"arguments": arguments, "environment": environment, "log": str(log), "fault": fault}
        return Forked(ask({**request, "group": 0 if group else os.getpgrp()}))

    return start


def serve(place: str, told: Any) -> None:
    import torch
    import torch._dynamo.convert_frame
    import torch._functorch.aot_autograd
    import torch.fx.experimental.symbolic_shapes

    from tests.ascend import computing, npu_faults

    torch.set_num_threads(1)  # threads of this process would be missing in those that are forked from it
    npu_faults.small(str(Path(place).parent / CASE))
    computing.start()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen(64)
    told.send(None)
    while True:
        client, _ = listener.accept()
        with client, client.makefile("rw") as file:
            request = json.loads(file.readline())
            if "poll" in request:
                pid, status = os.waitpid(request["poll"], os.WNOHANG)
                answer = os.waitstatus_to_exitcode(status) if pid else None
            else:
                answer = os.fork()
                if not answer:
                    listener.close()
                    become(place, **request)
                os.setpgid(answer, request["group"] or answer)
            file.write(json.dumps(answer) + "\n")


def become(place: str, arguments: list[str], environment: dict[str, str], log: str, fault: str, group: int) -> None:
    """This process is one of the tool's from here on."""
    global PLACE
    status = 1
    try:
        os.setpgid(0, group)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        sys.stdout = sys.stderr = os.fdopen(out, "w", buffering=1)
        os.environ.clear()
        os.environ.update(environment)
        os.environ.pop("CPU_AFFINITY_CONF", None)  # it needs a library of the driver
        PLACE, processes.start = place, forked(fault)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from tests.ascend import npu_faults
        from tools.npu_check.__main__ import main

        if fault:
            getattr(npu_faults, fault)()
        main(arguments)
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def temporary() -> Path:
    """A folder whose name is short enough for a socket."""
    return Path(tempfile.mkdtemp(prefix="npu"))
