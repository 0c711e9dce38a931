"""Models by their names on a hub: processes that ask a stand-in of the hub, whose client reads its environment once."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

import pytest

from tests.gguf_models import save_gguf
from tests.ranks import free_port
from tests.variants import thorough_after
from umbra.base.files import ROOT

pytestmark = pytest.mark.slow

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DEMO = ROOT / "checkpoints" / "austen_moe_awq"
HEAD = ROOT / "checkpoints" / "austen_moe_eagle3"
BIG = bytes(24 << 20)  # the client writes ten megabytes at a time
PATHS = re.compile(r"/(?:api/models/)?(\w+/[\w.-]+)(?:/(?:revision|resolve)/([^/]+))?/?(.*)")


class Hub(ThreadingHTTPServer):
    """Serves `models`: of each the files by name."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []  # for which files, and from which byte
        self.tokens: set[str | None] = set()
        self.cut = 0  # bytes after which an answer stands still; 0: none does
        self.stuck = Event()


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, match = self.server, PATHS.fullmatch(unquote(urlsplit(self.path).path))
        assert match
        name, revision, file = match.groups("main")
        if name not in hub.models:
            return self.answer(401, b"", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", COMMIT):
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = hub.models[name]
        if not file:
            siblings = [
                {"rfilename": file, "size": 1 << 60 if b"huge" in body else len(body), "blobId": "0" * 40}
                | ({"lfs": {"sha256": sha256(body), "size": len(body), "pointerSize": 1}} if len(body) > 1e6 else {})
                for file, body in files.items()
            ]
            about = {"architecture": "gemma3"} if "gemma" in name else None
            info = {"id": name, "sha": COMMIT, "siblings": siblings, "gguf": about}
            return self.answer(200, json.dumps(info).encode(), {})
        if "gated" in name:
            return self.answer(403, b"", {"X-Error-Code": "GatedRepo"})
        body, headers = files[file], {"ETag": f'"{sha256(files[file])}"', "X-Repo-Commit": COMMIT}
        start = int((self.headers["Range"] or "bytes=0-")[6:-1])
        if self.command == "GET":
            hub.asked.append(f"{file}:{start}")
            hub.tokens.add(self.headers["Authorization"])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self.answer(206 if start else 200, body[start:], headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            cut = self.server.cut
            self.wfile.write(body[:cut] if cut else body)
            if 0 < cut < len(body):
                self.wfile.flush()
                self.server.stuck.set()
                Event().wait()


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        Thread(target=hub.serve_forever, daemon=True).start()
        config, tokenizer = (DEMO / "config.json").read_bytes(), (DEMO / "tokenizer.json").read_bytes()
        hub.models = {
            "org/demo": {path.name: path.read_bytes() for path in DEMO.iterdir()} | {"original/x.safetensors": b"0"},
            "org/head": {name: (HEAD / name).read_bytes() for name in ("config.json", "model.safetensors")},
            "org/big": {"config.json": config, "tokenizer.json": tokenizer, "model.safetensors": BIG},
            "org/huge": {"config.json": config, "model.safetensors": b"huge"},
            "org/gated": {"config.json": config, "model.safetensors": b"0"},
            "org/rwkv": {"config.json": b'{"model_type": "rwkv"}', "model.safetensors": b"0"},
            "org/gemma": {"m.gguf": b"0"},
            "org/pickles": {"config.json": config, "pytorch_model.bin": b"0"},
            "org/some-GGUF": {
                name: name.encode()
                for name in (
                    "m-Q4_K_M.gguf",
                    "m-Q4_K_S.gguf",
                    "mmproj-m-Q8_0.gguf",
                    "Q8_0/m-Q8_0-00001-of-00002.gguf",
                    "Q8_0/m-Q8_0-00002-of-00002.gguf",
                    "BF16/m-BF16-00001-of-00002.gguf",
                    "../m-F16.gguf",
                )
            },
        }
        yield hub
        hub.shutdown()


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(hub: Hub, tmp_path: Path) -> Start:
    """Starts a command in an empty folder, with the hub's variables and those given."""
    given = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.server_address[1]}", "HF_HOME": str(tmp_path / "home")}
    given |= {"HF_TOKEN": "hf_secret", "PYTHONPATH": str(ROOT), "NO_PROXY": "*", "OMP_NUM_THREADS": "1"}
    (tmp_path / "cwd").mkdir()

    def started(*command: str, **variables: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *(() if command[0] == "-c" else ("-m", "umbra")), *command],
            cwd=tmp_path / "cwd",
            env=os.environ | given | variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return started


def ended(process: "subprocess.Popen[str]", typed: str = "") -> tuple[int, str, str]:
    out, err = process.communicate(typed, timeout=600)
    return process.returncode, out, err


@pytest.mark.thorough
def test_a_model_is_fetched_once_for_all_ranks_and_then_runs_offline(hub: Hub, start: Start, tmp_path: Path) -> None:
    keys = ("--set", "keep_packed=false", "max_new_tokens=4")
    drafts = "draft_config.method=eagle3", "draft_config.model_path=org/head"
    status, out, err = ended(start("run", "org/demo", "--prompt", "Emma", *keys, "world_size=2", *drafts))
    assert status == 0, err
    assert "fetching org/head: model.safetensors, 0.7 MB to go" in out
    assert re.search(r"fetching org/demo: 6 files, 6.0 MB to go, into .*/home/hub/models--org--demo/", out)
    assert "case                 demo: cpu" in out
    asked = [file.partition(":")[0] for file in hub.asked]
    assert asked[0] == "config.json"
    unwanted = {"README.md", "calibration.txt", "original/x.safetensors"}
    wanted = (*hub.models["org/head"], *hub.models["org/demo"])
    assert sorted(asked) == sorted(file for file in wanted if file not in unwanted)  # each once
    assert hub.tokens == {"Bearer hf_secret"}
    hub.asked.clear()
    status, out, err = ended(start("chat", "org/demo", *keys, HF_HUB_OFFLINE="1"), "Hello\n")
    assert (status, hub.asked) == (0, []), err
    assert "fetching" not in out
    assert "> " in out
    [shard] = (tmp_path / "home" / "hub").rglob("snapshots/*/model-rest.safetensors")
    shard.unlink()
    for name, lacks in (("org/demo", "model-rest.safetensors"), ("org/demo:Q8_0", "")):
        status, _, err = ended(start("run", name, HF_HUB_OFFLINE="1"))
        assert (status, err.count("\n")) == (2, 1)
        assert "org/demo: not all of it was fetched before" in err
        assert lacks in err


def test_a_model_is_served_by_its_name(start: Start) -> None:
    port = free_port()
    server = start("serve", f"org/demo@{COMMIT}", "--port", str(port), "--set", "keep_packed=false")
    try:
        assert server.stdout
        assert f"ready: org/demo at http://127.0.0.1:{port}\n" in iter(server.stdout.readline, "")
        body = {"model": "org/demo", "prompt": "Emma", "max_tokens": 4}
        request = Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode())
        request.add_header("Content-Type", "application/json")
        with urlopen(request) as reply:
            assert json.load(reply)["usage"]["completion_tokens"] == 4
    finally:
        server.terminate()
        ended(server)


