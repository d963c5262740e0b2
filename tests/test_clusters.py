"""The recipes for clusters: what the texts show is parsed, validated and, in small, executed."""

import importlib
import os
import re
import select
import shlex
import signal
import subprocess
import sys

import pytest
from conftest import copy_scripts, finish_all, free_port
from conftest import start as start_command
from markdown import marked, read

# The blocks of the text in that language.
SHELL = ["fetch", "node 0", "node 1", "interface", "sbatch", "submit", "torchrun", "platform"]
SHELL += ["kubectl"]
SBATCH_OPTIONS = {  # of sbatch 22.05 to 25.05: those that a training could want
    "account", "array", "chdir", "comment", "constraint", "cpus-per-gpu", "cpus-per-task",
    "dependency", "error", "exclude", "exclusive", "export", "gpu-bind", "gpus", "gpus-per-node",
    "gpus-per-task", "gres", "hint", "job-name", "mail-type", "mail-user", "mem", "mem-per-cpu",
    "mem-per-gpu", "no-requeue", "nodelist", "nodes", "ntasks", "ntasks-per-node", "open-mode",
    "output", "partition", "qos", "requeue", "reservation", "signal", "time", "time-min",
}  # fmt: skip


def blocks(name="docs/clusters.md"):
    """{name: text} of the marked code blocks of a recipe."""
    found = marked(read(name), "cluster")
    languages = {**{name: "bash" for name in SHELL}, "kubernetes": "yaml"}
    assert {name: block.language for name, block in found.items()} == languages
    return {name: block.body for name, block in found.items()}


def without_comments(text):
    """Code without what may differ between two languages: comments and empty lines."""
    lines = (re.sub(r"(^|\s+)#(?!!|SBATCH).*", "", line).rstrip() for line in text.splitlines())
    return [line for line in lines if line]


def words(command):
    return shlex.split(command.replace("\\\n", " "))


def check_launch(command, monkeypatch):
    """Parse a launcher's command with PyTorch's parser, its rest with that of ddp_train.py."""
    from torch.distributed.launch import parse_args

    old = command[:3] == ["python", "-m", "torch.distributed.launch"]
    assert old or command[0] == "torchrun"
    launch = parse_args(command[3 if old else 1 :])
    assert launch.training_script == "ddp_train.py"
    return launch, check_script(["ddp_train.py", *launch.training_script_args], monkeypatch)


