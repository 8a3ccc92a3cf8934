"""safetensors: what the official library writes is read bit for bit; what it refuses is refused by name."""

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import assert_same, is_mapped, refusal, values
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save, save_file

from lazymods.state.files import safetensors
from lazymods.state.files.opening import open_checkpoint

GOOD = {
    "a.kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.bias": np.arange(4, dtype=np.float32),
    "b": np.arange(3, dtype=np.int64),
}


def parts() -> tuple[dict[str, Any], bytes]:
    raw = save(GOOD)
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def pack(header: Any, data: bytes) -> bytes:
    text = (
        header
        if isinstance(header, bytes)
        else header.encode()
        if isinstance(header, str)
        else json.dumps(header).encode()
    )
    return struct.pack("<Q", len(text)) + text + data


def edited(name: str, **changes: Any) -> bytes:
    header, data = parts()
    header[name] |= changes
    return pack(header, data)


@pytest.mark.parametrize(
    "value",
    [
        np.asarray(2.5, np.float32),
        np.zeros((0, 3), np.float32),
        np.arange(6, dtype=np.float64).reshape(1, 2, 3),
        np.arange(-3, 3).astype(ml_dtypes.bfloat16),
        np.asarray([True, False]),
        np.arange(3, dtype=np.uint16),
        np.zeros((1,) * 64, np.int8),
    ],
    ids=lambda v: f"{v.dtype.name}-{v.ndim}d",
)
def test_what_the_library_writes(tmp_path: Path, value: np.ndarray) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"x": value}, path)
    assert_same(values(path), {"x": value})


def test_complex_numbers(tmp_path: Path) -> None:
    """Which the library writes from 0.6 on."""
    value = (np.arange(3) + 2j).astype(np.complex64)
    path = tmp_path / "m.safetensors"
    path.write_bytes(pack({"x": {"dtype": "C64", "shape": [3], "data_offsets": [0, 24]}}, value.tobytes()))
    assert_same(values(path), {"x": value})


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_eight_bit_floats(tmp_path: Path, kind: str) -> None:
    names = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    bits = np.arange(256, dtype=np.uint8)
    path = tmp_path / "m.safetensors"
    path.write_bytes(pack({"x": {"dtype": names[kind], "shape": [256], "data_offsets": [0, 256]}}, bits.tobytes()))
    assert_same(values(path), {"x": bits.view(getattr(ml_dtypes, kind))})


