"""The launch files: valid scripts and manifests whose commands atlasjax understands."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest

from atlasjax.cli.parsing import parse, pop_option
from atlasjax.cli.train import TrainCommand
from atlasjax.train import default_config

ROOT = pathlib.Path(__file__).parent.parent
LAUNCH = ROOT / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), LAUNCH / "slurm.sbatch"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck(script):
    shellcheck = shutil.which("shellcheck", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if shellcheck is None:
        pytest.skip("needs shellcheck")
    found = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert os.access(script, os.X_OK)


def manifests():
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all((LAUNCH / "gke_tpu.yaml").read_text()))


def test_the_manifests_fit_the_schema():
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    for manifest in manifests():
        kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_the_job_has_a_pod_for_each_host():
    service, job = manifests()
    spec = job["spec"]
    pod = spec["template"]["spec"]
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    (container,) = pod["containers"]
    assert (
        spec["completions"]
        == spec["parallelism"]
        == rows * columns // container["resources"]["limits"]["google.com/tpu"]
    )
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}


def config_of(arguments):
    """What `atlasjax train ARGUMENTS` would run."""
    command, *rest = arguments
    assert command == "train"
    preset, rest = pop_option(rest, "preset")
    return parse(TrainCommand, "train", "", rest, TrainCommand(default_config(preset), preset)).config


def test_the_arguments_of_the_manifest():
    (container,) = manifests()[1]["spec"]["template"]["spec"]["containers"]
    config = config_of(container["args"])
    assert config.run_dir.startswith("gs://")
    assert config.processes.distributed
    assert config.mesh.resolve(256) == {"data": 4, "fsdp": 16, "tensor": 4}


STUB = """#!/usr/bin/env {python}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    file.write(json.dumps([os.path.basename(sys.argv[0]), *sys.argv[1:]]) + chr(10))
if os.path.basename(sys.argv[0]) == "gcloud" and "describe" in sys.argv:
    with open(os.environ["STATES"]) as file:
        state, *rest = file.read().split()
    with open(os.environ["STATES"], "w") as file:  # the last one stays
        file.write(" ".join(rest or [state]))
    if state == "NOT_FOUND":
        sys.exit(1)
    print("" if state == "EMPTY" else state)
codes = os.environ.get("CODES", "0").split()
with open(os.environ["CALLS"]) as file:
    sys.exit(int(codes[min(len(file.readlines()), len(codes)) - 1]))
