"""Models from the Hugging Face hub or a mirror of it, by the hub's own client, whose environment variables all hold:
HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE. Files go into its cache, where other programs find them.

The client throws away what it has of a file when its process ends, which may be gigabytes of weights. So these are
fetched here into a file of another name in the cache, which the next start goes on with.
"""

import fcntl
import os
import re
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from errno import EDQUOT, ENOSPC
from pathlib import Path
from threading import Event
from typing import Any, NoReturn

from tqdm import tqdm

from umbra.base.errors import UserError
from umbra.executor.checkpoint.hub.repository import HubName, Repository, known

WEIGHTS = (".safetensors", ".gguf")
AT_ONCE = 4  # files
PLAIN = re.compile(r"[\w-]{1,128}", re.ASCII)  # an ETag that can be the name of a file
SHA256 = re.compile(r"[0-9a-f]{64}")  # the ETag of a large file: the hash of what it holds


class HuggingFace(Repository):
    space = "HF_HOME"

    def __init__(self, model: HubName):
        super().__init__(model)
        from httpx2 import TransportError
        from huggingface_hub import HfApi, constants, is_offline_mode
        from huggingface_hub.errors import HfHubHTTPError
        from huggingface_hub.file_download import repo_folder_name

        api, self.cached = HfApi(), is_offline_mode()
        self._blobs: dict[str, str] = {}  # of large files, the name that what they hold has in the cache
        with _in_one_line(model):
            revision = api.resolve_revision(model.name, revision=model.revision, local_files_only=self.cached)
            self.commit = revision.resolved
            self.store = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=model.name, repo_type="model"))
            self.folder = self.store / "snapshots" / self.commit
            try:
                self.sizes = {} if self.cached else self._listed(api)
            except (TransportError, HfHubHTTPError) as error:
                if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
                    raise
                self.cached = True
            if self.cached:
                self.sizes = self.files_here()
                if not self.sizes:
                    raise _unreachable(model)

    def _listed(self, api: Any) -> dict[str, int]:
        """The sizes of the repository's files."""
        info = api.model_info(self.model.name, revision=self.commit, files_metadata=True)
        files, self.architecture = info.siblings or [], str((info.gguf or {}).get("architecture") or "")
        self._blobs = {file.rfilename: file.lfs.sha256 for file in files if file.lfs}
        return known((file.rfilename, file.size) for file in files)

    def here(self, file: str) -> int:
        part = self._part(self._blobs[file]) if file in self._blobs else None
        return super().here(file) or (part.stat().st_size if part and part.is_file() else 0)

    def fetch(self, files: Sequence[str]) -> None:
        missing = [file for file in files if not super(HuggingFace, self).here(file)]
        if not missing:
            return
        total, stop = sum(self.sizes[file] for file in missing), Event()
        shown = any(file.endswith(WEIGHTS) for file in missing)
        pause = 0.1 if sys.stderr.isatty() else 10.0  # seconds between two lines of a log
        with (
            _in_one_line(self.model),
            tqdm(total=total, desc="fetching", unit="B", unit_scale=True, mininterval=pause, disable=not shown) as bar,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            bar.update(sum(map(self.here, missing)))
            try:
                for _ in pool.map(lambda file: self._fetch(file, _Bar(bar, stop)), missing):
                    pass
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def _fetch(self, file: str, bar: Any) -> None:
        """Fetches a file. `bar` is a `_Bar`, which the client takes for a class of tqdm's."""
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

        if file.endswith(WEIGHTS):
            url = hf_hub_url(self.model.name, file, revision=self.commit)
            said = get_hf_file_metadata(url, retry_on_errors=True)
            if said.etag and PLAIN.fullmatch(said.etag) and (said.size or 0) <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                self._fetch_blob(url, said.etag, said.size, bar)
        # Small files, larger ones than the hub gives in one piece, and the link to what was fetched.
        hf_hub_download(self.model.name, file, revision=self.commit, tqdm_class=bar)

    def _part(self, etag: str) -> Path:
        return self.store / "blobs" / f"{etag}.umbra.incomplete"

    def _fetch_blob(self, url: str, etag: str, size: int | None, bar: Any) -> None:
        """Fetches what a file holds, or the rest of it."""
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils._headers import build_hf_headers

        blob, part = self.store / "blobs" / etag, self._part(etag)
        part.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if blob.exists():  # another process has fetched it meanwhile
                return part.unlink(missing_ok=True)
            if (done := file.tell()) > (size or done):
                done = file.truncate(0)
            http_get(url, file, resume_size=done, headers=build_hf_headers(), expected_size=size, tqdm_class=bar)
            file.flush()
            os.fsync(file.fileno())
            if done and SHA256.fullmatch(etag) and _sha256(part) != etag:
                part.unlink()
                raise self.model.error("what was fetched before is damaged, and was removed: start again")
            part.replace(blob)


class _Bar:
    """Stands in for the client's own progress bar of one file."""

    def __init__(self, bar: "tqdm[NoReturn]", stop: Event):
        self.bar, self.stop = bar, stop

    def __call__(self, **_: object) -> "_Bar":
        return self  # the client calls what it takes for a class

    def __enter__(self) -> "_Bar":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, nbytes: float | None = 1) -> None:
        if self.stop.is_set():
            raise UserError("stopped")
        self.bar.update(nbytes)


def _sha256(path: Path) -> str:
    from huggingface_hub.utils.sha import sha_fileobj

    with open(path, "rb") as file:
        return sha_fileobj(file).hex()


def _unreachable(model: HubName) -> UserError:
    from huggingface_hub import constants, is_offline_mode

    why = "HF_HUB_OFFLINE is set" if is_offline_mode() else f"{constants.ENDPOINT} cannot be reached"
    what = "give the path of a folder, or go online"
    return model.error(f"is no path here, {why}, and it is not in {constants.HF_HUB_CACHE}: {what}")


@contextmanager
def _in_one_line(model: HubName) -> Iterator[None]:
    """Turns the client's errors into a UserError."""
    from httpx2 import TransportError
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
        RevisionResolutionError,
    )

    hub, page = constants.ENDPOINT, f"{constants.ENDPOINT}/{model.name}"
    try:
        try:
            yield
        except LocalEntryNotFoundError as error:  # says nothing; its cause does
            raise error.__cause__ or error from None
    except GatedRepoError:
        raise model.error(f"is gated: accept its terms at {page}, and set HF_TOKEN to your token") from None
    except RepositoryNotFoundError:
        what = "check the name, or set HF_TOKEN if it is private"
        raise model.error(f"is no path here, and {hub} has no such model: {what}") from None
    except RevisionNotFoundError:
        raise model.error(f"no such revision: give a branch, a tag or a commit of {page}") from None
    except RevisionResolutionError:
        raise _unreachable(model) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        what = "set HF_TOKEN to a token that may read it" if status in (401, 403) else "try again later"
        raise model.error(f"{hub} answers {status}: {what}") from None
    except OSError as error:
        if error.errno is None:  # the client's own
            raise model.error("a file has not the size that the hub says: start again") from None
        if error.errno not in (ENOSPC, EDQUOT):
            raise
        raise model.error(
            f"no space is left in {constants.HF_HUB_CACHE}: make room, and start again, which goes on from there; or "
            "set HF_HOME to a folder on a larger disk"
        ) from None
    except TransportError as error:
        raise model.error(f"the connection to {hub} was lost: {error}: start again, which goes on from there") from None