PROGRAM = """
import sys
from pathlib import Path
from umbra.models.gguf import folder
folder.FOLDERS = Path("unpacked").absolute()
from umbra import LLM
llm = LLM(sys.argv[1], dtype="float32", keep_packed=False)
print(llm.case.name, len(llm.generate(["Emma"])[0].tokens) > 0)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("which", ["Q8_0", "Q8_0/demo-Q8_0.gguf"])
def test_a_gguf_file_in_parts_runs_in_a_program(hub: Hub, start: Start, tmp_path: Path, which: str) -> None:
    path = tmp_path / "demo-Q8_0.gguf"
    save_gguf(
        ROOT / "checkpoints" / "austen_moe",
        path,
        "qwen3_moe",
        lambda name: "F32" if "norm" in name or "gate_inp" in name else "Q8_0",
        split=30,
    )
    parts = sorted(tmp_path.glob("demo-Q8_0-*"))
    assert len(parts) > 1
    hub.models["org/parts"] = {f"Q8_0/{part.name}": part.read_bytes() for part in parts} | {"m-Q4_K_M.gguf": b"0"}
    status, out, err = ended(start("-c", PROGRAM, f"org/parts:{which}"))
    assert status == 0, err
    assert out.splitlines()[-1] == "demo-Q8_0 True"
    assert sorted(hub.asked) == [f"Q8_0/{part.name}:0" for part in parts]


def test_a_killed_download_goes_on_where_it_was(hub: Hub, start: Start, tmp_path: Path) -> None:
    hub.cut = 15 << 20
    killed = start("pull", "org/big")
    assert hub.stuck.wait(300)
    parts = tmp_path / "home" / "hub" / "models--org--big" / "blobs"
    while not [part for part in parts.glob("*.incomplete") if part.stat().st_size == 10 << 20]:
        assert killed.poll() is None
    killed.kill()
    killed.communicate()
    hub.cut = 0
    status, out, err = ended(start("pull", f"org/big@{COMMIT}"))
    assert status == 0, err
    assert "model.safetensors, 14.0 MB to go" in out
    assert hub.asked[-1] == f"model.safetensors:{10 << 20}"
    assert (Path(out.splitlines()[-1]) / "model.safetensors").read_bytes() == BIG
    assert not [*parts.glob("*.incomplete")]


def test_a_full_disk_is_one_line(start: Start, tmp_path: Path) -> None:
    blobs = tmp_path / "home" / "hub" / "models--org--big" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{sha256(BIG)}.umbra.incomplete").symlink_to("/dev/full")
    status, _, err = ended(start("pull", "org/big"))
    assert status == 2
    assert "org/big: no space is left in" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("command", "said"),
    thorough_after(
        3,
        [
            ("serve org/none", "org/none: is no path here, and http://127.0.0.1:.* has no such model: check the name"),
            ("chat org/big@v9", "org/big@v9: no such revision"),
            ("pull org/gated", "is gated: accept its terms at .*/org/gated, and set HF_TOKEN"),
            ("plan org/rwkv", "'rwkv' is not supported, only qwen3_moe, "),
            ("serve org/gemma", "org/gemma: architecture 'gemma3' is not supported, only qwen3moe, "),
            ("evaluate --text x --case org/huge", r"1073741824.0 GB to fetch, but .* left: make room, or set HF_HOME"),
            (
                "inspect org/pickles",
                "org/pickles: has neither model.safetensors nor .* GGUF files: name a model that has",
            ),
            ("pull org/some-GGUF:Q5_K_M", "no file is of Q5_K_M: write org/some-GGUF:FILE with one of .*m-Q4_K_S.gguf"),
            ("pull org/some-GGUF:Q4_K", "no file is of Q4_K: "),
            ("pull org/some-GGUF:BF16", "the repository is not whole: it lacks BF16/m-BF16-00002-of-00002.gguf"),
            ("pull org/some-GGUF:../m-F16.gguf", "is no name on a hub"),
            ("run org/demo --set max_new_token=3", "unknown key"),
            (
                "run org/demo --set draft_config.method=eagle3 draft_config.model_path=org/pickles",
                "name an EAGLE3 head",
            ),
            ("run ./org/demo", "no case './org/demo', and no folder of that name"),
            ("run org/demo.yaml", "no case 'org/demo.yaml'"),
        ],
    ),
)
def test_what_cannot_be_fetched_is_one_line(hub: Hub, start: Start, command: str, said: str) -> None:
    status, out, err = ended(start(*command.split()))
    first = f"umbra {command}\n" if command.startswith("serve") else ""  # the line that serve begins with
    assert (status, err.count("\n"), out) == (2, 1, first)
    assert re.search(said, err), err
    assert set(hub.asked) <= {"config.json:0", "tokenizer.json:0"}  # nothing large


@pytest.mark.parametrize(
    ("variables", "said"),
    thorough_after(
        1,
        [
            (
                {"HF_HUB_OFFLINE": "1"},
                "org/demo: is no path here, HF_HUB_OFFLINE is set, and it is not in .*/home/hub: ",
            ),
            ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
            ({"UMBRA_USE_MODELSCOPE": "yes"}, "UMBRA_USE_MODELSCOPE='yes' must be 1 or 0"),
            ({"UMBRA_USE_MODELSCOPE": "1"}, "needs its client: .venv/bin/pip install modelscope"),
        ],
    ),
)
def test_a_hub_that_is_not_asked(start: Start, variables: dict[str, str], said: str) -> None:
    status, out, err = ended(start("serve", "org/demo", **variables))
    assert (status, err.count("\n"), out) == (2, 1, "umbra serve org/demo\n"), err
    assert re.search(said, err), err


@pytest.mark.parametrize(
    ("which", "files"),
    thorough_after(
        1,
        [
            ("", ["m-Q4_K_M.gguf"]),
            (":q4_k_s", ["m-Q4_K_S.gguf"]),
            (":m-Q4_K_S.gguf", ["m-Q4_K_S.gguf"]),
            ("@main:Q8_0", ["Q8_0/m-Q8_0-00001-of-00002.gguf", "Q8_0/m-Q8_0-00002-of-00002.gguf"]),
        ],
    ),
)
def test_gguf_files_are_chosen_by_quantisation_or_name(hub: Hub, start: Start, which: str, files: list[str]) -> None:
    status, out, err = ended(start("pull", f"org/some-GGUF{which}"))
    assert status == 0, err
    assert sorted(hub.asked) == [f"{file}:0" for file in files]
    path = Path(out.splitlines()[-1])
    assert (path.name, path.read_text()) == (Path(files[0]).name, files[0])
    assert all((path.parent / Path(file).name).is_file() for file in files)


MODELSCOPE = """
import os, shutil
CACHE = "cache/models/org--demo/snapshots/master"
class HubApi:
    def get_model_files(self, name, revision=None, recursive=False):
        if not os.path.exists("hub"): raise ConnectionError("no network\\nat all")
        return [{"Path": file, "Size": os.path.getsize(f"hub/{file}")} for file in os.listdir("hub")]
