"""npz: what numpy writes is read bit for bit, mapped where it can be; archives that contradict themselves are not."""

import io
import json
import struct
import tracemalloc
import zipfile
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import assert_same, is_mapped, npy, npy_with_header, refusal, values, zipped

from lazymods.state.files import stored
from lazymods.state.files.opening import open_checkpoint

GOOD = {
    "a.kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.bias": np.arange(4, dtype=np.float32),
    "b": np.arange(3, dtype=np.int64),
}


def good(path: Path, write: Any = np.savez) -> Path:
    write(path, **GOOD)
    return path


# ---------------------------------------------------------------- good archives


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize(
    "value",
    [
        np.asarray(2.5, np.float32),
        np.zeros((0, 3)),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
        np.asarray([True, False, True]),
        np.arange(5, dtype=np.uint8),
        np.arange(5).astype(np.float16),
        np.arange(5).astype(np.complex128),
        np.zeros((1,) * 32, np.int8),
        np.random.default_rng(0).standard_normal((300, 1000)),
    ],
    ids=lambda v: f"{v.dtype.name}-{v.ndim}d" if isinstance(v, np.ndarray) else v.__name__,
)
def test_what_numpy_writes(tmp_path: Path, write: Any, value: np.ndarray) -> None:
    path = tmp_path / "m.npz"
    write(path, x=value, y=value)
    assert_same(values(path), {"x": value, "y": value})


def test_big_endian_values_become_native(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, x=np.arange(4, dtype=">i4"))
    assert_same(values(path), {"x": np.arange(4, dtype=np.int32)})


def test_stored_entries_are_the_mapped_file_and_deflated_ones_are_not(tmp_path: Path) -> None:
    assert is_mapped(values(good(tmp_path / "m.npz"))["a.kernel"])
    assert not is_mapped(values(good(tmp_path / "c.npz", np.savez_compressed))["a.kernel"])


def test_fortran_arrays_are_views_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "m.npz", x=np.asfortranarray(np.arange(6.0).reshape(2, 3)))
    value = values(tmp_path / "m.npz")["x"]
    assert value.flags.f_contiguous
    assert is_mapped(value)


def with_dtypes(path: Path, dtypes: Any, **arrays: Any) -> Path:
    text = dtypes if isinstance(dtypes, bytes) else json.dumps(dtypes).encode()
    arrays["__dtypes__"] = np.frombuffer(text, np.uint8)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_dtypes_that_numpy_has_no_name_for(tmp_path: Path, kind: str) -> None:
    value = np.arange(-4, 4).astype(getattr(ml_dtypes, kind))
    raw = value.view(np.dtype((np.void, value.dtype.itemsize)))
    for array in (raw, value):
        path = with_dtypes(tmp_path / "m.npz", {"x": kind}, x=array, y=np.ones(3))
        assert_same(values(path), {"x": value, "y": np.ones(3)})
    np.savez(path, x=value)
    if kind == "float8_e5m2":  # numpy writes <f1, which nothing else is
        assert_same(values(path), {"x": value})
    else:
        refusal(path, "m.npz: x\n", "raw bytes a value")


def test_aliases(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, **GOOD, __aliases__=np.frombuffer(b'{"tied": "b"}', np.uint8))
    assert open_checkpoint(path).aliases == {"tied": "b"}
    assert_same(values(path), GOOD)
    for text in (b'{"tied": "c"}', b'{"b": "a.bias"}'):
        np.savez(path, **GOOD, __aliases__=np.frombuffer(text, np.uint8))
        refusal(path, "another name for one tensor")