"""


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    """Replaces the programs that the scripts call. Returns a function: the calls so far."""
    for name in ("atlasjax", "gcloud", "srun", "scontrol", "xpk"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(STUB.replace("env {python}", sys.executable).replace("/usr/bin/", ""))
        path.chmod(0o755)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("STATES", str(tmp_path / "states"))
    (tmp_path / "states").write_text("NOT_FOUND ACTIVE")
    monkeypatch.setenv("POLL", "0")
    monkeypatch.setenv("VENV", str(tmp_path / "venv"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("RESTART_WAIT", "0")
    (tmp_path / "calls").write_text("")

    def calls():
        return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]

    return calls


def launch(script, *arguments, code=0, **environment):
    found = subprocess.run(
        [LAUNCH / script, *arguments], capture_output=True, text=True, env={**os.environ, **environment}, timeout=60
    )
    assert found.returncode == code, found.stderr
    return found


def test_one_machine_with_gpus(stubs):
    launch("gpus.sh", "--steps", "7")
    ((program, *arguments),) = stubs()
    assert program == "atlasjax"
    config = config_of(arguments)
    assert config.steps == 7
    assert config.mesh.resolve(8) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert not config.processes.distributed


def test_slurm(stubs):
    launch("slurm.sbatch")
    ((program, kill, name, *arguments),) = stubs()
    assert (program, kill, name) == ("srun", "--kill-on-bad-exit=1", "atlasjax")
    assert config_of(arguments).processes.distributed


@pytest.mark.parametrize(("code", "again"), [(75, True), (143, True), (137, True), (1, False), (2, False)])
def test_slurm_puts_what_was_stopped_in_the_queue_again(stubs, code, again):
    launch("slurm.sbatch", code=code, CODES=f"{code} 0")
    assert (["scontrol", "requeue", "7"] in stubs()) == again


def test_tpu_vms(stubs):
    launch("tpu_vm.sh", "create")
    launch("tpu_vm.sh", "install")
    launch("tpu_vm.sh", "start")
    launch("tpu_vm.sh", "stop")
    launch("tpu_vm.sh", "delete")
    launch("tpu_vm.sh", code=2)
    calls = stubs()
    assert [call[4] for call in calls[:3]] == ["describe", "create", "describe"]
    assert calls[1][:5] == ["gcloud", "compute", "tpus", "queued-resources", "create"]
    assert "--spot" in calls[1]
    assert "--service-account" not in calls[1]
    assert calls[1][calls[1].index("--node-id") + 1] == "atlasjax"
    (start,) = (call[call.index("--command") + 1] for call in calls if "run.sh atlasjax" in " ".join(call))
    assert "JAX_COORDINATOR_PORT=8476" in start
    arguments = re.search(r"run\.sh atlasjax (.*?) > ", start, re.DOTALL)[1].replace("\\\n", " ").split()
    config = config_of(arguments)
    assert config.processes.distributed
    assert config.run_dir.startswith("gs://")


# QueuedResourceState.State of the API of Cloud TPU: what is on the way to ACTIVE, and what is not.
WAITING = ("CREATING", "ACCEPTED", "WAITING_FOR_RESOURCES", "PROVISIONING")
ENDED = ("FAILED", "SUSPENDING", "SUSPENDED", "DELETING")


@pytest.mark.parametrize(
    "states", [*WAITING, "STATE_UNSPECIFIED", "EMPTY", " ".join(WAITING), "CREATING NOT_FOUND EMPTY"]
)
def test_a_slice_is_waited_for(stubs, tmp_path, states):
    (tmp_path / "states").write_text(f"NOT_FOUND {states} ACTIVE")
    launch("tpu_vm.sh", "create")
    assert [call[4] for call in stubs()] == ["describe", "create", *["describe"] * (len(states.split()) + 1)]


@pytest.mark.parametrize("state", ENDED)
@pytest.mark.parametrize("before", ["NOT_FOUND CREATING", "CREATING CREATING"])
def test_a_slice_that_will_not_come_is_not_waited_for(stubs, tmp_path, state, before):
    (tmp_path / "states").write_text(f"{before} {state}")
    found = launch("tpu_vm.sh", "create", code=1)
    assert f"{state}\nlaunch/tpu_vm.sh: the request atlasjax is {state} and will not become ACTIVE." in found.stderr
    assert "'delete', then 'create'" in found.stderr
    assert sum(call[4] == "create" for call in stubs()) == before.startswith("NOT_FOUND")
    assert "yaml(state)" in stubs()[-1], "the reason is printed"


@pytest.mark.parametrize("state", ["STATE_UNSPECIFIED", "EMPTY", "NOT_FOUND", "NEW_STATE"])
def test_what_is_no_state_is_not_waited_for_long(stubs, tmp_path, state):
    (tmp_path / "states").write_text(f"NOT_FOUND {state}")
    found = launch("tpu_vm.sh", "create", code=1)
    assert "for the tenth time; it must become ACTIVE." in found.stderr
    assert len(stubs()) == 12


def test_the_wait_for_a_slice_ends(stubs, tmp_path):
    (tmp_path / "states").write_text("NOT_FOUND WAITING_FOR_RESOURCES")
    found = launch("tpu_vm.sh", "create", code=1, WAIT_HOURS="0")
    assert "atlasjax is WAITING_FOR_RESOURCES after 0 h (WAIT_HOURS). 'create' waits on" in found.stderr
    (tmp_path / "states").write_text("WAITING_FOR_RESOURCES ACTIVE")
    launch("tpu_vm.sh", "create")
    assert sum(call[4] == "create" for call in stubs()) == 1, "the request is still there"


def test_several_slices_and_a_service_account(stubs):
    more = {"SLICES": "2", "SERVICE_ACCOUNT": "a@b.iam", "SPOT": "no", "ACCELERATOR": "v5litepod-64"}
    for command in ("create", "install", "start", "stop"):
        launch("tpu_vm.sh", command, **more)
    launch("tpu_vm.sh", "log", "3", "1", **more)
    calls = stubs()
    create = " ".join(calls[1])
    for words in (
        "--node-count 2 --node-prefix atlasjax",
        "--service-account a@b.iam --scopes https://",
        "v5litepod-64",
    ):
        assert words in create
    assert "--spot" not in create
    assert "--node-id" not in create
    ssh = [call[5] for call in calls if "ssh" in call]
    assert ssh == ["atlasjax-0", "atlasjax-1"] * 3 + ["atlasjax-1"]


def test_xpk(stubs):
    launch("xpk.sh", "--priority", "low")
    ((program, *arguments),) = stubs()
    assert (program, arguments[:2]) == ("xpk", ["workload", "create"])
    assert arguments[arguments.index("--priority") + 1] == "low"
    command = arguments[arguments.index("--command") + 1].split()
    assert config_of(command[command.index("atlasjax") + 1 :]).processes.distributed


@pytest.mark.parametrize("code", [75, 134, 137, 139])
def test_a_lost_process_starts_again(stubs, code):
    found = launch("run.sh", "atlasjax", "train", CODES=f"{code} {code} 0")
    assert stubs() == [["atlasjax", "train"]] * 3
    assert f"exit code {code}; starting again in 0 s (1 of 20)" in found.stderr


@pytest.mark.parametrize("code", [0, 1, 2, 70, 130, 143])
def test_what_is_finished_or_cannot_work_does_not_start_again(stubs, code):
    launch("run.sh", "atlasjax", "train", code=code, CODES=str(code))
    assert len(stubs()) == 1


def test_the_restarts_end(stubs):
    found = launch("run.sh", "atlasjax", code=75, CODES="75", RESTARTS="2")
    assert len(stubs()) == 3
    assert "2 restarts are used up" in found.stderr


def test_a_notice_reaches_the_command_which_may_finish(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys, time\n"
        "def stop(*_):\n"
        "    time.sleep(0.5)\n"
        "    os.write(1, b'saved\\n')\n"  # the notice may come while `print` is in its own call
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('ready', flush=True)\n"
        "time.sleep(60)\n"
    )
    running = subprocess.Popen([LAUNCH / "run.sh", sys.executable, program], stdout=subprocess.PIPE, text=True)
    assert running.stdout.readline() == "ready\n"
    started = time.monotonic()
    running.send_signal(signal.SIGTERM)
    assert running.stdout.read() == "saved\n"
    assert running.wait(timeout=30) == 143
    assert time.monotonic() - started < 20


def test_a_notice_ends_the_wait_for_another_try(stubs):
    running = subprocess.Popen(
        [LAUNCH / "run.sh", "atlasjax"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CODES": "75 0", "RESTART_WAIT": "3"},
    )
    assert "starting again in 3 s" in running.stderr.readline()
    started = time.monotonic()
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=30) == 143
    assert time.monotonic() - started < 2
    assert len(stubs()) == 1


def test_the_image_installs_what_exists():
    text = (LAUNCH / "Dockerfile").read_text()
    for copied in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE):
        assert all((ROOT / name).exists() for name in copied.split())
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    wanted = re.findall(r"extras=(\S+)", (LAUNCH / "install.sh").read_text())
    assert wanted == ["gcs,tpu", "gcs,cuda", "gcs"]
    assert {extra for each in wanted for extra in each.split(",")} <= set(extras)


PYTHON = """#!/usr/bin/env bash
echo "python3 $*" >> "$CALLS"
case "$*" in
  --version) echo "Python $VERSION" ;;
  *version_info*) [ "$VERSION" != 3.10.12 ] ;;
  *ensurepip*) [ "$ENSUREPIP" = yes ] ;;
  "-m pip install --quiet --user uv") [ "$PIP" = yes ] ;;
  "-m venv "* | "-m uv "*) for venv; do :; done; mkdir -p "$venv/bin"; touch "$venv/bin/activate" ;;
