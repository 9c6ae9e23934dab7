"""Checks every link of the site: files, pages and anchors. `make docs` runs it after the build.

python docs/check_links.py site
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The links of a page, and the names that links can point to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Notes what the tag links to and what it is called."""
        for name, value in attributes:
            if value and name in ("href", "src"):
                self.links.append(value)
            elif value and name in ("id", "name"):
                self.anchors.add(value)


def broken(site: Path) -> tuple[int, list[str]]:
    """The number of links inside `site`, and a line for each that leads nowhere."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    count, lines = 0, []
    for path, page in pages.items():
        if path.name == "404.html":  # its links are those of the server's root
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            count += 1
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = pages.get(target)
            missing = known and parts.fragment and unquote(parts.fragment) not in known.anchors
            if not target.is_file() or missing:
                lines.append(f"{path.relative_to(site.resolve())}: {link}")
    return count, lines


def main() -> int:
    """Prints the links that lead nowhere."""
    count, lines = broken(Path(sys.argv[1]))
    print("\n".join([*lines, f"{count} links, {len(lines)} lead nowhere"]))
    return 1 if lines or not count else 0


if __name__ == "__main__":
    sys.exit(main())
