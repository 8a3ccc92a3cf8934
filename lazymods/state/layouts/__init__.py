"""PyTorch's names and layouts, by module type, both ways."""

from lazymods.state.layouts.exporting import Written as Written
from lazymods.state.layouts.exporting import written as written
from lazymods.state.layouts.importing import Imported as Imported
from lazymods.state.layouts.importing import from_torch as from_torch
from lazymods.state.layouts.importing import with_sizes as with_sizes
