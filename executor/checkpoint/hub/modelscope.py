"""Models from ModelScope, by its own client and in its own cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from umbra.base.errors import UserError
from umbra.executor.checkpoint.hub.repository import HubName, Repository, known


class ModelScope(Repository):
    space = "MODELSCOPE_CACHE"

    def __init__(self, model: HubName):
        super().__init__(model)
        with _in_one_line(model):
            from modelscope.hub.api import HubApi

            try:
                files = HubApi().get_model_files(model.name, revision=model.revision, recursive=True)
            except OSError as error:
                if getattr(error, "response", None) is not None:
                    raise  # it has answered
                self.cached = True
                self._download(["*"], local_files_only=True)
                self.sizes = self.files_here()
            else:
                self.sizes = known((file["Path"], file["Size"]) for file in files if file.get("Type") != "tree")
                # The client says where its cache is only for what it has fetched.
                self._download([min(self.sizes, key=self.sizes.__getitem__)])

    def fetch(self, files: Sequence[str]) -> None:
        if missing := [escape(file) for file in files if not self.here(file)]:
            with _in_one_line(self.model):
                self._download(missing)

    def _download(self, patterns: Sequence[str], **options: bool) -> None:
        from modelscope.hub.snapshot_download import snapshot_download

        name, revision = self.model.name, self.model.revision
        self.folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns), **options))


@contextmanager
def _in_one_line(model: HubName) -> Iterator[None]:
    """Turns the client's errors, whose classes differ from version to version, into a UserError."""
    try:
        yield
    except ImportError:
        raise model.error("UMBRA_USE_MODELSCOPE needs its client: .venv/bin/pip install modelscope") from None
    except UserError:
        raise
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise model.error(f"is no path here, and ModelScope says: {said}: check the name and the connection") from None
