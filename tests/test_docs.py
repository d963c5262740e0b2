"""The READMEs cannot go stale: what they show is compared, parsed or run.

    python tests/test_docs.py --update  # writes today's diffs between the scripts into them
"""

import ast
import difflib
import importlib.util
import io
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import zipfile
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from conftest import ROOT, SCRIPTS, free_port, launch_command, run, start, write_mnist
from test_siblings import diff

READMES = ("README.md", "README.zh-CN.md")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(text):
    """[(language, content)] of the fenced blocks."""
    return BLOCK.findall(text)


def without_blocks(text):
    return BLOCK.sub("", text)


def headings(text):
    return re.findall(r"^(#+) (.*)$", without_blocks(text), re.M)


def tables(text):
    """The tables as lists of rows, which are lists of cells."""
    found = re.findall(r"(?:^\|.*\n)+", without_blocks(text) + "\n", re.M)
    return [
        [row.strip("|").split("|") for row in table.splitlines() if not row.startswith("| ---")]
        for table in found
    ]


def code_in(text):
    return re.findall(r"`([^`\n]+)`", text)


# The diffs


def diff_section(text, script):
    """(start, end) of the section that shows the diff of this script."""
    start = re.search(rf"^### .*`{script}`.*$", text, re.M).end()
    return start, start + re.search(r"^##+ ", text[start:], re.M).start()


def shown_diff(text, script):
    start, end = diff_section(text, script)
    shown = [body for language, body in blocks(text[start:end]) if language == "diff"]
    return "".join(shown).splitlines()


@pytest.mark.parametrize("name", READMES)
@pytest.mark.parametrize("script", SCRIPTS[1:])
def test_the_diffs_are_the_real_ones(name, script):
    """A script has changed? python tests/test_docs.py --update, then read the reasons again."""
    assert shown_diff(read(name), script) == diff(script)


def update():
    """Write today's diffs into the READMEs; a hunk that grew or shrank is left to its author."""
    for name in READMES:
        text = read(name)
        for script in SCRIPTS[1:]:
            old, new = shown_diff(text, script), diff(script)
            lines = list(old)
            matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
            for kind, a, b, c, d in matcher.get_opcodes():
                if b - a == d - c:
                    lines[a:b] = new[c:d]
                elif kind != "equal":
                    print(f"{name}, by hand:", *old[a:b], "  becomes", *new[c:d], sep="\n")
            rest, (start, end) = iter(lines), diff_section(text, script)
            section = re.sub(
                r"(?<=^```diff\n).*?(?=^```$)",
                lambda match: "".join(f"{next(rest)}\n" for _ in match[0].splitlines()),
                text[start:end],
                flags=re.M | re.S,
            )
            text = text[:start] + section + text[end:]
        (ROOT / name).write_text(text, encoding="utf-8")


# The two languages, and the links


def test_the_languages_correspond():
    english, chinese = (read(name) for name in READMES)
    levels = [[level for level, _ in headings(text)] for text in (english, chinese)]
    assert levels[0] == levels[1]
    pairs = list(zip(blocks(english), blocks(chinese)))
    assert len(blocks(english)) == len(blocks(chinese))
    for (language, one), (other_language, other) in pairs:
        assert language == other_language
        if language == "python":
            assert ast.dump(ast.parse(one)) == ast.dump(ast.parse(other))
        else:
            assert one == other
    one, other = tables(english), tables(chinese)
    assert [[len(row) for row in table] for table in one] == [
        [len(row) for row in table] for table in other
    ]
    for rows in zip(sum(one, []), sum(other, [])):
        codes = [[code_in(cell) for cell in row] for row in rows]
        assert codes[0] == codes[1]


def test_the_commands_for_newcomers_are_marked():
    for name in READMES:
        for command in ("run", "test"):
            assert read(name).count(f"<!-- command: {command} -->\n```bash\n") == 1


def anchors(text):
    """What GitHub makes of the headings."""
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for _, title in headings(text)]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("name", READMES)
def test_links_resolve(name):
    targets = re.findall(r"\]\(([^)\s]+)\)", without_blocks(read(name)))
    assert {"docs/tensorboard.png", "docs/digits.png"} <= set(targets)
    assert [other for other in READMES if other in targets] == [
        other for other in READMES if other != name
    ]
    for target in targets:
        if not re.match(r"\w+://", target):
            path, _, anchor = target.partition("#")
            assert (ROOT / path).exists() or not path, f"{name}: {path} is missing"
            assert not anchor or anchor in anchors(read(path or name)), f"{name}: {target}"


