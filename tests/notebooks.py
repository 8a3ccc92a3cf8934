"""Runs the notebooks of examples/notebooks, each in a new kernel, and compares what they print with what is stored.

``--write`` stores the new outputs instead, without times. Digits are not compared: accuracies and losses differ in the
last places from one version of XLA to the next. What a notebook claims, it asserts itself.
"""

import argparse
import re
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "examples" / "notebooks"


def executed(path: Path) -> Any:
    """Return a notebook with new outputs, without what lines of progress leave; a cell that raises is an error."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    quiet = ["--log-level=ERROR"]
    NotebookClient(notebook, timeout=300, record_timing=False, coalesce_streams=True, extra_arguments=quiet).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr" or out["text"].strip()]
    notebook.metadata["language_info"] = {"name": "python"}  # the kernel adds the version of Python
    return notebook


def printed(notebook: Any) -> list[str]:
    """What each cell of code shows as text, without its digits."""
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            parts = [out.get("text") or out.get("data", {}).get("text/plain", "") for out in cell.outputs]
            texts.append(re.sub(r"\d+", "0", "".join("".join(part) for part in parts)))
    return texts


def main() -> None:
    """Run all notebooks, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="store the outputs")
    parser.add_argument("names", nargs="*", help="digits, minilm; all if left out")
    options = parser.parse_args()
    import nbformat

    stale = []
    for path in sorted(FOLDER.glob("*.ipynb")):
        if options.names and path.stem not in options.names:
            continue
        start = time.monotonic()
        notebook = executed(path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s", flush=True)
        if options.write:
            nbformat.write(notebook, path)
        for new, old in zip(printed(notebook), printed(nbformat.read(path, as_version=4)), strict=True):
            if new != old:
                stale.append(f"{path.name} prints\n{new}\nand has stored\n{old}")
    if stale:
        sys.exit("\n".join([*stale, "python tests/notebooks.py --write stores the new outputs"]))


if __name__ == "__main__":
    main()
