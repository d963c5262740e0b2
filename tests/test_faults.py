"""Each fault ends soon, says what it was, leaves earlier results complete, and can be resumed."""

import re
import shutil
import signal
import subprocess
import time

import pytest
from conftest import (
    FAULTY, ROOT, assert_gone, checkpoint, distance, epochs_of, equal, error_of, finish,
    launch_command, options_of, probe, run, scalars, slow, start, train, train_command, two_nodes,
    weights,
)  # fmt: skip

TRAINING = {"epochs": 3, "batch_size": 100, "log_interval": 1}


def strategy(processes):
    return "ddp" if processes else "single"


FAULTS = [
    (processes, rank, place, kind)
    for processes, ranks in ((2, (0, 1)), (3, (0, 2)))
    for rank in ranks
    for place in ("data", "step", "save", "evaluate")
    for kind in ("error", "exit0", "kill")
    if processes == 2 or kind != "error"
]
QUICK = [(2, 1, "step", "kill"), (3, 0, "save", "exit0")]


@pytest.mark.parametrize(
    "processes, rank, place, kind", [one if one in QUICK else slow(*one) for one in FAULTS]
)
def test_a_rank_dies(mnist, tmp_path, processes, rank, place, kind):
    began = time.monotonic()
    fault = f"{rank} {place} {kind}"
    done = train("ddp", mnist, tmp_path, None, processes=processes, fault=fault, **TRAINING)
    assert done.returncode != 0
    assert time.monotonic() - began < 30 + 15  # the 15 are for starting on a busy machine
    assert_gone(str(tmp_path))
    assert "faulty.py FAILED" in done.stderr, done.stderr
    report = done.stderr[done.stderr.index("faulty.py FAILED") :]  # the launcher's
    if kind != "exit0":
        assert re.search(rf"rank *: {rank} ", report)
    if (kind, place, rank) == ("error", "save", 0):
        assert "the fault of the test in save" in error_of(done)
    elif kind == "error":
        # The launcher dates failures to the second: of two within one, it calls either the root.
        assert f"the fault of the test in {place}" in report
        assert f"RuntimeError: the fault of the test in {place}\n" in done.stderr
    if kind == "kill":
        assert "SIGKILL" in report
    if place != "data":
        assert checkpoint(tmp_path)["epoch"] >= 1 and weights(tmp_path)


@pytest.mark.parametrize("processes, rank", [(2, 1), slow(3, 0)])
def test_a_loss_that_is_nan_on_one_rank_stops_all(mnist, tmp_path, processes, rank):
    fault = f"{rank} step nan"
    done = train("ddp", mnist, tmp_path, 1, processes=processes, fault=fault, **TRAINING)
    assert error_of(done) == "error: the loss is nan in epoch 2: try a smaller --lr"
    assert done.stderr.count("Traceback") == 1  # the launcher's own
    assert checkpoint(tmp_path)["epoch"] == 1


@pytest.mark.parametrize("processes", [None, slow(2)])
def test_killed_while_saving(mnist, tmp_path, processes):
    options = {"processes": processes, **TRAINING}
    train(strategy(processes), mnist, tmp_path / "a", None, fault="0 save kill", **options)
    assert checkpoint(tmp_path / "a")["epoch"] == 1
    assert [path.name for path in (tmp_path / "a").glob("*.part")] == ["model.pth.part"]
    train("single", mnist, tmp_path / "a", resume=True, **TRAINING)
    assert not list((tmp_path / "a").glob("*.part"))
    if processes is None:
        train("single", mnist, tmp_path / "b", **TRAINING)
        assert equal(weights(tmp_path / "a"), weights(tmp_path / "b"))


SIGNALS = [
    slow(processes, number, place)
    for processes in (None, 2)
    for number in (signal.SIGINT, signal.SIGTERM)
    for place in ("step", "evaluate")
]
SIGNALS[0], SIGNALS[-1] = SIGNALS[0].values, SIGNALS[-1].values  # these are quick


