"""Tensors of a pickle that are followed as one piece each: as when every instruction is followed, and as PyTorch."""

import io
import random
import struct
import zipfile
from typing import Any

import numpy as np
import pytest
from checkpoint_files import values

from lazymods.state.files import torch_pickle
from lazymods.state.files.torch_calls import Malformed
from lazymods.state.files.torch_records import Records

torch = pytest.importorskip("torch", reason="torch is an extra")


def state_dict() -> dict[str, Any]:
    """Over 300 tensors: of ranks 0 to 5, of several dtypes, shared, empty, strided, with numbers of 1 to 4 bytes."""
    out: dict[str, Any] = {}
    shared = torch.arange(70_000.0)
    for i in range(40):
        out |= {
            f"layers.{i}.weight": torch.arange(6.0 * i).reshape(i, 3, 2) if i else torch.zeros(0, 3, 2),
            f"layers.{i}.bias": torch.arange(i),
            f"layers.{i}.count": torch.tensor(i),
            f"layers.{i}.half": torch.full((1, 2, 1, 2, 1), i, dtype=torch.bfloat16),
            f"layers.{i}.transposed": torch.arange(6).reshape(2, 3).T + i,
            f"layers.{i}.part": shared[i * 300 : i * 300 + 300 + i],
            f"layers.{i}.whole": shared.view(7, 10_000),
            f"layers.{i}.of_\u00fc": torch.tensor([True, i % 2 == 0]),
        }
    out["tied"] = out["layers.39.weight"]
    out["trained"] = torch.ones(3, requires_grad=True)
    out["parameter"] = torch.nn.Parameter(torch.ones(2))
    out["eighth"] = torch.ones(3, dtype=torch.float8_e4m3fn)
    out["last"] = torch.zeros(2)
    return out


