"""Good checkpoint files of every format, and what random edits make of them.

A case is a number: the same seed and number give the same file. Opening it and reading every tensor must work, or raise
``CheckpointError`` with the file's name, and a model that it is loaded into must take it whole or stay as it was;
``outcome_of`` says which, and raises what is a fault.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import struct
import threading
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors.numpy import save as save_safetensors

import lazymods as lm
from lazymods.state.files.opening import open_checkpoint
from lazymods.state.files.stored import StoredTensor

Tree = dict[str, bytes]  # the files of a checkpoint by their path in its folder
Edit = Callable[[random.Random, bytes], bytes]


def arrays() -> dict[str, np.ndarray]:
    g = np.random.default_rng(0)
    return {
        "fc1.kernel": g.standard_normal((3, 4)).astype(np.float32),
        "fc1.bias": g.standard_normal(4).astype(np.float32),
        "norm.scale": g.standard_normal(5).astype(ml_dtypes.bfloat16),
        "step": np.asarray(7, np.int64),
        "mask": np.asarray([True, False, True]),
    }


# ---------------------------------------------------------------- good ones


def npz(write: Any = np.savez) -> bytes:
    out = io.BytesIO()
    values = {name: value for name, value in arrays().items() if value.dtype != ml_dtypes.bfloat16}
    write(out, **values, fortran=np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    return out.getvalue()


def saved_npz() -> bytes:
    """What ``lm.save`` writes of bfloat16 and of tied parameters."""
    out = io.BytesIO()
    values: dict[str, Any] = {n: v.view("V2") if v.dtype == ml_dtypes.bfloat16 else v for n, v in arrays().items()}
    texts = {"__dtypes__": {"norm.scale": "bfloat16"}, "__aliases__": {"tied": "fc1.bias"}}
    values |= {key: np.frombuffer(json.dumps(text).encode(), np.uint8) for key, text in texts.items()}
    np.savez(out, **values)
    return out.getvalue()


def torch_file(*, legacy: bool) -> bytes:
    import torch

    tensors: dict[str, Any] = {
        name: torch.from_numpy(value.astype(np.float32) if value.dtype == ml_dtypes.bfloat16 else value)
        for name, value in arrays().items()
    }
    tensors["norm.scale"] = torch.nn.Parameter(tensors["norm.scale"].to(torch.bfloat16))
    tensors["view"] = tensors["fc1.kernel"].t()[1:]
    out = io.BytesIO()
    torch.save({"model": tensors, "epoch": 3}, out, _use_new_zipfile_serialization=not legacy)
    return out.getvalue()


def sharded() -> Tree:
    values = arrays()
    parts = [dict(list(values.items())[i::2]) for i in range(2)]
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    weight_map = {name: file for part, file in zip(parts, names, strict=True) for name in part}
    index = {"metadata": {"total_size": 100}, "weight_map": weight_map}
    shards = {file: save_safetensors(part) for part, file in zip(parts, names, strict=True)}
    return {"model.safetensors.index.json": json.dumps(index).encode(), **shards}


def orbax_folder(folder: Path, *, use_ocdbt: bool) -> Tree:
    import orbax.checkpoint as ocp

    path = folder / f"orbax-{use_ocdbt}"
    tree: dict[str, Any] = {"fc1": {}, "norm": {}}
    for name, value in arrays().items():
        *parents, last = name.split(".")
        (tree[parents[0]] if parents else tree)[last] = value
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=use_ocdbt)) as checkpointer:
        checkpointer.save(path, tree)
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def good_ones(folder: Path, *, torch: bool = True) -> dict[str, Tree]:
    """Return good checkpoints by format, each as its files; ``folder`` is used to write them."""
    out: dict[str, Tree] = {
        "safetensors": {"model.safetensors": save_safetensors(arrays(), {"format": "np"})},
        "npz": {"model.npz": npz()},
        "compressed npz": {"model.npz": npz(np.savez_compressed)},
        "saved npz": {"model.npz": saved_npz()},
        "sharded": sharded(),
        "orbax": orbax_folder(folder, use_ocdbt=True),
        "orbax zarr": orbax_folder(folder, use_ocdbt=False),
    }
    if torch:
        out["torch"] = {"model.pt": torch_file(legacy=False)}
        out["torch stream"] = {"model.pt": torch_file(legacy=True)}
    return out


# ---------------------------------------------------------------- edits of bytes

NUMBERS = [0, 1, 2, 7, 8, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63 - 1, 2**64 - 1]
MARKS = re.compile(rb"PK\x01\x02|PK\x03\x04|PK\x05\x06|PK\x06\x06|PK\x06\x07|\x93NUMPY|[(\x86\x87\x85]|[KJM]|X|\{")


def flip(rng: random.Random, raw: bytes) -> bytes:
    out = bytearray(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


def cut(rng: random.Random, raw: bytes) -> bytes:
    return raw[: rng.randrange(len(raw))]


def remove(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw))
    return raw[:at] + raw[at + rng.choice([1, 2, 4, 8, rng.randrange(1, 200)]) :]


def insert(rng: random.Random, raw: bytes) -> bytes:
    at = rng.randrange(len(raw) + 1)
    return raw[:at] + rng.randbytes(rng.choice([1, 2, 4, 8, 64])) + raw[at:]


def splice(rng: random.Random, raw: bytes) -> bytes:
    """Copy a piece of the file over, or into, another place."""
    length = rng.choice([1, 2, 4, 8, 16, 46, 64, 100])
    source, target = rng.randrange(len(raw)), rng.randrange(len(raw))
    return raw[:target] + raw[source : source + length] + raw[target + rng.choice([0, length]) :]


def number(rng: random.Random, raw: bytes) -> bytes:
    """Write a number over a field, mostly one that follows something that looks like a header."""
    marks = [m.start() for m in MARKS.finditer(raw)]
    at = rng.choice(marks) + rng.randrange(48) if marks and rng.random() < 0.8 else rng.randrange(len(raw))
    width = rng.choice([1, 2, 4, 8])
    value = rng.choice([*NUMBERS, len(raw), len(raw) - 1, len(raw) + 1, rng.getrandbits(64)]) % (1 << 8 * width)
    return raw[:at] + value.to_bytes(width, "little") + raw[at + width :]


def digits(rng: random.Random, raw: bytes) -> bytes:
    """Replace a number that is written in digits."""
    found = list(re.finditer(rb"\d+", raw))
    if not found:
        return flip(rng, raw)
    match = rng.choice(found)
    new = rng.choice([b"0", b"-1", b"1e3", b"9" * 30, b"4294967296", b"9223372036854775808", b"3.0", b"", b"12"])
    return raw[: match.start()] + new + raw[match.end() :]


WORDS = [
    b"<f4",
    b"|O",
    b"<f8",
    b">f4",
    b"|V2",
    b"<U1",
    b"|b1",
    b"F32",
    b"BF16",
    b"Q4",
    b"True",
    b"False",
    b"null",
    b"NaN",
]
WORDS += [
    b"FloatStorage",
    b"DoubleStorage",
    b"UntypedStorage",
    b"_rebuild_qtensor",
    b"../x",
    b"\\ud800",
    b"[[[[",
    b"{}",
]
WORDS += [b"float32", b"bfloat16", b"float64", b"zstd", b"gzip", b"jax.Array", b"np.ndarray", b"string", b"scalar"]


def word(rng: random.Random, raw: bytes) -> bytes:
    """Write one word of these formats over another one."""
    found = [m for w in WORDS for m in re.finditer(re.escape(w), raw)]
    if found and rng.random() < 0.7:
        match = rng.choice(found)
        return raw[: match.start()] + rng.choice(WORDS) + raw[match.end() :]
    at = rng.randrange(len(raw))
    new = rng.choice(WORDS)
    return raw[:at] + new + raw[at + len(new) :]


def nothing(rng: random.Random, raw: bytes) -> bytes:
    return b""


BYTES: list[Edit] = [flip, flip, cut, remove, insert, splice, number, number, number, digits, word, nothing]


def edit_bytes(rng: random.Random, raw: bytes) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        raw = rng.choice(BYTES)(rng, raw) if raw else raw
    return raw


# ---------------------------------------------------------------- edits that keep the container sound

VALUES: list[Any] = [
    0,
    1,
    -1,
    2**31,
    2**63,
    2**64,
    10**40,
    1.5,
    True,
    None,
    "",
    "F64",
    "I8",
    "x" * 300,
    [],
    {},
    [0],
    [1, 2],
]
VALUES += [
    [2**62, 4],
    [0, 2**62],
    [1] * 65,
    "\ud800",
    "../up.safetensors",
    "/etc/passwd",
    "model.safetensors",
    ["a"],
    [[]],
]


def edit_json(rng: random.Random, raw: bytes) -> bytes:
    """Change, remove, rename or double a value anywhere in a JSON text."""
    try:
        root = json.loads(raw)
    except (ValueError, RecursionError):
        return edit_bytes(rng, raw)
    places: list[tuple[Any, Any]] = []
    pending = [root]
    while pending:
        node = pending.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            places.append((node, key))
            pending.append(value)
    if not places:
        return json.dumps(rng.choice(VALUES)).encode()
    node, key = rng.choice(places)
    what = rng.randrange(5)
    if what == 0:
        del node[key]
    elif what == 1 and isinstance(node, dict):
        node[rng.choice(["", "a", "__metadata__", "fc1.bias", "\ud800", "x" * 300])] = node.pop(key)
    elif what == 2 and isinstance(node, dict):
        text = json.dumps(root)
        name = json.dumps(key)
        return text.replace(name, f"{name}: 0, {name}", 1).encode()
    elif what == 3 and type(node[key]) is int:
        node[key] += rng.choice([-8, -4, -1, 1, 4, 8, 2**32])
    else:
        node[key] = rng.choice(VALUES)
    return json.dumps(root).encode()


def edit_safetensors(rng: random.Random, raw: bytes) -> bytes:
    (length,) = struct.unpack("<Q", raw[:8])
    header = edit_json(rng, raw[8 : 8 + length])
    return struct.pack("<Q", len(header)) + header + raw[8 + length :]


def edit_entries(rng: random.Random, raw: bytes) -> bytes:
    """Write the archive anew, with one entry edited, doubled, renamed, left out or compressed otherwise."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(raw)) as source, zipfile.ZipFile(out, "w") as target:
        names = source.namelist()
        victim = rng.choice([n for n in names if n.endswith("data.pkl")] or names) if rng.random() < 0.7 else names[-1]
        what = rng.randrange(8)
        for name in names:
            data = source.read(name)
            method = zipfile.ZIP_STORED
            if name == victim:
                if what == 0:
                    continue
                if what == 1:
                    method = rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
                elif what == 2:
                    name = rng.choice(["x", "__dtypes__.npy", "../x.npy", "a/b.npy", "é.npy", name.upper()])
                else:
                    data = (edit_json if what == 3 else edit_bytes)(rng, data)
            target.writestr(zipfile.ZipInfo(name), data, method)
    return out.getvalue()


