"""The CUDA kernels in Triton's interpreter, which runs them on a CPU; a process of its own, since triton decides at import."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

CODE = """
import torch
from draftstill.distill import fused, fused_triton, kernels
from draftstill.distill.divergences import Objective
from tests.distill.laws import N, cast, error, oracle, problem, record, run

g = torch.Generator().manual_seed(0)
z = torch.randn(3, 5003, generator=g) * 20
z[0, :4096] = -torch.inf  # a whole block
z[1] = -torch.inf
plain, want = z.clone(), z.double().exp().sum(1).log()
top, total = fused_triton.row_sums(z)
assert torch.equal(z, plain) and torch.allclose(top[[0, 2]], z.amax(1)[[0, 2]]) and total[1] == 0
assert torch.allclose((top.double() + total.double().log())[[0, 2]], want[[0, 2]], atol=1e-6)
factor = torch.tensor([2.0, 3.0, -0.5])
fused_triton.row_scale(z, top, factor)
assert torch.allclose(z, factor[:, None] * (plain - top[:, None]).exp(), atol=1e-6)

kernels._triton = lambda z: z.dtype == torch.float32
truth, hidden, head = problem(0.9)
teacher = record((truth @ head.T / 0.7).softmax(-1), 16)
for name in ("forward_kl", "lk", "jsd"):
    objective = Objective(name, temperature=0.7)
    value, grad_hidden, grad_head = oracle(hidden, head, teacher, objective)
    _, dh, dw, stats = run(hidden.float(), head.float(), cast(teacher, torch.float32), objective)
    assert max(error(dh, grad_hidden), error(dw, grad_head), abs(stats["loss"] / value.sum().item() - 1)) < 1e-5
print("interpreted")
"""


def test_the_kernels_in_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "interpreted" in done.stdout, done.stderr[-3000:]
