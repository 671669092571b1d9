"""The wheel: made from the source distribution, installed where there is no compiler, run with plain instructions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

SMOKE = """
import sys
from pathlib import Path
import torch
import attmemo
from attmemo.kernels import _row_attention
from attmemo.kernels.linear8 import Linear8
from transformers import BertConfig, BertModel

assert Path(attmemo.__file__).is_relative_to(sys.prefix), attmemo.__file__
isa = sys.argv[1]
assert _row_attention.instruction_sets()[0] == isa, _row_attention.instruction_sets()
assert isa != "generic" or Linear8.instruction_sets() == ["generic"], Linear8.instruction_sets()
torch.manual_seed(0)
sizes = dict(vocab_size=100, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = BertModel(BertConfig(**sizes)).eval()
ids, mask = torch.randint(5, 100, (4, 24)), torch.ones(4, 24, dtype=torch.long)
mask[1, 9:] = 0
with torch.inference_mode():
    stock = model(input_ids=ids, attention_mask=mask).last_hidden_state
    attmemo.memoize(model, reuse="none")
    packed = model(input_ids=ids, attention_mask=mask).last_hidden_state
    assert model.attmemo.stats()["sequences"] == 4
    torch.testing.assert_close(packed[mask.bool()], stock[mask.bool()], atol=1e-5, rtol=1e-4)
    attmemo.memoize(model, database=":memory:", budget=0.01, reuse="rows", tokenizer=None, answer="mean")
    for _ in range(3):
        served = model(input_ids=ids, attention_mask=mask).last_hidden_state
        model.attmemo.flush()
    assert model.attmemo.stats()["repeated"] > 0, model.attmemo.stats()
    torch.testing.assert_close(served[mask.bool()], stock[mask.bool()], atol=1e-5, rtol=1e-4)
print("smoke test passed with", isa)
"""


def run(*words: str | Path, cwd: Path, **more: str) -> str:
    """Run a program; its output. The test's own paths and build flags are not handed on."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ATTMEMO", "PIP_"))}
    done = subprocess.run(
        [*map(str, words)], cwd=cwd, env=kept | more, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source distribution, of what git would carry away."""
    tree = tmp_path_factory.mktemp("tree")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    for name in filter(None, names.decode().split("\0")):
        target, source = tree / name, REPOSITORY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(os.readlink(source))
        elif source.exists():
            shutil.copyfile(source, target)
    code = "from setuptools import build_meta; print(build_meta.build_sdist('dist'))"
    run(sys.executable, "-c", code, cwd=tree)
    (made,) = (tree / "dist").glob("*.tar.gz")
    return made


@pytest.fixture(scope="module")
def wheel(sources: Path) -> Path:
    """A wheel, made from the source distribution alone."""
    folder = sources.parent / "wheel"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-index",
        "--no-build-isolation",
        "--wheel-dir",
        folder,
    )
    run(*pip, sources, cwd=sources.parent)
    (made,) = folder.glob("*.whl")
    return made


def test_the_source_distribution_has_every_file_that_is_compiled(sources: Path) -> None:
    with tarfile.open(sources) as archive:
        held = {"/".join(Path(name).parts[1:]) for name in archive.getnames()}
    native = {f"native/{file.name}" for file in (REPOSITORY / "native").glob("*.[ch]")}
    assert native <= held, native - held


def test_the_wheel_has_every_module_and_no_source(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    rooms = {REPOSITORY / "attmemo": "attmemo", REPOSITORY / "profiler": "attmemo/profiler"}
    wanted = {
        f"{name}/{file.relative_to(room)}"
        for room, name in rooms.items()
        for file in room.rglob("*")
        if file.suffix in (".py", ".pyi", ".typed", ".html", ".j2", ".txt")
    }
    assert wanted <= held, wanted - held
    stubs = [name for name in held if name.endswith(".pyi")]
    assert sum(name.endswith(".so") for name in held) == len(stubs) > 0
    assert not [name for name in held if name.endswith((".c", ".h")) or name.startswith(("native", "tests"))]


@pytest.mark.parametrize("isa", ["generic", "best"])
def test_the_wheel_works_without_a_compiler_and_without_fast_instructions(
    wheel: Path, tmp_path: Path, isa: str
) -> None:
    from attmemo.kernels import _row_attention

    run(sys.executable, "-m", "venv", tmp_path / "clean", cwd=tmp_path)
    python = tmp_path / "clean" / "bin" / "python"
    none = str(tmp_path / "no-programs")
    run(python, "-m", "pip", "install", "--no-index", "--no-deps", wheel, cwd=tmp_path, PATH=none)
    # torch and the others are those of this environment. A path in a .pth file leads to packages, not to other .pth
    # files, so an editable attmemo there is not seen.
    installed = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip())
    (installed / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    without = {"ATTMEMO_WITHOUT": "amx avx512 avx2", "ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
    plain = without if isa == "generic" else {}
    name = isa if isa == "generic" else _row_attention.instruction_sets()[0]
    said = run(python, "-c", SMOKE, name, cwd=tmp_path, PATH=none, ATTMEMO_CACHE=str(tmp_path / "cache"), **plain)
    assert "smoke test passed" in said
    assert "doctor" in run(installed.parents[2] / "bin" / "attmemo", "--help", cwd=tmp_path, PATH=none)


@pytest.mark.parametrize(("system", "machine"), [("win32", "AMD64"), ("darwin", "arm64"), ("linux", "riscv64")])
def test_another_system_is_refused_with_a_next_step(sources: Path, tmp_path: Path, system: str, machine: str) -> None:
    code = (
        "import platform, runpy, setuptools.command.build_ext, sys\n"
        "sys.platform, name = sys.argv.pop(1), sys.argv.pop(1)\n"
        "platform.machine = lambda: name\nrunpy.run_path('setup.py')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, system, machine, "--version"], cwd=REPOSITORY, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "attmemo runs on Linux, on x86-64 and arm64" in done.stderr
    assert machine in done.stderr
    assert "Next: " in done.stderr
