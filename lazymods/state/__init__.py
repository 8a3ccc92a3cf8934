"""State dicts and checkpoints: a model's arrays by dotted name, into files, and back."""

from lazymods.state.load import LoadResult as LoadResult
from lazymods.state.load_state_dict import load_state_dict as load_state_dict
from lazymods.state.state_dict import state_dict as state_dict
