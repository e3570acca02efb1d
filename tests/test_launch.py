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
    print("ACTIVE")
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
    assert calls[0][:5] == ["gcloud", "compute", "tpus", "queued-resources", "create"]
    assert "--spot" in calls[0]
    (start,) = (call[call.index("--command") + 1] for call in calls if "run.sh atlasjax" in " ".join(call))
    assert "JAX_COORDINATOR_PORT=8476" in start
    arguments = re.search(r"run\.sh atlasjax (.*?) > ", start, re.DOTALL)[1].replace("\\\n", " ").split()
    config = config_of(arguments)
    assert config.processes.distributed
    assert config.run_dir.startswith("gs://")


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
    wanted = re.search(r"\.\[(\w+)\]", (LAUNCH / "install.sh").read_text())[1]
    assert wanted in extras


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