HEADERS = {
    "python 2": "{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 1L), }",
    "other order": "{'shape': (2, 1), 'fortran_order': False, 'descr': '<f4'}",
    "double quotes": '{"descr": "<f4", "fortran_order": False, "shape": (2,1)}',
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_headers_of_other_writers(tmp_path: Path, name: str, version: tuple[int, int]) -> None:
    data = np.ones(2, np.float32).tobytes()
    path = zipped(tmp_path / "m.npz", {"x.npy": npy_with_header(HEADERS[name], data, version)})
    assert_same(values(path), {"x": np.ones((2, 1), np.float32)})


def test_an_archive_with_a_comment_and_a_folder(tmp_path: Path) -> None:
    path = good(tmp_path / "m.npz")
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"made by hand"
        archive.writestr("folder/", b"")
    assert_same(values(path), GOOD)


def test_an_archive_written_to_a_pipe(tmp_path: Path) -> None:
    """Sizes come after the entries: nothing can be written where they should stand."""

    class Pipe(io.RawIOBase):
        raw = b""

        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            self.raw += bytes(data)
            return len(data)

    pipe = Pipe()
    with zipfile.ZipFile(pipe, "w", zipfile.ZIP_DEFLATED) as archive:  # type: ignore[call-overload]
        archive.writestr("x.npy", npy(np.ones(3)))
    path = tmp_path / "m.npz"
    path.write_bytes(pipe.raw)
    assert_same(values(path), {"x": np.ones(3)})


def test_wide_archives(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    with zipfile.ZipFile(path, "w") as archive, archive.open("x.npy", "w", force_zip64=True) as entry:
        entry.write(npy(np.ones(3)))
    assert_same(values(path), {"x": np.ones(3)})


# ---------------------------------------------------------------- bad entries


def header_of(descr: str = "'<f4'", shape: str = "(2,)", order: str = "False", more: str = "") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': {order}, 'shape': {shape}, {more}}}"
    return npy_with_header(text, np.ones(2, np.float32).tobytes())


LONG = npy_with_header("{" + " " * 70_000 + "}", b"", (2, 0))
ENTRIES = {
    "empty": (b"", ["0 bytes that are no npy file"]),
    "text": (b"hello, this is text", ["19 bytes that are no npy file"]),
    "cut": (npy(np.ones(4))[:-4], ["28 bytes", "32 bytes for float64[4]"]),
    "tail": (npy(np.ones(4)) + b"\0", ["33 bytes"]),
    "header past the end": (npy(np.ones(4))[:40], ["a header of 118 bytes in an entry of 40"]),
    "header too long": (LONG, ["at most 10,000"]),
    "version": (b"\x93NUMPY\x04\x00" + b"\0" * 60, ["version 4.0"]),
    "objects": (npy(np.asarray([1, "a"], object), allow_pickle=True), ["Python objects", "not read"]),
    "objects by hand": (header_of("'|O'"), ["dtype |O: Python objects"]),
    "texts": (npy(np.asarray(["a", "b"])), ["dtype <U1: texts"]),
    "bytes": (npy(np.asarray([b"a", b"b"])), ["dtype |S1: texts"]),
    "dates": (npy(np.asarray(["2020-01-01"], "M8[D]")), ["dtype <M8[D]"]),
    "records": (npy(np.zeros(2, [("a", "<f4"), ("b", "<i4")])), ["a structured dtype"]),
    "void": (npy(np.zeros(2, "V8")), ["8 raw bytes a value, dtype |V8"]),
    "long double": (header_of("'<f16'"), ["dtype <f16"]),
    "unicode descr": (header_of("'<f4\u00e9'"), ["dtype"]),
    "other shape": (header_of(shape="(3,)"), ["8 bytes", "12 bytes for float32[3]"]),
    "negative": (header_of(shape="(-2,)"), ["the header"]),
    "huge": (header_of(shape="(4611686018427387904, 8)"), ["a shape that an array can have"]),
    "huge but for a zero": (header_of(shape="(0, 4611686018427387904)"), ["a shape that an array can have"]),
    "65 axes": (header_of(shape="(" + "1, " * 64 + "2)"), ["a shape that an array can have"]),
    "digits": (header_of(shape="(" + "9" * 5000 + ",)"), ["the header"]),
    "no tuple": (header_of(shape="(2)"), ["the header"]),
    "a list": (header_of(shape="[2]"), ["the header"]),
    "a bool": (header_of(shape="(True, 2)"), ["the header"]),
    "code": (header_of(shape="exit()"), ["the header"]),
    "deep": (header_of(shape="(" * 4000), ["the header"]),
    "order": (header_of(order="0"), ["the header"]),
    "twice": (header_of(more="'shape': (2,)"), ["the header"]),
    "swapped": (header_of(descr="(2,)", shape="'<f4'"), ["dtype"]),
    "binary": (b"\x93NUMPY\x01\x00\x40\x00" + bytes(range(128, 192)), ["the header"]),
}


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED], ids=["stored", "deflated"])
def test_bad_entries(tmp_path: Path, name: str, method: int) -> None:
    raw, words = ENTRIES[name]
    path = zipped(tmp_path / "m.npz", {"a.npy": npy(np.ones(3)), "b.npy": raw}, method)
    refusal(path, "m.npz: b\n" if name != "swapped" else "m.npz", *words)


