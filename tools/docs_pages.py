"""The site's pages that are not in docs/, and fields in its reference: a hook of mkdocs and an extension of griffe.

README, CONTRIBUTING and CHANGELOG are pages of the site, and so is every source file that a page links to, such as
../specdec_jax/types/values.py.
"""

import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
LANGUAGES = {".py": "python", ".cff": "yaml", ".md": "markdown"}


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages outside docs/ and those of the source files that any page links to."""
    sources: dict[str, str] = {}
    for page, name in PAGES.items():
        text = LINK.sub(lambda match: _inside(match[1], sources), (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    for file in list(files.documentation_pages()):
        for link in LINK.findall(file.content_string):
            if link.startswith("../"):
                sources[link[3:]] = file.src_uri
    for name, page in sources.items():
        if not (ROOT / name).is_file():
            raise PluginError(f"{page} links to {name}, which is not there")
        code = f"```{LANGUAGES.get(Path(name).suffix, 'text')}\n{(ROOT / name).read_text(encoding='utf-8')}\n```"
        files.append(File.generated(config, f"source/{name}.md", content=f"# {name}\n\n{code}\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Links that leave docs/ lead to the pages of the source files; names of the reference are paragraphs."""
    del others
    markdown = markdown.replace("\n::: ", "\n\n::: ")
    if page.file.src_uri.startswith("source/"):
        return markdown
    return LINK.sub(lambda match: re.sub(r"^\.\./(.+)", r"source/\1.md", match[1]), markdown)


def _inside(link: str, sources: dict[str, str]) -> str:
    """A link of a file in the root as one of a page in docs/."""
    moved = {name: page for page, name in PAGES.items()}
    if link in moved:
        return moved[link]
    if link.startswith("docs/"):
        return link.removeprefix("docs/")
    sources[link] = "a page of the root"
    return f"../{link}"


class MoreDocstrings(griffe.Extension):
    """A field's comment is its docstring; a strategy's begins with its file's, which has the source."""

    def on_function_instance(self, *, func: griffe.Function, **others: Any) -> None:
        """Called by griffe for every function that it reads."""
        del others
        about = func.module.docstring
        if func.name == func.module.name and about and func.docstring:
            func.docstring.value = f"{about.value}\n\n{func.docstring.value}"

    def on_attribute_instance(self, *, attr: griffe.Attribute, **others: Any) -> None:
        """As above, for every attribute. The comment ends the field's line, or is the line after it."""
        del others
        if attr.docstring or not attr.lineno or not attr.parent or not attr.parent.is_class:
            return
        lines = attr.lines_collection[attr.filepath]
        for line in lines[attr.lineno - 1 : (attr.endlineno or attr.lineno) + 1]:
            if comment := re.search(r"(?:^ +|  )# (.+)", line):
                attr.docstring = griffe.Docstring(comment[1], parent=attr)
                return
            if line is not lines[attr.lineno - 1] and not line.lstrip().startswith("#"):
                return
