"""What the files of deploy/ start runs: the command with its settings, and the check of the container's health."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from docs_tools import REPOSITORY
from page_runs import Call, run, serve_once
from services import living, tiny

DEPLOY = REPOSITORY / "deploy"
Started = tuple[list[str], dict[str, str]]
"""The words of a command, and its environment."""


def of_image(key: str) -> list[str]:
    """The words of an instruction of the Dockerfile."""
    (found,) = re.findall(rf"^{key}\b[^\[]*(\[.*\])$", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return list(json.loads(found))


def by_docker() -> Started:
    return of_image("ENTRYPOINT") + of_image("CMD"), {}


def by_compose() -> Started:
    yaml = pytest.importorskip("yaml")
    worker = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["worker-1"]
    default = re.compile(r"\$\{\w+:-(.*?)\}")
    settings = {name: default.sub(r"\1", value) for name, value in worker["environment"].items()}
    return of_image("ENTRYPOINT") + worker["command"], settings


def by_kubernetes() -> Started:
    yaml = pytest.importorskip("yaml")
    deployment, _ = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    settings = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    return of_image("ENTRYPOINT") + container["args"], settings


def by_systemd() -> Started:
    text = (DEPLOY / "attmemo.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    words = " ".join(re.findall(r"^Environment=(.*)$", text, re.MULTILINE)).split()
    program, *rest = shlex.split(command)
    return [Path(program).name, *rest], {"MODEL_ID": "/model"} | dict(word.split("=", 1) for word in words)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("started", [by_docker, by_compose, by_kubernetes, by_systemd])
def test_the_service_that_is_started_so_answers(
    started: Callable[[], Started], models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program, *words), settings = started()
    assert program == "attmemo"
    (tmp_path / "data").mkdir()
    for name, value in settings.items():
        here = re.sub("^(?:/data|/var/lib/attmemo)", str(tmp_path / "data"), value)
        monkeypatch.setenv(name, models["MODEL"] if value == "/model" else here)
    monkeypatch.delenv("API_KEY", raising=False)  # else each request would need it
    answered = serve_once(monkeypatch)
    run(Call(tuple(words)), models | {"/model": models["MODEL"]})
    assert answered == [(200, 200)]


def test_the_health_check_of_the_image_tells_a_service_that_answers_from_none(tmp_path: Path) -> None:
    program, *words = of_image("HEALTHCHECK")
    assert program == "python"

    def checked(port: str) -> int:
        command = [sys.executable, *words]
        return subprocess.run(command, env=os.environ | {"PORT": port}, capture_output=True, timeout=60).returncode

    with living(tiny(tmp_path, None)) as live:
        port = live.url.rpartition(":")[2]
        assert checked(port) == 0
    assert checked(port) != 0


def test_files_that_a_comment_or_command_names_are_there() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in DEPLOY.iterdir())
    named = set(re.findall(r"\bdeploy/[\w.-]+", text))
    assert len(named) >= 3
    assert not [name for name in named if not (REPOSITORY / name).is_file()]