esac
"""
UV = """#!/usr/bin/env bash
echo "uv $*" >> "$CALLS"
for venv; do :; done
mkdir -p "$venv/bin"
touch "$venv/bin/activate"
"""


@pytest.mark.parametrize(
    ("version", "ensurepip", "uv", "pip", "made"),
    [
        ("3.11.4", "yes", False, "no", "python3 -m venv"),
        ("3.10.12", "yes", True, "no", "uv venv --quiet --seed --python 3.12"),
        ("3.10.12", "yes", False, "yes", "python3 -m uv venv --quiet --seed --python 3.12"),
        ("3.12.3", "no", True, "no", "uv venv --quiet --seed --python 3.12"),
        ("3.10.12", "yes", False, "no", None),
    ],
)
def test_the_install_script_brings_a_python(tmp_path, version, ensurepip, uv, pip, made):
    """Before it makes anything, it looks at what there is. Ubuntu 22.04, of the images of TPU v5e, has Python 3.10."""
    if not uv and shutil.which("uv", path="/usr/bin:/bin"):
        pytest.skip("this machine has a uv beside its shell")
    programs = {"python3": PYTHON, "atlasjax": "#!/bin/sh\necho atlasjax 1\n"} | ({"uv": UV} if uv else {})
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    venv, calls = tmp_path / "venv", tmp_path / "calls"
    more = {
        "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin",
        "CALLS": str(calls),
        "VERSION": version,
        "ENSUREPIP": ensurepip,
        "PIP": pip,
    }
    done = subprocess.run(
        [LAUNCH / "install.sh", "tpu", venv], capture_output=True, text=True, env=os.environ | more, timeout=60
    )
    assert venv.exists() == (done.returncode == 0) == (made is not None), done.stderr
    said = f"the machine has Python {version}"
    if made is None:
        assert f"{said}, and no uv could be installed; install Python 3.11 or newer, or uv" in done.stderr
        return
    assert f"{made} {venv}" in calls.read_text()
    assert (f"{said}; uv brings Python 3.12." in done.stderr) == ("uv" in made)
    assert "python3 -m pip install --quiet -e .[gcs,tpu]" in calls.read_text()
    refused = subprocess.run(
        [LAUNCH / "install.sh", "tpu", "none"], capture_output=True, text=True, env=os.environ | more
    )
    assert refused.returncode == (2 if version.startswith("3.10") else 0)


@pytest.mark.slow  # downloads what is installed; the steps of the image
def test_the_install_script_installs(tmp_path):
    copy = tmp_path / "atlasjax"
    for name in ("pyproject.toml", "README.md"):
        copy.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    for name in ("atlasjax", "pallas_kernels", "launch"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    found = subprocess.run([copy / "launch" / "install.sh", "cpu", tmp_path / "venv"], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("atlasjax ")
    there = subprocess.run(
        [tmp_path / "venv" / "bin" / "atlasjax", "info", "--preset", "atlas-tiny"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert there.returncode == 0, there.stderr
