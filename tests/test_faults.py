"""Each fault ends soon, says what it was, leaves the earlier results whole, and can be resumed."""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from conftest import (
    EPOCH_LINE,
    ROOT,
    SMALL_LR,
    distance,
    finish,
    free_port,
    launch_command,
    run,
    run_ddp,
    scalars,
    start,
    weights,
    write_mnist,
)

FAULTY = Path(__file__).parent / "faulty.py"
TRAINING = ("--epochs", "3", "--batch-size", "100", "--log-interval", "1")


def training(mnist, output, *options):
    return ("--data-dir", str(mnist), *TRAINING, "--output-dir", str(output), *options)


def processes_with(text):
    """The processes whose command line holds this text (an output folder is unique to a test)."""
    found = subprocess.run(["pgrep", "-f", "--", text], stdout=subprocess.PIPE, text=True)
    return [pid for pid in found.stdout.split() if int(pid) != os.getpid()]


def assert_gone(text, seconds=5):
    end = time.monotonic() + seconds
    while processes_with(text):
        assert time.monotonic() < end, "processes are left over"
        time.sleep(0.1)


def fault(processes, rank, place, kind, options, **kwargs):
    script = ROOT / ("ddp_train.py" if processes else "single_gpu_train.py")
    launcher = launch_command(processes) if processes else [sys.executable]
    environment = {"FAULT": f"{rank} {place} {kind}"}
    return run(*launcher, FAULTY, script, *options, code=None, **kwargs, **environment)


PLACES = [
    pytest.param(
        processes,
        rank,
        place,
        kind,
        marks=[]
        if (processes, rank, place, kind) in [(2, 1, "step", "kill"), (2, 0, "save", "exit0")]
        else [pytest.mark.slow],
    )
    for processes, ranks in ((2, (0, 1)), (3, (0, 2)))
    for rank in ranks
    for place in ("data", "step", "save", "evaluate")
    for kind in ("error", "exit0", "kill")
    if processes == 2 or kind != "error"
]


@pytest.mark.parametrize("processes, rank, place, kind", PLACES)
def test_a_rank_dies(mnist, tmp_path, processes, rank, place, kind):
    began = time.monotonic()
    done = fault(processes, rank, place, kind, training(mnist, tmp_path), timeout=60)
    assert done.returncode != 0
    assert time.monotonic() - began < 30 + 15  # the 15 are for starting on a busy machine
    assert_gone(str(tmp_path))
    report = done.stderr[done.stderr.index("faulty.py FAILED") :]  # the launcher's, with @record
    if kind != "exit0":
        assert re.search(rf"rank *: {rank} ", report)
    if kind == "error":
        assert f"the fault of the test in {place}" in done.stderr
    if kind == "kill":
        assert "SIGKILL" in report
    if place != "data":
        assert torch.load(tmp_path / "checkpoint.pth", weights_only=True)["epoch"] == 1
        assert weights(tmp_path)


@pytest.mark.parametrize("processes, rank", [(2, 1), pytest.param(3, 0, marks=pytest.mark.slow)])
def test_a_loss_that_is_nan_on_one_rank_stops_all(mnist, tmp_path, processes, rank):
    done = fault(processes, rank, "step", "nan", training(mnist, tmp_path))
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: the loss is nan in epoch 2 at step 1: try a smaller --lr"]
    assert torch.load(tmp_path / "checkpoint.pth", weights_only=True)["epoch"] == 1


def test_one_rank_that_cannot_read_the_data_decides_for_all(mnist, tmp_path):
    """With auto all take the synthetic digits; with mnist all end, and the reason is told once."""
    probe = tmp_path / "probe.py"
    probe.write_text(f"""
import os, runpy, sys
sys.path.insert(0, {str(ROOT)!r})
import data
real = data.fetch
data.fetch = lambda *args, **kwargs: (
    "the disk of rank 1 is away" if os.environ["RANK"] == "1" else real(*args, **kwargs))
data.draw_digits = lambda count, seed, draw=data.draw_digits: draw(count // 100, seed)
runpy.run_path({str(ROOT / "ddp_train.py")!r}, run_name="__main__")
""")
    shutil.copytree(mnist, tmp_path / "data")
    options = ("--data-dir", tmp_path / "data", *TRAINING, "--epochs", 1)
    done = run(*launch_command(2), probe, *options, "--output-dir", tmp_path / "auto")
    assert "the disk of rank 1 is away" in done.stdout
    assert EPOCH_LINE.findall(done.stdout)[0][1] == "synthetic"
    done = run(*launch_command(2), probe, *options, "--dataset", "mnist", code=1)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "the disk of rank 1 is away" in errors[0]


