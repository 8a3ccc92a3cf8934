"""Eight virtual CPU devices, which JAX has to be asked for before it starts: these tests have processes of their own.

``python -m pytest tests/mesh`` asks for them by itself. In a run of other tests as well, a file of this folder is one
item, which runs the file in a child with the same ``-m``; a child of a quick run runs several.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

HERE = Path(__file__).parent
FLAG = "--xla_force_host_platform_device_count"
NOTHING_CHOSEN = 5  # pytest's exit status
IN_A_QUICK_CHILD = 4  # files


def pytest_configure(config: pytest.Config) -> None:
    """Ask for the devices if this folder is all that runs; workers and children inherit that."""
    paths = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    if all(HERE == path or HERE in path.parents for path in paths):
        jax.config.update("jax_platforms", "cpu")
        if FLAG not in os.environ.get("XLA_FLAGS", ""):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}=8".strip()


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Any:
    """Make one item of a file where nobody has asked for the devices."""
    if FLAG in os.environ.get("XLA_FLAGS", ""):
        return None
    return FileOfItsOwn.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let a quick run start one child for several files: the start is most of its time."""
    if config.option.markexpr != "quick":
        return
    children = [item for item in items if isinstance(item, Child)]
    for i, child in enumerate(children):
        if i % IN_A_QUICK_CHILD:
            children[i - i % IN_A_QUICK_CHILD].paths.append(child.path)
            items.remove(child)


class FileOfItsOwn(pytest.File):
    """A file that runs in a child."""

    def collect(self) -> Iterator[pytest.Item]:
        """Give the one item."""
        yield Child.from_parent(self, name="on_eight_devices")


class Child(pytest.Item):
    """A run of pytest on one file, or on several in a quick run."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.paths = [self.path]

    def runtest(self) -> None:
        """Run it; the child itself asks for the devices."""
        markers = self.config.option.markexpr
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-m", markers, *self.paths]
        done = subprocess.run(command, cwd=self.config.rootpath, capture_output=True, text=True, timeout=600)
        assert done.returncode in (0, NOTHING_CHOSEN), done.stdout[-6000:] + done.stderr[-2000:]

    def repr_failure(self, excinfo: Any, style: Any = None) -> str:
        """Show what the child has said."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Name the item."""
        return self.path, None, f"{self.path.name} {self.name}"
