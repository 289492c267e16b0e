"""The README as a package index shows it: links to pages of the repository lead nowhere there, and become the pages' names."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeOutside(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": outside(text)}


def outside(text: str) -> str:
    """`[sharding](docs/sharding.md)` as "sharding (docs/sharding.md)": the source distribution has these files."""

    def named(link: re.Match[str]) -> str:
        title, place = link.groups()
        return link[0] if place.startswith(("http", "#")) else place if title == place else f"{title} ({place})"

    return re.sub(r"\[([^]]+)\]\(([^)]+)\)", named, text)
