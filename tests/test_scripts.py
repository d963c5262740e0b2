"""What a user sees: options, launchers, printed lines, files, and the errors of a wrong start."""

import importlib
import re
import shutil
import sys

import pytest
import torch
from conftest import EPOCH_LINE, ROOT, SCRIPTS, launch_command, run, run_ddp, scalars, weights

# PyTorch before 2.1 warns about its own import of TensorBoard and its own loading of tensors.
OLD = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 1)
QUICK = ("--epochs", 1, "--batch-size", 500, "--log-interval", 1)


def help_of(script):
    text = run(script, "--help", COLUMNS="200").stdout
    return dict(re.findall(r"^  (--?[\w-]+(?:, --[\w-]+)?).*?(?: |\n)  +(.*)$", text, re.M))


def test_help_is_the_same_text_in_all_scripts():
    single, parallel, ddp = (help_of(script) for script in SCRIPTS)
    assert {
        "--epochs",
        "--batch-size",
        "--lr",
        "--seed",
        "--dataset",
        "--data-dir",
        "--output-dir",
        "--resume",
        "--device",
        "--log-interval",
    } <= single.keys()
    assert single == parallel
    own = [name for name in ddp if "local" in name]
    assert own and single == {name: text for name, text in ddp.items() if name not in own}


def test_defaults(monkeypatch):
    for script in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [script])
        args = vars(importlib.import_module(script[:-3]).parse_args())
        assert args.pop("local_rank", -1) == -1
        assert args == {
            "epochs": 3,
            "batch_size": 64,
            "lr": 0.1,
            "seed": 42,
            "dataset": "auto",
            "data_dir": "data",
            "output_dir": None,
            "resume": False,
            "device": "auto",
            "log_interval": 50,
        }


