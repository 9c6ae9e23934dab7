"""A hook of mkdocs: files of the repository that pages link to become a part of the site.

A page links to what lies beside docs/ by a relative path, which is right in the repository. In the site such a file is
below `repository/`: Markdown as a page, other texts as a page with their code, all else as it is.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(#[^)\s]*)?(?=\))")
CODE = {
    ".py": "python",
    ".toml": "toml",
    ".yaml": "yaml",
    ".ipynb": "json",
    ".sbatch": "bash",
    ".sh": "bash",
}
CLASSES = "hide:\n  - toc\nsearch:\n  exclude: true"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the files outside docs/ that pages link to, and those that these link to in turn.

    What programs of docs/ leave beside themselves is no part of the site.
    """
    for file in [each for each in files if "__pycache__" in each.src_uri]:
        files.remove(file)
    waiting = [ROOT / "docs" / file.src_uri for file in files.documentation_pages()]
    while waiting:
        page = waiting.pop()
        for target in linked(page):
            uri = site_uri(target)
            if uri.startswith("repository/") and uri not in files.src_uris:
                files.append(made(target, uri, config))
                if target.suffix == ".md":
                    waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links to their place in the site, and lets searches find messages first."""
    uri = page.file.src_uri
    if uri == "troubleshooting.md":
        page.meta["search"] = {"boost": 3}
    here = (
        ROOT / uri.removeprefix("repository/")
        if uri.startswith("repository/")
        else ROOT / "docs" / uri
    )

    def moved(match: re.Match[str]) -> str:
        target = Path(os.path.normpath(here.parent / match[1]))
        if not target.exists() or ROOT not in target.parents:
            return match[0]
        return posixpath.relpath(site_uri(target), posixpath.dirname(uri)) + (match[2] or "")

    return LINK.sub(moved, markdown) if here.suffix == ".md" and here.is_file() else markdown


def linked(page: Path) -> list[Path]:
    """The files of the repository that a page of Markdown links to."""
    found = [
        Path(os.path.normpath(page.parent / match[1])) for match in LINK.finditer(page.read_text())
    ]
    inside = [path for path in found if path.exists() and ROOT in path.parents]
    folders = [path for path in inside if path.is_dir()]
    return [*inside, *(file for folder in folders for file in files_in(folder))]


def files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in CODE)


def site_uri(path: Path) -> str:
    """The place of a file of the repository among the sources of the site."""
    relative = path.relative_to(ROOT).as_posix()
    if relative.startswith("docs/"):
        return relative.removeprefix("docs/")
    if path.is_dir():
        return f"repository/{relative}/index.md"
    return f"repository/{relative}" + (".md" if path.suffix in CODE else "")


def made(path: Path, uri: str, config: MkDocsConfig) -> File:
    """The file as a source of the site."""
    title = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        names = [f"- [{file.name}]({file.name}.md)" for file in files_in(path)]
        text = "\n".join([f"---\n{CLASSES}\n---\n\n# {title}\n", *names])
        return File.generated(config, uri, content=text)
    if path.suffix not in CODE:
        return File.generated(config, uri, abs_src_path=str(path))
    text = f"---\n{CLASSES}\n---\n\n# {title}\n\n````{CODE[path.suffix]}\n{path.read_text()}````\n"
    return File.generated(config, uri, content=text)