@pytest.mark.parametrize("processes, number, place", SIGNALS)
def test_signals(mnist, tmp_path, processes, number, place):
    """To the script and to the launcher: gone within 10 s, no flood, and the run can be resumed."""
    fault, name = f"any {place} sleep", strategy(processes)
    command = train_command(name, mnist, tmp_path, processes, fault=fault, **TRAINING)
    job = start(command, FAULT=fault)
    for _ in range(processes or 1):  # rank 0 saves while the others are in the next epoch already
        while "sleeping" not in job.stderr.readline():
            assert job.poll() is None
    began = time.monotonic()
    job.send_signal(number)
    _, errors = job.communicate(timeout=20)
    assert time.monotonic() - began < 10 and job.returncode != 0
    assert_gone(str(tmp_path))
    assert errors.count("Traceback") <= (1 if processes else 0)  # the launcher's own
    if number == signal.SIGINT:
        assert errors.count("stopped: --resume continues after the last complete epoch") == 1
    assert scalars(tmp_path)["test/accuracy"][0][0] == 1001
    out = train("single", mnist, tmp_path, resume=True, **TRAINING).stdout
    assert [line[0] for line in epochs_of(out)] == ["2", "3"]
    assert [step for step, _ in scalars(tmp_path)["test/accuracy"]] == [1001, 2002, 3003]


@pytest.mark.parametrize("module", ["torch.distributed.run", slow("torch.distributed.launch")])
def test_the_launcher_restarts_a_killed_worker_from_the_checkpoint(mnist, tmp_path, module):
    launcher = launch_command(2, "--max_restarts=1", module=module)
    words = options_of(mnist, tmp_path / "restarted", {"resume": True, **TRAINING})
    done = run(*launcher, FAULTY, ROOT / "ddp_train.py", *words, FAULT="1 step kill")
    assert [line[0] for line in epochs_of(done.stdout)] == ["1", "2", "3"]
    train("ddp", mnist, tmp_path / "undisturbed", processes=2, **TRAINING)
    assert equal(weights(tmp_path / "restarted"), weights(tmp_path / "undisturbed"))


@pytest.mark.parametrize("processes, shared", [(1, False), slow(2, False), slow(2, True)])
def test_two_nodes(mnist, tmp_path, double, processes, shared):
    folders = [tmp_path / ("shared" if shared else f"node{node}") for node in range(2)]
    script = probe(tmp_path / "probe.py", "import torch; torch.set_default_dtype(torch.float64)")
    options = {**TRAINING, "epochs": 1}
    outputs, codes = two_nodes(folders, mnist, processes, script=script, **options)
    assert codes == [0, 0], outputs
    assert f"world size {2 * processes}" in outputs[0][0]
    assert not outputs[1][0]  # lines only from global rank 0
    assert len(list((folders[0] / "out").iterdir())) == 3  # one event file
    assert shared or not list(folders[1].iterdir())  # files too
    options["batch_size"] = 200 * processes
    train("single", mnist, tmp_path / "single", **options)
    assert distance(weights(tmp_path / "single"), weights(folders[0] / "out")) < 1e-9


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
            address = f"10.77.0.{node + 1}/24"
            assert not ip("-n", name, "addr", "add", address, "dev", f"cable{node}")
            assert not ip("-n", name, "link", "set", f"cable{node}", "up")
            assert not ip("-n", name, "link", "set", "lo", "up")
        prefix = [["ip", "netns", "exec", name, "env", f"GLOO_SOCKET_IFNAME=cable{node}"]
                  for node, name in enumerate(names)]  # fmt: skip
        folders = [tmp_path / "node0", tmp_path / "node1"]
        outputs, codes = two_nodes(folders, mnist, 2, ("10.77.0.1", None), prefix, epochs=1)
        assert codes == [0, 0], outputs
        assert "world size 4" in outputs[0][0]
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.slow
def test_a_host_name_that_does_not_resolve_does_not_matter(mnist, tmp_path):
    if subprocess.run(["unshare", "--uts", "true"], stderr=subprocess.PIPE).returncode:
        pytest.skip("giving the host another name needs root")
    words = " ".join(map(str, train_command("ddp", mnist, tmp_path, 2, **TRAINING)))
    run("unshare", "--uts", "sh", "-c", f"hostname no-such-host-here; {words}")


def test_a_rank_started_by_hand_says_what_is_wrong_with_its_options():
    """Under a launcher one rank says it for all; here it may be the only one."""
    here = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    done = run("ddp_train.py", "--epochs", 0, code=1, MASTER_PORT="29555", **here)
    assert "--epochs" in error_of(done)


@pytest.mark.slow
def test_the_end_of_a_run_is_clean_every_time(mnist, tmp_path):
    """Threads of gloo must not abort or hang where the work is done."""
    for number in range(20):
        words = options_of(mnist, tmp_path / str(number), {"epochs": 1, "batch_size": 100})
        launcher = launch_command(3, module="torch.distributed.run")
        job = start([*launcher, ROOT / "ddp_train.py", *words], PYTHONWARNINGS="ignore")
        out, errors = finish(job, 60)
        assert job.returncode == 0 and "terminate called" not in errors, errors
        assert out.endswith("model.pth\n")
