"""Records what DeepSpeed 0.15.4, one of the last with sparse attention, makes of many parameters.

`pip download --no-deps --no-binary :all: deepspeed==0.15.4`, unpack it, then from the repository's root
`python -m tests.attention.record_deepspeed_layouts DEEPSPEED/ops/sparse_attention/sparsity_config.py`.
A row of blocks is recorded as an integer, whose bit c is column c.
"""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "deepspeed_layouts.json"
CLASSES = {
    "dense": "DenseSparsityConfig",
    "fixed": "FixedSparsityConfig",
    "variable": "VariableSparsityConfig",
    "bigbird": "BigBirdSparsityConfig",
    "bslongformer": "BSLongformerSparsityConfig",
    "local_sliding_window": "LocalSlidingWindowSparsityConfig",
}
CASES_A_MODE = 24
SEED = 7


def settings(mode: str, draw: random.Random) -> dict[str, Any]:
    """Settings of a mode that both sides accept, without random blocks."""
    if mode == "dense":
        return {}
    found: dict[str, Any] = {"attention": draw.choice(("unidirectional", "bidirectional"))}
    bidirectional = found["attention"] == "bidirectional"
    if mode != "local_sliding_window":
        found["different_layout_per_head"] = draw.random() < 0.5
    if mode == "fixed":
        found["num_global_blocks"] = draw.randint(1, 3)
        patterns = draw.randint(1, 4)
        found["num_local_blocks"] = found["num_global_blocks"] * patterns
        if found["different_layout_per_head"]:
            found["num_different_global_patterns"] = draw.randint(1, patterns)
    if mode == "variable":
        found["local_window_blocks"] = [draw.randint(1, 5) for _ in range(draw.randint(1, 4))]
    if mode in ("fixed", "variable"):
        found["horizontal_global_attention"] = bidirectional and draw.random() < 0.5
    if mode in ("variable", "bslongformer"):
        found["global_block_indices"] = [draw.randint(0, 14) for _ in range(draw.randint(0, 3))]
        if draw.random() < 0.5:
            ends = [start + draw.randint(1, 4) for start in found["global_block_indices"]]
            found["global_block_end_indices"] = ends
    if mode in ("bigbird", "bslongformer", "local_sliding_window"):
        found["num_sliding_window_blocks"] = draw.randint(1, 7)
    if mode == "bigbird":
        found |= {"num_global_blocks": draw.randint(1, 4), "num_random_blocks": 0}
    return found


def main(path: Path) -> None:
    """Writes the file of cases."""
    spec = importlib.util.spec_from_file_location("sparsity_config", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} cannot be imported")
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    draw, cases = random.Random(SEED), []
    for mode, name in CLASSES.items():
        for _ in range(CASES_A_MODE):
            blocks, heads, chosen = draw.randint(7, 15), draw.randint(1, 5), settings(mode, draw)
            layout = getattr(theirs, name)(num_heads=heads, **chosen).make_layout(16 * blocks)
            rows = [
                [sum(int(bit) << column for column, bit in enumerate(row)) for row in head] for head in layout
            ]
            cases.append(
                {"settings": {"mode": mode, **chosen}, "heads": heads, "blocks": blocks, "rows": rows}
            )
    FILE.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
