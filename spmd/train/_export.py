"""Exports a trained model as safetensors. A Hugging Face model also gets the configuration files that `from_pretrained` needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mesh
import spmd


def export(model: Any, folder: Path) -> None:
    """Write the model into `folder`; every process writes its own shards. An existing folder is left unchanged."""
    if folder.exists():
        return
    with mesh.extended_timeout("writing the model"):
        spmd.checkpoint.save_safetensors(folder, model)
        if mesh.init().index == 0 and hasattr(model, "config") and hasattr(model.config, "save_pretrained"):
            model.config.save_pretrained(folder)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(folder)


__all__ = ["export"]
