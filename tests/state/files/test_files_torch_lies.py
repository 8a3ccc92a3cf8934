"""PyTorch files that lie about sizes, call what no state dict calls, or unpack to much: refused."""

import io
import pickle
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import archive_of, patched, refusal, stream_of, values, zipped

from lazymods.state.files import stored, torch_pickle
from lazymods.state.files.torch_calls import Layout, Storage, Tensor

torch = pytest.importorskip("torch", reason="torch is an extra")

LEGACY = {"_use_new_zipfile_serialization": False}


def saved(path: Path, value: Any, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


def tensors() -> dict[str, Any]:
    return {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(3)}


# ---------------------------------------------------------------- archives that lie


def entries_of(value: Any) -> dict[str, bytes]:
    out = io.BytesIO()
    torch.save(value, out)
    with zipfile.ZipFile(out) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_record_that_is_shorter_than_its_storage(tmp_path: Path) -> None:
    entries = entries_of({"x": torch.arange(100.0)})
    entries["archive/data/0"] = entries["archive/data/0"][:-4]
    refusal(zipped(tmp_path / "m.pt", entries), "396 bytes in data/0", "400, as data.pkl declares")


def test_a_record_that_is_longer_than_its_storage(tmp_path: Path) -> None:
    """Bytes too many shift the values after them; less than a number can be left of bytes seen as wider numbers."""
    entries = entries_of({"x": torch.arange(100.0)})
    raw = entries["archive/data/0"]
    entries["archive/data/0"] = raw[:8] + b"\0\0\0\0" + raw[8:]
    refusal(zipped(tmp_path / "m.pt", entries), "404 bytes in data/0", "400, as data.pkl declares")
    seen = torch.arange(10, dtype=torch.uint8).untyped_storage()
    torch.save({"x": torch.empty(0).set_(seen, 0, (2,), (1,))}, tmp_path / "m.pt")
    np.testing.assert_array_equal(values(tmp_path / "m.pt")["x"], np.arange(8, dtype=np.uint8).view(np.float32))


def test_a_record_that_is_missing(tmp_path: Path) -> None:
    entries = entries_of({"x": torch.arange(100.0)})
    del entries["archive/data/0"]
    refusal(zipped(tmp_path / "m.pt", entries), "no entry data/0")


def test_compressed_records(tmp_path: Path) -> None:
    refusal(zipped(tmp_path / "m.pt", entries_of(tensors()), zipfile.ZIP_DEFLATED), "a compressed entry")


def test_names_that_differ_in_case(tmp_path: Path) -> None:
    entries = entries_of(tensors())
    refusal(zipped(tmp_path / "m.pt", entries | {"archive/DATA.pkl": b""}), "in their case only")


def test_two_folders(tmp_path: Path) -> None:
    entries = entries_of(tensors())
    refusal(zipped(tmp_path / "m.pt", entries | {"other/data.pkl": b""}), "m.pt: other/data.pkl", "one folder")


def test_a_byte_order_that_is_none(tmp_path: Path) -> None:
    refusal(zipped(tmp_path / "m.pt", entries_of(tensors()) | {"archive/byteorder": b"middle"}), "a byte order")


def edited_pickle(old: bytes, new: bytes, value: Any = None) -> dict[str, bytes]:
    entries = entries_of(value or {"x": torch.arange(100.0).reshape(4, 25)})
    raw = entries["archive/data.pkl"]
    assert raw.count(old) == 1, pickletools.dis(raw)
    entries["archive/data.pkl"] = raw.replace(old, new)
    return entries


BIG = b"\x8a\x08" + (2**62).to_bytes(8, "little")
LIES = {
    "numel": (b"K\x64t", b"K\x65t", "400 bytes in data/0"),  # 100 elements
    "numel huge": (b"K\x64t", BIG + b"t", "400 bytes in data/0"),
    "numel negative": (b"K\x64t", b"J\xff\xff\xff\xfft", "no storage's"),
    "kind": (b"FloatStorage", b"DoubleStorage", "400 bytes in data/0"),
    "kind unknown": (b"FloatStorage", b"OtherStorage", "the global torch.OtherStorage"),
    "shape": (b"K\x04K\x19\x86", b"K\x05K\x19\x86", "a tensor of shape (5, 25) that ends past the 400 bytes"),
    "shape huge": (b"K\x04K\x19\x86", BIG + b"K\x19\x86", "ends past the 400 bytes"),
    "shape negative": (b"K\x04K\x19\x86", b"J\xff\xff\xff\xffK\x19\x86", "sizes or strides"),
    "stride": (b"K\x19K\x01\x86", b"K\x1aK\x01\x86", "ends past the 400 bytes"),
    "stride negative": (b"K\x19K\x01\x86", b"K\x19J\xff\xff\xff\xff\x86", "sizes or strides"),
    "rank": (b"K\x19K\x01\x86", b"K\x01\x85", "sizes or strides"),
    "no hooks": (b"ccollections\nOrderedDict\n", b"K\x07", "damaged"),
    "hooks": (b")Rq", b")RK\x07q", "damaged"),
    "function": (b"_rebuild_tensor_v2", b"_rebuild_other", "the global torch._utils._rebuild_other"),
    "storage's word": (b"storage", b"Storage", "no storage's"),
    "protocol 4": (b"\x80\x02}", b"\x80\x04\x95" + b"\0" * 8 + b"}", "the pickle instruction FRAME"),
    "memo": (b"}q\x00", b"}h\x63", "damaged pickle (99)"),
}


@pytest.mark.parametrize("name", LIES)
def test_pickles_that_lie(tmp_path: Path, name: str) -> None:
    old, new, word = LIES[name]
    if name in ("kind", "kind unknown", "storage's word", "hooks"):
        raw = entries_of({"x": torch.arange(100.0).reshape(4, 25)})
        raw["archive/data.pkl"] = raw["archive/data.pkl"].replace(old, new, 1)
    else:
        raw = edited_pickle(old, new)
    refusal(zipped(tmp_path / "m.pt", raw), word)


def test_one_storage_declared_in_two_ways(tmp_path: Path) -> None:
    """PyTorch would take the first, short one for both."""
    base = torch.arange(100.0)
    raw = entries_of({"x": base[:2], "y": base})
    at = raw["archive/data.pkl"].index(b"K\x64t")
    data = raw["archive/data.pkl"]
    raw["archive/data.pkl"] = data[:at] + b"K\x02t" + data[at + 3 :]
    refusal(zipped(tmp_path / "m.pt", raw), "declared in two ways")


GLOBALS = {  # what PyTorch's loader calls with any number that a file gives
    "builtins bytearray": b"c__builtin__\nbytearray\n" + BIG + b"\x85R",
    "legacy tensors": b"ctorch\nFloatTensor\n" + BIG + b"\x85R",
    "wrappers": b"ctorch._utils\n_rebuild_wrapper_subclass\n" + BIG + b"\x85R",
    "quantized": b"ctorch._utils\n_rebuild_qtensor\n" + BIG + b"\x85R",
    "meta": b"ctorch._utils\n_rebuild_meta_tensor_no_storage\n" + BIG + b"\x85R",
    "new tensors": b"ctorch\nTensor\n" + BIG + b"\x85\x81",
    "codecs": b"c_codecs\nencode\nX\x01\0\0\0aX\x03\0\0\0zip\x86R",
    "sets of deep tuples": b"c__builtin__\nset\n](" + b")" + b"\x85" * 1000 + b"e\x85R",
    "keys of deep tuples": b"})" + b"\x85" * 1000 + b"Ns",
    "by type": b"ctorch._tensor\n_rebuild_from_type_v2\n(c__builtin__\nbytearray\nctorch\nTensor\n" + BIG + b"\x85NtR",
    "a tensor's state": b"ctorch\nTensor\n)\x81" + BIG + b"\x85b",
    "a parameter of nothing": b"ctorch.nn.parameter\nParameter\n" + BIG + b"\x85\x81",
}


@pytest.mark.parametrize("name", GLOBALS)
def test_calls_that_no_state_dict_has(tmp_path: Path, name: str) -> None:
    raw = b"\x80\x02}X\x01\0\0\0x" + GLOBALS[name] + b"s."
    path = tmp_path / "m.pt"
    path.write_bytes(archive_of(a__data_pkl=raw))
    refusal(path)
    path.write_bytes(stream_of(raw, pickle.dumps([], 2)))
    refusal(path)


def test_mappings_that_multiply(tmp_path: Path) -> None:
    """Each level holds the one below twice: few bytes, a name for every path."""
    tree: dict[str, Any] = {"x": torch.ones(1)}
    for _ in range(40):
        tree = {"left": tree, "right": tree}
    refusal(saved(tmp_path / "m.pt", tree), "names in a pickle of", "each name written once")


def test_mappings_too_deep(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"x": torch.ones(1)}
    for _ in range(200):
        tree = {"a": tree}
    refusal(saved(tmp_path / "m.pt", tree), "over 64 deep")
    raw = b"\x80\x02" + b"}X\x01\0\0\0a" * 100_000 + b"}" + b"s" * 100_000 + b"."
    path = zipped(tmp_path / "n.pt", {"a/data.pkl": raw, "a/version": b"3\n"})
    refusal(path, "values begun at a time")


def test_mappings_that_hold_themselves(tmp_path: Path) -> None:
    tree: dict[str, Any] = {"x": torch.ones(1)}
    tree["self"] = tree
    refusal(saved(tmp_path / "m.pt", tree), "over 64 deep")


def test_two_values_of_one_name(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)})
    refusal(path, "m.pt: a.b\n", "two values of this name")


