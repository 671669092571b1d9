"""The Triton kernels do what the reference does, and nothing needs Triton that does not ask for it.

The cases are in triton_cases.py. They run in a process of their own, in Triton's interpreter, which has to be chosen
before Triton is imported; where there is a GPU they run there too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ops_cases import Case

from attmemo.errors import ImplementationError
from attmemo.fastseq.ops import multi_head_cache_attention
from attmemo.fastseq.serving.ops import triton as implementation
from attmemo.fastseq.serving.ops.arguments import check_arguments

HERE = Path(__file__).resolve().parent


def run_cases(interpret: bool, which: str = "not slow") -> None:
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    environment.pop("ATTMEMO_ATTENTION", None)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", which, str(HERE / "triton_cases.py")]
    done = subprocess.run(command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def test_the_kernels_do_what_the_reference_does() -> None:
    pytest.importorskip("triton", reason="package triton is not installed")
    run_cases(interpret=True)


@pytest.mark.slow
def test_the_kernels_do_what_the_reference_does_in_many_random_calls() -> None:
    pytest.importorskip("triton", reason="package triton is not installed")
    run_cases(interpret=True, which="slow")


def test_the_kernels_do_what_the_reference_does_on_a_gpu() -> None:
    pytest.importorskip("triton", reason="package triton is not installed")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run_cases(interpret=False, which="slow or not slow")


def test_without_triton_everything_else_works() -> None:
    code = """
import sys
sys.modules["triton"] = None  # as if it were not installed
from ops_cases import Case
from attmemo.errors import ImplementationError
from attmemo.fastseq.ops import multi_head_cache_attention
case = Case([(1, 3), (2, 0)])
multi_head_cache_attention(**case.make(), **case.attributes())
try:
    multi_head_cache_attention(**case.make(), **case.attributes(), implementation="triton")
except ImplementationError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=HERE, capture_output=True, text=True, timeout=600, check=False
    )
    assert "triton cannot do this: the package triton is not installed" in done.stdout, done.stderr[-2000:]


def test_tensors_in_the_hosts_memory_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="package triton is not installed")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    case = Case([(1, 3)])
    inputs = case.make()
    with pytest.raises(ImplementationError, match="the tensors are in the host's memory"):
        multi_head_cache_attention(**inputs, **case.attributes(), implementation="triton")


class Recorder:
    """Stands for a kernel and keeps what it was launched with."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **constants: self.calls.append((arguments, constants))


def described(value: Any) -> str:
    """The type of an argument as Triton writes it."""
    if isinstance(value, torch.Tensor):
        names = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "int8": "i8", "uint8": "u8", "int64": "i64"}
        return "*" + names[str(value.dtype).removeprefix("torch.")]
    return "fp32" if isinstance(value, float) else "i32"


@pytest.mark.parametrize(
    ("dtype", "bits", "splits", "options"),
    [
        (torch.float16, 8, 3, {"alibi": True, "mask": "2d"}),
        (torch.bfloat16, 4, 1, {}),
        pytest.param(torch.float32, 0, 1, {"mask": "3d"}, marks=pytest.mark.slow),
        pytest.param(torch.float32, 8, 3, {"alibi": True}, marks=pytest.mark.slow),
        pytest.param(torch.float16, 0, 3, {"paged": False, "width": 256}, marks=pytest.mark.slow),
        pytest.param(torch.float16, 0, 1, {"width": 64}, marks=pytest.mark.slow),
    ],
)
def test_the_kernels_compile_for_a_gpu_that_is_not_there(
    dtype: torch.dtype, bits: int, splits: int, options: dict[str, Any]
) -> None:
    """To machine code, as they would be launched, in the shared memory of a common GPU (compute capability 8.6)."""
    triton = pytest.importorskip("triton", reason="package triton is not installed")
    if not {"nvidia"} <= set(triton.backends.backends):
        pytest.skip("this Triton has no compiler for NVIDIA GPUs")
    if implementation.is_interpreted():
        pytest.skip("Triton is interpreting")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attmemo.fastseq.serving.ops import triton_kernels

    case = Case([(1, 6), (30, 4)], heads=8, dtype=dtype, bits=bits, page=16, **{"width": 128, **options})
    arguments = check_arguments(**case.make(), **case.attributes())
    recorders = {name: Recorder() for name in ("store", "attend", "join")}
    kernels = SimpleNamespace(tl=triton_kernels.tl, **recorders)
    seqstarts, kvstarts, cachestarts = arguments.seqstarts, arguments.kvstarts, arguments.cachestarts
    output = torch.empty_like(arguments.query)
    implementation._store(kernels, arguments, seqstarts, cachestarts, arguments.start_pos)
    implementation._attend(kernels, arguments, output, seqstarts, kvstarts, cachestarts, None, splits)
    for name, recorder in recorders.items():
        for given, constants in recorder.calls:
            launch = {key: constants.pop(key) for key in ("num_warps", "num_stages") if key in constants}
            kernel = getattr(triton_kernels, name)
            signature = dict(zip(kernel.arg_names, map(described, given), strict=False))
            signature |= dict.fromkeys(constants, "constexpr")
            assert list(signature) == kernel.arg_names
            source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
            compiled = triton.compile(source, target=GPUTarget("cuda", 86, 32), options=launch)
            assert compiled.asm["cubin"]
            assert compiled.metadata.shared <= 99 * 1024, name
    assert len(recorders["join"].calls) == (splits > 1)
