"""The documents cannot go stale: what they show is compared, parsed or run, in both languages.

python tests/test_docs.py --update  # writes today's diffs between the scripts into them
"""

import ast
import difflib
import importlib
import io
import os
import re
import shlex
import shutil
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
from conftest import ROOT, SCRIPTS, by_hand, free_port, launch_command, run, start, write_mnist
from markdown import blocks, read, without_blocks

ENGLISH = ["README.md", *sorted(f"docs/{path.name}" for path in ROOT.glob("docs/*.md"))]
CHINESE = {name: name.replace("docs/", "docs/zh-CN/") for name in ENGLISH}
CHINESE["README.md"] = "README.zh-CN.md"
RUN = ["README.md", "docs/misconceptions.md", "docs/techniques.md"]  # with blocks that are run


def code_in(text):
    return re.findall(r"`([^`\n]+)`", text)


def rows(text):
    """The rows of all tables, as lists of cells."""
    lines = re.findall(r"^\|(.*)\|$", without_blocks(text), re.M)
    return [line.split(" | ") for line in lines if not set(line) <= set("-: |")]


# The sizes and the diffs


def test_the_readmes_are_read_in_ten_minutes():
    for name in ("README.md", CHINESE["README.md"]):
        text = read(name)
        code = blocks(text, "python", "bash", "diff", "text")
        assert len(text.splitlines()) <= 400
        assert sum(len(body.splitlines()) for _, _, body in code) <= 120
    words = re.findall(r"[\w…`'(-]*\w[^\s|]*", without_blocks(read("README.md")))
    assert len(words) <= 2000
    assert len(re.findall("[\u4e00-\u9fff]", without_blocks(read(CHINESE["README.md"])))) <= 3000


def diff(*names):
    """The lines that the second file adds to and drops from the first."""
    lines = [read(name).splitlines() for name in names]
    found = difflib.unified_diff(*lines, lineterm="", n=0)
    return [line for line in found if not line.startswith(("---", "+++", "@@"))]


SHOWN = {  # where a diff is shown, complete and in order: (file, heading of its section)
    ("convert/train.py", "convert/train_ddp.py"): ("README.md", r"## .*"),
    (SCRIPTS[0], SCRIPTS[1]): ("docs/diffs.md", r"## .*`data_parallel_train.py`.*"),
    (SCRIPTS[0], SCRIPTS[2]): ("docs/diffs.md", r"## .*`ddp_train.py`.*"),
}


def section(text, heading):
    """(start, end) of the section below the first heading that matches and has a diff."""
    for match in re.finditer(f"^{heading}$", text, re.M):
        end = re.search(r"^## |\Z", text[match.end() :], re.M)
        if "```diff" in text[match.end() : match.end() + end.start()]:
            return match.end(), match.end() + end.start()
    raise AssertionError(f"no diff below {heading}")


@pytest.mark.parametrize("chinese", [False, True])
@pytest.mark.parametrize("pair", SHOWN, ids=lambda pair: pair[1])
def test_the_diffs_are_the_real_ones(pair, chinese):
    """A script has changed? python tests/test_docs.py --update, then read the reasons again."""
    name, heading = SHOWN[pair]
    text = read(CHINESE[name] if chinese else name)
    first, last = section(text, heading)
    shown = "".join(body for _, _, body in blocks(text[first:last], "diff"))
    assert sorted(shown.splitlines()) == sorted(diff(*pair))


@pytest.mark.parametrize("name", ["docs/diffs.md", CHINESE["docs/diffs.md"]])
def test_the_annotated_listing_is_the_script(name):
    shown = "".join(body for _, _, body in blocks(read(name), "py"))
    source = read("ddp_train.py")
    assert [line for line in shown.splitlines() if line] == list(filter(None, source.splitlines()))


