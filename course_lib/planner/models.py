"""Published models, for lessons and scenarios to plan with; models.json has the source of each shape."""

from __future__ import annotations

import json
from pathlib import Path

from course_lib.planner.spec import ModelSpec

_FAMILIES = json.loads(Path(__file__).with_name("models.json").read_text(encoding="utf-8"))


def _family(name: str) -> dict[str, ModelSpec]:
    alike, models = _FAMILIES[name]["alike"], _FAMILIES[name]["models"]
    return {size: ModelSpec(**alike, **shape) for size, shape in models.items()}


GPT3, LLAMA3, MIXTURES = map(_family, ("GPT3", "LLAMA3", "MIXTURES"))
