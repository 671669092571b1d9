"""Dockerfile, compose file and systemd unit: linted as far as this machine can, with options that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import typer

from attmemo.cli.app import app
from attmemo.serve.gauges import gauges
from attmemo.serve.metrics import Metrics
from attmemo.serve.refusal import Kind

DEPLOY = Path(__file__).parents[2] / "deploy"
ROOT: Any = typer.main.get_command(app)
ENVIRONMENT = {str(option.envvar) for option in ROOT.commands["serve"].params if option.envvar} | {"ATTMEMO_CACHE"}


def test_the_unit_passes_systemd(tmp_path: Path) -> None:
    verify = shutil.which("systemd-analyze")
    if verify is None:
        pytest.skip("there is no systemd-analyze")
    program = tmp_path / "attmemo"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "attmemo.service"
    text = (DEPLOY / "attmemo.service").read_text()
    assert text.count("/opt/attmemo/bin/attmemo serve") == 1
    unit.write_text(text.replace("/opt/attmemo/bin/attmemo", str(program)))
    done = subprocess.run([verify, "verify", str(unit)], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "attmemo.service" in line]
    assert done.returncode == 0, done.stderr
    assert not said


def test_the_compose_file_is_whole() -> None:
    yaml = pytest.importorskip("yaml")
    found = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    workers = [found["services"][name] for name in ("worker-1", "worker-2")]
    for worker in workers:
        assert (DEPLOY / worker["build"]["context"] / worker["build"]["dockerfile"]).exists()
        assert set(worker["environment"]) <= ENVIRONMENT
        assert "database:/data" in worker["volumes"]
        assert worker["command"][:2] == ["--host", "0.0.0.0"]
        assert "API_KEY" in worker["environment"]
        assert "ATTMEMO_BUDGET" in worker["environment"]
        assert worker["environment"]["ATTMEMO_DATABASE"].startswith("/data/")
    assert len({worker["ports"][0] for worker in workers}) == 2
    assert all(port.startswith("127.0.0.1:") for worker in workers for port in worker["ports"])
    targets = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"][0]["static_configs"][0]
    assert targets["targets"] == ["worker-1:3000", "worker-2:3000"]
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("the rest needs docker compose")
    config = [docker, "compose", "-f", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    subprocess.run(config, check=True, env={"MODEL": "/m", "API_KEY": "k", "PATH": "/usr/bin:/bin:/usr/local/bin"})


def test_the_dockerfile_is_whole() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line and not line.startswith("#")]
    known = {"FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL", "HEALTHCHECK"}
    assert {line.split()[0] for line in lines} <= known | {"ENTRYPOINT", "CMD"}
    entry = 'ENTRYPOINT ["attmemo", "serve", "--host", "0.0.0.0"]'
    assert entry in lines, "on the loopback of the container no published port would lead to it"
    assert lines[-1] == 'CMD ["/model", "--budget", "0.01", "--database", "auto"]'
    assert "ATTMEMO_CACHE=/data " in text, "else no record would lie in the volume"
    assert lines.index("USER attmemo") < lines.index(entry), "root runs nothing"
    (extras,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in extras.split(","))
    hadolint = shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("the rest needs hadolint")
    subprocess.run([hadolint, "--ignore", "DL3008", str(DEPLOY / "Dockerfile")], check=True)


def test_options_of_the_unit_exist() -> None:
    text = (DEPLOY / "attmemo.service").read_text()
    (command,) = re.findall(r"^ExecStart=\S+ serve (.*)$", text, re.MULTILINE)
    known = {name for option in ROOT.commands["serve"].params for name in option.opts}
    assert {word for word in command.split() if word.startswith("--")} <= known
    assert "--host 0.0.0.0" in command
    words = " ".join(re.findall(r"^Environment=(.*)$", text, re.MULTILINE)).split()
    named = dict(word.split("=", 1) for word in words)
    assert {name for name in named if name.startswith("ATTMEMO_")} <= ENVIRONMENT
    assert (named["ATTMEMO_BUDGET"], named["ATTMEMO_DATABASE"]) == ("0.01", "auto")


def metrics() -> set[str]:
    """Names that Prometheus reads from a service, those of histograms and counters with their endings."""
    found, idle = Metrics(), SimpleNamespace(model=SimpleNamespace(handle=None), waiting=0, inside=0, draining=False)
    found.now = lambda: dict.fromkeys(gauges(idle), ("", 1.0))  # type: ignore[arg-type]
    found.asked("single")
    found.answered("single", "embed", 1, 1, (1.0, 1.0, 1.0, 1.0))
    found.failed("overloaded")
    found.forward(1, 1, 1, 0, 1.0)
    return {re.split(r"[{ ]", line)[0] for line in found.text().decode().splitlines() if not line.startswith("#")}


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"\b((?:te|attmemo)_\w+)", expression))


def test_the_rules_of_alerts_name_metrics_and_reasons_that_there_are() -> None:
    yaml = pytest.importorskip("yaml")
    (group,) = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    names = set().union(*(names_in(rule["expr"]) for rule in group["rules"]))
    assert len(names) >= 4
    assert names <= metrics()
    reasons = set(re.findall(r'err="(\w+)"', str(group)))
    sources = (file.read_text() for file in (DEPLOY.parent / "attmemo/serve").glob("*.py"))
    assert reasons <= {*get_args(Kind), *re.findall(r'reason="(\w+)"', " ".join(sources))}
    assert all(rule["annotations"]["summary"] for rule in group["rules"])
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("the rest needs promtool")
    subprocess.run([promtool, "check", "rules", str(DEPLOY / "alerts.yml")], check=True)


def test_the_dashboard_shows_metrics_that_there_are() -> None:
    found = json.loads((DEPLOY / "grafana.json").read_text())
    names = set().union(*(names_in(target["expr"]) for panel in found["panels"] for target in panel["targets"]))
    assert len(names) >= 10
    assert names <= metrics()
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])


def test_the_manifest_probes_routes_and_sets_options_that_there_are() -> None:
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert {one["name"] for one in container["env"]} <= ENVIRONMENT
    probes = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert set(probes.values()) == {"/health"}
    assert container["resources"]["requests"] == container["resources"]["limits"], "whole cores of its own"
    volumes = {one["name"] for one in deployment["spec"]["template"]["spec"]["volumes"]}
    assert {one["name"] for one in container["volumeMounts"]} == volumes
    assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 45
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert "runAsUser: 10001" in (DEPLOY / "kubernetes.yaml").read_text()
    assert "--uid 10001" in (DEPLOY / "Dockerfile").read_text()


def test_the_workflow_runs_what_the_project_runs() -> None:
    yaml = pytest.importorskip("yaml")
    root = DEPLOY.parent
    jobs = yaml.safe_load((root / ".github/workflows/test.yml").read_text())["jobs"]
    assert {"run": ".ci/run"} in jobs["test"]["steps"]
    assert (root / ".ci/run").stat().st_mode & 0o100
    assert len(jobs["wheel"]["strategy"]["matrix"]["python"]) == 2
    targets = re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), re.MULTILINE)
    used = re.findall(r"\bmake ([\w-]+)", str(jobs))
    assert used
    assert set(used) <= set(targets)