def update():
    """Write today's diffs into the documents; a hunk that grew or shrank is left to its author."""
    for pair, (name, heading) in SHOWN.items():
        for path in (name, CHINESE[name]):
            text = read(path)
            first, last = section(text, heading)
            old = "".join(body for _, _, body in blocks(text[first:last], "diff")).splitlines()
            lines, new = list(old), diff(*pair)
            matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
            for kind, a, b, c, d in matcher.get_opcodes():
                if b - a == d - c:
                    lines[a:b] = new[c:d]
                elif kind != "equal":
                    print(f"{path}, by hand:", *old[a:b], "  becomes", *new[c:d], sep="\n")
            rest = iter(lines)
            part = re.sub(
                r"(?<=^```diff\n).*?(?=^```$)",
                lambda match, rest=rest: "".join(f"{next(rest)}\n" for _ in match[0].splitlines()),
                text[first:last],
                flags=re.M | re.S,
            )
            (ROOT / path).write_text(text[:first] + part + text[last:], encoding="utf-8")


# The two languages, and the links


def facts(text):
    """What must be equal in both languages: code but for comments, commands, numbers in tables."""
    found = []
    for _, language, body in blocks(text, "python", "bash", "diff", "text", "yaml", "py"):
        if language == "python":
            body = ast.dump(ast.parse(body))
        elif language != "text":
            bare = re.sub(r"(^|[ +-]+)#(?!!|SBATCH).*$", "", body, flags=re.M)
            body = [line.rstrip() for line in bare.splitlines() if line.strip(" +-")]
        found.append((language, body))
    cells = [cell for row in rows(text) for cell in row]
    numbers = re.findall(r"\d[\d,.]*\d|\d", " ".join(re.sub(r"`.*?`", "", cell) for cell in cells))
    return found, sorted(numbers), sorted(re.findall(r"<!-- .*? -->", text))


@pytest.mark.parametrize("name", ENGLISH)
def test_the_languages_say_the_same(name):
    one, other = facts(read(name)), facts(read(CHINESE[name]))
    for (language, body), (_, translated) in zip(one[0], other[0]):
        assert body == translated, language
    assert len(one[0]) == len(other[0])
    assert one[1:] == other[1:]


@pytest.mark.parametrize("name", ["README.md", "docs/troubleshooting.md"])
def test_the_languages_have_the_same_messages(name):
    one, other = ([code_in(row[0]) for row in rows(read(path))] for path in (name, CHINESE[name]))
    assert [codes for codes in one if codes] == [codes for codes in other if codes]


def test_the_commands_for_newcomers_are_marked():
    for name in ("README.md", CHINESE["README.md"]):
        for command in ("run", "test"):
            assert read(name).count(f"<!-- command: {command} -->\n```bash\n") == 1


def anchors(text):
    """What GitHub makes of the headings."""
    titles = re.findall(r"^#+ (.*)$", without_blocks(text), re.M)
    plain = [re.sub(r"[^\w\- ]", "", title.lower()) for title in titles]
    return {title.replace(" ", "-") for title in plain}


@pytest.mark.parametrize("name", [*ENGLISH, *CHINESE.values()])
def test_links_resolve(name):
    folder = Path(name).parent
    targets = re.findall(r"\]\(([^)\s]+)\)", without_blocks(read(name)))
    assert targets
    for target in targets:
        if not re.match(r"\w+://", target):
            path, _, anchor = target.partition("#")
            path = os.path.normpath(folder / path) if path else name
            assert (ROOT / path).exists(), f"{name}: {target}"
            assert not anchor or anchor in anchors(read(path)), f"{name}: {target}"


# The Python blocks


