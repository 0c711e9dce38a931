"""Runs one rank's work: opens its log, reads its environment, and reports its failure to the launcher."""

import contextlib
import errno
import os
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from umbra.base.errors import EXIT_STATUS, UserError, refusal
from umbra.base.files import write_json
from umbra.executor.config.case import Case
from umbra.executor.config.env import RankEnv, rank_env
from umbra.executor.launch.processes import end_with
from umbra.executor.launch.results import Log, create_results, discard_results, open_log

RankBody = Callable[[Path, RankEnv], None]


def run_rank(case: Case, results: Path | None, body: RankBody, own_results: bool = False) -> None:
    """Run `body(folder, ranks)` as this process's rank. The folder is `results`, or a new one. `own_results`: a
    launcher has made `results` for this run alone."""
    ranks = rank_env()
    folder = results or create_results(case.name)
    log = open_log(folder, ranks.rank)
    body = _disk_full_is_a_user_error(body)
    if not ranks.launched:
        try:
            body(folder, ranks)
        except UserError:
            if own_results or results is None:
                discard_results(folder)
            raise
        except Exception as error:
            if refusal(error):  # which is shown as one line
                _log_stack(log)
            raise
        return

    from torch import distributed

    from umbra.ops.parallel.connections import readable_connection_errors

    end_with(os.getppid(), signal.SIGKILL)  # without its launcher, nobody would end this rank
    try:
        with readable_connection_errors():
            body(folder, ranks)
    except Exception as error:  # the launcher prints it, once; here it only goes to this rank's log
        _log_stack(log)
        _leave_word(Path(ranks.error_file), error)
        # This skips the interpreter's clean-up, in which gloo aborts the process if another rank is gone.
        os._exit(EXIT_STATUS if isinstance(error, UserError) else 1)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _log_stack(log: Log) -> None:
    with contextlib.suppress(UserError):  # the disk may be full
        log.write(traceback.format_exc())


def _leave_word(path: Path, error: Exception) -> None:
    """Write the error in the format of torch.distributed.elastic, without a stack if it is one that the system refused;
    a SIGTERM can cut off its own writer half-way. `follows`: whether the cause is that another rank is gone."""
    refused = refusal(error)
    stack = "" if refused else "".join(traceback.format_exception(error)) or type(error).__name__
    follows = isinstance(error, ConnectionError)
    extra = {"py_callstack": stack, "timestamp": str(int(time.time())), "follows": follows}
    word = {"message": {"message": refused or str(error) or type(error).__name__, "extraInfo": extra}}
    with contextlib.suppress(UserError):  # without the file, the launcher still has the exit status
        write_json(path, word)


def _disk_full_is_a_user_error(body: RankBody) -> RankBody:
    def guarded(folder: Path, ranks: RankEnv) -> None:
        try:
            body(folder, ranks)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise UserError(f"{folder}: cannot be written: {error.strerror}") from None
            raise

    return guarded
