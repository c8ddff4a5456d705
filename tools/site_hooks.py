"""Hooks of mkdocs (mkdocs.yml): links that lead out of docs/.

On GitHub a page may link to ../examples/sinks.py, which docs/ does not contain. On the site such a file becomes a page that shows
its text, under source/; a link to a folder is replaced by its text. If the target does not exist, the build fails as at any broken link.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

_log = logging.getLogger("mkdocs.hooks.site")  # warnings below "mkdocs" fail a strict build
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".md": "markdown", ".cuh": "cpp", ".h": "cpp", ".cff": "yaml"}


def _target(docs: Path, page: str, link: re.Match[str]) -> Path | None:
    """The file or folder outside of docs/ that a page links to."""
    target = (docs / page).parent.joinpath(link[2]).resolve()
    return None if target.is_relative_to(docs) else target


def _shown_as(docs: Path, target: Path) -> str:
    """The page that shows a file, by its path in docs/."""
    return f"source/{target.relative_to(docs.parent).as_posix()}.md"


def on_files(files: Any, config: Any) -> Any:
    docs = Path(config["docs_dir"]).resolve()
    pages = [(file.src_uri, file.content_string) for file in files.documentation_pages()]
    targets = {target for page, text in pages for link in _LINK.finditer(text) if (target := _target(docs, page, link))}
    for target in sorted(target for target in targets if target.is_file()):
        name, language = target.relative_to(docs.parent).as_posix(), _LANGUAGES.get(target.suffix, "text")
        # A fence of tildes: the file may have fences of backticks.
        text = f"# {name}\n\n~~~~~~ {language}\n{target.read_text(encoding='utf-8')}\n~~~~~~\n"
        files.append(File.generated(config, _shown_as(docs, target), content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_others: Any) -> str:
    docs = Path(config["docs_dir"]).resolve()
    here = page.file.src_uri
    if here.startswith("source/"):
        return markdown

    def shown(link: re.Match[str]) -> str:
        target = _target(docs, here, link)
        if target is None:
            return link[0]
        if not target.exists():
            _log.warning("%s: %s does not exist", here, link[2])
        if not target.is_file():
            return link[1]
        return f"[{link[1]}]({os.path.relpath(_shown_as(docs, target), Path(here).parent)})"

    return _LINK.sub(shown, markdown)