@pytest.mark.slow
def test_a_download_may_take_longer_than_the_time_limit_of_the_group(mnist, tmp_path):
    probe = tmp_path / "probe.py"
    probe.write_text(f"""
import datetime, os, runpy, sys, time
sys.path.insert(0, {str(ROOT)!r})
import torch.distributed as dist
import data
init, fetch = dist.init_process_group, data.fetch
dist.init_process_group = lambda *args, **kwargs: init(
    *args, timeout=datetime.timedelta(seconds=4), **kwargs)
data.fetch = lambda *args, **kwargs: (
    time.sleep(8 * (os.environ["RANK"] == "0")), fetch(*args, **kwargs))[1]
runpy.run_path({str(ROOT / "ddp_train.py")!r}, run_name="__main__")
""")
    run(*launch_command(2), probe, *training(mnist, tmp_path / "out", "--epochs", "1"))


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_while_saving(mnist, tmp_path, processes):
    done = fault(processes, 0, "save", "kill", training(mnist, tmp_path / "a"))
    assert done.returncode != 0
    assert torch.load(tmp_path / "a" / "checkpoint.pth", weights_only=True)["epoch"] == 1
    assert [path.name for path in (tmp_path / "a").glob("*.part")] == ["model.pth.part"]
    script = "single_gpu_train.py"
    run(script, *training(mnist, tmp_path / "a", "--resume"))
    assert not list((tmp_path / "a").glob("*.part"))
    if processes == 0:
        run(script, *training(mnist, tmp_path / "b"))
        one, other = weights(tmp_path / "a"), weights(tmp_path / "b")
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_disk_full_while_saving(mnist, tmp_path, processes):
    """A limit on the size of files stands for the full disk: writing fails half-way."""
    launcher = launch_command(processes) if processes else [sys.executable]
    script = ROOT / ("ddp_train.py" if processes else "single_gpu_train.py")
    run(*launcher, script, *training(mnist, tmp_path, "--epochs", "1"))
    before = {path.name: path.read_bytes() for path in tmp_path.glob("*.pth")}

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    command = [*launcher, script, *training(mnist, tmp_path, "--resume")]
    done = subprocess.run(
        [str(part) for part in command],
        preexec_fn=limit,
        timeout=60,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"cannot save {tmp_path / 'model.pth'}" in errors[0]
    assert before == {path.name: path.read_bytes() for path in tmp_path.glob("*.pth*")}


@pytest.mark.parametrize(
    "processes, number, place",
    [
        pytest.param(
            processes,
            number,
            place,
            marks=[]
            if (processes, number, place)
            in [(0, signal.SIGINT, "training"), (2, signal.SIGTERM, "evaluate")]
            else [pytest.mark.slow],
        )
        for processes in (0, 2)
        for number in (signal.SIGINT, signal.SIGTERM)
        for place in ("training", "evaluate")
    ],
)
def test_signals(mnist, tmp_path, processes, number, place):
    """To the script and to the launcher: gone within 10 s, no flood, and the run can be resumed."""
    options = training(mnist, tmp_path)
    launcher = launch_command(processes) if processes else [sys.executable]
    script = ROOT / ("ddp_train.py" if processes else "single_gpu_train.py")
    fault_at = "step" if place == "training" else place
    job = start([*launcher, FAULTY, script, *options], FAULT=f"any {fault_at} sleep")
    while "sleeping" not in job.stderr.readline():
        assert job.poll() is None
    began = time.monotonic()
    job.send_signal(number)
    _, errors = job.communicate(timeout=20)
    assert time.monotonic() - began < 10 and job.returncode != 0
    assert_gone(str(tmp_path))
    assert errors.count("Traceback") <= (1 if processes else 0)  # the launcher's own
    assert scalars(tmp_path)["test/accuracy"][0][0] == 1001
    out = run("single_gpu_train.py", *options, "--resume").stdout
    assert [line[0] for line in EPOCH_LINE.findall(out)] == ["2", "3"]
    assert [step for step, _ in scalars(tmp_path)["test/accuracy"]] == [1001, 2002, 3003]


@pytest.mark.parametrize(
    "module",
    ["torch.distributed.run", pytest.param("torch.distributed.launch", marks=pytest.mark.slow)],
)
def test_the_launcher_restarts_a_killed_worker_from_the_checkpoint(mnist, tmp_path, module):
    options = training(mnist, tmp_path / "restarted", "--resume")
    launcher = [sys.executable, "-m", module, "--nproc_per_node=2", "--max_restarts=1",
                f"--master_port={free_port()}"]  # fmt: skip
    done = run(*launcher, FAULTY, ROOT / "ddp_train.py", *options, FAULT="1 step kill")
    assert [line[0] for line in EPOCH_LINE.findall(done.stdout)] == ["1", "2", "3"]
    run_ddp(2, *training(mnist, tmp_path / "undisturbed"))
    one, other = weights(tmp_path / "restarted"), weights(tmp_path / "undisturbed")
    assert all(torch.equal(one[name], other[name]) for name in one)


def two_nodes(
    tmp_path, mnist, processes, shared, hosts=("127.0.0.1", "127.0.0.1"), prefix=((), ())
):
    """Start a launcher for each of two nodes; returns their (output, errors) and folders."""
    port, jobs, folders = free_port(), [], []
    for node in range(2):
        folder = tmp_path / ("shared" if shared else f"node{node}")
        folder.mkdir(exist_ok=True)
        options = training(mnist, folder / "out", "--epochs", "1", "--lr", str(SMALL_LR))
        command = [*prefix[node], *launch_command(processes)[:-1], f"--master_addr={hosts[0]}",
                   f"--master_port={port}", "--nnodes=2", f"--node_rank={node}"]  # fmt: skip
        jobs.append(start([*command, ROOT / "ddp_train.py", *options]))
        folders.append(folder)
    return [finish(job, 90) for job in jobs], [job.returncode for job in jobs], folders


@pytest.mark.parametrize(
    "processes, shared",
    [
        (1, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(1, True, marks=pytest.mark.slow),
        pytest.param(2, True, marks=pytest.mark.slow),
    ],
)
def test_two_nodes(mnist, tmp_path, processes, shared):
    outputs, codes, folders = two_nodes(tmp_path, mnist, processes, shared)
    assert codes == [0, 0], outputs
    assert f"world size {2 * processes}" in outputs[0][0]
    assert not outputs[1][0]  # lines only from global rank 0
    assert len(list((folders[0] / "out").iterdir())) == 3  # one event file
    assert shared or not list(folders[1].iterdir())  # files too
    options = ("--epochs", "1", "--lr", str(SMALL_LR), "--batch-size", str(200 * processes))
    run("single_gpu_train.py", *training(mnist, tmp_path / "single", *options))
    assert distance(weights(tmp_path / "single"), weights(folders[0] / "out")) < 1e-5


@pytest.mark.slow
def test_two_nodes_one_of_which_has_the_checkpoint(mnist, tmp_path):
    """Rank 0 decides: with a checkpoint on node 0 alone all go on from it; on node 1, none does."""
    options = ("--epochs", "1", "--lr", str(SMALL_LR))
    run("single_gpu_train.py", *training(mnist, tmp_path / "node0" / "out", *options))
    shutil.copytree(tmp_path / "node0", tmp_path / "other")
    outputs, codes, _ = two_nodes(tmp_path, mnist, 1, False)
    assert codes != [0, 0] and "--resume" in outputs[0][1]
    shutil.rmtree(tmp_path / "node0")
    (tmp_path / "other").rename(tmp_path / "node1")
    outputs, codes, _ = two_nodes(tmp_path, mnist, 1, False)
    assert codes == [0, 0] and len(EPOCH_LINE.findall(outputs[0][0])) == 1


@pytest.mark.slow
def test_two_nodes_with_addresses_of_their_own(mnist, tmp_path):
    """Two network namespaces, joined by a virtual cable, stand for two machines."""
    names = [f"{tmp_path.parent.name[-6:]}{node}".replace("-", "") for node in "ab"]

    def ip(*words):
        return subprocess.run(["ip", *words], stderr=subprocess.PIPE).returncode

    if shutil.which("ip") is None or any(ip("netns", "add", name) for name in names):
        pytest.skip("network namespaces need root and the program ip")
    try:
        assert not ip("link", "add", "cable0", "netns", names[0], "type", "veth",
                      "peer", "name", "cable1", "netns", names[1])  # fmt: skip
        for node, name in enumerate(names):
            assert not ip(
                "-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", f"cable{node}"
            )
            assert not ip("-n", name, "link", "set", f"cable{node}", "up")
            assert not ip("-n", name, "link", "set", "lo", "up")
        prefix = [("ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME=cable{node}")
                  for node, name in enumerate(names)]  # fmt: skip
        outputs, codes, _ = two_nodes(tmp_path, mnist, 2, False, ("10.77.0.1", None), prefix)
        assert codes == [0, 0], outputs
        assert "world size 4" in outputs[0][0]
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.slow
@pytest.mark.parametrize("ports", ["same", "two", "none"])
def test_two_jobs_on_one_machine(mnist, tmp_path, ports):
    """With the same port the second job ends soon and says why; the first is unharmed.

    So it is, in older versions, where none is given; newer ones then choose two.
    """
    first_port = f"--master_port={free_port()}"
    second_port = first_port if ports == "same" else f"--master_port={free_port()}"
    if ports == "none":
        first_port = second_port = "--nnodes=1"
    options = training(mnist, tmp_path / "first", "--epochs", "60")  # longer than the second lasts
    command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"]
    first = start([*command, first_port, ROOT / "ddp_train.py", *options])
    assert first.stdout.readline().startswith("ddp_train.py")
    second = run(*command, second_port, ROOT / "ddp_train.py",
                 *training(mnist, tmp_path / "second"), code=None, timeout=60)  # fmt: skip
    out, errors = first.communicate(timeout=60)
    assert first.returncode == 0, errors
    assert len(EPOCH_LINE.findall(out)) == 60
    if ports == "two" or ports == "none" and second.returncode == 0:
        assert second.returncode == 0 and len(EPOCH_LINE.findall(second.stdout)) == 3
    else:
        assert second.returncode != 0 and re.search("address already in use", second.stderr, re.I)


def wrong_environments():
    complete = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555"}
    for name in complete:
        yield {key: value for key, value in complete.items() if key != name}, f"{name}=(not set)"
    for name, value in (("MASTER_ADDR", "no.such.host.invalid"), ("WORLD_SIZE", "two"),
                        ("RANK", "1"), ("MASTER_PORT", "99999999")):  # fmt: skip
        yield {**complete, name: value}, f"{name}={value}"
    yield {**complete, "MASTER_PORT": "0"}, "MASTER_PORT=0"
    yield {"GLOO_SOCKET_IFNAME": "nothing0"}, "GLOO_SOCKET_IFNAME=nothing0"


@pytest.mark.parametrize(
    "environment, named", list(wrong_environments()), ids=lambda value: str(value)[:40]
)
def test_wrong_environments_are_named(monkeypatch, environment, named):
    import model

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        model.find_world()
    assert named in end.value.code and "\n" not in end.value.code


def test_the_environment_of_a_scheduler_is_enough(mnist, tmp_path):
    """Started without a launcher, but with the variables set: two processes by hand."""
    jobs = []
    port = str(free_port())
    for rank in "01":
        here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        options = training(mnist, tmp_path, "--epochs", "1")
        command = [sys.executable, ROOT / "ddp_train.py", *options]
        jobs.append(start(command, RANK=rank, LOCAL_RANK=rank, **here))
    outputs = [finish(job)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0]
    assert "until all 2 processes are there" in outputs[0] and not outputs[1]


@pytest.mark.slow
def test_a_host_name_that_does_not_resolve_does_not_matter(mnist, tmp_path):
    if subprocess.run(["unshare", "--uts", "true"], stderr=subprocess.PIPE).returncode:
        pytest.skip("giving the host another name needs root")
    command = [*launch_command(2), ROOT / "ddp_train.py", *training(mnist, tmp_path)]
    words = " ".join(str(part) for part in command)
    run("unshare", "--uts", "sh", "-c", f"hostname no-such-host-here; {words}")


def test_read_only_data_and_checkout(mnist, tmp_path):
    """A mount that cannot be written: nothing is needed there, once the data is there."""
    script = f"""
    mount --bind {ROOT} {ROOT} && mount -o remount,ro,bind {ROOT} &&
    mount --bind {mnist} {mnist} && mount -o remount,ro,bind {mnist} || exit 99
    touch {ROOT}/x {mnist}/x 2>/dev/null && exit 98
    cd {tmp_path} && exec {sys.executable} {ROOT}/single_gpu_train.py --data-dir {mnist} --epochs 1
    """
    if shutil.which("unshare") is None:
        pytest.skip("the program unshare is missing")
    done = run("unshare", "--mount", "sh", "-c", script, code=None)
    if done.returncode in (1, 99) and "unshare" in done.stderr + done.stdout:
        pytest.skip("mounting needs root")
    assert done.returncode == 0, done.stderr
    assert len(EPOCH_LINE.findall(done.stdout)) == 1


@pytest.mark.parametrize("script", ["single_gpu_train.py", "ddp_train.py"])
def test_another_folder_with_spaces_and_letters_of_all_kinds(mnist, tmp_path, script):
    home = tmp_path / "héllo wörld 数据"
    home.mkdir()
    for name in (script, "model.py", "data.py"):
        shutil.copy(ROOT / name, home)
    shutil.copytree(mnist, home / "my data")
    launcher = launch_command(2) if script == "ddp_train.py" else [sys.executable]
    run(*launcher, home / script, "--data-dir", "my data", "--output-dir", "out put 结果",
        "--epochs", 1, "--batch-size", 500, cwd=home)  # fmt: skip
    assert weights(home / "out put 结果")


@pytest.mark.slow
def test_torchrun_with_warnings_as_errors_and_without_libuv(mnist, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2",
               f"--master_port={free_port()}", ROOT / "ddp_train.py"]  # fmt: skip
    for number, environment in enumerate(({"PYTHONWARNINGS": "error"}, {"USE_LIBUV": "0"})):
        run(*command, *training(mnist, tmp_path / str(number)), **environment)


@pytest.mark.slow
def test_only_one_image(tmp_path):
    data_dir = write_mnist(tmp_path / "data", 1, 1)
    done = run_ddp(2, *training(data_dir, tmp_path / "out"))
    assert "(1/1)" in done.stdout or "(0/1)" in done.stdout


def by_hand(ranks):
    """Start ddp_train.py once for each list of options, as ranks of one world; their outputs."""
    port, jobs = str(free_port()), []
    for rank, options in enumerate(ranks):
        here = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(ranks))}
        command = [sys.executable, ROOT / "ddp_train.py", *options]
        jobs.append(start(command, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, **here))
    outputs = [finish(job) for job in jobs]
    return outputs, [job.returncode for job in jobs]


