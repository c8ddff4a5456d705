"""Hooks of mkdocs (mkdocs.yml): links that lead out of docs/ lose their target on the site.

On GitHub a page may link to ../examples/sinks.py, which the site does not contain. Such a link is replaced by its text; if the file
does not exist, the build fails as at any broken link.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_log = logging.getLogger("mkdocs.hooks.site")  # warnings below "mkdocs" fail a strict build
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_others: Any) -> str:
    docs = Path(config["docs_dir"])
    folder = (docs / page.file.src_uri).parent

    def shown(link: re.Match[str]) -> str:
        target = (folder / link[2]).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            _log.warning("%s: %s does not exist", page.file.src_uri, link[2])
        return link[1]

    return _LINK.sub(shown, markdown)