def pickled(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    with zipfile.ZipFile(out) as archive:
        return archive.read("archive/data.pkl")


def walked(raw: bytes, *, in_pieces: bool) -> Any:
    """What a pickle describes, or what is wrong with it."""
    try:
        return torch_pickle.walk(np.frombuffer(raw, np.uint8), in_pieces=in_pieces)
    except Malformed as error:
        return error.got, error.needed


def pieces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are followed in pieces from now on."""
    out: list[int] = []
    follow = Records.follow

    def counting(self: Records, at: int, *arguments: Any) -> int:
        end = follow(self, at, *arguments)
        out.append(end - at)
        return end

    monkeypatch.setattr(Records, "follow", counting)
    return out


NESTED = {"epoch": 3, "model": state_dict(), "optimizer": {"state": {i: {"m": torch.zeros(i)} for i in range(80)}}}


@pytest.mark.parametrize("value", [state_dict(), NESTED], ids=["state dict", "nested"])
def test_the_values_are_those_of_single_instructions(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = pickled(value)
    followed = pieces(monkeypatch)
    assert walked(raw, in_pieces=True) == walked(raw, in_pieces=False)
    assert sum(followed) > 0.7 * len(raw)


def test_the_arrays_are_those_of_pytorch(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    want = state_dict()
    torch.save(want, tmp_path / "model.pt")
    followed = pieces(monkeypatch)
    got = values(tmp_path / "model.pt")
    assert list(got) == list(want)
    for name, tensor in want.items():
        tensor = tensor.detach()
        array = tensor.float().numpy() if tensor.dtype in (torch.bfloat16, torch.float8_e4m3fn) else tensor.numpy()
        np.testing.assert_array_equal(np.asarray(got[name], array.dtype), array, err_msg=name)
    assert sum(followed) > 10_000


def of_each(raw: bytes) -> Any:
    """What the fuzzed pickles have in common: both ways give the same value, or the same error."""
    want = walked(raw, in_pieces=False)
    assert walked(raw, in_pieces=True) == want
    return type(want)


@pytest.mark.slow
def test_a_damaged_pickle_is_read_or_refused_as_by_single_instructions() -> None:
    raw = pickled(state_dict())
    draw = random.Random(0)
    outcomes = set()
    for _ in range(300):
        damaged = bytearray(raw)
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(raw))
            damaged[at] = draw.choice([draw.randrange(256), damaged[draw.randrange(len(raw))], damaged[at] ^ 1])
        outcomes.add(of_each(bytes(damaged)))
    assert outcomes == {tuple, torch_pickle.Pickle}


@pytest.mark.parametrize("seed", range(4))
def test_indices_that_are_mixed_up(seed: int) -> None:
    """Instructions remember and name values by other indices, and the pickle ends with values that are named again."""
    raw = pickled(state_dict())
    draw = random.Random(seed)
    begin = raw.index(b"layers.30.weight")
    wide = [i for i in range(begin, len(raw) - 5) if raw[i] in b"rj" and raw[i + 3 : i + 5] == b"\0\0"]
    narrow = [i for i in range(begin, len(raw) - 2) if raw[i] == ord("h") and raw[i + 2] in b")(h"]
    outcomes = set()
    for _ in range(100):
        mixed = bytearray(raw)
        changed = draw.sample(wide, draw.randint(1, 4))
        for to in changed:
            near = draw.choice([i for i in wide if abs(i - to) < 120])
            index = draw.choice([index_at(raw, near), index_at(raw, near), raw[draw.choice(narrow) + 1]])
            struct.pack_into("<I", mixed, to + 1, index)
        named = b"".join(b"X\6\0\0\0again%dj%b" % (i, mixed[at + 1 : at + 5]) for i, at in enumerate(changed))
        outcomes.add(of_each(bytes(mixed[:-2] + named + mixed[-2:])))
    assert torch_pickle.Pickle in outcomes


# ---------------------------------------------------------------- what a piece does not remember


def puts_of_last_tensor(raw: bytes | bytearray) -> list[int]:
    """Where the last tensor's name, key, identity, sizes, strides, hooks, arguments and itself are remembered."""
    at = raw.rindex(b"last")
    return [i for i in range(at, len(raw)) if raw[i : i + 1] == b"r" and raw[i + 3 : i + 5] == b"\0\0"]


def index_at(raw: bytes | bytearray, at: int) -> int:
    return struct.unpack_from("<I", raw, at + 1)[0]


@pytest.mark.parametrize(
    ("which", "want"), [(0, "last"), (2, "identity"), (3, (2,)), (4, (1,)), (5, {}), (7, "tensor")]
)
def test_a_value_that_is_named_again(which: int, want: Any) -> None:
    raw = pickled(state_dict())
    again = b"X\5\0\0\0again" + b"j" + struct.pack("<I", index_at(raw, puts_of_last_tensor(raw)[which]))
    raw = raw[:-2] + again + raw[-2:]
    found = walked(raw, in_pieces=True)
    assert found == walked(raw, in_pieces=False)
    got = found.value["again"]
    if want == "identity":
        assert got[0] == "storage"
    else:
        assert got == (found.value["last"] if want == "tensor" else want)


def test_an_index_that_is_used_twice() -> None:
    """The later value counts, also where pieces leave it out."""
    raw = bytearray(pickled(state_dict()))
    first = raw.index(b"layers.39.bias") + len(b"layers.39.bias")
    assert raw[first : first + 1] == b"r"
    struct.pack_into("<I", raw, puts_of_last_tensor(raw)[3] + 1, index_at(raw, first))  # its sizes for a name
    raw[-2:-2] = b"X\5\0\0\0again" + b"j" + struct.pack("<I", index_at(raw, first))
    found = walked(bytes(raw), in_pieces=True)
    assert found == walked(bytes(raw), in_pieces=False)
    assert found.value["again"] == (2,)


def test_an_index_that_a_piece_itself_names() -> None:
    """What a tensor remembers does not change what its later instructions name."""
    raw = bytearray(pickled(state_dict()))
    put = puts_of_last_tensor(raw)[2]
    dtype = raw.index(b"ctorch\nFloatStorage\nq")
    struct.pack_into("<I", raw, put + 1, raw[dtype + len(b"ctorch\nFloatStorage\nq")])
    assert walked(bytes(raw), in_pieces=True) == walked(bytes(raw), in_pieces=False)