# The Python blocks

DRIVER = """
import contextlib, io, os, runpy, sys, traceback
import torch  # the slow imports, once for all
rank = os.environ.get("RANK", "0")
if "RANK" in os.environ:
    with contextlib.suppress(ImportError):
        import torch._dynamo  # DistributedDataParallel needs it in new versions
for number, name in enumerate(sys.argv[2:]):  # each in a process and a group of its own
    if os.fork():
        if os.wait()[1]:
            sys.exit(f"{name} failed")
        continue
    os.environ.update(MASTER_PORT=str(int(sys.argv[1]) + number), TORCHELASTIC_USE_AGENT_STORE="")
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        runpy.run_path(name, run_name="__main__")
    with open(f"{name}.{rank}", "w") as file:
        file.write(text.getvalue())
    sys.exit()
"""


def python_blocks():
    """{file name: (content, expected output or None)}; a first line "# ... NAME.py" names it.

    The last section's are snippets to be put together: its last block gets the others before it.
    """
    found, whole = {}, ""
    text = read(READMES[0])  # the other has the same code, see test_the_languages_correspond
    last_section = text.rindex("\n## ")
    following = [*blocks(text)[1:], ("", "")]
    for match, after in zip(BLOCK.finditer(text), following):
        language, body = match.groups()
        if language != "python":
            continue
        whole += body if match.start() > last_section else ""
        named = re.match(r"# .*?(\w+\.py)\n", body)
        name = named[1] if named else f"block{len(found)}.py"
        content = whole if named and whole else body
        found[name] = content, after[1] if after[0] == "text" else None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all Python blocks as files, and what they need."""
    path = tmp_path_factory.mktemp("docs")
    write_mnist(path / "data", 300, 51)
    from model import Net

    torch.save(Net().state_dict(), path / "model.pth")
    (path / "driver.py").write_text(DRIVER)
    for name, (content, _) in python_blocks().items():
        (path / name).write_text(content)
    return path


def run_blocks(folder, launcher, names, ranks):
    port = free_port() % 20000 + 10000  # the first of a row of ports, below those that systems lend
    run(*launcher, "driver.py", port, *names, cwd=folder, PYTHONPATH=str(ROOT), timeout=150)
    for name in names:
        outputs = [(folder / f"{name}.{rank}").read_text() for rank in range(ranks)]
        expected = python_blocks()[name][1]
        if expected is not None:
            found = "".join(outputs).splitlines()
            assert sorted(found) == sorted(expected.splitlines()), f"{name}: {found}"
    return outputs


def of_torchrun(content):
    return content.startswith("# torchrun") or "\n# torchrun" in content


def test_python_blocks_of_one_process(folder):
    found = python_blocks()
    names = [name for name, (content, _) in found.items() if not of_torchrun(content)]
    names.remove("who.py")
    assert len(names) >= 10
    run_blocks(folder, [sys.executable], names, 1)


def test_python_blocks_of_two_processes(folder):
    found = python_blocks()
    names = [name for name, (content, _) in found.items() if of_torchrun(content)]
    assert len(names) >= 5 and names[-1] == "mine.py"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    outputs = run_blocks(folder, [*launcher, f"--master_port={free_port()}"], names, 2)
    assert re.fullmatch(r"epoch 1: [\d.]+%\nepoch 2: [\d.]+%\n", outputs[0]) and not outputs[1]


@pytest.mark.slow
def test_each_experiment_starts_by_the_line_that_it_names(folder):
    for name, (content, _) in python_blocks().items():
        if content.startswith("# torchrun"):
            words = content.splitlines()[0].split()[2:]
            port = f"--master_port={free_port()}"
            run(sys.executable, "-m", "torch.distributed.run", port, *words, cwd=folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", READMES)
def test_shell_blocks_that_start_the_experiments(folder, name):
    found = blocks(read(name))
    files = python_blocks()
    count = 0
    for (language, body), (_, expected) in zip(found, found[1:]):
        if language == "bash" and any(file in body for file in files):
            body = body.replace("torchrun", f"{sys.executable} -m torch.distributed.run")
            body = re.sub(r"(?<=--master_port=)\d+", str(free_port()), body)
            done = run("bash", "-c", body, cwd=folder)
            found_lines = re.findall(r"node \d.*?rank \d+, rank \d+", done.stdout)
            assert sorted(found_lines) == expected.splitlines()
            count += 1
    assert count == 1


# The commands


def parse_script(path, options, monkeypatch):
    """Let the script's own parser read these options."""
    if not (ROOT / path).exists():
        assert path in python_blocks(), f"{path} is no script"
        return
    spec = importlib.util.spec_from_file_location(Path(path).stem, str(ROOT / path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [path, *options])
    module.parse_args()


def parse_command(words, monkeypatch):
    """Read one command's words as the program would; fails for what is not known."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    program, rest = words[0], words[1:]
    if program == "srun":
        cut = rest.index("torchrun")
        assert all(re.fullmatch(r"--(nodes|ntasks-per-node)=\d+", word) for word in rest[:cut])
        return parse_command(rest[cut:], monkeypatch)
    module = None
    if re.fullmatch(r"(\.venv/bin/)?python3?", program):
        if rest[0] != "-m":
            return parse_script(rest[0], rest[1:], monkeypatch)
        module, rest = rest[1], rest[2:]
    if program in SCRIPTS:
        return parse_script(program, rest, monkeypatch)
    if program == "torchrun" or module in ("torch.distributed.launch", "torch.distributed.run"):
        from torch.distributed import launch
        from torch.distributed import run as torchrun

        old = module == "torch.distributed.launch"
        args = launch.parse_args(rest) if old else torchrun.get_args_parser().parse_args(rest)
        assert args.training_script.endswith(".py")
        return parse_script(args.training_script, args.training_script_args, monkeypatch)
    if program.endswith("pip"):
        assert rest[0] == "install" and (ROOT / rest[rest.index("-r") + 1]).exists()
        return
    if module == "pytest":
        assert rest in (["tests"], ["tests", "-m", "slow"])
    elif program == "diff":
        assert run(program, *rest, code=1).stdout
    else:
        line = " ".join([module or program, *rest])
        known = r"venv \.venv|source \.venv/bin/activate|tensorboard --logdir runs"
        known += r"|pgrep -af ddp_train\.py|wait"
        assert re.fullmatch(known, line), f"an unknown command: {line}"


def commands(text):
    """Every command in the shell blocks, and those within the text."""
    shell = "".join(body for language, body in blocks(text) if language == "bash")
    lines = shell.replace("\\\n", "").split("\n")
    starts = r"(\.venv/bin/)?(python3?|torchrun|tensorboard|diff|pip|pgrep|source|\w+_train\.py) "
    lines += [code for code in code_in(without_blocks(text)) if re.match(starts, code)]
    for line in filter(None, lines):
        for part in re.split(r"&&|;|&(?= *$)", line):
            words = shlex.split(part, comments=True)
            if words:
                yield words


@pytest.mark.parametrize("name", READMES)
def test_commands_are_understood(name, monkeypatch):
    found = list(commands(read(name)))
    assert len(found) > 20
    for words in found:
        try:
            parse_command(words, monkeypatch)
        except SystemExit:
            pytest.fail(f"{name}: {' '.join(words)}")


@pytest.mark.parametrize("name", READMES)
def test_options_in_the_text_exist(name):
    from torch.distributed import launch

    text = io.StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit):
        launch.parse_args(["--help"])
    known = text.getvalue().replace("-", "_")
    files = [*(ROOT / script for script in SCRIPTS), *ROOT.glob("benchmarks/*.py")]
    known += "".join(path.read_text("utf-8").replace("-", "_") for path in files)
    known += "__help --logdir __shm_size __ipc __logdir"  # argparse's, TensorBoard's, Docker's
    for code in code_in(without_blocks(read(name))):
        for option in re.findall(r"(?:^|… )(--[a-z_-]+)", code):
            assert option.replace("-", "_") in known, option


# The messages of the troubleshooting table


def two(tmp_path, snippet):
    """What two processes say that run this snippet, in which m is a network of two layers."""
    path = tmp_path / "two.py"
    path.write_text(f"""
import os, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo", timeout=timedelta(seconds=5))
rank = dist.get_rank()
m = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])
m.forward = lambda x, both=False: m[1](m[0](x)) if both else m[0](x)
{snippet}
""")
    done = run(*launch_command(2, "--use_env"), path, code=None)
    return done.stdout + done.stderr


def launched_with_a_taken_port(mnist, tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        command = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node=2"]
        port = f"--master_port={other.getsockname()[1]}"
        return run(*command, port, ROOT / "ddp_train.py", code=None).stderr


def until(text, command, **env):
    """Start a command, read its output until this text, and end it."""
    job = subprocess.Popen([str(part) for part in command], text=True, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT, start_new_session=True,
                           env={**os.environ, **env})  # fmt: skip
    found, end = "", time.monotonic() + 60
    while text not in found and time.monotonic() < end and job.poll() is None:
        found += job.stdout.readline()
    os.killpg(job.pid, signal.SIGKILL)
    job.communicate()
    return found


def no_host_name(mnist, tmp_path):
    if subprocess.run(["unshare", "--uts", "true"], stderr=subprocess.PIPE).returncode:
        pytest.skip("giving the host another name needs root")
    words = f"{sys.executable} -m torch.distributed.run --standalone {ROOT / 'ddp_train.py'}"
    script = f"hostname no-such-host-here; exec {words}"
    return until("cannot be retrieved", ["unshare", "--uts", "sh", "-c", script])


def no_shared_memory(mnist, tmp_path):
    path = tmp_path / "workers.py"
    path.write_text("""