def edit_file(rng: random.Random, name: str, raw: bytes) -> bytes:
    if not raw:
        return rng.randbytes(rng.randrange(20))
    if rng.random() < 0.5:
        return edit_bytes(rng, raw)
    if raw.startswith(b"PK"):
        return edit_entries(rng, raw)
    if name.endswith(".safetensors"):
        return edit_safetensors(rng, raw)
    if raw.startswith(b"{"):
        return edit_json(rng, raw)
    return edit_bytes(rng, raw)


# ---------------------------------------------------------------- what is no ordinary file


def put_no_file(rng: random.Random, path: Path) -> None:
    """Put something in the place of a folder's file that is none, or not of the size that it says."""
    raw = path.read_bytes()
    match rng.randrange(6):
        case 0:
            path.unlink()
            os.mkfifo(path)
        case 1:
            path.unlink()
            targets = ["/dev/zero", "/dev/null", "/dev/tty", "nowhere", path.name, "..", "/proc/self/mem"]
            path.symlink_to(rng.choice(targets))
        case 2:  # to another file of the folder, or to a copy, as in Hugging Face's cache
            other = rng.choice([p for p in path.parent.rglob("*") if p.is_file()])
            other.with_name("copy").write_bytes(raw) if rng.random() < 0.5 else None
            path.unlink()
            path.symlink_to("copy" if path.with_name("copy").exists() else other if other != path else "nowhere")
        case 3:  # a sparse file
            os.truncate(path, len(raw) + rng.choice([1, 4096, 1 << 30, 1 << 40, 1 << 43]))
        case 4:
            path.unlink()
            path.mkdir()
        case 5:
            threading.Thread(target=_grow, args=(path, rng.randbytes(1000)), daemon=True).start()