def snapshot_download(name, revision=None, allow_patterns=(), local_files_only=False):
    if local_files_only and not os.path.exists(CACHE): raise ValueError("not cached\\nat all")
    os.makedirs(CACHE, exist_ok=True)
    for file in () if local_files_only else allow_patterns: shutil.copy(f"hub/{file}", CACHE)
    return os.path.abspath(CACHE)
"""


@pytest.mark.thorough
def test_modelscope_s_client_if_it_is_asked_for(start: Start, tmp_path: Path) -> None:
    package, cwd = tmp_path / "site" / "modelscope" / "hub", tmp_path / "cwd"
    package.mkdir(parents=True)
    for name in ("api", "snapshot_download"):
        (package / f"{name}.py").write_text(MODELSCOPE)
    variables = {"UMBRA_USE_MODELSCOPE": "1", "PYTHONPATH": f"{ROOT}:{tmp_path / 'site'}"}
    status, _, err = ended(start("pull", "org/demo", **variables))
    assert (status, err.count("\n")) == (2, 1)
    assert "ModelScope says: not cached: check the name" in err
    (cwd / "hub").symlink_to(DEMO)
    status, out, err = ended(start("pull", "org/demo", **variables))
    folder = cwd / "cache" / "models" / "org--demo" / "snapshots" / "master"
    assert (status, out.splitlines()[-1]) == (0, str(folder)), err
    assert not (folder / "README.md").exists()
    (cwd / "hub").unlink()
    status, out, err = ended(start("init", "org/demo", **variables))
    assert (status, out.splitlines()[-1]) == (0, "wrote demo.yaml: edit it, then `umbra serve demo.yaml`"), err
