"""A hook of MkDocs: each notebook of examples/notebooks becomes a page, with the outputs that are stored in it."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `notebooks/NAME.md` for each notebook."""
    exporter = MarkdownExporter()
    for path in sorted(FOLDER.glob("*.ipynb")):
        content, _ = exporter.from_filename(str(path))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=content))
    return files