def test_views_that_repeat_a_number_for_ever(tmp_path: Path) -> None:
    path = saved(tmp_path / "m.pt", {"x": torch.ones(1).expand(10**10)})
    refusal(path, "40,000,000,000 bytes")


# ---------------------------------------------------------------- streams that lie


def stream(**edit: bytes) -> bytes:
    out = io.BytesIO()
    torch.save({"x": torch.arange(100.0), "y": torch.arange(2)}, out, **LEGACY)
    return out.getvalue()


def test_a_stream_whose_storage_says_another_length(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    path.write_bytes(stream())
    patched(path, struct.pack("<q", 100), struct.pack("<q", 99), last=True)
    refusal(path, "99 elements of storage", "100, as the pickle declares")


def test_a_stream_with_more_bytes_than_its_storages(tmp_path: Path) -> None:
    """A byte too many shifts all values after it; what follows the last storage is lost otherwise."""
    raw = stream()
    path = tmp_path / "m.pt"
    for at in (len(raw), len(raw) - 3, len(raw) - 16 - 8 - 200):  # after all, inside of the last and the first storage
        path.write_bytes(raw[:at] + b"\0" + raw[at:])
        refusal(path)
    path.write_bytes(raw + raw)
    refusal(path, f"{len(raw):,} bytes after the last storage", "holds more than one object")


def test_a_stream_that_declares_more_than_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "m.pt"
    raw = stream().replace(b"K\x64Nt", b"\x8a\x05" + (10**11).to_bytes(5, "little") + b"Nt")
    path.write_bytes(raw.replace(struct.pack("<q", 100), struct.pack("<q", 10**11)))
    refusal(path, "which end inside storage", "the file is truncated")


def test_a_stream_whose_list_of_storages_is_another(tmp_path: Path) -> None:
    raw = stream()
    keys = raw.rindex(b"\x80\x02]")
    end = raw.index(b".", keys) + 1
    names = pickle.loads(raw[keys:end])
    path = tmp_path / "m.pt"
    for listed in ([], names[:1], [*names, "7"], [*names, names[0]], names[0], [1, 2], {}):
        path.write_bytes(raw[:keys] + pickle.dumps(listed, 2) + raw[end:])
        refusal(path)


def test_views_of_storages(tmp_path: Path) -> None:
    """Files from before PyTorch 0.4 have them."""
    raw = stream()
    view = b"(X\x01\0\0\0vK\x02K\x03t"  # key, offset, length
    path = tmp_path / "m.pt"
    small = raw.replace(b"K\x64\x85", b"K\x03\x85", 1)  # the tensor's own length
    path.write_bytes(small.replace(b"K\x64Nt", b"K\x64" + view + b"t"))
    np.testing.assert_array_equal(values(path)["x"], [2, 3, 4])
    for bad in (view.replace(b"K\x03", b"K\x63"), view.replace(b"K\x02", b"J\xff\xff\xff\xff"), b"K\x01", b")"):
        path.write_bytes(small.replace(b"K\x64Nt", b"K\x64" + bad + b"t"))
        refusal(path, "view")


def test_a_stream_that_is_a_tar_archive_too(tmp_path: Path) -> None:
    """PyTorch tries tar first, whatever the first bytes say."""
    block = bytearray(stream()[:15].ljust(512, b"\0"))
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    path = tmp_path / "m.pt"
    path.write_bytes(bytes(block) + b"\0" * 1024)
    refusal(path, "a tar archive")


def test_walking_gives_what_the_pickle_says() -> None:
    raw = np.frombuffer(entries_of({"x": torch.ones(2, 3), "n": [1, None, (2.5, "t")]})["archive/data.pkl"], np.uint8)
    walked = torch_pickle.walk(raw)
    storage = Storage("0", "float32", 6, 24, 4)
    tensor = Tensor(storage, "float32", 4, 0, Layout((2, 3), (3, 1), 6, 6, True))
    assert walked.value == {"x": tensor, "n": [1, None, (2.5, "t")]}
    assert walked.storages == {"0": storage}
    assert walked.end == len(raw)


def test_bombs_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "m.pt", {"x": torch.ones(1).expand(10**6)})
    assert values(path)["x"].shape == (10**6,)
    monkeypatch.setattr(stored, "MAX_UNPACKED_BYTES", 1000)
    refusal(path, "4,000,000 bytes")
