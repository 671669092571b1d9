"""A thread beside requests leaves the team of torch's threads: a team of its own would have theirs sleep."""

from __future__ import annotations

import sys

import pytest
from children import run_child

_ALONE = """
import os, threading
import torch
from attmemo.kernels.omp_team import leave_team

torch.set_num_threads(2)
torch.randn(800, 384) @ torch.randn(384, 777)  # the team of this thread
before, counts = len(os.listdir("/proc/self/task")), {}

def work():
    if leaves:
        leave_team()
    for dtype in (torch.float32, torch.bfloat16):
        torch.nn.functional.linear(torch.randn(800, 384, dtype=dtype), torch.randn(777, 384, dtype=dtype))
        counts[str(dtype)] = len(os.listdir("/proc/self/task"))

thread = threading.Thread(target=work)
thread.start()
thread.join()
result = [count - before - 1 for count in counts.values()]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_thread_that_left_the_team_starts_no_threads_for_its_products() -> None:
    assert run_child(_ALONE, leaves=True, environment={"OMP_NUM_THREADS": "2"}).result == [0, 0]
    if max(run_child(_ALONE, leaves=False, environment={"OMP_NUM_THREADS": "2"}).result) < 1:
        pytest.skip("here torch starts no threads for a second thread anyway")
