"""The files of a checkpoint: what is written is read, whatever is damaged is refused."""

import json

import numpy as np
import pytest
import tensorflow as tf

from pipeline.errors import CheckpointError
from pipeline.runtime.shards import Folder, commit, write_shard

ARRAYS = {
    "weights/0/0": np.arange(12, dtype="float32").reshape(3, 4),
    "weights/0/1": np.array(3, "int64"),
    "slots/0/0/m": tf.cast([1.5, -2.0], tf.bfloat16).numpy(),
    "slots/0/1/m": np.zeros([0, 2], "float16"),
    "optimizer/flag": np.array([True, False]),
}


def save(folder, token="a", factor=1):
    folder.mkdir(exist_ok=True)
    names = sorted(ARRAYS)
    shards = [
        write_shard(
            folder,
            f"{token}-{rank}.npz",
            [(n, (ARRAYS[n] * factor).astype(ARRAYS[n].dtype)) for n in part],
        )
        for rank, part in enumerate((names[:2], names[2:]))
    ]
    commit(folder, shards, [e for s in shards for e in s.entries], {"steps": factor})
    return folder


def test_what_was_written_is_read(tmp_path):
    folder = Folder(save(tmp_path / "saved"))
    assert folder.about == {"steps": 1} and set(folder.entries) == set(ARRAYS)
    for name, array in ARRAYS.items():
        read = folder.read(name)
        assert read.dtype == array.dtype and read.shape == array.shape
        assert (read == array).all()
    with pytest.raises(CheckpointError, match="has no weights/1/0"):
        folder.read("weights/1/0")


def test_a_new_one_takes_the_place_of_the_old_one(tmp_path):
    path = save(tmp_path / "saved")
    (path / ".left.unfinished").touch()
    save(path, "b", 2)
    assert sorted(p.name for p in path.iterdir()) == ["b-0.npz", "b-1.npz", "checkpoint.json"]
    assert Folder(path).about == {"steps": 2}
    # One that was never completed changes nothing.
    write_shard(path, "c-0.npz", ARRAYS.items())
    folder = Folder(path)
    assert folder.about == {"steps": 2}
    assert (folder.read("weights/0/0") == 2 * ARRAYS["weights/0/0"]).all()


def test_every_damaged_byte_is_found(tmp_path):
    """One byte at a time, all over all files."""
    path = save(tmp_path / "saved")
    accepted = []
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), 7):
            damaged = bytearray(content)
            damaged[place] ^= 0x21
            file.write_bytes(damaged)
            try:
                folder = Folder(path)
                for name in folder.entries:
                    folder.read(name)
                accepted.append((file.name, place))
            except CheckpointError as error:
                assert str(path) in str(error)
        file.write_bytes(content)
    assert accepted == []
    Folder(path).read("weights/0/0")


@pytest.mark.parametrize("length", [0, 1, 100, -1])
def test_files_that_were_cut_are_refused(tmp_path, length):
    path = save(tmp_path / "saved")
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            folder = Folder(path)
            for name in folder.entries:
                folder.read(name)
        file.write_bytes(content)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        Folder(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"has no file checkpoint\.json"):
        Folder(tmp_path)
    for text in (
        "",
        "[]",
        "{}",
        '{"format": 1}',
        "\x00\xff",
        '{"format": "pipeline checkpoint 1"}',
    ):
        (tmp_path / "checkpoint.json").write_text(text)
        with pytest.raises(CheckpointError, match="checkpoint"):
            Folder(tmp_path)


def test_a_manifest_cannot_lead_out_of_its_folder(tmp_path):
    path = save(tmp_path / "saved")
    outside = write_shard(tmp_path, "outside.npz", ARRAYS.items())
    for entry in outside.entries:
        entry.shard = "../outside.npz"
    outside.file = "../outside.npz"
    commit(path, [outside], outside.entries, {})
    with pytest.raises(CheckpointError, match="names a file"):
        Folder(path).read("weights/0/0")


def test_pickles_are_never_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return (print, ("this was unpickled",))

    array = np.array([Evil()], dtype=object)
    with pytest.raises((ValueError, TypeError)):
        write_shard(tmp_path, "a-0.npz", [("weights/0/0", array)])
    assert list(tmp_path.iterdir()) == []
    # Not even from a folder whose checksums all fit.
    np.savez(tmp_path / "evil.npz", **{"weights/0/0": array})
    shard = write_shard(tmp_path, "b-0.npz", [("weights/0/0", np.zeros(1))])
    (tmp_path / "b-0.npz").write_bytes((tmp_path / "evil.npz").read_bytes())
    from pipeline.runtime import shards

    shard.bytes = (tmp_path / "b-0.npz").stat().st_size
    shard.crc32 = shards._crc32(tmp_path / "b-0.npz")
    commit(tmp_path, [shard], shard.entries, {})
    with pytest.raises(CheckpointError, match="allow_pickle"):
        Folder(tmp_path).read("weights/0/0")


def test_the_manifest_is_plain_json(tmp_path):
    content = json.loads((save(tmp_path / "saved") / "checkpoint.json").read_text())
    assert content["format"] == "pipeline checkpoint 2"
    assert content["entries"]["slots/0/0/m"][:2] == ["bfloat16", [2]]
