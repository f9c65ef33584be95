"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import torch

README = Path(__file__).parent.parent / "README.md"


def test_python_example_runs_and_is_on_policy() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    exec(code, names)
    out, old, v = names["out"], names["old"], names["v"]
    assert torch.equal(out.log_prob.detach(), old)  # type: ignore[attr-defined, arg-type]
    assert float(names["metrics"]["ratio_max_deviation"]) == 0.0  # type: ignore[index]
    assert v.grad.abs().max() > 0  # type: ignore[attr-defined]