LAUNCHERS = {
    "launch": lambda: launch_command(2),
    "launch --use_env": lambda: launch_command(2, "--use_env"),
    "torchrun": lambda: [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
    ],
    "plain": lambda: [sys.executable],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_launchers(launcher, mnist, tmp_path):
    done = run(
        *LAUNCHERS[launcher](),
        ROOT / "ddp_train.py",
        "--data-dir",
        mnist,
        *QUICK,
        "--output-dir",
        tmp_path,
    )
    size = 1 if launcher == "plain" else 2
    assert done.stdout.startswith(
        f"ddp_train.py: device cpu, backend gloo, world size {size}, mnist (1001 + 201 images), "
        f"lr 0.1, global batch {500 * size} = 500 x {size}\n"
    )
    assert len(EPOCH_LINE.findall(done.stdout)) == 1  # rank 0 alone speaks
    assert done.stdout.endswith(f"the model is in {tmp_path / 'model.pth'}\n")


@pytest.mark.parametrize(
    "spelling", [["--local_rank=1"], ["--local-rank=1"], ["--local-rank", "1"]]
)
def test_both_spellings_of_the_local_rank_and_the_environment_wins(monkeypatch, spelling):
    module = importlib.import_module("ddp_train")
    monkeypatch.setattr(sys, "argv", ["ddp_train.py", *spelling])
    assert module.parse_args().local_rank == 1
    seen = []

    def get_device(name, local_rank):
        seen.append(local_rank)
        raise SystemExit

    monkeypatch.setattr(module, "get_device", get_device)
    for environment in (None, "3"):
        if environment:
            monkeypatch.setenv("LOCAL_RANK", environment)
        with pytest.raises(SystemExit):
            module.main()
    assert seen == [1, 3]


@pytest.mark.parametrize("script", SCRIPTS)
def test_what_a_run_prints_and_leaves(script, mnist, tmp_path):
    run_env = dict(cwd=tmp_path, PYTHONWARNINGS="default" if OLD else "error")
    done = run(
        script,
        "--data-dir",
        mnist,
        "--epochs",
        2,
        "--batch-size",
        100,
        "--log-interval",
        4,
        **run_env,
    )
    lines = done.stdout.splitlines()
    assert re.fullmatch(
        rf"{script}: device cpu, backend (none|gloo), world size 1, "
        r"mnist \(1001 \+ 201 images\), lr 0.1, global batch 100 = 100 x 1",
        lines[0],
    )
    steps = [
        re.fullmatch(r"epoch (\d)/2 step (\d+)/11 loss \d\.\d{4} \d+ images/s \d+ s left", line)
        for line in lines[1:4]
    ]
    assert [match.groups() for match in steps] == [("1", "4"), ("1", "8"), ("1", "11")]
    assert [line[:2] for line in EPOCH_LINE.findall(done.stdout)] == [
        ("1", "mnist"),
        ("2", "mnist"),
    ]
    assert OLD or not done.stderr

    (folder,) = (tmp_path / "runs").iterdir()
    assert re.fullmatch(r"\d{8}-\d{6}-\d{6}_" + script[:-3], folder.name)
    assert lines[-1] == f"the model is in runs/{folder.name}/model.pth"
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "checkpoint.pth" and names[2] == "model.pth" and len(names) == 3
    assert names[1].startswith("events.out.tfevents")

    state = weights(folder)
    model = importlib.import_module("model").Net()
    model.load_state_dict(state)
    assert all(value.device.type == "cpu" for value in state.values())
    checkpoint = torch.load(folder / "checkpoint.pth", weights_only=True)
    assert checkpoint["epoch"] == 2 and checkpoint["step"] == 22 and checkpoint["schedule"] == 1
    assert checkpoint["options"]["dataset"] == "mnist"
    assert checkpoint.keys() == {"model", "optimizer", "schedule", "epoch", "step", "options"}
    assert all(torch.equal(checkpoint["model"][name], state[name]) for name in state)
    curves = scalars(folder)
    assert [step for step, _ in curves["test/accuracy"]] == [1001, 2002]
    assert [step for step, _ in curves["train/lr"]] == [400, 800, 1001, 1401, 1801, 2002]


def error_of(done):
    """The one line that says what is wrong (the launcher adds its own report below)."""
    lines = [line for line in done.stderr.splitlines() if re.match(r"(\S+: )?error: ", line)]
    assert len(lines) == 1, done.stderr
    return lines[0]


BAD_OPTIONS = [
    ("--epochs", "0"),
    ("--batch-size", "-3"),
    ("--lr", "nan"),
    ("--lr", "inf"),
    ("--lr", "0"),
    ("--seed", "-1"),
    ("--log-interval", "0"),
    ("--epochs", "1e3"),
    ("--device", "tpu"),
    ("--dataset", "cifar"),
    ("--resume",),
    ("--batch-size", "1" * 30),
    ("--nproc_per_node=2",),
]


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=" ".join)
def test_bad_options(options, monkeypatch, capsys):
    for script in SCRIPTS:
        monkeypatch.setattr(sys, "argv", [script, *options])
        with pytest.raises(SystemExit) as end:
            importlib.import_module(script[:-3]).main()
        assert end.value.code == 2
        assert options[0].split("=")[0] in capsys.readouterr().err


def test_bad_options_are_said_once_not_once_a_rank(tmp_path):
    done = run_ddp(2, "--epochs", "0", code=None, cwd=tmp_path)
    assert done.returncode != 0
    assert "--epochs must be from 1" in error_of(done)
    assert not list(tmp_path.iterdir())


def test_a_finished_run_is_left_alone_and_a_longer_one_goes_on(run_here, mnist, tmp_path):
    options = ("--data-dir", mnist, *QUICK, "--output-dir", tmp_path)
    run_here("single_gpu_train.py", *options)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    out = run_here("data_parallel_train.py", *options, "--resume")
    assert out == f"{tmp_path} is finished: 1 of 1 epochs are done\n"
    ddp = run("ddp_train.py", *options, "--resume")
    assert ddp.stdout == out and (OLD or not ddp.stderr)
    run_here("ddp_train.py", *options, "--resume")
    assert not torch.distributed.is_initialized()  # a process that ends with gloo's threads aborts
    assert before == {path: path.read_bytes() for path in tmp_path.iterdir()}
    out = run_here("single_gpu_train.py", *options, "--epochs", 2, "--resume")
    assert [line[0] for line in EPOCH_LINE.findall(out)] == ["2"]


