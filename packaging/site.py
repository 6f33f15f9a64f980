"""Collects every Markdown page of the repository, in its folder, for the site: `python packaging/site.py TARGET`.

Pages link to each other by relative paths, also out of docs/, so that they can be read in a checkout and on the site.
The site also publishes the JSON Schema of the configuration, for editors. As a hook of mkdocs it lists the features.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from kvproxy.operate.config.reference import file_schema

ROOT = Path(__file__).parent.parent
FOLDERS = ("docs", "kvproxy", "benchmarks", "samples", "deploy", "packaging")
SUFFIXES = (".md", ".png", ".svg", ".json", ".yaml", ".toml", ".py")


def collect(target: Path) -> int:
    """Copy the pages and what they link to; return the number of pages."""
    shutil.rmtree(target, ignore_errors=True)
    listed = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "config.yaml")]
    for folder in FOLDERS:
        listed += [path for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    listed = [path for path in listed if not path.name.endswith("_notes.md")]  # parts of reports
    for path in listed:
        place = target / path.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)
    (target / "kvproxy.schema.json").write_text(json.dumps(file_schema()))
    return sum(path.suffix == ".md" for path in listed)


def on_config(config: Any) -> None:
    """List the page of each feature in the navigation; mkdocs calls it."""
    (section,) = (one for one in config["nav"] if "Features" in one)
    pages = (ROOT / "kvproxy" / "features").glob("*/README.md")
    listed = {page.read_text().partition("\n")[0].lstrip("# ").partition(":")[0]: page for page in pages}
    section["Features"] = [{title: str(listed[title].relative_to(ROOT))} for title in sorted(listed, key=str.casefold)]


if __name__ == "__main__":
    print(f"{collect(Path(sys.argv[1]))} pages")