@pytest.mark.parametrize("option, value", [("--lr", "0.01"), ("--seed", "7"), ("--epochs", "2")])
def test_ranks_with_other_options_stop_all(mnist, tmp_path, option, value):
    options = training(mnist, tmp_path / "out")
    outputs, codes = by_hand([options, [*options, option, value]])
    assert codes == [1, 1] and not (tmp_path / "out").exists()
    assert f"error: {option[2:]} is {value} on rank 1, but " in outputs[0][1]


def test_a_second_run_in_the_same_folder_is_refused(mnist, tmp_path):
    """The first is asleep in its second epoch; killed, it frees the folder."""
    options = training(mnist, tmp_path / "out", "--resume")
    first = start([sys.executable, FAULTY, ROOT / "single_gpu_train.py", *options],
                  FAULT="any step sleep")  # fmt: skip
    while "sleeping" not in first.stderr.readline():
        assert first.poll() is None
    second = run("single_gpu_train.py", *options, code=1)
    assert second.stderr.startswith("error: another run is writing to")
    first.kill()
    first.communicate(timeout=10)
    assert len(EPOCH_LINE.findall(run("single_gpu_train.py", *options).stdout)) == 2


def test_a_file_of_the_user_in_the_output_folder_stays(mnist, tmp_path):
    (tmp_path / "probe").write_text("precious")
    run("single_gpu_train.py", *training(mnist, tmp_path, "--epochs", "1"))
    assert (tmp_path / "probe").read_text() == "precious"


def test_a_model_without_its_checkpoint_is_not_overwritten(mnist, tmp_path):
    (tmp_path / "model.pth").write_text("precious")
    options = training(mnist, tmp_path, "--epochs", "1")
    error = run("single_gpu_train.py", *options, code=1).stderr
    assert error.startswith(f"error: {tmp_path / 'model.pth'} exists, but no checkpoint: ")
    assert (tmp_path / "model.pth").read_text() == "precious"
    run("single_gpu_train.py", *options, "--resume")
    assert weights(tmp_path) and (tmp_path / "model.pth.old").read_text() == "precious"


def test_a_rank_started_by_hand_says_what_is_wrong_with_its_options():
    """Under a launcher local rank 0 says it for all; here that one may have other options."""
    here = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = run("ddp_train.py", "--epochs", 0, code=1, MASTER_PORT="29555", **here)
    assert done.stderr.count("--epochs must be from 1") == 1