def test_values_are_the_mapped_file(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(GOOD, path)
    assert is_mapped(values(path)["a.kernel"])


def test_unaligned(tmp_path: Path) -> None:
    header, data = parts()
    for pad in range(8):
        path = tmp_path / f"m{pad}.safetensors"
        path.write_bytes(pack({"__metadata__": {"pad": "x" * pad}, **header}, data))
        got = values(path)
        for name, value in GOOD.items():
            np.testing.assert_array_equal(got[name], value)


@pytest.mark.parametrize("high", [2, 3, 4, 5])
def test_a_header_whose_length_begins_like_a_pickle(tmp_path: Path, high: int) -> None:
    header, data = parts()
    text = json.dumps(header).encode()
    raw = pack(text + b" " * (high * 256 + 0x80 - len(text)), data)
    assert raw[:2] == b"\x80" + bytes([high])
    for name in ("m.safetensors", "m.bin", "m.dat"):
        (tmp_path / name).write_bytes(raw)
        np.testing.assert_array_equal(values(tmp_path / name)["b"], GOOD["b"])


def test_metadata_and_aliases(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file(GOOD, path, metadata={"format": "pt", "tied": "a.kernel", "b": "a.bias"})
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata == {"format": "pt", "tied": "a.kernel", "b": "a.bias"}
    assert checkpoint.aliases == {"tied": "a.kernel"}  # b is a tensor of its own


def test_an_entry_may_say_more(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(edited("b", more=1))
    np.testing.assert_array_equal(values(path)["b"], GOOD["b"])


def test_names_that_are_an_entry_s_own(tmp_path: Path) -> None:
    tensors = {name: GOOD["b"] + i for i, name in enumerate(("dtype", "shape", "data_offsets"))}
    save_file(tensors, tmp_path / "m.safetensors")  # in the order of their names
    assert_same(values(tmp_path / "m.safetensors"), dict(sorted(tensors.items())))


def test_names_with_escapes(tmp_path: Path) -> None:
    header, data = parts()
    text = json.dumps({"\N{GRINNING FACE}\u00e9": header.pop("b"), **header})
    assert r"\ud83d\ude00\u00e9" in text
    (tmp_path / "m.safetensors").write_bytes(pack(text, data))
    np.testing.assert_array_equal(values(tmp_path / "m.safetensors")["\N{GRINNING FACE}\u00e9"], GOOD["b"])


SURROGATE = '{"\\ud800": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}'
BAD = {
    "empty": (b"", ["an empty file, 0 bytes"]),
    "seven bytes": (b"\x10" + b"\0" * 6, ["7 bytes"]),
    "length past the end": (struct.pack("<Q", 512), ["truncated"]),
    "length 2**63": (struct.pack("<Q", 2**63) + pack(*parts())[8:], ["9,223,372,036,854,775,808 bytes"]),
    "length 0": (struct.pack("<Q", 0) + pack(*parts())[8:], ["a header b''"]),
    "header of space": (pack(b"    {}", b""), ["from its first byte on"]),
    "header a list": (pack("[1]", b""), ["from its first byte on"]),
    "no JSON": (pack("{'a': 1}", b""), ["no JSON"]),
    "no UTF-8": (pack(b'{"\xff": 1}', b""), ["no JSON"]),
    "NaN": (pack('{"a": NaN}', b""), ["NaN is no JSON"]),
    "deep JSON": (pack("{" + '"a":{' * 100_000, b""), ["parts", "many times its size"]),
    "digits": (pack('{"a": {"shape": [' + "9" * 10_000 + "]}}", b""), ["no JSON"]),
    "surrogate": (pack(SURROGATE, b"\0"), ["no JSON"]),
    "twice": (pack('{"a": 1, "a": 2}', b""), ["a: a", "stands twice"][1:]),
    "twice in an entry": (pack('{"a": {"dtype": "I8", "dtype": "U8"}}', b""), ["dtype", "stands twice"]),
    "header an entry": (pack(parts()[0]["b"], b""), ["a header that is a tensor's entry"]),
    "metadata an entry": (pack({"__metadata__": parts()[0]["b"]}, b""), ["__metadata__", "an object of texts"]),
    "surrogate in metadata": (pack(r'{"__metadata__": {"a": "\uDFFF"}}', b""), ["no JSON"]),
    "entry a number": (pack({"a": 7}, b""), ["m.safetensors: a\n", "the entry 7"]),
    "entry with less": (pack({"b": {"dtype": "I8", "shape": []}}, b""), ["m.safetensors: b\n", "the entry"]),
    "dtype unknown": (edited("b", dtype="Q4"), ["m.safetensors: b\n", "'Q4'"]),
    "dtype unknown past the end": (edited("b", dtype="F4", data_offsets=[10**6, 10**6 + 1]), [": b\n", "'F4'"]),
    "dtype a list": (edited("b", dtype=["I64"]), [": b\n", "['I64']"]),
    "shape true": (edited("b", shape=[True]), [": b\n", "whole numbers"]),
    "shape negative": (edited("b", shape=[-3]), [": b\n", "whole numbers"]),
    "shape a float": (edited("b", shape=[3.0]), [": b\n", "whole numbers"]),
    "shape too large": (edited("b", shape=[2**62, 4]), [": b\n", "a shape that an array can have"]),
    "shape too large but for a zero": (edited("b", shape=[0, 2**62], data_offsets=[64, 64]), [": b\n", "can have"]),
    "65 axes": (edited("b", shape=[1] * 64 + [3]), [": b\n", "a shape that an array can have"]),
    "shape of more": (edited("b", shape=[4]), [": b\n", "24 bytes", "32 bytes for I64[4]"]),
    "offsets reversed": (edited("b", data_offsets=[88, 64]), [": b\n", "bytes 88 to 64"]),
    "offsets past the end": (edited("b", data_offsets=[10**9, 10**9 + 24]), [": b\n", "truncated"]),
    "offsets huge": (edited("b", data_offsets=[0, 10**30]), [": b\n"]),
    "overlap": (edited("a.bias", data_offsets=[40, 56]), ["overlap"]),
    "tail": (pack(*parts()) + b"\0", ["89 bytes of data where the header describes 88"]),
    "cut": (pack(*parts())[:-1], ["truncated"]),
    "metadata of numbers": (pack({"__metadata__": {"a": 1}}, b""), ["__metadata__", "texts"]),
    "LFS": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n", ["Git LFS pointer"]),
    "HTML": (b"\n<!DOCTYPE html><html></html>", ["HTML page"]),
    "XML": (b'<?xml version="1.0"?><Error/>', ["XML"]),
    "GGUF": (b"GGUF" + b"\0" * 60, ["GGUF"]),
    "HDF5": (b"\x89HDF\r\n\x1a\n" + b"\0" * 60, ["HDF5"]),
    "npy": (b"\x93NUMPY\x01\x00" + b"\0" * 60, ["npy array"]),
    "zeros": (b"\0" * 4096, ["a header b''"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(tmp_path: Path, name: str) -> None:
    raw, words = BAD[name]
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw)
    refusal(path, *words)
    if name not in ("65 axes", "header of space"):  # numpy's limit, and what the format's text forbids
        with pytest.raises(SafetensorError), safe_open(path, "np"):
            pass


def test_a_refusal_in_full(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(edited("b", shape=[4]))
    assert refusal(path) == (
        f"m.safetensors: b\n  got:    24 bytes\n  needed: 32 bytes for I64[4]\n  write:  "
        f"lm.load(model, '{path}')  # a sound copy of the file"
    )


def test_the_limit_of_the_header_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.safetensors"
    save_file(GOOD, path)
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 10)
    refusal(path, "at most 10 bytes of header")
    monkeypatch.setattr(safetensors, "MAX_HEADER_BYTES", 1000)
    assert len(values(path)) == 3


def test_a_long_header_takes_some_times_its_size(tmp_path: Path) -> None:
    """What is made of it stays; beside that there are its bytes and its text."""
    entry = {"dtype": "F32", "shape": [0, 3], "data_offsets": [0, 0]}
    path = tmp_path / "m.safetensors"
    path.write_bytes(pack({f"model.layers.{i}.self_attn.q_proj.weight": entry for i in range(20_000)}, b""))
    open_checkpoint(path)  # what is imported
    tracemalloc.start()
    try:
        checkpoint = open_checkpoint(path)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(checkpoint.tensors) == 20_000
    assert peak < kept + 1.8 * path.stat().st_size