def test_bfloat16_by_savez_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    np.savez(path, x=np.ones(3, ml_dtypes.bfloat16))
    assert refusal(path) == (
        "m.npz: x\n"
        "  got:    2 raw bytes a value, dtype <V2: what numpy.savez makes of bfloat16 and its like\n"
        "  needed: values whose dtype the file names\n"
        "  write:  np.savez(path, **{k: v.astype(np.float32) for k, v in arrays.items()})  # or lm.save(model, path)"
    )


@pytest.mark.parametrize(
    "dtypes",
    [
        {"x": "float16"},  # numpy has a name for it
        {"x": "float8_e5m2"},  # of another size
        {"x": "nonsense"},
        {"x": "V2"},
        {"x": "i1,i1"},
        {"x": 2},
        {"x": "bfloat16", "z": "bfloat16"},
        {"x": "bfloat16", "y": "bfloat16"},
        ["bfloat16"],
        {},
        b"{",
        b'{"x": "bfloat16", "x": "bfloat16"}',
    ],
)
def test_bad_names_of_dtypes(tmp_path: Path, dtypes: Any) -> None:
    raw = np.ones(3, ml_dtypes.bfloat16).view("V2")
    refusal(with_dtypes(tmp_path / "m.npz", dtypes, x=raw, y=np.ones(3)))


@pytest.mark.parametrize("value", [np.zeros(2), np.zeros((2, 2), np.uint8), np.asarray(1, np.uint8)])
def test_names_of_dtypes_that_are_no_bytes(tmp_path: Path, value: np.ndarray) -> None:
    np.savez(tmp_path / "m.npz", x=np.ones(3), __dtypes__=value)
    refusal(tmp_path / "m.npz", "__dtypes__")


# ---------------------------------------------------------------- bad archives


def test_cut_anywhere(tmp_path: Path) -> None:
    raw = good(tmp_path / "good.npz").read_bytes()
    path = tmp_path / "m.npz"
    for length in range(0, len(raw), 7):
        path.write_bytes(raw[:length])
        refusal(path)


def test_bytes_after_the_archive(tmp_path: Path) -> None:
    path = good(tmp_path / "m.npz")
    path.write_bytes(path.read_bytes() + b"\0")
    refusal(path, "bytes after the archive's directory")


def test_bytes_before_the_archive(tmp_path: Path) -> None:
    path = good(tmp_path / "m.npz")
    path.write_bytes(b"PK\x03\x04" + path.read_bytes())
    refusal(path, "a directory of")


def test_other_content_under_the_name(tmp_path: Path) -> None:
    for raw, word in ((b"", "an empty file"), (b"<html>", "HTML"), (b"\0" * 99, "99 bytes")):
        (tmp_path / "m.npz").write_bytes(raw)
        refusal(tmp_path / "m.npz", word)


def test_an_entry_that_is_no_npy(tmp_path: Path) -> None:
    path = zipped(tmp_path / "m.npz", {"x.npy": npy(np.ones(3)), "readme.txt": b"hello"})
    refusal(path, "readme.txt", "no npy file")