def _grow(path: Path, raw: bytes) -> None:
    """Let a file grow while it is read."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        file.seek(0, os.SEEK_END)
        for _ in range(2000):
            file.write(raw)
            file.flush()
            os.stat(path)  # until it is removed


# ---------------------------------------------------------------- cases


def write_case(seed: int, number: int, good: dict[str, Tree], folder: Path) -> tuple[str, Path]:
    """Write the file, or folder, of a case. Returns its format and its path."""
    rng = random.Random(f"{seed}:{number}")
    kind = rng.choice(list(good))
    tree = dict(good[kind])
    victim = rng.choice(list(tree))
    if len(tree) > 1 and rng.random() < 0.1:
        del tree[victim]
    else:
        tree[victim] = edit_file(rng, victim, tree[victim])
    path = folder / f"case-{number}"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    for name, raw in tree.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(raw)
    if len(tree) > 1 and rng.random() < 0.3:
        put_no_file(rng, path / rng.choice(list(tree)))
    return kind, path if len(good[kind]) > 1 else path / next(iter(tree))


def outcome_of(path: Path) -> str:
    """Open a checkpoint and read all of it: "read" or "refused"; everything else that happens is raised."""
    try:
        checkpoint = open_checkpoint(path)
        checkpoint.check_unpacked(checkpoint.tensors.values())
        for name, tensor in checkpoint.tensors.items():
            if isinstance(tensor, StoredTensor):
                value = tensor.read()
                assert value.shape == tensor.shape, f"{name}: {value.shape}, not {tensor.shape}"
                assert value.dtype == tensor.dtype, f"{name}: {value.dtype}, not {tensor.dtype}"
                assert not value.flags.writeable, f"{name} can be written"
                value.tobytes()  # every byte of it is there
        assert all(kept in checkpoint.tensors for kept in checkpoint.aliases.values())
    except lm.CheckpointError as error:
        text = str(error)
        text.encode()
        names = [path.name, *(file.name for file in path.rglob("*"))] if path.is_dir() else [path.name]
        assert any(name in text for name in names), f"the error does not name the file: {text}"
        assert len(text) < 20_000, "an error without end"
        assert "allocate" not in text, f"it asked for too much memory: {text}"
        takes(path)  # which it may: what the model has no name for is not read
        return "refused"
    takes(path)
    return "read"


def takes(path: Path) -> bool:
    """Load a checkpoint into a model: whether it takes it; a refused one must have changed nothing."""
    rngs = nnx.Rngs(0)
    model = nnx.Dict(
        fc1=lm.LazyLinear(4, rngs=rngs),
        norm=lm.LazyLayerNorm(use_bias=False, rngs=rngs),
        step=nnx.Variable(jnp.zeros((), jnp.int32)),
        mask=nnx.Variable(jnp.zeros(3, bool)),
    )
    before = lm.state_dict(model)
    try:
        with warnings.catch_warnings():  # of a file whose names are damaged
            warnings.filterwarnings("ignore", ".*nothing was loaded, no name fits the model", UserWarning)
            lm.load(model, path, strict=False)
    except lm.LazyError:
        after = lm.state_dict(model)
        assert list(after) == list(before), "other parameters"
        assert all(after[name] is before[name] for name in before), "another value"
        assert type(model.fc1) is lm.LazyLinear and type(model.norm) is lm.LazyLayerNorm, "another class"
        return False
    for value in lm.state_dict(model).values():
        if not lm.is_lazy(value):
            np.asarray(value).tobytes()
    return True