def python_blocks():
    """{file name: (content, expected output or None)}; a first line "# ... NAME.py" names it."""
    found = {}
    for document in RUN:
        every = [*blocks(read(document)), ("", "", "")]
        for (_, language, body), (_, next_language, next_body) in zip(every, every[1:]):
            if language != "python":
                continue
            named = re.match(r"# .*?(\w+\.py)\n", body)
            name = named[1] if named else f"block{len(found)}.py"
            assert name not in found, name
            found[name] = body, next_body if next_language == "text" else None
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with all Python blocks as files, and what they need."""
    path = tmp_path_factory.mktemp("docs")
    write_mnist(path / "data", 300, 51)
    from model import Net

    torch.save(Net().state_dict(), path / "model.pth")
    (path / "runs" / "mine").mkdir(parents=True)
    shutil.copy(path / "model.pth", path / "runs" / "mine")
    for name, (content, _) in python_blocks().items():
        (path / name).write_text(content)
    return path


def of_torchrun(content):
    return content.startswith("# torchrun")


@pytest.mark.parametrize("name", [name for name in python_blocks() if name != "who.py"])
def test_python_blocks(name, folder):
    content, expected = python_blocks()[name]
    ddp = of_torchrun(content)
    options, env = [[]] * (2 if ddp else 1), {"PYTHONPATH": str(ROOT)}
    outputs, codes = by_hand(options, folder / name, 60, folder, env, ddp)
    assert not any(codes), outputs
    if expected is not None:
        found = [line for out, _ in outputs for line in out.splitlines()]
        assert sorted(found) == sorted(expected.splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch"])
def test_each_experiment_starts_by_the_line_that_it_names(folder, module):
    for content, _ in python_blocks().values():
        if of_torchrun(content):
            name = content.splitlines()[0].split()[-1]
            for leftover in ("cache", "weights"):
                (folder / leftover).unlink() if (folder / leftover).exists() else None
            command = [*launch_command(2, module=module), name]
            done = run(*command, code=None, cwd=folder, PYTHONPATH=str(ROOT))
            # At Python's end threads of gloo can still run: troubleshooting.md says so.
            assert not done.returncode or "terminate called without" in done.stderr, done.stderr


@pytest.mark.slow
def test_shell_blocks_that_start_the_experiments(folder):
    every, count = blocks(read("docs/misconceptions.md")), 0
    for (_, language, body), (_, _, expected) in zip(every, every[1:]):
        if language == "bash" and "who.py" in body:
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
    path = {"train.py": "convert/train.py", "train_ddp.py": "convert/train_ddp.py"}.get(path, path)
    if not (ROOT / path).exists():
        assert path in python_blocks() or path.startswith("my"), f"{path} is no script"
        return
    spec = importlib.util.spec_from_file_location(Path(path).stem, str(ROOT / path))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.syspath_prepend(str((ROOT / path).parent))
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [path, *options])
    if options or hasattr(module, "parse_args"):
        module.parse_args()


def parse_command(words, monkeypatch):
    """Read one command's words as the program would; fails for what is not known."""
    while words and re.match(r"\w+=", words[0]):
        words = words[1:]
    program, rest = words[0], words[1:]
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
    if program.endswith("pip") and "-r" in rest:
        assert rest[0] == "install" and (ROOT / rest[rest.index("-r") + 1]).exists()
        return
    if module == "pytest":
        assert rest in (["tests"], ["tests", "-m", "slow"])
    elif program == "diff":
        assert run(program, *rest, code=1).stdout
    else:
        line = " ".join([module or program, *rest])
        known = r"venv \.venv|source \.venv/bin/activate|tensorboard --logdir runs"
        known += r"|pgrep -af ddp_train\.py|wait|pip install .*|bash benchmarks/gpu\.sh"
        assert re.fullmatch(known, line), f"an unknown command: {line}"


def commands(text):
    """Every command in the shell blocks, and those within the text."""
    shell = "".join(body for _, _, body in blocks(text, "bash"))
    for name in ("WORLD_SIZE", "RANK", "MASTER_PORT"):  # of a platform
        shell = shell.replace(f"${name}", "1")
    lines = shell.replace("\\\n", "").split("\n")
    starts = r"(\.venv/bin/)?(python3?|torchrun|tensorboard|diff|pip|pgrep|source|\w+_train\.py) "
    codes = [code for code in code_in(without_blocks(text)) if re.match(starts, code)]
    lines += [code for code in codes if ".py" in code or "pytest" in code]
    for line in filter(None, lines):
        line = line.replace("my/ddp_train.py", str(ROOT / "ddp_train.py"))
        for part in re.split(r"&&|;|&(?= *$)", line):
            words = shlex.split(part, comments=True)
            if words:
                yield words