def test_a_name_twice(tmp_path: Path) -> None:
    path = tmp_path / "m.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy(np.ones(3)))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", npy(np.zeros(3)))
    refusal(path, "m.npz: x.npy", "two entries of this name")


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compression(tmp_path: Path, method: int) -> None:
    refusal(zipped(tmp_path / "m.npz", {"x.npy": npy(np.ones(3))}, method), "x.npy", f"method {method}")


def edited(path: Path, **fields: tuple[int, str, int]) -> Path:
    """Change fields of the last entry: where, how (a struct format), to what; c: directory, l: before it, e: end."""
    raw = bytearray(path.read_bytes())
    bases = {"c": raw.rindex(b"PK\x01\x02"), "l": raw.rindex(b"PK\x03\x04"), "e": raw.rindex(b"PK\x05\x06")}
    for name, (offset, form, value) in fields.items():
        struct.pack_into(form, raw, bases[name[0]] + offset, value)
    path.write_bytes(raw)
    return path


FIELDS = {
    "encrypted": ({"c_flags": (8, "<H", 1), "l_flags": (6, "<H", 1)}, "encrypted"),
    "flags differ": ({"l_flags": (6, "<H", 2)}, "differs from the directory's"),
    "method differs": ({"l_method": (8, "<H", 8)}, "differs from the directory's"),
    "local magic": ({"l_magic": (0, "<L", 0)}, "differs from the directory's"),
    "local name": ({"l_name": (30, "<B", 65)}, "differs from the directory's"),
    "local name length": ({"l_length": (26, "<H", 60_000)}, "differs from the directory's"),
    "local extra length": ({"l_extra": (28, "<H", 60_000)}, "truncated or damaged"),
    "local size": ({"l_size": (22, "<L", 5), "l_stored": (18, "<L", 5)}, "sizes that differ"),
    "local crc": ({"l_crc": (14, "<L", 5)}, "sizes that differ"),
    "stored is not size": ({"c_size": (24, "<L", 5), "l_size": (22, "<L", 5)}, "it is not compressed"),
    "size past the end": (
        {k: (o, "<L", 10**6) for k, o in {"c1": 20, "c2": 24, "l1": 18, "l2": 22}.items()},
        "truncated or damaged",
    ),
    "header past the end": ({"c_offset": (42, "<L", 10**6)}, "begins at byte 1,000,000"),
    "wide without its field": ({"c_size": (24, "<L", 2**32 - 1)}, "64-bit sizes"),
    "other disk": ({"c_disk": (34, "<H", 3)}, "64-bit sizes"),
    "name length": ({"c_length": (28, "<H", 60_000)}, "longer than the directory"),
    "name of zeros": ({"c_name": (46, "<L", 0)}, "without zero bytes"),
    "entries fewer": ({"e_count": (8, "<L", 2 << 16 | 2)}, "a directory of"),
    "entries more": ({"e_count": (8, "<L", 4 << 16 | 4)}, "fewer entries than it says"),
    "in parts": ({"e_disk": (4, "<H", 1)}, "in several"),
    "directory moved": ({"e_offset": (16, "<L", 0)}, "ends at byte"),
    "directory longer": ({"e_length": (12, "<L", 2**31)}, "ends at byte"),
    "comment": ({"e_comment": (20, "<H", 9)}, "bytes after the archive's directory"),
}


@pytest.mark.parametrize("name", FIELDS)
def test_fields_that_lie(tmp_path: Path, name: str) -> None:
    fields, word = FIELDS[name]
    path = zipped(tmp_path / "m.npz", {f"{k}.npy": npy(v) for k, v in GOOD.items()})
    refusal(edited(path, **fields), word)


def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    path = zipped(tmp_path / "m.npz", {"\u00e9.npy": npy(np.ones(3))})
    raw = path.read_bytes().replace("\u00e9".encode(), b"\xff\xff")
    path.write_bytes(raw)
    refusal(path, "a name in UTF-8")


