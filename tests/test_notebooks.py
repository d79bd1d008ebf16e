"""The notebooks as they are stored, and what they define. `make notebooks` executes them."""

from __future__ import annotations

import ast
import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path):
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def source_of(cell):
    return "".join(cell["source"])


def test_there_are_six():
    assert [path.stem[:2] for path in NOTEBOOKS] == ["01", "02", "03", "04", "05", "06"]


@each_notebook
def test_it_ends_with_its_point(path):
    last = ast.parse(source_of(code_cells(path)[-1])).body[-1]
    assert isinstance(last, ast.Assert)


@each_notebook
def test_its_outputs_are_kept(path):
    cells = code_cells(path)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert outputs
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_stored_outputs_are_small():
    """`notebooks/matplotlibrc` keeps plots small; tables and pages of HTML are not stored."""
    assert sum(path.stat().st_size for path in NOTEBOOKS) < 500_000


@each_notebook
def test_the_list_of_notebooks_has_it(path):
    listed = (FOLDER / "README.md").read_text("utf-8")
    assert f"| [{path.stem}]({path.name}) |" in listed


@pytest.fixture(scope="module")
def loaders():
    """What those cells of notebook 04 define that read files; its first cell imports torch."""
    [path] = [path for path in NOTEBOOKS if path.stem.startswith("04")]
    namespace = {"torch": torch, "TensorDataset": torch.utils.data.TensorDataset}
    for name in ("read_idx", "load_fashion_mnist"):
        [source] = [s for s in map(source_of, code_cells(path)) if f"def {name}(" in s]
        exec(compile(source, f"{path.name}: {name}", "exec"), namespace)
    return namespace


@pytest.fixture(scope="module")
def read_idx(loaders):
    return loaders["read_idx"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all the examples of a property."""
    return tmp_path_factory.mktemp("idx")


def idx(array):
    """The array as the format has it."""
    code = CODES[array.dtype.str[1:]]
    head = struct.pack(f">4B{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def write(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


shapes = npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
arrays = st.sampled_from(sorted(CODES)).flatmap(lambda dtype: npst.arrays(dtype, shapes))
names = st.sampled_from(["plain", "packed.gz"])


@given(array=arrays, name=names)
def test_what_was_written_is_read(read_idx, folder, array, name):
    found = read_idx(write(folder / name, idx(array)))
    assert found.dtype == array.dtype and found.dtype.isnative
    np.testing.assert_array_equal(found, array, strict=True)


@given(array=arrays, name=names, data=st.data())
def test_a_file_of_any_other_length_is_an_error(read_idx, folder, array, name, data):
    whole = idx(array)
    length = data.draw(st.integers(0, len(whole) + 9).filter(lambda n: n != len(whole)))
    with pytest.raises(ValueError, match=f"{length} bytes" if length >= 4 else "no IDX file"):
        read_idx(write(folder / name, (whole + bytes(9))[:length]))


@given(array=arrays, code=st.integers(0, 255).filter(lambda code: code not in CODES.values()))
def test_an_unknown_type_is_an_error(read_idx, folder, array, code):
    content = bytearray(idx(array))
    content[2] = code
    with pytest.raises(ValueError, match=f"type code is 0x{code:02X}, but IDX has 0x08, 0x09"):
        read_idx(write(folder / "plain", content))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG and so on", "no IDX file: it begins with 89 50 4e 47"),
        (b"\0\1\x08\1\0\0\0\0", "no IDX file: it begins with 00 01 08 01"),
        (b"", "no IDX file: it begins with nothing"),
        (b"\0\0\x08\2\0\0\0\1", "the sizes of 2 dimensions end at byte 12, but there are 8 bytes"),
        (b"\0\0\x0b\1\0\0\0\2abc", r"shape \[2\] of 2-byte numbers ends at byte 12"),
        (gzip.compress(b"\0\0\x08\1\0\0\0\1a", mtime=0)[:-9], "cannot be unpacked"),
        (b"\x1f\x8b and so on", "cannot be unpacked"),
    ],
)
def test_errors_say_what_was_found(read_idx, tmp_path, content, message):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_idx(path)
    assert str(caught.value).startswith(f"{path}: ")


def fashion_mnist(folder, suffix):
    """Writes the four files, very small; returns what is in them."""
    written = []
    for part, num_samples in (("train", 6), ("t10k", 2)):
        images = np.random.default_rng(num_samples).integers(0, 256, (num_samples, 3, 4), "u1")
        labels = np.arange(num_samples, dtype="u1")
        write(folder / f"{part}-images-idx3-ubyte{suffix}", idx(images))
        write(folder / f"{part}-labels-idx1-ubyte{suffix}", idx(labels))
        written.append((images, labels))
    return written


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_fashion_mnist_is_read_packed_or_not(loaders, tmp_path, suffix):
    written = fashion_mnist(tmp_path, suffix)
    datasets = loaders["load_fashion_mnist"](str(tmp_path))
    assert [len(dataset) for dataset in datasets] == [6, 2]
    for dataset, (images, labels) in zip(datasets, written, strict=True):
        x, y = dataset[:]
        assert x.dtype == torch.float32 and y.dtype == torch.int64
        torch.testing.assert_close(x, torch.from_numpy(images) / 255)
        assert y.tolist() == labels.tolist()


def test_a_missing_file_is_named(loaders, tmp_path):
    fashion_mnist(tmp_path, ".gz")
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"t10k-labels-idx1-ubyte\.gz nor .*idx1-ubyte$"):
        loaders["load_fashion_mnist"](tmp_path)


def test_files_of_unlike_sets_are_an_error(loaders, tmp_path):
    fashion_mnist(tmp_path, "")
    write(tmp_path / "train-labels-idx1-ubyte", idx(np.zeros(5, "u1")))
    with pytest.raises(ValueError, match=r"train images have the shape \[6, 3, 4\] .* \[5\]"):
        loaders["load_fashion_mnist"](tmp_path)
