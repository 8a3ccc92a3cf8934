"""PyTorch's names and layouts, by module type, both ways."""

from lazymods.state.layouts.exporting import export_torch as export_torch
from lazymods.state.layouts.importing import Imported as Imported
from lazymods.state.layouts.importing import from_torch as from_torch