import torch
from torch.utils.data import DataLoader, TensorDataset
if __name__ == "__main__":
    list(DataLoader(TensorDataset(torch.zeros(4000, 9999)), batch_size=500, num_workers=2))
""")
    mount = "mount -t tmpfs -o size=4M tmpfs /dev/shm || exit 99"
    done = run("unshare", "--mount", "sh", "-c", f"{mount}; {sys.executable} {path}", code=None)
    if done.returncode in (1, 99) and "Error" not in done.stderr:
        pytest.skip("mounting needs root")
    return done.stderr


def without_module(mnist, tmp_path):
    from model import Net

    with pytest.raises(RuntimeError) as error:
        Net().load_state_dict(torch.nn.DataParallel(Net()).state_dict())
    return str(error.value)


def old_script(mnist, tmp_path):
    if torch.__version__.startswith("1."):
        pytest.skip("this launcher passes the old spelling")
    path = tmp_path / "old.py"
    path.write_text("""
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank")
parser.parse_args()
""")
    return run(*launch_command(1), path, code=None).stderr


def without_mnist(kind):
    def produce(mnist, tmp_path):
        import data

        text = io.StringIO()
        problem = data.fetch(kind, tmp_path / "nothing")
        try:
            with redirect_stdout(text):
                data.choose(kind, problem)
        except SystemExit as end:
            return end.code
        return text.getvalue()

    return produce


def single(*options, damage=False, again=()):
    """What the script says when it runs, or when it runs once more with the options `again`."""

    def produce(mnist, tmp_path):
        first = ["--data-dir", mnist, "--output-dir", tmp_path / "out", "--epochs", 1]
        done = run("single_gpu_train.py", *first, "--batch-size", 100, *options, code=None)
        if damage:
            os.truncate(tmp_path / "out" / "checkpoint.pth", 1000)
        if not options:
            done = run("single_gpu_train.py", *first, *again, code=None)
        return done.stderr

    return produce


def ddp(*options, **env):
    return lambda mnist, tmp_path: run(
        *launch_command(2), ROOT / "ddp_train.py", *options, code=None, **env
    ).stderr


def alone(**env):
    return lambda mnist, tmp_path: run("ddp_train.py", code=None, **env).stderr


def dashboards(mnist, tmp_path):
    import tensorboard

    with zipfile.ZipFile(Path(tensorboard.__file__).parent / "webfiles.zip") as files:
        return files.read("index.js").decode(errors="ignore")


def waiting(mnist, tmp_path):
    env = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
               MASTER_PORT=str(free_port()))  # fmt: skip
    return until("are there", [sys.executable, ROOT / "ddp_train.py"], **env)


def ranks_apart(mnist, tmp_path):
    silent = two(tmp_path, "time.sleep(9 * rank); dist.barrier()")
    dead = two(tmp_path, "rank and os._exit(1); dist.barrier()")
    return silent + dead


def hangup(mnist, tmp_path):
    """What a closed terminal does to a launcher, although it was started by nohup."""
    command = ["nohup", *launch_command(2), ROOT / "ddp_train.py", "--data-dir", mnist,
               "--epochs", 1000, "--output-dir", tmp_path / "out"]  # fmt: skip
    job = start(command)
    while not job.stdout.readline().startswith("epoch"):
        assert job.poll() is None
    os.kill(job.pid, signal.SIGHUP)
    return job.communicate(timeout=60)[1]


def folder_in_use(mnist, tmp_path):
    options = ["--data-dir", mnist, "--output-dir", tmp_path / "out", "--resume"]
    first = start([sys.executable, ROOT / "single_gpu_train.py", *options, "--epochs", 1000])
    while not first.stdout.readline().startswith("epoch"):
        assert first.poll() is None
    found = run("single_gpu_train.py", *options, code=None).stderr
    first.kill()
    first.communicate(timeout=60)
    return found


def lone_model(mnist, tmp_path):
    (tmp_path / "model.pth").touch()
    options = ["--data-dir", mnist, "--output-dir", tmp_path]
    return run("single_gpu_train.py", *options, code=1).stderr


def other_options(mnist, tmp_path):
    """Two nodes, started with different options."""
    port, jobs = free_port(), []
    for node in range(2):
        launcher = [*launch_command(1)[:-1], "--nnodes=2", f"--node_rank={node}"]
        launcher += ["--master_addr=127.0.0.1", f"--master_port={port}"]
        command = [*launcher, ROOT / "ddp_train.py", "--data-dir", mnist, "--seed", node]
        jobs.append(start(command, cwd=tmp_path))
    return [job.communicate(timeout=60)[1] for job in jobs][0]


STEPS = "for i in range(2): DDP_ = DDP_ if i else {}; DDP_(torch.ones(2, 4){}).sum().backward()"
MESSAGES = {  # how to produce the message that begins so
    "unrecognized arguments: --local": old_script,
    "unrecognized arguments: --nproc": ddp("--nproc_per_node=2"),
    "address already": launched_with_a_taken_port,
    "error: --device cuda": ddp("--device", "cuda", CUDA_VISIBLE_DEVICES=""),
    "error: RANK": alone(RANK="0"),
    "waiting at": waiting,
    "addresses of": no_host_name,
    "error: GLOO": alone(GLOO_SOCKET_IFNAME="nothing0"),
    "Missing key": without_module,
    "unable to allocate": no_shared_memory,
    "error: … exists: go": single(),
    "error: another run": folder_in_use,
    "error: … is … on rank 1": other_options,
    "SignalException": hangup,
    "error: … exists, but": lone_model,
    "error: … is cut off": single(damage=True, again=["--resume"]),
    "error: … was made": single(again=["--resume", "--lr", "0.2"]),
    "error: the loss is nan": single("--lr", "1000", "--epochs", "5"),
    "Expected to have": lambda mnist, tmp_path: two(tmp_path, STEPS.format("DDP(m)", "")),
    "find_unused": lambda mnist, tmp_path: two(
        tmp_path, STEPS.format("DDP(m, find_unused_parameters=True)", ", True")
    ),
    "params[": lambda mnist, tmp_path: two(tmp_path, "DDP(torch.nn.Linear(4, 4 + rank))"),
    "Timed out": ranks_apart,
    "warning: no MNIST": without_mnist("auto"),
    "error: no MNIST": without_mnist("mnist"),
    "No dashboards": dashboards,
}


def messages():
    """The messages of the table, as lists of code, without those quoted from elsewhere (†)."""
    table = max(tables(read(READMES[0])), key=len)
    assert len(table) > 15
    found = [code_in(row[0]) for row in table[1:] if "†" not in row[0]]
    return [codes for codes in found if codes and codes != ["ddp_train.py"]]


def test_there_is_a_way_to_produce_each_message():
    for start in MESSAGES:
        assert sum(codes[0].startswith(start) for codes in messages()) == 1, start
    assert len(messages()) == len(MESSAGES)


@pytest.mark.slow
@pytest.mark.parametrize("start", MESSAGES)
def test_messages_are_the_real_ones(start, mnist, tmp_path):
    found = MESSAGES[start](mnist, tmp_path)
    codes = next(codes for codes in messages() if codes[0].startswith(start))
    patterns = [".*".join(re.escape(piece) for piece in code.split("…")) for code in codes]
    seen = [bool(re.search(pattern, found, re.I | re.S)) for pattern in patterns]
    # Of two ranks the launcher may end one before it has told: then it is one of the messages.
    assert any(seen) if start == "Timed out" else all(seen), found[-3000:]


if __name__ == "__main__":
    assert sys.argv[1:] == ["--update"], __doc__
    update()