COMMANDS = [name for name in ENGLISH if name not in ("docs/recipes.md", "docs/clusters.md")]


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_understood(name, monkeypatch):
    found = list(commands(read(name)))
    assert name != "README.md" or len(found) >= 12
    for words in found:
        try:
            parse_command(words, monkeypatch)
        except SystemExit:
            pytest.fail(f"{name}: {' '.join(words)}")


OTHERS = """--help --logdir --shm-size --ipc --signals-to-handle --rdzv-id --rdzv-backend
--virtual-local-rank --shutdown-timeout --gpus-per-task --signal --kill-on-bad-exit"""


@pytest.mark.parametrize("name", COMMANDS)
def test_options_in_the_text_exist(name):
    from torch.distributed import launch

    text = io.StringIO()
    with redirect_stdout(text), pytest.raises(SystemExit):
        launch.parse_args(["--help"])
    files = [*ROOT.glob("*.py"), *ROOT.glob("benchmarks/*.py"), *ROOT.glob("convert/*.py")]
    known = " ".join([text.getvalue(), OTHERS, *(path.read_text("utf-8") for path in files)])
    for code in code_in(without_blocks(read(name))):
        for option in re.findall(r"(?:^|… )(--[a-z_-]+)", code):
            assert option.replace("-", "_") in known.replace("-", "_"), option


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


def dashboards(mnist, tmp_path):
    import tensorboard

    with zipfile.ZipFile(Path(tensorboard.__file__).parent / "webfiles.zip") as files:
        return files.read("index.js").decode(errors="ignore")


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


STEPS = "for i in range(2): DDP_ = DDP_ if i else {}; DDP_(torch.ones(2, 4){}).sum().backward()"
MESSAGES = {  # how to produce the message of PyTorch or another program that begins so
    "unrecognized arguments: --local": old_script,
    "address already": launched_with_a_taken_port,
    "addresses of": no_host_name,
    "Missing key": without_module,
    "unable to allocate": no_shared_memory,
    "SignalException": hangup,
    "Expected to have": lambda mnist, tmp_path: two(tmp_path, STEPS.format("DDP(m)", "")),
    "find_unused": lambda mnist, tmp_path: two(
        tmp_path, STEPS.format("DDP(m, find_unused_parameters=True)", ", True")
    ),
    "params[": lambda mnist, tmp_path: two(tmp_path, "DDP(torch.nn.Linear(4, 4 + rank))"),
    "Timed out": ranks_apart,
    "No dashboards": dashboards,
}


def messages():
    """The codes in the first column of the table, without those quoted from elsewhere (†)."""
    cells = [row[0].lstrip("| ") for row in rows(read("docs/troubleshooting.md"))]
    return [code_in(cell) for cell in cells if "†" not in cell and code_in(cell)]


