"""Rules for arrays, for the ``rename=`` of :func:`lazymods.load`: where a file has other arrays than the model.

They stand in one list with pairs ``(pattern, replacement)``, and are applied in order::

    lm.load(model, path, layout="torch", rename=[
        lm.rules.Transpose(r"c_(attn|proj|fc)[.]weight$"),               # GPT-2's Conv1D has (in, out)
        lm.rules.Split("c_attn", into=("query", "key", "value")),
    ])
"""

from lazymods.state.array_parts import Copy as Copy
from lazymods.state.array_parts import Merge as Merge
from lazymods.state.array_parts import Split as Split
from lazymods.state.array_rules import Add as Add
from lazymods.state.array_rules import Reshape as Reshape
from lazymods.state.array_rules import Transpose as Transpose
from lazymods.state.array_stacks import Stack as Stack
from lazymods.state.array_stacks import Unstack as Unstack
from lazymods.state.quantized import Dequantize as Dequantize