def check_script(command, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return importlib.import_module("ddp_train").parse_args(command[1:])


@pytest.fixture
def checkout(tmp_path, mnist):
    """A folder that looks like a checkout with data, and a .venv whose python is this one."""
    home = copy_scripts(tmp_path / "checkout")
    bin, python = home / ".venv" / "bin", shlex.quote(sys.executable)
    bin.mkdir(parents=True)
    (home / "data").symlink_to(mnist)
    write_program(bin / "python", f'exec {python} "$@"')
    write_program(bin / "torchrun", f'exec {python} -m torch.distributed.run "$@"')
    (bin / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    return home


def write_program(path, text):
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


def start(home, script, *options, **env):
    path = f"{home / '.venv' / 'bin'}:{os.environ['PATH']}"
    return start_command(["bash", "-c", script, "script", *options], cwd=home, PATH=path, **env)


def finish(*jobs):
    """The standard outputs of jobs that must all succeed in time."""
    outputs, codes = finish_all(jobs, 90)
    assert codes == [0] * len(jobs), outputs
    return [out for out, _ in outputs]


def test_the_languages_have_the_same_blocks():
    translated = blocks("docs/zh-CN/clusters.md")
    for name, text in blocks().items():
        assert without_comments(translated[name]) == without_comments(text), name


@pytest.mark.parametrize("name", SHELL)
def test_shell_syntax(name):
    done = subprocess.run(["bash", "-n"], input=blocks()[name], text=True, timeout=20)
    assert done.returncode == 0


def test_fetch(checkout):
    assert finish(start(checkout, blocks()["fetch"])) == ["MNIST is there\n"]


def test_the_commands_of_the_nodes_fit_together(monkeypatch):
    nodes = [check_launch(words(blocks()[f"node {number}"]), monkeypatch) for number in "01"]
    assert [launch.node_rank for launch, _ in nodes] == [0, 1]
    for launch, _ in nodes:
        launch.node_rank = None
    assert vars(nodes[0][0]) == vars(nodes[1][0]) and nodes[0][0].nnodes == "2"
    assert vars(nodes[0][1]) == vars(nodes[1][1])


@pytest.mark.slow
def test_the_commands_of_the_nodes_run(checkout):
    port = free_port()
    jobs = []
    for number in "01":
        command = blocks()[f"node {number}"].strip()
        for old, new in (("10.0.0.1", "127.0.0.1"), ("29500", str(port))):
            assert old in command
            command = command.replace(old, new)
        jobs.append(start(checkout, f"{command} --epochs 1 --device cpu"))
    outputs = finish(*jobs)
    first = outputs[0].splitlines()
    assert "world size 4, mnist" in first[0] and first[-1].endswith("runs/two-nodes/model.pth")
    assert not outputs[1]


def directives(text):
    """{long option: value} of the #SBATCH lines, which must stand before the first command."""
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    found = [line.split(maxsplit=1)[1] for line in lines if line.startswith("#SBATCH")]
    assert len(found) == sum(line.startswith("#SBATCH") for line in lines[:first])
    return dict(re.fullmatch(r"--([a-z-]+)=(\S+)", option).groups() for option in found)


def test_sbatch_options():
    options = directives(blocks()["sbatch"])
    assert options and options.keys() <= SBATCH_OPTIONS
    assert options["gpus-per-node"] == options["ntasks-per-node"]  # one process per GPU
    for line in blocks()["submit"].splitlines():
        command = words(line)
        place = command.index("mnist.sbatch")
        assert command[0] == "sbatch"
        own = dict(word[2:].split("=") for word in command[1:place])
        assert own.keys() <= SBATCH_OPTIONS
        assert own.get("gpus-per-node") == own.get("ntasks-per-node")


def test_sbatch_hands_over_options_that_the_script_knows(monkeypatch):
    command = re.search(r"exec python (ddp_train.py .*?)'", blocks()["sbatch"])[1]
    for line in blocks()["submit"].splitlines():
        options = words(line.split("mnist.sbatch")[1])
        args = check_script([*words(command.replace('"$@"', "")), *options], monkeypatch)
        assert args.output_dir and args.resume and args.epochs == 5


def test_torchrun_below_srun_and_on_platforms(monkeypatch):
    """The numbers of a node must be looked up on that node, not in the batch script."""
    text = blocks()["torchrun"]
    (quoted,) = re.findall(r"bash -c '([^']*)'", text)
    assert "SLURM_NODEID" not in text.replace(quoted, "")
    values = {"SLURM_NNODES": "2", "SLURM_NODEID": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "9"}
    values.update(WORLD_SIZE="2", RANK="1")
    for command in (quoted, blocks()["platform"]):
        command = command.replace('"$@"', "--epochs 5")
        command = re.sub(r"\$(\w+)", lambda match: values[match[1]], command)
        launch, _ = check_launch(words(command), monkeypatch)
        assert (launch.nnodes, launch.node_rank, launch.master_port) == ("2", 1, 9)


@pytest.mark.slow
def test_a_job_without_its_rdzv_id_joins_another(tmp_path):
    """What the text below that command says: the second waits for the first to end."""
    path = tmp_path / "job.py"
    path.write_text("import time\nprint('runs', flush=True)\ntime.sleep(60)")
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv_backend=c10d"]
    command.append(f"--rdzv_endpoint=127.0.0.1:{free_port()}")
    jobs = []
    try:
        for options in ([], [], ["--rdzv_id=2"]):
            jobs.append(start_command([*command, *options, path]))
            if len(jobs) != 2:
                assert jobs[-1].stdout.readline() == "runs\n"
        assert not select.select([jobs[1].stdout], [], [], 5)[0] and jobs[1].poll() is None
    finally:
        for job in jobs:
            os.killpg(job.pid, signal.SIGKILL)
        subprocess.run(["pkill", "-9", "-f", str(path)])  # the workers, which have the pipes
        for job in jobs:
            job.communicate()


# Stands for srun: starts the tasks of two nodes here, each with what SLURM would tell it.
SRUN = """
while [[ $1 == --* ]]; do echo "$1" >> srun.options; shift; done
for node in 0 1; do for task in 0 1; do
    SLURM_PROCID=$((2 * node + task)) SLURM_LOCALID=$task SLURM_NODEID=$node "$@" &
    jobs+=($!)
done; done
for job in "${jobs[@]}"; do wait "$job" || exit 1; done
"""


@pytest.mark.slow
def test_sbatch_script_runs(checkout):
    """With stand-ins for srun and scontrol; and once more, which resumes the checkpoint."""
    write_program(checkout / ".venv" / "bin" / "srun", SRUN)
    write_program(checkout / ".venv" / "bin" / "scontrol", "printf '127.0.0.1\\nsecond\\n'")
    options = directives(blocks()["sbatch"])
    assert options["nodes"] == options["ntasks-per-node"] == "2"
    environment = {
        "SLURM_JOB_ID": str(free_port() % 10000),
        "SLURM_JOB_NODELIST": "nodes[0-1]",
        "SLURM_NTASKS": "4",
        "SLURM_NTASKS_PER_NODE": options["ntasks-per-node"],
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
    }
    script = blocks()["sbatch"]
    for epoch in "12":
        job = start(checkout, script, "--epochs", epoch, "--device", "cpu", **environment)
        (out,) = finish(job)
        assert "world size 4, mnist" in out
        assert re.findall(r"^epoch (\d+)/\d+ mnist", out, re.M) == [epoch]
        assert (checkout / "runs" / "mnist" / "model.pth").exists()
    assert "--cpus-per-task=4" in (checkout / "srun.options").read_text().split()


def manifests():
    yaml = pytest.importorskip("yaml", reason="the manifests need PyYAML")
    text = blocks()["kubernetes"]
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def test_manifests_fit_the_schema():
    found = manifests()
    validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")
    for manifest in found.values():
        validate.validate(manifest, validate.latest_version(), strict=True)


def test_manifests_fit_together(monkeypatch):
    found = manifests()
    assert [found[kind]["apiVersion"] for kind in ("Service", "Job")] == ["v1", "batch/v1"]
    service, job = found["Service"], found["Job"]["spec"]
    name, pod = found["Job"]["metadata"]["name"], job["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": name}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["restartPolicy"] in ("Never", "OnFailure")
    names = [{one["name"] for one in many} for many in (container["volumeMounts"], pod["volumes"])]
    assert names[0] == names[1]
    assert job["completionMode"] == "Indexed" and job["completions"] == job["parallelism"]
    assert container["command"] == ["bash", "-c"] and len(container["args"]) == 1
    command = container["args"][0].replace("$JOB_COMPLETION_INDEX", "0")
    assert command.startswith("exec ")
    launch, args = check_launch(words(command)[1:], monkeypatch)
    assert launch.nnodes == str(job["completions"])
    assert launch.nproc_per_node == str(container["resources"]["limits"]["nvidia.com/gpu"])
    assert launch.master_addr == f"{name}-0.{service['metadata']['name']}"
    assert launch.master_port == service["spec"]["ports"][0]["port"]
    assert args.resume


@pytest.mark.slow
def test_the_containers_run(checkout):
    """The command of the Job as two containers: this machine stands for both."""
    (container,) = manifests()["Job"]["spec"]["template"]["spec"]["containers"]
    script, port = container["args"][0], str(free_port())
    changes = {"mnist-0.mnist": "127.0.0.1", "29500": port}
    changes["/shared/"] = f"{shlex.quote(str(checkout))}/"
    for old, new in changes.items():
        assert old in script
        script = script.replace(old, new)
    script += " --epochs 1 --device cpu"
    first, second = finish(*(start(checkout, script, JOB_COMPLETION_INDEX=index) for index in "01"))
    assert "world size 4, mnist" in first and not second
    assert (checkout / "runs" / "mnist" / "checkpoint.pth").exists()


def test_kubectl_names_what_the_manifest_has():
    lines = blocks()["kubectl"].splitlines()
    assert [words(line)[0] for line in lines] == ["kubectl"] * len(lines)
    labels = [word for line in lines for word in words(line) if "=" in word]
    assert labels == [f"job-name={manifests()['Job']['metadata']['name']}"]