def test_resume_starts_where_there_is_nothing(run_here, mnist, tmp_path):
    out = run_here(
        "single_gpu_train.py",
        "--data-dir",
        mnist,
        *QUICK,
        "--output-dir",
        tmp_path / "new",
        "--resume",
    )
    assert len(EPOCH_LINE.findall(out)) == 1


@pytest.fixture(scope="module")
def finished(mnist, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    run("single_gpu_train.py", "--data-dir", mnist, *QUICK, "--output-dir", folder)
    return folder


def refusal(run_here, capsys, script, *options):
    with pytest.raises(SystemExit) as end:
        run_here(script, *options)
    assert end.value.code.startswith("error: ") and "\n" not in end.value.code
    return end.value.code


@pytest.mark.parametrize("script", SCRIPTS[:2])
def test_checkpoints_are_not_overwritten(run_here, capsys, script, mnist, finished):
    before = {path: path.read_bytes() for path in finished.iterdir()}
    options = ("--data-dir", mnist, *QUICK, "--output-dir", finished)
    assert "--resume" in refusal(run_here, capsys, script, *options)
    assert before == {path: path.read_bytes() for path in finished.iterdir()}


def test_ddp_refuses_once_for_all_ranks(mnist, finished):
    done = run_ddp(2, "--data-dir", mnist, *QUICK, "--output-dir", finished, code=None)
    assert done.returncode != 0
    assert "checkpoint.pth exists" in error_of(done)


@pytest.mark.parametrize(
    "what, reason",
    [
        ("cut", "cut off"),
        ("damaged", "cut off"),
        ("no epoch", "cut off"),
        ("epoch in words", "cut off"),
        ("no optimizer", "cut off"),
        ("other momenta", "another model"),
        ("damaged", "cut off"),
        ("no epoch", "cut off"),
        ("epoch in words", "cut off"),
        ("no optimizer", "cut off"),
        ("other momenta", "another model"),
        ("empty", "cut off"),
        ("text", "cut off"),
        ("model.pth", "cut off"),
        ("other model", "another model"),
        ("other dataset", "dataset synthetic"),
        ("other seed", "seed 7"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(
    run_here, capsys, mnist, finished, tmp_path, what, reason
):
    path = tmp_path / "checkpoint.pth"
    state = torch.load(finished / "checkpoint.pth", weights_only=True)
    content = (finished / "checkpoint.pth").read_bytes()
    if what == "model.pth":
        shutil.copy(finished / "model.pth", path)
    elif what.startswith(("other", "no ", "epoch")):
        if what == "other model":
            state["model"]["fc2.weight"] = torch.zeros(10, 3)
        elif what == "other momenta":
            state["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(3)
        elif what.startswith("no "):
            del state[what[3:]]
        elif what == "epoch in words":
            state["epoch"] = "one"
        else:
            state["options"].update(
                {"other dataset": {"dataset": "synthetic"}, "other seed": {"seed": 7}}[what]
            )
        torch.save(state, path)
    else:
        path.write_bytes(
            {
                "cut": content[: len(content) // 2],
                "damaged": content[:200_000] + bytes(4096) + content[204_096:],
                "empty": b"",
                "text": b"hello",
            }[what]
        )
    before = path.read_bytes()
    error = refusal(
        run_here,
        capsys,
        "single_gpu_train.py",
        "--data-dir",
        mnist,
        *QUICK,
        "--epochs",
        5,
        "--output-dir",
        tmp_path,
        "--resume",
    )
    assert str(path) in error and reason in error
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == [
        "checkpoint.pth"
    ]


def test_output_that_cannot_be_written(run_here, capsys, mnist, tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        error = refusal(
            run_here,
            capsys,
            "single_gpu_train.py",
            "--data-dir",
            mnist,
            *QUICK,
            "--output-dir",
            folder,
        )
        assert str(folder) in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
@pytest.mark.parametrize(
    "script, device",
    [(SCRIPTS[0], "cuda"), (SCRIPTS[1], "cuda"), (SCRIPTS[2], "cuda"), (SCRIPTS[0], "mps")],
)
def test_a_gpu_that_is_not_there(run_here, capsys, script, device):
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("there is such a GPU here")
    error = refusal(run_here, capsys, script, "--device", device)
    assert f"--device {device}" in error and "--device cpu" in error


def test_more_processes_than_gpus(monkeypatch, capsys):
    """Both numbers and the way out are named; auto goes on with the CPU, cuda does not."""
    model = importlib.import_module("model")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert model.get_device("auto", 0) == torch.device("cpu")
    warning = capsys.readouterr().out
    assert "4 processes" in warning and "3 GPUs" in warning
    with pytest.raises(SystemExit) as end:
        model.get_device("cuda", 0)
    assert all(part in end.value.code for part in ("4 processes", "3 GPUs", "--device cpu"))


def test_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(
    run_here, capsys, monkeypatch, mnist, finished, tmp_path
):
    shutil.copytree(finished, tmp_path / "run")
    before = (tmp_path / "run" / "checkpoint.pth").read_bytes()
    forward, calls = importlib.import_module("model").Net.forward, []

    def broken(net, inputs, labels=None):
        calls.append(1)
        return forward(net, inputs, labels) * (float("nan") if len(calls) >= 2 else 1)

    monkeypatch.setattr("model.Net.forward", broken)
    error = refusal(
        run_here,
        capsys,
        "single_gpu_train.py",
        "--data-dir",
        mnist,
        "--epochs",
        2,
        "--batch-size",
        500,
        "--output-dir",
        tmp_path / "run",
        "--resume",
    )
    assert "nan in epoch 2 at step 2" in error
    assert (tmp_path / "run" / "checkpoint.pth").read_bytes() == before


def test_saving_is_atomic_and_leaves_nothing_behind(monkeypatch, tmp_path):
    model = importlib.import_module("model")
    path = tmp_path / "model.pth"
    model.save({"a": torch.ones(3)}, path)
    before = path.read_bytes()

    class Full:
        """A file on a disk that is full after 10 bytes."""

        def __init__(self, path, mode):
            self.file = real_open(path, mode)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            self.file.write(bytes(data)[:10])
            raise OSError(28, "No space left on device")

        def flush(self):
            self.file.flush()

        def fileno(self):
            return self.file.fileno()

    real_open = open
    monkeypatch.setattr("builtins.open", Full)
    with pytest.raises(SystemExit) as end:
        model.save({"a": torch.zeros(3)}, path)
    assert str(path) in end.value.code and "No space left" in end.value.code
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["model.pth"]


def test_saving_changes_nothing_in_the_live_model(monkeypatch, run_here, mnist, tmp_path):
    """The state dict is read; the model stays on its device and keeps its layout."""
    module = importlib.import_module("single_gpu_train")
    nets = []
    monkeypatch.setattr(module, "load", lambda checkpoint, net, optimizer: nets.append(net) or 0)
    run_here("single_gpu_train.py", "--data-dir", mnist, *QUICK, "--output-dir", tmp_path)
    assert nets[0].conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert nets[0].conv2.weight.requires_grad


def test_two_runs_started_in_the_same_second_do_not_share_a_folder(
    run_here, mnist, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for _ in range(3):
        run_here("single_gpu_train.py", "--data-dir", mnist, *QUICK)
    assert len(list((tmp_path / "runs").iterdir())) == 3