def templates():
    """The texts of harness.py and data.py, with … for what is put in."""
    found = []
    for name in ("harness.py", "data.py"):
        for node in ast.walk(ast.parse(read(name))):
            if isinstance(node, ast.JoinedStr):
                parts = [value.value if isinstance(value, ast.Constant) else "…"
                         for value in node.values]  # fmt: skip
                found.append("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def like(pattern, text):
    return re.search(".*".join(map(re.escape, pattern.split("…"))), text)


def test_messages_of_ours_are_in_the_code():
    texts, count = templates(), 0
    for name in ("docs/troubleshooting.md", "README.md"):
        for row in rows(read(name)):
            for code in code_in(row[0]):
                if re.match("error: |warning: |--epochs was|waiting for|stopped: ", code):
                    plain = re.sub("^(error|warning): ", "", code)
                    known = [text for text in texts if len(text) > 9]
                    assert any(like(plain, text) or like(text, plain) for text in known), code
                    count += 1
    assert count > 20


def test_there_is_a_way_to_produce_each_message_of_others():
    for start_of in MESSAGES:
        assert sum(codes[0].startswith(start_of) for codes in messages()) == 1, start_of


@pytest.mark.slow
@pytest.mark.parametrize("start_of", MESSAGES)
def test_messages_are_the_real_ones(start_of, mnist, tmp_path):
    found = MESSAGES[start_of](mnist, tmp_path)
    codes = next(codes for codes in messages() if codes[0].startswith(start_of))
    seen = [bool(re.search(".*".join(map(re.escape, code.split("…"))), found, re.I | re.S))
            for code in codes]  # fmt: skip
    # Of two ranks the launcher may end one before it has told: then it is one of the messages.
    assert any(seen) if start_of == "Timed out" else all(seen), found[-3000:]


@pytest.mark.slow
def test_this_network_is_one_bucket(tmp_path):
    """README: so its exchange overlaps with nothing. Twice, as DDP may cut them anew."""
    done = two(tmp_path, f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from model import Net
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
net = DDP(Net())
hook = lambda state, bucket: print("one bucket") or allreduce_hook(None, bucket)
net.register_comm_hook(None, hook)
for _ in range(2):
    net(torch.zeros(2, 1, 28, 28), torch.zeros(2).long()).backward()
""")  # fmt: skip
    assert done.count("one bucket") == 2 * 2


# The tools for a run that stands still

HANG = """
import faulthandler, os, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
dist.init_process_group("gloo", timeout=timedelta(seconds=int(sys.argv[1])))
if len(sys.argv) > 2:
    faulthandler.dump_traceback_later(1 + 2 * dist.get_rank())  # or they mix
os.write(1, b"rank %d is %d\\n" % (dist.get_rank(), os.getpid()))  # at once: lines do not mix
if dist.get_rank() == 1:
    time.sleep(60)  # the planted fault: it skips what the others wait in
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "tool",
    ["timeout=timedelta", "TORCH_DISTRIBUTED_DEBUG=DETAIL", "py-spy dump", "faulthandler.dump"],
)
def test_what_the_tools_show_of_a_hang(tool, tmp_path):
    cells = [row for row in rows(read("docs/techniques.md")) if tool in row[0]]
    assert len(cells) == 1
    path = tmp_path / "hang.py"
    path.write_text(HANG)
    command = [*launch_command(3, module="torch.distributed.run"), path]
    if tool == "py-spy dump":
        if shutil.which("py-spy", path=str(Path(sys.executable).parent)) is None:
            pytest.skip("py-spy is not installed")
        job = start([*command, 60])
        pids = dict(job.stdout.readline().split()[1::2] for _ in range(3))
        time.sleep(2)
        py_spy = [Path(sys.executable).parent / "py-spy", "dump", "--pid"]
        stacks = {rank: run(*py_spy, pid, code=None) for rank, pid in pids.items()}
        for pid in (job.pid, *map(int, pids.values())):  # the ranks have groups of their own
            os.kill(pid, signal.SIGKILL)
        job.communicate(timeout=20)
        if any(done.returncode for done in stacks.values()):
            pytest.skip("py-spy may not look into other processes here")
        waiting = [rank for rank, done in stacks.items() if "all_reduce (" in done.stdout]
        assert sorted(waiting) == ["0", "2"]
    elif tool == "faulthandler.dump":
        stacks = run(*command, 8, "stacks", code=1).stderr.split("Timeout (")[1:]
        waiting = [re.search(r"\d in all_reduce", stack) is not None for stack in stacks]
        assert waiting == [True, False, True]
    elif tool == "timeout=timedelta":
        errors = run(*command, 8, code=1).stderr
        assert "Timed out waiting 8000ms for recv operation to complete" in errors
        assert "hang.py" in errors and "Timed out waiting 8000ms for recv" in cells[0][1]
    else:
        errors = run(*command, 8, code=1, TORCH_DISTRIBUTED_DEBUG="DETAIL").stderr
        assert "Ranks 1 failed to pass monitoredBarrier" in errors


if __name__ == "__main__":
    assert sys.argv[1:] == ["--update"], __doc__
    update()