def test_overlapping_entries(tmp_path: Path) -> None:
    """One entry lies inside another: so a small file could unpack to any number of tensors."""
    inner = zipped(tmp_path / "inner.npz", {"y.npy": npy(np.ones(3))}).read_bytes()
    inner = inner[: inner.index(b"PK\x01\x02")]
    path = zipped(tmp_path / "m.npz", {"x.npy": npy(np.frombuffer(inner, np.uint8)), "y.npy": npy(np.ones(3))})
    raw = bytearray(path.read_bytes())
    struct.pack_into("<L", raw, raw.rindex(b"PK\x01\x02") + 42, raw.index(inner))
    path.write_bytes(raw)
    refusal(path, "m.npz: y.npy", "belong to another entry")


# ---------------------------------------------------------------- compressed entries


def test_damaged_bytes_are_found_by_their_crc(tmp_path: Path) -> None:
    value = np.random.default_rng(0).integers(0, 255, 4000, np.uint8)
    path = zipped(tmp_path / "m.npz", {"x.npy": npy(value)}, zipfile.ZIP_DEFLATED)
    raw = bytearray(path.read_bytes())
    raw[2000] ^= 1
    path.write_bytes(raw)
    refusal(path, "m.npz: x.npy")


def deflated(path: Path, raw: bytes, size: int, tail: bytes = b"") -> Path:
    """An archive with one entry whose directory says any size."""
    engine = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = engine.compress(raw) + engine.flush() + tail
    name, crc = b"x.npy", zlib.crc32(raw)
    local = struct.pack("<4s5H3L2H", b"PK\x03\x04", 20, 0, 8, 0, 0, crc, len(packed), size, len(name), 0) + name
    entry = struct.pack(
        "<4s6H3L5H2L", b"PK\x01\x02", 20, 20, 0, 8, 0, 0, crc, len(packed), size, len(name), 0, 0, 0, 0, 0, 0
    )
    begin = len(local) + len(packed)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, len(entry) + len(name), begin, 0)
    path.write_bytes(local + packed + entry + name + end)
    return path


def test_the_archive_by_hand_is_good(tmp_path: Path) -> None:
    raw = npy(np.arange(500.0))
    assert_same(values(deflated(tmp_path / "m.npz", raw, len(raw))), {"x": np.arange(500.0)})


def test_an_entry_that_unpacks_to_more_than_it_says(tmp_path: Path) -> None:
    head = npy(np.zeros(100, np.uint8))
    path = deflated(tmp_path / "m.npz", head + b"\0" * 200_000_000, len(head))
    tracemalloc.start()
    refusal(path, "more than 228 bytes")
    assert tracemalloc.get_traced_memory()[1] < 4_000_000
    tracemalloc.stop()


def test_an_entry_that_unpacks_to_less_than_it_says(tmp_path: Path) -> None:
    raw = npy(np.zeros(100, np.uint8))[:-50]
    refusal(deflated(tmp_path / "m.npz", raw, len(raw) + 50), "178 bytes")


def test_an_entry_with_a_tail(tmp_path: Path) -> None:
    raw = npy(np.zeros(100, np.uint8))
    refusal(deflated(tmp_path / "m.npz", raw, len(raw), b"tail"), "m.npz: x.npy")


def test_bombs_are_refused_by_the_directory(tmp_path: Path) -> None:
    head = npy_with_header("{'descr': '|u1', 'fortran_order': False, 'shape': (4000000000,), }", b"")
    path = deflated(tmp_path / "m.npz", head, len(head) + 4_000_000_000)
    tracemalloc.start()
    refusal(path, "4,000,000,000 bytes when unpacked", "compressed bomb")
    assert tracemalloc.get_traced_memory()[1] < 1_000_000
    tracemalloc.stop()


def test_the_limits_can_be_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.npz"
    np.savez_compressed(path, x=np.zeros(100_000))
    monkeypatch.setattr(stored, "MAX_UNPACKED_BYTES", 1000)
    line = refusal(path, "800,000 bytes when unpacked").rpartition("write:  ")[2]
    monkeypatch.setattr(stored, "MAX_UNPACKED_RATIO", 1)  # and back, afterwards
    exec(line)
    assert_same(values(path), {"x": np.zeros(100_000)})
