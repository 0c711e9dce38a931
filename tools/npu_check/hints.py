"""Hints about a failure, looked up by its text.

Codes are those of CANN's headers (acl/error_codes/rt_error_codes.h) and of aclnn.
"""

import re

LOGS = "CANN's own log has more: set ASCEND_GLOBAL_LOG_LEVEL=1 ASCEND_SLOG_PRINT_TO_STDOUT=1 and run this stage alone"
HINTS = (
    (
        r"libascendcl\.so|libhccl\.so|libge_runner|ASCEND_HOME_PATH is not set|ASCEND_OPP_PATH",
        "CANN's environment is missing: source .../ascend-toolkit/set_env.sh in this shell, then run this again",
    ),
    (r"no module named .?torch_npu", "install torch_npu of torch's own release (docs/ascend.md)"),
    (
        r"libdcmi\.so",
        "the driver's libdcmi.so is not in LD_LIBRARY_PATH, but placing ranks near their die needs it: add its folder "
        "(/usr/local/dcmi), or run cases with --set cpu_affinity=false",
    ),
    (r"\b16100[12]\b", f"aclnn refused an argument: a rule of this CANN that Umbra does not know yet. {LOGS}"),
    (r"\b561\d{3}\b", f"tiling, or the search for a kernel, failed: is this chip's operator package installed? {LOGS}"),
    (r"\b107002\b", "the process has no device: is the die in use, or hidden by ASCEND_RT_VISIBLE_DEVICES?"),
    (r"\b107012\b", "no thread is subscribed to the stream: the report thread of csrc/bridge.cpp did not start"),
    (r"\b207001\b", "no memory is left on the die: npu-smi info shows who holds it"),
    (
        r"its callback has not come|\b507012\b",
        "a host callback timed out or never fired: does this CANN capture host functions? Run with --only bridge and "
        "send its logs",
    ),
    (
        r"\b507014\b|\b507034\b",
        "a kernel did not end in time. If it is one of Umbra's, its cores waited for each other: schedule mode",
    ),
    (r"\b507015\b|\b507035\b", f"a kernel accessed an address that it must not. {LOGS}"),
    (r"\b507018\b", f"an operator on the AI CPU failed. {LOGS}"),
    (
        r"EI0006|socket.{0,20}time|connect.{0,20}time",
        "the ranks did not find each other: set HCCL_SOCKET_IFNAME to the network interface; look for a firewall",
    ),
    (
        r"EJ0003|EI0019|address already in use|port.{0,20}(?:in use|used|bind)",
        "HCCL's 16 host ports are taken: choose others with HCCL_IF_BASE_PORT",
    ),
    (r"EI0002|notify wait", "a rank waited for another one that had stopped: the logs of all ranks tell which"),
    (
        r"rank \d+ (?:was killed|ended)",
        "the log of that rank, named above, tells why; the host's memory is a usual cause",
    ),
    (r"\bdiffers?\b|not finite", "wrong numbers: send the report; until then do not use this path"),
    (
        r"stream.{0,30}captur|captur.{0,60}not support|\b1070(?:2[4-9]|3\d|41)\b",
        "this CANN does not capture that: use exe_mode eager or ge_graph until it is fixed",
    ),
    (r"g\+\+|cmake|no such file.*\.run", "install the tool that is named, then run this again"),
    (
        r"install CANN|not supported|do not belong together|too old",
        "the versions do not belong together: docs/ascend.md",
    ),
    (r"within [\d.]+ s", "it was cut off: the log ends where it hung; npu-smi info shows whether the die is healthy"),
)
POISON = re.compile(r"\b(?:107|207|507)\d{3}\b")  # after these, a process can do nothing more with its device


def hint(text: str) -> str:
    """The first hint that fits, or a general one."""
    for pattern, advice in HINTS:
        if re.search(pattern, text, re.IGNORECASE):
            return advice
    return "no hint is known: send the report with the log of this stage"
